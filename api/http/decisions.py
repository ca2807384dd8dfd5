"""Writes: a record on Kafka, and the decision that answers it.

The API decides nothing. ``Log.write`` puts a command on its topic with an idempotent producer and waits for the
decision that answers it (``answers.py`` says which one that is). One reader per process follows the whole log of
decisions, of agents and of sites (read_committed, without a group, from where it ended when the process began). Every
instance of the API has its own reader, so it doesn't matter which one a client asks.

How long a caller waits (from the arrival of the request):

=========================  ==========================================================================================
carries decide_before      DECIDE_SECONDS later it has no effect any more, and ANSWER_SECONDS_MAX later the caller is
                           told so (LogUnavailable)
a queued trigger           once Kafka has it, it is accepted: after DECIDE_SECONDS without a decision the answer is
                           ``None``; when Kafka has not acknowledged it by ANSWER_SECONDS_MAX: LogUnavailable, and the
                           same id may be sent again
what nobody answers        (statuses) once Kafka has acknowledged it, by ANSWER_SECONDS_MAX, else LogUnavailable
=========================  ==========================================================================================

Kafka away: the clients reconnect by themselves, and ``run`` makes new ones after an error that they can't get over.
aiokafka never gives up on a batch of an idempotent producer, so a record may still be written after the caller was
told 503; that is what ids and decide_before are for.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

import structlog
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError

from api.http.answers import Answer, Answers, Expected, Outgoing
from api.http.patience import result_of, stop, within
from api.http.positions import LogPosition
from streams import DECISIONS, SITE_DECISIONS, Topic
from streams.codec import VIA_HEADER, partition_of

DECIDE_SECONDS: Final = 4.0
ANSWER_SECONDS_MAX: Final = 4.8
"""The caller has the answer within 5 s of its request."""
CONNECT_SECONDS_MAX: Final = 10.0
RECONNECT_SECONDS: Final = 0.5
REQUEST_TIMEOUT_MILLISECONDS: Final = 5_000
RECORDS_AT_ONCE: Final = 50
"""After so many records others get a turn: requests, and the clients that are shown what was read."""
LOG_SECONDS_MIN: Final = 10.0
"""Kafka being away is logged at most this often."""

log = structlog.get_logger()


class LogUnavailable(Exception):  # noqa: N818 - it reads as what it is
    """Kafka has not acknowledged the command, or nobody has decided it in time."""

    def __init__(self, acknowledged: bool) -> None:
        super().__init__("no decision in time" if acknowledged else "Kafka has not acknowledged the record")
        self.acknowledged = acknowledged


class Parcel(NamedTuple):
    """A record, and the partition that it goes to."""

    partition: int
    key: bytes | None
    value: bytes
    headers: Sequence[tuple[str, bytes]]


class _Waiter(Expected):
    __slots__ = ("answer",)

    def __init__(self, command: Outgoing) -> None:
        super().__init__(command)
        self.answer: asyncio.Future[Answer[Any]] = asyncio.get_running_loop().create_future()


class Log:
    """The log as the API uses it. ``run`` keeps it connected; ``write`` may be called at any time."""

    def __init__(self, bootstrap: str, partitions: int) -> None:
        self.partitions = partitions
        self._bootstrap = bootstrap
        self._producer: AIOKafkaProducer | None = None
        self._connected = asyncio.Event()
        self._broken = asyncio.Event()
        self._answers: Answers[_Waiter] = Answers()
        self._next_offsets: dict[int, int] = {}
        """Behind the newest decision of an agent that was read, by partition."""
        self._read_to: dict[TopicPartition, int] = {}
        """Where reading goes on: a new connection must not pass over what was decided in between."""
        self._listeners: list[Callable[[ConsumerRecord], None]] = []

    def listen(self, listener: Callable[[ConsumerRecord], None]) -> None:
        """Call ``listener`` with every record from now on, in order, each once."""
        self._listeners.append(listener)

    @property
    def read_to(self) -> Mapping[TopicPartition, int]:
        """Where reading goes on, by partition of both logs, behind markers of transactions; empty before it began."""
        return self._read_to

    # -- writing --------------------------------------------------------------------------------------------------

    async def write(self, command: Outgoing, arrived_seconds: float) -> Answer[Any] | None:
        """Write ``command`` and return its decision; None: a trigger that is accepted and not decided yet.

        ``arrived_seconds`` is the event loop's time when the request came. Raises LogUnavailable.
        """
        waiter = _Waiter(command)
        self._answers.expect(waiter)
        parcel = self._from_here(command.decider, command.value)
        acknowledged = asyncio.create_task(self._send(command.topic, [parcel]), name="send")
        try:
            # Decided is as good as acknowledged: with the same content it doesn't matter whose record it was.
            wait_seconds = DECIDE_SECONDS if command.decide_before is None else ANSWER_SECONDS_MAX
            await _first_of(waiter.answer, acknowledged, arrived_seconds + ANSWER_SECONDS_MAX)
            if acknowledged.done() and not waiter.answer.done():
                self._check_acknowledged(command.topic, acknowledged)
            await _first_of(waiter.answer, None, arrived_seconds + wait_seconds)
            if waiter.answer.done():
                return waiter.answer.result()
            if acknowledged.done() and command.decide_before is None:
                return None
            log.warning(
                "not_decided_in_time",
                topic=command.topic.name,
                key=command.decider,
                id=command.id,
                acknowledged=acknowledged.done(),
            )
            raise LogUnavailable(acknowledged=acknowledged.done())
        finally:
            await _abandon(acknowledged)
            self._answers.forget(waiter)

    async def publish(self, topic: Topic, records: Sequence[tuple[str, bytes]], arrived_seconds: float) -> None:
        """Write (key, value) in this order; nobody answers them. Returns when Kafka has all. Raises LogUnavailable."""
        await self.post(topic, [self._from_here(key, value) for key, value in records], arrived_seconds)

    async def post(self, topic: Topic, parcels: Sequence[Parcel], arrived_seconds: float) -> None:
        """The same for records that don't begin here, and that go where they are told to. Raises LogUnavailable."""
        acknowledged = asyncio.create_task(self._send(topic, parcels), name="send")
        try:
            await _first_of(None, acknowledged, arrived_seconds + ANSWER_SECONDS_MAX)
            if not acknowledged.done():
                raise LogUnavailable(acknowledged=False)
            self._check_acknowledged(topic, acknowledged)
        finally:
            await _abandon(acknowledged)

    def given(self, command: Outgoing, seq: int) -> Answer[Any] | None:
        """What somebody here was answered by or after the decision ``seq``, if it is among the newest answers."""
        return self._answers.given(command, seq)

    def position_of(self, agent_id: str) -> LogPosition:
        """Behind the newest decision that was read here of the agent's partition."""
        partition = partition_of(agent_id, self.partitions)
        return LogPosition({partition: self._next_offsets.get(partition, 0)})

    def _from_here(self, key: str, value: bytes) -> Parcel:
        return Parcel(partition_of(key, self.partitions), key.encode(), value, [(VIA_HEADER, b"http")])

    async def _send(self, topic: Topic, parcels: Sequence[Parcel]) -> None:
        """Write the records in order; returns when Kafka has acknowledged all. Raises KafkaError."""
        await self._connected.wait()
        assert self._producer is not None
        acknowledgements = [
            await self._producer.send(
                topic.name, key=parcel.key, value=parcel.value, partition=parcel.partition, headers=list(parcel.headers)
            )
            for parcel in parcels
        ]
        for acknowledgement in acknowledgements:
            await asyncio.shield(acknowledgement)  # one caller's impatience must not cancel what others wait for

    def _check_acknowledged(self, topic: Topic, send: "asyncio.Task[None]") -> None:
        try:
            result_of(send)
        except KafkaError as error:
            log.warning("record_not_acknowledged", topic=topic.name, error=repr(error))
            self._broken.set()
            raise LogUnavailable(acknowledged=False) from error

    # -- reading --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Stay connected and hand decisions to who waits for them, until cancelled."""
        logged_at_seconds = 0.0
        while True:
            try:
                async with self._connection() as consumer:
                    log.info("log_connected", kafka=self._bootstrap)
                    await self._follow(consumer)
            except (KafkaError, TimeoutError, OSError) as error:
                now = asyncio.get_running_loop().time()
                if now - logged_at_seconds > LOG_SECONDS_MIN:
                    logged_at_seconds = now
                    log.warning("log_not_connected", kafka=self._bootstrap, error=repr(error))
            await asyncio.sleep(RECONNECT_SECONDS)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[AIOKafkaConsumer]:
        """A producer, and a consumer that sees every decision from now on, and those since the last connection."""
        producer = AIOKafkaProducer(
            bootstrap_servers=self._bootstrap,
            enable_idempotence=True,
            request_timeout_ms=REQUEST_TIMEOUT_MILLISECONDS,
            retry_backoff_ms=50,
        )
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self._bootstrap,
            isolation_level="read_committed",
            enable_auto_commit=False,
            auto_offset_reset="latest",
            fetch_max_wait_ms=500,
            request_timeout_ms=REQUEST_TIMEOUT_MILLISECONDS,
            retry_backoff_ms=50,
        )
        try:
            await within(CONNECT_SECONDS_MAX, self._connect(producer, consumer))
            self._producer = producer
            self._broken.clear()
            self._connected.set()
            yield consumer
        finally:
            self._connected.clear()
            self._producer = None
            for client in (consumer, producer):
                await stop(client)

    async def _connect(self, producer: AIOKafkaProducer, consumer: AIOKafkaConsumer) -> None:
        await consumer.start()
        targets = [
            TopicPartition(topic.name, number)
            for topic in (DECISIONS, SITE_DECISIONS)
            for number in range(self.partitions)
        ]
        consumer.assign(targets)
        for target, offset in self._read_to.items():
            consumer.seek(target, offset)
        if not self._read_to:
            await consumer.seek_to_end()
            self._read_to = {target: await consumer.position(target) for target in targets}
        await producer.start()

    async def _follow(self, consumer: AIOKafkaConsumer) -> None:
        broken = asyncio.create_task(self._broken.wait())
        try:
            while not self._broken.is_set():
                fetch = asyncio.create_task(consumer.getmany(timeout_ms=1000))
                await asyncio.wait({fetch, broken}, return_when=asyncio.FIRST_COMPLETED)
                if not fetch.done():
                    fetch.cancel()
                    await asyncio.gather(fetch, return_exceptions=True)
                    continue
                for target, records in result_of(fetch).items():
                    for number, record in enumerate(records, start=1):
                        self._take(record)
                        self._read_to[target] = record.offset + 1
                        for listener in self._listeners:
                            listener(record)
                        if number % RECORDS_AT_ONCE == 0:
                            await asyncio.sleep(0)
                for target in self._read_to:  # over the markers of transactions, which are no records
                    self._read_to[target] = await consumer.position(target)
        finally:
            broken.cancel()

    def _take(self, record: ConsumerRecord) -> None:
        if record.topic == DECISIONS.name:
            self._next_offsets[record.partition] = record.offset + 1
        answered = self._answers.take(record.topic, record.partition, record.offset, record.headers, record.value)
        for waiter, answer in answered:
            if not waiter.answer.done():
                waiter.answer.set_result(answer)


async def _first_of(
    answer: "asyncio.Future[Any] | None", task: "asyncio.Task[None] | None", until_seconds: float
) -> None:
    """Wait for one of the two, at most until the event loop's time ``until_seconds``."""
    waited = [future for future in (answer, task) if future is not None]
    timeout = max(0.0, until_seconds - asyncio.get_running_loop().time())
    await asyncio.wait(waited, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)


async def _abandon(send: "asyncio.Task[None]") -> None:
    send.cancel()
    await asyncio.gather(send, return_exceptions=True)
