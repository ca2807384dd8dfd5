"""The topics in Kafka: made, compared and described from the topic table in ``streams``.

Nothing here is repaired silently. ``create`` makes what is missing and touches nothing that exists; ``check`` says
what differs, as values, with what to do, and the worker asks it before any work: a topic with another number of
partitions would split the state of an agent over two owners, a compacted log of decisions would forget history, and a
broker without transactions can't hold the promise that nothing is dispatched twice.

A difference that only keeps more than the table asks for (a longer retention, a larger record) is no problem.

Kafka that can't be reached at all is no finding about topics: these functions then raise aiokafka's
``KafkaConnectionError``.
"""

import asyncio
import shlex
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import (
    KafkaConnectionError,
    KafkaError,
    TopicAlreadyExistsError,
    for_code,
)

from streams import (
    APPLICATION_ID,
    CHANGELOG,
    DEAD_LETTERS,
    DECISIONS,
    DISPATCHES,
    INPUT_TOPICS,
    SITE_DECISIONS,
    TEXTS,
    TOPICS,
    WORKERS,
    Topic,
)
from streams.rules.limits import RECORD_BYTES_MAX

RECORD_ROOM_BYTES: Final = 64 * 1024
"""What Kafka adds to the largest record of ours: batch header, key, headers."""
DAY_MILLISECONDS: Final = 24 * 3600 * 1000
COMPACTION_LAG_MILLISECONDS_MAX: Final = 6 * 3600 * 1000
"""Latest moment at which a replaced row is compacted away, so that a restore doesn't read days of old rows."""
COMPACTED_SEGMENT_BYTES: Final = 32 * 1024 * 1024
"""The newest segment is never compacted: small ones keep that part of a restore short."""
REPLICAS_MAX: Final = 3
READY_TIMEOUT_SECONDS: Final = 30.0
TRANSACTION_TIMEOUT_SECONDS: Final = 10.0
"""How long ``check`` waits for a transactional producer; a healthy broker takes under a second."""

Principal = Literal["upstream", "runner", "api", "processor"]
READS: Final[Mapping[Principal, tuple[Topic, ...]]] = {
    "upstream": (),
    "runner": (DISPATCHES,),
    "api": (DECISIONS, SITE_DECISIONS, TEXTS, WORKERS),
    "processor": (*INPUT_TOPICS, DECISIONS, SITE_DECISIONS, WORKERS, CHANGELOG),
}
"""Who reads what, for the access rules; who writes is in the topic table."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something about Kafka with which no worker may start: a topic's name or "broker", what is wrong, what to do."""

    about: str
    happened: str
    advice: str

    def __str__(self) -> str:
        return f"{self.about}: {self.happened}. To do: {self.advice}"


@dataclass(frozen=True, slots=True)
class FoundTopic:
    """One topic of the table as Kafka has it; ``partitions`` is 0 and ``configs`` empty when it doesn't exist."""

    topic: Topic
    partitions: int
    replicas: int
    configs: Mapping[str, str]


def wanted_configs(topic: Topic) -> dict[str, str]:
    """The topic's settings in Kafka's own words, as ``create`` sets them."""
    room = RECORD_ROOM_BYTES * (
        2 if topic is DEAD_LETTERS else 1
    )  # a dead letter may be as large as any input, and more
    configs = {"max.message.bytes": str(RECORD_BYTES_MAX + room), "message.timestamp.type": "CreateTime"}
    if topic.cleanup == "compact":
        return configs | {
            "cleanup.policy": "compact",
            "segment.bytes": str(COMPACTED_SEGMENT_BYTES),
            "min.cleanable.dirty.ratio": "0.3",
            "max.compaction.lag.ms": str(COMPACTION_LAG_MILLISECONDS_MAX),
        }
    retention = -1 if topic.retention_days is None else topic.retention_days * DAY_MILLISECONDS
    return configs | {"cleanup.policy": "delete", "retention.ms": str(retention), "retention.bytes": "-1"}


