"""``berth api`` as a person meets it: where it listens, what it refuses, how it ends, what it leaves behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing import get_context
from pathlib import Path

import pytest

from api.cli.endpoints import listed, published
from streams.settings import Settings
from tests.tokens import SECRET

ROOT = Path(__file__).parents[2]
USUAL_PORT = 8080


@contextmanager
def berth_api(
    directory: Path, *words: str, without: tuple[str, ...] = (), **variables: str
) -> Iterator[subprocess.Popen[str]]:
    """An API without Kafka and PostgreSQL: it starts all the same."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
    given = {
        "BERTH_KAFKA": "127.0.0.1:1",
        "BERTH_DATABASE_URL": "postgresql://nobody@127.0.0.1:1/nothing",
        "BERTH_DATA_DIRECTORY": str(directory),
        "BERTH_JWT_SECRET": SECRET,
        "COLUMNS": "200",
        **variables,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "api.cli", "api", *words],
        cwd=ROOT,
        env=kept | {name: value for name, value in given.items() if name not in without},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def address_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        entry = json.loads(line)
        if entry["event"] == "api_listens":
            return str(entry["page"])
    raise AssertionError(process.communicate()[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_where_it_listens_and_takes_that_back_when_it_is_asked_to_end(
    tmp_path: Path, number: signal.Signals
) -> None:
    with berth_api(tmp_path, "--port", "0") as process:
        address = address_of(process)
        with urllib.request.urlopen(f"{address}healthz") as answer:
            assert json.load(answer) == {"healthy": True, "failed": []}
        endpoints = json.loads((tmp_path / "endpoints.json").read_text())
        assert endpoints == {"api": address.rstrip("/")}
        process.send_signal(number)
        assert process.wait(timeout=20) == 0
        assert not (tmp_path / "endpoints.json").exists()


def test_without_a_wish_it_takes_the_usual_port_or_a_free_one(tmp_path: Path) -> None:
    with closing(socket.socket()) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        is_ours = True
        try:
            other.bind(("127.0.0.1", USUAL_PORT))
            other.listen()
        except OSError:
            is_ours = False  # somebody else has it, such as another test: taken as well, until they end
        with berth_api(tmp_path) as process:
            port = int(address_of(process).rstrip("/").rpartition(":")[2])
    assert port != 0
    assert port != USUAL_PORT or not is_ours


@pytest.mark.parametrize(
    ("host", "words"), [("localhost", "can't be served on localhost"), ("203.0.113.1", "of 203.0.113.1 can't be used")]
)
def test_a_host_that_is_no_address_of_this_machine_is_refused(tmp_path: Path, host: str, words: str) -> None:
    with berth_api(tmp_path, "--host", host, "--port", "0") as process:
        said = process.communicate(timeout=30)[1]
    assert process.returncode == 1
    assert words in said and "Kept:" in said and "To do:" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(("host", "reached"), [("0.0.0.0", "127.0.0.1"), ("127.0.0.2", "127.0.0.2")])
def test_another_address_of_this_machine_is_served(tmp_path: Path, host: str, reached: str) -> None:
    with berth_api(tmp_path, "--host", host, "--port", "0", BERTH_API_HOSTS="127.0.0.2") as process:
        address = address_of(process)
        assert address.startswith(f"http://{reached}:")
        with urllib.request.urlopen(f"{address}healthz") as answer:
            assert answer.status == 200


def test_a_port_that_is_wished_for_and_taken_is_an_error_that_says_so(tmp_path: Path) -> None:
    with closing(socket.socket()) as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with berth_api(tmp_path, "--port", str(port)) as process:
            said = process.communicate(timeout=30)[1]
    assert process.returncode == 1
    assert f"Port {port}" in said and "Address already in use" in said


# The file of endpoints


def _publish_often(directory: Path, name: str, times: int) -> None:
    settings = Settings(data_directory=directory)
    for number in range(times):
        with published(settings, **{name: f"127.0.0.1:{1000 + number}"}):
            assert listed(settings)[name] == f"127.0.0.1:{1000 + number}"


def test_programs_that_write_at_the_same_time_keep_each_others_entries(tmp_path: Path) -> None:
    context = get_context("spawn")
    processes = [context.Process(target=_publish_often, args=(tmp_path, name, 200)) for name in ("kafka", "api")]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert not (tmp_path / "endpoints.json").exists()


def test_an_entry_that_another_program_has_replaced_stays(tmp_path: Path) -> None:
    settings = Settings(data_directory=tmp_path)
    first = published(settings, api="http://127.0.0.1:1")
    with published(settings, kafka="127.0.0.1:9"):
        with first, published(settings, api="http://127.0.0.1:2"):
            assert listed(settings) == {"kafka": "127.0.0.1:9", "api": "http://127.0.0.1:2"}
        assert listed(settings) == {"kafka": "127.0.0.1:9"}
    assert listed(settings) == {}


def test_a_file_that_is_no_list_of_endpoints_is_written_anew(tmp_path: Path) -> None:
    (tmp_path / "endpoints.json").write_text("{")
    settings = Settings(data_directory=tmp_path)
    with published(settings, api="http://127.0.0.1:1"):
        assert listed(settings) == {"api": "http://127.0.0.1:1"}
