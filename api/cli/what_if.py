"""``berth what-if``: recorded traffic through other limits, pools or gates."""

import json
from collections.abc import Callable
from typing import Annotated, Final, Literal, TypeVar
from urllib.parse import unquote

import typer
from rich.console import Console
from rich.table import Table

from api.cli.command_failed import NOTHING_RECORDED_EXIT_CODE, CommandFailed
from api.cli.log_reading import KEPT, decisions, instant
from streams.audit.as_of import as_json
from streams.audit.simulate import EVERY_AGENT, Change
from streams.audit.traffic import recorded
from streams.audit.what_if import Effect, Waiting, WhatIf
from streams.audit.what_if import what_if as compare
from streams.rules.limits import PARALLELISM_LIMIT_MAX, PARALLELISM_LIMIT_MIN, POOL_CAPACITY_MAX
from streams.rules.order import format_instant
from streams.rules.site.rows import GateScope
from streams.settings import load_settings

ROWS_MAX: Final = 20
DEFAULT_SITE: Final = "default"


def what_if(
    limit: Annotated[
        list[str] | None,
        typer.Option("--limit", help="AGENT=N or AGENT=unlimited; '*=N' for every other agent. May be repeated."),
    ] = None,
    capacity: Annotated[
        list[str] | None,
        typer.Option("--capacity", help="N workers at site default, or SITE=N. May be repeated."),
    ] = None,
    gate: Annotated[
        list[str] | None,
        typer.Option(
            "--gate",
            help="organization:NAME=open, department:NAME=closed, or SITE/… before it; / in a name is %2F. May be "
            "repeated.",
        ),
    ] = None,
    since: Annotated[str | None, typer.Option("--since", help="A time, or an age such as 2h; from the first.")] = None,
    until: Annotated[str, typer.Option("--until", help="A time, now, or an age such as 30m.")] = "now",
    as_json_object: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Replay recorded traffic with other limits, pools or gates, and show who waits less and who longer.

    The real deciders decide again, in simulated time: arrivals as they came, attempts as long as they took. It is
    compared with the same replay unchanged. Reads the log only: nothing is sent, no group or table is touched, and it
    may run beside the live service. What nobody can know is said at the end.
    """
    change = Change(
        _each_once("--limit", _limit, limit),
        _each_once("--capacity", _capacity, capacity),
        _each_once("--gate", _gate, gate),
    )
    if not (change.limits or change.capacities or change.gates):
        raise typer.BadParameter("say what is to be otherwise: --limit, --capacity or --gate")
    begin, end = 0 if since is None else instant(since), instant(until)
    if since is not None and begin >= end:
        raise typer.BadParameter("--since must be before --until")
    with decisions(load_settings()) as log:
        traffic = recorded(log, begin, end)
    traffic.until = min(traffic.until, max(traffic.last_at, begin))
    if not traffic.decisions:
        raise CommandFailed(
            "Nothing was decided in that time.",
            kept=KEPT,
            advice="choose another --since and --until.",
            exit_code=NOTHING_RECORDED_EXIT_CODE,
        )
    with Console(stderr=True).status("deciding it again"):
        found = compare(traffic, change)
    if as_json_object:
        typer.echo(json.dumps(as_json(found)))
    else:
        _print(found)


_Name = TypeVar("_Name")
_To = TypeVar("_To")


def _each_once(option: str, read: Callable[[str], tuple[_Name, _To]], texts: list[str] | None) -> dict[_Name, _To]:
    """What the option's texts say; the same thing twice can't be meant."""
    found: dict[_Name, _To] = {}
    first: dict[_Name, str] = {}
    for text in texts or ():
        name, to = read(text)
        if name in found:
            raise typer.BadParameter(
                f"{option} is given twice for the same: {first[name]!r} and {text!r}; leave one out"
            )
        found[name], first[name] = to, text
    return found


def _limit(text: str) -> tuple[str, int | Literal["unlimited"]]:
    agent_id, equals, value = text.rpartition("=")
    if equals and agent_id and value == "unlimited":
        return agent_id, "unlimited"
    if not (equals and agent_id and value.isdecimal()) or not (
        PARALLELISM_LIMIT_MIN <= int(value) <= PARALLELISM_LIMIT_MAX
    ):
        allowed = f"{PARALLELISM_LIMIT_MIN} to {PARALLELISM_LIMIT_MAX}, or unlimited"
        raise typer.BadParameter(f"--limit {text!r} must be AGENT=N ({EVERY_AGENT}=N: every other), N from {allowed}")
    return agent_id, int(value)


def _capacity(text: str) -> tuple[str, int]:
    site, _, value = text.rpartition("=")
    if not value.isdecimal() or int(value) > POOL_CAPACITY_MAX:
        raise typer.BadParameter(f"--capacity {text!r} must be N or SITE=N, from 0 to {POOL_CAPACITY_MAX}")
    return site or DEFAULT_SITE, int(value)


def _gate(text: str) -> tuple[tuple[str, GateScope, str], bool]:
    named, _, state = text.rpartition("=")
    site, slash, rest = named.partition("/")
    scope, _, name = (rest if slash else named).partition(":")
    if state not in ("open", "closed") or not name or scope not in ("organization", "department"):
        raise typer.BadParameter(f"--gate {text!r} must be organization:NAME=open, department:NAME=closed, or so")
    known: GateScope = "organization" if scope == "organization" else "department"
    return (unquote(site) if slash else DEFAULT_SITE, known, unquote(name)), state == "open"


# Text


def _print(found: WhatIf) -> None:
    console = Console()
    console.print(
        f"{format_instant(found.since)} to {format_instant(found.until)}: {found.decisions:,} decisions made again",
        highlight=False,
    )
    table = Table(box=None)
    for column in ("waiting, seconds", "triggers", "mean", "p50", "p95", "max", "not started"):
        table.add_column(column, justify="left" if column.startswith("waiting") else "right")
    for name, waiting in (
        ("recorded", found.recorded),
        ("replayed as it was", found.total.before),
        ("replayed changed", found.total.after),
    ):
        table.add_row(name, f"{waiting.triggers:,}", *_figures(waiting), f"{waiting.not_started:,}")
    console.print(table)
    _print_effects(console, "agent", found.agents)
    _print_effects(console, "organization", found.organizations)
    for site in found.sites:
        before, after = _percent(site.utilisation_before), _percent(site.utilisation_after)
        console.print(
            f"site {site.site}: {site.capacity_before} workers in use {before}, then {site.capacity_after}: {after}",
            highlight=False,
            markup=False,
        )
    for sentence in found.without_effect:
        console.print(f"without effect: {sentence}", highlight=False, markup=False)
    if found.unknown:
        console.print("\nWhat this can't know:", highlight=False)
    for unknown in found.unknown:
        console.print(f"  {unknown.count:,} {unknown.what}", highlight=False, markup=False)


def _print_effects(console: Console, kind: str, effects: tuple[Effect, ...]) -> None:
    if not effects:
        return
    table = Table(box=None)
    columns = (kind, "mean before", "after", "p95 before", "after", "waited less", "longer", "in use before", "after")
    for column in columns:
        table.add_column(column, justify="left" if column == kind else "right", overflow="fold")
    for effect in effects[:ROWS_MAX]:
        table.add_row(
            effect.name,
            f"{effect.before.mean:.1f}",
            f"{effect.after.mean:.1f}",
            f"{effect.before.p95:.1f}",
            f"{effect.after.p95:.1f}",
            f"{effect.gained:,}",
            f"{effect.lost:,}",
            _percent(effect.utilisation_before),
            _percent(effect.utilisation_after),
        )
    console.print(table, markup=False)
    if len(effects) > ROWS_MAX:
        console.print(f"and {len(effects) - ROWS_MAX:,} more with smaller changes (--json has all)", highlight=False)


def _figures(waiting: Waiting) -> tuple[str, ...]:
    return tuple(f"{figure:.1f}" for figure in (waiting.mean, waiting.p50, waiting.p95, waiting.max))


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"
