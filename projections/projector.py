"""The projector: reads the log and keeps the tables up with it, in one process.

It reads ahead while a batch is applied in a thread, so batches grow with what waits: one decision when little happens,
and at once; thousands while it catches up. How it ends, as an exit code for the supervisor:

====  =====================================================================================================
0     asked to (SIGTERM, SIGINT)
65    a record can't be applied: the log says its topic, partition and offset. Everything before it is applied.
70    an error that must not be passed over: a bug; the log says more
78    the tables or the topics don't fit: the log says what to do
====  =====================================================================================================

Kafka or PostgreSQL being away is no reason to end: it tries again until they are back, goes on from the checkpoints,
and /readyz says meanwhile what is missing. So is another projector, which has the database's lock: this one takes over
when that ends. When ``berth projections rebuild`` has put new tables in place, the checkpoints are not where they were
left, and it goes on from where they are.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Final, Literal, TypeVar

import psycopg
import structlog
from aiohttp import web
from aiokafka.errors import KafkaError
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential_jitter

from projections import drift, metrics
from projections.log import ADVICE, Log, LogDoesNotFit
from projections.row_types import CannotApply
from projections.schema import SchemaRefused
from projections.store import Applied, Batch, Decider, Moved, Position, Store
from streams import DECISIONS, SITE_DECISIONS
from streams.ending import EXIT_ASKED, Ending

EXIT_CANNOT_APPLY: Final = 65
EXIT_ERROR: Final = 70
EXIT_SETUP: Final = 78

BATCH_RECORDS_MAX: Final = 4_000
BATCH_APART_SECONDS: Final = 0.05
"""Batches begin at least so far apart: a transaction costs as much as fifty decisions, whatever it holds."""
IDLE_WAIT_SECONDS: Final = 0.5
SNAPSHOT_WAIT_SECONDS: Final = 0.05
"""When nothing comes for so long there is time for a snapshot."""
SNAPSHOT_PAUSES: Final = 4
"""After a snapshot, batches have so many times as long as it took before the next one, unless nothing is to be done."""
CLAIM_SECONDS: Final = 0.3
RETENTION_SECONDS: Final = 60.0
RETENTION_ROWS_MAX: Final = 2_000
WATCH_SECONDS: Final = 1.0
ANSWER_SECONDS_MAX: Final = 4.0
STANDSTILL_SECONDS_MAX: Final = 8.0
RETRY_SECONDS_MAX: Final = 2.0
STOP_SECONDS_MAX: Final = 6.0
DAY_MICROSECONDS: Final = 24 * 3600 * 1_000_000

DATABASE_AWAY: Final = (psycopg.OperationalError, psycopg.InterfaceError, psycopg.errors.UndefinedTable)
"""Also when somebody dropped the tables: they are made anew, and filled from the beginning of the log."""

log = structlog.get_logger()
Result = TypeVar("Result")
State = Literal[
    "starting",
    "connecting to the database",
    "waiting for another projector to end",
    "connecting to Kafka",
    "following",
    "stopped",
]


class Projector:
    """One projector. ``run`` until asked to stop or until it must."""

    def __init__(
        self,
        bootstrap: str,
        store: Store,
        database_url: str,
        partitions: int,
        text_days: int,
        port: int = 0,
        *,
        lag_seconds_max: float = 5.0,
    ) -> None:
        """``lag_seconds_max``: not ready when what is committed isn't applied after so long."""
        self.address = ""
        self.state: State = "starting"
        self.stopped_at: dict[str, Any] | None = None
        self._bootstrap = bootstrap
        self._store = store
        self._database_url = database_url
        self._partitions = partitions
        self._text_days = text_days
        self._port = port
        self._log: Log | None = None
        self._busy: asyncio.Future[Any] | None = None
        self._snapshots_due: dict[Decider, None] = {}
        self._snapshot_not_before_seconds = 0.0
        self._retention_at_seconds = 0.0
        self._lag_seconds_max = lag_seconds_max
        self._lag_records: int | None = None
        self._goal: tuple[dict[Position, int], float] | None = None
        """Ends of the log that were not reached when last looked, and when they were first seen."""
        now = time.monotonic()
        self._kafka_answered_at_seconds = self._database_answered_at_seconds = self._progress_at_seconds = now

    async def run(self, ending: Ending) -> int:
        """Project until asked to stop; the exit code, see above, with which the process must end then."""
        asked = ending.in_order()
        try:
            await self._serve()
        except OSError as error:
            log.error("port_not_free", error=str(error), advice="choose another BERTH_PROJECTOR_PORT, or 0: a free one")
            return EXIT_SETUP
        follow = asyncio.create_task(self._follow_for_ever(), name="follow")
        watch = asyncio.create_task(self._watch(), name="watch")
        asking = asyncio.create_task(asked.wait(), name="asked")
        await asyncio.wait({follow, watch, asking}, return_when=asyncio.FIRST_COMPLETED)
        code = self._why(follow, watch)
        ending.begin(code)
        self.state = "stopped"
        follow.cancel()
        watch.cancel()
        await asyncio.wait({follow, watch}, timeout=STOP_SECONDS_MAX)  # a client may swallow it
        if self._busy is not None and not self._busy.done():
            log.warning("database_does_not_answer", kept="a batch under way is applied as a whole or not at all")
        else:
            self._store.close()
        log.info("projector_stopped", exit_code=code)
        return code

    def _why(self, *tasks: asyncio.Task[None]) -> int:
        """The exit code, and the reason in the log."""
        match next((_error_of(task) for task in tasks if task.done()), None):
            case None:
                return EXIT_ASKED
            case CannotApply() as error:
                self.stopped_at = {"topic": error.topic, "partition": error.partition, "offset": error.offset}
                log.critical(
                    "cannot_apply",
                    **self.stopped_at,
                    error=error.why,
                    kept="everything before it is applied, nothing of it and after it in its partition",
                    advice="this is a bug of Berth or a record that no worker wrote; after an update start again",
                )
                return EXIT_CANNOT_APPLY
            case SchemaRefused() as error:
                log.critical("tables_do_not_fit", error=error.happened, advice=error.advice)
                return EXIT_SETUP
            case LogDoesNotFit() as error:
                log.critical(
                    "log_does_not_fit",
                    error=str(error),
                    kept="the tables are as they were",
                    advice=ADVICE,
                )
                return EXIT_SETUP
            case error:
                log.critical("projector_stops", error=repr(error), exc_info=error)
                return EXIT_ERROR

    # Following the log

    async def _follow_for_ever(self) -> None:
        while True:
            try:
                await self._persist("connecting to the database", DATABASE_AWAY, self._open_store)
                await self._persist("connecting to Kafka", (KafkaError,), self._follow)
            except DATABASE_AWAY as error:
                log.warning("database_away", error=str(error).strip())

    async def _persist(
        self, state: State, passing: tuple[type[BaseException], ...], action: Callable[[], Awaitable[Result]]
    ) -> Result:
        """Do it again, after growing pauses, until nothing that passes stands in the way."""

        def tell(attempt: RetryCallState) -> None:
            error = attempt.outcome.exception() if attempt.outcome else None
            log.warning("trying_again", doing=state, error=str(error).strip() or repr(error))

        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(passing),
            wait=wait_exponential_jitter(0.05, RETRY_SECONDS_MAX, jitter=0.1),
            before_sleep=tell,
        ):
            with attempt:
                self.state = state
                return await action()
        raise AssertionError("tried for ever")

    async def _open_store(self) -> None:
        await self._in_thread(self._store.open)
        while not await self._in_thread(self._store.claim):
            if self.state != "waiting for another projector to end":
                self.state = "waiting for another projector to end"
                log.info("another_projector_works", advice="this one takes over when it ends")
            await asyncio.sleep(CLAIM_SECONDS)

    async def _begin(self, reader: Log) -> None:
        """Go on from the checkpoints, and make the snapshots that are due."""
        await reader.seek(await self._in_thread(self._store.positions, reader.wanted))
        self._snapshots_due = dict.fromkeys(await self._in_thread(self._store.without_snapshot))

    async def _follow(self) -> None:
        """Apply what comes, for ever. Raises what stands in the way."""
        async with Log(self._bootstrap, self._partitions) as reader:
            self._log = reader
            try:
                await self._begin(reader)
                self.state = "following"
                self._progress_at_seconds = time.monotonic()
                log.info("projector_follows", behind_records=await reader.remaining(await reader.ends()))
                while True:
                    wait_seconds = SNAPSHOT_WAIT_SECONDS if self._snapshots_due else IDLE_WAIT_SECONDS
                    batch = await reader.take(BATCH_RECORDS_MAX, wait_seconds)
                    next_at_seconds = time.monotonic() + BATCH_APART_SECONDS
                    if batch is not None:
                        await self._apply(reader, batch)
                    await self._between_batches(is_idle=batch is None)
                    if batch is not None:
                        await asyncio.sleep(max(0.0, next_at_seconds - time.monotonic()))
            finally:
                self._log = None

    async def _apply(self, reader: Log, batch: Batch) -> None:
        try:
            outcome = await self._in_thread(self._store.apply, batch)
        except CannotApply as error:
            rest = batch.before(error.topic, error.partition, error.offset)
            if rest.records:
                await self._in_thread(self._store.apply, rest)
            raise
        except (psycopg.DataError, psycopg.IntegrityError):
            await self._apply_one_by_one(batch)
            return
        match outcome:
            case Applied(decided_at, due):
                self._snapshots_due.update(dict.fromkeys(due))
                now = time.time_ns() // 1000
                for at in decided_at:
                    metrics.LAG_SECONDS.observe(max(0, now - at) / 1e6)
                metrics.DECISIONS_APPLIED.inc(len(decided_at))
                self._progress_at_seconds = time.monotonic()
            case Moved(positions):
                log.warning(
                    "checkpoints_moved", advice="tables were rebuilt, or another projector runs; going on there"
                )
                await reader.seek({position: positions.get(position, 0) for position in reader.wanted})
                await self._in_thread(self._store.positions, reader.wanted)

    async def _apply_one_by_one(self, batch: Batch) -> None:
        """Something in the batch can't be stored: find what. Raises CannotApply."""
        positions = dict(batch.begins)
        for record in batch.records:
            position = record.topic, record.partition
            single = Batch([record], {position: positions[position]}, {position: record.offset + 1})
            try:
                await self._in_thread(self._store.apply, single)
            except (psycopg.DataError, psycopg.IntegrityError) as error:
                why = f"PostgreSQL refuses it: {str(error).strip()}"
                raise CannotApply(record.topic, record.partition, record.offset, why) from error
            positions[position] = record.offset + 1

    async def _between_batches(self, *, is_idle: bool) -> None:
        """A snapshot if one is due and there is time, and what retention ends."""
        now = time.monotonic()
        if self._snapshots_due and (is_idle or now >= self._snapshot_not_before_seconds):
            decider = next(iter(self._snapshots_due))
            is_due_again = await self._in_thread(self._store.make_snapshot, decider)
            del self._snapshots_due[decider]
            if is_due_again:
                self._snapshots_due[decider] = None
            ended_seconds = time.monotonic()
            self._snapshot_not_before_seconds = ended_seconds + SNAPSHOT_PAUSES * (ended_seconds - now)
        if now - self._retention_at_seconds > RETENTION_SECONDS:
            before = time.time_ns() // 1000 - self._text_days * DAY_MICROSECONDS
            deleted = await self._in_thread(self._store.forget_texts, before, RETENTION_ROWS_MAX)
            if deleted < RETENTION_ROWS_MAX:
                self._retention_at_seconds = now

    async def _in_thread(self, action: Callable[..., Result], *arguments: Any) -> Result:
        """Let the store work without holding up the loop. When cancelled, wait for its end: it is in a transaction."""
        self._busy = busy = asyncio.ensure_future(asyncio.to_thread(action, *arguments))
        try:
            return await asyncio.shield(busy)
        except asyncio.CancelledError:
            await asyncio.wait({busy}, timeout=STOP_SECONDS_MAX)
            raise

    # Watching

    async def _watch(self) -> None:
        """Each second: whether Kafka and PostgreSQL answer, and how far behind we are."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_database())
            group.create_task(drift.watch(self._bootstrap, self._database_url, self._partitions), name="drift")
            while True:
                if self._log is not None:
                    reader = self._log
                    with suppress(KafkaError, TimeoutError):
                        async with asyncio.timeout(ANSWER_SECONDS_MAX):
                            ends = await reader.ends()
                        if reader.positions:
                            self._lag_records = await reader.remaining(ends)
                            metrics.LAG_RECORDS.set(self._lag_records)
                            if not self._lag_records:
                                self._goal = None
                            elif self._goal is None or not await reader.remaining(self._goal[0]):
                                self._goal = ends, time.monotonic()
                        self._kafka_answered_at_seconds = time.monotonic()
                if not self._lag_records:
                    self._progress_at_seconds = time.monotonic()
                await asyncio.sleep(WATCH_SECONDS)

    async def _watch_database(self) -> None:
        while True:
            with suppress(psycopg.Error, TimeoutError):
                async with asyncio.timeout(ANSWER_SECONDS_MAX):
                    connection = await psycopg.AsyncConnection.connect(self._database_url, autocommit=True)
                async with connection:
                    while True:
                        async with asyncio.timeout(ANSWER_SECONDS_MAX):
                            await connection.execute("SELECT 1")
                        self._database_answered_at_seconds = time.monotonic()
                        await asyncio.sleep(WATCH_SECONDS)
            await asyncio.sleep(WATCH_SECONDS)

    def why_not_ready(self) -> list[str]:
        """What keeps the tables from being up with the log; empty: nothing."""
        reasons: list[str] = [] if self.state == "following" else [self.state]
        now = time.monotonic()
        for name, answered_at in (
            ("Kafka", self._kafka_answered_at_seconds),
            ("the database", self._database_answered_at_seconds),
        ):
            if now - answered_at > ANSWER_SECONDS_MAX + WATCH_SECONDS:
                reasons.append(f"{name} has not answered for {now - answered_at:.0f} s")
        if now - self._progress_at_seconds > STANDSTILL_SECONDS_MAX:
            reasons.append(f"nothing was applied for {now - self._progress_at_seconds:.0f} s")
        if self._goal is not None and now - self._goal[1] > self._lag_seconds_max:
            reasons.append(f"{now - self._goal[1]:.0f} s behind the log, {self._lag_records} records")
        return reasons

    def status(self) -> dict[str, Any]:
        """What /readyz says beside whether it is ready."""
        positions = self._log.positions if self._log is not None else {}
        return {
            "address": self.address,
            "state": self.state,
            "lag_records": self._lag_records,
            "positions": _of_topic(positions, DECISIONS.name),
            "site_positions": _of_topic(positions, SITE_DECISIONS.name),
            "stopped_at": self.stopped_at,
        }

    # Answering

    async def _serve(self) -> None:
        """Answer /healthz, /readyz and /metrics on 127.0.0.1."""
        site = web.Application()
        site.add_routes(
            [
                web.get("/healthz", self._answer_health),
                web.get("/readyz", self._answer_ready),
                web.get("/metrics", self._answer_metrics),
            ]
        )
        runner = web.AppRunner(site, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self._port).start()
        self.address = f"127.0.0.1:{runner.addresses[0][1]}"
        log.info("projector_listens", readyz=f"http://{self.address}/readyz")

    async def _answer_health(self, _request: web.Request) -> web.Response:
        return web.json_response({"healthy": self.state != "stopped"})

    async def _answer_ready(self, _request: web.Request) -> web.Response:
        reasons = self.why_not_ready()
        return web.json_response(
            {"ready": not reasons, "reasons": reasons, **self.status()}, status=503 if reasons else 200
        )

    async def _answer_metrics(self, _request: web.Request) -> web.Response:
        body = metrics.as_text(is_ready=not self.why_not_ready())
        return web.Response(body=body, headers={"Content-Type": metrics.CONTENT_TYPE})


def _error_of(task: asyncio.Task[None]) -> BaseException | None:
    """Why the task ended, also when a library of its own accord cancelled it."""
    return asyncio.CancelledError(f"nobody asked {task.get_name()} to end") if task.cancelled() else task.exception()


def _of_topic(positions: Mapping[Position, int], wanted: str) -> dict[str, int]:
    return {str(partition): offset for (topic, partition), offset in sorted(positions.items()) if topic == wanted}


def _named(positions: Mapping[Position, int]) -> dict[str, int]:
    return {f"{topic}/{partition}": offset for (topic, partition), offset in sorted(positions.items())}
