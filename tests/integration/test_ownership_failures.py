"""What goes wrong while a partition is owned: rules that fail, clocks, zombies, a fencing from outside, leaving."""

import asyncio
import json
import os
import signal
import sys
import time
from datetime import datetime
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer

from api.cli.embedded_kafka import EmbeddedKafka
from streams import APPLICATION_ID, CHANGELOG, CONTROLS, DEAD_LETTERS, STATUSES, TRIGGERS, WORKERS
from streams.kafka import edge
from streams.kafka.ownership import SkipRefused, skip_record
from streams.settings import Settings
from tests.brokers import WAIT_SECONDS, until
from tests.integration.test_ownership_restore import COUNT_KEY, NOWHERE, POSITION_KEY, position_row, write
from tests.integration.workers import (
    LOADED,
    PARTITIONS,
    ROOT,
    SESSION_SECONDS,
    Log,
    WorkerProcess,
    all_handled,
    decisions,
    load,
    send,
    sending,
    unaccounted,
    wait_for_decisions,
    workers,
)

pytestmark = pytest.mark.kafka
FENCED = 75


def of_input(found: list[dict[str, object]]) -> list[object]:
    return [value["offset"] for value in found if "offset" in value]


async def test_a_failing_rule_stops_its_partition_only_until_skipped(topics: EmbeddedKafka) -> None:
    settings = Settings(kafka=topics.bootstrap)
    await send(topics.bootstrap, "count", "fail", "count", "count")
    async with workers(topics.bootstrap) as (worker,):
        stopped = await worker.logged("partition_stopped")
        assert (stopped["partition"], stopped["topic"], stopped["offset"]) == (0, TRIGGERS.name, 1)
        await send(topics.bootstrap, "count", partition=1)
        await send(topics.bootstrap, "count", topic=STATUSES.name)
        await wait_for_decisions(topics.bootstrap, 1, lambda found: len(found) == 1)
        assert of_input(await decisions(topics.bootstrap, 0)) == [0], "nothing behind it was handled, on any topic"

        body = await not_ready(worker)
        (reason,) = body["reasons"]
        assert reason.startswith("partition 0 is stopped: the rules failed on berth.triggers/0@1: ZeroDivisionError")
        assert "berth skip berth.triggers 0 1" in reason
        where = body["partitions"]["0"]["stopped_at"]
        assert {name: where[name] for name in ("topic", "partition", "offset")} == {
            "topic": TRIGGERS.name,
            "partition": 0,
            "offset": 1,
        }
        assert "ZeroDivisionError" in where["error"]
        await reported(topics.bootstrap, lambda record: record["partitions"]["0"]["stopped_at"] == where)

        for wrong in ((TRIGGERS.name, 0, 2), (TRIGGERS.name, 0, 0), (TRIGGERS.name, 1, 0), ("berth.texts", 0, 1)):
            with pytest.raises(SkipRefused, match="Nothing was skipped"):
                await skip_record(settings, *wrong)
        assert worker.is_running, "a wrong skip disturbs nobody"

        await skip_record(settings, TRIGGERS.name, 0, 1)
        await worker.logged("partition_freed")
        await wait_for_decisions(topics.bootstrap, 0, lambda found: len(found) == 4)
        await worker.ready()
    assert [value["offset"] for value in await decisions(topics.bootstrap, 0) if value["topic"] == TRIGGERS.name] == [
        0,
        2,
        3,
    ]
    ((letter,),) = (await Log.read(topics.bootstrap, DEAD_LETTERS.name)).records.values()
    assert (letter.partition, letter.key, letter.value) == (0, b"k", b"fail")
    headers = dict(letter.headers)
    assert headers.pop("at")
    assert headers == {"reason": b"skipped", "topic": TRIGGERS.name.encode(), "partition": b"0", "offset": b"1"}


async def test_skip_frees_a_partition_that_nobody_owns(topics: EmbeddedKafka) -> None:
    await send(topics.bootstrap, "fail", "count")
    async with workers(topics.bootstrap) as (worker,):
        await worker.logged("partition_stopped")
        assert await worker.stop() == 0
    command = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "api.cli", "skip", TRIGGERS.name, "0", "0", "--yes"),
        env=os.environ | {"BERTH_KAFKA": topics.bootstrap},
        cwd=ROOT,
    )
    assert await command.wait() == 0
    async with workers(topics.bootstrap) as (worker,):
        await worker.ready()
        await wait_for_decisions(topics.bootstrap, 0, lambda found: of_input(found) == [1])


