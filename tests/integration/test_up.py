"""``berth up``, ``berth topics`` and ``berth doctor`` as a person meets them: processes, signals and exit codes."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from api.cli.embedded_kafka import EmbeddedKafka
from streams import TOPICS

pytestmark = pytest.mark.kafka
READY = "Ctrl-C stops"
END_TIMEOUT_SECONDS = 45


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
    return kept | {"COLUMNS": "200", "PYTHONUNBUFFERED": "1"} | variables


def berth(directory: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "api.cli", *words]
    return subprocess.run(
        command,
        cwd=directory,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


class Up:
    """A running ``berth up``; ``said`` holds what it printed until it was ready."""

    def __init__(self, directory: Path, **variables: str) -> None:
        self.directory = directory
        self.process = subprocess.Popen(
            [sys.executable, "-m", "api.cli", "up"],
            cwd=directory,
            env=environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout is not None
        self.said = ""
        for line in self.process.stdout:
            self.said += line
            if READY in line:
                break

    @property
    def kafka(self) -> str:
        address = json.loads((self.directory / ".berth" / "endpoints.json").read_text())["kafka"]
        assert isinstance(address, str)
        return address

    def broker(self) -> psutil.Process:
        children = [child for child in psutil.Process(self.process.pid).children() if child.name() == "java"]
        assert len(children) == 1
        return children[0]

    def end(self, how: signal.Signals) -> int:
        self.process.send_signal(how)
        assert self.process.stdout is not None
        with self.process.stdout:
            self.said += self.process.stdout.read()
        return self.process.wait(END_TIMEOUT_SECONDS)


@contextmanager
def up(directory: Path, **variables: str) -> Iterator[Up]:
    running = Up(directory, **variables)
    try:
        assert READY in running.said, running.said
        yield running
    finally:
        if running.process.poll() is None:
            running.end(signal.SIGTERM)


def still_running(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended; one that its new parent hasn't been told of yet has."""
    _gone, alive = psutil.wait_procs(processes, timeout=20)
    return [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory beside pytest's own: every run of pytest shuts that one to other users when it begins.

    PostgreSQL, which doesn't run as root, could then not enter it any more.
    """
    with tempfile.TemporaryDirectory(prefix="berth-test-") as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def running(kafka: EmbeddedKafka) -> Iterator[Up]:
    """One ``berth up`` for the tests that only look at it."""
    with tempfile.TemporaryDirectory(prefix="berth-test-") as directory, up(Path(directory)) as one:
        yield one


def test_up_serves_until_ctrl_c_and_the_next_goes_on_with_the_data(kafka: EmbeddedKafka, place: Path) -> None:
    with up(place) as first:
        assert f"{len(TOPICS)} made" in first.said
        assert berth(place, "topics", "check").returncode == 0
        broker = first.broker()
        assert first.end(signal.SIGINT) == 0
    assert not broker.is_running()
    assert not (place / ".berth" / "endpoints.json").exists()
    with up(place) as second:
        assert "0 made" in second.said


def test_up_ends_in_order_on_sigterm(kafka: EmbeddedKafka, place: Path) -> None:
    with up(place) as running:
        children = psutil.Process(running.process.pid).children(recursive=True)
        assert children
        assert running.end(signal.SIGTERM) == 0
    assert still_running(children) == []


def test_a_second_up_in_the_same_directory_names_the_first_and_changes_nothing(running: Up) -> None:
    before = running.kafka
    second = berth(running.directory, "up")
    assert second.returncode == 1
    assert f"process {running.process.pid}" in second.stderr
    assert "To do" in second.stderr
    assert "Traceback" not in second.stderr
    assert running.kafka == before
    assert berth(running.directory, "topics", "check").returncode == 0


def test_after_kill_9_nothing_stays_behind_and_the_next_up_goes_on(kafka: EmbeddedKafka, place: Path) -> None:
    with up(place) as first:
        children = psutil.Process(first.process.pid).children(recursive=True)
        assert first.end(signal.SIGKILL) == -signal.SIGKILL
    with up(place) as second:
        assert still_running(children) == []
        assert "0 made" in second.said
        assert berth(place, "topics", "check").returncode == 0


def test_up_ends_with_the_reason_when_its_broker_dies(kafka: EmbeddedKafka, place: Path) -> None:
    with up(place) as running:
        running.broker().kill()
        assert running.process.stdout is not None
        with running.process.stdout:
            rest = running.process.stdout.read()
        assert running.process.wait(END_TIMEOUT_SECONDS) == 1
    assert "Kafka has ended on its own" in rest
    assert "broker.log" in rest.replace("\n", "")
    assert "Traceback" not in rest


def test_up_uses_a_kafka_that_is_given_and_starts_none(fresh_kafka: EmbeddedKafka, place: Path) -> None:
    with up(place, BERTH_KAFKA=fresh_kafka.bootstrap) as running:
        assert running.kafka == fresh_kafka.bootstrap
        assert not (place / ".berth" / "kafka").exists()
        assert [child.name() for child in psutil.Process(running.process.pid).children()] == ["postgres"]


def test_up_refuses_topics_with_another_number_of_partitions(fresh_kafka: EmbeddedKafka, place: Path) -> None:
    refused = Up(place, BERTH_PARTITIONS="4", BERTH_KAFKA=fresh_kafka.bootstrap)
    assert refused.process.wait(END_TIMEOUT_SECONDS) == 1
    assert "set BERTH_PARTITIONS=8" in " ".join(refused.said.replace("│", "").split())
    assert refused.process.stdout is not None
    refused.process.stdout.close()


def test_a_wrong_setting_is_refused_in_words(tmp_path: Path) -> None:
    refused = berth(tmp_path, "up", BERTH_PARTITIONS="many")
    assert refused.returncode == 1
    assert "BERTH_PARTITIONS=many" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / ".berth").exists()


def test_topics_without_kafka_says_how_to_start_one(tmp_path: Path) -> None:
    refused = berth(tmp_path, "topics", "check")
    assert refused.returncode == 69
    assert "berth up" in refused.stderr
    unreachable = berth(tmp_path, "topics", "check", BERTH_KAFKA="127.0.0.1:1")
    assert unreachable.returncode == 69
    assert "can't be reached" in unreachable.stderr
    assert "Traceback" not in refused.stderr + unreachable.stderr


def test_topics_create_check_list_and_acl(kafka: EmbeddedKafka, tmp_path: Path) -> None:
    with EmbeddedKafka(tmp_path / "kafka", port=None) as broker:
        kafka_address = {"BERTH_KAFKA": broker.bootstrap}
        missing = berth(tmp_path, "topics", "check", **kafka_address)
        assert missing.returncode == 1
        assert "doesn't exist" in missing.stderr
        created = berth(tmp_path, "topics", "create", **kafka_address)
        assert created.returncode == 0
        assert f"{len(TOPICS)} created" in created.stdout
        assert berth(tmp_path, "topics", "check", **kafka_address).returncode == 0
        listed = berth(tmp_path, "topics", "list", **kafka_address).stdout
        assert [topic.name for topic in TOPICS if topic.name not in listed] == []
        rules = berth(tmp_path, "topics", "acl", "--runner", "somebody", **kafka_address).stdout
        assert "User:somebody" in rules
        assert "berth-runner" not in rules


def line_about(report: str, about: str) -> str:
    (line,) = [line for line in report.splitlines() if line[8:].split()[0:1] == [about]]
    return line


def finding(report: str, about: str) -> str:
    return line_about(report, about).split()[0]


def test_doctor_finds_nothing_wrong_beside_a_running_up(running: Up) -> None:
    report = berth(running.directory, "doctor")
    assert report.returncode == 0, report.stdout
    for about in ("Python", "packages", "Java", "settings", "Kafka", "directory", "disk", "broker", "topics"):
        assert finding(report.stdout, about) == "ok"
    ours = "ok port 9092 is used by the Kafka of this directory"
    others = ("note port 9092 is used by another program", "ok port 9092 is free")  # it may have ended since
    told = " ".join(line_about(report.stdout, "port").split())
    assert told in ((ours,) if running.kafka.endswith(":9092") else others)
    for about in ("transactions", "PostgreSQL"):
        assert finding(report.stdout, about) == "ok"
    assert finding(report.stdout, "tables") == "note", "no projector has made them yet"


def test_doctor_names_what_is_wrong_and_changes_nothing(kafka: EmbeddedKafka, tmp_path: Path) -> None:
    (tmp_path / ".berth").write_text("in the way")
    report = berth(tmp_path, "doctor")
    assert report.returncode == 1
    assert finding(report.stdout, "directory") == "problem"
    assert (tmp_path / ".berth").read_text() == "in the way"


def test_doctor_tells_a_kafka_that_is_away_from_one_without_topics(kafka: EmbeddedKafka, tmp_path: Path) -> None:
    away = berth(tmp_path, "doctor", BERTH_KAFKA="127.0.0.1:1")
    assert away.returncode == 1
    assert finding(away.stdout, "broker") == "problem"
    with EmbeddedKafka(tmp_path / "kafka", port=None) as broker:
        empty = berth(tmp_path, "doctor", BERTH_KAFKA=broker.bootstrap)
    assert empty.returncode == 1
    assert finding(empty.stdout, "broker") == "ok"
    assert empty.stdout.count("doesn't exist") == len(TOPICS)
    assert "berth topics create" in empty.stdout


def test_doctor_finds_a_kafka_that_is_not_downloaded_yet(tmp_path: Path) -> None:
    report = berth(tmp_path, "doctor", XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert finding(report.stdout, "Kafka") == "note"
    assert report.returncode == 0
    assert list(tmp_path.iterdir()) == []
