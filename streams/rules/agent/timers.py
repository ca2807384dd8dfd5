"""When something of a trigger is due (E5, F5-F7, F9, and the waits of the site protocol).

A timer is never taken back: when it comes it is looked at whether its deadline still holds.
"""

from typing import Final, NamedTuple

from streams.rules import limits
from streams.rules.agent.rows import TriggerRow
from streams.rules.messages import TimerKind
from streams.rules.order import SECOND


class Deadline(NamedTuple):
    """When something of a trigger is due. ``rank``: leases, grace, retries, the rest (F9)."""

    at: int
    rank: int
    trigger_id: str
    kind: TimerKind


TIMER_RANK: Final[dict[TimerKind, int]] = {
    "lease": 0,
    "grace": 1,
    "retry": 2,
    "answer": 3,
    "reservation": 3,
    "available": 3,
    "expiry": 3,
    "forget": 3,
}


def lease_deadline(row: TriggerRow, silence_from: int | None) -> int:
    """When the attempt counts as lost unless there is a sign of life (F6)."""
    assert row.lease_until is not None and row.dispatched_at is not None
    if row.heartbeat_seconds is None:
        return row.lease_until
    heard_at = max(row.last_seen_at or row.dispatched_at, silence_from or 0)
    silent_at = heard_at + row.heartbeat_seconds * SECOND
    if row.lease_until > row.dispatched_at + (row.timeout_seconds + limits.LEASE_GRACE_SECONDS) * SECOND:
        return silent_at  # it lives by signs of life alone, whose deadline starts anew at take-over
    return min(row.lease_until, silent_at)


def deadlines_of(row: TriggerRow, silence_from: int | None) -> list[Deadline]:
    """When the trigger is next to be looked at, for every reason there is."""
    found: list[tuple[int, TimerKind]] = []
    if row.state == "running":
        found.append((lease_deadline(row, silence_from), "lease"))
        if row.grace_until is not None:
            found.append((row.grace_until, "grace"))
    elif row.state == "waiting":
        if not (row.place is None and row.is_blocked):
            found.append((row.available_at, "available" if row.place is None else "retry"))
        if row.answer_until is not None:
            found.append((row.answer_until, "answer"))
        if row.claim_state == "asking":
            assert row.asked_at is not None
            found.append((row.asked_at + limits.CLAIM_RESERVED_SECONDS * SECOND, "reservation"))
        if row.expires_at is not None:
            found.append((row.expires_at, "expiry"))
    return [Deadline(at, TIMER_RANK[kind], row.trigger_id, kind) for at, kind in found]
