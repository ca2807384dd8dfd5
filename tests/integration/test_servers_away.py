"""Kafka is away, doesn't answer, or isn't known: every command that needs it says so, and ends with the code for it.

A program that runs one of them tells "something is wrong with the log" (1) from "nobody could look" (69).
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from api.cli.embedded_kafka import EmbeddedKafka
from projections.log import Log
from streams import CHANGELOG, DECISIONS, TRIGGERS
from streams.kafka import clients
from streams.kafka.decision_log import DecisionLog
from streams.kafka.history import history
from streams.kafka.restore import load_rows
from tests.brokers import WAIT_SECONDS, until
from tests.conftest import PARTITIONS
from tests.integration.test_up import berth

AWAY_EXIT_CODE = 69
LOOKS_AT_THE_LOG = (
    ("verify",),
    ("recover",),
    ("as-of", "--at", "now", "--from-log"),
    ("explain", "writer", "t"),
    ("waiting", "causes"),
    ("what-if", "--limit", "*=2"),
    ("topics", "check"),
)
NOBODY = "127.0.0.1:1"
PAGE_BYTES = 4096
"""The smallest pipe that there is."""


@pytest.mark.parametrize("words", LOOKS_AT_THE_LOG, ids=lambda words: words[0])
def test_without_kafka_a_command_ends_with_the_code_for_that(tmp_path: Path, words: tuple[str, ...]) -> None:
    for variables, told in (({}, "No Kafka is known"), ({"BERTH_KAFKA": NOBODY}, "Kafka can't be reached")):
        done = berth(tmp_path, *words, **variables)
        assert done.returncode == AWAY_EXIT_CODE, done.stderr
        assert told in done.stderr and "Kept:" in done.stderr and "To do:" in done.stderr
        assert all(word not in done.stderr for word in ("Traceback", "Unclosed", "Unable connect"))


def test_ctrl_c_while_it_still_imports_shows_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "api.cli", "verify"]
    environment = {**os.environ, "BERTH_KAFKA": NOBODY}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True, pipesize=PAGE_BYTES
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.rstrip().endswith("typer"):  # half of it, and the pipe takes no more than a little of the rest
                break
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == -signal.SIGINT
    assert "Traceback" not in said


@pytest.mark.parametrize("words", [("projections", "diff"), ("projections", "rebuild"), ("as-of",)], ids=" ".join)
def test_so_does_one_that_needs_postgresql(tmp_path: Path, words: tuple[str, ...]) -> None:
    unknown = berth(tmp_path, *words, BERTH_KAFKA=NOBODY)
    refused = berth(tmp_path, *words, BERTH_KAFKA=NOBODY, BERTH_DATABASE_URL=f"postgresql://nobody@{NOBODY}/none")
    for done, told in ((unknown, "No PostgreSQL is known"), (refused, "connection failed")):
        assert done.returncode == AWAY_EXIT_CODE, done.stderr
        assert told in done.stderr and "To do:" in done.stderr and "Traceback" not in done.stderr


def test_the_tables_are_compared_with_no_log(tmp_path: Path, database: str) -> None:
    for words in (("projections", "diff"), ("projections", "rebuild")):
        for variables in ({}, {"BERTH_KAFKA": NOBODY}):
            done = berth(tmp_path, *words, BERTH_DATABASE_URL=database, **variables)
            assert done.returncode == AWAY_EXIT_CODE, done.stderr
            assert "Traceback" not in done.stderr and "Unclosed" not in done.stderr


@pytest.mark.timeout(120)
async def test_a_kafka_that_takes_connections_and_says_nothing_is_away(tmp_path: Path, database: str) -> None:
    with closing(socket.socket()) as frozen:
        frozen.bind(("127.0.0.1", 0))
        frozen.listen(64)
        where = {"BERTH_KAFKA": f"127.0.0.1:{frozen.getsockname()[1]}", "BERTH_DATABASE_URL": database}
        ended = await asyncio.gather(
            *(asyncio.to_thread(berth, tmp_path, *words, **where) for words in (("verify",), ("recover",))),
            asyncio.to_thread(berth, tmp_path, "projections", "diff", **where),
        )
    for done in ended:
        assert done.returncode == AWAY_EXIT_CODE, done.stderr
        assert "Kafka can't be reached" in done.stderr and "Traceback" not in done.stderr


# Clients that are stopped


@pytest.mark.kafka
@pytest.mark.parametrize("group", [None, "stopped"], ids=["alone", "in a group"])
async def test_a_client_whose_fetch_has_just_failed_is_stopped_and_leaves_nothing_behind(
    fresh_kafka: EmbeddedKafka, caplog: pytest.LogCaptureFixture, group: str | None
) -> None:
    before = asyncio.all_tasks()
    consumer = AIOKafkaConsumer(
        bootstrap_servers=fresh_kafka.bootstrap, group_id=group, enable_auto_commit=False, retry_backoff_ms=2_000
    )
    await consumer.start()
    if group is None:
        consumer.assign([TopicPartition(TRIGGERS.name, 0)])
    else:
        consumer.subscribe([TRIGGERS.name])
    async with asyncio.timeout(WAIT_SECONDS):
        while not consumer.assignment():
            await consumer.getmany(timeout_ms=100)
        for partition in consumer.assignment():
            await consumer.position(partition)
    await asyncio.to_thread(fresh_kafka.kill)

    async def has_failed() -> bool:
        return "Failed fetch messages" in caplog.text

    await until(has_failed)
    await clients.stop(consumer)

    async def nothing_is_left() -> bool:
        return not asyncio.all_tasks() - before

    await until(nothing_is_left, timeout_seconds=20)


@pytest.mark.kafka
async def test_a_member_that_is_stopped_leaves_its_group(topics: EmbeddedKafka) -> None:
    consumer = AIOKafkaConsumer(
        TRIGGERS.name, bootstrap_servers=topics.bootstrap, group_id="left", session_timeout_ms=1_000 * int(WAIT_SECONDS)
    )
    await consumer.start()
    async with asyncio.timeout(WAIT_SECONDS):
        while len(consumer.assignment()) < PARTITIONS:
            await consumer.getmany(timeout_ms=100)
    admin = AIOKafkaAdminClient(bootstrap_servers=topics.bootstrap)
    await admin.start()
    try:
        await clients.stop(consumer)
        (answer,) = await admin.describe_consumer_groups(["left"])
        ((_, _, state, _, _, members, *_),) = answer.groups
        assert (state, members) == ("Empty", [])
    finally:
        await admin.close()


def test_a_service_that_is_cancelled_by_a_library_ends_with_the_code_of_an_error(tmp_path: Path) -> None:
    program = (
        "import asyncio; from api.cli.service import run_service\n"
        "async def work(_ending): await asyncio.create_task(cancelled())\n"
        "async def cancelled(): raise asyncio.CancelledError\n"
        "run_service(work)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 70, done.stderr
    assert "service_failed" in done.stdout


# Kafka goes away while a log is read

RECORDS, RECORD_BYTES = 40, 400_000
"""Far more than a reader fetches ahead."""


async def fill(bootstrap: str) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap)
    await producer.start()
    for number in range(RECORDS):
        for topic in (DECISIONS, CHANGELOG):
            await producer.send(topic.name, bytes(RECORD_BYTES), f"{number}".encode(), partition=0)
    await producer.stop()


class Reading:
    """Readers that stop after their first records until Kafka is gone, and then read on."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self.loop = asyncio.get_running_loop()
        self.began = 0
        self.is_gone = asyncio.Event()

    async def first_came(self) -> None:
        self.began += 1
        await self.is_gone.wait()

    async def all_of_a_history(self) -> None:
        first = True
        async for _records in history(self.bootstrap, DECISIONS.name, 0):
            if first:
                await self.first_came()
            first = False

    async def rows(self) -> None:
        first = True

        def load(_key: bytes, _value: bytes | None) -> None:
            nonlocal first
            if first:
                asyncio.run_coroutine_threadsafe(self.first_came(), self.loop).result()
            first = False

        async def read() -> None:
            async with clients.reading(self.bootstrap, "read_committed") as consumer:
                await load_rows(consumer, 0, load)

        await asyncio.to_thread(asyncio.run, read())

    async def decision_log(self) -> None:
        def read() -> None:
            with DecisionLog(self.bootstrap, [(DECISIONS, 0)]) as log:
                (records,) = log.sources()
                next(records)
                asyncio.run_coroutine_threadsafe(self.first_came(), self.loop).result()
                for _record in records:
                    pass

        await asyncio.to_thread(read)

    async def log_up_to_its_end(self) -> None:
        async with Log(self.bootstrap, PARTITIONS) as log:
            await log.seek(dict.fromkeys(log.wanted, 0))
            ends = await log.ends()
            while await log.take(1, 0.1, ends) is None:
                pass
            await self.first_came()
            while await log.remaining(ends):
                await log.take(100, 0.1, ends)


