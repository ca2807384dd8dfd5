"""Live: the log of decisions as server-sent events, for many clients of one process.

There is one reader of the log per process (``decisions.Log``). It hands on each record that was committed, and every
client that may see it gets the same bytes put into a queue of its own. So a client costs its queue, and a decision is
read once however many look on.

``id`` is a vector: where the next record is in every partition of both logs. A client that comes back with one as
Last-Event-ID gets everything after it: from the newest records, which are kept in memory, or else first from Kafka,
slice by slice, until what is left is in memory; then it joins the others in the same step of the event loop, so there
is no gap and no repeat. Which process it asks doesn't matter: a vector that is ahead of this one's reader is waited
for, and while catching up ids are made from the client's own vector, since another process may have seen the
partitions in another order. Order is that of the log per agent and site, and nothing more.

Bounds: each client's queue (who doesn't read for so long is told so and dropped; it may come back with its last id),
the newest records, the number of clients, and how many are read for from Kafka at once and how fast. Clients are woken
a few at a time, so that a decision for a thousand of them doesn't hold up other requests.

A stream ends with an event ``end`` that says why: ``slow_client``, ``token_expired``, ``service_stopping`` or
``log_unavailable``.
"""

import asyncio
import json
import time
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import aclosing, suppress
from typing import Final

import structlog
from aiokafka import ConsumerRecord
from aiokafka.errors import KafkaError
from fastapi.responses import StreamingResponse
from fastapi.sse import format_sse_event
from starlette.types import Send

from api.http.decisions import Log
from api.http.live_log import LOGS, LogVector, Recent, Slice, Wanted, entry_of
from api.http.metrics import LIVE_CLIENTS, LIVE_ENDS, LIVE_EVENTS, LIVE_SLICES
from api.http.patience import within
from api.http.problems import Problem, invalid, unavailable

COMMENT_SECONDS: Final = 15.0
RETRY_MILLISECONDS: Final = 2_000
"""After so long a browser comes back by itself."""
CLIENTS_MAX: Final = 4_000
PENDING_EVENTS_MAX: Final = 4_000
PENDING_BYTES_MAX: Final = 4 * 1024 * 1024
"""Of one client that doesn't read. The bytes are shared with all others that get the same event."""
CHUNK_BYTES: Final = 64 * 1024
WOKEN_AT_ONCE: Final = 32
CATCHING_UP_MAX: Final = 2
CATCH_UP_RECORDS_PER_SECOND: Final = 20_000
"""Of each that is read for: together at most a part of what this process can do."""
SLICE_SECONDS_MAX: Final = 10.0
REACH_SECONDS_MAX: Final = 4.0
BEGIN_POLL_SECONDS: Final = 0.05

_WORDS: Final[Mapping[str, str]] = {
    "slow_client": "More decisions came than you read. Come back with your last id: nothing is skipped.",
    "token_expired": "Your token has ended. Come back with a new one and your last id.",
    "service_stopping": "This service is being stopped. Come back with your last id.",
    "log_unavailable": "Kafka can't be read now. Come back with your last id.",
}

_NOBODY: Final[frozenset["_Client"]] = frozenset()

log = structlog.get_logger()


class _Client:
    """The queue of one client."""

    __slots__ = ("_bytes", "_wake", "is_dropped", "is_to_be_woken", "pending")

    def __init__(self) -> None:
        self.pending: deque[bytes] = deque()
        self.is_dropped = False
        self.is_to_be_woken = False
        self._bytes = 0
        self._wake = asyncio.Event()

    def offer(self, event: bytes) -> None:
        """Put it into the queue; a client whose queue is full loses all of it and is dropped."""
        if self.is_dropped:
            return
        self.pending.append(event)
        self._bytes += len(event)
        if len(self.pending) > PENDING_EVENTS_MAX or self._bytes > PENDING_BYTES_MAX:
            self.pending.clear()
            self.is_dropped = True

    def take(self) -> bytes:
        """The next events, about a chunk of them."""
        taken: list[bytes] = []
        size = 0
        while self.pending and size < CHUNK_BYTES:
            event = self.pending.popleft()
            taken.append(event)
            size += len(event)
        self._bytes -= size
        return b"".join(taken)

    def wake(self) -> None:
        self.is_to_be_woken = False
        self._wake.set()

    async def wait(self, until_seconds: float) -> None:
        """Until somebody wakes it, or the event loop's time."""
        self._wake.clear()
        if self.pending or self.is_dropped:
            return
        try:
            async with asyncio.timeout_at(until_seconds):
                await self._wake.wait()
        except TimeoutError:
            return


