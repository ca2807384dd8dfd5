"""What one partition reads: its part of every input topic, from given positions, each record once and in order.

Faust's own consumer can't be used for this: at each rebalance it clears the agents' queues and throws away what it has
fetched, relying on the group's offsets, which are not our truth (two ways of seeking it back skipped up to 700 records
a rebalance). So every owned partition has its own consumer without a group, which is never moved: it starts at the
positions of the partition's row and ends with the ownership. A rebalance doesn't touch it.

The way of a record: ``read`` fetches lists of records and hands each to ``deliver`` (a Faust channel), the Faust agent
hands it to ``accept``, and the commit loop takes records out with ``take``. Each hand-over is checked: a list must
begin where the list before it ended, and offsets inside must rise. Gaps inside a list are legal (transaction markers,
aborted records, compaction); a list that doesn't follow stops the process, because then a record was skipped or would
be decided twice.

``accepted`` and ``position`` count what Kafka has, not what was a record: a list may be empty and still move on, over
markers. So "everything that was there at take-over" can be waited for by offset.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NamedTuple

from aiokafka import AIOKafkaConsumer, TopicPartition

from streams.codec import Record
from streams.kafka.clients import honest, stop

FETCH_RECORDS_MAX: Final = 2_000
WAITING_RECORDS_MAX: Final = 10_000
"""Per input topic. Reading of that topic stops when as many wait; the other topics go on."""
WAITING_BYTES_MAX: Final = 8 * 1024 * 1024
FETCH_WAIT_MILLISECONDS: Final = 250
"""Longest wait for records. aiokafka has one fetch per broker under way: a topic that had no room joins only the next
one, so this also bounds how long it waits after it has room again."""
CATCH_UP_WAIT_MILLISECONDS: Final = 20


class InputOutOfOrder(Exception):  # noqa: N818 - it reads as what it is
    """A record doesn't follow the one before it. Going on would skip a record or decide one twice."""


class Fetched(NamedTuple):
    """Records of one topic, from offset ``start`` up to, not including, ``end``."""

    intake: "Intake"
    topic: str
    start: int
    end: int
    records: list[Record]
    bytes_count: int