async def create(bootstrap: str, partitions: int) -> list[str]:
    """Make the topics that are missing and wait until they can be used; their names in the table's order.

    Topics that exist stay as they are, whatever their settings: ``check`` compares them. Copies: up to three, as many
    as there are brokers, of which two must have a record.
    """
    async with _admin(bootstrap) as admin:
        copies = min(REPLICAS_MAX, len((await admin.describe_cluster())["brokers"]))
        minimum = {"min.insync.replicas": str(max(1, copies - 1))}
        missing = [found.topic for found in await _find(admin) if not found.partitions]
        new_topics = [
            NewTopic(topic.name, partitions, copies, topic_configs=wanted_configs(topic) | minimum) for topic in missing
        ]
        response = await admin.create_topics(new_topics) if new_topics else None
        for name, code, message in response.topic_errors if response else ():
            error = for_code(code)
            if code and error is not TopicAlreadyExistsError:  # made by another program meanwhile
                raise error(f"{name}: {message}")
        await _wait_until_led(admin, [topic.name for topic in missing])
    return [topic.name for topic in missing]


async def check(bootstrap: str, partitions: int) -> list[Problem]:
    """Everything about this Kafka with which a worker of ``partitions`` partitions must not start; empty when none."""
    async with _admin(bootstrap) as admin:
        problems = [problem for found in await _find(admin) for problem in _compare(found, partitions, bootstrap)]
    without_transactions = await _try_transaction(bootstrap)
    return [*problems, without_transactions] if without_transactions else problems


async def describe(bootstrap: str) -> list[FoundTopic]:
    """Every topic of the table as Kafka has it."""
    async with _admin(bootstrap) as admin:
        return await _find(admin)


def acl_commands(bootstrap: str, users: Mapping[Principal, str] | None = None) -> list[str]:
    """Kafka's command lines that give each kind of program what it needs and no more.

    ``users`` gives the Kafka user of each kind, by default ``berth-upstream`` and so on. Kafka must have an
    authorizer and refuse by default for them to mean anything.
    """
    lines: list[str] = []
    for principal, read_topics in READS.items():
        user = (users or {}).get(principal, f"berth-{principal}")
        start = ["kafka-acls.sh", "--bootstrap-server", bootstrap, "--add", "--allow-principal", f"User:{user}"]
        written = [topic for topic in TOPICS if principal in topic.writers]
        grants = [["--operation", "Write", "--operation", "Describe", "--topic", topic.name] for topic in written]
        grants += [["--operation", "Read", "--operation", "Describe", "--topic", topic.name] for topic in read_topics]
        prefixed = ["--resource-pattern-type", "prefixed"]
        if read_topics:
            grants.append(["--operation", "Read", "--group", APPLICATION_ID, *prefixed])
        if principal == "processor":
            grants.append(
                ["--operation", "Write", "--operation", "Describe", "--transactional-id", APPLICATION_ID, *prefixed]
            )
            grants.append(["--operation", "DescribeConfigs", "--topic", APPLICATION_ID, *prefixed])
        lines += [shlex.join([*start, *grant]) for grant in grants]
    return lines


@asynccontextmanager
async def _admin(bootstrap: str) -> AsyncIterator[AIOKafkaAdminClient]:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    try:
        await admin.start()
        yield admin
    finally:
        await admin.close()


async def _find(admin: AIOKafkaAdminClient) -> list[FoundTopic]:
    # Asked for all topics at once, not for each by name: by name, some brokers would create what is missing.
    described: dict[str, dict[str, Any]] = {topic["topic"]: topic for topic in await admin.describe_topics()}
    existing = [topic.name for topic in TOPICS if topic.name in described]
    configs = await _configs(admin, existing)
    return [
        FoundTopic(
            topic,
            partitions=len(described[topic.name]["partitions"]),
            replicas=min((len(part["replicas"]) for part in described[topic.name]["partitions"]), default=0),
            configs=configs[topic.name],
        )
        if topic.name in described
        else FoundTopic(topic, partitions=0, replicas=0, configs={})
        for topic in TOPICS
    ]


