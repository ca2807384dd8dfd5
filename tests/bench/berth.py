"""Berth under measurement: a real ``berth worker`` process on new topics, and the records that drive it."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Literal, Self

import aiohttp
from aiokafka import AIOKafkaProducer
from pydantic_core import to_json

from streams import CONTROLS, TRIGGERS
from streams.rules.limits import BACKLOG_DEPTH_MAX
from tests.bench.processes import Child
from tests.bench.workloads import Item, item_id, lanes
from tests.brokers import empty_topics

PARTITIONS: Final = 8
SESSION_SECONDS: Final = 6.0
HANDLED_TIMEOUT_SECONDS: Final = 180.0
_SAMPLE: Final = re.compile(r"^(\w+)(?:\{[^}]*\})? ([0-9.e+-]+)$", re.MULTILINE)


class BerthWorker:
    """One worker process, watched through its own /readyz and /metrics."""

    def __init__(self, process: Child, address: str) -> None:
        self.process = process
        self.address = address
        self._session = aiohttp.ClientSession()

    @classmethod
    async def start(cls, bootstrap: str) -> Self:
        process = await Child.start(
            "api.cli", "worker", BERTH_KAFKA=bootstrap, BERTH_SESSION_TIMEOUT_SECONDS=str(SESSION_SECONDS)
        )
        _, listens = await process.event("worker_listens")
        return cls(process, str(listens["readyz"]).removesuffix("/readyz"))

    async def readiness(self) -> dict[str, Any]:
        async with self._session.get(f"{self.address}/readyz") as answer:
            found: dict[str, Any] = await answer.json()
            return found

    async def ready(self, partitions: int = PARTITIONS) -> dict[str, Any]:
        """Wait until it decides for so many partitions."""
        async with asyncio.timeout(HANDLED_TIMEOUT_SECONDS):
            while True:
                found = await self.readiness()
                if found["ready"] and len(found["partitions"]) == partitions:
                    return found
                await asyncio.sleep(0.02)

    async def metrics(self) -> dict[str, float]:
        """Sums over all labels."""
        sums: dict[str, float] = {}
        async with self._session.get(f"{self.address}/metrics") as answer:
            for name, value in _SAMPLE.findall(await answer.text()):
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    async def handled(self, count: int) -> float:
        """Wait until so many records are handled and committed; the (monotonic) second in which that was seen."""
        async with asyncio.timeout(HANDLED_TIMEOUT_SECONDS):
            while (await self.metrics()).get("berth_records_handled_total", 0.0) < count:
                await asyncio.sleep(0.02)
        return time.monotonic()

    async def end(self) -> None:
        await self._session.close()
        await self.process.end()


@asynccontextmanager
async def berth_worker(bootstrap: str, *, new_topics: bool = True) -> AsyncIterator[BerthWorker]:
    """A worker, on new topics unless the state of the last one is wanted."""
    if new_topics:
        await empty_topics(bootstrap, PARTITIONS)
    started = await BerthWorker.start(bootstrap)
    try:
        yield started
    finally:
        await started.end()


@asynccontextmanager
async def producing(bootstrap: str) -> AsyncIterator[AIOKafkaProducer]:
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", linger_ms=0, max_batch_size=64 * 1024)
    await producer.start()
    try:
        yield producer
    finally:
        await producer.stop()


def configure_record(agent_id: str, limit: int | Literal["unlimited"]) -> bytes:
    return to_json(
        {
            "type": "configure",
            "v": 1,
            "id": f"configure-{agent_id}",
            "agent_id": agent_id,
            "requested_by": "bench",
            "parallelism_limit": limit,
            "max_backlog_depth": BACKLOG_DEPTH_MAX,
        }
    )


def trigger_record(item: Item, **fields: Any) -> bytes:
    """Each item has a conversation of its own, so only the limit and the order hold it up."""
    id = item_id(item)
    return to_json(
        {
            "type": "trigger",
            "v": 1,
            "id": id,
            "agent_id": item[0],
            "conversation_id": f"conversation-{id}",
            "kind": "task",
            **fields,
        }
    )


def finished_record(dispatch: dict[str, Any]) -> bytes:
    return to_json(
        {
            "type": "status",
            "v": 1,
            "agent_id": dispatch["agent_id"],
            "conversation_id": dispatch["conversation_id"],
            "execution_id": dispatch["execution_id"],
            "status": "finished",
        }
    )


async def configure(producer: AIOKafkaProducer, agents: Sequence[str], limit: int | Literal["unlimited"]) -> None:
    for agent in agents:
        await producer.send(CONTROLS.name, key=agent.encode(), value=configure_record(agent, limit))
    await producer.flush()


async def pipeline(producer: AIOKafkaProducer, items: Iterable[Item], **fields: Any) -> None:
    """Send triggers without waiting for each acknowledgement."""
    for item in items:
        await producer.send(TRIGGERS.name, key=item[0].encode(), value=trigger_record(item, **fields))
    await producer.flush()


async def enqueue(producer: AIOKafkaProducer, topic: str, items: list[Item], *, for_floor: bool = False) -> float:
    """16 clients, each waiting for the acknowledgement of each item; items per second."""

    async def client(lane: list[Item]) -> None:
        for item in lane:
            value = item_id(item).encode() if for_floor else trigger_record(item)
            await producer.send_and_wait(topic, key=item[0].encode(), value=value)

    began = time.monotonic()
    await asyncio.gather(*(client(lane) for lane in lanes(items)))
    return len(items) / (time.monotonic() - began)
