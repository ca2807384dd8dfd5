"""The only writer of one partition: a transactional producer that fences the owner before it, and group commits.

One transaction holds everything that a group of records caused: decisions, outputs, rows, and among the rows the
positions of the inputs. Either all of it becomes visible or none, whatever dies when.

Records are packed by ``BatchBuilder``: one call of the producer per batch instead of one per record is several times
cheaper. Batches go out in waves, the first of every topic, then the second of every topic, because aiokafka has one
request per broker under way and one batch per topic in it. The transaction is ended after all acknowledgements: sent
earlier, the end would race the sends inside aiokafka and be retried.

``retry_backoff_ms=5``: while the markers of the last transaction are being written the broker answers the next one
with CONCURRENT_TRANSACTIONS, for a few milliseconds and in ordinary operation; with aiokafka's 100 ms every such answer
would cost a tenth of a second. It logs each as a warning: ``QuietRetries`` drops that message and no other.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from typing import Final

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError, NotEnoughReplicasError, ProducerFenced
from aiokafka.producer.message_accumulator import BatchBuilder

from streams import APPLICATION_ID, CHANGELOG, TOPICS
from streams.codec import Output
from streams.kafka import edge
from streams.kafka.clients import honest, is_outage, stop
from streams.kafka.topics import wanted_configs
from streams.partition import Changes

TRANSACTION_TIMEOUT_SECONDS: Final = 10
"""After this the broker aborts an open transaction by itself; until then its readers wait for it."""
COMMIT_SECONDS_MAX: Final = 15.0
FENCE_SECONDS_MAX: Final = 5.0
"""Fencing happens while the group waits for this worker, so it must end before the session does."""
FENCE_RETRY_SECONDS: Final = 0.1
BATCH_BYTES_MAX: Final = 512 * 1024
RECORD_BYTES: Final = {topic.name: int(wanted_configs(topic)["max.message.bytes"]) for topic in TOPICS}
"""What each topic takes."""
BATCH_ROOM_BYTES: Final = 1024
"""What Kafka itself adds to a record that is alone in its batch."""


class QuietRetries(logging.Filter):
    """Drops aiokafka's warning about a send that is retried because the last transaction is just being ended."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep everything else."""
        arguments = record.args if isinstance(record.args, tuple) else ()
        return not (
            record.msg.startswith("Got error produce response on topic-partition")
            and any(
                argument is NotEnoughReplicasError or "NotEnoughReplicas" in str(argument) for argument in arguments
            )
        )


logging.getLogger("aiokafka.producer.sender").addFilter(QuietRetries())


class RecordTooLarge(Exception):  # noqa: N818 - it reads as what it is
    """The rules made a record that no topic takes; found before anything was sent."""


class Writer:
    """The transactional producer ``berth-{number}``. Use: ``fence`` once, ``commit`` one after the other, ``close``."""

    def __init__(self, number: int, bootstrap: str) -> None:
        self.number = number
        self._bootstrap = bootstrap
        self._producer = self._new_producer()

    def _new_producer(self) -> AIOKafkaProducer:
        return AIOKafkaProducer(
            bootstrap_servers=self._bootstrap,
            transactional_id=f"{APPLICATION_ID}-{self.number}",
            transaction_timeout_ms=TRANSACTION_TIMEOUT_SECONDS * 1000,
            retry_backoff_ms=5,
            linger_ms=0,
            max_batch_size=BATCH_BYTES_MAX,
        )

    async def fence(self) -> None:
        """Become the only writer: what another had under way is aborted, whatever it tries later fails.

        Raises KafkaError, or TimeoutError after FENCE_SECONDS_MAX.
        """
        async with asyncio.timeout(FENCE_SECONDS_MAX):
            while True:
                try:
                    return await self._start()
                except KafkaError as error:
                    if not is_outage(error):
                        raise
                    await stop(self._producer)
                    await asyncio.sleep(FENCE_RETRY_SECONDS)
                    self._producer = self._new_producer()

    @honest
    async def _start(self) -> None:
        await self._producer.start()

    @honest
    async def commit(self, changes: Changes, now_us: int) -> None:
        """Write ``changes`` in one transaction; when this returns, all of it is visible and durable.

        Raises RecordTooLarge before anything is sent; else KafkaError (ProducerFenced: another owner has taken over) or
        TimeoutError. Then it isn't known whether the transaction was committed, and this writer is of no more use.
        """
        batches = self._pack(changes, now_us // 1000)
        began = edge.monotonic_seconds()
        try:
            async with asyncio.timeout(COMMIT_SECONDS_MAX):
                await self._send(batches)
        except ProducerFenced as error:
            if edge.monotonic_seconds() - began > TRANSACTION_TIMEOUT_SECONDS - 1:
                raise TimeoutError("the broker has ended the transaction, which took too long") from error
            raise

    async def _send(self, batches: Mapping[TopicPartition, Sequence[BatchBuilder]]) -> None:
        await self._producer.begin_transaction()
        acknowledgements = []
        for wave in zip_longest(*batches.values()):
            for target, batch in zip(batches, wave, strict=True):
                if batch is not None:
                    acknowledgements.append(
                        await self._producer.send_batch(batch, target.topic, partition=target.partition)
                    )
        await asyncio.gather(*acknowledgements)
        await self._producer.commit_transaction()

    async def close(self) -> None:
        """Give the connections back. The transaction under way, if any, is left to the next owner's fencing."""
        await stop(self._producer)

    def _pack(self, changes: Changes, timestamp_ms: int) -> dict[TopicPartition, list[BatchBuilder]]:
        """Batches per topic and partition, in order."""
        batches: dict[TopicPartition, list[BatchBuilder]] = {}
        rows = (Output(CHANGELOG.name, key, value) for key, value in changes.rows.items())
        for output in chain(changes.outputs, rows):
            size = len(output.key or b"") + len(output.value or b"")
            size += sum(len(name) + len(content) for name, content in output.headers)
            if size > RECORD_BYTES[output.topic] - BATCH_ROOM_BYTES:
                raise RecordTooLarge(f"a record of {size} bytes was made for {output.topic}")
            number = self.number if output.partition is None else output.partition
            self._append(batches.setdefault(TopicPartition(output.topic, number), []), timestamp_ms, output)
        return batches

    def _append(self, batches: list[BatchBuilder], timestamp_ms: int, output: Output) -> None:
        fields = {"timestamp": timestamp_ms, "key": output.key, "value": output.value, "headers": list(output.headers)}
        if not batches or batches[-1].append(**fields) is None:
            batches.append(self._producer.create_batch())
            batches[-1].append(**fields)  # the first record of a batch always fits
