"""The projector on a real Kafka and a real PostgreSQL: killed, cut off, given what it can't apply, and replaced."""

import asyncio
import random
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psycopg
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

from api.cli.embedded_kafka import EmbeddedKafka
from api.cli.embedded_postgres import EmbeddedPostgres
from projections import schema
from projections.log import Log
from projections.projector import EXIT_ERROR, Projector
from projections.rebuild import compare, rebuild
from projections.snapshots import SNAPSHOT_DECISIONS
from projections.store import Store
from streams import DECISIONS, TEXTS, TOPICS
from streams.rules.agent.state import Agent
from tests.brokers import until
from tests.conftest import PARTITIONS
from tests.histories import History
from tests.integration.projectors import (
    Publisher,
    check_against_log,
    check_rows,
    fork_projector,
    projector,
    publisher,
)
from tests.integration.test_up import berth

pytestmark = pytest.mark.kafka


def say_nothing(_what: str, _done: int, _total: int) -> None:
    """Nobody looks at the progress."""


def check_tables(url: str, history: History) -> None:
    store = Store(url)
    store.open()
    check_rows(store, history)
    store.close()


@pytest.fixture
async def published(topics: EmbeddedKafka, seed: int) -> AsyncIterator[Publisher]:
    async with publisher(topics.bootstrap, seed) as opened:
        yield opened


async def test_it_follows_the_log_and_says_so(
    topics: EmbeddedKafka, published: Publisher, database: str, seed: int
) -> None:
    history = History(seed, PARTITIONS).live(200)
    await published.publish(history.transactions())
    async with projector(topics.bootstrap, database, PARTITIONS) as process:
        await published.projected(database)
        body = await process.readiness_is(True)
        await published.publish(history.live(100).transactions())
        await published.projected(database)
        check_tables(database, history)
        assert body["stopped_at"] is None
        for positions in (body["positions"], body["site_positions"]):
            assert set(positions) == {str(number) for number in range(PARTITIONS)}
        assert await process.stop() == 0
    compared = await check_against_log(topics.bootstrap, database, PARTITIONS)
    assert compared["decisions"] == published.counts[DECISIONS.name] and compared["texts"] > 0


async def test_it_makes_the_snapshots_that_are_due_also_those_of_one_that_was_killed(
    topics: EmbeddedKafka, published: Publisher, database: str, seed: int
) -> None:
    history = History(seed, PARTITIONS, agents=("A", "a"))
    while any((history.agent(id) or Agent(id)).row.seq < 1_050 for id in history.agents):
        history.live(10)
        for agent_id in history.agents:
            history._of(agent_id).configure(agent_id, parallelism_limit=3)  # also brings it back from the archive
    await published.publish(history.transactions())
    process = fork_projector(topics.bootstrap, database, PARTITIONS, batch_records=500)
    await published.projected(database)
    process.kill()
    await asyncio.to_thread(process.join)
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("UPDATE berth.agents SET snapshot_seq = 0; DELETE FROM berth.agent_snapshots")
        async with projector(topics.bootstrap, database, PARTITIONS):

            async def all_made() -> bool:
                due = connection.execute(
                    "SELECT count(*) FROM berth.agents WHERE seq - snapshot_seq >= %s", (SNAPSHOT_DECISIONS,)
                ).fetchone()
                return due == (0,)

            await until(all_made)
        made = connection.execute("SELECT count(*) FROM berth.agent_snapshots").fetchone()
    assert made is not None
    compared = await check_against_log(topics.bootstrap, database, PARTITIONS)
    assert compared["agent_snapshots"] == made[0] >= 2


