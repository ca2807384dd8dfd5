"""A runner: takes dispatches, does the work, says how it went. Written to be read by whoever writes one.

What a runner must know of Berth, and where it is below:

* Dispatches come from berth.dispatches, read with isolation level *read_committed*: a dispatch of an aborted
  transaction never existed. Several runners share the work as one consumer group.
* Delivery is at least once, so a dispatch may come twice, with the same ``execution_id``: it is taken once.
* Taking comes first: ``running`` is acknowledged by Kafka, then the group's offset moves past the dispatch, then
  nobody else is given it. A runner that dies before is replaced by another one; a runner that dies later is noticed
  by Berth through its silence (heartbeat_seconds) or at the end of the lease, and the trigger is tried again.
* While it works it sends ``heartbeat`` well within heartbeat_seconds.
* ``stop_requested`` asks it to end the attempt: it does so and says ``stopped``. ``revoked`` says that the attempt is
  no longer its own: it ends it and says nothing, because nobody would listen. Both may arrive at any runner of the
  group, since partitions move between them; so each runner also reads all partitions, outside of the group.
* Every status names the ``execution_id`` and is keyed by the agent's id, so that it reaches the agent's partition.
* A status is sent until Kafka has it. Sent twice it does no harm: the second one is ignored.
* A dispatch whose lease is over by the time it is read is left alone: Berth has given it up.
* Asked to end, it takes nothing more, leaves the group so that others go on at once, finishes what it can within
  ``end_seconds`` and reports the rest as failed, which is tried again.
"""

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import structlog
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.abc import ConsumerRebalanceListener
from aiokafka.errors import CommitFailedError, KafkaError
from pydantic import TypeAdapter
from tenacity import AsyncRetrying, retry_if_exception_type, wait_exponential

from streams import DISPATCHES, STATUSES
from streams.kafka.clients import METADATA_MILLISECONDS_MAX, honest, stop
from streams.rules.dispatches import Dispatch, DispatchRecord, Revocation, StopRequest

POLL_MILLISECONDS: Final = 500
REMEMBERED_MAX: Final = 100_000
"""Execution ids and requests to stop that are remembered, the newest."""
HEARTBEATS_PER_PROMISE: Final = 3
FULL_POLL_MILLISECONDS: Final = 50
COMMIT_SECONDS_MAX: Final = 5.0
"""How long a rebalance waits for what was just read to be taken."""

log = structlog.get_logger()
_READER: Final[TypeAdapter[Dispatch | StopRequest | Revocation]] = TypeAdapter(DispatchRecord)


@dataclass(frozen=True, slots=True)
class Ended:
    """How the work of an attempt ended. ``silently``: nothing is reported, as if the runner had died."""

    status: Literal["finished", "failed", "paused"]
    result: Any = None
    error: str | None = None
    retryable: bool = True
    silently: bool = False


Work: TypeAlias = Callable[[Dispatch], Coroutine[Any, Any, Ended]]
"""Does the work of one attempt. It is cancelled when the attempt is stopped or revoked. What it raises is reported as
a failure that is tried again."""


@dataclass(slots=True)
class Counts:
    """What a runner has done so far."""

    taken: int = 0
    finished: int = 0
    failed: int = 0
    stopped: int = 0
    silent: int = 0


@dataclass(slots=True)
class _Held:
    """An attempt in work. ``why``: why the work was cancelled."""

    dispatch: Dispatch
    work: asyncio.Task[Ended]
    why: Literal["stop_requested", "revoked", "ending"] | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """``capacity``: attempts at once. ``takes``: whether an agent's dispatches are for this runner's group."""

    group: str = "berth-runner"
    capacity: int = 100
    heartbeat_seconds: float = 30.0
    """Between two signs of life, where the dispatch doesn't ask for more."""
    end_seconds: float = 10.0
    takes: Callable[[str], bool] = field(default=lambda _agent_id: True)


