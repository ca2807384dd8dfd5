"""The API as operators' commands ask it: where it is, with which token, in pages, and what its refusals mean.

Where: ``BERTH_API``, else the API that runs in this data directory, else 127.0.0.1:8080. The token is ``BERTH_TOKEN``;
without it one is made that lives some minutes, signed with the secret of this directory or ``BERTH_JWT_SECRET``. Such a
token is an admin's, so it is sent to this machine only: whoever names another one also says with which token. Where
none can be made the API is asked without, and says itself that it needs one.

Whatever goes wrong becomes a ``Refused``: the API's problem (docs/errors.md) with its code, or that nobody answers,
with what was kept and what to do. With ``--json`` it is printed as JSON on standard error.
"""

import ipaddress
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Final, Literal, Self
from urllib.parse import quote

import httpx
import typer

from api.cli import local_secret
from api.cli.command_failed import CommandFailed
from api.cli.endpoints import listed
from api.cli.tables import plain
from api.cli.token import LOCAL_SUBJECT
from api.http.auth import EVERY_AGENT, Authentication
from streams.settings import Settings, SettingsRefused, load_settings

DEFAULT_ADDRESS: Final = "http://127.0.0.1:8080"
ANSWER_SECONDS_MAX: Final = 15.0
"""The API answers every request within 5 s; the rest is the way there and back."""
CONNECT_SECONDS_MAX: Final = 5.0
TOKEN_HOURS: Final = 0.1
PAGE_ROWS_MAX: Final = 1_000
FAILED_EXIT_CODE: Final = 1

Json = dict[str, Any]
Method = Literal["GET", "PUT", "PATCH", "POST", "DELETE"]

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print the API's answer as one JSON object (docs/http-api.md) instead of text.")
]
RowsOption = Annotated[int, typer.Option("--rows", min=1, help="Show so many rows at most.")]
ROWS_DEFAULT: Final = 100


class Refused(CommandFailed):
    """What was asked was not done. ``problem``: the same for programs, with ``code`` and ``detail``."""

    def __init__(self, happened: str, *, kept: str, advice: str, problem: Mapping[str, Any]) -> None:
        super().__init__(happened, kept=kept, advice=advice)
        self.problem = {**problem, "kept": kept, "advice": advice}


@contextmanager
def asking(as_json: bool) -> Iterator["Api"]:
    """The API of this environment, while the block runs. Raises Refused; with ``as_json`` that is printed as JSON."""
    try:
        with Api.of(load_settings()) as api:
            yield api
    except Refused as refused:
        if not as_json:
            raise
        typer.echo(json.dumps(refused.problem), err=True)
        raise typer.Exit(FAILED_EXIT_CODE) from None


