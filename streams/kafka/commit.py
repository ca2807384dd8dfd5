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
from itertools import zip_longest
from typing import Final

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import MessageSizeTooLargeError, NotEnoughReplicasError
from aiokafka.producer.message_accumulator import BatchBuilder

from streams import APPLICATION_ID, CHANGELOG
from streams.partition import Changes

TRANSACTION_TIMEOUT_SECONDS: Final = 10
"""After this the broker aborts an open transaction by itself; until then its readers wait for it."""
COMMIT_SECONDS_MAX: Final = 15.0
FENCE_SECONDS_MAX: Final = 5.0
"""Fencing happens while the group waits for this worker, so it must end before the session does."""
BATCH_BYTES_MAX: Final = 512 * 1024
CLOSE_SECONDS_MAX: Final = 2.0


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


class Writer:
    """The transactional producer ``berth-{number}``. Use: ``fence`` once, ``commit`` one after the other, ``close``."""

    def __init__(self, number: int, bootstrap: str) -> None:
        self.number = number
        self._producer = AIOKafkaProducer(
            bootstrap_servers=bootstrap,
            transactional_id=f"{APPLICATION_ID}-{number}",
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
            await self._producer.start()

    async def commit(self, changes: Changes, now_us: int) -> None:
        """Write ``changes`` in one transaction; when this returns, all of it is visible and durable.

        Raises KafkaError (ProducerFenced: another owner has taken over) or TimeoutError after COMMIT_SECONDS_MAX. Then
        it isn't known whether the transaction was committed, and this writer must not be used again.
        """
        batches = self._pack(changes, now_us // 1000)
        async with asyncio.timeout(COMMIT_SECONDS_MAX):
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
        try:
            async with asyncio.timeout(CLOSE_SECONDS_MAX):
                await self._producer.stop()
        except TimeoutError:
            logging.getLogger(__name__).warning("the producer of partition %s did not close in time", self.number)

    def _pack(self, changes: Changes, timestamp_ms: int) -> dict[TopicPartition, list[BatchBuilder]]:
        """Batches per topic and partition, in order."""
        batches: dict[TopicPartition, list[BatchBuilder]] = {}
        for output in changes.outputs:
            number = self.number if output.partition is None else output.partition
            self._append(
                batches.setdefault(TopicPartition(output.topic, number), []),
                timestamp_ms,
                output.key,
                output.value,
                output.headers,
            )
        rows = batches.setdefault(TopicPartition(CHANGELOG.name, self.number), [])
        for key, value in changes.rows.items():
            self._append(rows, timestamp_ms, key, value, ())
        return {target: builders for target, builders in batches.items() if builders}

    def _append(
        self,
        builders: list[BatchBuilder],
        timestamp_ms: int,
        key: bytes | None,
        value: bytes | None,
        headers: tuple[tuple[str, bytes], ...],
    ) -> None:
        fields = {"timestamp": timestamp_ms, "key": key, "value": value, "headers": list(headers)}
        if builders and builders[-1].append(**fields) is not None:
            return
        builders.append(self._producer.create_batch())
        if builders[-1].append(**fields) is None:
            raise MessageSizeTooLargeError(f"a record of {len(value or b'')} bytes does not fit into a batch")
