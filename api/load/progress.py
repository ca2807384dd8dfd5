"""How far the triggers of one demo are: a fold over the log of decisions, and the time from freed to next.

Freed -> next is the time that a place of a busy agent stands empty: from the moment when a runner hands the end of an
attempt to Kafka until whoever reads the dispatches can see the next dispatch of that agent. It is counted when one
decision both ends an attempt and dispatches another one, so it never contains the time in which nobody waited. The
beginning is the timestamp that the runner's client gave the status record (milliseconds of the runner's clock: on
another machine than this one its clock counts too).

Decisions and statuses are read from two topics and come in any order, so each waits for the other.
"""

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

from streams import STATUSES

State = Literal["waiting", "running", "paused", "finished", "failed", "stopped", "expired"]
LIVE: Final = ("waiting", "running", "paused")
LATENCIES_MAX: Final = 10_000
_ENDS: Final = frozenset({"finished", "attempt_failed", "stopped", "paused"})


class Latency(NamedTuple):
    """Milliseconds over the last LATENCIES_MAX measurements; ``measured`` is the number of all."""

    measured: int
    p50: float
    p99: float
    worst: float


class Progress:
    """Counts of the triggers whose id begins with ``prefix``.

    ``first_status_offsets``: for each partition of berth.statuses the offset from which on statuses will be told.
    """

    def __init__(self, prefix: str, first_status_offsets: Mapping[int, int]) -> None:
        self.produced = 0
        self.started = 0
        """Attempts dispatched: a trigger that is tried again counts again."""
        self.refused = 0
        self.failures = 0
        """Attempts that failed or fell silent; ``count("failed")`` is the triggers that won't be tried again."""
        self._prefix = prefix
        self._first_status_offsets = dict(first_status_offsets)
        self._live: dict[str, State] = {}
        self._counts: Counter[State] = Counter()
        self._reported_at: dict[tuple[int, int], float] = {}
        self._seen_at: dict[tuple[int, int], float | None] = {}
        self._latencies: deque[float] = deque(maxlen=LATENCIES_MAX)
        self._latencies_count = 0

    def count(self, state: State) -> int:
        """How many triggers are in this state."""
        return self._counts[state]

    @property
    def live(self) -> int:
        """Triggers that were accepted and have no final state yet."""
        return len(self._live)

    @property
    def is_settled(self) -> bool:
        """Whether everything that was produced has been refused or has its final state."""
        return not self._live and self.refused + sum(self._counts.values()) >= self.produced

    def status(self, partition: int, offset: int, status: str, reported_at: float) -> None:
        """A runner's word, at its place in berth.statuses; times in seconds since 1970."""
        if status not in ("finished", "failed", "paused", "stopped"):
            return
        place = partition, offset
        if place in self._seen_at:
            self._measure(self._seen_at.pop(place), reported_at)
        else:
            self._reported_at[place] = reported_at

    def decision(self, decision: Mapping[str, Any], seen_at: float) -> None:
        """A record of berth.decisions that became visible at ``seen_at``, in seconds since 1970."""
        events = decision.get("events", ())
        for event in events:
            trigger_id = str(event.get("trigger_id", ""))
            if trigger_id.startswith(self._prefix):
                self._apply(trigger_id, event)
        if decision.get("refusal") is not None and str(decision.get("command_id", "")).startswith(self._prefix):
            self.refused += 1
        cause = decision["cause"]
        if cause.get("topic") == STATUSES.name:
            kinds = {event["type"] for event in events}
            has_next = "dispatched" in kinds and not _ENDS.isdisjoint(kinds)
            self._pair((cause["partition"], cause["offset"]), seen_at if has_next else None)

    def freed_to_next(self) -> Latency | None:
        """None as long as nothing was measured."""
        if not self._latencies:
            return None
        ordered = sorted(self._latencies)
        return Latency(
            self._latencies_count, ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)], ordered[-1]
        )

    def as_json(self) -> dict[str, Any]:
        """What `berth demo --json` prints."""
        latency = self.freed_to_next()
        return {
            "produced": self.produced,
            "refused": self.refused,
            "started": self.started,
            **{state: self.count(state) for state in (*LIVE, "finished", "failed", "stopped", "expired")},
            "failures": self.failures,
            "freed_to_next_ms": None if latency is None else latency._asdict(),
        }

    def _apply(self, trigger_id: str, event: Mapping[str, Any]) -> None:
        match event["type"]:
            case "accepted" | "resumed":
                self._move(trigger_id, "waiting")
            case "dispatched":
                self.started += 1
                self._move(trigger_id, "running")
            case "paused":
                self._move(trigger_id, "paused")
            case "finished" | "replied":
                self._move(trigger_id, "finished")
            case "attempt_failed":
                self.failures += 1
                self._move(trigger_id, "failed" if event.get("final") else "waiting")
            case "lease_expired":
                self.failures += 1
                self._move(trigger_id, event.get("final") or "waiting")
            case "payload_lost" if event.get("final"):
                self._move(trigger_id, "failed")
            case "stopped" | "expired" as state:
                self._move(trigger_id, state)

    def _move(self, trigger_id: str, state: State) -> None:
        before = self._live.pop(trigger_id, None)
        if before is not None:
            self._counts[before] -= 1
        self._counts[state] += 1
        if state in LIVE:
            self._live[trigger_id] = state

    def _pair(self, place: tuple[int, int], seen_at: float | None) -> None:
        """``seen_at`` None: the decision gave no place away."""
        if place in self._reported_at:
            self._measure(seen_at, self._reported_at.pop(place))
        elif place[1] >= self._first_status_offsets.get(place[0], 0):
            self._seen_at[place] = seen_at

    def _measure(self, seen_at: float | None, reported_at: float) -> None:
        if seen_at is not None:
            self._latencies.append(max(0.0, seen_at - reported_at) * 1000)
            self._latencies_count += 1


def in_words(found: Mapping[str, Any]) -> str:
    """One line for people, of what ``as_json`` gives and the ``seconds`` since the begin."""
    latency = found["freed_to_next_ms"]
    freed = f"{latency['p50']:.0f} / {latency['p99']:.0f} ms" if latency else "-"
    refused = f"  refused {found['refused']}" if found["refused"] else ""
    return (
        f"{found['seconds']:6.0f} s  started {found['started']}  waiting {found['waiting']}  "
        f"running {found['running']}  finished {found['finished']}  failed {found['failed']}{refused}  "
        f"freed→next p50/p99 {freed}"
    )
