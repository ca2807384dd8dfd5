"""Load through faults of workers and of Kafka: afterwards every input record has had its effect once, and in order.

Each fault is followed by the watch over time: every partition decides again within the session timeout + 2 s after
the last fault. On a slow machine, as the start of the first worker shows, what isn't the session's share takes longer.
Counts per key can't show a skipped record, so the account is by input offset.
"""

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable, Sequence

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition

from api.cli.embedded_kafka import EmbeddedKafka
from streams import DECISIONS
from streams.kafka.clients import reading
from tests.brokers import until
from tests.integration.workers import (
    COUNTING,
    LOADED,
    PARTITIONS,
    SESSION_SECONDS,
    WorkerProcess,
    all_handled,
    load,
    send,
    sending,
    unaccounted,
    workers,
)

pytestmark = pytest.mark.kafka
DECIDES_SECONDS = 2.0
"""Beside the session."""
START_SECONDS = 4.0
"""A new Python process with Faust, until it joins the group."""

ENDS_WITH = {"term": 0, "kill": -9, "freeze": 75}
"""Exit codes that faults explain. A restart of Kafka explains none: workers outlive it."""


async def counting_load(producer: AIOKafkaProducer) -> None:
    await load(producer, 1_000_000, 1_000, LOADED)


class Storm:
    """Workers under faults, at most four at once, at least one that is well."""

    def __init__(
        self, kafka: EmbeddedKafka, running: list[WorkerProcess], chance: random.Random, arguments: Sequence[str]
    ) -> None:
        self.kafka = kafka
        self.arguments = arguments
        self.running = running
        self.chance = chance
        self.faults: list[str] = []
        self.ended: list[WorkerProcess] = []
        self.one_restart = asyncio.Lock()

    async def join(self) -> None:
        if len(self.running) < 4:
            self.running.append(await WorkerProcess.start(self.kafka.bootstrap, self.arguments))

    async def term(self) -> None:
        if self.running:
            await self._victim().stop()

    async def kill(self) -> None:
        if self.running:
            await self._victim().kill()

    async def freeze(self) -> None:
        """Longer than its session, so that others take over; then it goes on."""
        if self.running:
            worker = self.chance.choice(self.running)
            worker.send(signal.SIGSTOP)
            await asyncio.sleep(SESSION_SECONDS + self.chance.uniform(1, 3))
            worker.send(signal.SIGCONT)

    async def restart_kafka(self) -> None:
        async with self.one_restart:
            await asyncio.to_thread(self.kafka.restart)

    async def kill_kafka(self) -> None:
        async with self.one_restart:
            await asyncio.to_thread(self.kafka.kill)
            await asyncio.to_thread(self.kafka.start)

    async def fault(self, kinds: list[Callable[[], Awaitable[None]]], at_once: int = 1) -> None:
        chosen = [self.chance.choice(kinds) for _ in range(at_once)]
        self.faults.append("+".join(kind.__name__ for kind in chosen))
        await asyncio.gather(*(kind() for kind in chosen))
        await self.keep_one()

    async def keep_one(self) -> None:
        """What a supervisor does: a worker that had to stop is started again."""
        for worker in [worker for worker in self.running if not worker.is_running]:
            self.running.remove(worker)
            self.ended.append(worker)
        if not self.running:
            await self.join()

    def _victim(self) -> WorkerProcess:
        worker = self.running.pop(self.chance.randrange(len(self.running)))
        self.ended.append(worker)
        return worker

    def account(self) -> str:
        return f"faults {self.faults}\n" + "\n\n".join(worker.account() for worker in [*self.running, *self.ended])


