"""One partition of ``berth recover``: read what Kafka has, rebuild the rows, compare them with those that are stored.

Only as much of the inputs is read as is needed: of berth.statuses from when the oldest running attempt began, of
berth.triggers the records of live triggers, of the messages between agents and sites what came after the last one that
was decided. Memory holds the rows of one partition, once as stored and once as rebuilt.
"""

import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from aiokafka import ConsumerRecord, TopicPartition

from streams import (
    CLAIMS,
    DEAD_LETTERS,
    DECISIONS,
    DISPATCHES,
    INPUT_TOPICS,
    SIGNALS,
    SITE_DECISIONS,
    STATUSES,
    TEXTS,
    TRIGGERS,
    codec,
)
from streams.audit.logged import read
from streams.audit.recover import Ahead, Lost, Rebuilt, ahead, changes, stored_texts
from streams.codec import Record
from streams.kafka.clients import reading
from streams.kafka.commit import Writer
from streams.kafka.history import history
from streams.kafka.recovery import replace_rows
from streams.kafka.restore import load_rows, require_no_open_transaction
from streams.partition import Partition
from streams.rules.limits import Defaults
from streams.settings import Settings

LOGS: Final = (DECISIONS.name, SITE_DECISIONS.name)
_READ: Final = (*(topic.name for topic in INPUT_TOPICS), *LOGS, DEAD_LETTERS.name, DISPATCHES.name, TEXTS.name)
CLOCKS_APART_SECONDS: Final = 60
"""A record's time is its writer's: looked for from so much earlier."""

Bounds = Mapping[str, tuple[int, int]]
"""Beginning and end by topic."""


@dataclass(slots=True)
class Recovered:
    """What was found in a partition, and whether it was written. Counts of rows by kind."""

    number: int
    decisions: int = 0
    agents: int = 0
    sites: int = 0
    rows: int = 0
    missing: Counter[str] = field(default_factory=Counter)
    different: Counter[str] = field(default_factory=Counter)
    needless: Counter[str] = field(default_factory=Counter)
    lost: list[Lost] = field(default_factory=list)
    ahead: list[Ahead] = field(default_factory=list)
    looked_at_anew: list[str] = field(default_factory=list)
    """Deciders whose left-over work isn't known, as "agent x"."""
    notes: list[str] = field(default_factory=list)
    is_written: bool = False

    @property
    def is_as_stored(self) -> bool:
        return not (self.missing or self.different or self.needless or self.lost)


async def recover_partition(
    settings: Settings, number: int, write: bool, accept_cut_log: bool, on_read: Callable[[int], None]
) -> Recovered:
    """Rebuild partition ``number``; ``write``: and put the rows in place, unless a stored one is ahead of the log.

    Raises Unreadable, LogDamaged, TransactionLeftOpen, KafkaError or TimeoutError. What was written before an error,
    the next call finds.
    """
    bootstrap = settings.kafka_addresses()
    writer = Writer(number, bootstrap)
    try:
        if write:
            await writer.fence()
            await require_no_open_transaction(number, bootstrap)
        source = _Source(bootstrap, number, settings.partitions, await _bounds(bootstrap, number), on_read)
        stored = await source.stored_rows()
        rebuilt = await source.rebuilt(stored)
        rows = rebuilt.rows()
        wanted = changes(stored, rows, source.inputs | rebuilt_ends(rebuilt, source.inputs))
        found = _found(rebuilt, rows, stored, wanted, source.notes)
        if write and not found.is_as_stored and (accept_cut_log or not found.ahead):
            defaults = Defaults(settings.default_limit, settings.worker_pool_capacity)
            lost = [(one.agent_id, one.trigger_id) for one in found.lost]
            await replace_rows(writer, stored, wanted, Partition(number, settings.partitions, defaults), lost)
            found.is_written = True
        return found
    finally:
        await writer.close()