class Api:
    """One API and one token. Parts of paths are ids and words as they are; they are encoded here."""

    def __init__(self, address: str, why: str, token: str | None) -> None:
        """``why``: how it comes that this address is asked."""
        self._address = address
        self._why = why
        self._http = httpx.Client(
            base_url=address,
            headers={} if token is None else {"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(ANSWER_SECONDS_MAX, connect=CONNECT_SECONDS_MAX),
            trust_env=not _is_this_machine(httpx.URL(address).host),  # no proxy can reach this machine's own addresses
        )

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """As the environment and the data directory say. Raises SettingsRefused, CommandFailed."""
        address, why = _address(settings)
        return cls(address, why, _token(settings, address))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def read(self, *path: str, **query: str | int | None) -> Json:
        """What is there. Raises Refused."""
        given = {name: value for name, value in query.items() if value is not None}
        return self._ask("GET", path, query=given)

    def pages(self, rows_name: str, *path: str, rows: int) -> Json:
        """An answer whose list ``rows_name`` goes on over pages, up to ``rows`` rows of it, in one. Raises Refused.

        ``next_cursor`` stays what it was on the last page that was read: null when there are no more rows.
        """
        answer = self.read(*path, limit=min(rows, PAGE_ROWS_MAX))
        while answer["next_cursor"] is not None and (missing := rows - len(answer[rows_name])) > 0:
            page = self.read(*path, limit=min(missing, PAGE_ROWS_MAX), cursor=answer["next_cursor"])
            answer = {**answer, rows_name: [*answer[rows_name], *page[rows_name]], "next_cursor": page["next_cursor"]}
        return answer

    def write(self, method: Method, *path: str, body: Json | None = None) -> Json:
        """Change something; what the log decided. Raises Refused."""
        return self._ask(method, path, body=body)

    def _ask(
        self, method: Method, path: tuple[str, ...], *, query: Mapping[str, str | int] | None = None, body: Any = None
    ) -> Json:
        where = "/".join(("/api", *map(segment, path)))
        try:
            answer = self._http.request(method, where, params=query, json=body)
        except httpx.RequestError as error:
            raise _not_reached(method, self._address, self._why, error) from error
        content = _content(answer)
        if not answer.is_success or content is None:
            raise refusal(method, self._address, answer.status_code, content)
        return content


def segment(text: str) -> str:
    """An id or word as a part of a path. Raises typer.BadParameter."""
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        raise typer.BadParameter("an id must be UTF-8") from None
    if not encoded:
        raise typer.BadParameter("an id has at least one character")
    if text in _READ_OTHERWISE:
        return "".join(f"%{byte:02X}" for byte in encoded)
    return quote(encoded, safe="")


_READ_OTHERWISE: Final = (".", "..", "slots")
"""Ids that mean something else in a path unless every character of them is encoded."""


# -- where, and who asks ----------------------------------------------------------------------------------------------


def _address(settings: Settings) -> tuple[str, str]:
    """The API's address, and how it comes to be that one."""
    if settings.api is not None:
        try:
            httpx.URL(settings.api)
        except httpx.InvalidURL as error:
            detail = f"BERTH_API={settings.api} is no address: {error}"
            advice = "set it to http://host:port, or unset it."
            raise _nothing_asked("api_not_reached", detail, advice) from error
        return settings.api.rstrip("/"), "BERTH_API names it"
    running = listed(settings).get("api")
    if running is not None:
        return running, f"{settings.data_directory} names it as the one that runs"
    return DEFAULT_ADDRESS, f"the usual address: BERTH_API isn't set and {settings.data_directory} names no API"


def _token(settings: Settings, address: str) -> str | None:
    if settings.token is not None:
        token = settings.token.get_secret_value().strip()
        if not token.isascii() or not token.isprintable() or " " in token or not token:
            raise SettingsRefused("BERTH_TOKEN is no token.", 'set it to what `berth token` prints: "$(berth token)".')
        return token
    if settings.jwt_public_key_file is not None:
        return None  # tokens are made elsewhere
    secret = local_secret.find(settings)
    if settings.jwt_secret is None and secret is None:
        return None
    if not _is_this_machine(httpx.URL(address).host):
        detail = (
            f"No token to ask {address} with: BERTH_TOKEN isn't set, and one made with the secret here isn't sent to "
            "another machine"
        )
        raise _nothing_asked("token_required", detail, ADVICE["token_required"])
    return Authentication.of(settings, secret).issue(LOCAL_SUBJECT, "admin", [EVERY_AGENT], TOKEN_HOURS)


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _nothing_asked(code: str, detail: str, advice: str) -> Refused:
    kept = "everything; nothing was asked."
    return Refused(f"{detail}.", kept=kept, advice=advice, problem={"code": code, "detail": detail})


# -- what goes wrong --------------------------------------------------------------------------------------------------

_ONLY_READ: Final = "everything; this only reads."
_NOTHING_CHANGED: Final = "everything; nothing was changed."
_UNCERTAIN: Final = "everything that is there. Whether this took effect as well isn't known."

_OTHER_RIGHTS: Final = (
    'use another token: export BERTH_TOKEN="$(berth token)" where the API runs, or ask whoever makes tokens. '
    "berth token --help says what one may be; docs/rights.md who may what."
)
_AGAIN: Final = "run it again in a moment; what is so already stays so. berth doctor says what is wrong here."
_LOOK_AT_IDS: Final = "look at the id: it must be exactly as it was given, with upper and lower case."

ADVICE: Final[Mapping[str, str]] = {
    "token_required": _OTHER_RIGHTS,
    "token_expired": _OTHER_RIGHTS,
    "token_refused": _OTHER_RIGHTS,
    "access_denied": _OTHER_RIGHTS,
    "person_required": _OTHER_RIGHTS,
    "owner_required": _OTHER_RIGHTS,
    "role_required": _OTHER_RIGHTS,
    "agent_not_found": f"{_LOOK_AT_IDS} berth agents lists the agents there are.",
    "trigger_unknown": f"{_LOOK_AT_IDS} berth queue and berth conversation list triggers.",
    "conversation_unknown": f"{_LOOK_AT_IDS} berth queue lists triggers with their conversations.",
    "site_unknown": f"{_LOOK_AT_IDS} berth site lists the sites there are.",
    "dead_letter_unknown": "berth dead-letters list shows those there are.",
    "dead_letter_not_replayable": "correct what its sender does, and let it send a new record.",
    "agent_archived": "configuring the agent brings it back: PUT /api/agents/{agent_id}.",
    "agent_parallelism_limit_unsupported": "a serial agent runs one at a time; make it no longer serial first.",
    "log_unavailable": _AGAIN,
    "request_expired": _AGAIN,
    "site_not_answering": _AGAIN,
    "database_unavailable": _AGAIN,
    "owner_unknown": _AGAIN,
    "projection_behind": _AGAIN,
    "first_answer_unavailable": _AGAIN,
    "internal_error": "look for the incident in the API's log, and report it: this is a bug.",
    "host_not_served": "ask by a name that the API knows, or let its BERTH_API_HOSTS name this one.",
}
"""What to do, by code, for somebody with a command line."""


def refusal(method: Method, address: str, status: int, content: Json | None) -> Refused:
    """What an answer means that isn't the one asked for. ``content``: its JSON object, None when it has none."""
    kept = _ONLY_READ if method == "GET" else _NOTHING_CHANGED if status < 500 else _UNCERTAIN
    if content is None or "code" not in content or "detail" not in content:
        detail = f"What answers at {address} is not Berth's API, or something before it refused (HTTP {status})"
        return Refused(
            f"{detail}.",
            kept=_ONLY_READ if method == "GET" else _UNCERTAIN,
            advice="look at what listens there, or give the API's address: BERTH_API=http://host:port.",
            problem={"code": "api_not_reached", "status": status, "detail": detail},
        )
    code, happened = str(content["code"]), plain(str(content["detail"]))
    if "incident" in content:
        happened += f" incident: {content['incident']}"
    advice = ADVICE.get(code, "correct it and run it again; docs/errors.md says what each code means.")
    return Refused(f"{happened}\n({code}, HTTP {status})", kept=kept, advice=advice, problem=content)


def _not_reached(method: Method, address: str, why: str, error: httpx.RequestError) -> Refused:
    if isinstance(error, httpx.TimeoutException):
        reason = "no answer in time"
    else:
        cause: BaseException = error
        while cause.__context__ is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        reason = cause.strerror or str(error) if isinstance(cause, OSError) else str(error) or type(error).__name__
    detail = f"The API can't be reached at {address} ({why}): {reason}"
    never_sent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
    return Refused(
        f"{detail}.",
        kept=_ONLY_READ if method == "GET" else _NOTHING_CHANGED if never_sent else _UNCERTAIN,
        advice="start it (berth run, or berth api), or say where it is: BERTH_API=http://host:port. berth doctor looks "
        "at the whole installation.",
        problem={"code": "api_not_reached", "detail": detail},
    )


def _content(answer: httpx.Response) -> Json | None:
    """The JSON object of an answer."""
    try:
        content = answer.json()
    except ValueError:
        return None
    return content if isinstance(content, dict) else None