async def run_storm(
    kafka: EmbeddedKafka,
    seed: int,
    kinds: list[str],
    faults: int,
    at_once: int = 1,
    *,
    loading: Callable[[AIOKafkaProducer], Awaitable[None]] = counting_load,
    settled: Callable[[], Awaitable[bool]] | None = None,
    arguments: Sequence[str] = COUNTING,
) -> Storm:
    """The load goes on during all faults; then every partition must decide, and every record be accounted for.

    ``settled``: how to see that all is handled; by default every partition must decide a new record and all others.
    """
    async with workers(kafka.bootstrap, 2, arguments) as running, sending(kafka.bootstrap) as producer:
        storm = Storm(kafka, running, random.Random(seed), arguments)
        await running[0].logged("restored")
        slowness = running[0].slowness
        going_on = asyncio.ensure_future(loading(producer))
        for _ in range(faults):
            await asyncio.sleep(storm.chance.uniform(0.2, 1.5))
            await storm.fault([getattr(storm, kind) for kind in kinds], at_once)
        going_on.cancel()
        await asyncio.gather(going_on, return_exceptions=True)
        await producer.flush()
        await storm.keep_one()
        began = time.monotonic()
        try:
            fresh = [worker for worker in storm.running if not worker.count("assigned")]
            own_share = DECIDES_SECONDS + (START_SECONDS if len(fresh) == len(storm.running) else 0)
            allowed = SESSION_SECONDS + slowness * own_share
            if settled is None:
                await every_partition_decides(kafka.bootstrap, allowed)
                await all_handled(kafka.bootstrap, allowed + 60)
            else:

                async def is_settled() -> bool:
                    await storm.keep_one()  # one that was frozen may end only now
                    return await settled()

                await until(is_settled, timeout_seconds=allowed + 60)
        except (AssertionError, TimeoutError) as error:
            raise AssertionError(f"{error}\n{time.monotonic() - began:.1f} s\n{storm.account()}") from error
        await storm.keep_one()
        codes = {
            worker.process.returncode
            for worker in storm.ended
            if not (worker.found_no_kafka or worker.ended_before_it_began)
        }
        assert codes <= {ENDS_WITH[kind] for kind in kinds if kind in ENDS_WITH}, f"{codes}\n{storm.account()}"
        return storm


async def every_partition_decides(bootstrap: str, seconds: float) -> None:
    """Given something to decide, every partition decides something within this time."""
    partitions = [TopicPartition(DECISIONS.name, number) for number in range(PARTITIONS)]
    async with reading(bootstrap, "read_committed") as consumer:
        before = await consumer.end_offsets(partitions)
        for number in range(PARTITIONS):
            await send(bootstrap, "count", partition=number, key="probe")

        async def have_decided() -> bool:
            ends = await consumer.end_offsets(partitions)
            return all(ends[partition] > before[partition] for partition in partitions)

        await until(have_decided, timeout_seconds=seconds)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("kinds", "faults", "at_once"),
    [
        pytest.param(["join", "term"], 20, 1, id="joins and leaves"),
        pytest.param(["kill", "join", "join"], 5, 1, id="kills", marks=pytest.mark.soak),
        pytest.param(["freeze", "join"], 3, 1, id="freezes", marks=pytest.mark.soak),
        pytest.param(["kill", "freeze", "term", "join"], 3, 2, id="two at once", marks=pytest.mark.soak),
    ],
)
async def test_workers_fail(fresh_kafka: EmbeddedKafka, seed: int, kinds: list[str], faults: int, at_once: int) -> None:
    """Case 93: whoever joins or goes, every partition decides again in bounded time."""
    await run_storm(fresh_kafka, seed, kinds, faults, at_once)
    assert await unaccounted(fresh_kafka.bootstrap) == {}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", ["restart_kafka", "kill_kafka"])
async def test_kafka_restarts(fresh_kafka: EmbeddedKafka, seed: int, how: str) -> None:
    await run_storm(fresh_kafka, seed, [how], 1)
    assert await unaccounted(fresh_kafka.bootstrap) == {}


@pytest.mark.soak
@pytest.mark.timeout(1200)
async def test_long_storm(fresh_kafka: EmbeddedKafka, seed: int) -> None:
    kinds = ["kill", "freeze", "term", "join", "join", "restart_kafka"]
    await run_storm(fresh_kafka, seed, kinds, 40)
    await run_storm(fresh_kafka, seed + 1, kinds, 20, at_once=2)
    assert await unaccounted(fresh_kafka.bootstrap) == {}
