"""From the changelog to a ``Partition``, and where its inputs go on.

The changelog partition is read from its beginning to the end that it had after fencing, by position and not by the
last record: that record may be a transaction marker, part of an aborted transaction, or compacted away, and then
nobody would ever see it. ``end_offsets`` of a read_committed consumer is the last stable offset; after fencing no
transaction of this partition is open, so nothing can be missing before it. Kafka 4.3.0 to 4.4.0 break this promise
(KAFKA-20734: when a broker ends while a transaction does, and no other has a copy, the transaction counts as ended, but
its records stay held back until the same writer ends another, and then come to light). So it is looked at.

Refused, because going on would lose or repeat what was decided: a transaction that stays open although its writer is
fenced, rows that are gone while decisions exist, rows that can't be read, decisions that are gone while rows know of
them, and a position outside of what its topic still holds.

That decisions are there is told by their number alone, which costs no reading: a topic that was made anew, emptied or
cut by more than the markers of its transactions holds fewer than the rows know of. Whether they are the right ones is
for ``berth verify`` and ``berth recover``, which read all of them.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from aiokafka import AIOKafkaConsumer, TopicPartition

from streams import CHANGELOG, DEAD_LETTERS, DECISIONS, DISPATCHES, INPUT_TOPICS, SITE_DECISIONS, TEXTS, codec
from streams.kafka import edge
from streams.kafka.clients import Fetches, honest, reading
from streams.partition import Partition, RowsMissing
from streams.settings import Settings

LOAD_RECORDS_MAX: Final = 2_000
"""Rows loaded before other tasks get their turn."""
POLL_MILLISECONDS: Final = 20

OWN_TOPICS: Final = (CHANGELOG, DECISIONS, SITE_DECISIONS, DISPATCHES, TEXTS, DEAD_LETTERS)
"""Partition n of these is written by nobody but the owner of partition n."""
OPEN_TRANSACTION_SECONDS_MAX: Final = 5.0
"""A broker that has only just become leader may learn late that the last transaction has ended."""
OPEN_TRANSACTION_POLL_SECONDS: Final = 0.1

MakePartition: TypeAlias = Callable[[int], Partition]
"""From its number to a partition without rows."""


class CannotTakeOver(Exception):  # noqa: N818 - it reads as what it is
    """The partition can't be owned as it is stored; the text says what was found, what was kept and what to do."""


class TransactionLeftOpen(CannotTakeOver):
    """The partition's writer is fenced, and yet records of it are held back. ``happened``, ``advice``: sentences."""

    def __init__(self, number: int, held_back: dict[str, tuple[int, int]]) -> None:
        places = ", ".join(f"{topic} {start} to {end - 1}" for topic, (start, end) in sorted(held_back.items()))
        self.happened = (
            f"A transaction of partition {number} was never ended by Kafka: offsets {places} can't be read, and would "
            "come to light with the next transaction. What they hold would be decided twice."
        )
        self.advice = (
            "End it by hand and start again; how, and which versions of Kafka leave such ones behind, is in "
            'docs/operate.md, "A transaction that Kafka left open".'
        )
        super().__init__(f"{self.happened} Nothing was written. {self.advice}")


@dataclass(frozen=True, slots=True)
class Restored:
    """A restored partition and what was found while restoring it; offsets are of its changelog and input topics."""

    partition: Partition
    changelog_end: int
    rows_count: int
    take_over_ends: dict[str, int]


@honest
async def restore(number: int, bootstrap: str, make_partition: MakePartition, settings: Settings) -> Restored:
    """Restore partition ``number``, which is fenced, with a position for every input topic.

    Raises CannotTakeOver, or KafkaError.
    """
    inputs = [TopicPartition(topic.name, number) for topic in INPUT_TOPICS]
    logs = [TopicPartition(topic.name, number) for topic in (DECISIONS, SITE_DECISIONS)]
    partition = make_partition(number)
    async with reading(bootstrap, "read_uncommitted") as written, reading(bootstrap, "read_committed") as committed:
        await _wait_for_ends(number, written, committed)
        # Up to the high watermark, not the last stable offset: a record behind somebody's open transaction was there.
        ends = await written.end_offsets([*inputs, *logs])
        beginnings = await written.beginning_offsets([*inputs, *logs])
        changelog_end, rows_count = await load_rows(committed, number, partition.load)
    decisions_exist = partition.is_empty and any([await _was_written(bootstrap, log) for log in logs])
    try:
        partition.loaded(edge.now_us(), decisions_exist)
    except RowsMissing as missing:
        raise CannotTakeOver(
            f"Partition {number} has decisions in {DECISIONS.name} or {SITE_DECISIONS.name} but no rows in "
            f"{CHANGELOG.name}, or some rows without its own: its state is lost, and starting anew would dispatch "
            "everything a second time. Nothing was written. Rebuild the rows from the decisions: berth recover."
        ) from missing
    except codec.UnreadableRow as unreadable:
        raise CannotTakeOver(
            f"Partition {number} of {CHANGELOG.name} holds a row that can't be read, with the key {unreadable}. "
            "Nothing was written. Rebuild the rows from the decisions: stop every worker, then berth recover; or start "
            "workers of the version that wrote it, if that is newer than this one."
        ) from unreadable
    for log in logs:
        _check_decisions(log, partition.known_decisions.get(log.topic, 0), ends[log] - beginnings[log])
    was_empty = partition.is_empty
    for topic_partition in inputs:
        topic, beginning, end = topic_partition.topic, beginnings[topic_partition], ends[topic_partition]
        position = partition.positions.get(topic)
        if position is None:
            partition.start_at(topic, end if was_empty and settings.start_from == "latest" else beginning)
        elif not beginning <= position <= end:
            raise CannotTakeOver(
                f"Partition {number} has read {topic} up to offset {position}, but partition {number} of that topic "
                f"holds offsets {beginning} to {end}: {_what_is_wrong(position, beginning)}. Nothing was written. "
                f"Check whether {topic} was made anew or its retention is shorter than the time without a worker; "
                "bring back its records, or restore topic and changelog from the same backup, or give up what is gone: "
                "berth recover; then start again."
            )
    return Restored(partition, changelog_end, rows_count, {entry.topic: ends[entry] for entry in inputs})


