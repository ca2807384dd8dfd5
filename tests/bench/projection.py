"""The projector beside a log that was decided before: how fast it catches up, and how far behind it is meanwhile.

The decisions are real: partitions decide triggers and their ends, in memory, before anything is measured. Each agent's
trigger finishes some hundred triggers later, so most rows are written once as new and once as changed.

catch-up  all of it is in Kafka before ``berth projector`` starts. Decisions per second from its first batch to its
          last, with the tables, indexes and snapshots of a real deployment.
lag       decisions at 1,000 per second, in transactions as a worker commits them: from the end of each transaction to
          the moment when a listener on PostgreSQL sees it applied.
"""

import asyncio
import json
import tempfile
import time
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import psycopg
from aiokafka import AIOKafkaProducer

from api.cli.embedded_postgres import EmbeddedPostgres
from streams import DECISIONS, DISPATCHES, STATUSES, TEXTS, TRIGGERS
from streams.codec import Output, Record, partition_of
from streams.partition import Partition
from streams.rules.limits import Defaults
from tests.bench.processes import Child, child
from tests.brokers import empty_topics

PARTITIONS: Final = 8
AGENTS: Final = 64
RUNNING: Final = 200
"""Triggers that run at once, over all agents."""
CATCH_UP_TRIGGERS: Final = 30_000
LAG_RATE: Final = 1_000
LAG_SECONDS: Final = 20
TRANSACTION_DECISIONS: Final = 25
CAUGHT_UP_SECONDS_MAX: Final = 180.0

LISTENER: Final = "tests.bench.projection_listener"

Step = tuple[int, list[Output]]
"""Number of the partition, and what one handled record wrote of what is projected."""


