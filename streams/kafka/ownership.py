"""One owned partition, from fencing to release: fence, restore, read on, group commit, let go.

The order is the whole point:

1. ``fence`` makes this process the only writer. It runs inside the group's assignment, where only short work is
   allowed; everything else runs in ``run``, a task of its own per partition.
2. Restore (``restore.py``), then read every input from the position in the partition's own row (``intake.py``). The
   group's offsets are never used.
3. Group commit: while one transaction is under way records gather; then everything that is there (bounded) is decided
   and committed with its positions (``commit.py``). With few records there is no pause, so latency is that of one
   transaction. While records gather faster than they are handled, a pause of up to
   ``commit_pause_milliseconds_max`` makes transactions larger, because their number is the cost.
4. No transaction begins between a revocation and the next assignment, nor after release. One that is under way is
   waited for.

Timers fire only when everything that was in the input at take-over is handled: a `finished` that waited through an
outage must win against the lease that ran out meanwhile.

When the rules fail (a bug), the state in memory is worthless. It is thrown away and restored, and the partition goes on
with one record or one timer a transaction, until it is past what failed. When a record fails all alone, the partition
stands still, keeps its writer, shows where it stands, and goes on when ``skip_record`` has moved its position. When a
timer fails all alone, its agent is parked. A site can't be parked, because its claims must be answered and its folders
given on: when what an earlier step of it left over fails all alone, the partition stands still until workers come in
which the bug is mended. Nothing is ever skipped by itself.

Everything else is raised out of ``run``: a commit that failed, an input that doesn't follow, rows or positions that
can't be right, Kafka being away. The membership decides whether that ends the process or only this ownership. Whoever
owns the partition next restores what was committed, and fencing keeps this one from writing.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypedDict

import structlog
from aiokafka import TopicPartition
from aiokafka.errors import KafkaError
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_fixed

from streams import CHANGELOG, DEAD_LETTERS, INPUT_TOPICS, codec
from streams.codec import Record
from streams.kafka import edge
from streams.kafka.clients import reading
from streams.kafka.commit import RecordTooLarge, Writer
from streams.kafka.intake import Fetched, Intake
from streams.kafka.metrics import PRESENT, RESTORE_SECONDS, OfPartition
from streams.kafka.restore import (
    POLL_MILLISECONDS,
    MakePartition,
    Restored,
    load_rows,
    require_no_open_transaction,
    restore,
)
from streams.partition import Changes, Partition, RuleFailure, dead_letter
from streams.rules.limits import CLOCK_AHEAD_SECONDS_MAX
from streams.settings import Settings

GROUP_RECORDS_MAX: Final = 2_000
GROUP_SECONDS_MAX: Final = 0.2
"""A group ends after this much deciding, so that a commit is never far away."""
SLICE_RECORDS: Final = 50
"""Deciding gives other partitions a turn this often, and after this many bytes."""
SLICE_BYTES_MAX: Final = 1024 * 1024
TIMERS_MAX: Final = 200
IN_FLIGHT_WAIT_SECONDS: Final = 2.0
STANDSTILL_POLL_SECONDS: Final = 0.5
RESTORE_RETRY_SECONDS: Final = 30.0
DEAD_LETTERS_LOGGED_MAX: Final = 5
"""Of one transaction, one by one."""
PAUSE_FIRST_SECONDS: Final = 0.005
QUIET_SECONDS: Final = 5.0
"""So long after the last transaction, positions behind markers are written of their own."""
GATHERED_RECORDS_MIN: Final = 16
"""Fewer waiting records than this are no sign of falling behind."""

log = structlog.get_logger()

State = Literal["restoring", "running", "stopped", "clock_behind"]


class StoppedAt(TypedDict):
    """Where a partition stands still: at a record, at what is left over of a site, or at an agent that can't be parked.

    What it isn't is None. ``advice``: what to do, a sentence for people.
    """

    topic: str | None
    partition: int
    offset: int | None
    site: str | None
    agent_id: str | None
    error: str
    advice: str


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all ownerships of a worker share.

    ``stable`` is cleared between a revocation and the next assignment, and for good when the process must stop.
    """

    settings: Settings
    bootstrap: str
    make_partition: MakePartition
    deliver: Callable[[Fetched], Awaitable[None]]
    stable: asyncio.Event


