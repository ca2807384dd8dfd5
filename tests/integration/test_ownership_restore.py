"""A partition is restored from whatever its changelog looks like, or refused with what to do."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, cast

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import OffsetOutOfRangeError, PolicyViolationError
from aiokafka.protocol.admin import DeleteGroupsRequest

from api.cli.embedded_kafka import EmbeddedKafka
from streams import APPLICATION_ID, CHANGELOG, DECISIONS, INPUT_TOPICS, SITE_DECISIONS, TRIGGERS, codec
from streams.kafka import topics as kafka_topics
from streams.kafka.intake import Fetched, Intake
from streams.kafka.restore import CannotTakeOver, MakePartition, restore
from streams.kafka.worker import AWAY_LOGGED_SECONDS
from streams.partition import Partition
from streams.rules.limits import Defaults
from streams.settings import Settings
from tests.brokers import WAIT_SECONDS, delete_topics, fence, until
from tests.integration.counting import CountingPartition
from tests.integration.lost_rows import forget_records, stored_rows, write_rows
from tests.integration.site_work import WORKER, names, playing
from tests.integration.test_up import berth
from tests.integration.workers import (
    COUNTING,
    PARTITIONS,
    WorkerProcess,
    decisions,
    send,
    unaccounted,
    wait_for_decisions,
    workers,
)

pytestmark = pytest.mark.kafka

COUNT_KEY = json.dumps(["count", "k"]).encode()
POSITION_KEY = codec.write_key(codec.PARTITION_KEY)
NOWHERE = {topic.name: 0 for topic in INPUT_TOPICS}
EXIT_SETUP = 78


def position_row(positions: Mapping[str, int], at_us: int = 0) -> bytes:
    return codec.write_partition(codec.PartitionRow(at_us, dict(positions), 0))


async def write(
    bootstrap: str, topic: str, *transactions: tuple[str, Mapping[bytes, bytes | None]], partition: int = 0
) -> None:
    """Write to a partition as its owner would: each transaction is ("commit" or "abort", rows), and over at the end."""
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=f"{APPLICATION_ID}-{partition}")
    await producer.start()
    try:
        for how, rows in transactions:
            await producer.begin_transaction()
            for key, value in rows.items():
                await producer.send_and_wait(topic, value, key, partition)
            await (producer.commit_transaction() if how == "commit" else producer.abort_transaction())
    finally:
        await producer.stop()
    await fence(bootstrap, partition)  # Kafka answers a commit before it is in the partition


async def delete_until(bootstrap: str, topic: str, offset: int, partition: int = 0) -> None:
    """Delete the head of a partition, also of one that is only compacted, for which Kafka must be told so meanwhile."""
    (described,) = [found for found in await kafka_topics.describe(bootstrap) if found.topic.name == topic]
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()

    async def deleted() -> bool:
        try:
            await admin.delete_records({TopicPartition(topic, partition): RecordsToDelete(before_offset=offset)})
        except PolicyViolationError:  # the broker hasn't heard of the new policy yet
            return False
        return True

    try:
        for policy in ("compact,delete", described.configs["cleanup.policy"]):
            configs = dict(kafka_topics.wanted_configs(described.topic)) | {"cleanup.policy": policy}
            await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, configs=configs)])
            if "delete" in policy:
                await until(deleted)
    finally:
        await admin.close()


async def restored_partition(
    kafka: EmbeddedKafka, start_from: Literal["earliest", "latest"] = "earliest"
) -> CountingPartition:
    settings = Settings(kafka=kafka.bootstrap, start_from=start_from)
    async with asyncio.timeout(WAIT_SECONDS):
        restored = await restore(0, kafka.bootstrap, cast("MakePartition", CountingPartition), settings)
    return cast("CountingPartition", restored.partition)


async def refused(
    kafka: EmbeddedKafka,
    *words: str,
    event: str = "worker_stops",
    arguments: Sequence[str] = COUNTING,
    **environment: str,
) -> WorkerProcess:
    """A worker that stops by itself, saying all of these words, and has decided nothing."""
    before = [await decisions(kafka.bootstrap, number) for number in range(2)]
    async with workers(kafka.bootstrap, 1, arguments, **environment) as (worker,):
        assert await worker.ended() == EXIT_SETUP, worker.account()
        told = str(await worker.logged(event))
        assert all(word in told for word in words), told
        assert [await decisions(kafka.bootstrap, number) for number in range(2)] == before
        return worker


ROWS: dict[bytes, bytes | None] = {COUNT_KEY: b"5", POSITION_KEY: position_row(NOWHERE)}


@pytest.mark.parametrize(
    ("transactions", "deleted_until", "count"),
    [
        ([], 0, None),
        ([("commit", ROWS)], 0, b"5"),
        ([("commit", ROWS), ("abort", {COUNT_KEY: b"99"})], 0, b"5"),
        ([("abort", {COUNT_KEY: b"99"})], 0, None),
        ([("commit", {COUNT_KEY: b"3"}), ("commit", ROWS)], 2, b"5"),
        ([("commit", ROWS)], 3, None),
        ([("commit", ROWS), ("commit", {COUNT_KEY: None, POSITION_KEY: None})], 0, None),
        ([("commit", {COUNT_KEY: None, b'["timer","x"]': None})], 0, None),
        (
            [("commit", ROWS), ("commit", {COUNT_KEY: b"7"}), ("abort", {COUNT_KEY: b"99"}), ("abort", {b"[]": b""})],
            0,
            b"7",
        ),
    ],
    ids=[
        "empty",
        "marker last",
        "aborted last",
        "only aborted",
        "head deleted",
        "all deleted",
        "tombstones last",
        "only tombstones",
        "several aborted last",
    ],
)
async def test_restore_ends(
    topics: EmbeddedKafka,
    transactions: Sequence[tuple[str, Mapping[bytes, bytes | None]]],
    deleted_until: int,
    count: bytes | None,
) -> None:
    """Case 104: also where the last offset is a marker."""
    await write(topics.bootstrap, CHANGELOG.name, *transactions)
    if deleted_until:
        await delete_until(topics.bootstrap, CHANGELOG.name, deleted_until)
    restored = await restored_partition(topics)
    assert restored.rows.get(COUNT_KEY) == count
    assert restored.positions == NOWHERE


@pytest.mark.parametrize("is_head_deleted", [False, True])
async def test_rows_lost_while_decisions_exist_are_refused(topics: EmbeddedKafka, is_head_deleted: bool) -> None:
    await write(topics.bootstrap, DECISIONS.name, ("commit", {b"k": b"{}"}))
    if is_head_deleted:
        await delete_until(topics.bootstrap, DECISIONS.name, 2)
    with pytest.raises(CannotTakeOver, match=f"Partition 0 .*{CHANGELOG.name}.*berth recover"):
        await restored_partition(topics)


async def test_aborted_decisions_are_no_decisions(topics: EmbeddedKafka) -> None:
    """What a worker leaves that dies in its very first transaction."""
    await write(topics.bootstrap, DECISIONS.name, ("abort", {b"k": b"{}"}))
    assert (await restored_partition(topics)).is_empty


async def decided(bootstrap: str) -> None:
    """A worker has decided: an agent's log and a site's on partition 0, and nothing else there."""
    async with playing(bootstrap) as play, workers(bootstrap, 1, WORKER) as (worker,):
        await worker.ready()
        await play.unlimited(next(names("agent", 0)))
        await play.configured(next(names("site", 0)), 2)
        assert await worker.stop() == 0, worker.account()


async def empty(bootstrap: str, topic: str, how: str) -> None:
    """Lose what the topic holds: it was deleted and made anew, or its records were."""
    if how == "emptied":
        await forget_records(bootstrap, topic)
        return
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    await delete_topics(admin, [topic])
    await admin.close()
    assert await kafka_topics.create(bootstrap, PARTITIONS) == [topic]


@pytest.mark.parametrize("how", ["made anew", "emptied"])
@pytest.mark.parametrize("topic", [DECISIONS.name, SITE_DECISIONS.name])
async def test_decisions_lost_while_rows_know_of_them_are_refused(topics: EmbeddedKafka, topic: str, how: str) -> None:
    """Of agents and of sites: what is decided on top of nothing could never be proved, nor its rows be made anew."""
    await decided(topics.bootstrap)
    before = await stored_rows(topics.bootstrap)
    await empty(topics.bootstrap, topic, how)
    words = ("Partition 0 has rows that know of", f"in {topic},", "holds none", "Nothing was written", "accept-cut-log")
    await refused(topics, *words, arguments=WORKER)
    assert await stored_rows(topics.bootstrap) == before


@pytest.mark.parametrize("topic", [DECISIONS.name, SITE_DECISIONS.name])
async def test_decisions_that_are_all_there_is_are_gone_back_to(
    topics: EmbeddedKafka, tmp_path: Path, topic: str
) -> None:
    """What the refusal advises, to its end."""
    await decided(topics.bootstrap)
    await empty(topics.bootstrap, topic, "made anew")
    done = await asyncio.to_thread(
        berth, tmp_path, "recover", "--yes", "--accept-cut-log", BERTH_KAFKA=topics.bootstrap
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    async with workers(topics.bootstrap, 1, WORKER) as (worker,):
        await worker.ready()


UNREADABLE: dict[str, tuple[bytes, bytes]] = {
    "key": (b"not a key", b"{}"),
    "key of another form": (b'{"trigger":"A"}', b"{}"),
    "long key": (b'["trigger","' + b"A" * 900, b"{}"),
    "unknown kind": (b'["mystery","A"]', b"{}"),
    "value": (b'["trigger","A","t"]', b'{"garbage":'),
    "value of another form": (b'["trigger","A","t"]', b'{"garbage":1}'),
    "no text": (b'["claim","S","A","t"]', b"\xff\xfe"),
    "texts": (b'["text","A","t"]', b'{"message":'),
}


@pytest.mark.parametrize("row", UNREADABLE.values(), ids=UNREADABLE)
async def test_a_row_that_cannot_be_read_is_refused_and_named(topics: EmbeddedKafka, row: tuple[bytes, bytes]) -> None:
    key, value = row
    await write(topics.bootstrap, CHANGELOG.name, ("commit", {POSITION_KEY: position_row(NOWHERE), key: value}))
    with pytest.raises(CannotTakeOver) as told:
        await restored_by_rules(topics)
    words = (f"Partition 0 of {CHANGELOG.name}", key[:200].decode(), "Nothing was written", "berth recover")
    assert all(word in str(told.value) for word in words), told.value
    assert len(str(told.value)) < 1_000
    await write(topics.bootstrap, CHANGELOG.name, ("commit", {key: None}))
    await restored_by_rules(topics)  # what was written over counts no more


async def test_a_worker_that_cannot_read_a_row_ends_and_recover_mends_it(topics: EmbeddedKafka, tmp_path: Path) -> None:
    bootstrap = topics.bootstrap
    await decided(bootstrap)
    before = await stored_rows(bootstrap)
    agent_key = next(key for key in before[0] if key.startswith(b'["agent",'))
    await write_rows(bootstrap, 0, {agent_key: b'{"garbage":', b"not a key": b"1"})
    await refused(topics, f"Partition 0 of {CHANGELOG.name}", "berth recover", arguments=WORKER)
    done = await asyncio.to_thread(berth, tmp_path, "recover", "--yes", BERTH_KAFKA=bootstrap)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert await stored_rows(bootstrap) == before
    async with workers(bootstrap, 1, WORKER) as (worker,):
        await worker.ready()


async def restored_by_rules(kafka: EmbeddedKafka) -> None:
    """The real partition instead of one that counts."""
    make_partition = partial(Partition, partitions=PARTITIONS, defaults=Defaults())
    async with asyncio.timeout(WAIT_SECONDS):
        await restore(0, kafka.bootstrap, make_partition, Settings(kafka=kafka.bootstrap))


async def test_position_beyond_the_end_is_refused(topics: EmbeddedKafka) -> None:
    await send(topics.bootstrap, "count")
    moved = position_row(NOWHERE | {TRIGGERS.name: 2})
    await write(topics.bootstrap, CHANGELOG.name, ("commit", {POSITION_KEY: moved}))
    await refused(topics, f"Partition 0 has read {TRIGGERS.name} up to offset 2", "holds offsets 0 to 1")


async def test_position_before_the_beginning_is_refused(topics: EmbeddedKafka) -> None:
    """Case 95: records that were deleted before they were handled stop the worker with an error."""
    await send(topics.bootstrap, "count", "count", "count")
    await delete_until(topics.bootstrap, TRIGGERS.name, 2)
    await write(topics.bootstrap, CHANGELOG.name, ("commit", ROWS))
    with pytest.raises(CannotTakeOver, match=f"{TRIGGERS.name} up to offset 0.* holds offsets 2 to 3.*deleted"):
        await restored_partition(topics)


async def test_records_deleted_under_a_reading_worker_stop_it(topics: EmbeddedKafka) -> None:
    """An intake that wants to read on where the topic no longer has records."""
    await send(topics.bootstrap, "count", "count", "count")
    await delete_until(topics.bootstrap, TRIGGERS.name, 3)

    async def deliver(fetched: Fetched) -> None:
        raise AssertionError(fetched)

    intake = Intake(0, topics.bootstrap, NOWHERE, NOWHERE, deliver)
    with pytest.raises(OffsetOutOfRangeError, match=TRIGGERS.name):
        async with asyncio.timeout(WAIT_SECONDS):
            await intake.read()


@pytest.mark.parametrize("to", [None, 3, 8], ids=["deleted", "back", "to the end"])
async def test_the_offsets_of_the_group_mean_nothing(topics: EmbeddedKafka, to: int | None) -> None:
    await send(topics.bootstrap, *["count"] * 5)
    async with workers(topics.bootstrap) as (worker,):
        await worker.ready()
        await wait_for_decisions(topics.bootstrap, 0, lambda found: len(found) == 5)
        assert await worker.stop() == 0
    await send(topics.bootstrap, *["count"] * 3)
    if to is None:
        admin = AIOKafkaAdminClient(bootstrap_servers=topics.bootstrap)
        await admin.start()
        (answer,) = [await admin._send_request(DeleteGroupsRequest([APPLICATION_ID]))]
        assert [code for _group, code in answer.results] == [0]
        await admin.close()
    else:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=topics.bootstrap, group_id=APPLICATION_ID, enable_auto_commit=False
        )
        await consumer.start()
        consumer.assign([TopicPartition(TRIGGERS.name, 0)])
        await consumer.commit({TopicPartition(TRIGGERS.name, 0): to})
        await consumer.stop()
    async with workers(topics.bootstrap) as (worker,):
        await worker.ready()
        found = await wait_for_decisions(topics.bootstrap, 0, lambda found: len(found) >= 8)
    assert [value["count"] for value in found] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert await unaccounted(topics.bootstrap) == {}


async def test_from_latest_counts_once_and_is_remembered(topics: EmbeddedKafka) -> None:
    await send(topics.bootstrap, "count", "count")
    async with workers(topics.bootstrap, BERTH_START_FROM="latest") as (worker,):
        await worker.ready()
        await worker.kill()  # it has decided nothing yet, and must not start at the end a second time
    await send(topics.bootstrap, "count", "count")
    async with workers(topics.bootstrap, BERTH_START_FROM="latest") as (worker,):
        await worker.ready()
        found = await wait_for_decisions(topics.bootstrap, 0, lambda found: len(found) >= 2)
    assert [value["offset"] for value in found] == [2, 3]


async def test_from_latest_counts_only_when_nothing_is_stored(topics: EmbeddedKafka) -> None:
    await send(topics.bootstrap, "count")
    assert (await restored_partition(topics, "latest")).positions[TRIGGERS.name] == 1
    await write(topics.bootstrap, CHANGELOG.name, ("commit", {COUNT_KEY: b"5"}))
    assert (await restored_partition(topics, "latest")).positions[TRIGGERS.name] == 0


async def test_a_missing_topic_is_refused_before_any_work(topics: EmbeddedKafka) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=topics.bootstrap)
    await admin.start()
    await delete_topics(admin, [TRIGGERS.name])
    await admin.close()
    worker = await refused(topics, TRIGGERS.name, event="kafka_does_not_fit")
    assert not worker.count("assigned")


async def test_another_partition_count_is_refused_before_any_work(topics: EmbeddedKafka) -> None:
    """Case 100."""
    worker = await refused(topics, event="kafka_does_not_fit", BERTH_PARTITIONS=str(PARTITIONS - 1))
    assert not worker.count("assigned")


async def test_a_session_that_kafka_does_not_allow_is_refused(topics: EmbeddedKafka) -> None:
    """An error of the group's coordination, which must come to the surface although nothing is read through it."""
    await refused(topics, "BERTH_SESSION_TIMEOUT_SECONDS", BERTH_SESSION_TIMEOUT_SECONDS="1")


