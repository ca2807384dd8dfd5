"""One process per data directory, held by the kernel and not by a file's existence.

The lock is ``flock`` on ``owner.lock``. It ends with the last process that holds the open file, however that process
ends, so a lock file left behind by a killed process is never in the way. A server that we start inherits the open
file: when ``berth`` is killed and its server is still shutting down, the next ``berth`` waits for the server's end
instead of starting a second one on the same data. What the file says (process id and command line) is only read
to name the holder in a message.
"""

import errno
import fcntl
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil

from api.cli.command_failed import CommandFailed

LOCK_FILE_NAME: Final = "owner.lock"
ORPHAN_WAIT_SECONDS: Final = 45.0
"""How long a start waits for the server of a dead process: longer than that server's own shutdown may take."""


class DirectoryLock:
    """An exclusive lock on a directory, which is made when it is missing."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._descriptor: int | None = None

    def acquire(self, report: Callable[[str], None], *, wait_seconds: float = 0.0) -> int:
        """Take the lock and return its file descriptor, to be inherited by the server that works on the directory.

        Waits ``wait_seconds`` for a live holder, and up to 45 s for the server of a dead one, telling ``report`` so.
        Raises CommandFailed when the wait was in vain, naming the holder, or when the directory can't be written.
        """
        path = self.directory / LOCK_FILE_NAME
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise cannot_write(self.directory, error) from error
        try:
            self._wait_for(descriptor, path, wait_seconds, report)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "command": _own_command()}).encode(), 0)
        except CommandFailed:
            os.close(descriptor)
            raise
        except OSError as error:
            os.close(descriptor)
            raise cannot_write(self.directory, error) from error
        self._descriptor = descriptor
        return descriptor

    def release(self) -> None:
        """Let go of the lock; a server that inherited it keeps it until it ends. Does nothing when not held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _wait_for(self, descriptor: int, path: Path, wait_seconds: float, report: Callable[[str], None]) -> None:
        asked = time.monotonic()
        while not _try_lock(descriptor):
            holder_pid, holder_command = _holder(path)
            waited_seconds = time.monotonic() - asked
            if holder_pid is not None and _is_alive(holder_pid):
                if waited_seconds >= wait_seconds:
                    raise CommandFailed(
                        f"{self.directory} is in use by process {holder_pid} ({holder_command}).",
                        kept="everything; this command has changed nothing.",
                        advice=f"use what that process has started, or end it first: kill {holder_pid}",
                    )
                report(f"waiting for process {holder_pid} ({holder_command})")
            elif waited_seconds < ORPHAN_WAIT_SECONDS:
                report("waiting for a server to end whose parent process is gone")
            else:
                raise CommandFailed(
                    f"{self.directory} is still in use by a server whose parent process ({holder_pid}) is gone; "
                    f"it did not end within {ORPHAN_WAIT_SECONDS:.0f} s.",
                    kept="everything; this command has changed nothing.",
                    advice=f"see who it is with: fuser {path}; end that process, then start again.",
                )
            threading.Event().wait(0.05)


def cannot_write(path: Path, error: OSError) -> CommandFailed:
    """The failure for a directory or file that can't be written, with what to do for that kind of error."""
    other_directory = "choose another directory with BERTH_DATA_DIRECTORY"
    in_the_way = f"a file is in the way where a directory must be: move it, or {other_directory}"
    no_permission = f"give yourself write permission there, or {other_directory}"
    advice = {
        errno.ENOSPC: "free some space on that disk",
        errno.EDQUOT: "free some of your disk quota",
        errno.EROFS: f"that file system is mounted read-only; {other_directory}",
        errno.EACCES: no_permission,
        errno.EPERM: no_permission,
        errno.EEXIST: in_the_way,
        errno.ENOTDIR: in_the_way,
    }.get(error.errno or 0, "look at that path and its disk")
    return CommandFailed(
        f"{path} can't be written: {error.strerror or error}.",
        kept="everything that was there; nothing was started.",
        advice=f"{advice}, then start again.",
    )


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(path: Path) -> tuple[int | None, str]:
    """Process id and command line that the holder wrote; (None, ...) in the moment before it has written them."""
    try:
        content = json.loads(path.read_bytes())
        return int(content["pid"]), str(content["command"])
    except (OSError, ValueError, KeyError):
        return None, "unknown"


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _own_command() -> str:
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]) if sys.argv and sys.argv[0] else "python"
