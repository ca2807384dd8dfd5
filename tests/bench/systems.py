"""The workloads on Berth and on the Kafka floor: the same client, the same runner, the same order of steps.

The system is on from the beginning. What is enqueued is handled before the runner is switched on, so the rate of W1 is
that of completions and dispatches alone, for both.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from streams import DISPATCHES, STATUSES, TRIGGERS
from tests.bench import berth
from tests.bench.berth import PARTITIONS, BerthWorker, berth_worker, configure, pipeline, producing
from tests.bench.processes import Child, child
from tests.bench.projection import postgres, projector, seconds_behind
from tests.bench.workloads import CAP_SECONDS, Run, Workload, account, item_id
from tests.brokers import delete_topics

_numbers = itertools.count(time.time_ns() // 1_000_000_000)


def next_number() -> int:
    """For names of topics: never used before."""
    return next(_numbers)


async def run_on_berth(bootstrap: str, planned: Workload) -> dict[str, Any]:
    async with berth_worker(bootstrap) as worker, producing(bootstrap) as producer:
        return await _drive(bootstrap, planned, worker, producer)


async def run_beside_projector(bootstrap: str, planned: Workload) -> dict[str, Any]:
    """The same with a projector on the same machine, and how long it needs to catch up when the last item is done."""
    with postgres() as url:
        async with (
            berth_worker(bootstrap) as worker,
            producing(bootstrap) as producer,
            projector(bootstrap, url) as process,
        ):
            found = await _drive(bootstrap, planned, worker, producer)
            return found | {"behind_seconds": round(await seconds_behind(process), 2)}


async def _drive(bootstrap: str, planned: Workload, worker: BerthWorker, producer: AIOKafkaProducer) -> dict[str, Any]:
    await worker.ready()
    await configure(producer, planned.agents, planned.limit)
    await worker.handled(expected := len(planned.agents))
    if planned.backlog:
        await pipeline(producer, planned.backlog)
        await worker.handled(expected := expected + len(planned.backlog))
    async with _runner(bootstrap, "berth", DISPATCHES.name, STATUSES.name, planned) as runner:
        enqueued = await berth.enqueue(producer, TRIGGERS.name, planned.items)
        await worker.handled(expected + len(planned.items))
        before = await worker.metrics()
        found = await _switch_on(runner, planned)
        after = await worker.metrics()
    transactions = after["berth_transactions_total"] - before["berth_transactions_total"]
    return {"enqueued_per_second": round(enqueued), "transactions": int(transactions), **found}


async def run_on_floor(bootstrap: str, planned: Workload) -> dict[str, Any]:
    prefix = f"bench.floor.{next_number()}."
    async with (
        new_topics(bootstrap, *(f"{prefix}{kind}" for kind in ("start", "done", "dispatch", "positions"))),
        child("tests.bench.floor", bootstrap, prefix, str(planned.limit)) as floor,
        producing(bootstrap) as producer,
    ):
        await floor.event("ready")
        for item in planned.backlog:
            await producer.send(f"{prefix}start", key=item[0].encode(), value=item_id(item).encode())
        await producer.flush()
        await _handled(floor, len(planned.backlog))
        async with _runner(bootstrap, "floor", f"{prefix}dispatch", f"{prefix}done", planned) as runner:
            enqueued = await berth.enqueue(producer, f"{prefix}start", planned.items, for_floor=True)
            before = await _handled(floor, len(planned.backlog) + len(planned.items))
            found = await _switch_on(runner, planned)
            after = floor.events[-1][1]["transactions"]
        return {"enqueued_per_second": round(enqueued), "transactions": after - before, **found}


@asynccontextmanager
async def new_topics(bootstrap: str, *names: str) -> AsyncIterator[None]:
    """Topics that are deleted with the block."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(name, PARTITIONS, 1) for name in names])
        await asyncio.sleep(1)  # a new topic answers the first records with NotLeaderForPartition
        yield
    finally:
        await delete_topics(admin, names)
        await admin.close()


async def _handled(floor: Child, count: int) -> int:
    """Wait until the floor has handled so many records; its transactions by then."""
    async with asyncio.timeout(60):
        while True:
            for _, event in reversed(floor.events):
                if event["event"] == "handled" and event["count"] >= count:
                    return int(event["transactions"])
            if count == 0:
                return 0
            await asyncio.sleep(0.02)


@asynccontextmanager
async def _runner(
    bootstrap: str, dialect: str, dispatches: str, completions: str, planned: Workload
) -> AsyncIterator[Child]:
    arguments = (dialect, dispatches, completions, str(len(planned.items)), str(planned.run_seconds))
    async with child("tests.bench.lean_runner", bootstrap, *arguments) as runner:
        await runner.event("ready")
        yield runner


async def _switch_on(runner: Child, planned: Workload) -> dict[str, Any]:
    runner.tell("go")
    _, went = await runner.event("went")
    capped = False
    try:
        _, done = await runner.event("done", timeout_seconds=CAP_SECONDS)
    except TimeoutError:
        capped = True
        runner.tell("stop")
        _, done = await runner.event("done")
    runs = [Run(*row) for row in done["runs"]]
    seconds = (max(run.done_ns for run in runs) - went["at_ns"]) / 1e9 if runs else 0.0
    found = account(runs, planned, capped=capped)
    return {"admitted_per_second": round(len(runs) / seconds) if seconds else 0, **found}
