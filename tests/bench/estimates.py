"""How often waiting work starts within the band that was estimated for it: on a trace of requests, or an invented one.

    python -m tests.bench.estimates TRACE.csv

The trace has a line for each request: TIMESTAMP,ContextTokens,GeneratedTokens. Requests arrive as they did, spread over
agents by their number; an attempt takes a fixed time for each token that it generated. The real deciders run them. Once
a minute everything that waits is estimated from what was recorded until then, and compared with what came.
"""

import csv
import heapq
import random
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple

from streams import DECISIONS, SITE_DECISIONS
from streams.audit.estimate import Estimate, History
from streams.audit.logged import Logged, merged, read
from streams.rules.order import SECOND
from tests.driving import T0, Driven

AGENTS: Final = 12
LIMIT: Final = 3
POOL: Final = 14
TOKEN_SECONDS: Final = 0.025
EVERY_SECONDS: Final = 60
WORKERS: Final = 3
"""Every third agent's work needs a worker of a shared pool as well."""


class Request(NamedTuple):
    at: int
    seconds: float


class Coverage(NamedTuple):
    """``inside``: estimates whose trigger started within the band, ``later``: after it."""

    estimates: int
    inside: int
    later: int
    median_error_seconds: float
    median_band_seconds: float

    @property
    def share(self) -> float:
        return self.inside / self.estimates


def trace(path: Path) -> list[Request]:
    """The requests of a file, beginning at T0."""
    with path.open(newline="") as lines:
        found = [(_instant(line["TIMESTAMP"]), int(line["GeneratedTokens"])) for line in csv.DictReader(lines)]
    first = min(at for at, _ in found)
    return [Request(T0 + at - first, tokens * TOKEN_SECONDS) for at, tokens in sorted(found)]


def _instant(text: str) -> int:
    whole, _, part = text.partition(".")
    moment = datetime.strptime(whole, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
    return int(moment.timestamp()) * SECOND + int(part[:6].ljust(6, "0"))


def invented(chance: random.Random, requests: int, seconds: float) -> list[Request]:
    """Requests at random times with durations that spread as those of real ones do."""
    times = sorted(chance.random() * seconds for _ in range(requests))
    return [Request(T0 + round(at * SECOND), chance.lognormvariate(1.3, 0.8)) for at in times]


def measured(
    requests: Sequence[Request], sites: bool = True, every_seconds: int = EVERY_SECONDS
) -> dict[str, Coverage]:
    """Coverage of all estimates, of those with a shared pool, and of those without."""
    history = History()
    made: list[tuple[int, Estimate]] = []
    started: dict[tuple[str, str], int] = {}
    for estimates_at, logged in _lived(requests, sites, every_seconds):
        if estimates_at is not None:
            made += [(estimates_at, estimate) for estimate in history.estimates(estimates_at)]
        for one in logged:
            history.take(one)
            for event in one.decision.events:
                if event.type == "dispatched":
                    started.setdefault((one.decider.id, event.trigger_id), one.decision.at)
    timed = [
        (estimate, started[estimate.agent_id, estimate.trigger_id])
        for _, estimate in made
        if estimate.starts_at is not None and (estimate.agent_id, estimate.trigger_id) in started
    ]
    shared = [pair for pair in timed if _uses_pool(pair[0].agent_id, sites)]
    alone = [pair for pair in timed if not _uses_pool(pair[0].agent_id, sites)]
    return {name: _coverage(pairs) for name, pairs in (("all", timed), ("pool", shared), ("agent", alone)) if pairs}


def _uses_pool(agent_id: str, sites: bool) -> bool:
    return sites and int(agent_id.removeprefix("agent-")) % WORKERS == 0


def _coverage(pairs: list[tuple[Estimate, int]]) -> Coverage:
    inside = later = 0
    errors, bands = [], []
    for estimate, at in pairs:
        assert estimate.from_at is not None and estimate.to_at is not None and estimate.starts_at is not None
        inside += estimate.from_at <= at <= estimate.to_at
        later += at > estimate.to_at
        errors.append(abs(at - estimate.starts_at) / SECOND)
        bands.append((estimate.to_at - estimate.from_at) / SECOND)
    return Coverage(len(pairs), inside, later, sorted(errors)[len(errors) // 2], sorted(bands)[len(bands) // 2])


def _lived(requests: Sequence[Request], sites: bool, every_seconds: int) -> Iterator[tuple[int | None, list[Logged]]]:
    """(instant at which to estimate, nothing) and (None, what was decided since), in turn."""
    driven = Driven(default_limit=LIMIT, pool=POOL, verified=False)
    numbers = count()
    events: list[tuple[int, int, str, dict[str, Any]]] = []
    seconds = {}
    for number, request in enumerate(requests):
        about: dict[str, Any] = {"id": f"t{number}", "agent_id": f"agent-{number % AGENTS}"}
        if _uses_pool(about["agent_id"], sites):
            about["worker"] = True
        seconds[about["id"]] = request.seconds
        heapq.heappush(events, (request.at, next(numbers), "trigger", about))
    for turn in range(1, round((requests[-1].at - T0) / SECOND / every_seconds)):
        heapq.heappush(events, (T0 + turn * every_seconds * SECOND, next(numbers), "estimate", {}))
    told = taken = 0
    while events:
        at, _, what, about = heapq.heappop(events)
        driven.advance_to(at)
        if what == "trigger":
            driven.trigger(**about)
        elif what == "finish":
            driven.finish(about["trigger_id"], about["agent_id"])
        for dispatch in driven.dispatches[told:]:
            end = driven.now + round(seconds[dispatch["trigger_id"]] * SECOND)
            heapq.heappush(events, (end, next(numbers), "finish", dispatch))
        told = len(driven.dispatches)
        new, taken = driven.outputs[taken:], len(driven.outputs)
        yield at if what == "estimate" else None, _logged(new)


def _logged(outputs: Sequence[Any]) -> list[Logged]:
    topics = (DECISIONS.name, SITE_DECISIONS.name)
    found = {topic: [read(topic, 0, 0, one.value) for one in outputs if one.topic == topic] for topic in topics}
    return list(merged(found.values(), is_read=lambda _: False))


def main() -> None:
    coverages = measured(trace(Path(sys.argv[1])))
    for name, one in coverages.items():
        sys.stdout.write(
            f"{name}: {one.estimates:,} estimates, {one.share:.1%} started within the band "
            f"({one.later / one.estimates:.1%} later), median error {one.median_error_seconds:.2f} s, "
            f"median width of the band {one.median_band_seconds:.2f} s\n"
        )


if __name__ == "__main__":
    main()
