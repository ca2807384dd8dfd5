"""The log of decisions for programs that read it as a whole: synchronous, and without a consumer group.

Live groups, offsets and tables are never touched: the consumer has no group, reads what was committed when it began,
and writes nothing. Audits are plain functions over iterators, so the event loop runs only while more is fetched.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Final, Self

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition

from streams import Topic
from streams.kafka.clients import Fetches, honest, reading
from streams.kafka.restore import POLL_MILLISECONDS

RECORDS_MAX: Final = 1_000
"""Of one partition that are held in memory at a time."""

Advance = Callable[[int], None]


class DecisionLog:
    """``with DecisionLog(...) as log``: every committed decision of these partitions, as they ended when it was opened.

    Raises KafkaError.
    """

    def __init__(self, bootstrap: str, wanted: Sequence[tuple[Topic, int]]) -> None:
        self._wanted = [TopicPartition(topic.name, number) for topic, number in wanted]
        self._runner = asyncio.Runner()
        self._context = reading(bootstrap, "read_committed")
        self._consumer: AIOKafkaConsumer
        self._fetches: Fetches
        self._begins: dict[TopicPartition, int] = {}
        self._ends: dict[TopicPartition, int] = {}
        self.records = 0
        """About how many there are: markers of transactions count as well."""
        self.on_read: Advance = lambda _: None
        """Told how far it went, in records and markers."""

    def __enter__(self) -> Self:
        self._runner.__enter__()
        try:
            self._runner.run(self._open())
        except BaseException:
            self._runner.close()
            raise
        return self

    @honest
    async def _open(self) -> None:
        self._consumer = await self._context.__aenter__()
        self._fetches = Fetches(self._consumer)
        self._ends = await self._consumer.end_offsets(self._wanted)
        self._begins = await self._consumer.beginning_offsets(self._wanted)
        self.records = sum(self._ends[where] - self._begins[where] for where in self._wanted)
        self._consumer.assign(self._wanted)
        for where, offset in self._begins.items():
            self._consumer.seek(where, offset)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._runner.run(self._close(kind, error, trace))
        finally:
            self._runner.close()

    async def _close(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._context.__aexit__(kind, error, trace)

    def sources(self) -> list[Iterator[ConsumerRecord]]:
        """The records of each partition of each topic. May be asked for once."""
        return [self._records(where) for where in self._wanted]

    def _records(self, where: TopicPartition) -> Iterator[ConsumerRecord]:
        position, end = self._begins[where], self._ends[where]
        while position < end:
            fetched, after = self._runner.run(self._fetch(where, end))
            yield from fetched
            self.on_read(min(after, end) - position)
            position = after

    async def _fetch(self, where: TopicPartition, end: int) -> tuple[list[ConsumerRecord], int]:
        """The next records, and where the partition is after them."""
        found = await self._fetches.getmany(where, timeout_ms=POLL_MILLISECONDS, max_records=RECORDS_MAX)
        records = [record for record in found.get(where, ()) if record.offset < end]
        return records, await self._consumer.position(where)
