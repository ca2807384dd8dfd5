"""Why a trigger waits: every cause that holds now, computed from stored facts when somebody asks.

Pure: rows of the projections and the time in, causes out, in the order in which the rules look at them. The first one
is the reason that lists show. None of them holds: the trigger is about to start.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from streams.rules.limits import HOLDERS_MAX

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Holder:
    """A trigger that has what this one waits for. ``since``: when it got it."""

    trigger_id: str
    execution_id: str | None
    since: datetime

    @classmethod
    def of_slot(cls, slot: Row) -> "Holder":
        return cls(slot["trigger_id"], slot["execution_id"], slot["dispatched_at"])


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause of waiting. ``since``: from when on it held this trigger up; ``until``: when it ends by itself."""

    reason: str
    released_by: str
    since: datetime | None = None
    until: datetime | None = None
    holders: tuple[Holder, ...] = ()
    holders_count: int = 0


def causes(
    agent: Row, trigger: Row, now: datetime, slots: Sequence[Row] = (), held_since: datetime | None = None
) -> list[Cause]:
    """Every cause for which a waiting trigger waits.

    ``slots``: the agent's running attempts, for who holds them; ``held_since``: when the agent was paused or parked.
    """
    found: list[Cause] = []
    since = trigger["state_since"]
    if agent["paused"]:
        found.append(Cause("agent_paused", "resuming the agent", _later(held_since, since)))
    if agent["parked"] is not None:
        found.append(Cause("agent_parked", "configuring the agent again", _later(held_since, since)))
    head = trigger["head_trigger_id"]
    if head is not None and head != trigger["trigger_id"]:
        holder = Holder(head, trigger["head_execution_id"], trigger["head_state_since"])
        released_by = f"the end of {head}, which is {trigger['head_state']} and before it in the conversation"
        found.append(Cause("conversation_busy", released_by, _later(holder.since, since), None, (holder,), 1))
    if trigger["available_at"] > now:
        retry = "the time of its next attempt" if trigger["attempt"] else "the time from which it may start"
        found.append(Cause("not_yet_available", retry, since, trigger["available_at"]))
    limit, running = agent["max_parallel"], agent["running"]
    if limit is not None and running >= limit:
        found.append(
            Cause(
                "agent_parallelism_limit_reached",
                "the end of a running attempt, or a higher limit"
                if running == limit
                else f"the end of {running - limit + 1} running attempts, or a higher limit",
                _later(max((slot["dispatched_at"] for slot in slots), default=None), since),
                None,
                tuple(map(Holder.of_slot, sorted(slots, key=lambda slot: slot["dispatched_at"])[:HOLDERS_MAX])),
                running,
            )
        )
    return found


def _later(cause: datetime | None, trigger: datetime) -> datetime | None:
    """A cause holds a trigger up from when both are there; None when the cause's own beginning isn't known."""
    return None if cause is None else max(cause, trigger)
