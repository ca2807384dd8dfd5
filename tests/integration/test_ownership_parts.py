"""The parts of an ownership, each against a real Kafka: commits of any size, kept or fresh after which generation."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import KafkaError, ProducerFenced

from api.cli.embedded_kafka import EmbeddedKafka
from streams import CHANGELOG, DECISIONS, DISPATCHES, INPUT_TOPICS, SIGNALS, STATUSES, TRIGGERS
from streams.codec import Output, Record
from streams.kafka.commit import BATCH_BYTES_MAX, RecordTooLarge, Writer
from streams.kafka.intake import FETCH_RECORDS_MAX, WAITING_RECORDS_MAX, Fetched, InputOutOfOrder, Intake
from streams.kafka.membership import AssignmentsDiffer, Membership
from streams.kafka.ownership import SLICE_RECORDS, Surroundings
from streams.kafka.restore import MakePartition
from streams.kafka.worker import StandsStill, Worker
from streams.partition import Changes
from streams.rules.limits import RECORD_BYTES_MAX
from streams.settings import Settings
from tests.brokers import until
from tests.integration.counting import CountingPartition
from tests.integration.workers import Log, send

ALL = [topic.name for topic in INPUT_TOPICS]
NOWHERE = dict.fromkeys(ALL, 0)


# -- commits


@asynccontextmanager
async def writer(kafka: EmbeddedKafka, number: int = 0) -> AsyncIterator[Writer]:
    writing = Writer(number, kafka.bootstrap)
    await writing.fence()
    try:
        yield writing
    finally:
        await writing.close()


def numbered(topic: str, count: int, size: int, partition: int | None = None) -> list[Output]:
    return [Output(topic, b"k", b"%08d" % index + b"x" * (size - 8), (), partition) for index in range(count)]


@pytest.mark.kafka
async def test_commits_of_many_batches_are_whole_and_in_order(topics: EmbeddedKafka) -> None:
    decisions, signals = numbered(DECISIONS.name, 5_000, 600), numbered(SIGNALS.name, 300, 3_000, partition=5)
    dispatches = [Output(DISPATCHES.name, b"k", b"v", (("a", b"1"), ("a", b"2")))]
    rows: dict[bytes, bytes | None] = {b"row %d" % index: b"y" * 500 for index in range(3_000)} | {b"gone": None}
    assert 4 * BATCH_BYTES_MAX < 600 * 5_000
    async with writer(topics) as writing:
        for _ in range(3):
            await writing.commit(Changes([*decisions, *signals, *dispatches], dict(rows)), 1_700_000_000_000_000)
    log = await Log.read(topics.bootstrap, DECISIONS.name, SIGNALS.name, DISPATCHES.name, CHANGELOG.name)
    assert [record.value for record in log.records[TopicPartition(DECISIONS.name, 0)]] == [
        output.value for output in decisions * 3
    ]
    assert [record.value for record in log.records[TopicPartition(SIGNALS.name, 5)]] == [
        output.value for output in signals * 3
    ]
    assert [(record.key, record.value) for record in log.records[TopicPartition(CHANGELOG.name, 0)]] == [
        *rows.items()
    ] * 3
    dispatched = log.records[TopicPartition(DISPATCHES.name, 0)]
    assert [record.headers for record in dispatched] == [(("a", b"1"), ("a", b"2"))] * 3
    assert {record.timestamp for record in dispatched} == {1_700_000_000_000}
    assert set(log.records) == {
        TopicPartition(topic, number)
        for topic, number in ((DECISIONS.name, 0), (SIGNALS.name, 5), (DISPATCHES.name, 0), (CHANGELOG.name, 0))
    }


@pytest.mark.kafka
async def test_the_largest_record_fits_among_others(topics: EmbeddedKafka) -> None:
    large = [*numbered(DECISIONS.name, 1, 100), *numbered(DECISIONS.name, 2, RECORD_BYTES_MAX)]
    async with writer(topics) as writing:
        await writing.commit(Changes([*large, *numbered(DECISIONS.name, 1, 100)], {}), 0)
    log = await Log.read(topics.bootstrap, DECISIONS.name)
    assert [len(record.value) for record in log.all(0)] == [100, RECORD_BYTES_MAX, RECORD_BYTES_MAX, 100]


@pytest.mark.kafka
async def test_nothing_of_a_commit_with_a_record_too_large_is_visible(topics: EmbeddedKafka) -> None:
    outputs = [*numbered(DECISIONS.name, 1, 100), *numbered(DISPATCHES.name, 1, 2 * RECORD_BYTES_MAX)]
    async with writer(topics) as writing:
        with pytest.raises(RecordTooLarge, match=DISPATCHES.name):
            await writing.commit(Changes(outputs, {b"row": b"1"}), 0)
        await writing.commit(Changes([], {b"row": b"2"}), 0)
    log = await Log.read(topics.bootstrap, DECISIONS.name, CHANGELOG.name)
    assert [record.value for record in log.all(0)] == [b"2"]


@pytest.mark.kafka
async def test_a_fenced_writer_can_write_nothing(topics: EmbeddedKafka) -> None:
    async with writer(topics) as first:
        await first.commit(Changes([], {b"row": b"1"}), 0)
        async with writer(topics) as second:
            with pytest.raises(ProducerFenced):
                await first.commit(Changes([], {b"row": b"old"}), 0)
            with pytest.raises((KafkaError, AssertionError)):
                await first.commit(Changes([], {b"row": b"old"}), 0)
            await second.commit(Changes([], {b"row": b"2"}), 0)
    assert [record.value for record in (await Log.read(topics.bootstrap, CHANGELOG.name)).all(0)] == [b"1", b"2"]


# -- intake


def fetched(intake: Intake, start: int, end: int, topic: str = TRIGGERS.name) -> Fetched:
    return Fetched(intake, topic, start, end, [Record(topic, 0, offset, b"k", b"v") for offset in range(start, end)], 0)


async def nowhere(_fetched: Fetched) -> None: ...


def intake_at_zero(ends: dict[str, int] | None = None) -> Intake:
    return Intake(0, "", NOWHERE, ends or NOWHERE, nowhere)


@pytest.mark.parametrize("second", [(1, 3), (4, 5), (0, 2)], ids=["again", "with a gap", "twice"])
async def test_records_that_do_not_follow_are_refused(second: tuple[int, int]) -> None:
    intake = intake_at_zero()
    intake.accept(fetched(intake, 0, 2))
    with pytest.raises(InputOutOfOrder, match=TRIGGERS.name):
        intake.accept(fetched(intake, *second))


async def test_caught_up_is_counted_by_offset_over_markers() -> None:
    intake = intake_at_zero(NOWHERE | {TRIGGERS.name: 3})
    intake.accept(fetched(intake, 0, 2))
    assert not intake.has_caught_up()
    intake.accept(Fetched(intake, TRIGGERS.name, 2, 3, [], 0))
    assert not intake.has_caught_up()
    assert len(intake.take(1, 1_000)) == 1
    assert not intake.has_caught_up()
    assert len(intake.take(1, 1_000)) == 1
    assert intake.has_caught_up()
    assert intake.position(TRIGGERS.name) == 3


async def test_topics_share_what_is_taken_and_keep_their_order() -> None:
    intake = intake_at_zero()
    intake.accept(fetched(intake, 0, 1_000))
    intake.accept(fetched(intake, 0, 10, STATUSES.name))
    taken = intake.take(100, 10**6)
    assert [record.offset for record in taken if record.topic == STATUSES.name] == list(range(10))
    assert [record.offset for record in taken if record.topic == TRIGGERS.name] == list(range(90))


@pytest.mark.parametrize("busy", ALL)
async def test_what_waits_behind_a_long_topic_is_taken_at_once(busy: str) -> None:
    """A release behind a thousand triggers frees a folder now, a trigger behind a thousand signals is asked for now."""
    intake = intake_at_zero()
    intake.accept(fetched(intake, 0, 1_000, busy))
    for topic in ALL:
        if topic != busy:
            intake.accept(fetched(intake, 0, 3, topic))
    taken = intake.take(SLICE_RECORDS, 10**6)
    assert Counter(record.topic for record in taken if record.topic != busy) == {
        topic: 3 for topic in ALL if topic != busy
    }
    assert len(taken) == SLICE_RECORDS


@pytest.mark.kafka
@pytest.mark.parametrize(("busy", "single"), [(TRIGGERS.name, SIGNALS.name), (SIGNALS.name, TRIGGERS.name)])
async def test_one_record_is_read_before_the_backlog_of_another_topic(
    topics: EmbeddedKafka, busy: str, single: str
) -> None:
    count = 8 * FETCH_RECORDS_MAX
    await send(topics.bootstrap, *["count"] * count, topic=busy)
    await send(topics.bootstrap, "count", topic=single)

    async def deliver(some: Fetched) -> None:
        intake.accept(some)

    intake = Intake(0, topics.bootstrap, NOWHERE, NOWHERE, deliver)
    reader = asyncio.create_task(intake.read())
    before: list[Record] = []

    async def has_come() -> bool:
        taken = intake.take(SLICE_RECORDS, 10**6)
        before.extend(record for record in taken if record.topic == busy)
        return any(record.topic == single for record in taken)

    await until(has_come)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    assert len(before) <= count // 2


@pytest.mark.kafka
async def test_a_topic_without_room_holds_up_no_other(topics: EmbeddedKafka) -> None:
    got: list[Record] = []

    async def deliver(some: Fetched) -> None:
        got.extend(some.records)
        intake.accept(some)

    intake = Intake(0, topics.bootstrap, NOWHERE, NOWHERE, deliver)
    reader = asyncio.create_task(intake.read())
    await send(topics.bootstrap, *["count"] * (WAITING_RECORDS_MAX + 5_000))

    async def is_full() -> bool:
        return intake.waiting_count >= WAITING_RECORDS_MAX

    await until(is_full)
    await send(topics.bootstrap, "count", topic=STATUSES.name)

    async def has_status() -> bool:
        return got[-1].topic == STATUSES.name

    await until(has_status)
    assert intake.waiting_count < WAITING_RECORDS_MAX + 3_000, "reading stopped near the bound"
    taken: list[Record] = []

    async def has_all() -> bool:
        taken.extend(intake.take(1_000, 10**6))
        return len(taken) == WAITING_RECORDS_MAX + 5_001

    await until(has_all)
    assert [record.offset for record in taken if record.topic == TRIGGERS.name] == list(
        range(WAITING_RECORDS_MAX + 5_000)
    )
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)


# -- membership


async def no_rejoin() -> None:
    raise AssertionError("nothing broke")


def membership(bootstrap: str) -> tuple[Membership, Surroundings]:
    surroundings = Surroundings(
        Settings(kafka=bootstrap), bootstrap, cast("MakePartition", CountingPartition), nowhere, asyncio.Event()
    )
    return Membership(surroundings, no_rejoin), surroundings


async def test_different_partitions_of_different_topics_stop_the_worker() -> None:
    members, surroundings = membership("127.0.0.1:9")
    await members.assigned({TRIGGERS.name: frozenset({0, 1}), STATUSES.name: frozenset({0, 2})}, 1)
    assert isinstance(members.halted.result(), AssignmentsDiffer)
    assert "berth topics check" in str(members.halted.result())
    assert not surroundings.stable.is_set()
    assert not members.owned


@pytest.mark.kafka
async def test_kept_only_by_who_was_there_in_the_generation_before(topics: EmbeddedKafka) -> None:
    def numbers(*given: int) -> dict[str, frozenset[int]]:
        return dict.fromkeys(ALL, frozenset(given))

    members, surroundings = membership(topics.bootstrap)
    await members.assigned(numbers(0, 1), 1)
    first = dict(members.owned)
    assert surroundings.stable.is_set()
    await members.revoked()
    assert not surroundings.stable.is_set()
    await members.assigned(numbers(0, 2), 2)
    assert members.owned[0] is first[0]
    assert first[1].is_released
    assert set(members.owned) == {0, 2}
    await members.revoked()
    second = dict(members.owned)
    await members.assigned(numbers(0, 2), 4)
    assert not set(second.values()) & set(members.owned.values()), "a generation was missed: nothing is kept"
    assert all(ownership.is_released for ownership in second.values())
    await members.leave()
    assert not members.halted.done()


# -- worker


async def test_a_partition_that_reads_nothing_though_there_is_something_stops_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("streams.kafka.worker.STANDSTILL_SECONDS_MAX", 0.0)
    worker = Worker(Settings(kafka="127.0.0.1:9"), "127.0.0.1:9", cast("MakePartition", CountingPartition))
    intake = intake_at_zero()
    worker.membership.has_assignment = True
    worker._lags = {0: 5}
    worker._check_standstill({0: intake})
    intake.accept(fetched(intake, 0, 3))
    intake.take(3, 1_000)
    worker._check_standstill({0: intake})
    worker._lags = {0: 0}
    worker._check_standstill({0: intake})
    worker._lags = {0: 2}
    worker._check_standstill({0: intake})
    with pytest.raises(StandsStill, match="Partition 0 has 2 records to read"):
        worker._check_standstill({0: intake})
