"""``berth demo``: triggers as they would come from real users, and a line that shows what becomes of them.

Arrivals (``api.load.arrivals``) are sent at their time, whether or not earlier ones were served: load from the outside
doesn't wait for a busy system. Then the log of decisions is followed (``api.load.progress``); nothing is taken from the
runner or the worker directly. Each demo has ids of its own, so several can run, also at once.

With a terminal there is one live line, otherwise a line each second; ``--json`` prints the same as JSON.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice, takewhile
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from pydantic_core import from_json
from rich.console import Console
from rich.live import Live
from rich.text import Text

from api.cli.command_failed import CommandFailed
from api.cli.service import log_to_terminal, run_service
from api.load.arrivals import SECONDS_PER_TOKEN_DEFAULT, Arrival, TraceRefused, generate, read_trace, sped_up
from api.load.progress import Progress, in_words
from streams import CONTROLS, DECISIONS, STATUSES, TRIGGERS
from streams.ending import EXIT_ASKED, Ending
from streams.kafka.clients import honest, stop
from streams.rules.limits import BACKLOG_DEPTH_MAX, PARALLELISM_LIMIT_MAX
from streams.settings import load_settings

WATCHED: Final = (DECISIONS.name, STATUSES.name)
TELL_SECONDS: Final = 1.0
LIVE_SECONDS: Final = 0.2
POLL_MILLISECONDS: Final = 100
NO_WORKER_SECONDS: Final = 5.0
WAITING_WORDS: Final = "waiting for a worker to decide (start one: berth worker)"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to ask for. ``run``: the beginning of all ids of this demo."""

    run: str
    agents: tuple[str, ...]
    limit: int
    arrivals: Iterator[Arrival]
    failure_rate: float | None
    heartbeat_seconds: int | None
    seed: int


def demo(  # noqa: PLR0913 - options of a command line
    *,
    trace: Annotated[
        Path | None,
        typer.Option(help="CSV file with the columns TIMESTAMP, ContextTokens, GeneratedTokens; none: made-up load."),
    ] = None,
    speed: Annotated[
        float, typer.Option(min=0.001, help="How many times as fast time runs, for arrivals and work.")
    ] = 1.0,
    agents: Annotated[int, typer.Option(min=1, max=100_000, help="Agents among which arrivals are spread.")] = 10,
    limit: Annotated[int, typer.Option(min=1, max=PARALLELISM_LIMIT_MAX, help="Turns at once of each agent.")] = 2,
    rate: Annotated[float, typer.Option(min=0.001, help="Made-up load: arrivals per second on average.")] = 7.0,
    seconds_per_token: Annotated[
        float, typer.Option(min=0, help="How long an attempt works for each token that it generates.")
    ] = SECONDS_PER_TOKEN_DEFAULT,
    count: Annotated[int | None, typer.Option(min=1, help="End after so many arrivals.")] = None,
    duration: Annotated[float | None, typer.Option(min=0.001, help="End arrivals after so many seconds.")] = None,
    failures: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of attempts that fail; none: as the runner was told.")
    ] = None,
    heartbeat: Annotated[
        int | None, typer.Option(min=1, help="Ask runners for a sign of life within so many seconds.")
    ] = 10,
    seed: Annotated[int, typer.Option(help="The same seed gives the same load.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")] = False,
) -> None:
    """Send triggers at the pace of a trace or of made-up load, and show what becomes of them, until Ctrl-C.

    It needs a Kafka (berth up), a worker (berth worker) and a runner (berth runner). Try also: --limit 1 (queues grow),
    --rate 100 --seconds-per-token 0.001 (much traffic), --failures 0.2 (retries), --count 100 (comes to an end).
    """
    bootstrap = load_settings().kafka_addresses()
    run = f"demo-{time.time_ns() // 1_000_000:x}"
    plan = Plan(
        run=run,
        agents=tuple(f"demo-agent-{number:0{len(str(agents - 1))}d}" for number in range(agents)),
        limit=limit,
        arrivals=bounded(arrivals_of(trace, rate, seed, seconds_per_token), speed, count, duration),
        failure_rate=failures,
        heartbeat_seconds=heartbeat,
        seed=seed,
    )
    log_to_terminal()
    run_service(_Demo(bootstrap, plan, as_json=as_json).run)


def arrivals_of(trace: Path | None, rate: float, seed: int, seconds_per_token: float) -> Iterable[Arrival]:
    """Those of the trace, or made-up ones. Raises CommandFailed when the file is no trace."""
    if trace is None:
        return generate(rate, seed, seconds_per_token)
    nothing_happened = "everything; nothing was sent."
    try:
        return read_trace(trace, seconds_per_token)
    except TraceRefused as refused:
        raise CommandFailed(
            f"{trace} can't be used as a trace: {refused}.",
            kept=nothing_happened,
            advice="give a CSV file that begins with the line TIMESTAMP,ContextTokens,GeneratedTokens; "
            "or leave --trace out for made-up load.",
        ) from refused
    except OSError as error:
        raise CommandFailed(
            f"{trace} can't be read: {error.strerror or error}.", kept=nothing_happened, advice="check the path."
        ) from error