async def _configs(admin: AIOKafkaAdminClient, names: Sequence[str]) -> dict[str, dict[str, str]]:
    if not names:
        return {}
    answers = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name) for name in names])
    configs: dict[str, dict[str, str]] = {}
    for code, message, _kind, name, entries in (resource for answer in answers for resource in answer.resources):
        if code:
            raise for_code(code)(f"{name}: {message}")
        configs[name] = {entry[0]: entry[1] for entry in entries}
    return configs


async def _wait_until_led(admin: AIOKafkaAdminClient, names: Sequence[str]) -> None:
    """Return when each partition has a leader: before that a producer or consumer would meet errors."""
    if not names:
        return
    async with asyncio.timeout(READY_TIMEOUT_SECONDS):
        while True:
            described = [topic for topic in await admin.describe_topics() if topic["topic"] in names]
            leaders = [part["leader"] for topic in described for part in topic["partitions"]]
            if len(described) == len(names) and all(leader >= 0 for leader in leaders):
                return
            await asyncio.sleep(0.05)


def _compare(found: FoundTopic, partitions: int, bootstrap: str) -> Iterator[Problem]:
    name, topic = found.topic.name, found.topic
    if not found.partitions:
        yield Problem(name, "the topic doesn't exist", "berth topics create")
        return
    if found.partitions != partitions:
        yield Problem(
            name,
            f"the topic has {found.partitions} partitions, BERTH_PARTITIONS says {partitions}; "
            "the number is fixed for the life of a deployment",
            f"set BERTH_PARTITIONS={found.partitions} if every topic has that number; "
            "else delete this topic if it holds nothing yet, and run: berth topics create",
        )
    for key, wanted in wanted_configs(topic).items():
        actual = found.configs.get(key, "")
        if not _fits(key, actual, wanted):
            change = f"kafka-configs.sh --bootstrap-server {bootstrap} --alter --entity-type topics"
            yield Problem(
                name,
                f"{key} is {actual or 'not set'} and must be {wanted}{_consequence(topic, key)}",
                f"{change} --entity-name {name} --add-config {key}={wanted}",
            )


def _fits(key: str, actual: str, wanted: str) -> bool:
    if key in ("cleanup.policy", "message.timestamp.type"):
        return actual == wanted
    if key in ("retention.ms", "retention.bytes"):
        return actual == "-1" or (wanted != "-1" and actual.lstrip("-").isdecimal() and int(actual) >= int(wanted))
    if key == "max.message.bytes":
        return actual.isdecimal() and int(actual) >= int(wanted)
    return True  # when Kafka compacts is for the operator to tune


def _consequence(topic: Topic, key: str) -> str:
    if key == "max.message.bytes":
        return " or more: a large trigger could not be written"
    if topic.cleanup == "kept for ever":
        return ": this is the audit log, kept for ever"
    if topic.cleanup == "compact":
        return ": rows that are still valid would be deleted"
    return " or more: records could be deleted before they are read" if key.startswith("retention") else ""


async def _try_transaction(bootstrap: str) -> Problem | None:
    """Whether a transactional producer gets its id; writes no record."""
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=f"{APPLICATION_ID}-check")
    try:
        async with asyncio.timeout(TRANSACTION_TIMEOUT_SECONDS):
            await producer.start()
    except KafkaConnectionError:
        raise
    except (KafkaError, TimeoutError) as error:
        reason = "no answer" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
        return Problem(
            "broker",
            f"transactions don't work here ({reason})",
            "use Apache Kafka 3.0 or later; on fewer than three brokers set transaction.state.log.replication.factor "
            "and transaction.state.log.min.isr to what there is; with access rules run: berth topics acl",
        )
    finally:
        await producer.stop()
    return None
