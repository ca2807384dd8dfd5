"""Ask for a turn on Kafka and print what was decided: python ask.py HOST:PORT AGENT ID MESSAGE (docs/upstream.md)"""

import asyncio
import json
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

KAFKA, AGENT, ID, MESSAGE = sys.argv[1:]
TRIGGERS, DECISIONS = "berth.triggers", "berth.decisions"
ANSWER_SECONDS = 10.0


async def main() -> None:
    trigger = {
        "type": "trigger", "v": 1, "id": ID, "agent_id": AGENT, "conversation_id": f"of {ID}", "kind": "chat",
        "message": MESSAGE, "requested_by": "ask.py", "interactive": True, "on_busy": "ask",
        "decide_before": (datetime.now(UTC) + timedelta(seconds=5)).isoformat(),
    }  # fmt: skip
    producer = AIOKafkaProducer(bootstrap_servers=KAFKA, acks="all", enable_idempotence=True)
    consumer = AIOKafkaConsumer(bootstrap_servers=KAFKA, isolation_level="read_committed", enable_auto_commit=False)
    async with producer, consumer:
        consumer.assign([TopicPartition(DECISIONS, number) for number in await producer.partitions_for(DECISIONS)])
        await consumer.seek_to_end()
        for target in consumer.assignment():
            await consumer.position(target)  # the end of now: what is decided from here on is read
        await producer.send_and_wait(TRIGGERS, json.dumps(trigger).encode(), AGENT.encode())
        async with asyncio.timeout(ANSWER_SECONDS):
            decision = await answer(consumer)
    print(json.dumps({name: decision[name] for name in ("seq", "events", "refusal", "ignored") if name in decision}))


async def answer(consumer: AIOKafkaConsumer) -> dict[str, Any]:
    """The decision that settles ID."""
    async for record in consumer:
        if record.key.decode() == AGENT and ("settles", ID.encode()) in record.headers:
            decision: dict[str, Any] = json.loads(record.value)
            return decision
    raise AssertionError("a consumer that is not stopped never ends")


asyncio.run(main())
