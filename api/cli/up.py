"""``berth up``: the servers that Berth needs, on this machine, in the foreground.

Kafka and PostgreSQL run embedded unless BERTH_KAFKA and BERTH_DATABASE_URL name others. Their data stays in the data
directory, and ``endpoints.json`` there tells the other commands where they listen.
"""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Final
from urllib.parse import urlsplit, urlunsplit

import typer
from rich.console import Console

from api.cli import local_secret
from api.cli.command_failed import CommandFailed
from api.cli.directory_lock import DirectoryLock
from api.cli.embedded_kafka import USUAL_PORT, EmbeddedKafka
from api.cli.embedded_postgres import EmbeddedPostgres
from api.cli.endpoints import published
from api.cli.kafka_jars import KafkaJars
from api.cli.topics import require_fit
from streams.kafka import topics
from streams.settings import Settings, load_settings

WATCH_SECONDS: Final = 0.5
INTERRUPTED_EXIT_CODE: Final = 130


@dataclass(frozen=True, slots=True)
class Services:
    """What runs: the addresses, and the embedded servers unless others were named."""

    bootstrap: str
    database_url: str
    kafka: EmbeddedKafka | None
    postgres: EmbeddedPostgres | None

    def failure(self) -> CommandFailed | None:
        """Why one of the embedded servers died on its own, or None."""
        servers = (server for server in (self.kafka, self.postgres) if server is not None)
        return next((failure for server in servers if (failure := server.failure()) is not None), None)


def up() -> None:
    """Start Kafka and PostgreSQL with their data in .berth, make the topics, and stay until Ctrl-C.

    BERTH_KAFKA=host:port uses that Kafka instead and starts none, BERTH_DATABASE_URL=postgresql://… that PostgreSQL.
    The data is kept: the next start goes on with it.
    """
    settings = load_settings()
    console = Console()
    end_on_sigterm()
    try:
        with services(settings, console) as running:
            try:
                console.print(_what_to_try(settings), highlight=False, markup=False)
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
        postgres: EmbeddedPostgres | None = None
        bootstrap, database_url = settings.kafka, settings.database_url
        with console.status("starting") as status:
            lock = DirectoryLock(settings.data_directory)
            lock.acquire(status.update)
            stack.callback(lock.release)
            local_secret.ensure(settings)
            if bootstrap is None:
                kafka = EmbeddedKafka(
                    settings.data_directory / "kafka",
                    port=USUAL_PORT,
                    report=status.update,
                    jars=KafkaJars(repository=settings.jar_repository),
                )
                stack.callback(kafka.stop)
                bootstrap = kafka.start().bootstrap
            if database_url is None:
                postgres = EmbeddedPostgres(settings.data_directory / "postgres", report=status.update)
                stack.callback(postgres.stop)
                database_url = postgres.start().url
            status.update("making the topics")
            created = asyncio.run(topics.create(bootstrap, settings.partitions))
            require_fit(settings, bootstrap)
        stack.enter_context(published(settings, kafka=bootstrap, database_url=database_url))
        _say(console, "Kafka", bootstrap, kafka)
        _say(console, "tables", _without_password(database_url), postgres)
        console.print(f"topics  {len(created)} made, {settings.partitions} partitions each", highlight=False)
        yield Services(bootstrap, database_url, kafka, postgres)


def _say(console: Console, name: str, address: str, server: EmbeddedKafka | EmbeddedPostgres | None) -> None:
    data = "" if server is None else f", data in {os.path.relpath(server.directory)}"
    console.print(f"{name:7} {address}{data}", highlight=False, soft_wrap=True)


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    user = f"{parts.username}@" if parts.username else ""
    return urlunsplit(parts._replace(netloc=user + parts.netloc.rpartition("@")[2]))


def end_on_sigterm() -> None:
    """Let SIGTERM end this program as Ctrl-C does: in order, with KeyboardInterrupt."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


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
            "  berth worker, berth projector, berth api     each in a terminal of its own",
            "  berth token --page    the address of the page, once berth api runs",
            "  berth topics list     what is kept where, and for how long",
            "  berth doctor          whether everything is well",
            f"Ctrl-C stops them; {settings.data_directory} keeps the data.",
        )
    )