@pytest.mark.kafka
async def test_who_reads_a_log_is_told_that_kafka_went_away(
    fresh_kafka: EmbeddedKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "SILENT_SECONDS_MAX", 0.5)
    monkeypatch.setattr(clients, "ANSWER_SECONDS_MAX", 1.0)
    await fill(fresh_kafka.bootstrap)
    reading = Reading(fresh_kafka.bootstrap)
    readers: tuple[Callable[[], Awaitable[Any]], ...] = (
        reading.all_of_a_history,
        reading.rows,
        reading.decision_log,
        reading.log_up_to_its_end,
    )
    tasks = [asyncio.ensure_future(reader()) for reader in readers]

    async def all_began() -> bool:
        for task in tasks:
            if task.done():
                task.result()
        return reading.began == len(readers)

    await until(all_began)
    await asyncio.to_thread(fresh_kafka.kill)
    reading.is_gone.set()
    _, hang = await asyncio.wait(tasks, timeout=30)
    if hang:
        await asyncio.to_thread(fresh_kafka.start)  # or they would never end, and neither would this
        await asyncio.wait(tasks)
    told = [reader.__name__ for reader, task in zip(readers, tasks, strict=True) if task not in hang]
    assert told == [reader.__name__ for reader in readers]
    for task in tasks:
        assert isinstance(task.exception(), KafkaError), task


@pytest.mark.kafka
async def test_holes_in_a_log_are_not_taken_for_a_kafka_that_is_away(
    topics: EmbeddedKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "SILENT_SECONDS_MAX", -1.0)  # asks whenever nothing comes
    producer = AIOKafkaProducer(bootstrap_servers=topics.bootstrap, transactional_id="holes")
    await producer.start()
    for is_kept in (False, True, False, False):
        await producer.begin_transaction()
        for number in range(50):
            await producer.send(DECISIONS.name, b"x", f"{number}".encode(), partition=0)
        await (producer.commit_transaction() if is_kept else producer.abort_transaction())
    await producer.stop()

    async with asyncio.timeout(WAIT_SECONDS):
        found = [record async for records in history(topics.bootstrap, DECISIONS.name, 0) for record in records]
    assert len(found) == 50
