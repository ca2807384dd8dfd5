"""A runner on Kafka: python kafka_runner.py HOST:PORT GROUP AGENT...   One process for a group; see docs/runner.md."""

import asyncio
import json
import signal
import sys
from datetime import UTC, datetime
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError

KAFKA, GROUP, *AGENTS = sys.argv[1:]
DISPATCHES, STATUSES = "berth.dispatches", "berth.statuses"
Json = dict[str, Any]
SETTINGS: Json = {"isolation_level": "read_committed", "enable_auto_commit": False, "auto_offset_reset": "earliest"}
jobs: dict[str, asyncio.Task[Any]] = {}  # every one since the start, by execution_id
told: set[str] = set()  # which of them Berth has asked to end


async def work(dispatch: Json) -> Any:
    """Your part: do what `message` and `payload` ask for. It is cancelled when the attempt is no longer wanted."""
    return await asyncio.sleep((dispatch.get("payload") or {}).get("work_seconds", 1), "done")


async def attend(producer: AIOKafkaProducer, dispatch: Json, job: asyncio.Task[Any]) -> None:
    while not (await asyncio.wait({job}, timeout=dispatch.get("heartbeat_seconds", 90) / 3))[0]:
        await say(producer, dispatch, "heartbeat")
    if job.cancelled():  # failed: the runner itself was asked to end; it is tried again
        await say(producer, dispatch, "stopped" if dispatch["execution_id"] in told else "failed")
    elif error := job.exception():
        await say(producer, dispatch, "failed", error=repr(error))
    else:
        await say(producer, dispatch, "finished", result=job.result())


async def say(producer: AIOKafkaProducer, dispatch: Json, status: str, **fields: Any) -> None:
    about = {name: dispatch[name] for name in ("agent_id", "conversation_id", "execution_id")}
    value = json.dumps({"type": "status", "v": 1, **about, "status": status, **fields}, default=str).encode()
    sent = None
    while sent is None:  # until Kafka has it; said twice it does no harm
        try:
            sent = await producer.send_and_wait(STATUSES, value, dispatch["agent_id"].encode())
        except KafkaError:
            await asyncio.sleep(1)


async def run(producer: AIOKafkaProducer, consumer: AIOKafkaConsumer, attempts: asyncio.TaskGroup) -> None:
    consumer.assign([TopicPartition(DISPATCHES, number) for number in await producer.partitions_for(DISPATCHES)])
    while True:
        for records in (await consumer.getmany(timeout_ms=1000)).values():
            for message in (json.loads(record.value) for record in records if record.key.decode() in AGENTS):
                execution_id = message["execution_id"]
                if message["type"] in ("stop_requested", "revoked") and execution_id in jobs:
                    told.add(execution_id)
                    jobs[execution_id].cancel()
                elif message["type"] != "dispatch" or execution_id in jobs:
                    continue  # it has come before
                elif datetime.fromisoformat(message["lease_until"]) > datetime.now(UTC):  # else it was given up
                    await say(producer, message, "running")
                    jobs[execution_id] = job = asyncio.create_task(work(message))
                    attempts.create_task(attend(producer, message, job))
        await consumer.commit()  # only now: what was read is in work


async def main() -> None:
    producer = AIOKafkaProducer(bootstrap_servers=KAFKA, acks="all", enable_idempotence=True)
    consumer = AIOKafkaConsumer(bootstrap_servers=KAFKA, group_id=GROUP, **SETTINGS)
    async with producer, consumer, asyncio.TaskGroup() as attempts:
        running = asyncio.create_task(run(producer, consumer, attempts))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
        await asyncio.wait({running})
        for job in jobs.values():
            job.cancel()
    if not running.cancelled():
        await running  # raises why it has ended


asyncio.run(main())
