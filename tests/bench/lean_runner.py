"""The runner of the workloads: reports ``finished`` only, and logs each run. One for every system measured.

Arguments: bootstrap, "berth" or "floor", topic of dispatches, topic of completions, number of items, seconds of a run,
file for the log. It says "ready", hears "go", and then reads from the beginning.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from pydantic_core import from_json

from tests.bench.processes import say, words
from tests.bench.workloads import ENDLESS, Run, item_of

PARTITIONS = 8


def _of_berth(value: bytes) -> tuple[str, bytes] | None:
    """Id of the item and the record that reports it finished."""
    dispatch = from_json(value)
    if dispatch["type"] != "dispatch":
        return None
    status = {
        "type": "status",
        "v": 1,
        "agent_id": dispatch["agent_id"],
        "conversation_id": dispatch["conversation_id"],
        "execution_id": dispatch["execution_id"],
        "status": "finished",
    }
    return dispatch["trigger_id"], json.dumps(status).encode()


def _of_floor(value: bytes) -> tuple[str, bytes] | None:
    return value.decode(), value


async def main(
    bootstrap: str, dialect: str, dispatches: str, completions: str, count: int, run_seconds: float, path: Path
) -> None:
    read = _of_berth if dialect == "berth" else _of_floor
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", linger_ms=0)
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap, auto_offset_reset="earliest", isolation_level="read_committed"
    )
    await producer.start()
    await consumer.start()
    runs: list[Run] = []
    tasks: set[asyncio.Task[None]] = set()
    stopped = asyncio.Event()

    async def work(id: str, key: bytes, completion: bytes, started_ns: int) -> None:
        if run_seconds:
            await asyncio.sleep(run_seconds)
        runs.append(Run(*item_of(id), started_ns, time.monotonic_ns()))
        await producer.send(completions, key=key, value=completion)

    async def take() -> None:
        consumer.assign([TopicPartition(dispatches, number) for number in range(PARTITIONS)])
        while len(runs) < count:
            for records in (await consumer.getmany(timeout_ms=200)).values():
                for record in records:
                    started_ns = time.monotonic_ns()
                    taken = read(record.value)
                    if taken is None or taken[0].startswith(ENDLESS):
                        continue
                    if run_seconds:
                        task = asyncio.create_task(work(taken[0], record.key, taken[1], started_ns))
                        tasks.add(task)
                        task.add_done_callback(tasks.discard)
                    else:
                        await work(taken[0], record.key, taken[1], started_ns)
        stopped.set()

    async def hear() -> None:
        async for word in words():
            if word == "go":
                say("went", at_ns=time.monotonic_ns())
                taking.append(asyncio.create_task(take()))
            else:
                stopped.set()

    taking: list[asyncio.Task[None]] = []
    hearing = asyncio.create_task(hear())
    say("ready")
    await stopped.wait()
    hearing.cancel()
    for task in taking:
        task.cancel()
    await producer.flush()
    path.write_text(json.dumps(runs))
    say("done", count=len(runs))
    await consumer.stop()
    await producer.stop()


if __name__ == "__main__":
    _, bootstrap, dialect, dispatches, completions, count, run_seconds, path = sys.argv
    asyncio.run(main(bootstrap, dialect, dispatches, completions, int(count), float(run_seconds), Path(path)))
