"""docs/quick-start.md and the first steps of README.md, command by command, as typed beside ``make run``."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from api.cli.embedded_kafka import EmbeddedKafka
from streams.settings import Endpoints
from tests.integration.test_run import Run
from tests.integration.workers import ROOT

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]

COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)$", re.MULTILINE)
SHOWN_SECONDS = 60.0


def blocks(document: str) -> list[list[str]]:
    """The commands of each shell block."""
    text = (Path(ROOT) / document).read_text()
    return [COMMAND.findall(block) for block in re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL)]


class Terminal:
    """The other terminal: it knows the token, and the address that ``make run`` has printed."""

    def __init__(self, directory: Path, address: str) -> None:
        self._directory = directory
        self._address = address
        self._variables: dict[str, str] = {}

    def set_token(self, command: str) -> None:
        self._variables["TOKEN"] = self.run(f'{command}; echo "$TOKEN"').strip()

    def run(self, command: str) -> str:
        code, said = self._ended(command)
        assert code == 0, f"{command}\n{said}"
        return said

    def _ended(self, command: str) -> tuple[int, str]:
        """Its exit code and what it printed."""
        berth = f"{shlex.quote(sys.executable)} -m api.cli"
        here = command.replace(".venv/bin/berth", berth).replace("http://127.0.0.1:8080", self._address)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
        done = subprocess.run(
            ["bash", "-c", here],
            cwd=self._directory,
            env=clean | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"} | self._variables,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, done.stdout if done.returncode == 0 else done.stdout + done.stderr

    def until(self, command: str, is_there: Callable[[str], bool]) -> str:
        """As somebody looks again and again, also when the tables don't have it yet."""
        deadline = time.monotonic() + SHOWN_SECONDS
        while True:
            code, said = self._ended(command)
            if code == 0 and is_there(said):
                return said
            assert time.monotonic() < deadline, f"{command} shows only:\n{said}"


@pytest.fixture
def directory() -> Iterator[Path]:
    """Beside pytest's own directories: every pytest that starts closes those for other users, as PostgreSQL's is."""
    with TemporaryDirectory(prefix="berth-quick-start-", ignore_cleanup_errors=True) as made:
        yield Path(made)


@pytest.fixture
def running(kafka: EmbeddedKafka, directory: Path) -> Iterator[Run]:
    """Beside the session's broker, whose jars are there."""
    run = Run(directory, "--rate", "2", "--agents", "2")
    yield run
    if run.process.poll() is None:
        run.end(signal.SIGTERM)
    assert run.left_behind(10) == []


def test_every_command_does_what_the_page_says(running: Run, directory: Path) -> None:
    makefile = (Path(ROOT) / "Makefile").read_text()
    [start], [doctor, token], [configure], [burst], watch, [ask], [stop, queue], pause, [look], reply, back = blocks(
        "docs/quick-start.md"
    )
    assert start == "make run"
    assert re.search(r"^run:.*\n\t\$\(BIN\)/berth run$", makefile, re.MULTILINE)
    running.wait_for("first dispatch")
    running.wait_for(r"page +http")
    address = Endpoints.model_validate_json((directory / ".berth" / "endpoints.json").read_bytes()).api
    assert address is not None
    terminal = Terminal(directory, address)

    assert "Kafka" in terminal.run(doctor)
    terminal.set_token(token)
    assert '"created":true' in terminal.run(configure)
    first = terminal.run(burst)
    assert (first.count('"status":"running"'), first.count('"status":"queued"')) == (2, 4)
    assert terminal.run(burst).count('"repeated":true') == 6

    agents, queue_of, why = watch
    assert queue_of == queue
    assert "chapter-1" in terminal.until(agents, lambda said: "chapter-2" in said)
    waiting = terminal.until(queue, lambda said: "chapter-6" in said)
    assert [f"chapter-{number}" in waiting for number in range(1, 7)] == [False, False, True, True, True, True]
    assert "agent_parallelism_limit_reached" in terminal.until(why, lambda said: "chapter-1" in said)
    assert '"code":"agent_parallelism_limit_reached"' in terminal.run(ask)

    terminal.run(stop)
    terminal.until(queue, lambda said: "chapter-3" not in said and "chapter-4" in said)

    for command in pause:
        terminal.run(command)
    terminal.until(look, lambda said: "paused" in said)
    message, look_again = reply
    assert look_again == look
    assert '"status":"running"' in terminal.run(message)
    terminal.until(look, lambda said: said.count("finished") >= 2)

    explain, verify = back
    assert "chapter-1" in terminal.run(explain)
    terminal.run(verify)

    [start_too], _, [doctor_too, *first_steps, look_at_it] = blocks("README.md")[:3]
    assert (start_too, doctor_too) == (start, doctor)
    for command in first_steps:
        assert '"log_position"' in terminal.run(command)
    terminal.until(look_at_it, lambda said: "finished" in said)
    assert running.end(signal.SIGINT) == 130