class Ownership:
    """Partition ``number``, owned by this process. Use: ``fence``, then ``run`` as a task, at the end ``release``."""

    def __init__(self, number: int, surroundings: Surroundings) -> None:
        self.number = number
        self.state: State = "restoring"
        self.stopped_at: StoppedAt | None = None
        self.last_progress_at_us = edge.now_us()
        self.is_released = False
        self.is_broken = False
        """Set by the membership when ``run`` ended because Kafka was away."""
        self.has_committed = False
        self.intake: Intake | None = None
        self._surroundings = surroundings
        self._writer = Writer(number, surroundings.bootstrap)
        self._idle = asyncio.Event()
        self._idle.set()
        self._released = asyncio.Event()
        self._pause_seconds = 0.0
        self._suspect: RuleFailure | None = None
        """What failed in company; while it is set, everything is decided alone."""
        self._metrics = OfPartition(number)
        self._log = log.bind(partition=number)

    async def fence(self) -> None:
        """Become the only writer of the partition. Raises KafkaError or TimeoutError."""
        await self._writer.fence()

    async def run(self) -> None:
        """Own the partition until it is released. Raises what must stop the process."""
        to_park: RuleFailure | None = None
        parked: tuple[str, dict[str, int]] | None = None
        while not self.is_released:
            restored = await self._restore()
            try:
                if to_park is not None:
                    assert to_park.agent_id is not None
                    attempt = to_park.agent_id, dict(restored.partition.positions)
                    if parked == attempt:
                        await self._stand_still(to_park)  # it is parked, nothing came, and it fails all the same
                        return
                    parked = attempt
                    self._log.error("agent_parked", agent_id=to_park.agent_id, error=str(to_park))
                    restored.partition.park(to_park.agent_id, str(to_park), edge.now_us())
                    to_park = None
                await self._read_and_decide(restored)
            except RuleFailure as failure:
                self._metrics.rule_failures.inc()
                self._log.error("rules_failed", **_place(failure), error=str(failure))
                if self._suspect is None:
                    self._suspect = failure
                    continue
                self._suspect = None
                if failure.agent_id is not None:
                    to_park = failure
                else:
                    await self._stand_still(failure)

    def release(self) -> None:
        """No transaction begins from now on; ``close`` ends the rest."""
        self.is_released = True
        self._released.set()
        if self.intake is not None:
            self.intake.is_closed = True
            self.intake.arrived.set()

    async def in_flight_done(self) -> None:
        """Wait for the transaction under way, if any, at most IN_FLIGHT_WAIT_SECONDS."""
        try:
            async with asyncio.timeout(IN_FLIGHT_WAIT_SECONDS):
                await self._idle.wait()
        except TimeoutError:
            self._log.warning("transaction_still_under_way", seconds=IN_FLIGHT_WAIT_SECONDS)

    async def close(self) -> None:
        """Give the writer's connections back; after ``run`` has ended."""
        await self._writer.close()

    # -- taking over ----------------------------------------------------------------------------------------------

    async def _restore(self) -> Restored:
        self.state = "restoring"
        began = edge.monotonic_seconds()
        shared = self._surroundings
        attempts = AsyncRetrying(
            stop=stop_after_delay(RESTORE_RETRY_SECONDS),
            wait=wait_fixed(0.2),
            retry=retry_if_exception_type(KafkaError),
            reraise=True,
        )
        restored: Restored = await attempts(
            restore, self.number, shared.bootstrap, shared.make_partition, shared.settings
        )
        seconds = edge.monotonic_seconds() - began
        RESTORE_SECONDS.observe(seconds)
        self._log.info(
            "restored",
            rows=restored.rows_count,
            seconds=round(seconds, 3),
            positions=restored.partition.positions,
            until=restored.take_over_ends,
        )
        return restored

    async def _read_and_decide(self, restored: Restored) -> None:
        """Read the inputs and decide until released. Raises RuleFailure, and what must stop the process."""
        if self.is_released:
            return
        shared = self._surroundings
        starts = {topic: restored.partition.positions[topic] for topic in restored.take_over_ends}
        intake = self.intake = Intake(self.number, shared.bootstrap, starts, restored.take_over_ends, shared.deliver)
        reader = asyncio.create_task(intake.read(), name=f"intake-{self.number}")
        reader.add_done_callback(lambda _task: intake.arrived.set())
        PRESENT.begin(restored.partition)
        try:
            await self._decide(restored.partition, intake, reader)
        finally:
            PRESENT.end(restored.partition)
            intake.is_closed = True
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    # -- deciding -------------------------------------------------------------------------------------------------

    async def _decide(self, partition: Partition, intake: Intake, reader: asyncio.Task[None]) -> None:
        # Where reading starts is itself a change to commit, before anything is read from there, and before anybody is
        # told that what comes from now on is decided.
        is_first = True
        while True:
            if not is_first:
                await self._wait_for_work(partition, intake)
            is_first = False
            await self._surroundings.stable.wait()
            if reader.done() and not self.is_released:
                reader.result()
            if self.is_released:
                return
            behind_us = partition.clock_behind_us(edge.now_us())
            if behind_us > CLOCK_AHEAD_SECONDS_MAX * 1_000_000:
                await self._wait_for_clock(behind_us)
                continue
            if self._suspect is None:
                await self._group(partition, intake)
            else:
                await self._alone(partition, intake, self._suspect)
            self.state = "running"

    async def _group(self, partition: Partition, intake: Intake) -> None:
        """Decide what is there, bounded in records, bytes and time, and commit it."""
        handled: list[Record] = []
        began = edge.monotonic_seconds()
        while records := intake.take(SLICE_RECORDS, SLICE_BYTES_MAX):
            for record in records:
                partition.handle(record, edge.now_us())
            handled += records
            if len(handled) >= GROUP_RECORDS_MAX or edge.monotonic_seconds() - began > GROUP_SECONDS_MAX:
                break
            await asyncio.sleep(0)
        if intake.has_caught_up():
            partition.fire_timers(edge.now_us(), TIMERS_MAX)
        await self._commit(partition, handled)
        self._adapt_pause(len(handled), intake.waiting_count)

    async def _alone(self, partition: Partition, intake: Intake, suspect: RuleFailure) -> None:
        """Decide one record and then one timer, each in a transaction of its own, until past what failed."""
        for record in intake.take(1, SLICE_BYTES_MAX):
            partition.handle(record, edge.now_us())
            await self._commit(partition, [record])
        if intake.has_caught_up():
            partition.fire_timers(edge.now_us(), 1)
        await self._commit(partition, [])
        if suspect.record is not None:
            is_past = partition.positions[suspect.record.topic] > suspect.record.offset
        else:
            deadline_us = partition.next_deadline_us()
            is_past = intake.has_caught_up() and (deadline_us is None or deadline_us > edge.now_us())
        if is_past:
            self._suspect = None

    async def _commit(self, partition: Partition, handled: Sequence[Record]) -> None:
        self._pass_markers(partition)
        changes, tally = partition.take_changes(), partition.take_tally()
        if changes is None:
            return
        await self._surroundings.stable.wait()
        if self.is_released:
            return
        self._idle.clear()
        began = edge.monotonic_seconds()
        try:
            await self._writer.commit(changes, edge.now_us())
        except RecordTooLarge as error:
            raise RuleFailure(handled[-1] if handled else None, None, error) from error
        finally:
            self._idle.set()
        self.has_committed = True
        if self._metrics.committed(changes.outputs, len(handled), tally, edge.monotonic_seconds() - began):
            self._log_dead_letters(changes)
        self.last_progress_at_us = edge.now_us()

    def _pass_markers(self, partition: Partition) -> None:
        """Behind what is handled lie markers of transactions: they count as read, with what is written anyway.

        Or alone, after a while in which nothing was: when a topic's retention has deleted everything, it begins behind
        the last marker, and a position before that would look like records that were deleted unhandled.
        """
        assert self.intake is not None
        is_quiet = edge.now_us() - self.last_progress_at_us > QUIET_SECONDS * 1_000_000
        read = {topic.name: self.intake.position(topic.name) for topic in INPUT_TOPICS}
        partition.passed(read, write=is_quiet)

    def _log_dead_letters(self, changes: Changes) -> None:
        dead = [output for output in changes.outputs if output.topic == DEAD_LETTERS.name]
        for output in dead[:DEAD_LETTERS_LOGGED_MAX]:
            told = {name: value.decode(errors="replace") for name, value in output.headers}
            self._log.warning("dead_letter", topic=told["topic"], offset=int(told["offset"]), reason=told["reason"])
        if len(dead) > DEAD_LETTERS_LOGGED_MAX:
            self._log.warning("dead_letters", more=len(dead) - DEAD_LETTERS_LOGGED_MAX)

    def _adapt_pause(self, handled_count: int, waiting_count: int) -> None:
        """Longer while records gather faster than they are handled; none when a full group waits already."""
        longest = self._surroundings.settings.commit_pause_milliseconds_max / 1000
        if waiting_count >= GROUP_RECORDS_MAX:
            self._pause_seconds = 0.0
        elif waiting_count >= max(handled_count, GATHERED_RECORDS_MIN):
            self._pause_seconds = min(longest, max(2 * self._pause_seconds, PAUSE_FIRST_SECONDS))
        elif self._pause_seconds > PAUSE_FIRST_SECONDS:
            self._pause_seconds /= 2
        else:
            self._pause_seconds = 0.0

    async def _wait_for_work(self, partition: Partition, intake: Intake) -> None:
        """Until there is a record, a timer is due, the reader has ended, or the partition is released."""
        if self._pause_seconds > 0:
            await self._sleep(self._pause_seconds)
        if intake.waiting_count or self.is_released:
            return
        intake.arrived.clear()
        deadline_us = partition.next_deadline_us() if intake.has_caught_up() else None
        seconds = 1.0
        if deadline_us is not None:
            seconds = min(seconds, (deadline_us - edge.now_us()) / 1_000_000)
        if seconds <= 0:
            return
        try:
            async with asyncio.timeout(seconds):
                await intake.arrived.wait()
        except TimeoutError:
            return

    async def _wait_for_clock(self, behind_us: int) -> None:
        if self.state != "clock_behind":
            self._log.error("clock_behind", behind_seconds=behind_us / 1_000_000)
        self.state = "clock_behind"
        await self._sleep(min(behind_us / 1_000_000 - CLOCK_AHEAD_SECONDS_MAX + 0.01, 1.0))

    async def _sleep(self, seconds: float) -> None:
        """Sleep, but not beyond the release."""
        try:
            async with asyncio.timeout(seconds):
                await self._released.wait()
        except TimeoutError:
            return

    # -- standing still -------------------------------------------------------------------------------------------

    async def _stand_still(self, failure: RuleFailure) -> None:
        """Wait until somebody has moved the position past the record, or the partition is released."""
        record = failure.record
        self.stopped_at = {
            "topic": record.topic if record else None,
            "partition": self.number,
            "offset": record.offset if record else None,
            "site": failure.site_id,
            "agent_id": failure.agent_id,
            "error": str(failure),
            "advice": _advice(failure, self.number),
        }
        self._log.error(
            "partition_stopped", **_place(failure), error=str(failure), advice=_advice(failure, self.number)
        )
        while not self.is_released:
            restored = await self._restore()
            self.state = "stopped"
            if record is not None and restored.partition.positions[record.topic] > record.offset:
                self._log.info("partition_freed", **_place(failure))
                await self._fence_again()
                break
            await self._wait_for_rows(restored.changelog_end)
        self.stopped_at = None

    async def _fence_again(self) -> None:
        """Whoever freed the partition has fenced this writer. Not during a rebalance: another may own it after that."""
        await self._surroundings.stable.wait()
        if not self.is_released:
            await self._writer.close()
            self._writer = Writer(self.number, self._surroundings.bootstrap)
            await self._writer.fence()

    async def _wait_for_rows(self, end: int) -> None:
        """Until the changelog goes beyond ``end``, which only somebody else can have done, or release."""
        changelog = TopicPartition(CHANGELOG.name, self.number)
        async with reading(self._surroundings.bootstrap, "read_committed") as consumer:
            while not self.is_released:
                if (await consumer.end_offsets([changelog]))[changelog] > end:
                    return
                await self._sleep(STANDSTILL_POLL_SECONDS)