class Runner(ConsumerRebalanceListener):  # type: ignore[misc] # aiokafka has no types
    """One runner. Use: ``start``, then ``run``, which returns after ``end`` was called.

    Both raise what Kafka says when they can't go on.
    """

    def __init__(self, bootstrap: str, work: Work, options: Options) -> None:
        self.counts = Counts()
        self._work = work
        self._options = options
        self._end = asyncio.Event()
        self._held: dict[str, _Held] = {}
        self._attempts: set[asyncio.Task[None]] = set()
        self._batch = asyncio.Lock()
        self._taken: OrderedDict[str, None] = OrderedDict()
        self._stops: OrderedDict[str, Literal["stop_requested", "revoked"]] = OrderedDict()
        common = {
            "bootstrap_servers": bootstrap,
            "isolation_level": "read_committed",
            "enable_auto_commit": False,
        }
        self._taking = AIOKafkaConsumer(
            group_id=options.group,
            auto_offset_reset="earliest",
            metadata_max_age_ms=METADATA_MILLISECONDS_MAX,
            **common,
        )
        self._listening = AIOKafkaConsumer(DISPATCHES.name, auto_offset_reset="latest", **common)
        self._producer = AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", enable_idempotence=True)

    @property
    def held(self) -> int:
        """Attempts in work."""
        return len(self._held)

    def end(self) -> None:
        """Take nothing more and come to an end within ``end_seconds``."""
        self._end.set()

    async def start(self) -> None:
        """Connect; nothing is taken yet."""
        await self._producer.start()
        await self._taking.start()
        await self._listening.start()
        await self._listening.seek_to_end()  # before the first dispatch is taken, so that no stop of it is missed

    async def run(self) -> None:
        """Take and do work until ``end``."""
        self._taking.subscribe([DISPATCHES.name], listener=self)
        taking, listening = asyncio.create_task(self._take_on()), asyncio.create_task(self._listen())
        asked = asyncio.create_task(self._end.wait())
        try:
            await asyncio.wait({taking, listening, asked}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                await asyncio.wait({taking}, timeout=COMMIT_SECONDS_MAX)
            for task in (taking, listening):
                if task.done():
                    task.result()
        finally:
            taking.cancel()
            listening.cancel()
            asked.cancel()
            await asyncio.gather(taking, listening, asked, return_exceptions=True)
            await self._come_to_an_end()

    # -- taking -------------------------------------------------------------------------------------------------------

    @honest
    async def _take_on(self) -> None:
        while not self._end.is_set():
            room = self._options.capacity - len(self._held)
            # Being full is said by pausing: who doesn't ask for records is taken for dead by its group.
            if room > 0:
                self._taking.resume(*self._taking.paused())
            else:
                self._taking.pause(*self._taking.assignment())
            fetched = await self._taking.getmany(
                timeout_ms=POLL_MILLISECONDS if room > 0 else FULL_POLL_MILLISECONDS, max_records=max(1, room)
            )
            records = [record for part in fetched.values() for record in part]
            if records:
                async with self._batch:
                    await asyncio.gather(*(self._take(record.value) for record in records))
                    await self._move_on()

    async def _take(self, value: bytes | None) -> None:
        message = _read(value)
        if isinstance(message, StopRequest | Revocation):
            self._stop(message)
        elif message is not None and self._options.takes(message.agent_id):
            await self._begin(message)

    async def _begin(self, dispatch: Dispatch) -> None:
        execution_id = dispatch.execution_id
        if execution_id in self._taken:
            return
        if dispatch.lease_until <= time.time_ns() // 1000:
            log.info("lease_is_over", execution_id=execution_id)
            return
        _remember(self._taken, execution_id, None)
        self.counts.taken += 1
        await self._say(dispatch, "running")
        held = _Held(dispatch, asyncio.create_task(self._work(dispatch)), self._stops.get(execution_id))
        if held.why is not None:
            held.work.cancel()
        self._held[execution_id] = held
        attempt = asyncio.create_task(self._attend(held))
        self._attempts.add(attempt)
        attempt.add_done_callback(self._attempts.discard)

    async def _move_on(self) -> None:
        """What was read is taken: the group needn't be given it again."""
        try:
            await self._taking.commit()
        except CommitFailedError:
            log.warning("group_has_changed", advice="none: what was taken twice is dropped by its execution_id")

    async def on_partitions_revoked(self, _revoked: Iterable[TopicPartition]) -> None:
        """What was read is taken, and the group's offset past it, before others are given the partitions."""
        try:
            async with asyncio.timeout(COMMIT_SECONDS_MAX), self._batch:
                pass
        except TimeoutError:
            log.warning("taking_goes_on", advice="none: another runner may begin the same attempts")

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """Say so in the log."""
        log.info("runner_takes_from", partitions=sorted(partition for _, partition in assigned))

    # -- working ------------------------------------------------------------------------------------------------------

    async def _attend(self, held: _Held) -> None:
        """Show signs of life while the work is done, then say how it ended."""
        promised = held.dispatch.heartbeat_seconds
        pause = self._options.heartbeat_seconds
        if promised is not None:
            pause = min(pause, promised / HEARTBEATS_PER_PROMISE)
        while not (await asyncio.wait({held.work}, timeout=pause))[0]:
            await self._say(held.dispatch, "heartbeat")
        await self._conclude(held)
        del self._held[held.dispatch.execution_id]

    async def _conclude(self, held: _Held) -> None:
        if held.work.cancelled():
            if held.why == "stop_requested":
                self.counts.stopped += 1
                await self._say(held.dispatch, "stopped")
            elif held.why == "ending":
                self.counts.failed += 1
                await self._say(held.dispatch, "failed", error="the runner was asked to end", retryable=True)
            return
        error = held.work.exception()
        ended = Ended("failed", error=f"{type(error).__name__}: {error}") if error else held.work.result()
        if ended.silently:
            self.counts.silent += 1
            return
        if ended.status == "failed":
            self.counts.failed += 1
            await self._say(held.dispatch, "failed", error=ended.error, retryable=ended.retryable)
        else:
            self.counts.finished += ended.status == "finished"
            await self._say(held.dispatch, ended.status, result=ended.result)

    @honest
    async def _listen(self) -> None:
        """Hear of stops and revocations on all partitions."""
        while True:
            for records in (await self._listening.getmany(timeout_ms=POLL_MILLISECONDS)).values():
                for record in records:
                    message = _read(record.value)
                    if isinstance(message, StopRequest | Revocation):
                        self._stop(message)

    def _stop(self, message: StopRequest | Revocation) -> None:
        """Also remembered: the dispatch itself may still lie before us."""
        why: Literal["stop_requested", "revoked"] = message.type
        _remember(self._stops, message.execution_id, why)
        held = self._held.get(message.execution_id)
        if held is not None and held.why is None:
            held.why = why
            held.work.cancel()

    # -- saying -------------------------------------------------------------------------------------------------------

    async def _say(self, dispatch: Dispatch, status: str, **fields: Any) -> None:
        """Send a status and wait until Kafka has it, however long Kafka is away."""
        record = {
            "type": "status",
            "v": 1,
            "agent_id": dispatch.agent_id,
            "conversation_id": dispatch.conversation_id,
            "execution_id": dispatch.execution_id,
            "status": status,
            **{name: value for name, value in fields.items() if value is not None},
        }
        value = json.dumps(record, separators=(",", ":")).encode()
        attempts = AsyncRetrying(
            retry=retry_if_exception_type(KafkaError),
            wait=wait_exponential(multiplier=0.1, max=5),
            before_sleep=lambda state: log.warning(
                "status_not_sent", status=status, error=repr(state.outcome and state.outcome.exception())
            ),
        )
        await attempts(honest(self._producer.send_and_wait), STATUSES.name, value, dispatch.agent_id.encode())

    # -- ending -------------------------------------------------------------------------------------------------------

    async def _come_to_an_end(self) -> None:
        await stop(self._taking, COMMIT_SECONDS_MAX)
        await stop(self._listening)
        if self._attempts:
            log.info("runner_finishes", attempts=len(self._attempts), within_seconds=self._options.end_seconds)
            await asyncio.wait(self._attempts, timeout=self._options.end_seconds)
        for held in self._held.values():
            if not held.work.done():
                held.why = held.why or "ending"
                held.work.cancel()
        try:
            async with asyncio.timeout(self._options.end_seconds):
                await asyncio.gather(*self._attempts)
                await self._producer.stop()
        except TimeoutError:
            log.error("not_everything_reported", attempts=len(self._held), kept="Berth ends them with their leases")


def _read(value: bytes | None) -> Dispatch | StopRequest | Revocation | None:
    """A record of berth.dispatches; None for one that this version doesn't know."""
    try:
        content: dict[str, Any] = json.loads(value or b"")
        # As they came: they may hold lone surrogates (G3), which the reader takes for no JSON.
        texts: dict[str, Any] = {name: content.pop(name) for name in ("message", "payload") if name in content}
        return _READER.validate_json(json.dumps(content)).model_copy(update=texts)
    except (ValueError, AttributeError) as error:
        log.warning("dispatch_not_understood", error=str(error)[:300])
        return None


def _remember(memory: "OrderedDict[str, Any]", key: str, value: Any) -> None:
    memory[key] = value
    if len(memory) > REMEMBERED_MAX:
        memory.popitem(last=False)
