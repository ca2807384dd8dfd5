"""The state of one agent: its rows, and the indexes derived from them.

Derived indexes, so that no step scans the queue (each is rebuilt from the rows on restore):

waiting    every waiting trigger by key; its rank is the position in the queue.
unplaced   those that have no place in their conversation yet, because they aren't available, by key. What an approval
           or a dependency keeps from a place is in no such index.
lines      conversation -> its live triggers; those placed, in the order of their places. The running one is the head,
           else the first.
ready      site (None: none needed) -> the waiting heads without a claim, by key. A head whose retry is due later sorts
           behind the present, since the key begins with available_at.
asking     heads whose claim is not answered, by key: a slot is reserved for each (not for a forced one).
held       heads whose claim is granted, by key.   urgent: waiting asks and forces that are not asking, by key.
claimed    everything with a claim that does not run, by claim number.
executions current attempts (running or being stopped) -> trigger.
slots      numbers of the slots in use, and the free ones below the highest.
untold     watchers of conversations that don't know yet how these stand, in order: the log alone says who is first.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Final, Literal

from sortedcontainers import SortedList, SortedSet

from streams.rules import limits, verdicts
from streams.rules.agent.lines import Line
from streams.rules.agent.rows import (
    AgentRow,
    ConversationRow,
    DependencyOutcome,
    Outcome,
    RememberedKind,
    RememberedRow,
    RowRef,
    TriggerRow,
    Watcher,
    WatchRow,
    is_serial,
)
from streams.rules.agent.timers import Deadline, deadlines_of
from streams.rules.order import SECOND, OrderKey

DIGEST_DIGITS: Final = 32
OUTCOME_OF: Final[dict[verdicts.FinalState, Outcome]] = {
    "finished": "finished",
    "failed": "failed",
    "stopped": "stopped",
    "expired": "stopped",
}


class Agent:
    """One agent's rows and indexes. Only evolve.py and the loading functions change it."""

    __slots__ = (
        "agent_id",
        "asking",
        "changed",
        "claimed",
        "conversations",
        "deadlines",
        "ended",
        "executions",
        "forced_running",
        "free_slots",
        "held",
        "highest_slot",
        "lines",
        "mute",
        "payload_bytes",
        "ready",
        "remembered",
        "row",
        "silence_from",
        "triggers",
        "unplaced",
        "untold",
        "urgent",
        "waiting",
        "watches",
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
        self.ready: dict[str | None, SortedList[OrderKey]] = {}
        self.asking: SortedList[OrderKey] = SortedList()
        self.held: SortedList[OrderKey] = SortedList()
        self.urgent: SortedList[OrderKey] = SortedList()
        self.claimed: SortedList[tuple[int, str]] = SortedList()
        self.mute: dict[str, int] = {}
        """Sites that have not answered, and how many claims they owe: nothing more is asked there."""
        self.watches: dict[str, dict[Watcher, WatchRow]] = {}
        """By conversation."""
        self.untold: SortedSet[tuple[str, Watcher]] = SortedSet()
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
        row = self.row
        if is_serial(row.serial, row.agent_type, row.default_environment_id):
            return 1
        return None if row.parallelism_limit == "unlimited" else row.parallelism_limit

    @property
    def is_serial(self) -> bool:
        return is_serial(self.row.serial, self.row.agent_type, self.row.default_environment_id)

    @property
    def has_room(self) -> bool:
        limit = self.limit
        return limit is None or self.running < limit

    @property
    def held_back(self) -> bool:
        """Nothing of it may be dispatched, whatever room there is."""
        return self.row.paused or self.row.archived or self.row.parked is not None

    @property
    def has_work(self) -> bool:
        """Whether an earlier step left something over that is to be done now; a parked agent does it later."""
        return self.row.todo is not None and self.row.parked is None

    def oldest_idle(self, at: int) -> OrderKey | None:
        """The oldest head that may start or ask its site: available, without a claim, and its site answers."""
        oldest: OrderKey | None = None
        for site, keys in self.ready.items():
            if keys and site not in self.mute and (oldest is None or keys[0] < oldest):
                oldest = keys[0]
        return oldest if oldest is not None and oldest.available_at <= at else None

    def room_for(self, key: OrderKey, starting: int = 0) -> bool:
        """Whether a slot is left beside those reserved for older claims, and for so many that start before."""
        limit = self.limit
        return limit is None or self.running + starting + int(self.asking.bisect_left(key)) < limit

    def room_taken_by(self, key: OrderKey, starting: int) -> int:
        """How many of so many that start before ``key`` find a slot: the others take nothing of the budget."""
        limit = self.limit
        if limit is None:
            return starting
        return min(starting, max(0, limit - self.running - int(self.asking.bisect_left(key))))

    @property
    def may_force(self) -> bool:
        """Whether one more attempt may exceed the limit (B4)."""
        limit = self.limit
        return not self.is_serial and limit is not None and self.forced_running < limit

    @property
    def budget_left(self) -> bool:
        """Whether the agent's run budget has something that no claim has reserved (E4)."""
        return self.has_budget(0)

    def has_budget(self, starting: int) -> bool:
        """Whether something of the budget is left beside what is reserved, and for so many that start before."""
        budget = self.row.run_budget
        return budget is None or budget > len(self.held) + len(self.asking) + starting

    def standing_of(self, conversation_id: str) -> DependencyOutcome | None:
        """How a conversation stands for those that depend on it (E2); None: it lives."""
        if conversation_id in self.lines:
            return None
        row = self.conversations.get(conversation_id)
        return row.outcome if row is not None else "unknown"

    def head(self, conversation_id: str) -> TriggerRow | None:
        line = self.lines.get(conversation_id)
        head = line.head if line else None
        return self.triggers[head] if head is not None else None

    def paused_in(self, conversation_id: str) -> TriggerRow | None:
        """The trigger that waits for a person: the first in line, or behind an ask or force that replies to it (F4)."""
        line = self.lines.get(conversation_id)
        for _, trigger_id in line.placed[:2] if line else ():
            row = self.triggers[trigger_id]
            if row.state == "paused":
                return row
        return None

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

    def is_due(self, deadline: Deadline) -> bool:
        """Whether this deadline still holds: a timer is never taken back, it is looked at when it comes."""
        if deadline.kind == "forget":
            return self.next_forget_at() == deadline.at
        row = self.triggers.get(deadline.trigger_id)
        return row is not None and deadline in self.deadlines_of(row)

    def next_forget_at(self) -> int | None:
        """When the oldest remembered id or conversation is to be forgotten."""
        first: int | None = None
        if self.remembered:
            first = next(iter(self.remembered.values())).at + limits.REMEMBERED_SECONDS * SECOND
        if self.conversations:
            at = next(iter(self.conversations.values())).at + limits.CONVERSATION_SECONDS * SECOND
            first = at if first is None else min(first, at)
        return first

    def deadlines_of(self, row: TriggerRow) -> list[Deadline]:
        return deadlines_of(row, self.silence_from)

    # Loading rows

    def load_trigger(self, row: TriggerRow) -> None:
        self.triggers[row.trigger_id] = row
        is_mute, row.mute = row.mute, False
        self.set_mute(row, is_mute)
        self.enter_line(row)
        if row.state == "waiting":
            self.enter_queue(row)
        elif row.state == "running":
            line_head = self.lines[row.conversation_id]
            if (head := self.ready_row(line_head)) is not None:
                self.set_ready(head, False)
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
        for conversation_id in self.watches:
            self.conversation_changed(conversation_id)
        self.changed.clear()

    def schedule_all(self, at: int) -> None:
        """Bring up every deadline again. Who waits for room since before ``at`` needs none: the next pump sees it.

        Unless there is room: then the agent was not looked at since its oldest head became available.
        """
        self.deadlines.clear()
        oldest = self.oldest_idle(at)
        may_start = oldest.id.decode() if oldest is not None and self.has_room and not self.held_back else None
        for row in self.triggers.values():
            self.deadlines.extend(
                deadline
                for deadline in self.deadlines_of(row)
                if deadline.kind != "retry" or deadline.at > at or row.trigger_id == may_start
            )

    # Index maintenance

    def ready_row(self, line: Line) -> TriggerRow | None:
        """The line's head, if it waits without a claim."""
        if line.running is not None or not line.placed:
            return None
        head = self.triggers[line.placed[0][1]]
        return head if head.state == "waiting" and head.claim_state is None else None

    def set_ready(self, row: TriggerRow, is_ready: bool, key: OrderKey | None = None) -> None:
        """``key``: the row's, if it is known already."""
        keys = self.ready.get(row.site_id)
        if keys is None:
            keys = self.ready[row.site_id] = SortedList()
        if is_ready:
            keys.add(key or row.key)
        else:
            keys.remove(key or row.key)

    def enter_line(self, row: TriggerRow) -> None:
        line = self.lines.get(row.conversation_id)
        if line is None:
            line = self.lines[row.conversation_id] = Line()
            self.conversation_changed(row.conversation_id)
        if row.place is None:
            line.add_unplaced(row.trigger_id)
            return
        line.discard_unplaced(row.trigger_id)
        before = self.ready_row(line)
        insort(line.placed, (row.place, row.trigger_id))
        if line.head == row.trigger_id and before is not None:
            self.set_ready(before, False)

    def leave_line(self, row: TriggerRow) -> None:
        line = self.lines[row.conversation_id]
        if row.place is None:
            line.discard_unplaced(row.trigger_id)
        else:
            index = bisect_left(line.placed, (row.place, row.trigger_id))
            assert line.placed[index][1] == row.trigger_id
            was_head = line.head == row.trigger_id
            del line.placed[index]
            if was_head and (head := self.ready_row(line)) is not None:
                self.set_ready(head, True)
        if not line:
            del self.lines[row.conversation_id]

    def enter_queue(self, row: TriggerRow) -> None:
        key = row.key
        self.waiting.add(key)
        self.payload_bytes += row.payload_bytes
        if row.place is None:
            if not row.is_blocked:
                self.unplaced.add(key)
        else:
            self.enter_pump(row, key)

    def leave_queue(self, row: TriggerRow) -> None:
        key = row.key
        self.waiting.remove(key)
        self.payload_bytes -= row.payload_bytes
        if row.place is None:
            if not row.is_blocked:
                self.unplaced.remove(key)
        else:
            self.leave_pump(row, key)

    def enter_place(self, row: TriggerRow, place: tuple[int, int]) -> None:
        """A waiting trigger takes a place in its conversation; its place in the queue is what it was."""
        key = row.key
        self.unplaced.remove(key)
        row.place = place
        self.enter_line(row)
        self.enter_pump(row, key)

    def enter_pump(self, row: TriggerRow, key: OrderKey) -> None:
        """A placed waiting trigger enters the indexes that the pump reads."""
        if row.claim_state is None:
            if self.lines[row.conversation_id].head == row.trigger_id:
                self.set_ready(row, True, key)
        else:
            assert row.claim_n is not None
            self.claimed.add((row.claim_n, row.trigger_id))
            if row.claim_state == "held":
                self.held.add(key)
            elif row.claim_state == "asking" and row.on_busy != "force":
                self.asking.add(key)
        if row.is_urgent and row.claim_state in (None, "held"):
            self.urgent.add(key)

    def leave_pump(self, row: TriggerRow, key: OrderKey) -> None:
        if row.claim_state is None:
            if self.lines[row.conversation_id].head == row.trigger_id:
                self.set_ready(row, False, key)
        else:
            assert row.claim_n is not None
            self.claimed.remove((row.claim_n, row.trigger_id))
            if row.claim_state == "held":
                self.held.remove(key)
            elif row.claim_state == "asking" and row.on_busy != "force":
                self.asking.remove(key)
        if row.is_urgent and row.claim_state in (None, "held"):
            self.urgent.remove(key)

    def set_mute(self, row: TriggerRow, is_mute: bool) -> None:
        """Whether the trigger's site owes an answer past its time."""
        if row.mute == is_mute or row.site_id is None:
            return
        row.mute = is_mute
        owed = self.mute.get(row.site_id, 0) + (1 if is_mute else -1)
        if owed:
            self.mute[row.site_id] = owed
        else:
            del self.mute[row.site_id]

    def enter_slot(self, row: TriggerRow) -> None:
        assert row.execution_id is not None
        self.executions[row.execution_id] = row.trigger_id
        self.forced_running += row.forced
        self.lines[row.conversation_id].running = row.trigger_id

    def leave_slot(self, row: TriggerRow) -> None:
        assert row.execution_id is not None and row.slot_number is not None
        del self.executions[row.execution_id]
        self.forced_running -= row.forced
        line = self.lines[row.conversation_id]
        line.running = None
        if line.head != row.trigger_id and (head := self.ready_row(line)) is not None:
            self.set_ready(head, True)  # an interrupt has come before it
        heapq.heappush(self.free_slots, row.slot_number)
        if not self.executions:  # keeps the list of free slots no longer than the highest in use
            self.free_slots.clear()
            self.highest_slot = 0

    def conversation_changed(self, conversation_id: str) -> None:
        """It lives, or has ended: those that watch it are to be told what they don't know yet."""
        watchers = self.watches.get(conversation_id)
        if watchers is None:
            return
        standing = self.standing_of(conversation_id)
        for watcher, row in watchers.items():
            if row.told == standing:
                self.untold.discard((conversation_id, watcher))
            else:
                self.untold.add((conversation_id, watcher))

    def watch(self, conversation_id: str, watcher: Watcher) -> None:
        self.watches.setdefault(conversation_id, {})[watcher] = WatchRow()
        self.untold.add((conversation_id, watcher))
        self.changed[RowRef("watch", conversation_id, None, watcher)] = None

    def told(self, conversation_id: str, watcher: Watcher, outcome: DependencyOutcome | None) -> None:
        if outcome == "finished":
            self.unwatch(conversation_id, watcher)
            return
        self.untold.discard((conversation_id, watcher))
        self.watches[conversation_id][watcher].told = outcome
        self.changed[RowRef("watch", conversation_id, None, watcher)] = None

    def unwatch(self, conversation_id: str, watcher: Watcher) -> None:
        self.untold.discard((conversation_id, watcher))
        watchers = self.watches[conversation_id]
        del watchers[watcher]
        if not watchers:
            del self.watches[conversation_id]
        self.changed[RowRef("watch", conversation_id, None, watcher)] = None

    def take_slot(self, number: int) -> None:
        if self.free_slots and self.free_slots[0] == number:
            heapq.heappop(self.free_slots)
        else:
            assert number == self.highest_slot + 1, "a slot number is the lowest free one"
            self.highest_slot = number

    def touch(self, row: TriggerRow, at: int) -> None:
        """The row changed at this instant: it is to be written, and what it is due later is to be looked at then."""
        self.changed[RowRef("trigger", row.trigger_id)] = None
        if row.state == "waiting" and row.available_at <= at and row.has_no_deadline:
            return  # the usual case: it waits for room, and nothing is due
        for deadline in deadlines_of(row, self.silence_from):
            if deadline.at > at or deadline.kind not in ("available", "retry"):
                self.deadlines.append(deadline)

    def end(self, row: TriggerRow, state: verdicts.FinalState | Literal["refused"], at: int) -> None:
        """The trigger is gone: out of every index, its id remembered, its conversation's outcome noted.

        A refused one (an ask whose site said no) leaves its conversation as it was.
        """
        if row.state == "waiting":
            self.leave_queue(row)
        elif row.state == "running":
            self.leave_slot(row)
        self.set_mute(row, False)
        self.leave_line(row)
        del self.triggers[row.trigger_id]
        self.ended.append(row.trigger_id)
        self.changed[RowRef("trigger", row.trigger_id)] = None
        self.remember("trigger", row.trigger_id, RememberedRow(row.digest, row.accepted_seq, state, at))
        if state != "refused":
            self.conversations.pop(row.conversation_id, None)
            self.conversations[row.conversation_id] = ConversationRow(OUTCOME_OF[state], at)
            self.changed[RowRef("conversation", row.conversation_id)] = None
        self.conversation_changed(row.conversation_id)

    def remember(self, kind: RememberedKind, id: str, remembered: RememberedRow) -> None:
        self.remembered.pop((kind, id), None)  # the order of the dict is that of the times
        self.remembered[kind, id] = remembered
        self.changed[RowRef("remembered", id, kind)] = None

    def wait_again(self, row: TriggerRow, available_at: int, on_busy: Literal["queue", "force"], at: int) -> None:
        """From a slot or a pause back into the queue, in the same place of its conversation."""
        if row.state == "running":
            self.leave_slot(row)
        row.state = "waiting"
        row.available_at = available_at
        row.on_busy = on_busy
        row.late = 0
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
