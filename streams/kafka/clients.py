"""aiokafka's clients, with their two bad habits kept from everybody else.

When a connection breaks, aiokafka cancels futures of its own, and whoever awaits one sees a CancelledError that nobody
asked for: a task that takes it at its word ends without a sound, and what it did is never done again. ``honest`` makes
a KafkaConnectionError of it.

When a client is stopped while its fetcher drops an assignment, the cancellation gets lost and ``stop`` never ends.
``stop`` here gives up after a while; the client's sockets go with the process.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any, Final, Literal, ParamSpec, TypeVar

import structlog
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.errors import KafkaConnectionError, KafkaError

FETCH_BYTES_MAX: Final = 4 * 1024 * 1024
STOP_SECONDS_MAX: Final = 2.0

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


async def stop(client: AIOKafkaConsumer | AIOKafkaProducer) -> None:
    """Give the client's connections back; one that doesn't end is left to itself."""
    if not await ended_within(STOP_SECONDS_MAX, client.stop()):
        log.warning("client_not_stopped")


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