async def require_no_open_transaction(number: int, bootstrap: str) -> None:
    """Wait until nothing that the fenced writer of partition ``number`` wrote is held back by a transaction.

    Raises TransactionLeftOpen after OPEN_TRANSACTION_SECONDS_MAX, or KafkaError.
    """
    async with reading(bootstrap, "read_uncommitted") as written, reading(bootstrap, "read_committed") as committed:
        await _wait_for_ends(number, written, committed)


async def _wait_for_ends(number: int, written: AIOKafkaConsumer, committed: AIOKafkaConsumer) -> None:
    """Until nothing of OWN_TOPICS is held back; ``written`` reads uncommitted records too.

    Or what was held back comes to light: then another owner is writing, and fencing sees to that.
    """
    places = [TopicPartition(topic.name, number) for topic in OWN_TOPICS]
    deadline = edge.monotonic_seconds() + OPEN_TRANSACTION_SECONDS_MAX
    first = stable = await committed.end_offsets(places)
    while True:
        ends = await written.end_offsets(places)
        held_back = {
            place.topic: (stable[place], ends[place]) for place in places if first[place] == stable[place] < ends[place]
        }
        if not held_back:
            return
        if edge.monotonic_seconds() > deadline:
            raise TransactionLeftOpen(number, held_back)
        await asyncio.sleep(OPEN_TRANSACTION_POLL_SECONDS)
        stable = await committed.end_offsets(places)


def _check_decisions(log: TopicPartition, known: int, held_max: int) -> None:
    """``known`` to the rows, and the most that the topic can hold. CannotTakeOver if that is less."""
    if held_max < known:
        raise CannotTakeOver(
            f"Partition {log.partition} has rows that know of {known} decisions in {log.topic}, but partition "
            f"{log.partition} of that topic holds {held_max or 'none'}: it was made anew, emptied or cut, and what "
            "would be decided now could not be proved, nor its rows be made anew. Nothing was written. Restore it and "
            f"{CHANGELOG.name} from the same backup; or, if what is there is all there is, end what runs at the "
            "runners, and go back to it: berth recover --yes --accept-cut-log; then start again."
        )


def _what_is_wrong(position: int, beginning: int) -> str:
    if position < beginning:
        return f"the records from {position} to {beginning - 1} were deleted before they were handled"
    return "records that were handled are gone, and new ones would be taken for them"


async def load_rows(
    consumer: AIOKafkaConsumer, number: int, load: Callable[[bytes, bytes | None], None]
) -> tuple[int, int]:
    """Give every record of changelog partition ``number`` to ``load``; where that partition ends, and their count."""
    changelog = TopicPartition(CHANGELOG.name, number)
    end = (await consumer.end_offsets([changelog]))[changelog]
    beginning = (await consumer.beginning_offsets([changelog]))[changelog]
    consumer.assign([changelog])
    consumer.seek(changelog, beginning)
    count, fetches = 0, Fetches(consumer)
    while await consumer.position(changelog) < end:
        fetched = await fetches.getmany(changelog, timeout_ms=POLL_MILLISECONDS, max_records=LOAD_RECORDS_MAX)
        for message in fetched.get(changelog, ()):
            load(message.key, message.value)
            count += 1
    return end, count


async def _was_written(bootstrap: str, topic_partition: TopicPartition) -> bool:
    """Whether any record was ever committed there: also one that was deleted since, but not one that was aborted."""
    async with reading(bootstrap, "read_committed") as consumer:
        beginning = (await consumer.beginning_offsets([topic_partition]))[topic_partition]
        end = (await consumer.end_offsets([topic_partition]))[topic_partition]
        if beginning > 0:
            return True
        consumer.assign([topic_partition])
        consumer.seek(topic_partition, beginning)
        fetches = Fetches(consumer)
        while await consumer.position(topic_partition) < end:
            if await fetches.getmany(topic_partition, timeout_ms=POLL_MILLISECONDS, max_records=1):
                return True
    return False
