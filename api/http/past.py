"""An agent as it was: slots and queue after one of its decisions, or at a time, in the same form as they are now.

From the tables, as ``berth as-of`` reads them: a snapshot and the decisions since. The texts of people are no part of
any decision: what is still kept of them is shown, as of everything else that is read.

How far back and how far on one may look is said, not guessed: before the agent was made there was nothing, and what is
not decided yet, or not applied to the tables, nobody knows.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from psycopg.rows import DictRow

from api.http import views
from api.http.database import Database, Reading
from api.http.positions import LogPosition
from api.http.problems import Problem, invalid, unknown_agent
from projections.past import INSTANT_MAX, SEQ_MAX, questions_of_agent
from streams.audit.causes import causes
from streams.audit.folded_facts import FoldedFacts
from streams.rules.agent.rows import TriggerRow
from streams.rules.agent.state import Agent
from streams.rules.order import OrderKey, format_instant, instant_of, moment_of, parse_instant
from streams.rules.site.state import Site

_SEQ_DIGITS_MAX: Final = 16


class Moment(NamedTuple):
    """A decision of the agent by its number, or an instant."""

    seq: int | None
    at: int | None

    def __str__(self) -> str:
        return f"decision {self.seq}" if self.at is None else format_instant(self.at)


class AgentThen(NamedTuple):
    """``at``: the instant that was asked for, or that of the decision."""

    agent: Agent
    sites: Mapping[str, Site]
    at: int

    @property
    def as_of(self) -> dict[str, Any]:
        return {"seq": self.agent.row.seq, "at": format_instant(self.at)}


def read_moment(text: str) -> Moment:
    """A time, or the number of a decision. Raises Problem."""
    if text.isascii() and text.isdecimal() and len(text) <= _SEQ_DIGITS_MAX:
        return Moment(int(text), None)
    try:
        return Moment(None, parse_instant(text))
    except ValueError as error:
        detail = f"as_of {error}, or the number of a decision of the agent. In an address + is written %2B."
        raise invalid("invalid_field", "as_of", detail) from None


async def capacity(
    database: Database, agent_id: str, moment: Moment, min_position: LogPosition | None
) -> dict[str, Any]:
    """The agent's slots then. Raises Problem, and as ``Database.reading``."""
    async with database.looking_back(min_position) as reading:
        then = await _agent_then(reading, agent_id, moment)
        running = [then.agent.triggers[trigger_id] for trigger_id in then.agent.executions.values()]
        previews = await reading.rows(
            "message_previews", agent_id=agent_id, trigger_ids=[row.trigger_id for row in running]
        )
    texts = {row["trigger_id"]: row["message_preview"] for row in previews}
    slots = sorted(
        (_slot(row, texts.get(row.trigger_id)) for row in running),
        key=lambda slot: (slot["slot_number"], slot["execution_id"]),
    )
    agent = then.agent
    row = {
        "agent_id": agent_id,
        "max_parallel": agent.limit,
        "running": agent.running,
        "forced": agent.forced_running,
        "waiting": len(agent.waiting),
        "paused": agent.row.paused,
        "is_serial": agent.is_serial,
    }
    return {**views.capacity(row, slots, moment_of(then.at)), "as_of": then.as_of}


async def queue(
    database: Database,
    agent_id: str,
    moment: Moment,
    min_position: LogPosition | None,
    rows: int,
    cursor: str | None,
) -> dict[str, Any]:
    """A page of the agent's waiting triggers then. Raises as ``capacity``."""
    after = None if cursor is None else _read_cursor(cursor)
    async with database.looking_back(min_position) as reading:
        then = await _agent_then(reading, agent_id, moment)
    return await asyncio.to_thread(_queue_page, then, after, rows)  # of a long queue it takes a while


