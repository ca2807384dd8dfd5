"""``berth as-of``: capacity, slots, queue, workers and folders as they were at a moment of the past."""

import json
from typing import Annotated, Any

import psycopg
import typer
from rich.console import Console
from rich.table import Table

from api.cli.command_failed import AWAY_EXIT_CODE, FAILED_EXIT_CODE, CommandFailed
from api.cli.log_reading import KEPT, decisions, decisions_of, instant
from projections import schema
from projections.past import INSTANT_MAX, SEQ_MAX, agent_past, everything_past
from streams.audit.as_of import AgentThen, AsOf, ClaimThen, SiteThen, agent_then, as_json, everything
from streams.audit.causes import Cause, Holder, TriggerId
from streams.audit.past import Past
from streams.rules.order import format_instant
from streams.settings import Settings, load_settings


def as_of(
    agent: Annotated[str | None, typer.Argument(help="One agent; without it all agents and sites.")] = None,
    at: Annotated[
        str | None, typer.Option("--at", help="A time with its zone, now, or an age: 2026-03-01T10:00:00Z, 90m, 2d.")
    ] = None,
    seq: Annotated[
        int | None, typer.Option("--seq", min=0, help="After this decision of the agent, by its number.")
    ] = None,
    from_log: Annotated[
        bool, typer.Option("--from-log", help="Read Kafka alone, from its beginning, and no tables.")
    ] = False,
    as_json_object: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Show what agents and sites looked like: who ran, who waited and why, who held which folder. Changes nothing.

    From the tables: snapshots and the decisions since; or with --from-log from Kafka alone. A cut by time is causal:
    what one agent or site shows was caused by nothing that another one doesn't show yet.
    """
    if seq is not None and (agent is None or at is not None):
        raise typer.BadParameter("--seq is the number of a decision of one AGENT, and stands without --at")
    settings = load_settings()
    moment = INSTANT_MAX if at is None and seq is not None else instant(at or "now")
    if at is not None and moment > instant("now"):
        raise typer.BadParameter(f"--at {at} is still to come: nothing is decided yet")
    if from_log and agent is None:
        found = _everything_from_log(settings, moment)
    elif from_log and agent is not None:
        found = _from_log(settings, agent, seq, moment)
    else:
        found = _from_tables(settings, agent, SEQ_MAX if seq is None else seq, moment)
    if as_json_object:
        typer.echo(json.dumps(as_json(found)))
    else:
        _print(found)


def _everything_from_log(settings: Settings, at: int) -> AsOf:
    past = Past()
    with decisions(settings, until=at) as log:
        for logged in log:
            past.fold(logged)
    return everything(past, at)


def _from_log(settings: Settings, agent_id: str, seq: int | None, at: int) -> AsOf:
    """The agent, with what its sites said by then; with ``seq`` alone, since that is no time of others."""
    past = Past()
    if seq is None:
        with decisions(settings, (agent_id,), at) as log:
            for logged in log:
                past.fold(logged)
    else:
        with decisions_of(settings, agent_id) as log:
            for logged in log:
                if logged.decision.seq > seq:
                    break
                past.fold(logged)
        at = past.at
    return _one(past, agent_id, at, seq)


def _from_tables(settings: Settings, agent_id: str | None, seq: int, at: int) -> AsOf:
    try:
        with schema.connect(settings.database_address()) as connection:
            if agent_id is None:
                past, _, left_out = everything_past(connection, at)
            else:
                past, newest, left_out = agent_past(connection, agent_id, seq, at)
                at = at if seq == SEQ_MAX else newest
    except psycopg.Error as failed:
        raise CommandFailed(
            f"The tables can't be read: {str(failed).strip()}.",
            kept="everything; the tables were only read.",
            advice="start PostgreSQL and the projector (berth up), or read the log alone: --from-log.",
            exit_code=AWAY_EXIT_CODE if isinstance(failed, psycopg.OperationalError) else FAILED_EXIT_CODE,
        ) from failed
    if left_out:
        Console(stderr=True).print(
            f"{left_out:,} decisions are left out: the projector has not applied what caused them yet", style="yellow"
        )
    return everything(past, at) if agent_id is None else _one(past, agent_id, at, None if seq == SEQ_MAX else seq)


def _one(past: Past, agent_id: str, at: int, seq: int | None) -> AsOf:
    agent = past.agents.get(agent_id)
    if agent is None:
        raise _unknown(agent_id)
    if seq is not None and agent.row.seq < seq:
        raise _not_decided(agent_id, seq, agent.row.seq, at)
    return AsOf(at, agent.row.seq, (agent_then(agent, at, past.sites),), ())


def _unknown(agent_id: str) -> CommandFailed:
    return CommandFailed(
        f"Agent {agent_id!r} had no decision by then.",
        kept=KEPT,
        advice="check its id and the time; berth as-of --at TIME lists all agents.",
    )


def _not_decided(agent_id: str, seq: int, last: int, at: int) -> CommandFailed:
    return CommandFailed(
        f"Agent {agent_id!r} has no decision {seq} yet: the last one that was found is {last}, "
        f"of {format_instant(at)}.",
        kept=KEPT,
        advice=f"ask for an earlier one (--seq {last}); where the tables are behind the log, --from-log knows more.",
    )


# Text


def _print(found: AsOf) -> None:
    console = Console()
    console.print(f"as of {format_instant(found.at)}, {found.decisions:,} decisions", highlight=False)
    for agent in found.agents:
        _print_agent(console, agent)
    for site in found.sites:
        _print_site(console, site)


def _print_agent(console: Console, agent: AgentThen) -> None:
    flags = [name for name in ("serial", "paused", "archived") if getattr(agent, name)]
    if agent.parked is not None:
        flags.append(f"parked: {agent.parked}")
    if agent.run_budget is not None:
        flags.append(f"run budget {agent.run_budget}")
    more = f" ({', '.join(flags)})" if flags else ""
    forced = f", {agent.forced} of them forced" if agent.forced else ""
    console.print(
        f"\nagent {agent.agent_id}, decision {agent.seq}: {agent.running} of {agent.limit} slots in use{forced}, "
        f"{len(agent.queue)} waiting{more}",
        highlight=False,
        markup=False,
    )
    table = Table(box=None)
    for column in ("", "trigger", "since", "why"):
        table.add_column(column, overflow="fold")
    for slot in agent.slots:
        place = [name for name, is_so in (("stopping", slot.stopping), ("forced", slot.forced)) if is_so]
        if slot.worker:
            place.append(f"a worker of {slot.site}")
        if slot.environment_id is not None:
            place.append(f"{slot.environment_id}:{slot.folder or '/'}")
        table.add_row(
            f"slot {slot.slot_number}",
            slot.trigger_id,
            format_instant(slot.since),
            ", ".join([f"attempt {slot.attempt}", *place]),
        )
    for waiting in agent.queue:
        why = "; ".join(map(said, waiting.causes)) or "about to start"
        table.add_row(f"{waiting.position}.", waiting.trigger_id, format_instant(waiting.accepted_at), why)
    for trigger_id in agent.paused_triggers:
        table.add_row("paused", trigger_id, "", "waits for a person")
    if table.row_count:
        console.print(table, markup=False)


def _print_site(console: Console, site: SiteThen) -> None:
    paused = " (paused)" if site.paused else ""
    console.print(
        f"\nsite {site.site}, decision {site.seq}: {site.workers_in_use} of {site.capacity} workers in use, "
        f"{len(site.waiting)} claims wait{paused}",
        highlight=False,
        markup=False,
    )
    for gate in site.gates:
        budget = "" if gate.run_budget is None else f", run budget {gate.run_budget}"
        state = "enabled" if gate.enabled else "disabled"
        console.print(f"  {gate.scope} {gate.name}: {state}{budget}", highlight=False, markup=False)
    table = Table(box=None)
    for column in ("", "agent", "trigger", "has, or waits for", "why"):
        table.add_column(column, overflow="fold")
    for claim in site.granted:
        table.add_row("has", claim.agent_id, claim.trigger_id, _needs(claim), "")
    for position, claim in enumerate(site.waiting, start=1):
        reason: Any = claim.reason or "site_asked"
        why = said(Cause(reason, "", holders=claim.holders, holders_count=len(claim.holders)))
        table.add_row(f"{position}.", claim.agent_id, claim.trigger_id, _needs(claim), why)
    if table.row_count:
        console.print(table, markup=False)


def _needs(claim: ClaimThen) -> str:
    needs = ["a worker"] if claim.worker else []
    if claim.environment_id is not None:
        needs.append(f"{claim.environment_id}:{claim.folder}" if claim.folder is not None else "no folder any more")
    return ", ".join(needs)


def said(cause: Cause) -> str:
    """One cause in words: its code, who holds what is missing, and when it ends by itself."""
    text: str = cause.reason
    if cause.until is not None:
        text += f" until {format_instant(cause.until)}"
    if cause.holders:
        shown = ", ".join(map(name_of, cause.holders[:3]))
        more = f" and {cause.holders_count - 3} more" if cause.holders_count > 3 else ""
        text += f" (held by {shown}{more})"
    return text


def name_of(holder: Holder | TriggerId) -> str:
    """A trigger, or the conversation that it stands for, and its agent."""
    if isinstance(holder, Holder) and holder.trigger_id is None:
        return f"conversation {holder.conversation_id} of {holder.agent_id}"
    return f"{holder.trigger_id} of {holder.agent_id}"
