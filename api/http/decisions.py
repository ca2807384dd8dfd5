"""Writes: a record on Kafka, and the decision that answers it.

The API decides nothing. ``Log.write`` puts a command on its topic with an idempotent producer and waits for the
decision that settles it. One reader per process follows the whole log of decisions (read_committed, without a group,
from where it ended when the process began) and looks only at the ``settles`` headers; a decision is decoded when
somebody waits for one of its ids. Every instance of the API has its own reader, so it doesn't matter which one a
client asks.

Which decision answers a command: one that settles its id, is about the same kind of command, and whose content is the
same. So two requests with one id that are under way together, here or through another instance, both get the first
decision, and one with other content waits for its own, the conflict. A ``request_expired`` answers only the record
that carried that very decide_before: it isn't remembered, so a repetition gets a decision of its own.

How long a caller waits (from the arrival of the request):

=========================  ==========================================================================================
carries decide_before      DECIDE_SECONDS later it has no effect any more, and ANSWER_SECONDS_MAX later the caller is
                           told so (LogUnavailable)
a queued trigger           once Kafka has it, it is accepted: after DECIDE_SECONDS without a decision the answer is
                           ``None``; when Kafka has not acknowledged it by ANSWER_SECONDS_MAX: LogUnavailable, and the
                           same id may be sent again
=========================  ==========================================================================================

Kafka away: the clients reconnect by themselves, and ``run`` makes new ones after an error that they can't get over.
aiokafka never gives up on a batch of an idempotent producer, so a record may still be written after the caller was
told 503; that is what ids and decide_before are for.
"""

import asyncio
import hashlib
import json
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

import structlog
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError
from pydantic import TypeAdapter

from api.http.patience import result_of, stop, within
from api.http.positions import LogPosition
from streams import CONTROLS, DECISIONS, TRIGGERS, Topic
from streams.codec import VIA_HEADER, partition_of
from streams.rules.events import Decision, read_decision
from streams.rules.messages import Control, ControlRecord, Invalid, Stop, Trigger, TriggerRecord, content_sha256

DECIDE_SECONDS: Final = 4.0
ANSWER_SECONDS_MAX: Final = 4.8
"""The caller has the answer within 5 s of its request."""
CONNECT_SECONDS_MAX: Final = 10.0
RECONNECT_SECONDS: Final = 0.5
REQUEST_TIMEOUT_MILLISECONDS: Final = 5_000
REMEMBERED_ANSWERS_MAX: Final = 10_000
RECORDS_AT_ONCE: Final = 50
"""After so many records others get a turn: requests, and the clients that are shown what was read."""
LOG_SECONDS_MIN: Final = 10.0
"""Kafka being away is logged at most this often."""

log = structlog.get_logger()

_TRIGGER_READER: Final[TypeAdapter[Trigger | Stop]] = TypeAdapter(TriggerRecord)
_CONTROL_READER: Final[TypeAdapter[Any]] = TypeAdapter(ControlRecord)


