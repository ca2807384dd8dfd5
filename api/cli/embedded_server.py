"""What the embedded Kafka and PostgreSQL have in common: one server, in one directory of ours, on 127.0.0.1.

What must hold, and how it does:

* Two processes never work on one directory: ``DirectoryLock``, which the server inherits.
* The server never outlives its parent, even when that is killed: ``SupervisedProcess``.
* A port that is taken: another free one is used, outside the range from which the kernel takes the ports of outgoing
  connections; inside it a client that waits for a restart can connect to itself and so take the port for good. Once
  started, a server keeps its port, since clients expect it there.
* Every way in which the server can die on its own ends in a message that says why (``failure``); its log is kept, and
  the log of the run before as ``.previous``.
"""

import os
import shutil
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Final, Self

from api.cli.command_failed import CommandFailed
from api.cli.directory_lock import DirectoryLock, cannot_write
from api.cli.supervised import SupervisedProcess

START_TIMEOUT_SECONDS: Final = 60.0
STOP_TIMEOUT_SECONDS: Final = 30.0
DISK_NEEDED_BYTES: Final = 64 * 1024 * 1024
"""Below this much free space no server is started: it would die within the first minutes."""
_LOG_TAIL_CHARACTERS: Final = 20_000
_PORT_TAKEN: Final = "Address already in use"


