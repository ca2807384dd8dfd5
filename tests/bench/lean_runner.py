"""The runner of the workloads: reports ``finished`` only, and logs each run. One for every system measured.

Arguments: bootstrap, "berth" or "floor", topic of dispatches, topic of completions, number of items, seconds of a run.
It says "ready", hears "go", reads from the beginning, and says "done" with its log.
"""

import asyncio
import json
import sys
import time

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition
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


class LeanRunner:
    def __init__(self, bootstrap: str, dialect: str, completions: str, count: int, run_seconds: float) -> None:
        self.runs: list[Run] = []
        self.is_over = asyncio.Event()
        self.producer = AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", linger_ms=0)
        self.consumer = AIOKafkaConsumer(
            bootstrap_servers=bootstrap, auto_offset_reset="earliest", isolation_level="read_committed"
        )
        self._read = _of_berth if dialect == "berth" else _of_floor
        self._completions = completions
        self._count = count
        self._run_seconds = run_seconds
        self._tasks: set[asyncio.Task[None]] = set()

    async def take(self, dispatches: str) -> None:
        self.consumer.assign([TopicPartition(dispatches, number) for number in range(PARTITIONS)])
        while len(self.runs) < self._count:
            for records in (await self.consumer.getmany(timeout_ms=200)).values():
                for record in records:
                    await self._begin(record, time.monotonic_ns())
        self.is_over.set()

    async def _begin(self, record: ConsumerRecord, started_ns: int) -> None:
        taken = self._read(record.value)
        if taken is None or taken[0].startswith(ENDLESS):
            return
        id, completion = taken
        if self._run_seconds:
            task = asyncio.create_task(self._work(id, record.key, completion, started_ns))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            await self._work(id, record.key, completion, started_ns)

    async def _work(self, id: str, key: bytes, completion: bytes, started_ns: int) -> None:
        if self._run_seconds:
            await asyncio.sleep(self._run_seconds)
        self.runs.append(Run(*item_of(id), started_ns, time.monotonic_ns()))
        await self.producer.send(self._completions, key=key, value=completion)


async def main(bootstrap: str, dialect: str, dispatches: str, completions: str, count: int, run_seconds: float) -> None:
    runner = LeanRunner(bootstrap, dialect, completions, count, run_seconds)
    await runner.producer.start()
    await runner.consumer.start()

    async def hear() -> None:
        taking: list[asyncio.Task[None]] = []
        async for word in words():
            if word == "go":
                say("went", at_ns=time.monotonic_ns())
                taking.append(asyncio.create_task(runner.take(dispatches)))
            else:
                runner.is_over.set()

    hearing = asyncio.create_task(hear())
    say("ready")
    await runner.is_over.wait()
    hearing.cancel()
    await runner.producer.flush()
    say("done", runs=runner.runs)
    await runner.consumer.stop()
    await runner.producer.stop()


if __name__ == "__main__":
    _, bootstrap, dialect, dispatches, completions, count, run_seconds = sys.argv
    asyncio.run(main(bootstrap, dialect, dispatches, completions, int(count), float(run_seconds)))
