"""``berth token``: a token for the HTTP API, signed with the configured secret or that of the data directory."""

from typing import Annotated, Final

import typer

from api.cli import local_secret
from api.cli.command_failed import CommandFailed
from api.cli.endpoints import listed
from api.http.auth import EVERY_AGENT, LIFETIME_HOURS_MAX, Authentication, Role
from streams.settings import Settings, load_settings

LOCAL_SUBJECT: Final = "local"
HOURS_DEFAULT: Final = 12.0


def token(
    *,
    role: Annotated[Role, typer.Option(help="What the bearer may do; docs/rights.md has the table.")] = "admin",
    subject: Annotated[str, typer.Option(help="Who the bearer is: the requester in the log.")] = LOCAL_SUBJECT,
    agents: Annotated[
        str, typer.Option(help="Ids of the agents that the bearer may see and use, separated by commas; *: all.")
    ] = EVERY_AGENT,
    hours: Annotated[
        float, typer.Option(help="How long it lives: up to 24, and up to 720 for runner, upstream and system.")
    ] = HOURS_DEFAULT,
    page: Annotated[
        bool, typer.Option("--page", help="Print the address of the page with the token in it, to open in a browser.")
    ] = False,
) -> None:
    """Print a token for the HTTP API: curl -H "Authorization: Bearer $(berth token)" http://127.0.0.1:8080/api/agents

    Who has it may do what its role and agents allow until it ends; it can't be taken back before. Without options it is
    an admin's for all agents. Signed with BERTH_JWT_SECRET, or with the secret that berth up keeps in .berth.
    """
    settings = load_settings()
    made = _issue(settings, subject, role, agents.split(","), hours)
    if not page:
        typer.echo(made)
        return
    address = listed(settings).get("api")
    if address is None:
        raise CommandFailed(
            f"No page is known: {settings.data_directory} names no API that runs.",
            kept="everything.",
            advice="start one with `berth api` in this directory (or all of Berth with `berth run`), then ask again.",
        )
    typer.echo(_address_with(address, made))


def page_address(settings: Settings, address: str) -> str:
    """The page's address, with a token in it that lets whoever opens it in. Raises SettingsRefused.

    The token is in the fragment, which browsers keep to themselves: no server and no log gets to see it. Where tokens
    are made elsewhere there is none in it, and the page asks for one.
    """
    if settings.jwt_public_key_file is not None:
        return f"{address}/"
    return _address_with(address, _issue(settings, LOCAL_SUBJECT, "admin", [EVERY_AGENT], LIFETIME_HOURS_MAX))


def _address_with(address: str, made: str) -> str:
    return f"{address}/#token={made}"


def _issue(settings: Settings, subject: str, role: Role, agents: list[str], hours: float) -> str:
    """A token. Raises SettingsRefused without a key, CommandFailed when it can't be made so."""
    authentication = Authentication.of(settings, local_secret.find(settings))
    try:
        return authentication.issue(subject, role, agents, hours)
    except ValueError as error:
        raise CommandFailed(
            f"No token was made: {error}.",
            kept="everything.",
            advice="berth token --help says what can be asked for; where tokens are made elsewhere, ask there.",
        ) from error