def steps(triggers: int) -> Iterator[Step]:
    """Triggers that come, run and finish."""
    partitions = [Partition(number, PARTITIONS, Defaults(4)) for number in range(PARTITIONS)]
    offsets: dict[tuple[int, str], int] = {}
    running: deque[dict[str, Any]] = deque()
    for partition in partitions:
        partition.loaded(time.time_ns() // 1000, False)

    def handle(topic: str, value: dict[str, Any]) -> Step:
        number = partition_of(value["agent_id"], PARTITIONS)
        offset = offsets.get((number, topic), 0)
        offsets[number, topic] = offset + 1
        record = Record(topic, number, offset, value["agent_id"].encode(), json.dumps(value).encode())
        partitions[number].handle(record, time.time_ns() // 1000)
        changes = partitions[number].take_changes()
        assert changes is not None
        running.extend(json.loads(out.value or b"") for out in changes.outputs if out.topic == DISPATCHES.name)
        return number, [out for out in changes.outputs if out.topic in (DECISIONS.name, TEXTS.name)]

    for count in range(triggers):
        trigger = {"type": "trigger", "v": 1, "id": f"t{count}", "agent_id": f"agent-{count % AGENTS}"}
        about = {"conversation_id": f"c{count}", "message": "do the work", "payload": {"n": count}}
        yield handle(TRIGGERS.name, {**trigger, **about})
        if len(running) > RUNNING:
            yield handle(STATUSES.name, _finished(running.popleft()))
    while running:
        yield handle(STATUSES.name, _finished(running.popleft()))


def _finished(dispatch: dict[str, Any]) -> dict[str, Any]:
    about = {name: dispatch[name] for name in ("agent_id", "conversation_id", "execution_id")}
    return {"type": "status", "v": 1, "status": "finished", **about}


async def projection(bootstrap: str) -> dict[str, Any]:
    """Both measures, each on empty topics and tables."""
    with postgres() as url:
        found = await _catch_up(bootstrap, url)
        with psycopg.connect(url) as connection:
            connection.execute("DROP SCHEMA berth CASCADE")
        return found | await _lag(bootstrap, url)


@contextmanager
def postgres() -> Iterator[str]:
    """URL of a server of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="berth-postgres-") as directory,
        EmbeddedPostgres(Path(directory), port=None) as server,
    ):
        yield server.url


async def seconds_behind(process: Child) -> float:
    """How long it takes the projector to get to the end of the log from now, when nothing is written any more."""
    _, listens = await process.event("projector_listens")
    began = time.monotonic()
    async with asyncio.timeout(CAUGHT_UP_SECONDS_MAX), aiohttp.ClientSession() as session:
        while True:
            async with session.get(listens["readyz"]) as answer:
                if (await answer.json())["lag_records"] == 0:
                    return time.monotonic() - began
            await asyncio.sleep(0.05)


async def _catch_up(bootstrap: str, url: str) -> dict[str, Any]:
    await empty_topics(bootstrap, PARTITIONS)
    decisions = 0
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, linger_ms=20, max_batch_size=256 * 1024)
    await producer.start()
    for number, outputs in steps(CATCH_UP_TRIGGERS):
        for output in outputs:
            await producer.send(output.topic, output.value, output.key, partition=number, headers=list(output.headers))
            decisions += output.topic == DECISIONS.name
    await producer.stop()
    async with child(LISTENER, url) as listener, projector(bootstrap, url) as process:
        async with asyncio.timeout(CAUGHT_UP_SECONDS_MAX):
            while not (found := _positions(listener)) or sum(found[-1][1].values()) < decisions:
                await asyncio.sleep(0.05)
        memory_bytes = process.memory_bytes()
    samples = [(at_seconds, sum(positions.values())) for at_seconds, positions in found]
    first = next(sample for sample in samples if sample[1] > 0)
    rate = (samples[-1][1] - first[1]) / (samples[-1][0] - first[0])
    return {"caught_up_decisions_per_second": round(rate), "projector_memory_mb": memory_bytes // 2**20}


async def _lag(bootstrap: str, url: str) -> dict[str, Any]:
    await empty_topics(bootstrap, PARTITIONS)
    by_partition: dict[int, list[Output]] = {number: [] for number in range(PARTITIONS)}
    for number, outputs in steps(LAG_RATE * LAG_SECONDS // 2):
        by_partition[number] += outputs
    committed: dict[int, list[tuple[int, float, int]]] = {number: [] for number in range(PARTITIONS)}
    async with child(LISTENER, url) as listener, projector(bootstrap, url):
        await asyncio.gather(
            *(_commit(bootstrap, number, by_partition[number], committed[number]) for number in range(PARTITIONS))
        )
        async with asyncio.timeout(CAUGHT_UP_SECONDS_MAX):
            while any(_positions(listener)[-1][1][n] < committed[n][-1][0] for n in range(PARTITIONS)):
                await asyncio.sleep(0.05)
        found = [entry for entry in _positions(listener) if entry[1]]
    lags: list[float] = []
    for number in range(PARTITIONS):
        ends = [positions[number] for _, positions in found]
        for end, at, count in committed[number]:
            seen = found[bisect_left(ends, end)][0]
            lags += [max(0.0, seen - at)] * count
    lags.sort()
    count = sum(count for number in committed.values() for _, _, count in number)
    first = min(number[0][1] for number in committed.values())
    last = max(number[-1][1] for number in committed.values())
    return {
        "lag_at_decisions_per_second": round(count / (last - first)),
        "lag_p50_ms": round(lags[len(lags) // 2] * 1000, 1),
        "lag_p99_ms": round(lags[int(len(lags) * 0.99)] * 1000, 1),
        "lag_max_ms": round(lags[-1] * 1000, 1),
    }


async def _commit(
    bootstrap: str, number: int, outputs: Sequence[Output], committed: list[tuple[int, float, int]]
) -> None:
    """Commit one partition's share in transactions at a steady pace, noting (end offset, time, decisions) of each."""
    producer = AIOKafkaProducer(
        bootstrap_servers=bootstrap, transactional_id=f"bench-projection-{number}", retry_backoff_ms=5
    )
    await producer.start()
    began, sent = time.monotonic(), 0
    rest = deque(outputs)
    total = sum(output.topic == DECISIONS.name for output in outputs)
    while rest:
        await asyncio.sleep(max(0.0, began + LAG_SECONDS * sent / total - time.monotonic()))
        count, acknowledged = 0, []
        async with producer.transaction():
            while rest and count < TRANSACTION_DECISIONS:
                output = rest.popleft()
                future = await producer.send(output.topic, output.value, output.key, partition=number)
                if output.topic == DECISIONS.name:
                    count += 1
                    acknowledged.append(future)
            end = max([(await future).offset for future in acknowledged], default=-1) + 1
        sent += count
        if count:
            committed.append((end, time.monotonic(), count))
    await producer.stop()


def _positions(listener: Child) -> list[tuple[float, dict[int, int]]]:
    """What the listener has said: (monotonic second, next offset by partition)."""
    return [(said["at_seconds"], dict(said["next_offsets"])) for _, said in listener.events]


@asynccontextmanager
async def projector(bootstrap: str, url: str) -> AsyncIterator[Child]:
    environment = {"BERTH_KAFKA": bootstrap, "BERTH_DATABASE_URL": url, "BERTH_PARTITIONS": str(PARTITIONS)}
    async with child("api.cli", "projector", **environment) as process:
        await process.event("projector_follows")
        yield process
