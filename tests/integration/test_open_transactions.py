"""A transaction that stays open although its writer is fenced: nothing is built on what it holds back.

Kafka promises that there is none. Versions 4.3.0 to 4.4.0 don't keep it when a broker ends (KAFKA-20734); what was held
back then comes to light with the next transaction, and everything in it would have been decided twice.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer

from api.cli.embedded_kafka import EmbeddedKafka
from streams import CHANGELOG, DECISIONS, DISPATCHES, TRIGGERS
from streams.kafka import edge
from streams.kafka.clients import stop
from streams.kafka.restore import require_no_open_transaction
from tests.integration.test_ownership_restore import NOWHERE, POSITION_KEY, position_row, refused, write
from tests.integration.test_up import berth
from tests.integration.workers import PARTITIONS, send, workers

pytestmark = pytest.mark.kafka
WRITERS = 80
BETWEEN_ENDS_SECONDS = 0.002
"""Together as long as a broker takes from its signal until it answers no more."""


@asynccontextmanager
async def open_transaction(bootstrap: str, name: str, topics: Sequence[str]) -> AsyncIterator[AIOKafkaProducer]:
    """With a record in partition 0 of each; aborted at the end, if it is still open."""
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=name)
    await producer.start()
    try:
        await begin(producer, topics)
        yield producer
        if producer._txn_manager.is_in_transaction():
            await producer.abort_transaction()
    finally:
        await producer.stop()


async def begin(producer: AIOKafkaProducer, topics: Sequence[str]) -> None:
    await producer.begin_transaction()
    for topic in topics:
        await producer.send_and_wait(topic, b"held back", b"k", 0)


async def test_a_worker_refuses_what_is_held_back(topics: EmbeddedKafka) -> None:
    held = [CHANGELOG.name, DECISIONS.name, DISPATCHES.name]
    async with open_transaction(topics.bootstrap, "stranger", held):
        named = [f"{topic} 0 to 0" for topic in held]
        await refused(topics, "partition 0", *named, "Nothing was written", "docs/operate.md")
    async with workers(topics.bootstrap) as (worker,):
        await worker.ready()


async def test_recover_and_skip_refuse_it(topics: EmbeddedKafka, tmp_path: Path) -> None:
    bootstrap = topics.bootstrap
    offset = await send(bootstrap, "count")
    await write(bootstrap, CHANGELOG.name, ("commit", {POSITION_KEY: position_row(NOWHERE)}))
    skip = ("skip", TRIGGERS.name, "0", str(offset), "--yes")
    async with open_transaction(bootstrap, "stranger", [CHANGELOG.name]):
        for arguments in (skip, ("recover", "--yes")):
            done = await asyncio.to_thread(berth, tmp_path, *arguments, BERTH_KAFKA=bootstrap)
            told = " ".join(done.stderr.split())
            assert done.returncode == 1, (done.stdout, told)
            assert f"{CHANGELOG.name} 2 to 2" in told, told
            assert "A transaction that Kafka left open" in told, told
    done = await asyncio.to_thread(berth, tmp_path, *skip, BERTH_KAFKA=bootstrap)
    assert done.returncode == 0, done.stderr


async def test_one_that_ends_is_waited_for(topics: EmbeddedKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, looks = edge.monotonic_seconds, asyncio.Queue[None]()

    def noted() -> float:
        looks.put_nowait(None)
        return clock()

    monkeypatch.setattr(edge, "monotonic_seconds", noted)
    async with open_transaction(topics.bootstrap, "slow", [CHANGELOG.name]) as producer:
        waiting = asyncio.create_task(require_no_open_transaction(0, topics.bootstrap))
        for _ in range(2):  # at the clock: for its deadline, then because something is held back
            await asyncio.wait_for(looks.get(), 30)
        assert not waiting.done()
        await producer.commit_transaction()
        await waiting


async def test_what_another_owner_writes_meanwhile_is_no_sign_of_it(topics: EmbeddedKafka) -> None:
    """One transaction is open at every moment, but none for long."""
    held = [CHANGELOG.name]
    async with (
        open_transaction(topics.bootstrap, "first", held) as first,
        open_transaction(topics.bootstrap, "second", held) as second,
    ):
        waiting = asyncio.create_task(require_no_open_transaction(0, topics.bootstrap))
        while not waiting.done():
            for producer in (first, second):
                await producer.commit_transaction()
                await begin(producer, held)
        await waiting


async def test_a_restart_of_kafka_ends_every_transaction(fresh_kafka: EmbeddedKafka) -> None:
    """While the broker ends, one transaction after the other does. Afterwards each is there or not; none is open."""
    bootstrap = fresh_kafka.bootstrap
    names = [f"writer {number}" for number in range(WRITERS)]
    producers = await started(bootstrap, names)
    for number, producer in enumerate(producers):
        await producer.begin_transaction()
        await producer.send_and_wait(CHANGELOG.name, b"v", b"k", number % PARTITIONS)
    restart = asyncio.create_task(asyncio.to_thread(fresh_kafka.restart))
    ends = []
    for producer in producers:
        ends.append(asyncio.create_task(producer.commit_transaction()))
        await asyncio.sleep(BETWEEN_ENDS_SECONDS)
    await restart
    await asyncio.gather(*ends, return_exceptions=True)  # one that found no coordinator has given up
    await asyncio.gather(*map(stop, producers))
    fenced = await started(bootstrap, names)
    await asyncio.gather(*(require_no_open_transaction(number, bootstrap) for number in range(PARTITIONS)))
    await asyncio.gather(*map(stop, fenced))


async def started(bootstrap: str, names: Sequence[str]) -> list[AIOKafkaProducer]:
    """Producers with these transactional ids; who had them before is fenced."""
    producers = [AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=name) for name in names]
    await asyncio.gather(*(producer.start() for producer in producers))
    return producers
