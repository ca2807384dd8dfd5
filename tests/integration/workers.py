"""Worker processes that tests start, freeze and kill, and the account of what they did with every input record."""

import asyncio
import json
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import aiohttp
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from streams import CONTROLS, DECISIONS, INPUT_TOPICS, STATUSES, TRIGGERS
from tests.brokers import WAIT_SECONDS

ROOT = Path(__file__).parents[2]
SESSION_SECONDS = 6.0
PARTITIONS = 8
IDLE_START_SECONDS = 1.5
"""From the start of a worker to its first word, on an idle machine."""
SLOWNESS_MAX = 4.0
"""How many times slower than an idle machine the one that runs the tests may be."""
LOADED = [TRIGGERS.name, STATUSES.name, CONTROLS.name]

COUNTING = ("-m", "tests.integration.counting_worker")

Json = dict[str, Any]


class WorkerProcess:
    """One process of ``counting_worker``; ``events`` holds what it has logged."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.events: list[Json] = []
        self.errors: list[str] = []
        self._logged = asyncio.Condition()
        self._has_ended = False
        self._started_at = time.monotonic()
        self.slowness = 1.0
        """How many times as long as on an idle machine it took to say its first word; from 1 to SLOWNESS_MAX."""
        self._reading = asyncio.gather(self._read_log(), self._read_errors())

    @classmethod
    async def start(cls, bootstrap: str, arguments: Sequence[str] = COUNTING, **environment: str) -> Self:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            cwd=ROOT,
            env=clean | {"BERTH_KAFKA": bootstrap} | environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=2**20,
        )
        return cls(process)

    @property
    def is_running(self) -> bool:
        return self.process.returncode is None

    @property
    def ended_before_it_began(self) -> bool:
        """Whether SIGTERM came while Python was still starting, when nobody hears it: then it ends the process."""
        return self.process.returncode == -signal.SIGTERM and not self.events

    @property
    def found_no_kafka(self) -> bool:
        """Whether it ended at once because Kafka was away when it was started."""
        return self.process.returncode == 69 and not self.count("assigned")

    def send(self, number: signal.Signals) -> None:
        if self.is_running:
            self.process.send_signal(number)

    async def logged(self, event: str, count: int = 1, timeout_seconds: float = WAIT_SECONDS, **facts: object) -> Json:
        """Wait until ``event`` with these facts was logged ``count`` times; the last of them."""

        def matching() -> list[Json]:
            return [
                entry
                for entry in self.events
                if entry.get("event") == event and all(entry.get(name) == fact for name, fact in facts.items())
            ]

        async with self._logged:
            try:
                async with asyncio.timeout(timeout_seconds):
                    await self._logged.wait_for(lambda: len(matching()) >= count or self._has_ended)
            except TimeoutError:
                raise TimeoutError(f"{event} {facts} was not logged {count} times; {self.account()}") from None
        assert len(matching()) >= count, f"the worker ended before it logged {event} {facts}; {self.account()}"
        return matching()[count - 1]

    def count(self, event: str) -> int:
        return sum(entry.get("event") == event for entry in self.events)

    async def address(self) -> str:
        return str((await self.logged("worker_listens"))["readyz"]).removesuffix("/readyz")

    async def readiness(self) -> tuple[int, Json]:
        async with aiohttp.ClientSession() as session, session.get(f"{await self.address()}/readyz") as answer:
            return answer.status, await answer.json()

    async def ready(self, partitions: Sequence[int] = range(PARTITIONS), timeout_seconds: float = WAIT_SECONDS) -> Json:
        """Wait until it decides for exactly these partitions; its readiness."""
        wanted = [str(number) for number in partitions]
        status, body = 0, Json()
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            status, body = await self.readiness()
            if status == 200 and list(body["partitions"]) == wanted:
                return body
            await asyncio.sleep(0.05)
        raise TimeoutError(f"not ready: {status} {body}; {self.account()}")

    async def ended(self, timeout_seconds: float = WAIT_SECONDS) -> int:
        """Its exit code."""
        async with asyncio.timeout(timeout_seconds):
            await self.process.wait()
            await self._reading
        assert self.process.returncode is not None
        return self.process.returncode

    async def stop(self) -> int:
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        return await self.ended()

    async def discard(self) -> None:
        """End it whatever it does; in order when it can, so that the group needn't wait for its session to end."""
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        try:
            await self.ended(10)
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        self.send(signal.SIGKILL)
        await self.ended()

    def account(self) -> str:
        return "log:\n" + "\n".join([*map(str, self.events[-40:]), *self.errors[-40:]])

    async def _read_log(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            if not self.events:
                measured = (time.monotonic() - self._started_at) / IDLE_START_SECONDS
                self.slowness = min(SLOWNESS_MAX, max(1.0, measured))
            async with self._logged:
                self.events.append(json.loads(line) if line.startswith(b"{") else {"event": line.decode()})
                self._logged.notify_all()
        async with self._logged:
            self._has_ended = True
            self._logged.notify_all()

    async def _read_errors(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.errors.append(line.decode().rstrip())


@asynccontextmanager
async def workers(
    bootstrap: str, count: int = 1, arguments: Sequence[str] = COUNTING, **environment: str
) -> AsyncIterator[list[WorkerProcess]]:
    """So many workers; whatever is in the list at the end is ended."""
    running: list[WorkerProcess] = []
    try:
        running += [await WorkerProcess.start(bootstrap, arguments, **environment) for _ in range(count)]
        yield running
    finally:
        await asyncio.gather(*(worker.discard() for worker in running))


@asynccontextmanager
async def sending(bootstrap: str) -> AsyncIterator[AIOKafkaProducer]:
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, linger_ms=5, enable_idempotence=True)
    await producer.start()
    try:
        yield producer
    finally:
        await producer.stop()


async def send(bootstrap: str, *values: str, topic: str = TRIGGERS.name, partition: int = 0, key: str = "k") -> int:
    """Send records to one partition; the offset of the last."""
    async with sending(bootstrap) as producer:
        sent = [await producer.send(topic, value.encode(), key.encode(), partition) for value in values]
        return int([await future for future in sent][-1].offset)


async def load(producer: AIOKafkaProducer, count: int, per_second: float, topics: Sequence[str]) -> None:
    """Spread ``count`` records over all partitions of ``topics`` at this rate."""
    began = time.monotonic()
    for index in range(count):
        key = f"agent-{index % 500}".encode()
        await producer.send(topics[index % len(topics)], b"count", key, index % PARTITIONS)
        if index % 20 == 0:
            await asyncio.sleep(max(0.0, began + index / per_second - time.monotonic()))
    await producer.flush()


@dataclass
class Log:
    """Everything readable in some topics, in order per topic and partition."""

    records: dict[TopicPartition, list[Any]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    async def read(cls, bootstrap: str, *topics: str, isolation_level: str = "read_committed") -> Self:
        log = cls()
        consumer = AIOKafkaConsumer(
            bootstrap_servers=bootstrap, isolation_level=isolation_level, max_partition_fetch_bytes=2**23
        )
        await consumer.start()
        try:
            partitions = [TopicPartition(topic, number) for topic in topics for number in range(PARTITIONS)]
            ends = await consumer.end_offsets(partitions)
            consumer.assign(partitions)
            await consumer.seek_to_beginning(*partitions)
            async with asyncio.timeout(WAIT_SECONDS):
                while any([await consumer.position(partition) < ends[partition] for partition in partitions]):
                    for partition, records in (await consumer.getmany(timeout_ms=50)).items():
                        log.records[partition].extend(records)
        finally:
            await consumer.stop()
        return log

    def all(self, partition: int) -> list[Any]:
        return [record for where, records in self.records.items() if where.partition == partition for record in records]

    def values(self, topic: str, partition: int) -> list[Json]:
        return [json.loads(record.value) for record in self.records[TopicPartition(topic, partition)]]


async def decisions(bootstrap: str, partition: int) -> list[Json]:
    return (await Log.read(bootstrap, DECISIONS.name)).values(DECISIONS.name, partition)


async def wait_for_decisions(
    bootstrap: str, partition: int, condition: Callable[[list[Json]], bool], timeout_seconds: float = WAIT_SECONDS
) -> list[Json]:
    """Read the decisions again and again until they are as wanted."""
    deadline = time.monotonic() + timeout_seconds
    while not condition(found := await decisions(bootstrap, partition)):
        assert time.monotonic() < deadline, f"in {timeout_seconds} s the decisions came only to {found[-10:]}"
        await asyncio.sleep(0.05)
    return found


async def unaccounted(bootstrap: str) -> Mapping[str, list[str]]:
    """What is wrong between the input and the decisions: missing, double, out of order. Empty when all is well."""
    log = await Log.read(bootstrap, DECISIONS.name, *(topic.name for topic in INPUT_TOPICS))
    problems: dict[str, list[str]] = {}
    for number in range(PARTITIONS):
        causes: dict[str, list[int]] = defaultdict(list)
        for value in log.values(DECISIONS.name, number):
            if "offset" in value:
                assert value["partition"] == number
                causes[value["topic"]].append(value["offset"])
        for topic in INPUT_TOPICS:
            offsets = [record.offset for record in log.records[TopicPartition(topic.name, number)]]
            if causes[topic.name] != offsets:
                found = causes[topic.name]
                missing, doubled = sorted(set(offsets) - set(found)), len(found) - len(set(found))
                problems[f"{topic.name}/{number}"] = [
                    f"{len(offsets)} records, {len(found)} causes",
                    f"{len(missing)} missing: {missing[:5]}",
                    f"{doubled} doubled",
                    "in order" if found == sorted(found) else "out of order",
                ]
    return problems


async def all_handled(bootstrap: str, timeout_seconds: float) -> float:
    """Wait until every input record has its decision; how long that took."""
    began = time.monotonic()
    while problems := await unaccounted(bootstrap):
        assert time.monotonic() - began < timeout_seconds, f"after {timeout_seconds} s: {problems}"
        await asyncio.sleep(0.5)
    return time.monotonic() - began
