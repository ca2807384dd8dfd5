"""Freed → next where a place at a site is needed: a worker of its pool, or a folder.

Agents without a limit of their own, on all partitions, and one site with so many workers, or folders, as PLACES. All
items are enqueued first and wait at the site; then the runner is switched on. Each end takes three decisions on the way
to the next start, each in a transaction of its own: the agent's (``finished``, which gives the place back), the site's
(who is next), the next agent's (the dispatch). The time is from just before a completion is handed to Kafka until the
runner's code for the item begins that gets the place: in a folder the next one there; in the pool the starts after the
first PLACES, in order, belong to the ends, in order.
"""

import time
from itertools import pairwise
from typing import Any, Final

from aiokafka import AIOKafkaProducer
from pydantic_core import to_json

from streams import DISPATCHES, SITE_CONTROLS, STATUSES, TRIGGERS
from tests.bench.berth import BerthWorker, berth_worker, configure, producing, trigger_record
from tests.bench.processes import child
from tests.bench.workloads import Item, Run, item_id, percentile

SITE: Final = "default"
PLACES: Final = 12
RUN_SECONDS: Final = 0.15
"""With so many places about 70 ends a second, so about 210 decisions."""
AGENTS: Final = 24
ITEMS: Final = 600
DONE_SECONDS_MAX: Final = 60.0


async def sites(bootstrap: str) -> dict[str, Any]:
    """Milliseconds from an end to the next start, by the pool's workers and by folders, and the rate of decisions."""
    found: dict[str, Any] = {}
    for place in ("worker", "folder"):
        async with berth_worker(bootstrap) as worker, producing(bootstrap) as producer:
            runs, decisions_per_second = await _run(bootstrap, worker, producer, by_folder=place == "folder")
        latencies = sorted(_by_folder(runs) if place == "folder" else _by_pool(runs))
        found |= {
            f"{place}_decisions_per_second": round(decisions_per_second),
            f"{place}_p50_ms": percentile(latencies, 0.5),
            f"{place}_p99_ms": percentile(latencies, 0.99),
            f"{place}_max_ms": percentile(latencies, 1.0),
        }
    return found


async def _run(
    bootstrap: str, worker: BerthWorker, producer: AIOKafkaProducer, *, by_folder: bool
) -> tuple[list[Run], float]:
    """The log of the runner, and decisions per second while it was on."""
    items = [(f"agent-{number % AGENTS}", number) for number in range(ITEMS)]
    await worker.ready()
    agents = sorted({agent for agent, _ in items})
    await configure(producer, agents, "unlimited")
    await producer.send(SITE_CONTROLS.name, key=SITE.encode(), value=_configure_site())
    for item in items:
        await producer.send(TRIGGERS.name, key=item[0].encode(), value=trigger_record(item, **_place(item, by_folder)))
    await producer.flush()
    await worker.handled(asked := len(agents) + 1 + 3 * ITEMS)  # each trigger, its claim, and the site's answer
    arguments = ("berth", DISPATCHES.name, STATUSES.name, str(ITEMS), str(RUN_SECONDS))
    async with child("tests.bench.lean_runner", bootstrap, *arguments) as runner:
        await runner.event("ready")
        runner.tell("go")
        began = time.monotonic()
        _, done = await runner.event("done", timeout_seconds=DONE_SECONDS_MAX)
        decided = (await worker.metrics())["berth_records_handled_total"] - asked
        seconds = time.monotonic() - began
    runs = [Run(*row) for row in done["runs"]]
    assert sorted(item_id((run.agent, run.number)) for run in runs) == sorted(map(item_id, items)), "twice, or missing"
    return runs, decided / seconds


def _configure_site() -> bytes:
    control = {"type": "configure_site", "v": 1, "id": "bench", "site": SITE, "requested_by": "bench"}
    return to_json(control | {"capacity": PLACES})


def _place(item: Item, by_folder: bool) -> dict[str, object]:
    if by_folder:
        return {"environment_id": "bench", "folder": f"/src/{item[1] % PLACES}"}
    return {"worker": True}


def _by_folder(runs: list[Run]) -> list[float]:
    latencies: list[float] = []
    for folder in range(PLACES):
        its = sorted((run for run in runs if run.number % PLACES == folder), key=lambda run: run.started_ns)
        latencies += [(later.started_ns - earlier.done_ns) / 1e6 for earlier, later in pairwise(its)]
    assert min(latencies) >= 0, "two were in one folder"
    return latencies


def _by_pool(runs: list[Run]) -> list[float]:
    starts, ends = sorted(run.started_ns for run in runs), sorted(run.done_ns for run in runs)
    latencies = [(start - end) / 1e6 for start, end in zip(starts[PLACES:], ends, strict=False)]
    assert min(latencies) >= 0, "more were at work than there are workers"
    return latencies
