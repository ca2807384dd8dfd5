"""``berth run``: everything on this machine with one command: servers, worker, API, runner, and load to look at.

Each part is a child process (``children.py``) that is started again when it fails, so that killing one shows what Berth
promises. The demo prints JSON into a pipe, and this process, which alone writes to the terminal, shows it as one line.
"""

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, Final

import psutil
import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from api.cli.children import ChildProcess
from api.cli.endpoints import listed
from api.cli.token import page_address
from api.cli.up import INTERRUPTED_EXIT_CODE, Services, end_on_sigterm, services
from api.load.progress import in_words
from streams.rules.limits import PARALLELISM_LIMIT_MAX
from streams.settings import Settings, load_settings

WATCH_SECONDS: Final = 0.2
TELL_SECONDS: Final = 5.0
RUNNER_END_SECONDS: Final = 2.0


def run(
    *,
    agents: Annotated[int, typer.Option(min=1, max=100_000, help="Agents of the load.")] = 10,
    limit: Annotated[int, typer.Option(min=1, max=PARALLELISM_LIMIT_MAX, help="Turns at once of each agent.")] = 2,
    rate: Annotated[float, typer.Option(min=0, help="Triggers per second on average, in bursts. 0: no load.")] = 7.0,
    trace: Annotated[
        Path | None, typer.Option(help="Take arrivals from this file instead; see berth demo --help.")
    ] = None,
    speed: Annotated[float, typer.Option(min=0.001, help="How many times as fast time runs for the load.")] = 1.0,
    failures: Annotated[
        float, typer.Option(min=0, max=1, help="Share of attempts that fail and are tried again.")
    ] = 0.02,
    deaths: Annotated[float, typer.Option(min=0, max=1, help="Share of attempts whose runner falls silent.")] = 0.0,
    workers: Annotated[int, typer.Option(min=1, max=16, help="Stream workers; they share the partitions.")] = 1,
) -> None:
    """Start Kafka, PostgreSQL, all of Berth and some load, show what happens, and stop everything on Ctrl-C.

    The data is kept in .berth and the next start goes on with it. A part of Berth that dies is started again: kill one
    and look. When Kafka or PostgreSQL dies, everything ends, and says why.
    """
    settings = load_settings()
    console = Console()
    end_on_sigterm()
    load = ["--agents", str(agents), "--limit", str(limit), "--speed", str(speed)]
    load += ["--trace", str(trace)] if trace is not None else ["--rate", str(rate)]
    try:
        with services(settings, console) as servers:
            family = _Family(settings.data_directory / "logs", workers)
            family.add("projector", "projector")
            family.add("api", "api")
            family.add("runner", "runner", "--failures", str(failures), "--deaths", str(deaths),
                       "--end-seconds", str(RUNNER_END_SECONDS))  # fmt: skip
            if rate > 0 or trace is not None:
                family.add_demo(*load)
            with family.running(console):
                _look_after(family, servers, settings, console)
    except KeyboardInterrupt:
        console.print("stopped; the data is kept", highlight=False)
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from None


class _Family:
    """The children, and what the demo said last."""

    def __init__(self, logs: Path, workers: int) -> None:
        self.logs = logs
        self.children: list[ChildProcess] = []
        self.told: dict[str, Any] = {}
        for number in range(1, workers + 1):
            self.add("worker" if workers == 1 else f"worker-{number}", "worker")

    def add(self, name: str, *arguments: str, prints_to: int | None = None) -> None:
        """One more child."""
        self.children.append(ChildProcess(name, arguments, self.logs / f"{name}.log", prints_to=prints_to))

    def add_demo(self, *arguments: str) -> None:
        """The load, whose words are read from a pipe."""
        reader, writer = os.pipe()
        threading.Thread(target=self._hear, args=(reader,), daemon=True).start()
        self.add("demo", "demo", "--json", *arguments, prints_to=writer)

    @contextmanager
    def running(self, console: Console) -> Iterator[None]:
        """All of them run from here to the end of the block; then they have ended."""
        try:
            for child in self.children:
                child.start()
            yield
        except KeyboardInterrupt:
            console.print("stopping; the data is kept (Ctrl-C again: at once)", highlight=False)
            raise
        finally:
            self._end()

    def _end(self) -> None:
        try:
            for child in self.children:
                child.ask_to_end()
            for child in self.children:
                child.wait_for_end()
        finally:
            for child in self.children:
                child.kill()

    def _hear(self, reader: int) -> None:
        with os.fdopen(reader, "rb") as lines:
            for line in lines:
                self.told = json.loads(line)


def _look_after(family: _Family, servers: Services, settings: Settings, console: Console) -> None:
    """Show how it goes until somebody interrupts; raise what can't be helped."""
    began_at, has_dispatched, told_at, page = psutil.Process().create_time(), False, 0.0, None
    live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else nullcontext()
    never = threading.Event()
    with live as shown:
        while not never.wait(WATCH_SECONDS):
            failure = servers.failure()
            if failure is not None:
                raise failure
            for child in family.children:
                happened = child.watch()
                if happened is not None:
                    console.print(happened, style="yellow", highlight=False, soft_wrap=True)
            if page is None and (page := listed(settings).get("api")) is not None:
                shown_page = page_address(settings, page)
                console.print(f"page    {shown_page}", highlight=False, style="bold", soft_wrap=True)
            if family.told.get("started") and not has_dispatched:
                has_dispatched = True
                console.print(f"first dispatch {time.time() - began_at:.1f} s after the start", highlight=False)
                console.print(_what_to_try(family, settings), highlight=False, markup=False, soft_wrap=True)
            if shown is not None:
                shown.update(Text(_line(family)), refresh=True)
            elif time.monotonic() - told_at > TELL_SECONDS:
                told_at = time.monotonic()
                console.print(_line(family), highlight=False, soft_wrap=True)


def _line(family: _Family) -> str:
    if not family.told:
        return f"starting {', '.join(child.name for child in family.children)}"
    if family.told["state"] == "waiting_for_worker":
        return "waiting for the worker's first decisions"
    return in_words(family.told)


def _what_to_try(family: _Family, settings: Settings) -> str:
    berth = "berth" if shutil.which("berth") else os.path.relpath(Path(sys.executable).parent / "berth")
    workers = [child for child in family.children if child.name.startswith("worker")]
    things = (
        (f"{berth} verify", "check every decision that was made so far"),
        (f"{berth} demo --limit 1 --rate 20", "more load, for agents that may do one thing at a time"),
        (f"kill -9 {workers[0].pid}", "what a crash of the worker does; it is started again"),
        (f"{berth} worker", "one more worker; the two share the partitions"),
        (f"{berth} topics list", "what is kept in Kafka, and for how long"),
        (f"{berth} token", 'a token for the HTTP API: curl -H "Authorization: Bearer $(berth token)" …'),
    )
    width = max(len(command) for command, _ in things)
    lines = [f"  {command:{width}}  {meaning}" for command, meaning in things]
    logs = ", ".join(child.log_path.name for child in family.children)
    return "\n".join(
        ("", "Try in another terminal, in this directory:", *lines, f"Logs: {logs} in {family.logs}",
         f"Ctrl-C stops everything; {settings.data_directory} keeps the data.", "")
    )  # fmt: skip