async def test_kill_9_between_every_two_statements_leaves_the_rows_of_a_rebuild(
    topics: EmbeddedKafka, published: Publisher, database: str, seed: int
) -> None:
    """Case 124: the n-th start dies at its n-th statement, until one gets to the end of the log."""
    history = History(seed, PARTITIONS).live(60)
    await published.publish(history.transactions())
    kills = 0
    while True:
        # New work each time, so that new and changed rows, texts and dead letters are on the way.
        await published.publish(history.live(20).transactions())
        process = fork_projector(topics.bootstrap, database, PARTITIONS, kill_at=kills + 1)
        waiting = asyncio.create_task(published.projected(database))
        ended = asyncio.create_task(asyncio.to_thread(process.join))
        await asyncio.wait({waiting, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            # All there, and alive: it got through a whole batch without coming to the statement.
            waiting.result()
            process.kill()
            await ended
            break
        waiting.cancel()
        assert process.exitcode == -signal.SIGKILL
        kills += 1
    assert kills > 40, "a batch has so many statements"
    check_tables(database, history)
    await check_against_log(topics.bootstrap, database, PARTITIONS)


async def test_kill_9_at_random_50_times_leaves_the_rows_of_a_rebuild(
    topics: EmbeddedKafka, published: Publisher, database: str, seed: int
) -> None:
    chance = random.Random(seed)
    history = History(seed, PARTITIONS)
    for _ in range(50):
        process = fork_projector(topics.bootstrap, database, PARTITIONS, batch_records=chance.choice([1, 7, 50, 4000]))
        await published.publish(history.live(30).transactions())
        await asyncio.to_thread(process.join, chance.uniform(0.0, 0.4))
        assert process.exitcode is None
        process.kill()
        await asyncio.to_thread(process.join)
    process = fork_projector(topics.bootstrap, database, PARTITIONS)
    await published.projected(database)
    process.kill()
    await asyncio.to_thread(process.join)
    check_tables(database, history)
    await check_against_log(topics.bootstrap, database, PARTITIONS)


# Servers that go away


@pytest.fixture
def own_postgres() -> Iterator[EmbeddedPostgres]:
    with (
        tempfile.TemporaryDirectory(prefix="berth-postgres-") as directory,
        EmbeddedPostgres(Path(directory), port=None) as server,
    ):
        yield server


async def test_restarts_of_both_servers_in_mid_load_are_told_and_survived(
    fresh_kafka: EmbeddedKafka, own_postgres: EmbeddedPostgres, seed: int
) -> None:
    url, history = own_postgres.url, History(seed, PARTITIONS)
    async with (
        publisher(fresh_kafka.bootstrap, seed) as published,
        projector(fresh_kafka.bootstrap, url, PARTITIONS) as process,
    ):
        await published.publish(history.live(60).transactions())
        await process.readiness_is(True)
        for server in (own_postgres, fresh_kafka):
            for end, start in ((server.kill, server.start), (server.stop, server.start), (server.pause, server.resume)):
                await asyncio.to_thread(end)
                if server is own_postgres:
                    await published.publish(history.live(20).transactions())
                body = await process.readiness_is(False)
                assert body["reasons"], "it says what is missing"
                await asyncio.to_thread(start)
                await process.readiness_is(True)
                await published.publish(history.live(20).transactions())
                await published.projected(url)
        assert process.is_running
        check_tables(url, history)
        await check_against_log(fresh_kafka.bootstrap, url, PARTITIONS)


class Led(Exception):  # noqa: N818 - it is what led to the end
    """What went wrong while Kafka was away."""


async def test_a_log_that_is_left_while_kafka_is_away_tells_what_led_to_it(
    fresh_kafka: EmbeddedKafka, caplog: pytest.LogCaptureFixture
) -> None:
    count, is_away = 5, asyncio.Event()
    following: list[Log] = []

    async def follow() -> None:
        async with Log(fresh_kafka.bootstrap, PARTITIONS) as log:
            await log.seek(dict.fromkeys(log.wanted, 0))
            following.append(log)
            await is_away.wait()
            raise Led

    tasks = [asyncio.create_task(follow()) for _ in range(count)]

    async def all_follow() -> bool:
        return len(following) == count

    async def all_have_failed() -> bool:
        return caplog.text.count("Failed fetch messages") > 10 * count

    await until(all_follow)
    await asyncio.to_thread(fresh_kafka.kill)
    await until(all_have_failed)
    is_away.set()
    await asyncio.wait(tasks)
    assert [task.cancelled() or type(task.exception()) for task in tasks] == [Led] * count


async def test_a_task_that_a_library_cancels_ends_it_as_an_error(database: str) -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    task = asyncio.create_task(cancelled())
    await asyncio.wait({task})
    projecting = Projector("127.0.0.1:1", Store(database), database, PARTITIONS, text_days=1)
    assert projecting._why(task) == EXIT_ERROR


async def test_it_starts_before_its_servers_and_waits_for_them(
    fresh_kafka: EmbeddedKafka, own_postgres: EmbeddedPostgres, seed: int
) -> None:
    url = own_postgres.url
    own_postgres.stop()
    fresh_kafka.stop()
    async with projector(fresh_kafka.bootstrap, url, PARTITIONS) as process:
        await process.readiness_is(False)
        await asyncio.to_thread(own_postgres.start)
        await process.logged("trying_again", doing="connecting to Kafka")
        await asyncio.to_thread(fresh_kafka.start)
        await process.readiness_is(True)


async def test_tables_that_somebody_dropped_are_filled_again(
    topics: EmbeddedKafka, published: Publisher, database: str, seed: int
) -> None:
    history = History(seed, PARTITIONS).live(100)
    await published.publish(history.transactions())
    async with projector(topics.bootstrap, database, PARTITIONS):
        await published.projected(database)
        with psycopg.connect(database, autocommit=True) as connection:
            connection.execute("DROP SCHEMA berth CASCADE")
        await published.publish(history.live(50).transactions())
        await published.projected(database)
    check_tables(database, history)


async def test_a_second_projector_waits_and_takes_over_from_one_that_is_killed(
    topics: EmbeddedKafka, published: Publisher, database: str, seed: int
) -> None:
    history = History(seed, PARTITIONS).live(100)
    await published.publish(history.transactions())
    async with (
        projector(topics.bootstrap, database, PARTITIONS) as first,
        projector(topics.bootstrap, database, PARTITIONS) as second,
    ):
        ready: list[bool] = []

        async def one_is_ready() -> bool:
            ready[:] = [(await process.readiness())[1]["ready"] for process in (first, second)]
            return sum(ready) == 1

        await until(one_is_ready)
        working, waiting = (first, second) if ready[0] else (second, first)
        await published.projected(database)

        async def waits() -> bool:
            reasons: list[str] = (await waiting.readiness())[1]["reasons"]
            return reasons == ["waiting for another projector to end"]

        await until(waits)
        await working.kill()
        await published.publish(history.live(50).transactions())
        await waiting.readiness_is(True)
        await published.projected(database)
    check_tables(database, history)


# What it can't apply


async def test_a_decision_that_cannot_be_applied_stops_it_with_the_position(
    topics: EmbeddedKafka, published: Publisher, database: str, seed: int
) -> None:
    history = History(seed, PARTITIONS).live(100)
    await published.publish(history.transactions())
    producer = AIOKafkaProducer(bootstrap_servers=topics.bootstrap)
    await producer.start()
    sent = await producer.send_and_wait(DECISIONS.name, b'{"type":"decision","v":9}', b"A", partition=3)
    await producer.stop()
    async with projector(topics.bootstrap, database, PARTITIONS) as process:
        assert await process.ended() == 65
        told = await process.logged("cannot_apply")
    assert (told["topic"], told["partition"], told["offset"]) == (DECISIONS.name, 3, sent.offset)
    await published.projected(database)
    check_tables(database, history)
    async with projector(topics.bootstrap, database, PARTITIONS) as process:
        assert await process.ended() == 65


async def test_a_log_that_was_made_anew_is_refused_and_the_tables_stay(
    topics: EmbeddedKafka, published: Publisher, database: str, seed: int, tmp_path: Path
) -> None:
    await published.publish(History(seed, PARTITIONS).live(50).transactions())
    async with projector(topics.bootstrap, database, PARTITIONS):
        await published.projected(database)
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("UPDATE berth.checkpoints SET next_offset = next_offset + 1000")
        before = connection.execute("SELECT count(*) FROM berth.decisions").fetchone()
        async with projector(topics.bootstrap, database, PARTITIONS) as process:
            assert await process.ended() == 78
            assert "made anew" in (await process.logged("log_does_not_fit"))["error"]
        assert connection.execute("SELECT count(*) FROM berth.decisions").fetchone() == before
        where = {"BERTH_KAFKA": topics.bootstrap, "BERTH_DATABASE_URL": database}
        compared = await asyncio.to_thread(berth, tmp_path, "projections", "diff", **where)
        assert compared.returncode == 78, compared.stdout
        assert "made anew" in compared.stderr and "Kept:" in compared.stderr and "To do:" in compared.stderr
        assert "Traceback" not in compared.stderr and "Unclosed" not in compared.stderr
        assert connection.execute("SELECT count(*) FROM berth.decisions").fetchone() == before
        rebuilt = await asyncio.to_thread(berth, tmp_path, "projections", "rebuild", **where)
        assert rebuilt.returncode == 0, rebuilt.stderr
        compared = await asyncio.to_thread(berth, tmp_path, "projections", "diff", **where)
        assert compared.returncode == 0, compared.stdout


# Rebuilding and comparing


async def test_a_rebuild_takes_the_place_of_the_tables_while_the_projector_goes_on(
    topics: EmbeddedKafka, published: Publisher, database: str, seed: int
) -> None:
    """Case 122: and sends nothing to anybody."""
    history = History(seed, PARTITIONS).live(200)
    await published.publish(history.transactions())
    async with projector(topics.bootstrap, database, PARTITIONS) as process:
        await published.projected(database)
        ends = await ends_of_all_topics(topics.bootstrap)  # not before: markers of transactions come after their end
        with psycopg.connect(database, autocommit=True) as connection:
            connection.execute("UPDATE berth.agents SET running = 77 WHERE agent_id = 'A'")
            connection.execute("DELETE FROM berth.attempts WHERE agent_id = (SELECT min(agent_id) FROM berth.attempts)")
            oid = connection.execute("SELECT 'berth.agents'::regclass::oid").fetchone()
            _, differences = await compare(topics.bootstrap, database, PARTITIONS, 36_500, say_nothing)
            assert {difference.table for difference in differences} == {"agents", "attempts"}
            agents, attempts = differences
            assert (agents.only_live, agents.only_rebuilt, attempts.only_live) == (1, 1, 0)
            assert any('"running": 77' in example for example in agents.examples)
            rows = await rebuild(topics.bootstrap, database, PARTITIONS, say_nothing)
            assert rows["decisions"] == published.counts[DECISIONS.name]
            assert connection.execute("SELECT 'berth.agents'::regclass::oid").fetchone() != oid
            assert await ends_of_all_topics(topics.bootstrap) == ends, "nothing was written to the log"
            schemas = connection.execute("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'berth%'").fetchall()
            assert schemas == [("berth",)], "nothing is left beside"
        await published.publish(history.live(100).transactions())
        await published.projected(database)
        assert process.is_running
        check_tables(database, history)
    await check_against_log(topics.bootstrap, database, PARTITIONS)


async def test_rebuilds_under_load_lose_and_repeat_nothing(
    topics: EmbeddedKafka, published: Publisher, database: str, seed: int
) -> None:
    history = History(seed, PARTITIONS)
    process = fork_projector(topics.bootstrap, database, PARTITIONS, batch_records=20)
    done = asyncio.Event()

    async def load() -> None:
        while not done.is_set():
            await published.publish(history.live(20).transactions())

    loading = asyncio.create_task(load())
    for _ in range(4):
        await rebuild(topics.bootstrap, database, PARTITIONS, say_nothing)
        await check_against_log(topics.bootstrap, database, PARTITIONS)
    done.set()
    await loading
    await published.projected(database)
    assert process.is_alive()
    process.kill()
    await asyncio.to_thread(process.join)
    check_tables(database, history)
    await check_against_log(topics.bootstrap, database, PARTITIONS)


async def test_a_rebuild_does_not_replace_tables_that_somebody_is_in_the_midst_of_making(
    topics: EmbeddedKafka, published: Publisher, database: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    await published.publish(History(seed, PARTITIONS).live(50).transactions())
    monkeypatch.setattr("projections.rebuild.NEAR_RECORDS", 0)  # it reports before it begins to replace them
    holds: list[bool] = []
    with schema.connect(database) as maker, schema.connect(database) as watcher:

        def begin_making(_what: str, _done: int, _total: int) -> None:
            if not holds:
                holds.append(True)
                maker.execute("SELECT pg_advisory_lock(%s, %s)", (schema.LOCK_CLASS, schema.MIGRATION_LOCK))

        def work() -> dict[str, int]:
            return asyncio.run(rebuild(topics.bootstrap, database, PARTITIONS, begin_making))

        rebuilding = asyncio.create_task(asyncio.to_thread(work))

        async def waits_for_it() -> bool:
            found = watcher.execute(
                "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = %s AND NOT granted",
                (schema.MIGRATION_LOCK,),
            )
            return found.fetchone() == (1,)

        await until(waits_for_it)
        assert not rebuilding.done()
        maker.execute("SELECT pg_advisory_unlock_all()")
        assert (await rebuilding)["decisions"] == published.counts[DECISIONS.name]


async def test_a_rebuild_keeps_the_texts_that_the_log_no_longer_holds(
    topics: EmbeddedKafka, published: Publisher, database: str, seed: int
) -> None:
    history = History(seed, PARTITIONS).live(200)
    await published.publish(history.transactions())
    async with projector(topics.bootstrap, database, PARTITIONS):
        await published.projected(database)
        with schema.connect(database) as connection:
            before = connection.execute("SELECT * FROM texts ORDER BY 1, 2, 3, 4").fetchall()
            admin = AIOKafkaAdminClient(bootstrap_servers=topics.bootstrap)
            await admin.start()
            await admin.delete_records(
                {TopicPartition(TEXTS.name, number): RecordsToDelete(before_offset=-1) for number in range(PARTITIONS)}
            )
            await admin.close()
            await rebuild(topics.bootstrap, database, PARTITIONS, say_nothing)
            assert connection.execute("SELECT * FROM texts ORDER BY 1, 2, 3, 4").fetchall() == before != []
        published.counts[TEXTS.name] = 0  # where no new one comes, nothing is read any more
        await published.publish(history.live(50).transactions())
        await published.projected(database)


async def ends_of_all_topics(bootstrap: str) -> dict[TopicPartition, int]:
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap)
    await consumer.start()
    try:
        found: dict[TopicPartition, int] = await consumer.end_offsets(
            [TopicPartition(topic.name, number) for topic in TOPICS for number in range(PARTITIONS)]
        )
        return found
    finally:
        await consumer.stop()
