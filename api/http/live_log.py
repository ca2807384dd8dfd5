"""Parts of the log of decisions, for those who follow it live: positions in it, the newest records, and older ones.

A position is a vector: the next offset in every partition of both logs, of agents and of sites.
"""

import base64
import binascii
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from fastapi.sse import format_sse_event

from api.http.patience import stop
from streams import DECISIONS, SITE_DECISIONS

RECENT_RECORDS_MAX: Final = 10_000
RECENT_BYTES_MAX: Final = 8 * 1024 * 1024
SLICE_RECORDS_MAX: Final = 5_000
SLICE_BYTES_MAX: Final = 1024 * 1024
FETCH_RECORDS_MAX: Final = 500

LOGS: Final = (DECISIONS.name, SITE_DECISIONS.name)


class LogVector:
    """The next offset in every partition of both logs, and its form as an id, which is opaque to clients."""

    __slots__ = ("_texts", "offsets")

    def __init__(self, offsets: Iterable[int]) -> None:
        self.offsets = list(offsets)
        self._texts = [format(offset, "x") for offset in self.offsets]

    @classmethod
    def of(cls, read_to: Mapping[TopicPartition, int], partitions: int) -> "LogVector":
        return cls(read_to.get(TopicPartition(topic, number), 0) for topic in LOGS for number in range(partitions))

    @classmethod
    def read(cls, token: str, partitions: int) -> "LogVector":
        """What ``token`` gave. ValueError if it is none of ours."""
        try:
            text = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True).decode("ascii")
            version, _, texts = text.partition(":")
            offsets = [int(offset, 16) for offset in texts.split(",")]
        except (binascii.Error, UnicodeError, ValueError):
            raise ValueError("is no id of an event") from None
        vector = cls(offsets)
        fits = len(offsets) == len(LOGS) * partitions and min(offsets) >= 0
        if version != "1" or not fits or vector.token() != token:
            raise ValueError("is no id of an event of this deployment")
        return vector

    def move(self, index: int, offset: int) -> None:
        self.offsets[index] = offset
        self._texts[index] = format(offset, "x")

    def copy(self) -> "LogVector":
        return LogVector(self.offsets)

    def covers(self, other: "LogVector") -> bool:
        """Whether everything before ``other`` is before this."""
        return all(here >= there for here, there in zip(self.offsets, other.offsets, strict=True))

    def token(self) -> str:
        return base64.urlsafe_b64encode(b"1:" + ",".join(self._texts).encode()).decode().rstrip("=")


class Entry(NamedTuple):
    """A record of the log. ``part``: the index of its partition in vectors; ``agent_id``: None for one of a site."""

    part: int
    offset: int
    agent_id: str | None
    value: str

    def encoded(self, id: str) -> bytes:
        name = "decision" if self.agent_id is not None else "site_decision"
        return format_sse_event(event=name, data_str=self.value, id=id)


def entry_of(index: int, record: ConsumerRecord) -> Entry:
    agent_id = record.key.decode() if record.topic == DECISIONS.name else None
    return Entry(index, record.offset, agent_id, record.value.decode())


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a client gets: the decisions of these agents; None: of all agents and sites."""

    agents: frozenset[str] | None

    def has(self, entry: Entry) -> bool:
        return self.agents is None or entry.agent_id in self.agents


class Recent:
    """The newest records, bounded in number and bytes."""

    def __init__(self, begins: LogVector) -> None:
        self._entries: deque[Entry] = deque()
        self._bytes = 0
        self._begins = begins
        """Everything from here on is kept."""

    def append(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._bytes += len(entry.value)
        while len(self._entries) > RECENT_RECORDS_MAX or self._bytes > RECENT_BYTES_MAX:
            oldest = self._entries.popleft()
            self._bytes -= len(oldest.value)
            self._begins.move(oldest.part, oldest.offset + 1)

    def since(self, where: LogVector) -> list[Entry] | None:
        """What came after ``where``, in order; None if not all of it is kept."""
        if not where.covers(self._begins):
            return None
        return [entry for entry in self._entries if entry.offset >= where.offsets[entry.part]]


class Slice:
    """Part of the log between ``where`` and ``target``; reading it moves ``where``."""

    def __init__(self, bootstrap: str, partitions: int, wanted: Wanted, where: LogVector, target: LogVector) -> None:
        self.events: list[bytes] = []
        self.records_count = 0
        self._bytes = 0
        self._bootstrap = bootstrap
        self._wanted = wanted
        self._where = where
        self._target = target
        sources = (TopicPartition(topic, number) for topic in LOGS for number in range(partitions))
        self._left = {source: index for index, source in enumerate(sources) if not self._is_reached(index)}

    def _is_reached(self, index: int) -> bool:
        return self._where.offsets[index] >= self._target.offsets[index]

    async def read(self) -> None:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self._bootstrap,
            isolation_level="read_committed",
            enable_auto_commit=False,
            auto_offset_reset="none",
            fetch_max_wait_ms=250,
            max_partition_fetch_bytes=SLICE_BYTES_MAX,
        )
        try:
            await consumer.start()
            consumer.assign(list(self._left))
            for source, index in self._left.items():
                consumer.seek(source, self._where.offsets[index])
            while self._left and self.records_count < SLICE_RECORDS_MAX and self._bytes < SLICE_BYTES_MAX:
                fetched = await consumer.getmany(*self._left, timeout_ms=250, max_records=FETCH_RECORDS_MAX)
                for source, index in list(self._left.items()):
                    self._take(index, fetched.get(source, ()))
                    read_to = min(await consumer.position(source), self._target.offsets[index])
                    self._where.move(index, max(read_to, self._where.offsets[index]))  # over markers
                    if self._is_reached(index):
                        del self._left[source]
        finally:
            await stop(consumer)

    def _take(self, index: int, records: Iterable[ConsumerRecord]) -> None:
        for record in records:
            if record.offset >= self._target.offsets[index]:
                return
            self._where.move(index, record.offset + 1)
            self.records_count += 1
            entry = entry_of(index, record)
            if self._wanted.has(entry):
                self.events.append(entry.encoded(self._where.token()))
                self._bytes += len(self.events[-1])