class LiveResponse(StreamingResponse):
    """A stream whose end is noticed at once, whoever ended it.

    FastAPI's own response for events isn't used: between a client and its queue it has a queue of its own.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], status_code: int = 200) -> None:
        super().__init__(events, status_code, {"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._events = events

    async def stream_response(self, send: Send) -> None:
        """Send what comes; then let the stream tidy up."""
        async with aclosing(self._events):
            await super().stream_response(send)


class Live:
    """Hands what the process reads of the log to its clients."""

    def __init__(self, bootstrap: str, partitions: int, reader: Log) -> None:
        self._bootstrap = bootstrap
        self._partitions = partitions
        self._reader = reader
        reader.listen(self._take)
        self._tail: LogVector | None = None
        self._recent: Recent
        self._clients: set[_Client] = set()
        self._of_everything: set[_Client] = set()
        self._of_agent: defaultdict[str, set[_Client]] = defaultdict(set)
        self._to_wake: deque[_Client] = deque()
        self._moved = asyncio.Event()
        self._is_ending = False
        self._turns = asyncio.Semaphore(CATCHING_UP_MAX)
        self._slices: set[asyncio.Task[tuple[LogVector, list[bytes]]]] = set()

    # -- the log --------------------------------------------------------------------------------------------------

    def _take(self, record: ConsumerRecord) -> None:
        is_first = self._tail is None
        tail = self._begun()
        assert tail is not None
        if is_first:
            return  # the vector is behind it already
        index = self._index(record.topic, record.partition)
        tail.move(index, record.offset + 1)
        self._moved.set()
        entry = entry_of(index, record)
        self._recent.append(entry)
        some = self._of_agent.get(entry.agent_id, _NOBODY) if entry.agent_id is not None else _NOBODY
        if not (self._of_everything or some):
            return
        event = entry.encoded(tail.token())
        for clients in (self._of_everything, some):
            for client in clients:
                client.offer(event)
                self._wake_soon(client)
            LIVE_EVENTS.inc(len(clients))

    def _begun(self) -> LogVector | None:
        """How far the log was read; None as long as nobody knows where it ends."""
        if self._tail is None and (read_to := self._reader.read_to):
            self._tail = LogVector.of(read_to, self._partitions)
            self._recent = Recent(self._tail.copy())
        return self._tail

    def _pass_over_markers(self) -> LogVector | None:
        """The same, also behind what isn't a record: another process, which began there, gave ids from behind it."""
        if (tail := self._begun()) is not None:
            for (topic, partition), offset in self._reader.read_to.items():
                tail.move(self._index(topic, partition), offset)
        return tail

    def _index(self, topic: str, partition: int) -> int:
        return LOGS.index(topic) * self._partitions + partition

    def _wake_soon(self, client: _Client) -> None:
        if client.is_to_be_woken:
            return
        client.is_to_be_woken = True
        self._to_wake.append(client)
        if len(self._to_wake) == 1:
            asyncio.get_running_loop().call_soon(self._wake_some)

    def _wake_some(self) -> None:
        for _ in range(min(WOKEN_AT_ONCE, len(self._to_wake))):
            self._to_wake.popleft().wake()
        if self._to_wake:
            asyncio.get_running_loop().call_soon(self._wake_some)

    # -- clients --------------------------------------------------------------------------------------------------

    async def open(
        self, wanted: Wanted, last_event_id: str | None = None, expires_at_seconds: float | None = None
    ) -> LiveResponse:
        """A stream from after ``last_event_id``, or from now on, until ``expires_at_seconds`` (epoch).

        Raises Problem: the id can't be used, Kafka was never reached, too many clients, the service is stopping.
        """
        since: LogVector | None = None
        if last_event_id:
            try:
                since = LogVector.read(last_event_id, self._partitions)
            except ValueError as error:
                raise invalid("invalid_field", "Last-Event-ID", f"Last-Event-ID {error}. Come without one.") from None
        if self._is_ending:
            raise unavailable("service_stopping", _WORDS["service_stopping"])
        if len(self._clients) >= CLIENTS_MAX:
            raise unavailable("too_many_clients", f"{CLIENTS_MAX} clients are connected here already. Try another one.")
        await self._reached(since)
        until_seconds = float("inf")
        if expires_at_seconds is not None:
            until_seconds = asyncio.get_running_loop().time() + expires_at_seconds - time.time()
        return LiveResponse(self._stream(wanted, since, until_seconds))

    def end(self) -> None:
        """End all streams and take no more: the service is being stopped."""
        self._is_ending = True
        for client in self._clients:
            self._wake_soon(client)

    async def _reached(self, since: LogVector | None) -> None:
        """Wait a moment until the log was read as far as ``since``. Raises Problem."""
        loop = asyncio.get_running_loop()
        until_seconds = loop.time() + REACH_SECONDS_MAX
        while (tail := self._pass_over_markers()) is None or not (since is None or tail.covers(since)):
            if loop.time() < until_seconds:
                self._moved.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(BEGIN_POLL_SECONDS):  # the log may begin without a record
                        await self._moved.wait()
            elif tail is None:
                raise unavailable("log_unavailable", "Kafka has not been reached yet. Try again.")
            else:
                raise Problem(
                    409,
                    "position_not_reached",
                    "Last-Event-ID is of a decision that this service has not read: Kafka can't be read just now, or "
                    "it was restored from a backup. Try again; if that doesn't help, come without one and read "
                    "everything anew.",
                )

    async def _stream(
        self, wanted: Wanted, since: LogVector | None, until_seconds: float
    ) -> AsyncGenerator[bytes, None]:
        client = _Client()
        self._clients.add(client)
        LIVE_CLIENTS.inc()
        try:
            assert self._tail is not None
            where = since or self._tail.copy()
            yield format_sse_event(retry=RETRY_MILLISECONDS, id=where.token())
            try:
                async with aclosing(self._events(client, wanted, where, until_seconds)) as events:
                    while (code := self._why_end(client, until_seconds)) is None:
                        if part := await anext(events):
                            yield part
            except (KafkaError, TimeoutError, OSError) as error:
                log.warning("catching_up_failed", error=repr(error))
                code = "log_unavailable"
            LIVE_ENDS.labels(code).inc()
            yield format_sse_event(event="end", data_str=json.dumps({"code": code, "detail": _WORDS[code]}))
        finally:
            LIVE_CLIENTS.dec()
            self._clients.discard(client)
            self._of_everything.discard(client)
            for agent_id in wanted.agents or ():
                self._of_agent[agent_id].discard(client)
                if not self._of_agent[agent_id]:
                    del self._of_agent[agent_id]

    def _why_end(self, client: _Client, until_seconds: float) -> str | None:
        if self._is_ending:
            return "service_stopping"
        if asyncio.get_running_loop().time() >= until_seconds:
            return "token_expired"
        return "slow_client" if client.is_dropped else None

    async def _events(
        self, client: _Client, wanted: Wanted, where: LogVector, until_seconds: float
    ) -> AsyncGenerator[bytes, None]:
        """What comes after ``where``, for ever; empty parts when it was only woken."""
        while (missed := self._join(client, wanted, where)) is None:
            reading = asyncio.create_task(self._slice(wanted, where.copy()), name="slice")
            self._slices.add(reading)  # it ends by itself, also when the client has gone: clients must be stopped
            reading.add_done_callback(self._slice_ended)
            while not (await asyncio.wait({reading}, timeout=COMMENT_SECONDS))[0]:
                yield _comment(where)
            where, found = reading.result()
            for part in _chunks(found):
                yield part
                await asyncio.sleep(0)  # sending may not wait for anything, also when the client has gone
            yield _comment(where)
        for part in _chunks(missed):
            yield part
            await asyncio.sleep(0)
        assert self._tail is not None
        loop = asyncio.get_running_loop()
        comment_at_seconds = loop.time() + COMMENT_SECONDS
        while True:
            if client.pending:
                yield client.take()
                await asyncio.sleep(0)
                comment_at_seconds = loop.time() + COMMENT_SECONDS
            elif loop.time() >= comment_at_seconds:
                yield _comment(self._tail)  # everything before it was taken out of the queue
                comment_at_seconds = loop.time() + COMMENT_SECONDS
            else:
                await client.wait(min(comment_at_seconds, until_seconds))
                yield b""

    def _slice_ended(self, reading: asyncio.Task[tuple[LogVector, list[bytes]]]) -> None:
        self._slices.discard(reading)
        if not reading.cancelled() and reading.exception() is not None:
            log.debug("slice_not_read", error=repr(reading.exception()))  # and whoever still waits for it hears of it

    # -- catching up ----------------------------------------------------------------------------------------------

    def _join(self, client: _Client, wanted: Wanted, where: LogVector) -> list[bytes] | None:
        """From now on decisions come into the client's queue; what it missed. None: not all of it is in memory."""
        recent = self._recent.since(where)
        if recent is None:
            return None
        if wanted.agents is None:
            self._of_everything.add(client)
        for agent_id in wanted.agents or ():
            self._of_agent[agent_id].add(client)
        missed: list[bytes] = []
        for entry in recent:
            where.move(entry.part, entry.offset + 1)
            if wanted.has(entry):
                missed.append(entry.encoded(where.token()))
        return missed

    async def _slice(self, wanted: Wanted, where: LogVector) -> tuple[LogVector, list[bytes]]:
        """The next events after ``where``, read from Kafka, and the position after them.

        Raises KafkaError or TimeoutError.
        """
        async with self._turns:
            LIVE_SLICES.inc()
            assert self._tail is not None
            target = self._tail.copy()
            loop = asyncio.get_running_loop()
            began_seconds = loop.time()
            slice_ = Slice(self._bootstrap, self._partitions, wanted, where, target)
            await within(SLICE_SECONDS_MAX, slice_.read())
            await asyncio.sleep(began_seconds + slice_.records_count / CATCH_UP_RECORDS_PER_SECOND - loop.time())
        return where, slice_.events


def _comment(where: LogVector) -> bytes:
    """Shows that the connection is alive, and moves the id on: a client that comes back has less to catch up on."""
    return format_sse_event(comment="", id=where.token())


def _chunks(events: Iterable[bytes]) -> Iterator[bytes]:
    chunk: list[bytes] = []
    size = 0
    for event in events:
        chunk.append(event)
        size += len(event)
        if size >= CHUNK_BYTES:
            yield b"".join(chunk)
            chunk, size = [], 0
    if chunk:
        yield b"".join(chunk)