class EmbeddedServer(ABC):
    """One server in ``directory`` (made when missing, kept afterwards).

    ``port``: a wish; when it is taken, or None, a free one is used. ``report`` is told in one line what is going on.
    All methods block and may be called from any thread, but from one at a time.
    """

    name: ClassVar[str]
    """As people know it."""
    end_signal: ClassVar[signal.Signals]
    """Asks it to end in order."""
    part_name: ClassVar[str | None] = None
    """The name of the processes that it starts itself, if any."""
    log_name: ClassVar[str]

    def __init__(self, directory: Path, port: int | None, report: Callable[[str], None]) -> None:
        self.directory = directory.absolute()
        self.log_path = self.directory / self.log_name
        self._report = report
        self._wanted_port = port
        self._port: int | None = None
        self._lock = DirectoryLock(self.directory)
        self._process = SupervisedProcess(self.name.lower(), self.end_signal, self.part_name)

    # What each server does in its own way

    @abstractmethod
    def _find_programs(self) -> None:
        """Before anything is touched. CommandFailed when they are missing."""

    @abstractmethod
    def _make(self, lock: int) -> None:
        """Make its data if there is none, all or nothing."""

    @abstractmethod
    def _spawn(self, port: int, lock: int) -> None:
        """Start the process, with its output in ``log_path``."""

    @abstractmethod
    def _is_up(self, port: int) -> bool:
        """Whether it serves clients."""

    @abstractmethod
    def _cause_of_death(self, log: str) -> tuple[str, str] | None:
        """(what happened, what to do) as the end of its log tells; None: it doesn't."""

    # What it is

    @property
    def port(self) -> int:
        """The port in use; known from the first start on, and kept by later starts of this object."""
        if self._port is None:
            raise RuntimeError(f"{self.name} has not been started yet, so it has no port")
        return self._port

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid

    def failure(self) -> CommandFailed | None:
        """Why it died on its own, or None while it runs or after it was stopped or killed here."""
        code = self._process.exit_code
        return None if code is None else self._explain_death(code)

    # Start and end

    def start(self) -> Self:
        """Start it and return when it answers clients; does nothing when it runs already.

        Raises CommandFailed when that can't be, after which nothing runs and the lock is free.
        """
        if self.pid is not None:
            return self
        self.kill()  # what is left of one that died on its own
        self._find_programs()
        lock = self._lock.acquire(self._report)
        try:
            self._check_disk()
            self._report(f"starting {self.name}")
            self._make(lock)
            self._run(lock)
        except BaseException as error:
            self.kill()
            if isinstance(error, OSError):
                raise cannot_write(self.directory, error) from error
            raise
        return self

    def stop(self) -> None:
        """End it in order and wait for it; after 30 s kill it. Its data stays."""
        self._process.end(STOP_TIMEOUT_SECONDS)
        self._lock.release()

    def kill(self) -> None:
        """``kill -9``: what is in memory is lost, as in a crash. Its data stays."""
        self._process.kill()
        self._lock.release()

    def pause(self) -> None:
        """Freeze it (SIGSTOP): when this returns, connections are open and nothing answers."""
        self._process.pause()

    def resume(self) -> None:
        """Let a frozen one go on (SIGCONT)."""
        self._process.resume()

    def restart(self) -> None:
        """Stop it and start it again on the same port."""
        self.stop()
        self.start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_exception: object) -> None:
        self.stop()

    # How

    def _check_disk(self) -> None:
        free_bytes = shutil.disk_usage(self.directory).free
        if free_bytes < DISK_NEEDED_BYTES:
            raise CommandFailed(
                f"the disk of {self.directory} is full: {free_bytes // 2**20} MB left, "
                f"{self.name} needs at least {DISK_NEEDED_BYTES // 2**20} MB.",
                kept="everything that was there; nothing was started.",
                advice="free some space, or choose another directory with BERTH_DATA_DIRECTORY, then start again.",
            )

    def _run(self, lock: int) -> None:
        """Start the process; take another port when somebody was quicker than we with it."""
        for _ in range(3):
            port = self._port or free_port(self._wanted_port)
            if not is_free(port):
                raise CommandFailed(
                    f"port {port}, on which this {self.name} was, is now used by another program.",
                    kept=f"all data in {self.directory}; nothing was started.",
                    advice=f"see who it is with: ss -ltnp sport = :{port}; end it and start again.",
                )
            if self.log_path.exists():
                self.log_path.replace(self.log_path.with_name(f"{self.log_name}.previous"))
            self._spawn(port, lock)
            if self._wait_until_up(port):
                self._port = port
                return
            death = self._explain_death(self._process.kill())
            if _PORT_TAKEN not in self._log_tail():
                raise death
        raise death

    def _wait_until_up(self, port: int) -> bool:
        """False when it has died."""
        try:
            return self._process.wait_until(lambda: self._is_up(port), START_TIMEOUT_SECONDS)
        except TimeoutError:
            raise CommandFailed(
                f"{self.name} did not come up within {START_TIMEOUT_SECONDS:.0f} s.",
                kept=f"all data in {self.directory}; it was ended again.",
                advice=f"look at the end of {self.log_path}, and whether this machine is very busy; start again.",
            ) from None

    def _log_tail(self) -> str:
        try:
            return self.log_path.read_text(errors="replace")[-_LOG_TAIL_CHARACTERS:]
        except OSError:
            return ""

    def _explain_death(self, exit_code: int) -> CommandFailed:
        log = self._log_tail()
        if exit_code == -signal.SIGKILL:  # it had no chance to write why: its log tells of something else
            happened = "it was killed (SIGKILL)"
            advice = "start again; if nobody killed it, this machine had too little memory: dmesg says so."
        elif "No space left on device" in log:
            happened, advice = "the disk is full", "free some space, then start again."
        elif "Read-only file system" in log or "Permission denied" in log:
            happened, advice = "its directory can't be written", "make it writable, then start again."
        elif _PORT_TAKEN in log:
            happened, advice = "its port was taken by another program", "start again."
        else:
            happened, advice = self._cause_of_death(log) or (
                f"exit code {exit_code}" + self._last_error(log),
                "start again; if it fails again, its log says more.",
            )
        return CommandFailed(
            f"{self.name} has ended on its own: {happened}.",
            kept=f"all data in {self.directory}; what it had acknowledged is there at the next start.",
            advice=f"{advice} Log: {self.log_path}",
        )

    @staticmethod
    def _last_error(log: str) -> str:
        words = (" ERROR ", "FATAL", "PANIC", "Exception", "error: ")
        lines = [line for line in log.splitlines() if any(word in line for word in words)]
        return f": {lines[-1].strip()}" if lines else ""


def environment_without(is_foreign: Callable[[str], bool]) -> dict[str, str]:
    """The caller's environment without settings that are meant for other programs."""
    return {name: value for name, value in os.environ.items() if not is_foreign(name)}


def free_port(wanted: int | None, other_than: int | None = None) -> int:
    """``wanted`` if nobody listens there, else a free one below the range of outgoing connections."""
    start = 20_000 + (os.getpid() * 7) % 10_000
    candidates: list[int] = [*([wanted] if wanted else []), *range(start, 32_000), *range(10_000, start)]
    for port in candidates:
        if port != other_than and is_free(port):
            return port
    raise CommandFailed(
        "no free port between 10000 and 32000 on 127.0.0.1.",
        kept="everything; nothing was started.",
        advice="end some of the programs that listen there (ss -ltn shows them), then start again.",
    )


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
