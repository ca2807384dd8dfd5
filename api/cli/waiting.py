"""``berth waiting``: what held work up over a stretch of history, and when the work that waits now will start."""

import json
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from api.cli.command_failed import CommandFailed
from api.cli.log_reading import KEPT, decisions, instant
from streams.audit.as_of import as_json
from streams.audit.estimate import Estimate, History
from streams.audit.waiting import Dimension, WaitingOf, WaitingTimes
from streams.rules.order import SECOND, format_instant
from streams.settings import load_settings

ROWS_MAX: Final = 20

app = typer.Typer(
    help="What held work up, and when the work that waits now will start. Reads the log of decisions only.",
    no_args_is_help=True,
)


@app.command("causes")
def causes_command(
    since: Annotated[str | None, typer.Option("--since", help="A time, or an age such as 2h; from the first.")] = None,
    until: Annotated[str, typer.Option("--until", help="A time, now, or an age such as 30m.")] = "now",
    by: Annotated[
        str, typer.Option("--by", help="agent, organization or site: what is listed below the total.")
    ] = "agent",
    as_json_object: Annotated[bool, typer.Option("--json", help="Print one JSON object with all three.")] = False,
) -> None:
    """Show which causes made triggers wait, and for how long: the share of the agents' limits, of folders, of gates.

    At each moment a waiting trigger is counted under one cause, the first that the rules would name. What waits for its
    own time is listed apart.
    """
    dimension = _dimension(by)
    begin, end = 0 if since is None else instant(since), instant(until)
    if begin >= end:
        raise typer.BadParameter("--since must be before --until")
    times = WaitingTimes(begin, end)
    with decisions(load_settings(), until=end) as log:
        for logged in log:
            times.take(logged)
    times.finish()
    if as_json_object:
        found = {"all": times.total(), **{f"by_{name}": times.by(name) for name in _DIMENSIONS.values()}}
        typer.echo(json.dumps(as_json(found)))
        return
    if not times.times:
        typer.echo("Nothing waited in that time.")
        return
    console = Console()
    _print(console, times.total())
    found_by = times.by(dimension)
    for one in found_by[:ROWS_MAX]:
        _print(console, one, f"{dimension} ")
    if len(found_by) > ROWS_MAX:
        console.print(f"and {len(found_by) - ROWS_MAX:,} more that waited less (--json has all)", highlight=False)


@app.command("estimate")
def estimate_command(
    agent: Annotated[str | None, typer.Argument(help="One agent; without it all.")] = None,
    as_json_object: Annotated[bool, typer.Option("--json", help="Print one JSON array instead of text.")] = False,
) -> None:
    """Estimate when each waiting trigger will start, with a band into which four of five starts should fall.

    From how long recorded attempts took. What waits for a person, a gate, a budget or another conversation gets no time
    but its cause; so does what stands behind it in its own conversation.
    """
    history = History()
    with decisions(load_settings()) as log:
        for logged in log:
            history.take(logged)
    if agent is not None and agent not in history.past.agents:
        raise CommandFailed(
            f"Agent {agent!r} has no decision in the log.",
            kept=KEPT,
            advice="check its id: berth waiting estimate without one lists all that wait.",
        )
    at = max(instant("now"), history.past.at)
    found = [one for one in history.estimates(at) if agent in (None, one.agent_id)]
    if as_json_object:
        typer.echo(json.dumps(as_json(found)))
        return
    if not found:
        typer.echo("Nothing waits." if agent is None else f"Nothing of {agent} waits.")
        return
    table = Table(box=None)
    for column in ("agent", "", "trigger", "starts at", "between", "and", "waits for"):
        table.add_column(column, overflow="fold")
    for one in found:
        table.add_row(one.agent_id, f"{one.position}.", one.trigger_id, *_times(one, at), _waits_for(one, found))
    Console().print(table, markup=False)


_DIMENSIONS: Final[dict[str, Dimension]] = {"agent": "agent", "organization": "organization", "site": "site"}


def _dimension(text: str) -> Dimension:
    if text not in _DIMENSIONS:
        raise typer.BadParameter(f"--by {text!r} must be agent, organization or site")
    return _DIMENSIONS[text]


def _times(one: Estimate, at: int) -> tuple[str, str, str]:
    if one.starts_at is None or one.from_at is None or one.to_at is None:
        return "not known", "", ""
    starts, first, last = (
        f"{format_instant(moment)[11:19]} (in {(moment - at) / SECOND:.0f} s)"
        for moment in (one.starts_at, one.from_at, one.to_at)
    )
    return starts, first, last


def _waits_for(one: Estimate, found: list[Estimate]) -> str:
    """Its cause, and that of whom it is behind."""
    if one.behind is None:
        return one.reason or ""
    before = next((other for other in found if (other.agent_id, other.trigger_id) == (one.agent_id, one.behind)), None)
    its = "a person" if before is None else before.reason or "a site that has decided nothing"
    return f"{one.reason or 'conversation_busy'} (behind {one.behind}, which waits for {its})"


def _print(console: Console, found: WaitingOf, kind: str = "") -> None:
    console.print(f"{kind}{found.name}: {found.seconds:,.1f} s waited", highlight=False, markup=False)
    for share in found.shares:
        part = "apart" if share.share is None else f"{share.share:.0%}"
        console.print(f"  {part:>5} {share.reason}  {share.seconds:,.1f} s", highlight=False, markup=False)