async def test_a_rule_that_fails_only_in_company_is_got_past_one_by_one(topics: EmbeddedKafka) -> None:
    await send(topics.bootstrap, *["count"] * 75, "fail together", *["count"] * 25)  # never the first that is decided
    async with workers(topics.bootstrap) as (worker,):
        await worker.ready()
        found = await wait_for_decisions(topics.bootstrap, 0, lambda found: len(found) >= 100)
        await all_handled(topics.bootstrap, 5)
        assert worker.count("rules_failed") == 1
        assert worker.count("partition_stopped") == 0
    assert of_input(found)[:100] == list(range(100))


async def test_a_rule_that_fails_in_a_timer_parks_its_agent_only(topics: EmbeddedKafka) -> None:
    await send(topics.bootstrap, "bad timer 1", key="bad")
    await send(topics.bootstrap, "timer 2", "count", key="good")
    async with workers(topics.bootstrap) as (worker,):
        found = await wait_for_decisions(topics.bootstrap, 0, lambda found: len(found) >= 5)
        assert next(value for value in found if "parked" in value)["parked"] == "bad"
        assert next(value for value in found if "timer" in value)["timer"] == "good"
        assert of_input(found) == [0, 1, 2]
        await worker.ready()


async def test_what_a_site_left_over_and_the_rules_fail_on_stops_its_partition_until_the_bug_is_mended(
    topics: EmbeddedKafka,
) -> None:
    await send(topics.bootstrap, "bad site", key="hall")
    await send(topics.bootstrap, "count")
    async with workers(topics.bootstrap) as (worker,):
        stopped = await worker.logged("partition_stopped")
        assert (stopped["partition"], stopped["site"]) == (0, "hall")
        await send(topics.bootstrap, "count", topic=STATUSES.name)
        await send(topics.bootstrap, "count", partition=1)
        await wait_for_decisions(topics.bootstrap, 1, lambda found: len(found) == 1)
        body = await not_ready(worker)
        where = body["partitions"]["0"]["stopped_at"]
        assert (where["topic"], where["offset"], where["site"]) == (None, None, "hall")
        assert "mended" in where["advice"] and "can't be given up" in where["advice"]
        assert body["reasons"] == [f"partition 0 is stopped: {where['error']}. {where['advice']}"]
        assert "left-over work of site 'hall'" in where["error"]
        await reported(topics.bootstrap, lambda record: record["partitions"]["0"]["stopped_at"] == where)
        with pytest.raises(SkipRefused, match="Nothing was skipped"):
            await skip_record(Settings(kafka=topics.bootstrap), TRIGGERS.name, 0, 0)
        assert worker.is_running and worker.count("rules_failed") == 2, "once in company, once alone, and no loop"
        found = await decisions(topics.bootstrap, 0)
        assert [value["count"] for value in found if value.get("topic") == TRIGGERS.name][:1] == [1]
        assert not [value for value in found if "site" in value]
        assert await worker.stop() == 0, "it gives its partitions to others"
    async with workers(topics.bootstrap, COUNTING_IS_MENDED="1") as (worker,):
        await worker.ready()
        found = await wait_for_decisions(topics.bootstrap, 0, lambda found: len(found) == 4)
        said = [value.get("site", value.get("topic")) for value in found]
        assert said[:2] == [TRIGGERS.name, "hall"], "what is left over comes before anything else"
        assert sorted(map(str, said[2:])) == [STATUSES.name, TRIGGERS.name]


