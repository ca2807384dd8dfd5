"""``berth run`` as a person meets it: it shows work, mends what dies, and leaves nothing behind however it ends."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from api.cli.embedded_kafka import EmbeddedKafka
from tests.integration.workers import ROOT

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(480)]
WAIT_SECONDS = 120.0


class Run:
    """A running ``berth run``; ``said`` grows while it runs."""

    def __init__(self, directory: Path, *words: str) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
        self.said = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "api.cli", "run", "--rate", "20", *words],
            cwd=directory,
            env=clean | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reading = threading.Thread(target=self._read)
        self._reading.start()
        self.family: list[psutil.Process] = []

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.said += line

    def wait_for(self, pattern: str) -> re.Match[str]:
        deadline = time.monotonic() + WAIT_SECONDS
        while not (found := re.search(pattern, self.said)):
            assert time.monotonic() < deadline, f"{pattern!r} was not said:\n{self.said}"
            assert self.process.poll() is None, f"it has ended before it said {pattern!r}:\n{self.said}"
            self._reading.join(0.05)
        self.family = psutil.Process(self.process.pid).children(recursive=True)
        return found

    def named(self, word: str) -> psutil.Process:
        """The child that runs this command of ``berth``."""
        (found,) = (one for one in self.family if one.is_running() and one.cmdline()[1:] == ["-m", "api.cli", word])
        return found

    def end(self, how: signal.Signals) -> int:
        self.process.send_signal(how)
        code = self.process.wait(WAIT_SECONDS)
        self._reading.join(WAIT_SECONDS)
        return code

    def left_behind(self, wait_seconds: float) -> list[str]:
        """What still runs of its processes after so long: the shells that watch over them end by themselves."""
        _, alive = psutil.wait_procs(self.family, wait_seconds)
        return [" ".join(one.cmdline()) for one in alive if one.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def directory() -> Iterator[Path]:
    # Not below pytest's, which every start of pytest closes to the user that PostgreSQL runs as for root.
    with TemporaryDirectory(prefix="berth-run-", ignore_cleanup_errors=True) as made:
        yield Path(made)


@pytest.fixture
def started(kafka: EmbeddedKafka, directory: Path) -> Iterator[Run]:
    """Runs after the jars are there: that of the session's broker."""
    run = Run(directory)
    yield run
    if run.process.poll() is None:
        run.end(signal.SIGTERM)
    for one in run.family:
        if one.is_running():
            one.kill()


def test_a_worker_that_is_killed_is_started_again_and_ctrl_c_ends_everything_and_keeps_the_data(
    started: Run, directory: Path
) -> None:
    started.wait_for(r"first dispatch [0-9.]+ s after the start")
    os.kill(started.named("worker").pid, signal.SIGKILL)
    _is_let_in_by_the_address_of_the_page(started, directory / ".berth")
    started.wait_for(r"worker was killed by SIGKILL .* starting again")
    started.wait_for(r"worker was started again")
    assert started.end(signal.SIGINT) == 130
    assert started.left_behind(10) == []
    assert "the data is kept" in started.said
    assert {path.name for path in (directory / ".berth" / "logs").iterdir()} >= {"worker.log", "runner.log", "demo.log"}

    again = Run(directory)
    try:
        again.wait_for("topics +0 made")
        again.wait_for("first dispatch")
    finally:
        again.end(signal.SIGTERM)
    assert again.left_behind(10) == []


def _is_let_in_by_the_address_of_the_page(run: Run, data: Path) -> None:
    page = run.wait_for(r"page +(http://\S+/)#token=(\S+)\n")
    request = urllib.request.Request(f"{page[1]}api/agents", headers={"Authorization": f"Bearer {page[2]}"})
    deadline = time.monotonic() + WAIT_SECONDS
    while (status := _status_of(request)) == 503:  # the projector may still be making the tables
        assert time.monotonic() < deadline
    assert status == 200
    secret = (data / "jwt-secret").read_text().strip()
    assert secret not in run.said
    assert not [
        log.name for log in (data / "logs").iterdir() if secret in log.read_text() or page[2] in log.read_text()
    ]


def _status_of(request: urllib.request.Request) -> int:
    try:
        with urllib.request.urlopen(request) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code


def test_nothing_is_left_behind_when_it_is_killed_itself(started: Run) -> None:
    started.wait_for(r"first dispatch")
    assert len([one for one in started.family if one.name() != "sh"]) >= 4
    started.end(signal.SIGKILL)
    assert started.left_behind(45) == []
