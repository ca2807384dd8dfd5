"""The topics on a real broker: made once, and every difference that matters is found before a worker starts."""

import asyncio
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaConnectionError, MessageSizeTooLargeError

from api.cli.embedded_kafka import EmbeddedKafka
from streams import CHANGELOG, DECISIONS, DISPATCHES, TOPICS, TRIGGERS, WORKERS, Topic
from streams.kafka.topics import READS, acl_commands, check, create, describe, wanted_configs
from streams.rules.limits import RECORD_BYTES_MAX
from tests.brokers import delete_topics, until
from tests.conftest import PARTITIONS

pytestmark = pytest.mark.kafka


@asynccontextmanager
async def admin_of(kafka: EmbeddedKafka) -> AsyncIterator[AIOKafkaAdminClient]:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    yield admin
    await admin.close()


async def change(kafka: EmbeddedKafka, topic: Topic, configs: dict[str, str]) -> None:
    async def changed() -> bool:
        found = await describe(kafka.bootstrap)
        return all(configs.items() <= one.configs.items() for one in found if one.topic is topic)

    async with admin_of(kafka) as admin:
        resource = ConfigResource(ConfigResourceType.TOPIC, topic.name, wanted_configs(topic) | configs)
        (answer,) = await admin.alter_configs([resource])
        assert answer.resources[0][0] == 0, answer
    await until(changed)


async def make_again(kafka: EmbeddedKafka, topic: Topic, partitions: int) -> None:
    async def exists() -> bool:
        return all(one.partitions == partitions for one in await describe(kafka.bootstrap) if one.topic is topic)

    async with admin_of(kafka) as admin:
        await delete_topics(admin, [topic.name])
        await admin.create_topics([NewTopic(topic.name, partitions, 1, topic_configs=wanted_configs(topic))])
    await until(exists)


async def test_create_makes_every_topic_as_the_table_says_and_nothing_the_second_time(topics: EmbeddedKafka) -> None:
    for found in await describe(topics.bootstrap):
        assert found.partitions == PARTITIONS
        assert {key: found.configs[key] for key in wanted_configs(found.topic)} == wanted_configs(found.topic)
    assert await create(topics.bootstrap, PARTITIONS) == []
    assert await check(topics.bootstrap, PARTITIONS) == []


async def test_two_creates_at_once_make_one_set(topics: EmbeddedKafka) -> None:
    async with admin_of(topics) as admin:
        await delete_topics(admin, [topic.name for topic in TOPICS])
    await asyncio.gather(*(create(topics.bootstrap, PARTITIONS) for _ in range(4)))
    assert await check(topics.bootstrap, PARTITIONS) == []


async def test_a_check_makes_no_topic(topics: EmbeddedKafka) -> None:
    async with admin_of(topics) as admin:
        await delete_topics(admin, [topic.name for topic in TOPICS])
        problems = await check(topics.bootstrap, PARTITIONS)
        assert set(await admin.list_topics()) & {topic.name for topic in TOPICS} == set()
    assert [problem.about for problem in problems] == [topic.name for topic in TOPICS]
    assert {problem.advice for problem in problems} == {"berth topics create"}


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)
async def test_another_number_of_partitions_is_found_on_each_topic(topics: EmbeddedKafka, topic: Topic) -> None:
    await make_again(topics, topic, PARTITIONS - 1)
    (problem,) = await check(topics.bootstrap, PARTITIONS)
    assert problem.about == topic.name
    assert f"{PARTITIONS - 1} partitions" in problem.happened
    assert f"BERTH_PARTITIONS={PARTITIONS - 1}" in problem.advice