async def test_timers_wait_for_what_was_there_at_take_over_and_fire_without_traffic(topics: EmbeddedKafka) -> None:
    timer = json.dumps(["timer", "late"]).encode()
    rows = {POSITION_KEY: position_row(NOWHERE), timer: json.dumps([1, False]).encode()}
    await write(topics.bootstrap, CHANGELOG.name, ("commit", rows))
    await send(topics.bootstrap, *["count"] * 3000)
    await send(topics.bootstrap, *["count"] * 3000, topic=STATUSES.name)
    async with workers(topics.bootstrap) as (worker,):
        found = await wait_for_decisions(topics.bootstrap, 0, lambda found: len(found) >= 6001)
        assert found[-1]["timer"] == "late", "it was due all the time, and fires after the backlog"
        await worker.ready()
        deadlines = [edge.now_us() + seconds * 1_000_000 for seconds in (1, 2)]
        for deadline in deadlines:
            await send(topics.bootstrap, f"timer {deadline}", key=str(deadline))
        fired = await wait_for_decisions(topics.bootstrap, 0, lambda found: len(found) == 6005)
    assert [value["deadline_us"] for value in fired[-2:]] == deadlines
    assert all(0 <= value["at_us"] - value["deadline_us"] < 1_000_000 for value in fired[-2:])


async def test_timers_wait_for_records_behind_an_open_transaction(topics: EmbeddedKafka) -> None:
    """A `finished` that is there but can't be read yet, because another partition's owner died with its hand open."""
    timer = json.dumps(["timer", "late"]).encode()
    rows = {POSITION_KEY: position_row(NOWHERE), timer: json.dumps([1, False]).encode()}
    await write(topics.bootstrap, CHANGELOG.name, ("commit", rows))
    other = AIOKafkaProducer(bootstrap_servers=topics.bootstrap, transactional_id="another")
    await other.start()
    await other.begin_transaction()
    await other.send_and_wait(STATUSES.name, b"count", b"k", 0)
    await send(topics.bootstrap, "count", topic=STATUSES.name)
    async with workers(topics.bootstrap) as (worker,):
        await worker.ready()
        await send(topics.bootstrap, "count")
        await wait_for_decisions(topics.bootstrap, 0, lambda found: len(found) == 1)
        await other.commit_transaction()
        found = await wait_for_decisions(topics.bootstrap, 0, lambda found: len(found) == 4)
    await other.stop()
    assert [value.get("timer", value.get("topic")) for value in found] == [
        TRIGGERS.name,
        STATUSES.name,
        STATUSES.name,
        "late",
    ]


async def test_a_clock_that_is_behind_decides_nothing(topics: EmbeddedKafka) -> None:
    await send(topics.bootstrap, "count")
    await send(topics.bootstrap, "count", partition=1)
    ahead_us = edge.now_us() + 20_000_000  # also a slow machine has a worker within 15 s, while it is behind
    await write(topics.bootstrap, CHANGELOG.name, ("commit", {POSITION_KEY: position_row(NOWHERE, ahead_us)}))
    async with workers(topics.bootstrap) as (worker,):
        await worker.logged("clock_behind")
        status, body = await worker.readiness()
        assert status == 503
        assert "partition 0 is clock_behind" in body["reasons"]
        await wait_for_decisions(topics.bootstrap, 1, lambda found: len(found) == 1)
        await wait_for_decisions(topics.bootstrap, 0, lambda found: len(found) == 1)
        assert edge.now_us() > ahead_us - 5_000_000
        await worker.ready()


async def test_a_fenced_worker_stops_at_its_next_commit(topics: EmbeddedKafka) -> None:
    async with workers(topics.bootstrap) as (worker,):
        await worker.ready()
        intruder = AIOKafkaProducer(bootstrap_servers=topics.bootstrap, transactional_id=f"{APPLICATION_ID}-3")
        await intruder.start()
        await intruder.stop()
        assert worker.is_running
        await send(topics.bootstrap, "count", partition=3)
        assert await worker.ended() == FENCED, worker.account()
        assert "taken over" in str(await worker.logged("worker_stops"))
        assert all(json.loads(line) for line in worker.errors), "no traceback but in a field"
    assert await decisions(topics.bootstrap, 3) == []


