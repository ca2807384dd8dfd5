"""Whoever is asked to end ends, in bounded time and in order: at any moment of its life, whatever else is going on.

A process counts the seconds itself (streams/ending.py) and says so when its time was over; that it never has to is
what is tested here, and that nothing is lost or doubled by it. tests/unit/test_service.py has the count.
"""

import asyncio
import random
import signal
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

import httpx
import pytest
import pytest_asyncio

from api.cli.embedded_kafka import EmbeddedKafka
from api.cli.embedded_postgres import EmbeddedPostgres
from streams.ending import ENDS_SECONDS_MAX
from streams.kafka import topics
from tests.integration.events import Listener
from tests.integration.http_stack import Stack, stack
from tests.integration.workers import (
    LOADED,
    PARTITIONS,
    WorkerProcess,
    all_handled,
    load,
    sending,
    unaccounted,
    workers,
)

pytestmark = pytest.mark.kafka
BOUND_SECONDS: Final = ENDS_SECONDS_MAX + 6
"""What the process counts, and what a slow machine takes to say so."""
MOMENTS: Final = ("worker_listens", "revoked", "assigned", "restored")
"""What a worker says on its way from its start to its work."""


async def ends(process: WorkerProcess, wait_seconds: float = 0.0, codes: tuple[int, ...] = (0,)) -> None:
    """Asked after this time it ends in order; or by the signal, when it is so young that it has said nothing yet."""
    await asyncio.sleep(wait_seconds)
    process.send(signal.SIGTERM)
    try:
        code = await process.ended(BOUND_SECONDS)
    except TimeoutError:
        raise AssertionError(f"it does not end; {process.account()}") from None
    assert code in codes or process.ended_before_it_began, process.account()
    assert "service_ended_hard" not in process.account()


@pytest.mark.timeout(240)
async def test_a_worker_that_is_asked_at_any_moment_of_its_life(fresh_kafka: EmbeddedKafka, seed: int) -> None:
    bootstrap, chance = fresh_kafka.bootstrap, random.Random(seed)
    async with workers(bootstrap) as running, sending(bootstrap) as producer:
        await running[0].ready()
        loading = asyncio.create_task(load(producer, 1_000_000, 500, LOADED))
        for moment in (None, *MOMENTS):
            asked = await WorkerProcess.start(bootstrap)
            running.append(asked)
            if moment is None:
                await ends(asked, chance.uniform(0, 3))
            else:
                await asked.logged(moment)
                await ends(asked, chance.choice([0, chance.uniform(0, 0.3)]))
        for _ in range(3):
            running += [await WorkerProcess.start(bootstrap) for _ in range(2)]
            await running[-1].logged("worker_listens")
            await asyncio.gather(*(ends(asked, chance.uniform(0, 2)) for asked in running[-2:]))
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        await producer.flush()
        await all_handled(bootstrap, 60)
        assert running[0].is_running
    assert await unaccounted(bootstrap) == {}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_worker_that_is_asked_while_the_group_waits_for_another(
    fresh_kafka: EmbeddedKafka, seed: int, how: signal.Signals
) -> None:
    """Its request to join isn't answered before the other's session is over."""
    bootstrap, chance = fresh_kafka.bootstrap, random.Random(seed)
    async with workers(bootstrap, 2) as running:
        await asyncio.gather(*(worker.logged("restored") for worker in running))
        silent, asked, young = *running, await WorkerProcess.start(bootstrap)
        running.append(young)
        await young.logged("worker_listens")
        silent.send(how)
        await asyncio.gather(ends(asked, chance.uniform(0, 1)), ends(young, chance.uniform(0, 3)))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers() -> AsyncIterator[tuple[EmbeddedKafka, EmbeddedPostgres]]:
    with tempfile.TemporaryDirectory(prefix="berth-test-", ignore_cleanup_errors=True) as directory:
        kafka = EmbeddedKafka(Path(directory) / "kafka", port=None).start()
        postgres = EmbeddedPostgres(Path(directory) / "postgres", port=None).start()
        try:
            await topics.create(kafka.bootstrap, PARTITIONS)
            yield kafka, postgres
        finally:
            postgres.stop()
            kafka.stop()


OUTAGES: Final[dict[str, tuple[Callable[[Stack], object], Callable[[Stack], object]]]] = {
    "Kafka is frozen": (lambda berth: berth.kafka.pause(), lambda berth: berth.kafka.resume()),
    "Kafka is dead": (lambda berth: berth.kafka.kill(), lambda berth: berth.kafka.start()),
    "PostgreSQL is frozen": (lambda berth: berth.postgres.pause(), lambda berth: berth.postgres.resume()),
    "PostgreSQL is dead": (lambda berth: berth.postgres.kill(), lambda berth: berth.postgres.start()),
}


@pytest.mark.timeout(240)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("outage", OUTAGES)
async def test_every_program_that_is_asked_while(
    servers: tuple[EmbeddedKafka, EmbeddedPostgres], seed: int, outage: str
) -> None:
    """One of each that works, with a stream of events and a question under way, and one of each that has just begun."""
    chance = random.Random(seed)
    away, back = OUTAGES[outage]
    async with stack(*servers) as berth:
        assert berth.worker is not None and berth.projector is not None
        runner = await berth.berth("runner", "--end-seconds", "1")
        listener = Listener({"agents": ["a"]})
        following = asyncio.create_task(listener.listen(berth.http, lambda _: False, 120))
        await listener.connected.wait()
        await asyncio.to_thread(away, berth)
        try:
            asking = asyncio.create_task(_ask(berth.http))
            young = [await berth.berth(*words) for words in (("worker",), ("projector",), ("runner",))]
            young.append(await berth.berth("api", "--port", "0"))
            working = [berth.worker, berth.projector, *berth.apis]
            # A worker or runner that finds no Kafka when it starts ends by itself.
            await asyncio.gather(
                *(ends(process, chance.uniform(0, 4)) for process in working),
                *(ends(process, chance.uniform(1, 6), codes=(0, 1, 69)) for process in (runner, *young)),
            )
            await asyncio.gather(asking, following)
        finally:
            await asyncio.to_thread(back, berth)


async def _ask(http: httpx.AsyncClient) -> None:
    """Questions one after the other, until nobody listens."""
    try:
        while True:
            await http.get("/api/agents")
            await http.put("/api/agents/a", json={"parallelism_limit": 1})
    except httpx.TransportError:
        return
