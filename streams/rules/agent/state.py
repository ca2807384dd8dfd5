"""The state of one agent: its rows, and the indexes derived from them.

Derived indexes, so that no step scans the queue (each is rebuilt from the rows on restore):

waiting    every waiting trigger by key; its rank is the position in the queue.
unplaced   waiting triggers that have no place in their conversation yet (not yet available), by key.
lines      conversation -> its live triggers; those placed, in the order of their places. The first is the head.
ready      the waiting heads by key. A head whose retry is due later sorts behind the present, since the key begins
           with available_at.
executions current attempts (running or being stopped) -> trigger.
slots      numbers of the slots in use, and the free ones below the highest.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from sortedcontainers import SortedList

from streams.rules import events, limits
from streams.rules.agent.rows import (
    AgentRow,
    ConversationRow,
    Outcome,
    RememberedKind,
    RememberedRow,
    TriggerRow,
)
from streams.rules.messages import TimerKind
from streams.rules.order import SECOND, OrderKey

DIGEST_DIGITS: Final = 32
OUTCOME_OF: Final[dict[events.FinalState, Outcome]] = {
    "finished": "finished",
    "failed": "failed",
    "stopped": "stopped",
    "expired": "stopped",
}

RowKind = Literal["agent", "trigger", "conversation", "remembered"]


class RowRef(NamedTuple):
    """Which row of the agent changed."""

    kind: RowKind
    id: str = ""
    remembered: RememberedKind | None = None


class Deadline(NamedTuple):
    """When something of a trigger is due. ``rank``: leases, grace, retries, the rest (F9)."""

    at: int
    rank: int
    trigger_id: str
    kind: TimerKind


TIMER_RANK: Final[dict[TimerKind, int]] = {"lease": 0, "grace": 1, "retry": 2, "available": 3, "expiry": 3, "forget": 3}


@dataclass(slots=True)
class Line:
    """The live triggers of one conversation."""

    placed: list[tuple[tuple[int, int], str]] = field(default_factory=list)
    unplaced: set[str] | None = None
    """None while it is empty, as it is for most conversations: 200 bytes less for each."""

    @property
    def head(self) -> str | None:
        return self.placed[0][1] if self.placed else None

    def __len__(self) -> int:
        return len(self.placed) + len(self.unplaced or ())

    def add_unplaced(self, trigger_id: str) -> None:
        if self.unplaced is None:
            self.unplaced = set()
        self.unplaced.add(trigger_id)

    def discard_unplaced(self, trigger_id: str) -> None:
        if self.unplaced is not None:
            self.unplaced.discard(trigger_id)
            if not self.unplaced:
                self.unplaced = None


class Agent:
    """One agent's rows and indexes. Only evolve.py and the loading functions change it."""

    __slots__ = (
        "agent_id",
        "changed",
        "conversations",
        "deadlines",
        "ended",
        "executions",
        "forced_running",
        "free_slots",
        "highest_slot",
        "lines",
        "payload_bytes",
        "ready",
        "remembered",
        "row",
        "silence_from",
        "triggers",
        "unplaced",
        "waiting",
    )

    def __init__(self, agent_id: str) -> None:
        self.agent_id = agent_id
        self.row = AgentRow()
        self.triggers: dict[str, TriggerRow] = {}
        self.conversations: dict[str, ConversationRow] = {}
        """By the time of the last outcome, oldest first."""
        self.remembered: dict[tuple[RememberedKind, str], RememberedRow] = {}
        """By the time they were settled, oldest first."""
        self.lines: dict[str, Line] = {}
        self.waiting: SortedList[OrderKey] = SortedList()
        self.unplaced: SortedList[OrderKey] = SortedList()
        self.ready: SortedList[OrderKey] = SortedList()
        self.executions: dict[str, str] = {}
        self.payload_bytes = 0
        self.forced_running = 0
        self.highest_slot = 0
        self.free_slots: list[int] = []
        self.silence_from: int | None = None
        """Heartbeats are missed from here on only: silence while nobody read the statuses is no silence (F9)."""
        self.changed: dict[RowRef, None] = {}
        """Rows to be written, in the order of their first change; whoever writes them clears it."""
        self.deadlines: list[Deadline] = []
        """Deadlines that came up; whoever keeps the timers takes them."""
        self.ended: list[str] = []
        """Triggers that became final; whoever keeps their texts takes them."""

    # What deciders ask

    @property
    def running(self) -> int:
        return len(self.executions)

    @property
    def limit(self) -> int | None:
        """The effective limit (A1, A4); None: unlimited."""
        if self.row.serial:
            return 1
        return None if self.row.parallelism_limit == "unlimited" else self.row.parallelism_limit

    @property
    def has_room(self) -> bool:
        limit = self.limit
        return limit is None or self.running < limit

    @property
    def held_back(self) -> bool:
        """Nothing of it may be dispatched, whatever room there is."""
        return self.row.paused or self.row.archived or self.row.parked is not None

    def head(self, conversation_id: str) -> TriggerRow | None:
        line = self.lines.get(conversation_id)
        head = line.head if line else None
        return self.triggers[head] if head is not None else None

    def live_triggers(self, conversation_id: str) -> Iterator[str]:
        """Ids of the conversation's live triggers: the placed ones by place, then the others by id."""
        line = self.lines.get(conversation_id)
        if line:
            yield from (trigger_id for _, trigger_id in line.placed)
            yield from sorted(line.unplaced or ())

    def position(self, key: OrderKey) -> int:
        """From 1, in start order among those that wait."""
        return int(self.waiting.bisect_left(key)) + 1

    def free_slot(self) -> int:
        """The lowest free slot number, from 1."""
        return self.free_slots[0] if self.free_slots else self.highest_slot + 1

    def lease_deadline(self, row: TriggerRow) -> int:
        """When the attempt counts as lost unless there is a sign of life (F6)."""
        assert row.lease_until is not None and row.dispatched_at is not None
        if row.heartbeat_seconds is None:
            return row.lease_until
        heard_at = max(row.last_seen_at or row.dispatched_at, self.silence_from or 0)
        silent_at = heard_at + row.heartbeat_seconds * SECOND
        if row.lease_until > row.dispatched_at + (row.timeout_seconds + limits.LEASE_GRACE_SECONDS) * SECOND:
            return silent_at  # it lives by signs of life alone, whose deadline starts anew at take-over
        return min(row.lease_until, silent_at)

    def is_due(self, deadline: Deadline) -> bool:
        """Whether this deadline still holds: a timer is never taken back, it is looked at when it comes."""
        if deadline.kind == "forget":
            return self.next_forget_at() == deadline.at
        row = self.triggers.get(deadline.trigger_id)
        return row is not None and deadline in self.deadlines_of(row)

    def next_forget_at(self) -> int | None:
        """When the oldest remembered id or conversation is to be forgotten."""
        times = []
        if self.remembered:
            times.append(next(iter(self.remembered.values())).at + limits.REMEMBERED_SECONDS * SECOND)
        if self.conversations:
            times.append(next(iter(self.conversations.values())).at + limits.CONVERSATION_SECONDS * SECOND)
        return min(times, default=None)

    def deadlines_of(self, row: TriggerRow) -> list[Deadline]:
        found: list[tuple[int, TimerKind]] = []
        if row.state == "running":
            found.append((self.lease_deadline(row), "lease"))
            if row.grace_until is not None:
                found.append((row.grace_until, "grace"))
        elif row.state == "waiting":
            found.append((row.available_at, "available" if row.place is None else "retry"))
            if row.expires_at is not None:
                found.append((row.expires_at, "expiry"))
        return [Deadline(at, TIMER_RANK[kind], row.trigger_id, kind) for at, kind in found]

    # Loading rows

    def load_trigger(self, row: TriggerRow) -> None:
        self.triggers[row.trigger_id] = row
        self.enter_line(row)
        if row.state == "waiting":
            self.enter_queue(row)
        elif row.state == "running":
            self.enter_slot(row)

    def loaded(self, silence_from: int) -> None:
        """All rows are there. ``silence_from``: heartbeat deadlines start anew from this instant."""
        self.silence_from = silence_from
        self.triggers = dict(sorted(self.triggers.items(), key=lambda item: item[1].accepted_seq))
        self.executions = dict(sorted(self.executions.items(), key=lambda item: _dispatch_order(item[0])))
        self.remembered = dict(sorted(self.remembered.items(), key=lambda item: (item[1].at, item[1].seq, item[0])))
        self.conversations = dict(sorted(self.conversations.items(), key=lambda item: (item[1].at, item[0])))
        used = {row.slot_number for row in self.triggers.values() if row.state == "running"}
        self.highest_slot = max((number for number in used if number is not None), default=0)
        self.free_slots = [number for number in range(1, self.highest_slot + 1) if number not in used]
        self.changed.clear()

    def schedule_all(self, at: int) -> None:
        """Bring up every deadline again. Who waits for room since before ``at`` needs none: the next pump sees it.

        Unless there is room: then the agent was not looked at since its oldest head became available.
        """
        self.deadlines.clear()
        may_start = self.ready[0].id.decode() if self.ready and self.has_room and not self.held_back else None
        for row in self.triggers.values():
            self.deadlines.extend(
                deadline
                for deadline in self.deadlines_of(row)
                if deadline.kind != "retry" or deadline.at > at or row.trigger_id == may_start
            )

    # Index maintenance

    def ready_key(self, line: Line) -> OrderKey | None:
        head = line.head
        if head is None:
            return None
        row = self.triggers[head]
        return row.key if row.state == "waiting" else None

    def enter_line(self, row: TriggerRow) -> None:
        line = self.lines.get(row.conversation_id)
        if line is None:
            line = self.lines[row.conversation_id] = Line()
        if row.place is None:
            line.add_unplaced(row.trigger_id)
            return
        line.discard_unplaced(row.trigger_id)
        before = self.ready_key(line)
        insort(line.placed, (row.place, row.trigger_id))
        if line.head == row.trigger_id and before is not None:
            self.ready.remove(before)

    def leave_line(self, row: TriggerRow) -> None:
        line = self.lines[row.conversation_id]
        if row.place is None:
            line.discard_unplaced(row.trigger_id)
        else:
            index = bisect_left(line.placed, (row.place, row.trigger_id))
            assert line.placed[index][1] == row.trigger_id
            del line.placed[index]
            if index == 0 and (key := self.ready_key(line)) is not None:
                self.ready.add(key)
        if not line:
            del self.lines[row.conversation_id]

    def enter_queue(self, row: TriggerRow) -> None:
        key = row.key
        self.waiting.add(key)
        self.payload_bytes += row.payload_bytes
        if row.place is None:
            self.unplaced.add(key)
        elif self.lines[row.conversation_id].head == row.trigger_id:
            self.ready.add(key)

    def leave_queue(self, row: TriggerRow) -> None:
        key = row.key
        self.waiting.remove(key)
        self.payload_bytes -= row.payload_bytes
        if row.place is None:
            self.unplaced.remove(key)
        elif self.lines[row.conversation_id].head == row.trigger_id:
            self.ready.remove(key)

    def enter_slot(self, row: TriggerRow) -> None:
        assert row.execution_id is not None
        self.executions[row.execution_id] = row.trigger_id
        self.forced_running += row.forced

    def leave_slot(self, row: TriggerRow) -> None:
        assert row.execution_id is not None and row.slot_number is not None
        del self.executions[row.execution_id]
        self.forced_running -= row.forced
        heapq.heappush(self.free_slots, row.slot_number)
        if not self.executions:  # keeps the list of free slots no longer than the highest in use
            self.free_slots.clear()
            self.highest_slot = 0

    def take_slot(self, number: int) -> None:
        if self.free_slots and self.free_slots[0] == number:
            heapq.heappop(self.free_slots)
        else:
            assert number == self.highest_slot + 1, "a slot number is the lowest free one"
            self.highest_slot = number

    def touch(self, row: TriggerRow, at: int) -> None:
        """The row changed at this instant: it is to be written, and what it is due later is to be looked at then."""
        self.changed[RowRef("trigger", row.trigger_id)] = None
        if row.state == "waiting" and row.available_at <= at and row.expires_at is None:
            return  # the usual case: it waits for room, and nothing is due
        self.deadlines.extend(
            deadline
            for deadline in self.deadlines_of(row)
            if deadline.at > at or deadline.kind not in ("available", "retry")
        )

    def end(self, row: TriggerRow, state: events.FinalState, at: int) -> None:
        """The trigger is final: out of every index, its id remembered, its conversation's outcome noted."""
        if row.state == "waiting":
            self.leave_queue(row)
        elif row.state == "running":
            self.leave_slot(row)
        self.leave_line(row)
        del self.triggers[row.trigger_id]
        self.ended.append(row.trigger_id)
        self.changed[RowRef("trigger", row.trigger_id)] = None
        self.remember("trigger", row.trigger_id, RememberedRow(row.digest, row.accepted_seq, state, at))
        self.conversations.pop(row.conversation_id, None)
        self.conversations[row.conversation_id] = ConversationRow(OUTCOME_OF[state], at)
        self.changed[RowRef("conversation", row.conversation_id)] = None

    def remember(self, kind: RememberedKind, id: str, remembered: RememberedRow) -> None:
        self.remembered.pop((kind, id), None)  # the order of the dict is that of the times
        self.remembered[kind, id] = remembered
        self.changed[RowRef("remembered", id, kind)] = None

    def wait_again(self, row: TriggerRow, available_at: int, at: int) -> None:
        """From a slot or a pause back into the queue, in the same place of its conversation."""
        if row.state == "running":
            self.leave_slot(row)
        row.state = "waiting"
        row.available_at = available_at
        row.on_busy = "queue" if row.on_busy is not None else None
        row.forced = False
        self.clear_attempt(row)
        self.enter_queue(row)
        self.touch(row, at)

    @staticmethod
    def clear_attempt(row: TriggerRow) -> None:
        row.slot_number = row.dispatched_at = row.lease_until = row.last_seen_at = row.grace_until = None


def _dispatch_order(execution_id: str) -> tuple[int, int]:
    """(seq of the decision, index of the event), which the id of every attempt ends with."""
    _, seq, index = execution_id.split("-")
    return int(seq), int(index)
