"""aiokafka's clients, with their bad habits kept from everybody else.

When a connection breaks, aiokafka cancels futures of its own, and whoever awaits one sees a CancelledError that nobody
asked for: a task that takes it at its word ends without a sound, and what it did is never done again. ``honest`` makes
a KafkaConnectionError of it.

When a client is stopped while its fetcher drops an assignment, the cancellation gets lost and ``stop`` never ends. When
it is stopped just after a fetch has failed, ``stop`` raises a CancelledError halfway, and the client goes on, and
connects again as soon as Kafka is back. ``stop`` here raises nothing, gives up after a while, and ends by hand what is
left: only then, so that a member still leaves its group in order.

A consumer whose Kafka is away gives no records, as one does that has read everything. ``Fetches`` tells them apart.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any, Final, Literal, ParamSpec, TypeVar

import structlog
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaConnectionError, KafkaError, KafkaTimeoutError

from streams.kafka import edge

METADATA_MILLISECONDS_MAX: Final = 1_000
"""For members of a group. One that asks for its topics while Kafka is away asks again only then (else after minutes),
and as leader gives nothing of them to anybody until then."""
FETCH_BYTES_MAX: Final = 4 * 1024 * 1024
STOP_SECONDS_MAX: Final = 2.0
SILENT_SECONDS_MAX: Final = 5.0
"""After so long without a record Kafka is asked whether it is there: long enough to cost a reader nothing."""
ANSWER_SECONDS_MAX: Final = 15.0

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

log = structlog.get_logger()


def honest(work: Callable[Arguments, Coroutine[Any, Any, Result]]) -> Callable[Arguments, Coroutine[Any, Any, Result]]:
    """Decorator: raises KafkaConnectionError for a cancellation that nobody asked the running task for."""

    @wraps(work)
    async def working(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        try:
            return await work(*arguments, **named)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise KafkaConnectionError("the connection broke") from None

    return working


def is_outage(error: BaseException) -> bool:
    """Whether the error says that Kafka was away, not that something is wrong.

    A bare KafkaError is how aiokafka says that its sending task has ended, whatever the reason.
    """
    return isinstance(error, TimeoutError) or (
        isinstance(error, KafkaError) and (error.retriable or type(error) is KafkaError)
    )


async def ended_within(seconds: float, work: Coroutine[Any, Any, object]) -> bool:
    """Whether the work ended in this time, be it with an error. What didn't is cancelled, and left to itself."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        task.add_done_callback(_note)
        task.cancel()
    return task.done() and not task.cancelled()


async def stop(client: AIOKafkaConsumer | AIOKafkaProducer, seconds_max: float = STOP_SECONDS_MAX) -> None:
    """Give the client's connections back, in order if that takes no longer than this. Raises nothing of Kafka's."""
    if not await ended_within(seconds_max, _stop(client)):
        log.warning("client_not_stopped")


@honest
async def _stop(client: AIOKafkaConsumer | AIOKafkaProducer) -> None:
    try:
        await client.stop()
    except BaseException:
        for part in (getattr(client, name, None) for name in ("_coordinator", "_fetcher", "_sender")):
            for task in _tasks_of(part):
                task.cancel()
        connections = client.client if isinstance(client, AIOKafkaProducer) else client._client  # noqa: SLF001
        await connections.close()
        raise


def _tasks_of(part: object) -> "list[asyncio.Task[object]]":
    """What a part of a client has at work, and what would connect again."""
    held = vars(part).values() if part is not None else ()
    return [
        task
        for value in held
        for task in (value if isinstance(value, set) else (value,))
        if isinstance(task, asyncio.Task) and not task.done()
    ]


class Fetches:
    """The records of a consumer for somebody who knows that there are more of them, or at least offsets."""

    def __init__(self, consumer: AIOKafkaConsumer) -> None:
        self._consumer = consumer
        self._silent_since_seconds: float | None = None

    async def getmany(
        self, *places: TopicPartition, timeout_ms: int, max_records: int
    ) -> dict[TopicPartition, list[ConsumerRecord]]:
        """What comes of these partitions in this time, or of all that are assigned.

        Raises KafkaError, also when nothing has come for a while and Kafka then doesn't answer. Where nothing comes
        because there are only markers of transactions, and what they aborted, it does.
        """
        fetched: dict[TopicPartition, list[ConsumerRecord]] = await honest(self._consumer.getmany)(
            *places, timeout_ms=timeout_ms, max_records=max_records
        )
        now = edge.monotonic_seconds()
        if fetched:
            self._silent_since_seconds = None
        elif self._silent_since_seconds is None:
            self._silent_since_seconds = now
        elif now - self._silent_since_seconds > SILENT_SECONDS_MAX:
            await self._require_answer(places or tuple(self._consumer.assignment()))
            self._silent_since_seconds = None
        return fetched

    async def _require_answer(self, places: tuple[TopicPartition, ...]) -> None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS_MAX):
                await honest(self._consumer.end_offsets)(places)
        except TimeoutError:
            raise KafkaTimeoutError("nothing comes, and no answer") from None


@asynccontextmanager
async def reading(
    bootstrap: str, isolation_level: Literal["read_committed", "read_uncommitted"]
) -> AsyncIterator[AIOKafkaConsumer]:
    """A consumer without a group, for as long as the block runs. Assign it once only."""
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap,
        isolation_level=isolation_level,
        enable_auto_commit=False,
        auto_offset_reset="none",
        max_partition_fetch_bytes=FETCH_BYTES_MAX,
        retry_backoff_ms=20,
    )
    try:
        await consumer.start()
        yield consumer
    finally:
        await stop(consumer)


def _note(task: "asyncio.Task[object]") -> None:
    error = None if task.cancelled() else task.exception()
    if isinstance(error, KafkaError | TimeoutError | OSError):
        log.debug("ended_badly", error=repr(error))
    elif error is not None:
        log.error("ended_badly", error=repr(error), exc_info=error)