class SkipRefused(Exception):  # noqa: N818 - it reads as what it is
    """The record can't be skipped; nothing was written. ``happened`` and ``advice`` are sentences for people."""

    def __init__(self, happened: str, advice: str) -> None:
        super().__init__(f"{happened} Nothing was skipped. {advice}")
        self.happened = happened
        self.advice = advice


async def skip_record(settings: Settings, topic: str, partition: int, offset: int) -> None:
    """Move partition ``partition`` past the record of ``topic`` at ``offset``, which goes to berth.dead-letters.

    Only the very next record to handle can be skipped. Looked at before fencing, so that a wrong call disturbs no
    owner, and again after it. Raises SkipRefused, TransactionLeftOpen, or KafkaError.
    """
    bootstrap = settings.kafka_addresses()
    if topic not in {entry.name for entry in INPUT_TOPICS} or not 0 <= partition < settings.partitions:
        raise SkipRefused(
            f"{topic}/{partition} is not a partition of an input topic.",
            f"The input topics are {', '.join(entry.name for entry in INPUT_TOPICS)}.",
        )
    record = await _next_record(bootstrap, topic, partition, (await _position_row(bootstrap, partition)).positions)
    if record is None or record.offset != offset:
        found = (
            "everything was handled" if record is None else f"the next record to handle is at offset {record.offset}"
        )
        raise SkipRefused(
            f"{topic}/{partition} does not stand at offset {offset}: {found}.",
            "A worker's /readyz shows in stopped_at where a partition stands.",
        )
    writer = Writer(partition, bootstrap)
    try:
        await writer.fence()
        await require_no_open_transaction(partition, bootstrap)
        row = await _position_row(bootstrap, partition)
        if row.positions.get(topic, 0) > offset:
            raise SkipRefused(f"{topic}/{partition} has passed offset {offset} meanwhile.", "There is nothing to do.")
        now_us = edge.now_us()
        moved = row._replace(positions={**row.positions, topic: offset + 1})
        rows: dict[bytes, bytes | None] = {codec.write_key(codec.PARTITION_KEY): codec.write_partition(moved)}
        await writer.commit(Changes([dead_letter(record, "skipped", now_us)], rows), now_us)
    finally:
        await writer.close()