async def test_a_frozen_worker_that_wakes_up_writes_nothing(topics: EmbeddedKafka) -> None:
    async with workers(topics.bootstrap) as running, sending(topics.bootstrap) as producer:
        frozen = running[0]
        await frozen.ready()
        loading = asyncio.create_task(load(producer, 100_000, 1_000, LOADED))
        await wait_for_decisions(topics.bootstrap, 0, lambda found: len(found) > 20)
        running.append(await WorkerProcess.start(topics.bootstrap))
        await running[1].logged("restored")
        frozen.send(signal.SIGSTOP)
        await running[1].ready()
        frozen.send(signal.SIGCONT)
        assert await frozen.ended() == FENCED, frozen.account()
        assert "taken over meanwhile" in str(await frozen.logged("worker_stops"))
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        await producer.flush()
        await all_handled(topics.bootstrap, 15)
    assert await unaccounted(topics.bootstrap) == {}


async def test_a_worker_that_is_asked_to_stop_hands_over_at_once(topics: EmbeddedKafka) -> None:
    async with workers(topics.bootstrap, 2) as running, sending(topics.bootstrap) as producer:
        await asyncio.gather(*(worker.logged("assigned", 1) for worker in running))
        loading = asyncio.create_task(load(producer, 100_000, 500, LOADED))
        await wait_for_decisions(topics.bootstrap, 0, lambda found: len(found) > 20)
        leaving, staying = running
        names = [(await worker.readiness())[1]["worker_id"] for worker in running]

        async def have_records() -> list[bool]:
            log = await Log.read(topics.bootstrap, WORKERS.name)
            latest = {record.key.decode(): record.value for found in log.records.values() for record in found}
            return [latest.get(name) is not None for name in names]

        async def both_have() -> bool:
            return await have_records() == [True, True]

        await until(both_have)
        began = time.monotonic()
        assert await leaving.stop() == 0
        await staying.ready()
        assert time.monotonic() - began < SESSION_SECONDS, "it did not wait for the session to end"
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        await producer.flush()
        await all_handled(topics.bootstrap, 10)
        assert await have_records() == [False, True], "the one that left takes its record back"
    assert await unaccounted(topics.bootstrap) == {}


async def test_an_idle_worker_stays_a_member(topics: EmbeddedKafka) -> None:
    """Longer than aiokafka's max_poll_interval: nothing is fetched through the consumer that is the member."""
    async with workers(topics.bootstrap) as (worker,):
        await worker.ready()
        members = worker.count("assigned")
        began = (await worker.readiness())[1]["at"]

        async def has_waited() -> bool:
            at = datetime.fromisoformat((await worker.readiness())[1]["at"])
            return (at - datetime.fromisoformat(began)).total_seconds() > 2 * SESSION_SECONDS + 2

        await until(has_waited)
        assert worker.count("assigned") == members
        await send(topics.bootstrap, "count", topic=CONTROLS.name)
        await wait_for_decisions(topics.bootstrap, 0, lambda found: len(found) == 1)


async def test_restored_rows_and_the_count_go_on(topics: EmbeddedKafka) -> None:
    await send(topics.bootstrap, *["count"] * 10)
    for round_number in range(3):
        async with workers(topics.bootstrap) as (worker,):
            await worker.ready()
            await wait_for_decisions(topics.bootstrap, 0, lambda found, n=round_number: len(found) == 10 + n)  # type: ignore[misc]
            await (worker.kill() if round_number == 1 else worker.stop())
        await send(topics.bootstrap, "count")
    assert [value["count"] for value in await decisions(topics.bootstrap, 0)] == list(range(1, 13))
    assert COUNT_KEY in {record.key for record in (await Log.read(topics.bootstrap, CHANGELOG.name)).all(0)}


async def not_ready(worker: WorkerProcess) -> dict[str, Any]:
    """What it says when nothing but one partition keeps it from being ready: the others are taken over beside it."""
    body: dict[str, Any] = {}

    async def only_one() -> bool:
        status, found = await worker.readiness()
        body.update(found)
        return status == 503 and len(found["reasons"]) == 1

    await until(only_one)
    return body


async def reported(bootstrap: str, condition: object) -> None:
    """Wait until a record in berth.workers is as wanted."""
    assert callable(condition)
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            log = await Log.read(bootstrap, WORKERS.name)
            records = [json.loads(record.value) for found in log.records.values() for record in found if record.value]
            if any(condition(record) for record in records if record["partitions"]):
                assert set(records[-1]) == {"address", "at", "partitions"}
                return
            await asyncio.sleep(0.1)


assert PARTITIONS > 3
