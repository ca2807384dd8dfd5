"""The one worker dies at every named point of the way of a claim, each once; afterwards all that was asked for ends.

Whatever it did is there wholly or not at all: no attempt twice, no folder given twice, no input skipped, and the log of
agents and sites verifies.
"""

import json
import signal
from typing import Final

import pytest

from api.cli.embedded_kafka import EmbeddedKafka
from api.cli.verify import verify_log
from streams.rules.limits import STEP_PARKED_MAX
from streams.settings import Settings
from tests.brokers import forget_members
from tests.integration.crashing_worker import CRASHED
from tests.integration.site_work import WORKER, Id, Play, names, playing, unaccounted_for
from tests.integration.workers import WorkerProcess, workers

pytestmark = pytest.mark.kafka

DYING: Final = ("-m", "tests.integration.crashing_worker")
CLAIM, RELEASE = 'berth.claims "type":"claim"', 'berth.claims "type":"release"'
GRANTED, RESOLVED = 'berth.signals "type":"granted"', 'berth.signals "type":"resolved"'
DISPATCH = 'berth.dispatches "type":"dispatch"'
POINTS: Final = {
    "before the transaction of a claim": ("before", CLAIM),
    "a claim sent, not committed": ("sent", CLAIM),
    "between claim and grant": ("committed", CLAIM),
    "a grant sent, not committed": ("sent", GRANTED),
    "between grant and dispatch": ("committed", GRANTED),
    "a dispatch sent, not committed": ("sent", DISPATCH),
    "a dispatch committed, unknown in memory": ("committed", DISPATCH),
    "a release sent, not committed": ("sent", RELEASE),
    "between release and the next grant": ("committed", RELEASE),
    "a dependency told, not committed": ("sent", RESOLVED),
    "in the middle of a restore": ("restoring", 'berth-state-changelog ["claim",'),
}
HALF_WAY = ("half-way", 'berth-state-changelog "todo":[["gate"')
HERE, THERE, SITE = next(names("here", 1)), next(names("there", 4)), next(names("site", 6))
CAPACITY = 5
PARKED = STEP_PARKED_MAX + 10


async def ask_for_work(play: Play, name: str) -> None:
    """Two agents in one folder and below it, one that waits for the other's conversation, and one that asks."""
    place = {"site": SITE, "environment_id": name, "worker": True}
    await play.trigger(HERE, f"{name}, wide", folder="/src", conversation_id=name, **place)
    await play.trigger(THERE, f"{name}, deep", folder="/src/deep", **place)
    await play.trigger(THERE, f"{name}, after", depends_on=[{"agent_id": HERE, "conversation_id": name}])
    await play.ask(THERE, f"{name}, ask", 60, folder="/", **place)


async def died(bootstrap: str, dying: WorkerProcess, count: int) -> None:
    assert (await dying.logged("died", count))["exit_code"] == CRASHED, dying.account()
    await forget_members(bootstrap)


async def all_places_taken(play: Play) -> list[Id]:
    play.is_working = False
    ids = [await play.trigger(THERE, f"taken-{number}", site=SITE, worker=True) for number in range(CAPACITY)]
    await play.dispatched(*ids)
    return ids


async def close_a_gate(play: Play) -> list[Id]:
    """More claims than one step looks at wait behind it."""
    parked = [
        await play.trigger(HERE, f"parked-{number:03}", site=SITE, worker=True, organization_id="closed")
        for number in range(PARKED)
    ]
    await play.saw("claim_waiting", *parked)
    await play.site_control(SITE, "gate", scope="organization", name="closed", enabled=False)
    return parked


@pytest.mark.timeout(240)
async def test_all_that_was_asked_for_ends_whatever_point_a_worker_dies_at(topics: EmbeddedKafka) -> None:
    bootstrap = topics.bootstrap
    points = json.dumps([*POINTS.values(), HALF_WAY])
    async with playing(bootstrap) as play:
        play.is_working = True
        for agent in (HERE, THERE):
            await play.control(agent, "configure", parallelism_limit="unlimited")
        await play.site_control(SITE, "configure_site", capacity=CAPACITY)
        async with workers(bootstrap, 1, DYING, CRASH_POINTS=points) as (dying,):
            for count, name in enumerate(POINTS, 1):
                await ask_for_work(play, name)
                await died(bootstrap, dying, count)
                dying.send(signal.SIGUSR1)
            await play.all_ended()
            taken = await all_places_taken(play)
            parked = await close_a_gate(play)
            await died(bootstrap, dying, len(POINTS) + 1)

        async with workers(bootstrap, 1, WORKER):
            for id in taken:
                await play.finish(id)
            beside = await play.trigger(THERE, "beside the gate", site=SITE, worker=True)
            await play.dispatched(beside)
            assert not [id for id in parked if play.dispatches[id]], "the gate is closed for all of them"
            play.is_working = True
            await play.finish(beside)
            await play.site_control(SITE, "gate", scope="organization", name="closed", enabled=True)
            await play.all_ended()

        assert play.clashes == []
        assert {len(play.dispatches[id]) for id in play.accepted if not play.was_refused(id)} == {1}
        assert await unaccounted_for(bootstrap) == {}
        verdict = await verify_log(Settings(kafka=bootstrap))
        assert verdict.violations == []
        assert verdict.decisions == len(play.decisions) + len(play.site_decisions)