def rebuilt_ends(rebuilt: Rebuilt, inputs: Bounds) -> dict[str, tuple[int, int]]:
    """Of the topics that hold a record which is known not to have been handled: that is how far they can be read."""
    return {topic: (inputs[topic][0], offset) for topic, offset in rebuilt.unhandled.items()}


async def records_of_logs(bootstrap: str, numbers: list[int]) -> int:
    """About how many decisions there are to read, since markers of transactions count as well."""
    async with reading(bootstrap, "read_committed") as consumer:
        places = [TopicPartition(topic, number) for topic in LOGS for number in numbers]
        return sum((await consumer.end_offsets(places)).values())


def _found(
    rebuilt: Rebuilt,
    rows: Mapping[bytes, bytes],
    stored: Mapping[bytes, bytes],
    wanted: Mapping[bytes, bytes | None],
    notes: list[str],
) -> Recovered:
    found = Recovered(rebuilt.number, rebuilt.decisions, len(rebuilt.agents), len(rebuilt.sites), len(rows))
    for key, value in wanted.items():
        counts = found.needless if value is None else found.different if key in stored else found.missing
        counts[_kind_of(key)] += 1
    found.lost, found.ahead, found.notes = rebuilt.lost(), ahead(stored, rebuilt), notes
    if found.needless["partition"]:
        found.notes.append(
            "nothing was ever decided here, and inputs no longer reach to where they were read: they are handled from "
            "their beginning"
        )
    found.looked_at_anew = [f"{decider.kind} {decider.id}" for decider in rebuilt.looked_at_anew]
    return found


def _kind_of(key: bytes) -> str:
    try:
        return str(codec.read_key(key)[0])
    except (ValueError, IndexError, TypeError):
        return "unreadable"


async def _bounds(bootstrap: str, number: int) -> dict[str, tuple[int, int]]:
    async with reading(bootstrap, "read_committed") as consumer:
        places = [TopicPartition(topic, number) for topic in _READ]
        beginnings, ends = await consumer.beginning_offsets(places), await consumer.end_offsets(places)
        return {place.topic: (beginnings[place], ends[place]) for place in places}


