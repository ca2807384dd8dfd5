"""The stream worker: a Faust app whose partitions are owned by ``ownership.py``, and what it tells about itself.

How it ends, as an exit code for the supervisor:

====  =====================================================================================================
0     asked to (SIGTERM, SIGINT): transactions under way were ended, the group was left, others go on at once
69    Kafka could not be reached, or stayed away for a minute: start again
70    an error that must not be passed over: a bug, or input that doesn't follow: start again, look at the log
75    another worker has taken over meanwhile (this one was frozen or cut off): start again
78    what is stored or set up doesn't fit: the log says what to do; starting again alone doesn't help
====  =====================================================================================================

However it ends, no transaction begins any more, those under way are waited for as briefly as their own bounds say, and
the group is left so that others take over without waiting for the session to run out. That is all: Faust is not stopped
but ends with the process (``streams.ending``), because its ``stop`` holds up the event loop until its threads have
ended, and swallows whatever is to break that off. A thread that goes on sending heartbeats for dead partitions is the
worst outcome.

Kafka being away for a moment is no reason to stop: clients reconnect, and nothing is decided meanwhile. What failed on
the way (a transaction that was under way, say) is taken over afresh with the group's next assignment; the second time
without a commit between the process stops.

A partition that has something to read and gets nowhere for STANDSTILL_SECONDS_MAX stops the process too: better one
restart than a healthy-looking worker that does nothing.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, cast

import faust
import structlog
from aiohttp import web
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import InvalidSessionTimeoutError, KafkaError, ProducerFenced
from faust.exceptions import ProducerSendError

from streams import APPLICATION_ID, INPUT_TOPICS, WORKERS
from streams.ending import EXIT_ASKED, Ending
from streams.kafka import edge, metrics, topics
from streams.kafka.clients import METADATA_MILLISECONDS_MAX, ended_within, honest, is_outage, reading
from streams.kafka.intake import Fetched, InputOutOfOrder, Intake
from streams.kafka.membership import AssignmentsDiffer, Membership
from streams.kafka.ownership import Ownership, Surroundings
from streams.kafka.restore import CannotTakeOver, MakePartition
from streams.kafka.transport import Channel, Consumer, Transport, WasFrozen
from streams.partition import Partition
from streams.rules.limits import Defaults
from streams.rules.order import format_instant
from streams.settings import Settings

EXIT_KAFKA_AWAY: Final = 69
EXIT_ERROR: Final = 70
EXIT_FENCED: Final = 75
EXIT_SETUP: Final = 78

ADVICE: Final = {
    EXIT_KAFKA_AWAY: "look at Kafka, and start the worker again",
    EXIT_ERROR: "start it again, which a supervisor does; the exception says where the bug is",
    EXIT_FENCED: "start it again, which a supervisor does",
    EXIT_SETUP: "do what the error says, then start it again",
}

REPORT_SECONDS: Final = 1.0
ASK_SECONDS_MAX: Final = 5.0
AWAY_LOGGED_SECONDS: Final = 10.0
"""That Kafka is still away is said this often."""
SILENCE_SECONDS_MIN: Final = 3.0
KAFKA_AWAY_SECONDS_MAX: Final = 60.0
STANDSTILL_SECONDS_MAX: Final = 30.0
RELEASE_SECONDS_MAX: Final = 5.0
LEAVE_SECONDS_MAX: Final = 2.0

log = structlog.get_logger()


class StandsStill(Exception):  # noqa: N818 - it reads as what it is
    """A partition has something to read and gets nowhere."""


class KafkaAway(Exception):  # noqa: N818 - it reads as what it is
    """Kafka has not answered for too long."""


class App(faust.App):
    """The Faust app; it keeps nothing on disk."""

    membership: Membership

    def _create_directories(self) -> None:
        """Nothing is stored here."""


async def run_worker(settings: Settings, ending: Ending, make_partition: MakePartition | None = None) -> int:
    """Run a worker until it is asked to stop or must; the exit code, see above, with which the process must end then.

    ``make_partition``: another decider.
    """
    bootstrap = settings.kafka_addresses()
    try:
        problems = await topics.check(bootstrap, settings.partitions)
    except KafkaError as error:
        log.error("kafka_not_reached", kafka=bootstrap, error=repr(error), advice="start Kafka or check BERTH_KAFKA")
        return EXIT_KAFKA_AWAY
    for problem in problems:
        log.error("kafka_does_not_fit", about=problem.about, happened=problem.happened, advice=problem.advice)
    if problems:
        return EXIT_SETUP
    if make_partition is None:
        defaults = Defaults(settings.default_limit, settings.worker_pool_capacity)
        make_partition = partial(Partition, partitions=settings.partitions, defaults=defaults)
    return await Worker(settings, bootstrap, make_partition).run(ending)


class Worker:
    """One worker process."""

    def __init__(self, settings: Settings, bootstrap: str, make_partition: MakePartition) -> None:
        self.worker_id = edge.new_worker_id()
        self.address = ""
        self._settings = settings
        self._bootstrap = bootstrap
        self.app = _app(settings, bootstrap)
        channel = Channel(self.app)
        deliver = cast("Callable[[Fetched], Awaitable[None]]", channel.put)
        surroundings = Surroundings(settings, bootstrap, make_partition, deliver, asyncio.Event())
        self.membership = self.app.membership = Membership(surroundings, self._rejoin)
        self.app.topics.add(self.app.topic(*(topic.name for topic in INPUT_TOPICS), internal=False))
        self.app.agent(channel, name="intake")(self._accept)
        self._started = False
        self._kafka_answered_at_seconds = edge.monotonic_seconds()
        self._away_logged_at_seconds: float | None = None
        """When it was last said that Kafka is away; None: it isn't."""
        self._lags: dict[int, int] = {}
        self._stands_since: dict[int, tuple[tuple[int, ...], float]] = {}

    async def run(self, ending: Ending) -> int:
        """Run until asked to stop or until something must stop it; the exit code."""
        asked = ending.in_order()
        try:
            await self._serve()
        except OSError as error:
            log.error("port_not_free", error=str(error), advice="choose another BERTH_WORKER_PORT, or 0 for a free one")
            return EXIT_SETUP
        app = asyncio.create_task(self._run_app(), name="faust")
        watch = asyncio.create_task(self._watch(), name="watch")
        asking = asyncio.create_task(asked.wait(), name="asked")
        ends: set[asyncio.Future[Any]] = {app, watch, asking, self.membership.halted}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        code = self._why(app, watch)
        ending.begin(code)
        watch.cancel()
        await self._leave(code)
        log.info("worker_stopped", exit_code=code)
        return code

    async def _rejoin(self) -> None:
        await self._consumer.rejoin_group()

    @property
    def _consumer(self) -> Consumer:
        return cast("Consumer", self.app.consumer)

    async def _accept(self, stream: Any) -> None:
        async for fetched in stream:
            try:
                fetched.intake.accept(fetched)
            except InputOutOfOrder as error:
                self.membership.halt(error)

    # -- ending ---------------------------------------------------------------------------------------------------

    @honest
    async def _run_app(self) -> None:
        await self.app.start()
        self._started = True
        await self.app.wait_until_stopped()
        raise self.app.crash_reason or RuntimeError("Faust has stopped by itself")

    def _why(self, app: asyncio.Task[None], watch: asyncio.Task[None]) -> int:
        """The exit code, and the reason in the log."""
        for ended in (self.membership.halted, app, watch):
            if ended.done():
                reason = ended.exception() or ended.result()
                assert isinstance(reason, BaseException)
                self.membership.halt(reason)
                code = _exit_code(reason)
                log.critical(
                    "worker_stops",
                    error=_text(reason),
                    kept="everything that was committed; others go on from there",
                    advice=ADVICE[code],
                    exit_code=code,
                    exc_info=reason if code == EXIT_ERROR else None,
                )
                return code
        log.info("worker_asked_to_stop", partitions=sorted(self.membership.owned))
        return EXIT_ASKED

    async def _leave(self, code: int) -> None:
        """End the transactions under way and leave the group; none of it is worth more than its time."""
        if not await ended_within(RELEASE_SECONDS_MAX, self.membership.leave()):
            log.warning("not_released", kept="a transaction under way becomes visible as a whole or not at all")
        last = [self._consumer.leave_group()]
        if code == EXIT_ASKED and self._started:
            last.append(self._report(None))
        has_left, *_ = await asyncio.gather(*(ended_within(LEAVE_SECONDS_MAX, work) for work in last))
        if not has_left:
            log.warning("group_not_left", advice="none: the others take over when this worker's session is over")

    # -- telling --------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Each second: lag, standstill, the record in berth.workers. Raises what must stop us."""
        while True:
            try:
                await self._measure_and_report()
            except (KafkaError, TimeoutError) as error:
                now = edge.monotonic_seconds()
                away_seconds = now - self._kafka_answered_at_seconds
                if self._away_logged_at_seconds is None or now - self._away_logged_at_seconds >= AWAY_LOGGED_SECONDS:
                    self._away_logged_at_seconds = now
                    log.warning("kafka_does_not_answer", seconds=round(away_seconds, 1), error=repr(error))
                if away_seconds > KAFKA_AWAY_SECONDS_MAX:
                    raise KafkaAway(f"Kafka has not answered for {away_seconds:.0f} s") from error
                await asyncio.sleep(REPORT_SECONDS)

    @honest
    async def _measure_and_report(self) -> None:
        async with reading(self._bootstrap, "read_committed") as consumer:
            while True:
                async with asyncio.timeout(ASK_SECONDS_MAX):
                    await self._measure(consumer)
                    if self._started:
                        await self._report(self.status())
                self._note_answer()
                await asyncio.sleep(REPORT_SECONDS)

    def _note_answer(self) -> None:
        now = edge.monotonic_seconds()
        if self._away_logged_at_seconds is not None:
            log.info("kafka_answers_again", away_seconds=round(now - self._kafka_answered_at_seconds, 1))
            self._away_logged_at_seconds = None
        self._kafka_answered_at_seconds = now

    async def _measure(self, consumer: AIOKafkaConsumer) -> None:
        intakes = self._intakes()
        ends = await consumer.end_offsets(
            [TopicPartition(topic.name, number) for number in intakes for topic in INPUT_TOPICS]
        )
        self._lags = dict.fromkeys(intakes, 0)
        for (topic, number), end in ends.items():
            self._lags[number] += max(0, end - intakes[number].position(topic))
        metrics.LAG.clear()
        metrics.READY.clear()
        for number, ownership in self.membership.owned.items():
            metrics.LAG.labels(number).set(self._lags.get(number, 0))
            metrics.READY.labels(number).set(ownership.state == "running")
        self._check_standstill(intakes)

    def _check_standstill(self, intakes: dict[int, Intake]) -> None:
        now = edge.monotonic_seconds()
        before, self._stands_since = self._stands_since, {}
        for number, intake in intakes.items():
            if not (self._lags[number] and self.membership.has_assignment):
                continue
            positions = tuple(intake.position(topic.name) for topic in INPUT_TOPICS)
            known = before.get(number)
            since = known[1] if known is not None and known[0] == positions else now
            self._stands_since[number] = (positions, since)
            if now - since > STANDSTILL_SECONDS_MAX:
                raise StandsStill(
                    f"Partition {number} has {self._lags[number]} records to read and has read none for "
                    f"{STANDSTILL_SECONDS_MAX:.0f} s"
                )

    def _intakes(self) -> dict[int, Intake]:
        return {
            number: ownership.intake
            for number, ownership in self.membership.owned.items()
            if ownership.intake is not None and ownership.state == "running"
        }

    def status(self) -> dict[str, Any]:
        """What /readyz and the record in berth.workers say; times as RFC 3339."""
        return {
            "address": self.address,
            "at": format_instant(edge.now_us()),
            "partitions": {
                str(number): self._status_of(ownership) for number, ownership in sorted(self.membership.owned.items())
            },
        }

    def _status_of(self, ownership: Ownership) -> dict[str, Any]:
        return {
            "state": ownership.state,
            "lag": self._lags.get(ownership.number) if ownership.state == "running" else None,
            "last_progress_at": format_instant(ownership.last_progress_at_us),
            "stopped_at": ownership.stopped_at,
        }

    def why_not_ready(self) -> list[str]:
        """What keeps this worker from deciding everything that it owns; empty: nothing."""
        reasons = []
        if self.membership.halted.done():
            reasons.append("stopping")
        if not self._started:
            reasons.append("starting")
        elif not self.membership.has_assignment:
            waited = edge.monotonic_seconds() - self.membership.unassigned_since_seconds
            if waited > self._settings.session_timeout_seconds:
                reasons.append(f"without an assignment for {waited:.0f} s")
        now = edge.monotonic_seconds()
        away = now - self._kafka_answered_at_seconds
        silence_seconds_max = max(SILENCE_SECONDS_MIN, self._settings.session_timeout_seconds)
        if away > silence_seconds_max:
            reasons.append(f"Kafka has not answered for {away:.0f} s")
        for number, (_, since) in sorted(self._stands_since.items()):
            if now - since > silence_seconds_max:
                reasons.append(f"partition {number} has {self._lags[number]} records to read and makes no progress")
        for number, ownership in sorted(self.membership.owned.items()):
            stopped = ownership.stopped_at
            if stopped is not None:
                reasons.append(f"partition {number} is stopped: {stopped['error']}. {stopped['advice']}")
            elif ownership.state != "running":
                reasons.append(f"partition {number} is {ownership.state}")
        return reasons

    async def _report(self, status: dict[str, Any] | None) -> None:
        """Write the record in berth.workers; None: this worker is gone."""
        value = None if status is None else json.dumps(status, separators=(",", ":")).encode()
        try:
            await self.app.producer.send_and_wait(WORKERS.name, self.worker_id.encode(), value, None, None, None)
        except ProducerSendError as error:
            raise KafkaError(str(error)) from error

    # -- answering ------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Answer /healthz, /readyz and /metrics on 127.0.0.1."""
        site = web.Application()
        site.add_routes(
            [
                web.get("/healthz", self._answer_health),
                web.get("/readyz", self._answer_ready),
                web.get("/metrics", _answer_metrics),
            ]
        )
        runner = web.AppRunner(site, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self._settings.worker_port).start()
        port = runner.addresses[0][1]
        self.address = f"127.0.0.1:{port}"
        log.info("worker_listens", worker_id=self.worker_id, readyz=f"http://{self.address}/readyz")

    async def _answer_health(self, _request: web.Request) -> web.Response:
        return web.json_response({"healthy": not self.membership.halted.done()})

    async def _answer_ready(self, _request: web.Request) -> web.Response:
        reasons = self.why_not_ready()
        body = {"ready": not reasons, "reasons": reasons, "worker_id": self.worker_id, **self.status()}
        return web.json_response(body, status=503 if reasons else 200)