def _queue_page(then: AgentThen, after: OrderKey | None, rows: int) -> dict[str, Any]:
    agent = then.agent
    facts = FoldedFacts(agent, then.sites, {agent.agent_id: agent}, knows_all=False)
    passed = 0 if after is None else agent.waiting.bisect_right(after)
    page = [agent.triggers[key.id.decode()] for key in agent.waiting[passed : passed + rows]]
    queued = []
    for position, row in enumerate(page, start=passed + 1):
        reasons = [cause.reason for cause in causes(facts, row, then.at)]
        queued.append(views.queued_for(reasons, _queued(agent, row), position))
    following = None
    if len(page) == rows:
        last = page[-1]
        following = views.cursor(moment_of(last.available_at), moment_of(last.created_at), last.trigger_id)
    return {
        "agent_id": agent.agent_id,
        "waiting": len(agent.waiting),
        "queue": queued,
        "next_cursor": following,
        "as_of": then.as_of,
    }


async def _agent_then(reading: Reading, agent_id: str, moment: Moment) -> AgentThen:
    newest = await reading.row("newest_decision_of_agent", agent_id=agent_id)
    if newest is None or newest["created_at"] is None:
        raise unknown_agent(agent_id)
    _check_end(agent_id, moment, newest)
    seq = SEQ_MAX if moment.seq is None else moment.seq
    found = await reading.answered(questions_of_agent(agent_id, seq, INSTANT_MAX if moment.at is None else moment.at))
    agent = found.past.agents.get(agent_id)
    if agent is None or not agent.row.created:
        made_at = views.instant(newest["created_at"])
        raise Problem(
            404,
            "agent_not_made_yet",
            f"Agent {agent_id!r} was made at {made_at}: as of {moment} it wasn't there. Ask for a later moment.",
            members={"created_at": made_at},
        )
    return AgentThen(agent, found.past.sites, found.at if moment.at is None else moment.at)


def _check_end(agent_id: str, moment: Moment, newest: DictRow) -> None:
    """Raise Problem for what isn't decided, or not in the tables."""
    seq, at = newest["seq"], views.instant(newest["decided_at"])
    members = {"seq": seq, "at": at}
    last = f"The last decision of agent {agent_id!r} in the tables is {seq}, of {at}"
    if moment.seq is not None and moment.seq > seq:
        raise Problem(
            404,
            "not_decided_yet",
            f"{last}; there is none with the number {moment.seq} yet. Ask for an earlier one; or, if it is in the log "
            "already, with the min_position of the write that it answered.",
            members=members,
        )
    if moment.at is not None and moment_of(moment.at) > max(views.now(), newest["decided_at"]):
        raise Problem(
            404,
            "not_decided_yet",
            f"{moment} is still to come. {last}. Leave as_of out to see how it is now.",
            members=members,
        )


def _slot(row: TriggerRow, preview: str | None) -> dict[str, Any]:
    assert row.dispatched_at is not None
    return {
        "slot_number": row.slot_number,
        "execution_id": row.execution_id,
        "trigger_id": row.trigger_id,
        "conversation_id": row.conversation_id,
        "attempt": row.attempt,
        "forced": row.forced,
        "dispatched_at": moment_of(row.dispatched_at),
        "message_preview": preview,
    }


def _queued(agent: Agent, row: TriggerRow) -> dict[str, Any]:
    fields = {name: getattr(row, name) for name in views.QUEUED_FIELDS}
    instants = {name: moment_of(at) for name, at in fields.items() if name.endswith("_at") and at is not None}
    head = agent.head(row.conversation_id)
    return {**fields, **instants, "head_trigger_id": None if head is None else head.trigger_id}


def _read_cursor(cursor: str) -> OrderKey:
    available_at, created_at, trigger_id = views.read_cursor(cursor, 3)
    instants = [views.read_instant_of_cursor(text) for text in (available_at, created_at)]
    if any(instant.tzinfo is None for instant in instants):
        raise invalid("invalid_field", "cursor", "cursor must be a next_cursor that this service gave.")
    first, second = (instant_of(instant) for instant in instants)
    return OrderKey(first, second, trigger_id.encode())
