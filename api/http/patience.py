"""Waiting for aiokafka, which may swallow a cancellation and then go on for ever, and may cancel what waits for it.

When a connection breaks it cancels its own futures, and whoever awaits one of them sees a CancelledError that nobody
asked for. Here that is what it means: Kafka is away.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.errors import KafkaConnectionError, KafkaError

STOP_SECONDS_MAX = 2.0

Result = TypeVar("Result")

log = structlog.get_logger()


async def within(seconds: float, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of ``work``; TimeoutError when it takes longer, whether or not it ends then.

    Raises KafkaConnectionError when it was cancelled from inside.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done():
            task.cancel()
    if not task.done():
        task.add_done_callback(_forget)
        raise TimeoutError(f"no end within {seconds} s")
    return result_of(task)


def result_of(task: "asyncio.Future[Result]") -> Result:
    """The result of a task that is done. Raises KafkaConnectionError when it was cancelled from inside."""
    if task.cancelled():
        raise KafkaConnectionError("the connection broke")
    return task.result()


async def stop(client: AIOKafkaConsumer | AIOKafkaProducer) -> None:
    """Give the client's connections back; one that doesn't end is left to itself."""
    try:
        await within(STOP_SECONDS_MAX, client.stop())
    except (KafkaError, TimeoutError, OSError) as error:
        log.debug("client_not_stopped", error=repr(error))


def _forget(task: "asyncio.Future[Any]") -> None:
    if not task.cancelled() and task.exception() is not None:
        log.debug("ended_late", error=repr(task.exception()))
