"""When waiting triggers will start, from how long attempts took so far, with a band that says how sure that is.

The queue is played through a number of times. In each play every running and waiting trigger takes a duration that was
recorded of its agent (one that runs, a recorded one longer than it has run already), and slots, workers and folders are
given out in start order. A play takes its durations from one stretch of an agent's history, since work changes over the
hours: a long queue is as uncertain as these stretches differ. The estimate is the median of the plays, the band lies
between their first and last tenth: the start should fall into it four times out of five. docs/audit.md says how often
it does, measured.

What no duration can tell gets no estimate but the cause: paused agents, approvals, dependencies, closed gates, budgets
that are used up or go to what is before it. What stands behind such a trigger in its conversation can't be told either.
Younger work that comes later is left out: it starts later, except where it interrupts or is forced.
"""

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from streams.audit.causes import Reason, causes
from streams.audit.folded_facts import FoldedFacts
from streams.audit.logged import Logged
from streams.audit.past import Past
from streams.rules import events
from streams.rules.agent.rows import TriggerRow
from streams.rules.agent.state import Agent
from streams.rules.folders import Segments, overlap, segments
from streams.rules.order import OrderKey
from streams.rules.site.rows import ClaimId, GateScope

DURATIONS_KEPT: Final = 500
"""Of each agent, the newest."""
STRETCH: Final = 50
"""So many durations in a row are what one play takes its own from."""
DURATIONS_MIN: Final = 8
"""With fewer of its own an agent's triggers take those of all agents."""
PLAYS_MAX: Final = 200
STEPS_MAX: Final = 200_000
"""Triggers times plays: a long queue is played less often."""
PLAYS_MIN: Final = 20
BAND: Final = (0.1, 0.9)

