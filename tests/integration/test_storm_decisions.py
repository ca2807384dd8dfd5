"""The real decider through faults: limits hold, each attempt is dispatched once, every record has its decision.

The storms of test_storm.py with the partition that Berth runs, a runner that says ``finished``, and `berth verify`.
"""

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from api.cli.embedded_kafka import EmbeddedKafka
from api.cli.verify import verify_log
from streams import DEAD_LETTERS, DECISIONS, DISPATCHES, INPUT_TOPICS, STATUSES, TRIGGERS
from streams.codec import partition_of
from streams.settings import Settings
from tests.integration.test_storm import run_storm
from tests.integration.workers import PARTITIONS, Log

pytestmark = pytest.mark.kafka
AGENTS = 40


def encoded(**fields: object) -> bytes:
    return json.dumps({"v": 1, **fields}).encode()


async def triggers(producer: AIOKafkaProducer) -> None:
    """New work for all agents, 250 a second, until cancelled."""
    index = 0
    while True:
        agent = f"agent-{index % AGENTS}"
        value = encoded(
            type="trigger", id=f"trigger-{index}", agent_id=agent, conversation_id=f"c{index % 7}", kind="task_assigned"
        )
        await producer.send(TRIGGERS.name, value, agent.encode(), partition_of(agent, PARTITIONS))
        index += 1
        if index % 10 == 0:
            await asyncio.sleep(0.04)


@asynccontextmanager
async def runner(bootstrap: str, producer: AIOKafkaProducer) -> AsyncIterator[None]:
    """Reports every attempt finished at once."""
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, isolation_level="read_committed")
    await consumer.start()

    async def run() -> None:
        partitions = [TopicPartition(DISPATCHES.name, number) for number in range(PARTITIONS)]
        consumer.assign(partitions)
        await consumer.seek_to_beginning(*partitions)
        async for record in consumer:
            dispatch = json.loads(record.value)
            agent = dispatch["agent_id"]
            value = encoded(
                type="status",
                agent_id=agent,
                conversation_id=dispatch["conversation_id"],
                execution_id=dispatch["execution_id"],
                status="finished",
            )
            await producer.send(STATUSES.name, value, agent.encode(), partition_of(agent, PARTITIONS))

    running = asyncio.create_task(run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await consumer.stop()


async def undecided(bootstrap: str) -> dict[str, str]:
    """Where the causes of the decisions aren't the records of the input, each once and in order."""
    log = await Log.read(bootstrap, DECISIONS.name, *(topic.name for topic in INPUT_TOPICS))
    problems = {}
    for number in range(PARTITIONS):
        causes = defaultdict(list)
        for decision in log.values(DECISIONS.name, number):
            if "offset" in decision["cause"]:
                causes[decision["cause"]["topic"]].append(decision["cause"]["offset"])
        for topic in INPUT_TOPICS:
            offsets = [record.offset for record in log.records[TopicPartition(topic.name, number)]]
            if causes[topic.name] != offsets:
                missing = sorted(set(offsets) - set(causes[topic.name]))
                problems[f"{topic.name}/{number}"] = f"{len(offsets)} records, missing {len(missing)}: {missing[:5]}"
    return problems


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("kinds", "faults", "at_once"),
    [(["kill", "freeze", "term", "join", "join"], 4, 1), (["kill", "restart_kafka", "join"], 2, 2)],
    ids=["one by one", "two at once, also Kafka"],
)
async def test_decisions_hold_through_faults(
    fresh_kafka: EmbeddedKafka, seed: int, kinds: list[str], faults: int, at_once: int
) -> None:
    bootstrap = fresh_kafka.bootstrap
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, linger_ms=5, enable_idempotence=True)
    await producer.start()
    async with runner(bootstrap, producer):

        async def settled() -> bool:
            """All work that was asked for is finished: no input without its decision, and nobody runs."""
            if await undecided(bootstrap):
                return False
            log = await Log.read(bootstrap, TRIGGERS.name, DISPATCHES.name, STATUSES.name)
            counts = Counter({where.topic: 0 for where in log.records})
            for where, records in log.records.items():
                counts[where.topic] += len(records)
            return counts[TRIGGERS.name] == counts[DISPATCHES.name] == counts[STATUSES.name] > 0

        await run_storm(fresh_kafka, seed, kinds, faults, at_once, loading=triggers, settled=settled, arguments=WORKER)
    await producer.stop()
    assert await undecided(bootstrap) == {}
    log = await Log.read(bootstrap, DISPATCHES.name, DEAD_LETTERS.name)
    dispatched = Counter(
        json.loads(record.value)["execution_id"]
        for where, records in log.records.items()
        for record in records
        if where.topic == DISPATCHES.name
    )
    assert set(dispatched.values()) == {1}
    assert not [where for where in log.records if where.topic == DEAD_LETTERS.name]
    verdict = await verify_log(Settings(kafka=bootstrap))
    assert verdict.violations == []
    assert verdict.decisions >= 2 * len(dispatched)


WORKER = ("-m", "api.cli", "worker")
