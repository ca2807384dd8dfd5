"""The Kafka floor: count and queue in a dict, one transactional producer per partition, one transaction per batch.

What it doesn't do is the point: no formats, no decisions, no rows; after a restart it knows nothing. It does keep its
input positions in the same transaction, as one record, so no input is handled twice. It is written as Berth's own way
of reading and committing, only without anything to decide, so a measured distance is the cost of deciding and of what
is written for it. Arguments: bootstrap, prefix of its topics, limit. Topics: start, done, dispatch, positions.
"""

import asyncio
import json
import logging
import sys
from collections import Counter, defaultdict, deque

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition

from tests.bench.processes import say

PARTITIONS = 8
BATCH_BYTES = 512 * 1024


class PartitionOfFloor:
    def __init__(self, number: int, bootstrap: str, prefix: str, limit: int) -> None:
        self.number = number
        self.prefix = prefix
        self.limit = limit
        self.inbox: list[ConsumerRecord] = []
        self.arrived = asyncio.Event()
        self.handled = 0
        self.transactions = 0
        self._running: Counter[bytes] = Counter()
        self._waiting: defaultdict[bytes, deque[ConsumerRecord]] = defaultdict(deque)
        self._positions: dict[str, int] = {}
        self._producer = AIOKafkaProducer(
            bootstrap_servers=bootstrap,
            transactional_id=f"{prefix}{number}",
            retry_backoff_ms=5,
            linger_ms=0,
            max_batch_size=BATCH_BYTES,
        )

    async def run(self) -> None:
        await self._producer.start()
        while True:
            await self.arrived.wait()
            self.arrived.clear()
            records, self.inbox = self.inbox, []
            await self._commit(self._decide(records))
            self.handled += len(records)
            self.transactions += 1

    def _decide(self, records: list[ConsumerRecord]) -> list[ConsumerRecord]:
        chosen = []
        for record in records:
            self._positions[record.topic] = record.offset + 1
            key = record.key
            if record.topic.endswith(".done"):
                if self._waiting[key]:
                    chosen.append(self._waiting[key].popleft())
                else:
                    self._running[key] -= 1
            elif self._running[key] < self.limit:
                self._running[key] += 1
                chosen.append(record)
            else:
                self._waiting[key].append(record)
        return chosen

    async def _commit(self, chosen: list[ConsumerRecord]) -> None:
        await self._producer.begin_transaction()
        batches = [self._producer.create_batch()]
        for record in chosen:
            fields = {"timestamp": None, "key": record.key, "value": record.value}
            if batches[-1].append(**fields) is None:
                batches.append(self._producer.create_batch())
                batches[-1].append(**fields)
        position = self._producer.create_batch()
        position.append(timestamp=None, key=b"positions", value=json.dumps(self._positions).encode())
        sent = [await self._producer.send_batch(position, f"{self.prefix}positions", partition=self.number)]
        if chosen:
            sent += [
                await self._producer.send_batch(batch, f"{self.prefix}dispatch", partition=self.number)
                for batch in batches
            ]
        await asyncio.gather(*sent)
        await self._producer.commit_transaction()


async def main(bootstrap: str, prefix: str, limit: int) -> None:
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # retries while markers are being written
    partitions = [PartitionOfFloor(number, bootstrap, prefix, limit) for number in range(PARTITIONS)]
    loops = [asyncio.create_task(partition.run()) for partition in partitions]
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    consumer.assign(
        [TopicPartition(f"{prefix}{kind}", number) for kind in ("start", "done") for number in range(PARTITIONS)]
    )
    telling = asyncio.create_task(tell(partitions))
    reading = asyncio.create_task(read(consumer, partitions))
    say("ready")
    for ended in asyncio.as_completed([*loops, telling, reading]):
        await ended


async def read(consumer: AIOKafkaConsumer, partitions: list[PartitionOfFloor]) -> None:
    while True:
        for (_, number), records in (await consumer.getmany(timeout_ms=200)).items():
            partitions[number].inbox.extend(records)
            partitions[number].arrived.set()


async def tell(partitions: list[PartitionOfFloor]) -> None:
    before = -1
    while True:
        handled = sum(partition.handled for partition in partitions)
        if handled != before:
            say("handled", count=handled, transactions=sum(partition.transactions for partition in partitions))
        before = handled
        await asyncio.sleep(0.05)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