async def test_a_port_that_is_taken_is_refused(topics: EmbeddedKafka) -> None:
    taken = topics.bootstrap.rpartition(":")[2]
    await refused(topics, "BERTH_WORKER_PORT", event="port_not_free", BERTH_WORKER_PORT=taken)


@pytest.mark.timeout(240)
async def test_kafka_away_is_told_seldom_and_that_it_answers_again(fresh_kafka: EmbeddedKafka) -> None:
    async with workers(fresh_kafka.bootstrap) as (worker,):
        await worker.ready()
        fresh_kafka.kill()
        first = await worker.logged("kafka_does_not_answer")
        second = await worker.logged("kafka_does_not_answer", 2)
        assert second["seconds"] - first["seconds"] > AWAY_LOGGED_SECONDS - 1
        fresh_kafka.start()
        again = await worker.logged("kafka_answers_again")
        assert again["away_seconds"] >= second["seconds"]
        await worker.ready(timeout_seconds=60)
        assert worker.count("kafka_answers_again") == 1
        fresh_kafka.kill()  # another outage is told at once, not 10 s after the last word of this one
        third = await worker.logged("kafka_does_not_answer", worker.count("kafka_does_not_answer") + 1)
        assert third["seconds"] < AWAY_LOGGED_SECONDS
        fresh_kafka.start()
        await worker.logged("kafka_answers_again", 2)


@pytest.mark.timeout(240)
async def test_kafka_away_just_when_a_worker_asks_for_its_topics(fresh_kafka: EmbeddedKafka) -> None:
    """Else it would lead a group over topics that it has never heard of, and give nothing to anybody for minutes."""
    async with workers(fresh_kafka.bootstrap) as (first,):
        await first.ready()  # so that Kafka has the group: else it says that it isn't known yet, and is asked again
        assert await first.stop() == 0
    async with workers(fresh_kafka.bootstrap, arguments=("-m", "tests.integration.late_worker")) as (worker,):
        await worker.logged("subscribes")
        fresh_kafka.kill()
        await worker.logged("subscribed")
        fresh_kafka.start()
        await worker.ready()


async def test_kafka_away_at_the_start() -> None:
    async with workers("127.0.0.1:9") as (worker,):
        assert await worker.ended() == 69, worker.account()
        assert "BERTH_KAFKA" in str(await worker.logged("kafka_not_reached"))
