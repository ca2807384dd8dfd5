"""The embedded PostgreSQL: its data stays, whatever ends it; it never outlives its parent; it says what is wrong."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

from api.cli.command_failed import CommandFailed
from api.cli.embedded_postgres import EmbeddedPostgres
from tests.brokers import until


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="berth-postgres-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def own_server() -> Iterator[EmbeddedPostgres]:
    """One for this module, as making its data takes a second or more."""
    with tempfile.TemporaryDirectory(prefix="berth-postgres-") as name:
        made = EmbeddedPostgres(Path(name), port=None)
        yield made
        made.stop()


@pytest.fixture
def server(own_server: EmbeddedPostgres) -> EmbeddedPostgres:
    """Running, and without the table of another test."""
    own_server.start()
    with psycopg.connect(own_server.url) as connection:
        connection.execute("DROP TABLE IF EXISTS kept")
    return own_server


def put(server: EmbeddedPostgres, value: int) -> None:
    with psycopg.connect(server.url) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS kept (value integer)")
        connection.execute("INSERT INTO kept VALUES (%s)", (value,))


def kept(server: EmbeddedPostgres) -> list[int]:
    with psycopg.connect(server.url) as connection:
        return [value for (value,) in connection.execute("SELECT value FROM kept ORDER BY value").fetchall()]


def test_data_stays_through_stop_and_kill_on_the_same_port(server: EmbeddedPostgres) -> None:
    port = server.port
    for number, end in enumerate((server.stop, server.kill, server.stop, server.kill), start=1):
        put(server, number)
        end()
        assert server.pid is None and server.failure() is None
        server.start()
        assert server.port == port
        assert kept(server) == list(range(1, number + 1))


def test_it_listens_on_this_machine_only_and_wants_its_password(server: EmbeddedPostgres) -> None:
    listening = [c.laddr for c in psutil.net_connections("all") if c.pid == server.pid and c.status == "LISTEN"]
    assert listening == [("127.0.0.1", server.port)]
    for password in ("wrong", ""):
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(host="127.0.0.1", port=server.port, user="berth", dbname="postgres", password=password)
    assert (server.directory / "password").stat().st_mode & 0o077 == 0


def test_it_does_not_run_as_root(server: EmbeddedPostgres) -> None:
    assert server.pid is not None
    uids = psutil.Process(server.pid).uids()
    assert uids.real == uids.effective == uids.saved == (os.geteuid() or uids.real) != 0


def test_a_port_that_is_taken_is_left_to_who_has_it(directory: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with EmbeddedPostgres(directory, port=port) as server:
            assert server.port != port
            put(server, 1)


def test_a_free_port_that_is_wished_for_is_used(directory: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with EmbeddedPostgres(directory, port=port) as server:
        assert server.port == port


def test_two_on_one_directory_are_refused(server: EmbeddedPostgres) -> None:
    with pytest.raises(CommandFailed, match="in use by process"):
        EmbeddedPostgres(server.directory, port=None).start()
    put(server, 1)


def test_stale_files_of_a_killed_server_are_no_obstacle(server: EmbeddedPostgres) -> None:
    """postmaster.pid names a process that lives, but is another one by now."""
    put(server, 1)
    server.kill()
    stale = server.directory / "data" / "postmaster.pid"
    stale.write_text(f"{os.getpid()}\n{server.directory / 'data'}\n1\n{server.port}\n\n127.0.0.1\n1 1\nready\n")
    os.chown(stale, (server.directory / "data").stat().st_uid, -1)
    server.start()
    assert kept(server) == [1]


def test_a_start_that_was_cut_off_while_making_the_data_begins_anew(directory: Path) -> None:
    unfinished = directory / "data.unfinished"
    unfinished.mkdir(parents=True)
    (unfinished / "PG_VERSION").write_text("18")
    with EmbeddedPostgres(directory, port=None) as server:
        put(server, 1)
        assert not unfinished.exists()


async def test_it_ends_when_its_parent_is_killed_and_the_next_start_goes_on(directory: Path) -> None:
    script = """
        import sys, signal
        from pathlib import Path
        from api.cli.embedded_postgres import EmbeddedPostgres
        server = EmbeddedPostgres(Path(sys.argv[1]), port=None).start()
        print(server.pid, server.url, flush=True)
        signal.pause()
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(directory)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid, url = parent.stdout.readline().split()
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE kept (value integer)")
        connection.execute("INSERT INTO kept VALUES (1)")
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()

    with EmbeddedPostgres(directory, port=None) as server:  # waits for the end of the orphan
        assert kept(server) == [1]

    async def gone() -> bool:
        return not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE

    await until(gone)


@pytest.mark.parametrize("how", [signal.SIGQUIT, signal.SIGKILL], ids=lambda how: how.name)
async def test_a_death_on_its_own_is_explained(server: EmbeddedPostgres, how: signal.Signals) -> None:
    with server.log_path.open("a") as log:
        log.write("2026-03-01 10:00:00.000 UTC [7] FATAL:  the database system is starting up\n")
    assert server.pid is not None
    parts = [one for one in psutil.Process(server.pid).children(recursive=True) if one.name() == "postgres"]
    os.kill(server.pid, how)

    async def dead() -> bool:  # with its parts, which hold the directory until they notice
        return server.failure() is not None and not any(part.is_running() for part in parts)

    await until(dead)
    failure = server.failure()
    assert failure is not None and "ended on its own" in failure.happened
    assert str(server.log_path) in failure.advice
    if how is signal.SIGKILL:  # what its log said before isn't why
        assert "killed (SIGKILL)" in failure.happened and "starting up" not in failure.happened
    server.start()


def test_data_of_another_version_is_refused_with_what_to_do(server: EmbeddedPostgres) -> None:
    server.stop()
    version = server.directory / "data" / "PG_VERSION"
    version.write_text("12\n")
    with pytest.raises(CommandFailed, match="another version") as failed:
        server.start()
    assert "move" in failed.value.advice
    version.write_text("18\n")
    server.start()


def test_a_frozen_server_answers_nobody_until_it_goes_on(server: EmbeddedPostgres) -> None:
    with psycopg.connect(server.url) as connection:
        server.pause()
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(server.url, connect_timeout=2)
        server.resume()
        assert connection.execute("SELECT 1").fetchone() == (1,)