@pytest.mark.parametrize(
    ("topic", "configs", "at_fault"),
    [
        (DECISIONS, {"retention.ms": str(7 * 86_400_000)}, "retention.ms"),
        (DECISIONS, {"retention.bytes": "1000000000"}, "retention.bytes"),
        (DECISIONS, {"cleanup.policy": "compact"}, "cleanup.policy"),
        (CHANGELOG, {"cleanup.policy": "delete"}, "cleanup.policy"),
        (CHANGELOG, {"cleanup.policy": "compact,delete"}, "cleanup.policy"),
        (WORKERS, {"cleanup.policy": "delete"}, "cleanup.policy"),
        (TRIGGERS, {"cleanup.policy": "compact"}, "cleanup.policy"),
        (TRIGGERS, {"retention.ms": "3600000"}, "retention.ms"),
        (TRIGGERS, {"retention.bytes": "1000000"}, "retention.bytes"),
        (TRIGGERS, {"message.timestamp.type": "LogAppendTime"}, "message.timestamp.type"),
        (DISPATCHES, {"max.message.bytes": "500000"}, "max.message.bytes"),
    ],
    ids=lambda value: value.name if isinstance(value, Topic) else str(value),
)
async def test_a_setting_that_loses_records_is_found(
    topics: EmbeddedKafka, topic: Topic, configs: dict[str, str], at_fault: str
) -> None:
    await change(topics, topic, configs)
    (problem,) = await check(topics.bootstrap, PARTITIONS)
    assert problem.about == topic.name
    assert problem.happened.startswith(at_fault)
    assert f"--entity-name {topic.name} --add-config {at_fault}={wanted_configs(topic)[at_fault]}" in problem.advice


@pytest.mark.parametrize(
    ("topic", "configs"),
    [
        (TRIGGERS, {"retention.ms": str(30 * 86_400_000)}),
        (TRIGGERS, {"retention.ms": "-1"}),
        (DECISIONS, {"max.message.bytes": "5000000"}),
        (CHANGELOG, {"min.cleanable.dirty.ratio": "0.1"}),
    ],
    ids=str,
)
async def test_a_setting_that_keeps_more_is_no_problem(
    topics: EmbeddedKafka, topic: Topic, configs: dict[str, str]
) -> None:
    await change(topics, topic, configs)
    assert await check(topics.bootstrap, PARTITIONS) == []


async def test_the_largest_record_fits_and_a_much_larger_one_does_not(topics: EmbeddedKafka) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=topics.bootstrap, max_request_size=4 * RECORD_BYTES_MAX)
    await producer.start()
    try:
        await producer.send_and_wait(DISPATCHES.name, bytes(RECORD_BYTES_MAX), key=b"agent")
        with pytest.raises(MessageSizeTooLargeError):
            await producer.send_and_wait(DISPATCHES.name, bytes(2 * RECORD_BYTES_MAX), key=b"agent")
    finally:
        await producer.stop()


async def test_a_broker_without_transactions_is_found(tmp_path: Path) -> None:
    alone = {"transaction.state.log.replication.factor": "3"}  # the usual mistake on a single broker
    with EmbeddedKafka(tmp_path / "kafka", port=None, overrides=alone) as kafka:
        await create(kafka.bootstrap, PARTITIONS)
        (problem,) = await check(kafka.bootstrap, PARTITIONS)
    assert problem.about == "broker"
    assert "transactions" in problem.happened
    assert "transaction.state.log.replication.factor" in problem.advice


async def test_a_kafka_that_is_not_there_is_an_error_and_no_finding() -> None:
    with pytest.raises(KafkaConnectionError):
        await check("127.0.0.1:1", PARTITIONS)
    with pytest.raises(KafkaConnectionError):
        await create("127.0.0.1:1", PARTITIONS)


def test_access_rules_let_each_program_write_what_the_table_says_and_nothing_else() -> None:
    granted: dict[str, set[tuple[str, str]]] = {}
    for line in acl_commands("127.0.0.1:9092"):
        words = shlex.split(line)
        if "--topic" in words and "prefixed" not in words:
            user, topic = words[words.index("--allow-principal") + 1], words[words.index("--topic") + 1]
            for operation in ("Write", "Read"):
                if operation in words:
                    granted.setdefault(operation, set()).add((user.removeprefix("User:berth-"), topic))
    assert granted["Write"] == {(writer, topic.name) for topic in TOPICS for writer in topic.writers}
    assert granted["Read"] == {(principal, topic.name) for principal, read in READS.items() for topic in read}