class LogUnavailable(Exception):  # noqa: N818 - it reads as what it is
    """Kafka has not acknowledged the command, or nobody has decided it in time."""

    def __init__(self, acknowledged: bool) -> None:
        super().__init__("no decision in time" if acknowledged else "Kafka has not acknowledged the record")
        self.acknowledged = acknowledged


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A command as a record. ``sha256``: digest of its content, by which its decision is known."""

    topic: Topic
    kind: Literal["trigger", "stop", "control"]
    id: str
    agent_id: str
    decide_before: int | None
    sha256: str
    value: bytes

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Outgoing":
        """A record of ``fields`` (with type, id, agent_id; a trigger with content_sha256).

        pydantic.ValidationError if a worker would not take it.
        """
        value = json.dumps(fields, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        is_control = fields["type"] not in ("trigger", "stop")
        command = (_CONTROL_READER if is_control else _TRIGGER_READER).validate_json(value)
        kind: Literal["trigger", "stop", "control"] = (
            "control" if is_control else "trigger" if isinstance(command, Trigger) else "stop"
        )
        return cls(
            topic=CONTROLS if is_control else TRIGGERS,
            kind=kind,
            id=command.id,
            agent_id=command.agent_id,
            decide_before=command.decide_before,
            sha256=_digest_of(command),
            value=value,
        )


def _digest_of(command: Trigger | Stop | Control) -> str:
    if isinstance(command, Trigger) and command.content_sha256 is not None:
        return command.content_sha256
    return content_sha256(command)


def digest_of_fields(fields: Mapping[str, Any]) -> str:
    """content_sha256 of a request: of the client's fields as canonical JSON."""
    canonical = json.dumps(fields, sort_keys=True, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Answer:
    """The decision on a command, and where the log is after it."""

    decision: Decision
    position: LogPosition


@dataclass(slots=True, eq=False)
class _Waiter:
    command: Outgoing
    answer: "asyncio.Future[Answer]"


class Log:
    """The log as the API uses it. ``run`` keeps it connected; ``write`` may be called at any time."""

    def __init__(self, bootstrap: str, partitions: int) -> None:
        self._bootstrap = bootstrap
        self._partitions = partitions
        self._producer: AIOKafkaProducer | None = None
        self._connected = asyncio.Event()
        self._broken = asyncio.Event()
        self._waiters: defaultdict[str, set[_Waiter]] = defaultdict(set)
        self._answers: OrderedDict[tuple[str, int], Answer] = OrderedDict()
        self._next_offsets: dict[int, int] = {}
        """Behind the newest decision that was read, by partition."""
        self._read_to: dict[TopicPartition, int] = {}
        """Where reading goes on: a new connection must not pass over what was decided in between."""
        self._listeners: list[Callable[[ConsumerRecord], None]] = []

    def listen(self, listener: Callable[[ConsumerRecord], None]) -> None:
        """Call ``listener`` with every record from now on, in order, each once."""
        self._listeners.append(listener)

    @property
    def read_to(self) -> Mapping[TopicPartition, int]:
        """Where reading goes on, by partition of both logs; empty before it began."""
        return self._read_to

    # -- writing --------------------------------------------------------------------------------------------------

    async def write(self, command: Outgoing, arrived_seconds: float) -> Answer | None:
        """Write ``command`` and return its decision; None: a trigger that is accepted and not decided yet.

        ``arrived_seconds`` is the event loop's time when the request came. Raises LogUnavailable.
        """
        waiter = _Waiter(command, asyncio.get_running_loop().create_future())
        self._waiters[command.id].add(waiter)
        acknowledged = asyncio.create_task(self._send(command), name="send")
        try:
            # Decided is as good as acknowledged: with the same content it doesn't matter whose record it was.
            wait_seconds = DECIDE_SECONDS if command.decide_before is None else ANSWER_SECONDS_MAX
            await _first_of(waiter.answer, acknowledged, arrived_seconds + ANSWER_SECONDS_MAX)
            if acknowledged.done() and not waiter.answer.done():
                self._check_acknowledged(command, acknowledged)
            await _first_of(waiter.answer, None, arrived_seconds + wait_seconds)
            if waiter.answer.done():
                return waiter.answer.result()
            if acknowledged.done() and command.decide_before is None:
                return None
            raise LogUnavailable(acknowledged=acknowledged.done())
        finally:
            acknowledged.cancel()
            await asyncio.gather(acknowledged, return_exceptions=True)
            self._waiters[command.id].discard(waiter)
            if not self._waiters[command.id]:
                del self._waiters[command.id]

    def remembered(self, agent_id: str, seq: int) -> Answer | None:
        """A decision that answered somebody here before, if it is among the newest ones."""
        return self._answers.get((agent_id, seq))

    def position_of(self, agent_id: str) -> LogPosition:
        """Behind the newest decision that was read here of the agent's partition."""
        partition = partition_of(agent_id, self._partitions)
        return LogPosition({partition: self._next_offsets.get(partition, 0)})

    async def _send(self, command: Outgoing) -> None:
        """Write the record; returns when Kafka has acknowledged it. Raises KafkaError."""
        await self._connected.wait()
        assert self._producer is not None
        acknowledgement = await self._producer.send(
            command.topic.name,
            key=command.agent_id.encode(),
            value=command.value,
            partition=partition_of(command.agent_id, self._partitions),
            headers=[(VIA_HEADER, b"http")],
        )
        await asyncio.shield(acknowledgement)  # one caller's impatience must not cancel what others wait for

    def _check_acknowledged(self, command: Outgoing, send: "asyncio.Task[None]") -> None:
        try:
            result_of(send)
        except KafkaError as error:
            log.warning("record_not_acknowledged", topic=command.topic.name, kind=command.kind, error=repr(error))
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
        targets = [TopicPartition(DECISIONS.name, number) for number in range(self._partitions)]
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
        finally:
            broken.cancel()

    def _take(self, record: ConsumerRecord) -> None:
        self._next_offsets[record.partition] = record.offset + 1
        waiters = [
            waiter
            for name, value in record.headers
            if name == "settles"
            for waiter in self._waiters.get(value.decode(), ())
            if not waiter.answer.done()
        ]
        if not waiters:
            return
        decision = read_decision(record.value)
        answer = Answer(decision, LogPosition({record.partition: record.offset + 1}))
        for waiter in waiters:
            if _answers(decision, waiter.command):
                waiter.answer.set_result(answer)
                self._remember(answer)

    def _remember(self, answer: Answer) -> None:
        self._answers[answer.decision.agent_id, answer.decision.seq] = answer
        if len(self._answers) > REMEMBERED_ANSWERS_MAX:
            self._answers.popitem(last=False)


def _answers(decision: Decision, command: Outgoing) -> bool:
    """Whether the decision, which settles the command's id, is the one on this command."""
    decided = decision.command
    if decision.agent_id != command.agent_id:
        return False
    if isinstance(decided, Invalid):
        return True
    if isinstance(decided, Trigger):
        kind, expires = "trigger", decided.decide_before
    elif isinstance(decided, Stop):
        kind, expires = "stop", decided.decide_before
    elif isinstance(decided, Control):
        kind, expires = "control", decided.decide_before
    else:
        return False
    if kind != command.kind or _digest_of(decided) != command.sha256:
        return False
    is_expired = decision.refusal is not None and decision.refusal.code == "request_expired"
    return not is_expired or expires == command.decide_before


async def _first_of(answer: "asyncio.Future[Answer]", task: "asyncio.Task[None] | None", until_seconds: float) -> None:
    """Wait for one of the two, at most until the event loop's time ``until_seconds``."""
    waited: set[asyncio.Future[Any]] = {answer} if task is None else {answer, task}
    timeout = max(0.0, until_seconds - asyncio.get_running_loop().time())
    await asyncio.wait(waited, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
