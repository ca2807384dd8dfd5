"""``berth up``: the servers that Berth needs, on this machine, in the foreground.

Kafka runs embedded unless BERTH_KAFKA names another one. Its data stays in the data directory, and
``endpoints.json`` there tells the other commands where it listens; the file is removed when the servers stop, so that
nobody is sent to a port on which somebody else may listen by then.
"""

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Final

import typer
from rich.console import Console

from api.cli.command_failed import CommandFailed
from api.cli.directory_lock import DirectoryLock, cannot_write
from api.cli.embedded_kafka import USUAL_PORT, EmbeddedKafka
from api.cli.kafka_jars import KafkaJars
from api.cli.topics import require_fit
from streams.kafka import topics
from streams.settings import ENDPOINTS_FILE_NAME, Endpoints, Settings, load_settings

WATCH_SECONDS: Final = 0.5
INTERRUPTED_EXIT_CODE: Final = 130


@dataclass(frozen=True, slots=True)
class Services:
    """What runs: Kafka's address, and the embedded broker unless BERTH_KAFKA named another one."""

    bootstrap: str
    kafka: EmbeddedKafka | None

    def failure(self) -> CommandFailed | None:
        """Why one of the embedded servers died on its own, or None."""
        return self.kafka.failure() if self.kafka is not None else None


def up() -> None:
    """Start Kafka with its data in .berth, make the topics, and stay until Ctrl-C.

    BERTH_KAFKA=host:port uses that Kafka instead and starts none. The data is kept: the next start goes on with it.
    """
    settings = load_settings()
    console = Console()
    end_on_sigterm()
    try:
        with services(settings, console) as running:
            console.print(_what_to_try(settings), highlight=False, markup=False)
            try:
                _watch(running)
            except KeyboardInterrupt:
                console.print("stopping; the data is kept (Ctrl-C again: at once)", highlight=False)
    except KeyboardInterrupt:
        console.print("stopped before everything was in order; the data is kept", highlight=False)
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from None


@contextmanager
def services(settings: Settings, console: Console) -> Iterator[Services]:
    """The servers with their topics and ``endpoints.json``, from here to the end of the block.

    Raises CommandFailed when something can't start; then nothing that was started here stays behind.
    """
    with ExitStack() as stack:
        kafka: EmbeddedKafka | None = None
        bootstrap = settings.kafka
        with console.status("starting") as status:
            lock = DirectoryLock(settings.data_directory)
            lock.acquire(status.update)
            stack.callback(lock.release)
            if bootstrap is None:
                kafka = EmbeddedKafka(
                    settings.data_directory / "kafka",
                    port=USUAL_PORT,
                    report=status.update,
                    jars=KafkaJars(repository=settings.jar_repository),
                )
                stack.callback(kafka.stop)
                bootstrap = kafka.start().bootstrap
            status.update("making the topics")
            created = asyncio.run(topics.create(bootstrap, settings.partitions))
            require_fit(settings, bootstrap)
        stack.enter_context(_endpoints(settings, bootstrap))
        where = f"{bootstrap}, data in {settings.data_directory / 'kafka'}" if kafka is not None else bootstrap
        console.print(f"Kafka   {where}", highlight=False)
        console.print(f"topics  {len(created)} made, {settings.partitions} partitions each", highlight=False)
        yield Services(bootstrap, kafka)


def end_on_sigterm() -> None:
    """Let SIGTERM end this program as Ctrl-C does: in order, with KeyboardInterrupt."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


@contextmanager
def _endpoints(settings: Settings, bootstrap: str) -> Iterator[None]:
    path = settings.data_directory / ENDPOINTS_FILE_NAME
    unfinished = path.with_suffix(".unfinished")
    try:
        unfinished.write_text(Endpoints(kafka=bootstrap).model_dump_json() + "\n")
        unfinished.replace(path)
    except OSError as error:
        raise cannot_write(path, error) from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _watch(running: Services) -> None:
    """Stay until somebody interrupts, or a server dies on its own: then raise why."""
    never = threading.Event()
    while not never.wait(WATCH_SECONDS):
        failure = running.failure()
        if failure is not None:
            raise failure


def _what_to_try(settings: Settings) -> str:
    return "\n".join(
        (
            "",
            "Berth's servers are running. In another terminal, in this directory:",
            "  berth topics list     what is kept where, and for how long",
            "  berth doctor          whether everything is well",
            f"Ctrl-C stops them; {settings.data_directory} keeps the data.",
        )
    )
