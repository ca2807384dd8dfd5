"""Drain, latency under load, restore, memory and take-over of Berth, and the drain of plain Faust.

drain     a backlog of triggers, then one of `finished`, is in Kafka before a worker starts. Records handled per second
          from the moment when its first partition is ready to read until the last decision is committed; the start
          before that is told beside it. Each `finished` also dispatches the next trigger. Plain Faust gets the same
          records of triggers, and its time begins with its first event.
latency   triggers at a steady rate, open loop: from the moment when each is sent to the moment when a reader of
          committed records sees its decision.
restore   the worker starts again on all that: rows read from the changelog per second, over all partitions at once.
memory    resident memory of that worker, less that of a worker without any state, less the texts themselves, for each
          waiting trigger.
takeover  kill -9 of one of two workers under load: seconds until the first decision on each of its partitions.
"""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from pydantic_core import from_json

from streams import CHANGELOG, DECISIONS, DISPATCHES, STATUSES, TRIGGERS
from streams.codec import partition_of
from tests.bench.berth import (
    PARTITIONS,
    SESSION_SECONDS,
    berth_worker,
    configure,
    finished_record,
    pipeline,
    producing,
    trigger_record,
)
from tests.bench.processes import child
from tests.bench.systems import new_topics, next_number
from tests.bench.workloads import Item, item_id, percentile

DRAIN_AGENTS: Final = 2_000
DRAIN_ITEMS: Final = 40_000
DRAIN_LIMIT: Final = 10
"""So that half of the items are dispatched at once and half wait for a `finished` each."""
MESSAGE_TEXT: Final = "Please look at the failing build and tell me what to change. " * 4
LATENCY_PER_SECOND: Final = 500
LATENCY_SECONDS: Final = 8
RESTORE_AGENTS: Final = 500
RESTORE_ITEMS: Final = 100_000
RESTORE_TEXT: Final = "x" * 800
"""Makes the average row of the changelog 500 bytes long."""
TAKEOVER_PER_SECOND: Final = 200


