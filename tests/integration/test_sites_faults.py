"""Workers and Kafka go away while agents and sites are in the middle of their protocol.

Before each fault a burst of work is sent and not waited for, so that claims, grants and releases are under way, and one
trigger waits for a conversation of an agent whose attempt ends only after the fault. Afterwards all that was asked for
has ended, nothing ran twice or beside what excludes it, no input was skipped, and the log verifies.
"""

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

import pytest

from api.cli.embedded_kafka import EmbeddedKafka
from api.cli.verify import verify_log
from streams.settings import Settings
from tests.integration.site_work import WORKER, Id, Play, names, playing, unaccounted_for
from tests.integration.workers import PARTITIONS, WorkerProcess, workers

pytestmark = pytest.mark.kafka

OF_SITE, OF_DEPENDENCY = 6, 1
SITE: Final = next(names("site", OF_SITE))
AGENTS: Final = [next(names("agent", number)) for number in range(PARTITIONS)]
FOLDERS: Final = ("/", "/src", "/src/deep", "/docs")
BURST: Final = 60
ENDS_SECONDS: Final = 120.0
"""Long for a machine that is four times slower than an idle one, where a fault and two bursts take half a minute."""


class Work:
    """Bursts of mixed work for all agents and one site of four workers."""

    def __init__(self, play: Play, chance: random.Random) -> None:
        self.play = play
        self.number = 0
        self._chance = chance

    async def prepare(self) -> None:
        play = self.play
        for agent in AGENTS:
            await play.control(agent, "configure", parallelism_limit=3)
        await play.settled(await play.site_control(SITE, "configure_site", capacity=4))
        play.is_working = True

    async def burst(self) -> None:
        """Not waited for."""
        for _ in range(BURST):
            self.number += 1
            agent, id = self._chance.choice(AGENTS), f"work-{self.number:04}"
            place: dict[str, object] = {"site": SITE, "worker": self._chance.random() < 0.7}
            if not place["worker"] or self._chance.random() < 0.7:
                place |= {"environment_id": f"e{self._chance.randrange(3)}", "folder": self._chance.choice(FOLDERS)}
            if self._chance.random() < 0.15:
                await self.play.ask(agent, id, 2.0, **place)
            else:
                await self.play.trigger(agent, id, **place)

    async def dependent(self) -> tuple[Id, Id]:
        """An attempt that goes on until the test ends it, and a trigger of another agent that waits for it."""
        self.number += 1
        before, behind = (AGENTS[OF_DEPENDENCY], f"before-{self.number}"), (AGENTS[3], f"behind-{self.number}")
        self.play.kept.add(before)
        await self.play.trigger(*before, conversation_id=before[1])
        await self.play.trigger(*behind, depends_on=[{"agent_id": before[0], "conversation_id": before[1]}])
        await self.play.dispatched(before)
        await self.play.saw("told", (before[0], behind[1]))
        return before, behind

    async def through(self, fault: Callable[[], Awaitable[object]]) -> None:
        before, behind = await self.dependent()
        await self.burst()
        await fault()
        await self.play.finish(before)
        await self.play.dispatched(behind, timeout_seconds=ENDS_SECONDS)
        await self.burst()
        await self.play.all_ended(ENDS_SECONDS)
        assert self.play.clashes == []


@asynccontextmanager
async def work(bootstrap: str, seed: int) -> AsyncIterator[Work]:
    """At its end everything is accounted for."""
    async with playing(bootstrap) as play:
        doing = Work(play, random.Random(seed))
        await doing.prepare()
        yield doing
        assert {len(play.dispatches[id]) for id in play.accepted if not play.was_refused(id)} == {1}
        await all_is_accounted_for(bootstrap)
        verdict = await verify_log(Settings(kafka=bootstrap))
        assert verdict.violations == []

        def seen() -> int:
            return len(play.decisions) + len(play.site_decisions)

        await play.until(lambda: seen() >= verdict.decisions, f"{verdict.decisions} decisions")
        assert seen() == verdict.decisions


async def all_is_accounted_for(bootstrap: str) -> None:
    """When the last trigger has ended, what deciders have told each other of it may still be under way."""
    deadline = time.monotonic() + ENDS_SECONDS
    while problems := await unaccounted_for(bootstrap):
        assert time.monotonic() < deadline, problems


async def owner(running: Sequence[WorkerProcess], partition: int) -> WorkerProcess:
    """Whoever owns the partition, as soon as somebody does: the group may just be giving it out."""
    async with asyncio.timeout(ENDS_SECONDS):
        while True:
            for worker in running:
                if str(partition) in (await worker.readiness())[1]["partitions"]:
                    return worker
            await asyncio.sleep(0.05)


@pytest.mark.timeout(600)
async def test_either_of_two_workers_goes_in_mid_protocol(topics: EmbeddedKafka, seed: int) -> None:
    bootstrap = topics.bootstrap
    async with workers(bootstrap, 2, WORKER) as running, work(bootstrap, seed) as doing:

        async def replaced(partition: int, how: signal.Signals) -> None:
            going = await owner(running, partition)
            running.remove(going)
            going.send(how)
            running.append(await WorkerProcess.start(bootstrap, WORKER))
            assert await going.ended() == (0 if how == signal.SIGTERM else -signal.SIGKILL), going.account()

        await asyncio.gather(*(worker.logged("assigned") for worker in running))
        for partition, how in (
            (OF_SITE, signal.SIGKILL),
            (OF_DEPENDENCY, signal.SIGTERM),
            (OF_DEPENDENCY, signal.SIGKILL),
            (OF_SITE, signal.SIGTERM),
        ):
            await doing.through(lambda partition=partition, how=how: replaced(partition, how))  # type: ignore[misc]
        assert all(worker.is_running for worker in running)


@pytest.mark.timeout(400)
async def test_kafka_is_restarted_in_mid_protocol(fresh_kafka: EmbeddedKafka, seed: int) -> None:
    bootstrap = fresh_kafka.bootstrap
    async with workers(bootstrap, 2, WORKER) as running, work(bootstrap, seed) as doing:
        await doing.through(lambda: asyncio.to_thread(fresh_kafka.restart))
        assert all(worker.is_running for worker in running), "a restart of Kafka ends no worker"


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_a_long_storm_over_sites(fresh_kafka: EmbeddedKafka, seed: int) -> None:
    bootstrap, chance = fresh_kafka.bootstrap, random.Random(seed)
    async with workers(bootstrap, 3, WORKER) as running, work(bootstrap, seed) as doing:
        for _ in range(20):
            how = chance.choice([signal.SIGKILL, signal.SIGTERM, None])

            async def fault(how: signal.Signals | None = how) -> None:
                if how is None:
                    await asyncio.to_thread(fresh_kafka.restart)
                    return
                going = running.pop(chance.randrange(len(running)))
                running.append(await WorkerProcess.start(bootstrap, WORKER))
                going.send(how)
                await going.ended()

            await doing.through(fault)