def bounded(
    arrivals: Iterable[Arrival], speed: float, count: int | None, duration_seconds: float | None
) -> Iterator[Arrival]:
    """The arrivals at that speed, up to a number of them and a time."""
    faster = sped_up(arrivals, speed)
    if duration_seconds is not None:
        end = duration_seconds
        faster = takewhile(lambda arrival: arrival.after_seconds <= end, faster)
    return islice(faster, count)


class _Demo:
    """One demo, from its agents' settings to its summary."""

    def __init__(self, bootstrap: str, plan: Plan, *, as_json: bool) -> None:
        self._bootstrap = bootstrap
        self._plan = plan
        self._as_json = as_json
        self._console = Console()
        self._began = time.monotonic()
        self._configured: set[str] = set()
        self._answered = asyncio.Event()
        self._wake = asyncio.Event()
        self._has_produced = False
        self._progress = Progress(plan.run, {})

    async def run(self, ending: Ending) -> int:
        """Send, watch and tell until everything has ended or Ctrl-C."""
        producer = AIOKafkaProducer(bootstrap_servers=self._bootstrap, acks="all", enable_idempotence=True, linger_ms=1)
        await producer.start()
        try:
            async with self._reading() as consumer:
                asked = ending.in_order()
                tasks = [
                    asyncio.create_task(coroutine)
                    for coroutine in (self._watch(consumer), self._produce(producer), self._tell(), asked.wait())
                ]
                await self._until_over(tasks)
        finally:
            await stop(producer)
        self._sum_up()
        return EXIT_ASKED

    async def _until_over(self, tasks: list[asyncio.Task[Any]]) -> None:
        """Until the telling is over, Ctrl-C, or an error in any task."""
        watching, producing, telling, stopping = tasks
        pending: set[asyncio.Task[Any]] = set(tasks)
        try:
            while not (telling.done() or stopping.done()):
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(watching, producing, telling, stopping, return_exceptions=True)

    # -- sending ------------------------------------------------------------------------------------------------------

    async def _produce(self, producer: AIOKafkaProducer) -> None:
        plan, chance = self._plan, random.Random(self._plan.seed)  # noqa: S311 - has to be the same each time
        for agent_id in plan.agents:
            await self._send(producer, CONTROLS.name, agent_id, self._configure(agent_id))
        await producer.flush()
        await self._answered.wait()
        begin = self._began = time.monotonic()
        for number, arrival in enumerate(plan.arrivals):
            early_seconds = begin + arrival.after_seconds - time.monotonic()
            if early_seconds > 0:
                await asyncio.sleep(early_seconds)
            agent_id = chance.choice(plan.agents)
            self._progress.produced += 1
            await self._send(producer, TRIGGERS.name, agent_id, self._trigger(agent_id, number, arrival))
        await producer.flush()
        self._has_produced = True
        self._wake.set()

    async def _send(self, producer: AIOKafkaProducer, topic: str, agent_id: str, record: dict[str, Any]) -> None:
        value = json.dumps({name: field for name, field in record.items() if field is not None}).encode()
        acknowledgement: asyncio.Future[Any] = await producer.send(topic, value, agent_id.encode())
        acknowledgement.add_done_callback(self._check_sent)

    def _check_sent(self, acknowledgement: "asyncio.Future[Any]") -> None:
        if not acknowledgement.cancelled() and acknowledgement.exception() is not None:
            self._progress.produced -= 1
            self._console.print(f"a record could not be sent: {acknowledgement.exception()!r}", style="red")

    def _configure(self, agent_id: str) -> dict[str, Any]:
        return {
            "type": "configure",
            "v": 1,
            "id": f"{self._plan.run}-configure-{agent_id}",
            "agent_id": agent_id,
            "requested_by": "berth demo",
            "parallelism_limit": self._plan.limit,
            "max_backlog_depth": BACKLOG_DEPTH_MAX,
        }

    def _trigger(self, agent_id: str, number: int, arrival: Arrival) -> dict[str, Any]:
        plan, id = self._plan, f"{self._plan.run}-{number:06d}"
        payload: dict[str, Any] = {"work_seconds": round(arrival.work_seconds, 4)}
        if plan.failure_rate is not None:
            payload["failure_rate"] = plan.failure_rate
        return {
            "type": "trigger",
            "v": 1,
            "id": id,
            "agent_id": agent_id,
            "conversation_id": f"conversation-{id}",
            "kind": "task",
            "message": f"request {number} of the demo",
            "payload": payload,
            "requested_by": "berth demo",
            "created_at": datetime.now(UTC).isoformat(timespec="microseconds"),
            "heartbeat_seconds": plan.heartbeat_seconds,
        }

    # -- watching -----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[AIOKafkaConsumer]:
        """Decisions and statuses from now on."""
        consumer = AIOKafkaConsumer(
            *WATCHED,
            bootstrap_servers=self._bootstrap,
            isolation_level="read_committed",
            enable_auto_commit=False,
            auto_offset_reset="earliest",
        )
        await consumer.start()
        try:
            partitions = consumer.assignment()
            missing = set(WATCHED) - {partition.topic for partition in partitions}
            if missing:
                raise CommandFailed(
                    f"Kafka at {self._bootstrap} has no topics of Berth ({', '.join(sorted(missing))}).",
                    kept="everything; nothing was sent.",
                    advice="make them: berth topics create.",
                )
            ends = await consumer.end_offsets(partitions)
            for partition, end in ends.items():
                consumer.seek(partition, end)
            self._progress = Progress(
                self._plan.run,
                {partition: end for (topic, partition), end in ends.items() if topic == STATUSES.name},
            )
            yield consumer
        finally:
            await stop(consumer)

    @honest
    async def _watch(self, consumer: AIOKafkaConsumer) -> None:
        progress, has_started = self._progress, False
        while True:
            fetched = await consumer.getmany(timeout_ms=POLL_MILLISECONDS)
            now = time.time()
            for partition, records in fetched.items():
                for record in records:
                    if partition.topic == STATUSES.name:
                        status = str(_parsed(record.value).get("status"))
                        progress.status(partition.partition, record.offset, status, record.timestamp / 1000)
                    else:
                        decision = from_json(record.value)
                        progress.decision(decision, now)
                        self._note_configured(decision)
            if self._is_over() or (progress.started and not has_started):
                self._wake.set()
            has_started = progress.started > 0

    def _is_over(self) -> bool:
        return self._has_produced and self._progress.is_settled

    def _note_configured(self, decision: dict[str, Any]) -> None:
        command = decision["command"]
        if command["type"] == "configure" and str(command["id"]).startswith(self._plan.run):
            self._configured.add(command["agent_id"])
            if len(self._configured) == len(self._plan.agents):
                self._answered.set()
                self._wake.set()

    # -- telling ------------------------------------------------------------------------------------------------------

    async def _tell(self) -> None:
        """Tell how far it is, and the first start at once, until everything that was sent has ended."""
        with self._live() as live:
            while not self._is_over():
                self._say(live)
                self._wake.clear()
                try:
                    async with asyncio.timeout(TELL_SECONDS if live is None else LIVE_SECONDS):
                        await self._wake.wait()
                except TimeoutError:
                    continue

    def _live(self) -> AbstractContextManager[Live | None]:
        if self._as_json or not self._console.is_terminal:
            return nullcontext()
        return Live(console=self._console, auto_refresh=False)

    def _say(self, live: Live | None) -> None:
        seconds = time.monotonic() - self._began
        if self._as_json:
            state = "running" if self._answered.is_set() else "waiting_for_worker"
            typer.echo(json.dumps(self._as_object(state)))
            return
        words = in_words(self._as_object("running"))
        if not self._answered.is_set():
            words = WAITING_WORDS if seconds > NO_WORKER_SECONDS else "setting the agents' limits"
        if live is None:
            self._console.out(words, highlight=False)
        else:
            live.update(Text(words), refresh=True)

    def _as_object(self, state: str) -> dict[str, Any]:
        return {"state": state, "seconds": round(time.monotonic() - self._began, 3), **self._progress.as_json()}

    def _sum_up(self) -> None:
        progress, seconds = self._progress, time.monotonic() - self._began
        if self._as_json:
            typer.echo(json.dumps(self._as_object("ended")))
            return
        latency = progress.freed_to_next()
        freed = (
            f"A place that became free was given away within {latency.p50:.0f} ms (half of the times), "
            f"{latency.p99:.0f} ms (99 of 100), {latency.worst:.0f} ms (the worst of {latency.measured})."
            if latency is not None
            else "No place became free while somebody waited for it."
        )
        left = progress.live
        rest = f"{left} have not ended; Berth keeps them." if left else "Everything that was accepted has ended."
        self._console.print(
            f"\n{progress.produced} triggers in {seconds:.1f} s for {len(self._plan.agents)} agents with limit "
            f"{self._plan.limit}: {progress.started} attempts started, {progress.count('finished')} finished, "
            f"{progress.count('failed')} failed for good, {progress.refused} refused. {rest}\n{freed}",
            highlight=False,
            soft_wrap=True,
        )


def _parsed(value: bytes | None) -> dict[str, Any]:
    """A record of a topic into which others write, who may be wrong."""
    try:
        content = from_json(value or b"")
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