class Intake:
    """Reads partition ``number`` of every topic in ``starts`` from there; bounded.

    ``take_over_ends``: the end of each topic when the partition was taken over.
    """

    def __init__(
        self,
        number: int,
        bootstrap: str,
        starts: Mapping[str, int],
        take_over_ends: Mapping[str, int],
        deliver: Callable[[Fetched], Awaitable[None]],
    ) -> None:
        self.number = number
        self._bootstrap = bootstrap
        self._deliver = deliver
        self._read = dict(starts)
        self._accepted = dict(starts)
        self._take_over_ends = dict(take_over_ends)
        self._waiting: dict[str, deque[Record]] = {topic: deque() for topic in starts}
        self._unhandled_records = dict.fromkeys(starts, 0)  # delivered and not yet taken
        self._unhandled_bytes = dict.fromkeys(starts, 0)
        self._is_caught_up = False
        self._room = asyncio.Event()
        self.arrived = asyncio.Event()
        """Set when records or their end came in; whoever waits on it clears it."""
        self.is_closed = False

    # -- reading --------------------------------------------------------------------------------------------------

    @honest
    async def read(self) -> None:
        """Read until cancelled. Raises what Kafka says: a position out of range, a damaged or too large record."""
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self._bootstrap,
            isolation_level="read_committed",
            enable_auto_commit=False,
            auto_offset_reset="none",
            fetch_max_wait_ms=FETCH_WAIT_MILLISECONDS,
        )
        try:
            await consumer.start()
            partitions = {topic: TopicPartition(topic, self.number) for topic in self._read}
            consumer.assign(list(partitions.values()))
            for topic, partition in partitions.items():
                consumer.seek(partition, self._read[topic])
            while True:
                await self._read_once(consumer, partitions)
        finally:
            await stop(consumer)

    async def _read_once(self, consumer: AIOKafkaConsumer, partitions: Mapping[str, TopicPartition]) -> None:
        with_room = [partition for topic, partition in partitions.items() if self._has_room(topic)]
        if not with_room:
            self._room.clear()
            await self._room.wait()
            return
        fetched = await consumer.getmany(
            *with_room,
            timeout_ms=FETCH_WAIT_MILLISECONDS if self._is_caught_up else CATCH_UP_WAIT_MILLISECONDS,
            max_records=FETCH_RECORDS_MAX,
        )
        for topic, partition in partitions.items():
            start, end = self._read[topic], await consumer.position(partition)
            if end == start:
                continue
            records: list[Record] = []
            bytes_count, expected = 0, start
            for message in fetched.get(partition, ()):
                if message.offset < expected:
                    raise InputOutOfOrder(f"{topic}/{self.number}: offset {message.offset} came after {expected - 1}")
                expected = message.offset + 1
                records.append(
                    Record(
                        topic,
                        self.number,
                        message.offset,
                        message.key,
                        message.value,
                        message.headers,
                        message.timestamp,
                    )
                )
                bytes_count += max(message.serialized_key_size, 0) + max(message.serialized_value_size, 0)
            if end < expected:
                raise InputOutOfOrder(f"{topic}/{self.number}: the next offset is {end}, but {expected - 1} was read")
            self._read[topic] = end
            self._unhandled_records[topic] += len(records)
            self._unhandled_bytes[topic] += bytes_count
            await self._deliver(Fetched(self, topic, start, end, records, bytes_count))

    def _has_room(self, topic: str) -> bool:
        return self._unhandled_records[topic] < WAITING_RECORDS_MAX and self._unhandled_bytes[topic] < WAITING_BYTES_MAX

    # -- handing over ---------------------------------------------------------------------------------------------

    def accept(self, fetched: Fetched) -> None:
        """Called by the Faust agent for what ``read`` has delivered. Raises InputOutOfOrder."""
        if self.is_closed:
            return
        topic = fetched.topic
        if fetched.start != self._accepted[topic]:
            raise InputOutOfOrder(
                f"{topic}/{self.number}: records from {fetched.start} on were handed over, "
                f"but everything up to {self._accepted[topic]} had been"
            )
        self._waiting[topic].extend(fetched.records)
        self._accepted[topic] = fetched.end
        self.arrived.set()

    def take(self, records_max: int, bytes_max: int) -> list[Record]:
        """Take records out, in order per topic, each topic with records getting the same share."""
        taken: list[Record] = []
        bytes_taken = 0
        topics = [topic for topic, waiting in self._waiting.items() if waiting]
        while topics and len(taken) < records_max and bytes_taken < bytes_max:
            share = max(1, (records_max - len(taken)) // len(topics))
            for topic in topics:
                waiting, bytes_of_topic, count = self._waiting[topic], 0, 0
                while waiting and count < share and len(taken) < records_max and bytes_taken < bytes_max:
                    record = waiting.popleft()
                    taken.append(record)
                    count += 1
                    size = len(record.key or b"") + len(record.value or b"")
                    bytes_of_topic += size
                    bytes_taken += size
                self._unhandled_records[topic] -= count
                self._unhandled_bytes[topic] -= bytes_of_topic
            topics = [topic for topic in topics if self._waiting[topic]]
        if taken:
            self._room.set()
        return taken

    def has_caught_up(self) -> bool:
        """Whether everything that was there at take-over has been taken."""
        if not self._is_caught_up:
            self._is_caught_up = all(self.position(topic) >= end for topic, end in self._take_over_ends.items())
        return self._is_caught_up

    def position(self, topic: str) -> int:
        """The offset up to which everything was taken."""
        waiting = self._waiting[topic]
        return waiting[0].offset if waiting else self._accepted[topic]

    @property
    def waiting_count(self) -> int:
        """How many records can be taken."""
        return sum(map(len, self._waiting.values()))
