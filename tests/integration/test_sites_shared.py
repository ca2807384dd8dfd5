"""Agents and sites on different partitions of two workers, which nobody disturbs: one broker for all of it.

Each test has agents, sites and environments of its own. The runner is the test itself (site_work.py).
"""

import asyncio
import random
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from api.cli.embedded_kafka import EmbeddedKafka
from api.cli.verify import verify_log
from streams.codec import partition_of
from streams.rules.limits import CLAIM_PASSES_MAX
from streams.settings import Settings
from tests.brokers import WAIT_SECONDS, empty_topics
from tests.integration.site_work import WORKER, Id, Play, after, names, playing, unaccounted_for
from tests.integration.workers import PARTITIONS, SESSION_SECONDS, WorkerProcess, workers

pytestmark = [pytest.mark.kafka, pytest.mark.asyncio(loop_scope="module")]

POOL_CAPACITY = 3


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two_workers(kafka: EmbeddedKafka) -> AsyncIterator[list[WorkerProcess]]:
    await empty_topics(kafka.bootstrap, PARTITIONS)
    async with workers(kafka.bootstrap, 2, WORKER, WORKER_POOL_CAPACITY=str(POOL_CAPACITY)) as running:
        await _share(running)
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(kafka: EmbeddedKafka, two_workers: list[WorkerProcess]) -> AsyncIterator[Play]:
    """At its end everything that any test asked for is accounted for, and the whole log is verified."""
    async with playing(kafka.bootstrap) as play:
        yield play
        assert play.clashes == []
        assert all(worker.is_running for worker in two_workers)
        assert await unaccounted_for(kafka.bootstrap) == {}
        verdict = await verify_log(Settings(kafka=kafka.bootstrap))
        assert verdict.violations == []
        await play.until(
            lambda: verdict.decisions == len(play.decisions) + len(play.site_decisions), "as many decisions were seen"
        )


@pytest.fixture
def play(shared: Play) -> Play:
    shared.accepted.clear()
    shared.is_working = False
    return shared


