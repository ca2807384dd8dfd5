"""Reading a partition of a topic from its beginning to the end that it has now: for audits, which follow nothing."""

from collections.abc import AsyncIterator
from typing import Final

from aiokafka import ConsumerRecord, TopicPartition

from streams.kafka.clients import Fetches, reading
from streams.kafka.restore import POLL_MILLISECONDS

RECORDS_MAX: Final = 2_000


async def history(
    bootstrap: str, topic: str, number: int, start: int | None = None
) -> AsyncIterator[list[ConsumerRecord]]:
    """The committed records of partition ``number`` from its beginning, or an offset, in lists. Raises KafkaError."""
    partition = TopicPartition(topic, number)
    async with reading(bootstrap, "read_committed") as consumer:
        end = (await consumer.end_offsets([partition]))[partition]
        consumer.assign([partition])
        if start is None:
            start = (await consumer.beginning_offsets([partition]))[partition]
        consumer.seek(partition, start)
        fetches = Fetches(consumer)
        while await consumer.position(partition) < end:
            fetched = await fetches.getmany(partition, timeout_ms=POLL_MILLISECONDS, max_records=RECORDS_MAX)
            records = [record for record in fetched.get(partition, ()) if record.offset < end]
            if records:
                yield records