async def _position_row(bootstrap: str, number: int) -> codec.PartitionRow:
    """The partition's own row as it is committed."""
    wanted, found = codec.write_key(codec.PARTITION_KEY), list[bytes | None]()
    async with reading(bootstrap, "read_committed") as consumer:
        await load_rows(consumer, number, lambda key, value: found.append(value) if key == wanted else None)
    if not found or found[-1] is None:
        raise SkipRefused(
            f"Partition {number} has no stored position: no worker has owned it yet.", "Start a worker: berth worker."
        )
    return codec.read_partition(found[-1])


async def _next_record(bootstrap: str, topic: str, number: int, positions: Mapping[str, int]) -> Record | None:
    """The first record from the position on, or None."""
    topic_partition = TopicPartition(topic, number)
    async with reading(bootstrap, "read_committed") as consumer:
        end = (await consumer.end_offsets([topic_partition]))[topic_partition]
        consumer.assign([topic_partition])
        consumer.seek(topic_partition, positions.get(topic, 0))
        while await consumer.position(topic_partition) < end:
            fetched = await consumer.getmany(topic_partition, timeout_ms=POLL_MILLISECONDS, max_records=1)
            for message in fetched.get(topic_partition, ()):
                return Record(topic, number, message.offset, message.key, message.value, message.headers)
    return None


def _place(failure: RuleFailure) -> dict[str, object]:
    if failure.record is not None:
        key = (failure.record.key or b"").decode(errors="replace")
        return {"topic": failure.record.topic, "offset": failure.record.offset, "key": key}
    return {"site": failure.site_id} if failure.agent_id is None else {"agent_id": failure.agent_id}


def _advice(failure: RuleFailure, number: int) -> str:
    mend = "Nothing is lost. Start workers in which the bug is mended: they go on exactly here"
    if failure.record is None:
        return f"{mend}. It can't be given up: what it leaves undone would never be done."
    return f"{mend}. Or give the record up: berth skip {failure.record.topic} {number} {failure.record.offset}"