async def drain(bootstrap: str) -> dict[str, Any]:
    """Triggers and `finished` handled per second by a freshly started worker, and by plain Faust."""
    agents = [f"agent-{index}" for index in range(DRAIN_AGENTS)]
    items = [(agent, number) for number in range(DRAIN_ITEMS // DRAIN_AGENTS) for agent in agents]
    async with producing(bootstrap) as producer:
        async with berth_worker(bootstrap) as worker:
            await worker.ready()
            await configure(producer, agents, DRAIN_LIMIT)
            await worker.handled(len(agents))
        await pipeline(producer, items, message=MESSAGE_TEXT)
        triggers = await _drained(bootstrap, len(items))
        dispatches = await _read_all(bootstrap, DISPATCHES.name)
        for dispatch in dispatches:
            agent = dispatch["agent_id"].encode()
            await producer.send(STATUSES.name, key=agent, value=finished_record(dispatch))
        await producer.flush()
        finished = await _drained(bootstrap, len(dispatches))
        assert len(await _read_all(bootstrap, DISPATCHES.name)) == len(items), (
            "each finished gives its place to the next"
        )
        faust = await _faust(bootstrap, producer, items)
    return {
        "triggers_per_second": triggers["per_second"],
        "finished_per_second": finished["per_second"],
        "faust_per_second": round(faust),
        "start_seconds": triggers["start_seconds"],
        "transaction_mean_ms": triggers["transaction_mean_ms"],
        "records_per_transaction": triggers["records_per_transaction"],
        **{f"finished_{name}": finished[name] for name in ("transaction_mean_ms", "records_per_transaction")},
    }


async def _drained(bootstrap: str, count: int) -> dict[str, Any]:
    async with berth_worker(bootstrap, new_topics=False) as worker:
        reads_at, _ = await worker.process.event("restored")
        handled_at = await worker.handled(count)
        metrics = await worker.metrics()
        transactions = metrics["berth_transactions_total"]
        return {
            "per_second": round(count / (handled_at - reads_at)),
            "start_seconds": round(reads_at - worker.process.started, 2),
            "transaction_mean_ms": round(metrics["berth_commit_seconds_sum"] / transactions * 1000, 1),
            "records_per_transaction": round(count / transactions),
        }


async def _faust(bootstrap: str, producer: AIOKafkaProducer, items: list[Item]) -> float:
    name = f"bench.faust.{next_number()}"
    source, target = f"{name}.in", f"{name}.out"
    async with new_topics(bootstrap, source, target):
        for item in items:
            value = trigger_record(item, message=MESSAGE_TEXT)
            await producer.send(source, key=item[0].encode(), value=value)
        await producer.flush()
        async with (
            _ends(bootstrap, target) as ends,
            child("tests.bench.plain_faust", bootstrap, name, source, target) as faust,
        ):
            first_at, _ = await faust.event("first")
            async with asyncio.timeout(120):
                while await ends() < len(items):
                    await asyncio.sleep(0.02)
            return len(items) / (time.monotonic() - first_at)


async def latency(bootstrap: str) -> dict[str, Any]:
    """Milliseconds from sending a trigger to seeing its decision, at a steady rate."""
    agents = [f"agent-{index}" for index in range(DRAIN_AGENTS)]
    sent: dict[str, float] = {}
    latencies: list[float] = []
    count = LATENCY_PER_SECOND * LATENCY_SECONDS
    async with berth_worker(bootstrap) as worker, producing(bootstrap) as producer:
        await worker.ready()
        await configure(producer, agents, DRAIN_LIMIT)
        await worker.handled(len(agents))

        async def watch() -> None:
            async with _reading(bootstrap, DECISIONS.name, from_end=True) as consumer:
                watching.set()
                while len(latencies) < count:
                    for records in (await consumer.getmany(timeout_ms=200)).values():
                        now = time.monotonic()
                        for record in records:
                            id = dict(record.headers).get("command_id", b"").decode()
                            if id in sent:
                                latencies.append((now - sent.pop(id)) * 1000)

        watching = asyncio.Event()
        watcher = asyncio.create_task(watch())
        await watching.wait()
        begin = time.monotonic()
        for number in range(count):
            item = agents[number % len(agents)], number // len(agents)
            await asyncio.sleep(max(0.0, begin + number / LATENCY_PER_SECOND - time.monotonic()))
            sent[item_id(item)] = time.monotonic()
            await producer.send(TRIGGERS.name, key=item[0].encode(), value=trigger_record(item, message=MESSAGE_TEXT))
        async with asyncio.timeout(30):
            await watcher
    latencies.sort()
    return {
        "sent_per_second": LATENCY_PER_SECOND,
        "p50_ms": percentile(latencies, 0.5),
        "p99_ms": percentile(latencies, 0.99),
        "max_ms": percentile(latencies, 1.0),
    }


async def restore_and_memory(bootstrap: str) -> dict[str, Any]:
    """Rows restored per second, and memory for each waiting trigger."""
    agents = [f"agent-{index}" for index in range(RESTORE_AGENTS)]
    items = [(agent, number) for number in range(RESTORE_ITEMS // RESTORE_AGENTS) for agent in agents]
    async with producing(bootstrap) as producer, berth_worker(bootstrap) as worker:
        await worker.ready()
        empty_bytes = worker.process.memory_bytes()
        await configure(producer, agents, 1)
        await worker.handled(len(agents))
        await pipeline(producer, items, message=RESTORE_TEXT)
        await worker.handled(len(agents) + len(items))
    rows, row_bytes = await _changelog_size(bootstrap)
    async with berth_worker(bootstrap, new_topics=False) as worker:
        assigned_at, _ = await worker.process.event("assigned")
        restored_at, _ = await worker.process.event("restored", count=PARTITIONS)
        await worker.ready()
        full_bytes = worker.process.memory_bytes()
    waiting = len(items) - len(agents)
    text_bytes = len(items) * len(RESTORE_TEXT)
    return {
        "rows": rows,
        "row_bytes_mean": round(row_bytes / rows),
        "restore_seconds": round(restored_at - assigned_at, 2),
        "restored_rows_per_second": round(rows / (restored_at - assigned_at)),
        "waiting": waiting,
        "memory_bytes_per_waiting": round((full_bytes - empty_bytes - text_bytes) / waiting),
        "memory_mb": round(full_bytes / 2**20),
        "memory_empty_mb": round(empty_bytes / 2**20),
    }


async def takeover(bootstrap: str) -> dict[str, Any]:
    """Seconds from kill -9 of one of two workers to the first decision on each of its partitions; the last of them."""
    agents = [f"agent-{index}" for index in range(200)]
    assert {partition_of(agent, PARTITIONS) for agent in agents} == set(range(PARTITIONS))
    async with producing(bootstrap) as producer, berth_worker(bootstrap) as first:
        await first.ready()
        async with berth_worker(bootstrap, new_topics=False) as second:
            await asyncio.gather(first.ready(PARTITIONS // 2), second.ready(PARTITIONS // 2))
            victims = {int(number) for number in (await second.readiness())["partitions"]}
            load = asyncio.create_task(_steady(producer, agents))
            async with _reading(bootstrap, DECISIONS.name, from_end=True) as consumer:
                await _first_decisions(consumer, set(range(PARTITIONS)), not_before=0.0)
                await second.process.end(signal.SIGKILL)
                killed_at = time.monotonic()
                # What it had committed may still be on its way to us; its successor can't be that quick.
                seen = await _first_decisions(consumer, victims, not_before=killed_at + SESSION_SECONDS / 4)
            load.cancel()
    seconds = [at - killed_at for at in seen.values()]
    return {
        "partitions": len(victims),
        "first_seconds": round(min(seconds), 2),
        "last_seconds": round(max(seconds), 2),
        "session_timeout_seconds": SESSION_SECONDS,
    }


async def _steady(producer: AIOKafkaProducer, agents: list[str]) -> None:
    number, begin = 0, time.monotonic()
    while True:
        item = agents[number % len(agents)], number // len(agents)
        await producer.send(TRIGGERS.name, key=item[0].encode(), value=trigger_record(item))
        number += 1
        await asyncio.sleep(max(0.0, begin + number / TAKEOVER_PER_SECOND - time.monotonic()))


async def _first_decisions(consumer: AIOKafkaConsumer, partitions: set[int], *, not_before: float) -> dict[int, float]:
    """When the first decision of each of these partitions was seen after ``not_before`` (monotonic seconds)."""
    seen: dict[int, float] = {}
    async with asyncio.timeout(60):
        while partitions - seen.keys():
            fetched = await consumer.getmany(timeout_ms=100)
            now = time.monotonic()
            for (_, number), records in fetched.items():
                if records and now >= not_before and number in partitions:
                    seen.setdefault(number, now)
    return seen


# Reading


@asynccontextmanager
async def _reading(bootstrap: str, topic: str, *, from_end: bool = False) -> AsyncIterator[AIOKafkaConsumer]:
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap,
        isolation_level="read_committed",
        auto_offset_reset="earliest",
        max_partition_fetch_bytes=4 * 2**20,
    )
    await consumer.start()
    try:
        partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
        ends = await consumer.end_offsets(partitions)
        consumer.assign(partitions)
        for partition in partitions:
            consumer.seek(partition, ends[partition] if from_end else 0)
        yield consumer
    finally:
        await consumer.stop()


@asynccontextmanager
async def _ends(bootstrap: str, topic: str) -> AsyncIterator[Callable[[], Awaitable[int]]]:
    """A function that gives the sum of the ends of all partitions."""
    async with _reading(bootstrap, topic, from_end=True) as consumer:
        partitions = consumer.assignment()
        consumer.pause(*partitions)

        async def ends() -> int:
            return sum((await consumer.end_offsets(partitions)).values())

        yield ends


async def _read_all(bootstrap: str, topic: str) -> list[dict[str, Any]]:
    values = [from_json(value) async for value in _values(bootstrap, topic)]
    return [value for value in values if value["type"] == "dispatch"]


async def _changelog_size(bootstrap: str) -> tuple[int, int]:
    """Number of rows and their bytes."""
    sizes = [len(value or b"") async for value in _values(bootstrap, CHANGELOG.name)]
    return len(sizes), sum(sizes)


async def _values(bootstrap: str, topic: str) -> AsyncIterator[bytes]:
    async with _reading(bootstrap, topic) as consumer:
        ends = await consumer.end_offsets(consumer.assignment())
        while any([await consumer.position(partition) < end for partition, end in ends.items()]):
            for records in (await consumer.getmany(timeout_ms=200)).values():
                for record in records:
                    yield record.value