async def _answer_metrics(_request: web.Request) -> web.Response:
    return web.Response(body=metrics.as_text(), headers={"Content-Type": metrics.CONTENT_TYPE})


def _app(settings: Settings, bootstrap: str) -> App:
    session_seconds = settings.session_timeout_seconds
    app = App(
        APPLICATION_ID,
        broker=";".join(f"kafka://{address}" for address in bootstrap.split(",")),
        store="memory://",
        web_enabled=False,
        topic_partitions=settings.partitions,
        topic_allow_declare=False,
        topic_disable_leader=True,
        table_standby_replicas=1,
        key_serializer="raw",
        value_serializer="raw",
        broker_session_timeout=session_seconds,
        # A rebalance lasts until the last member has heard of it with a heartbeat, so often means soon over.
        broker_heartbeat_interval=session_seconds / 24,
        broker_rebalance_timeout=session_seconds,
        broker_max_poll_interval=2 * session_seconds,
        broker_request_timeout=max(30.0, 4 * session_seconds),
        stream_recovery_delay=0.0,
        consumer_auto_offset_reset="earliest",
        consumer_metadata_max_age_ms=METADATA_MILLISECONDS_MAX,
    )
    app.transport = Transport(app.conf.broker_consumer, app)
    return app


def _exit_code(reason: BaseException) -> int:
    if isinstance(reason, ProducerFenced | WasFrozen):
        return EXIT_FENCED
    if isinstance(reason, CannotTakeOver | AssignmentsDiffer | InvalidSessionTimeoutError):
        return EXIT_SETUP
    if isinstance(reason, KafkaAway) or is_outage(reason):
        return EXIT_KAFKA_AWAY
    return EXIT_ERROR


def _text(reason: BaseException) -> str:
    if isinstance(reason, ProducerFenced):
        return "another worker has taken over meanwhile; nothing of the last transaction is visible"
    if isinstance(reason, InvalidSessionTimeoutError):
        return (
            "Kafka allows no session as short or as long as BERTH_SESSION_TIMEOUT_SECONDS says. Nothing was done. Set "
            "it between the broker's group.min.session.timeout.ms (6 s by default) and group.max.session.timeout.ms."
        )
    return str(reason) or repr(reason)