async def _share(running: list[WorkerProcess]) -> None:
    """Wait until each of the workers decides for its share of the partitions, and together for all."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            answers = [await worker.readiness() for worker in running]
            owned = [set(body["partitions"]) for status, body in answers if status == 200]
            if len(owned) == len(running) and all(owned) and sum(map(len, owned)) == PARTITIONS:
                return
            await asyncio.sleep(0.05)


async def test_of_two_agents_that_claim_one_folder_in_the_same_instant_exactly_one_runs(play: Play) -> None:
    """200 rounds at once: the same folder, or a folder and its parent; then the other one runs."""
    rounds, (here, there), site = 200, (next(names("even", 1)), next(names("odd", 4))), next(names("field", 6))
    await play.unlimited(here, there)
    await play.configured(site, 0)
    pairs: list[tuple[Id, Id]] = []
    for number in range(rounds):
        place = {"site": site, "environment_id": f"field-{number}", "created_at": after(0)}
        wide = "/src" if number % 2 else "/src/deep"
        one = await play.trigger(here, f"field-{number}-a", folder=wide, **place)
        pairs.append((one, await play.trigger(there, f"field-{number}-b", folder="/src/deep/", **place)))
    every = [id for pair in pairs for id in pair]
    await play.saw("claim_opened", *every)

    def is_answered(id: Id) -> bool:
        return bool(play.dispatches[id] or play.events["claim_waiting", *id])

    await play.until(lambda: all(is_answered(id) for id in every), "an answer for each")
    first = [[id for id in pair if play.dispatches[id]] for pair in pairs]
    assert [len(started) for started in first] == [1] * rounds
    assert [play.events["claim_waiting", *id][0]["reason"] for id in every if not play.dispatches[id]] == [
        "agent_environment_folder_busy"
    ] * rounds
    await asyncio.gather(*(play.finish(started) for (started,) in first))
    await play.dispatched(*every)
    second = [next(id for id in pair if id != started) for pair, (started,) in zip(pairs, first, strict=True)]
    await asyncio.gather(*(play.finish(id) for id in second))
    await play.all_ended()
    assert play.clashes == []
    assert all(len(play.dispatches[id]) == 1 for id in every)


async def test_the_default_site_has_as_many_workers_as_the_deployment_says(play: Play) -> None:
    agent = next(names("plain", 5))
    await play.unlimited(agent)
    ids = [await play.trigger(agent, f"plain-{number}", worker=True) for number in range(POOL_CAPACITY + 1)]
    *first, last = ids
    await play.dispatched(*first)
    await play.saw("claim_waiting", last)
    assert play.events["claim_waiting", *last][0]["reason"] == "site_workers_busy"
    await play.finish(first[0])
    await play.dispatched(last)
    await asyncio.gather(*(play.finish(id) for id in (*first[1:], last)))
    await play.all_ended()


async def test_ten_slots_serve_one_unlimited_agent_and_never_an_eleventh(play: Play) -> None:
    agent, site = next(names("alone", 2)), next(names("ten", 7))
    await play.unlimited(agent)
    await play.configured(site, 10)
    ids = [await play.trigger(agent, f"alone-{number:02}", site=site, worker=True) for number in range(30)]
    await play.saw("claim_opened", *ids)
    await play.dispatched(*ids[:10])
    await play.saw("claim_waiting", *ids[10:])
    assert not [id for id in ids[10:] if play.dispatches[id]]
    assert {play.events["claim_waiting", *id][0]["reason"] for id in ids[10:]} == {"site_workers_busy"}
    for done, following in zip(ids, ids[10:], strict=False):
        await play.finish(done)
        await play.dispatched(following)
    assert [id for id in play.order if id[0] == agent][10:] == ids[10:], "each freed slot went to the oldest"
    await asyncio.gather(*(play.finish(id) for id in ids[20:]))
    await play.all_ended()


async def test_ten_organizations_are_served_in_the_order_in_which_they_asked(play: Play, seed: int) -> None:
    site, chance = next(names("fair", 3)), random.Random(seed)
    agents = [next(names("fair-agent", number % PARTITIONS)) + f"-{number}" for number in range(10)]
    assert len({partition_of(agent, PARTITIONS) for agent in agents}) > 2
    await play.unlimited(*agents)
    await play.configured(site, 1)
    blocker = await play.trigger(agents[0], "fair-blocker", site=site, worker=True)
    await play.dispatched(blocker)
    instants = [after(-10 + number / 1_000_000) for number in range(40)]
    wanted = [(chance.randrange(10), f"fair-{number:02}", instant) for number, instant in enumerate(instants)]
    ids = [(agents[agent], id) for agent, id, _ in wanted]
    for agent, id, instant in chance.sample(wanted, len(wanted)):
        fields = {"site": site, "worker": True, "organization_id": f"organization-{agent}", "created_at": instant}
        await play.trigger(agents[agent], id, **fields)
    await play.saw("claim_opened", *ids)
    play.is_working = True
    await play.finish(blocker)
    await play.all_ended()
    assert [id for id in play.order if id in set(ids)] == ids


async def test_a_wide_claim_starts_against_an_endless_stream_of_children_and_stalls_no_sibling(play: Play) -> None:
    stream, wide, sibling = (next(names("wide", number)) for number in (0, 3, 5))
    site = next(names("narrow", 1))
    await play.unlimited(stream, wide, sibling)
    await play.configured(site, 0)
    number = 0

    async def child() -> Id:
        nonlocal number
        number += 1
        place = {"site": site, "environment_id": "narrow", "folder": f"/src/{number % 3}"}
        return await play.trigger(stream, f"narrow-{number:03}", **place)

    running = [await child(), await child()]
    await play.dispatched(*running)
    whole = await play.trigger(wide, "narrow-whole", site=site, environment_id="narrow", folder="/src")
    await play.saw("claim_waiting", whole)
    beside = await play.trigger(sibling, "narrow-beside", site=site, environment_id="narrow", folder="/srcs")
    await play.dispatched(beside)
    passed = 0
    while not play.dispatches[whole]:
        next_one = await child()
        await play.until(
            lambda id=next_one: bool(play.dispatches[id] or play.events["claim_waiting", *id]),  # type: ignore[misc]
            "an answer for the next child",
        )
        if play.dispatches[next_one]:
            passed += 1
        assert passed <= CLAIM_PASSES_MAX
        running.append(next_one)
        oldest = next(id for id in running if play.dispatches[id] and not play.has_ended(id))
        await play.finish(oldest)
        await play.saw("finished", oldest)
        await play.until(lambda id=oldest: play.holds_nothing(id), "its folder is free")  # type: ignore[misc]
        await play.until(
            lambda: (
                bool(play.dispatches[whole]) or any(not play.has_ended(id) for id in running if play.dispatches[id])
            ),
            "the wide one or a child runs",
        )
    assert passed == CLAIM_PASSES_MAX, "it was passed as often as the rules allow, not less"
    play.is_working = True
    await play.finish(whole)
    await play.finish(beside)
    await play.all_ended()


async def test_a_dead_runner_loses_its_folder_and_its_late_words_are_ignored(play: Play) -> None:
    dead, other, site = next(names("dead", 4)), next(names("heir", 2)), next(names("grave", 0))
    await play.configured(site, 1)
    place = {"site": site, "environment_id": "grave", "folder": "/src", "worker": True}
    holder = await play.trigger(next(names("digger", 1)), "grave-holder", **place)
    await play.dispatched(holder)
    gone = await play.trigger(dead, "grave-gone", heartbeat_seconds=1, max_attempts=1, **place)
    await play.saw("claim_waiting", gone)
    heir = await play.trigger(other, "grave-heir", **place)
    await play.saw("claim_waiting", heir)  # before the short lease begins
    await play.finish(holder)
    attempt = await play.dispatched(gone)
    await play.say(attempt, "running")
    await play.saw("lease_expired", gone)
    given_on = await play.dispatched(heir)
    assert attempt["execution_id"] in play.revoked
    assert not play.has_ended(heir)
    before = len(play.events["finished", *gone])
    await play.say(attempt, "finished")
    await play.until(
        lambda: any(
            decision.get("ignored", {}).get("reason") == "after_final" and decision["agent_id"] == dead
            for decision in play.decisions
        ),
        "its late word is ignored",
    )
    assert len(play.events["finished", *gone]) == before == 0
    await play.say(given_on)
    await play.all_ended()
    assert play.events["lease_expired", *gone][0]["final"] == "failed"


async def test_a_trigger_waits_for_a_conversation_of_an_agent_on_another_partition(play: Play) -> None:
    first, second = next(names("before", 1)), next(names("behind", 6))
    done = await play.trigger(first, "before-1", conversation_id="work")
    await play.dispatched(done)
    on = [{"agent_id": first, "conversation_id": "work"}]
    waits = await play.trigger(second, "behind-1", depends_on=on)
    await play.saw("told", (first, waits[1]))
    assert not play.dispatches[waits]
    await play.finish(done)
    await play.dispatched(waits)
    again = await play.trigger(second, "behind-2", depends_on=on)
    await play.finish(waits)
    await play.dispatched(again)
    await play.finish(again)
    await play.all_ended()


async def test_an_ask_whose_site_does_not_answer_is_refused_in_time_and_has_no_effect_later(
    play: Play, two_workers: list[WorkerProcess]
) -> None:
    """The owner of the site's partition is frozen, for less than its session."""
    owned = [sorted(map(int, (await worker.readiness())[1]["partitions"])) for worker in two_workers]
    frozen, (of_agent, of_site) = two_workers[1], (owned[0][0], owned[1][0])
    agent, site = next(names("asker", of_agent)), next(names("silent", of_site))
    await play.configured(site, 1)
    frozen.send(signal.SIGSTOP)
    try:
        asked = await play.ask(agent, "silent-1", 1.0, site=site, worker=True)
        answer = await play.settled("silent-1", timeout_seconds=SESSION_SECONDS - 1)
    finally:
        frozen.send(signal.SIGCONT)
    refused = next(event for event in answer["events"] if event["type"] == "refused")
    assert refused["code"] == "site_not_answering"
    assert answer["cause"]["timer"]["kind"] == "answer"
    await play.until(
        lambda: play.holds_nothing(asked) and bool(play.events["claim_opened", *asked]), "it came and went"
    )
    assert not play.dispatches[asked]
    later = await play.trigger(agent, "silent-2", site=site, worker=True)
    await play.dispatched(later)
    await play.finish(later)
    await play.all_ended()
    assert not play.dispatches[asked], "the slot was never its own"