class _Source:
    """What Kafka has of one partition."""

    def __init__(
        self, bootstrap: str, number: int, partitions: int, bounds: Bounds, on_read: Callable[[int], None]
    ) -> None:
        self.notes: list[str] = []
        self.inputs = {topic.name: bounds[topic.name] for topic in INPUT_TOPICS}
        self._bootstrap, self._number, self._partitions = bootstrap, number, partitions
        self._bounds, self._on_read = bounds, on_read

    async def stored_rows(self) -> dict[bytes, bytes]:
        """The changelog as it stands."""
        rows: dict[bytes, bytes] = {}

        def load(key: bytes, value: bytes | None) -> None:
            if value is None:
                rows.pop(key, None)
            else:
                rows[key] = value

        async with reading(self._bootstrap, "read_committed") as consumer:
            await load_rows(consumer, self._number, load)
        return rows

    async def rebuilt(self, stored: Mapping[bytes, bytes]) -> Rebuilt:
        """The partition, from everything that is there."""
        rebuilt = Rebuilt(self._number, self._partitions)
        for topic in LOGS:
            async for record in self._records(topic):
                rebuilt.take(read(topic, self._number, record.offset, record.value))
                self._on_read(1)
        if rebuilt.is_incomplete:
            for topic in LOGS:
                async for record in self._records(topic):
                    rebuilt.take_again(read(topic, self._number, record.offset, record.value))
        await self._find_positions(rebuilt)
        await self._find_signs_of_life(rebuilt)
        await self._find_texts(rebuilt, stored)
        return rebuilt

    async def _records(self, topic: str, start: int | None = None, end: int | None = None) -> AsyncIterator[Record]:
        beginning, _ = self._bounds[topic]
        async for records in history(self._bootstrap, topic, self._number, max(beginning, start or 0)):
            for record in records:
                if end is not None and record.offset >= end:
                    return
                yield _as_input(topic, record)

    async def _offset_at(self, topic: str, instant: int) -> int:
        """The first offset that was written after an instant, but for what clocks may differ."""
        place = TopicPartition(topic, self._number)
        milliseconds = max(0, instant // 1000 - CLOCKS_APART_SECONDS * 1000)
        async with reading(self._bootstrap, "read_committed") as consumer:
            found = (await consumer.offsets_for_times({place: milliseconds}))[place]
        return self._bounds[topic][1] if found is None else int(found.offset)

    async def _find_positions(self, rebuilt: Rebuilt) -> None:
        for topic in (CLAIMS.name, SIGNALS.name):
            since = rebuilt.seek_message(topic)
            if since is None:
                continue
            for start in (await self._offset_at(topic, since), None):
                async for record in self._records(topic, start):
                    rebuilt.take_message(record)
                if topic in rebuilt.positions:
                    break
            else:
                rebuilt.handled(topic, self._bounds[topic][0] - 1)
                self.notes.append(
                    f"{topic}: the last message that was decided on is not there any more; what is there is taken to "
                    f"be newer, and handled from offset {self._bounds[topic][0]} on"
                )
        async for record in self._records(DEAD_LETTERS.name):
            rebuilt.take_dead_letter(dict(record.headers))
        for topic, (beginning, end) in self.inputs.items():
            self._fit_position(rebuilt, topic, beginning, end)

    def _fit_position(self, rebuilt: Rebuilt, topic: str, beginning: int, end: int) -> None:
        position = rebuilt.positions.get(topic)
        if position is None and rebuilt.decisions and end > beginning:
            self.notes.append(f"{topic}: nothing of it was ever decided; it is handled from offset {beginning} on")
        elif position is not None and position < beginning:
            self.notes.append(
                f"{topic}: it was handled up to offset {position} and begins at {beginning} now; what was between is "
                "gone unhandled, if it was more than a marker of Kafka's"
            )
            rebuilt.positions[topic] = beginning
        elif position is not None and position > end:
            self.notes.append(
                f"{topic}: it was handled up to offset {position} and ends at {end} now: it was made anew, and is "
                f"handled from offset {beginning} on"
            )
            rebuilt.positions[topic] = beginning

    async def _find_signs_of_life(self, rebuilt: Rebuilt) -> None:
        since, position = rebuilt.running_since, rebuilt.positions.get(STATUSES.name)
        if since is None or position is None:
            return
        async for record in self._records(STATUSES.name, await self._offset_at(STATUSES.name, since), position):
            rebuilt.take_status(record)

    async def _find_texts(self, rebuilt: Rebuilt, stored: Mapping[bytes, bytes]) -> None:
        """From the rows that are left, then the triggers, the dispatches of earlier attempts, and the texts."""
        for agent_id, trigger_id, texts in stored_texts(stored):
            rebuilt.offer_value(agent_id, trigger_id, texts)
        offsets = [offset for offset in rebuilt.missing_texts().values() if offset is not None]
        if offsets:
            async for record in self._records(TRIGGERS.name, min(offsets), max(offsets) + 1):
                rebuilt.offer_trigger(record)
        for topic in (DISPATCHES.name, TEXTS.name):
            if rebuilt.missing_texts():
                async for record in self._records(topic):
                    _offer(rebuilt, topic, record.value or b"{}")


def _offer(rebuilt: Rebuilt, topic: str, value: bytes) -> None:
    content = json.loads(value)
    about = content.get("agent_id", ""), content.get("trigger_id", "")
    if topic == DISPATCHES.name:
        rebuilt.offer_value(*about, content)
    elif content.get("kind") == "message":
        rebuilt.offer_value(*about, {"message": content.get("text")})


def _as_input(topic: str, record: ConsumerRecord) -> Record:
    return Record(topic, record.partition, record.offset, record.key, record.value, record.headers, record.timestamp)