_TIMED: Final[frozenset[Reason]] = frozenset(
    (
        "agent_parallelism_limit_reached",
        "conversation_busy",
        "not_yet_available",
        "site_workers_busy",
        "agent_environment_folder_busy",
        "site_asked",
    )
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Instants in microseconds; None: ``reason`` is nothing that a duration ends, or nothing was ever recorded.

    ``behind``: the trigger before it in its conversation whose start can't be told, so that its own can't; its cause
    stands there. ``durations``: how many recorded ones the agent's own are.
    """

    agent_id: str
    trigger_id: str
    position: int
    reason: Reason | None
    behind: str | None
    starts_at: int | None
    from_at: int | None
    to_at: int | None
    durations: int


class History:
    """Feed it all decisions in causal order, then ask ``estimates``, as often as you like."""

    def __init__(self) -> None:
        self.past = Past()
        self._durations: dict[str, deque[int]] = {}
        self._all: deque[int] = deque(maxlen=4 * DURATIONS_KEPT)
        self._started: dict[str, int] = {}

    def take(self, logged: Logged) -> None:
        """The next decision. Raises DoesNotFit."""
        self.past.fold(logged)
        decision = logged.decision
        if not isinstance(decision, events.Decision):
            return
        for event in decision.events:
            if isinstance(event, events.Dispatched):
                self._started[event.execution_id] = decision.at
            elif not isinstance(event, events.StopRequested):
                started = self._started.pop(getattr(event, "execution_id", None) or "", None)
                if started is not None:
                    took = decision.at - started
                    self._durations.setdefault(decision.agent_id, deque(maxlen=DURATIONS_KEPT)).append(took)
                    self._all.append(took)

    def estimates(self, at: int) -> list[Estimate]:
        """When everything that waits will start, seen from an instant not before the newest decision."""
        return list(_Plays(self.past, at, self._durations, self._all).estimates())


@dataclass(slots=True)
class _Waiting:
    agent: Agent
    position: int
    row: TriggerRow
    folder: tuple[str, str, Segments] | None
    reason: Reason | None
    is_timed: bool
    """Whether durations alone tell when it starts."""
    behind: str | None = None
    starts: list[int] = field(default_factory=list)

    @property
    def order(self) -> tuple[OrderKey, bytes]:
        return self.row.key, self.agent.agent_id.encode()


@dataclass(slots=True)
class _Taken:
    """What a play has given out, each until when."""

    slots: dict[str, list[int]]
    """By agent: when each place is next free, sorted."""
    workers: dict[str, list[int]]
    conversations: dict[tuple[str, str], int]
    durations: dict[str, list[int]]
    """Of the stretches of this play."""
    folders: list[tuple[tuple[str, str, Segments], int]]


class _Plays:
    def __init__(self, past: Past, at: int, durations: dict[str, deque[int]], everyone: deque[int]) -> None:
        self._past, self._at = past, at
        self._of = {agent_id: list(some) for agent_id, some in durations.items() if len(some) >= DURATIONS_MIN}
        self._own = {agent_id: len(some) for agent_id, some in durations.items()}
        self._everyone = list(everyone)
        self._queue: list[_Waiting] = []

    def estimates(self) -> Iterator[Estimate]:
        found = list(self._waiting())
        self._stand_behind(found)
        self._spend_budgets([one for one in sorted(found, key=lambda one: one.order) if one.is_timed])
        self._stand_behind(found)
        self._queue = sorted((one for one in found if one.is_timed), key=lambda one: one.order)
        if self._everyone:
            for number in range(max(PLAYS_MIN, min(PLAYS_MAX, STEPS_MAX // max(1, len(self._queue))))):
                self._play(number)
        for one in found:
            starts = sorted(one.starts)
            low, middle, high = (
                starts[int(share * (len(starts) - 1) + 0.5)] if starts else None for share in (BAND[0], 0.5, BAND[1])
            )
            own = self._own.get(one.agent.agent_id, 0)
            about = one.agent.agent_id, one.row.trigger_id, one.position, one.reason, one.behind
            yield Estimate(*about, middle, low, high, own)

    def _waiting(self) -> Iterator[_Waiting]:
        for agent in sorted(self._past.agents.values(), key=lambda agent: agent.agent_id.encode()):
            facts = self._past.facts(agent)
            for position, key in enumerate(agent.waiting, start=1):
                row = agent.triggers[key.id.decode()]
                reason, is_timed = self._why(agent, row, facts)
                yield _Waiting(agent, position, row, _folder(row), reason, is_timed)

    def _why(self, agent: Agent, row: TriggerRow, facts: FoldedFacts) -> tuple[Reason | None, bool]:
        """What it waits for, and whether durations end all of that."""
        found = [cause.reason for cause in causes(facts, row, self._at)]
        reason = next((one for one in found if one not in _TIMED), found[0] if found else None)
        site = self._past.sites.get(row.site_id or "")
        if row.site_id is not None and site is None:
            return reason, False
        if agent.held_back or not (reason is None or reason in _TIMED):
            return reason, False
        if site is not None and site.row.capacity == 0 and "site_workers_busy" in found:
            return "site_workers_busy", False  # nobody's end gives it one
        return reason, True

    @staticmethod
    def _stand_behind(found: list[_Waiting]) -> None:
        """Who is behind a start that can't be told in a conversation waits for longer than anybody can tell."""
        lines: dict[tuple[str, str], list[_Waiting]] = {}
        for one in found:
            if one.row.place is not None or not one.row.is_blocked:  # the others have no place that anybody is behind
                lines.setdefault((one.agent.agent_id, one.row.conversation_id), []).append(one)
        for (_, conversation_id), line in lines.items():
            line.sort(key=lambda one: (one.row.place is None, one.row.place or (0, 0), one.row.key))
            head = line[0].agent.head(conversation_id)
            # nobody knows when the person answers; what replies to it stands before it
            behind = head.trigger_id if head is not None and head.state == "paused" else None
            for one in line:
                if behind is not None and one.is_timed:
                    one.is_timed, one.behind = False, behind
                elif behind is None and not one.is_timed:
                    behind = one.row.trigger_id

    def _spend_budgets(self, timed: list[_Waiting]) -> None:
        """Give what is left of run budgets to the first in start order: for the others nobody knows when more comes."""
        of_agents = {agent_id: agent.row.run_budget for agent_id, agent in self._past.agents.items()}
        of_gates: dict[tuple[str, GateScope, str], int | None] = {}
        for one in sorted(timed, key=lambda one: one.row.claim_state is None):  # claims have reserved theirs
            agent_id, site = one.agent.agent_id, self._past.sites.get(one.row.site_id or "")
            claim = site.claims.get(ClaimId(agent_id, one.row.trigger_id)) if site is not None else None
            gates: list[tuple[str, GateScope, str]] = []
            if site is not None and not (claim is not None and claim.granted):  # a grant has taken its own
                gates = [(site.site_id, *gate) for gate in _gates(one.row)]
                for gate in gates:
                    of_gates.setdefault(gate, site.gate(gate[1:]).run_budget)
            left = [of_agents[agent_id], *(of_gates[gate] for gate in gates)]
            if 0 in left:
                one.reason, one.is_timed = "run_budget_used_up", False
                continue
            of_agents[agent_id] = _less(of_agents[agent_id])
            of_gates |= {gate: _less(of_gates[gate]) for gate in gates}

    def _stretch(self, agent_id: str, number: int) -> list[int]:
        """What an agent's triggers take in one play; all agents' stretches lie at the same part of their histories."""
        durations = self._of.get(agent_id) or self._everyone
        begin = _draw(number, -1, max(1, len(durations) - STRETCH + 1))
        return durations[begin : begin + STRETCH]

    def _play(self, number: int) -> None:
        taken = self._begin(number)
        for index, one in enumerate(self._queue):
            row, agent_id = one.row, one.agent.agent_id
            free = max(self._at, row.available_at, taken.conversations.get((agent_id, row.conversation_id), 0))
            free = max(free, self._folder_free(taken, one))
            slots = taken.slots.get(agent_id)
            workers = taken.workers.get(row.site_id or "") if row.worker else None
            start = max(_free_at(slots, free), _free_at(workers, free))
            durations = taken.durations[agent_id]
            end = start + durations[_draw(number, index, len(durations))]
            for places in (slots, workers):
                _take(places, start, end)
            taken.conversations[agent_id, row.conversation_id] = end
            if one.folder is not None:
                taken.folders.append((one.folder, end))
            one.starts.append(start)

    def _begin(self, number: int) -> _Taken:
        """Everything that runs goes on for as long as some recorded attempt did that took longer than it has so far."""
        taken = _Taken({}, {}, {}, {agent_id: self._stretch(agent_id, number) for agent_id in self._past.agents}, [])
        for site_id, site in self._past.sites.items():
            taken.workers[site_id] = [self._at] * site.row.capacity
        index = len(self._queue)
        for agent_id, agent in self._past.agents.items():
            if agent.limit is not None:
                taken.slots[agent_id] = [self._at] * agent.limit
            for trigger_id in agent.executions.values():
                index += 1
                row = agent.triggers[trigger_id]
                end = self._at + self._remaining(taken.durations[agent_id], row, number, index)
                _take(taken.slots.get(agent_id), self._at, end)
                if row.worker:
                    _take(taken.workers.get(row.site_id or ""), self._at, end)
                taken.conversations[agent_id, row.conversation_id] = end
                folder = _folder(row)
                if folder is not None:
                    taken.folders.append((folder, end))
        return taken

    def _remaining(self, durations: list[int], row: TriggerRow, number: int, index: int) -> int:
        assert row.dispatched_at is not None
        elapsed = max(0, self._at - row.dispatched_at)
        longer = [duration for duration in durations if duration > elapsed]
        if not longer:  # longer than any: as likely to double as to end
            return elapsed * (1 + _draw(number, index, 100)) // 100
        return longer[_draw(number, index, len(longer))] - elapsed

    @staticmethod
    def _folder_free(taken: _Taken, one: _Waiting) -> int:
        if one.folder is None:
            return 0
        site_id, environment_id, parts = one.folder
        return max(
            (
                end
                for (other_site, other_environment, other), end in taken.folders
                if (other_site, other_environment) == (site_id, environment_id) and overlap(parts, other)
            ),
            default=0,
        )


def _folder(row: TriggerRow) -> tuple[str, str, Segments] | None:
    if row.environment_id is None or row.degraded or row.site_id is None:
        return None
    return row.site_id, row.environment_id, segments(row.folder or "/")


def _gates(row: TriggerRow) -> Iterator[tuple[GateScope, str]]:
    if row.organization_id is not None:
        yield "organization", row.organization_id
    if row.department_id is not None:
        yield "department", row.department_id


def _less(budget: int | None) -> int | None:
    """After one attempt; None: as many as come."""
    return None if budget is None else budget - 1


def _free_at(places: list[int] | None, at: int) -> int:
    """From when on, not before an instant, there is a place; None: there always is."""
    return at if places is None else max(at, places[0])


def _take(places: list[int] | None, start: int, end: int) -> None:
    """Give out the place that was free last before the start, so that those free earlier stay for others."""
    if places:
        at = max(0, bisect_right(places, start) - 1)
        del places[at]
        insort(places, end)


def _draw(number: int, index: int, count: int) -> int:
    """A number below ``count`` that looks drawn by chance, and is the same everywhere (SplitMix64 of the two)."""
    mask = 0xFFFFFFFFFFFFFFFF
    state = (number * 0x9E3779B97F4A7C15 + (index + 1) * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return ((state ^ (state >> 31)) * count) >> 64
