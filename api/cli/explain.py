"""``berth explain``: one trigger's life, and why it started before or after another."""

import json
from itertools import chain
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from api.cli.as_of import name_of, said
from api.cli.command_failed import CommandFailed
from api.cli.log_reading import KEPT, decisions
from streams.audit.as_of import as_json, is_instant
from streams.audit.causes import TriggerId
from streams.audit.explain import Explained, Explainer, Happened, InAll, Waited
from streams.audit.precedence import Comparison, Place, Precedence, Rule
from streams.rules.order import format_instant
from streams.settings import load_settings


def explain(
    agent: Annotated[str, typer.Argument(help="The agent's id.")],
    trigger: Annotated[str, typer.Argument(help="The trigger's id.")],
    other: Annotated[
        str | None, typer.Argument(help="Another trigger: why did the one start before the other?")
    ] = None,
    other_agent: Annotated[
        str | None, typer.Option("--other-agent", help="The other trigger's agent, when it is another one.")
    ] = None,
    as_json_object: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Show one trigger's life: what happened over all attempts, who acted, what it waited for and who held that.

    With a second trigger: which of the two started first, and what decided that. Reads the log of decisions of the
    agents named and of the sites, from its beginning. Changes nothing.
    """
    if other is None and other_agent is not None:
        raise typer.BadParameter("--other-agent is of a second trigger: name that too")
    one = TriggerId(agent, trigger)
    second = None if other is None else TriggerId(other_agent or agent, other)
    if second == one:
        raise typer.BadParameter(f"{trigger} of {agent} is named twice: the second trigger must be another one")
    agents = sorted({agent} if second is None else {agent, second.agent_id})
    explainer = Explainer(agent, trigger)
    comparison = Comparison(one, second) if second is not None else None
    with decisions(load_settings(), agents) as log:
        for logged in log:
            explainer.take(logged)
            if comparison is not None:
                comparison.take(logged)
    found = explainer.explained()
    if found is None:
        raise _unknown(one)
    if second is not None and comparison is not None and second not in comparison.received:
        raise _unknown(second)
    precedence = comparison.precedence() if comparison is not None else None
    if as_json_object:
        typer.echo(json.dumps(as_json({"explained": found, "precedence": precedence})))
        return
    _print(found)
    if precedence is not None:
        _print_precedence(precedence)
    elif second is not None:
        typer.echo(f"\nOf {trigger} and {second.trigger_id} neither has started, and at least one is not waiting.")


def _unknown(trigger: TriggerId) -> CommandFailed:
    return CommandFailed(
        f"No decision names trigger {trigger.trigger_id!r} of agent {trigger.agent_id!r}.",
        kept=KEPT,
        advice="check both ids. A record that could not be read at all is in berth.dead-letters.",
    )


def _print(found: Explained) -> None:
    console = Console()
    console.print(
        f"trigger {found.trigger_id} of {found.agent_id}, conversation {found.conversation_id}: {found.state}"
        f" (the log goes to {format_instant(found.at)})",
        highlight=False,
        markup=False,
    )
    table = Table(box=None)
    for column in ("at", "decision", "what", "by"):
        table.add_column(column, overflow="fold")
    for one in found.timeline:
        if isinstance(one, Happened):
            table.add_row(format_instant(one.at), str(one.seq), _happened(one), one.by)
        else:
            table.add_row(format_instant(one.from_at), "", _waited(one, found.at), "")
    console.print(table, markup=False)
    if found.in_all:
        console.print("\nwaited in all, where several causes may hold at the same time:", highlight=False)
    for total in found.in_all:
        console.print(f"  {total.seconds:,.3f} s  {total.reason}{_of_whom(total)}", highlight=False, markup=False)


def _happened(one: Happened) -> str:
    facts = ", ".join(
        f"{name} {_fact(name, value)}" for name, value in one.facts.items() if value not in (None, (), "")
    )
    return f"{one.what.replace('_', ' ')}{': ' if facts else ''}{facts}"


def _fact(name: str, value: Any) -> str:
    if is_instant(name) and isinstance(value, int):
        return format_instant(value)
    if name.endswith("_seconds") and isinstance(value, float):
        return f"{value:.3f}"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _waited(one: Waited, now: int) -> str:
    text = f"  waited {one.seconds(now):.3f} s"
    if one.stretches > 1:
        text += f" in {one.stretches} stretches"
    if one.to_at is None:
        text += f" until the last decision in the log, {format_instant(now)}"
    elif one.stretches > 1:
        text += f" until {format_instant(one.to_at)}"
    text += f": {one.reason}{_of_whom(one)}"
    for held in one.holders[:5]:
        text += f"\n    held by {name_of(held.holder)} from {format_instant(held.from_at)}"
        if held.to_at is not None and held.to_at != one.to_at:
            text += f" to {format_instant(held.to_at)}"
    if len(one.holders) > 5:
        text += f"\n    and by {len(one.holders) - 5} more (--json has all)"
    return text


def _of_whom(one: Waited | InAll) -> str:
    return "" if one.name is None else f" ({one.scope} {one.name} at site {one.site})"


_RULES: Final[dict[Rule, str]] = {
    "older_available_at": "it was available earlier",
    "older_created_at": "both were available at the same time, and it was created earlier",
    "smaller_id": "both were available and created at the same time, and its id comes first",
    "other_was_not_there": "the other had not been received",
    "other_had_ended": "the other had ended",
    "forced": "the other is older, but this one was forced",
    "other_could_not_start": "the other is older, but could not start then",
    "neither_started": "neither has started; this one is before the other in start order",
    "not_explained": "the log doesn't show what let it by: run berth verify",
}


def _print_precedence(found: Precedence) -> None:
    console = Console()
    started = "" if found.rule == "neither_started" else f" started first, at {format_instant(found.at)}"
    lines = chain(
        [f"\n{name_of(found.first)}{started}: {_RULES[found.rule]}."],
        (_place(one, place) for one, place in ((found.first, found.first_place), (found.second, found.second_place))),
        (f"  {found.second.trigger_id} waited then: {said(cause)}" for cause in found.causes),
    )
    for line in lines:
        console.print(line, highlight=False, markup=False)


def _place(one: TriggerId, place: Place | None) -> str:
    if place is None:
        return f"  {one.trigger_id}: no place in the order"
    available_at, created_at = format_instant(place.available_at), format_instant(place.created_at)
    return f"  {one.trigger_id}: available {available_at}, created {created_at}"
