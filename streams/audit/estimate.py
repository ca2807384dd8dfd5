"""When waiting triggers will start, from how long attempts took so far, with a band that says how sure that is.

The queue is played through a number of times. In each play every running and waiting trigger takes a duration that was
recorded of its agent (one that runs, a recorded one longer than it has run already), and slots, workers and folders are
given out in start order. A play takes its durations from one stretch of an agent's history, since work changes over the
hours: a long queue is as uncertain as these stretches differ. The estimate is the median of the plays, the band lies
between their first and last tenth: the start should fall into it four times out of five. docs/audit.md says how often
it does, measured.

What no duration can tell gets no estimate but the cause: paused agents, approvals, dependencies, closed gates, budgets.
Younger work that comes later is left out: it starts later, except where it interrupts or is forced.
"""

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from streams.audit.causes import Reason, causes
from streams.audit.folded_facts import FoldedFacts
from streams.audit.logged import Logged
from streams.audit.past import Past
from streams.rules import events
from streams.rules.agent.rows import TriggerRow
from streams.rules.agent.state import Agent
from streams.rules.folders import Segments, overlap, segments

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

    ``durations``: how many recorded ones the agent's own are.
    """

    agent_id: str
    trigger_id: str
    position: int
    reason: Reason | None
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
    row: TriggerRow
    folder: tuple[str, str, Segments] | None
    starts: list[int]


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
        found: list[tuple[Agent, int, TriggerRow, Reason | None, _Waiting | None]] = []
        for agent in sorted(self._past.agents.values(), key=lambda agent: agent.agent_id.encode()):
            facts = self._past.facts(agent)
            for position, key in enumerate(agent.waiting, start=1):
                row = agent.triggers[key.id.decode()]
                reason, waiting = self._enter(agent, row, facts)
                found.append((agent, position, row, reason, waiting))
        self._queue.sort(key=lambda one: (one.row.key, one.agent.agent_id.encode()))
        if self._everyone:
            for number in range(max(PLAYS_MIN, min(PLAYS_MAX, STEPS_MAX // max(1, len(self._queue))))):
                self._play(number)
        for agent, position, row, reason, waiting in found:
            own = self._own.get(agent.agent_id, 0)
            if waiting is None or not waiting.starts:
                yield Estimate(agent.agent_id, row.trigger_id, position, reason, None, None, None, own)
                continue
            starts = sorted(waiting.starts)
            low, middle, high = (starts[int(share * (len(starts) - 1) + 0.5)] for share in (BAND[0], 0.5, BAND[1]))
            yield Estimate(agent.agent_id, row.trigger_id, position, reason, middle, low, high, own)

    def _enter(self, agent: Agent, row: TriggerRow, facts: FoldedFacts) -> tuple[Reason | None, _Waiting | None]:
        found = [cause.reason for cause in causes(facts, row, self._at)]
        reason = next((one for one in found if one not in _TIMED), found[0] if found else None)
        is_timed = reason is None or reason in _TIMED
        head = agent.head(row.conversation_id)
        if head is not None and head.state == "paused":  # nobody knows when the person answers
            is_timed = False
        if row.site_id is not None and row.site_id not in self._past.sites:
            is_timed = False
        if not is_timed or agent.held_back:
            return reason, None
        waiting = _Waiting(agent, row, _folder(row), [])
        self._queue.append(waiting)
        return reason, waiting

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
            if (slots is not None and not slots) or (workers is not None and not workers):
                continue  # there is no place at all: it never starts
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
