"""The log as the projections read it: committed records of decisions, texts and dead letters, from given positions.

The positions are those of the checkpoints; no consumer group is involved, so nothing that is committed, reset or lost
there can skip or repeat a record. Offsets have holes (markers of transactions, records of aborted ones): a batch ends
after its last record, and begins where the checkpoint is, whatever lies between.
"""

import asyncio
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Final, Self

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import OffsetOutOfRangeError

from projections.store import Batch, LogRecord, Position
from streams import DEAD_LETTERS, DECISIONS, SITE_DECISIONS, TEXTS
from streams.kafka.clients import Fetches, honest, stop

TOPICS: Final = (DECISIONS, SITE_DECISIONS, TEXTS, DEAD_LETTERS)
KEPT_FOR_EVER: Final = frozenset({DECISIONS.name, SITE_DECISIONS.name})
"""What can't be made up for when it is gone."""
FETCH_BYTES_MAX: Final = 2 * 1024 * 1024
REQUEST_MILLISECONDS_MAX: Final = 10_000
END_KNOWN_SECONDS: Final = 3.0
"""A broker that has just come back may take a moment to know how far its partitions go."""
FETCH_WAIT_MILLISECONDS: Final = 30
"""A fetch under way leaves out the partitions whose last records were still to be taken when it was sent, and nothing
of them is read before it ends: so it must not wait long."""
FETCH_BYTES_MIN: Final = 32 * 1024
"""Else a fetch ends with the first transaction that is committed, and there are hundreds a second, nearly empty."""


ADVICE: Final = (
    "check BERTH_KAFKA, BERTH_PARTITIONS and BERTH_DATABASE_URL; if this Kafka is the right one, make the tables anew "
    "from it: berth projections rebuild"
)
"""What to do when the log doesn't fit."""


class LogDoesNotFit(Exception):  # noqa: N818 - it reads as what it is
    """The topics don't hold what the checkpoints say was read of them, or what is to be read next."""


class Log:
    """A consumer of every partition of the projected topics. Methods raise KafkaError when Kafka doesn't answer."""

    def __init__(self, bootstrap: str, partitions: int) -> None:
        self.positions: dict[Position, int] = {}
        """Where the next batch begins, by partition."""
        self.wanted: list[Position] = [(topic.name, number) for topic in TOPICS for number in range(partitions)]
        self._all = [TopicPartition(*position) for position in self.wanted]
        self._consumer = AIOKafkaConsumer(
            bootstrap_servers=bootstrap,
            isolation_level="read_committed",
            enable_auto_commit=False,
            auto_offset_reset="none",
            max_partition_fetch_bytes=FETCH_BYTES_MAX,
            request_timeout_ms=REQUEST_MILLISECONDS_MAX,
            fetch_max_wait_ms=FETCH_WAIT_MILLISECONDS,
            fetch_min_bytes=FETCH_BYTES_MIN,
            retry_backoff_ms=50,
        )
        self._fetches = Fetches(self._consumer)

    @honest
    async def __aenter__(self) -> Self:
        try:
            await self._consumer.start()
        except BaseException:
            await stop(self._consumer)
            raise
        self._consumer.assign(self._all)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await stop(self._consumer)

    @honest
    async def beginnings(self) -> dict[Position, int]:
        """The first offset that each partition still holds."""
        return _by_position(await self._consumer.beginning_offsets(self._all))

    @honest
    async def ends(self) -> dict[Position, int]:
        """The end of what is committed, by partition: every record before it can be read."""
        return _by_position(await self._consumer.end_offsets(self._all))

    async def ends_beside(self, positions: Mapping[Position, int]) -> dict[Position, int]:
        """The ends, which may be before these positions only if the topic is: a broker is given time to know."""
        ends = await self.ends()
        deadline = time.monotonic() + END_KNOWN_SECONDS
        while any(positions[position] > ends[position] for position in self.wanted) and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
            ends = await self.ends()
        return ends

    async def require(self, positions: Mapping[Position, int]) -> None:
        """Raise LogDoesNotFit unless the log reaches to each of these positions."""
        ends = await self.ends_beside(positions)
        for topic, number in self.wanted:
            offset, end = positions[topic, number], ends[topic, number]
            if offset > end:
                raise LogDoesNotFit(
                    f"Partition {number} of {topic} ends at offset {end}, and {offset} records of it were projected "
                    "before: the topic was made anew, or this is the Kafka of another deployment."
                )

    async def seek(self, positions: Mapping[Position, int]) -> None:
        """Go on from these positions. Raises LogDoesNotFit."""
        beginnings = await self.beginnings()
        await self.require(positions)
        for position in self.wanted:
            topic, number = position
            offset, beginning = positions[position], beginnings[position]
            if offset < beginning and topic in KEPT_FOR_EVER:
                raise LogDoesNotFit(
                    f"Partition {number} of {topic} begins at offset {beginning}, and {offset} is to be projected "
                    "next: decisions were deleted, and without them the projections can't be built."
                )
            # Texts and dead letters end with their retention: those that nobody projected in time are gone.
            self._consumer.seek(TopicPartition(topic, number), max(offset, beginning))
        self.positions = {position: positions[position] for position in self.wanted}

    async def take(
        self, records_max: int, wait_seconds: float, until: Mapping[Position, int] | None = None
    ) -> Batch | None:
        """The next records, at most so many, as soon as there are any; None when none came in time.

        ``until``: leave out what is at these offsets or after them; then take no more of it before the next ``seek``.
        """
        # Who follows the log doesn't know whether more is there, and is told elsewhere that Kafka is away.
        getmany = honest(self._consumer.getmany) if until is None else self._fetches.getmany
        try:
            fetched = await getmany(timeout_ms=int(wait_seconds * 1000), max_records=records_max)
        except OffsetOutOfRangeError as error:
            raise LogDoesNotFit(f"a topic no longer holds the offset to be read next: {error}") from error
        records: list[LogRecord] = []
        ends: dict[Position, int] = {}
        for (topic, partition), messages in fetched.items():
            end = None if until is None else until[topic, partition]
            kept = [message for message in messages if end is None or message.offset < end]
            records.extend(
                LogRecord(
                    topic,
                    partition,
                    message.offset,
                    message.key,
                    message.value,
                    message.headers,
                    message.timestamp * 1000,
                )
                for message in kept
            )
            if kept:
                ends[topic, partition] = kept[-1].offset + 1
        if not records:
            return None
        begins = {position: self.positions[position] for position in ends}
        self.positions.update(ends)
        return Batch(records, begins, ends)

    async def remaining(self, ends: Mapping[Position, int]) -> int:
        """How many offsets lie between what was read and these ends. Holes that were passed don't count."""
        left = 0
        for (topic, number), end in ends.items():
            left += max(0, end - await self._consumer.position(TopicPartition(topic, number)))
        return left


def _by_position(offsets: Mapping[TopicPartition, int]) -> dict[Position, int]:
    return {(topic, partition): offset for (topic, partition), offset in offsets.items()}
