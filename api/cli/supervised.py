"""A process that ends with its parent, also when that is killed with ``kill -9``.

The parent holds the write end of a pipe. A shell beside the process reads it, and at end of file ends the process, in
order first and by force when that takes too long. PR_SET_PDEATHSIG would not do: it fires when the *thread* that
started the process ends, and tests start servers from threads of a pool.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

import psutil

KEEPER_SECONDS: Final = 30
"""How long an orphan may take to end in order."""

_WITH_LOCK: Final = ("4>&2 2>&1", "exec 4>&-")
_KEEPER: Final = """\
exec 3<&0 {inherit} </dev/null
(
  exec >/dev/null 2>&1
  {leave}
  if read -r line <&3; then exit; fi
  kill -{signal} $$; kill -CONT $$
  seconds=0
  while kill -0 $$ && [ $seconds -lt {seconds} ]; do sleep 1; seconds=$((seconds + 1)); done
  kill -0 $$ && kill -KILL $$
) &
exec 3<&-
exec "$@"
"""
"""Becomes the process (with the same process id) after leaving the shell that watches over it.

Standard input is the parent's pipe: a line says that the parent has ended the process itself, end of file that the
parent is dead. With a lock, standard error comes in as its descriptor, which the process keeps open as 4 and the shell
does not.
"""


class SupervisedProcess:
    """``end_signal`` asks the process to end in order. All methods block; one thread at a time.

    ``part_name``: the name of processes that it starts itself, which are frozen and end with it.
    """

    def __init__(self, name: str, end_signal: signal.Signals, part_name: str | None = None) -> None:
        self.name = name
        self._end_signal = end_signal
        self._part_name = part_name
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def exit_code(self) -> int | None:
        """Of a process that ended by itself; None while it runs, and when there is none."""
        return None if self._process is None else self._process.poll()

    def start(
        self,
        command: Sequence[str | Path],
        *,
        output: int | IO[bytes],
        error: int | IO[bytes] | None = None,
        lock: int | None = None,
        directory: Path | None = None,
        environment: Mapping[str, str] | None = None,
        user: tuple[int, int] | None = None,
    ) -> None:
        """Start it. ``error``: None, where its output goes. ``user``: (user id, group id) that it runs as.

        ``lock``: the descriptor of a lock that it is to hold until it ends; then ``error`` can't be given.
        """
        self.kill()  # what is left of one that ended by itself
        assert lock is None or error is None
        inherit, leave = _WITH_LOCK if lock is not None else ("", "")
        keeper = _KEEPER.format(
            inherit=inherit, leave=leave, signal=self._end_signal.name.removeprefix("SIG"), seconds=KEEPER_SECONDS
        )
        reader, writer = os.pipe()
        try:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", keeper, f"berth-{self.name}", *command],
                stdin=reader,
                stdout=output,
                stderr=lock if lock is not None else subprocess.STDOUT if error is None else error,
                env=environment,
                cwd=directory,
                start_new_session=True,  # Ctrl-C is for berth, which then ends its parts in order
                user=None if user is None else user[0],
                group=None if user is None else user[1],
                extra_groups=None if user is None else [],
            )
        except BaseException:
            os.close(writer)
            raise
        finally:
            os.close(reader)
        self._lifeline = writer

    def wait_until(self, is_up: Callable[[], bool], timeout_seconds: float) -> bool:
        """True when it is up, False when it has ended. TimeoutError when neither happens in time."""
        deadline = time.monotonic() + timeout_seconds
        while self.pid is not None:
            if is_up():
                return True
            if time.monotonic() >= deadline:
                raise TimeoutError
            threading.Event().wait(0.02)
        return False

    def ask_to_end(self) -> None:
        """Tell it to end in order, also when it is frozen; ``end`` waits for it."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(self._end_signal)
            self.resume()

    def end(self, timeout_seconds: float) -> int:
        """Let it end in order, after ``timeout_seconds`` kill it, and wait; its exit code, 0: there was none."""
        return self._end(timeout_seconds)

    def kill(self) -> int:
        """End it at once, by force, and wait; its exit code, 0: there was none."""
        return self._end(None)

    def pause(self) -> None:
        """Freeze it and its parts (SIGSTOP): when this returns, nothing of it answers."""
        process = self._require()
        process.send_signal(signal.SIGSTOP)  # first, so that it starts no others meanwhile
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        for part in self._parts(process):
            with suppress(psutil.NoSuchProcess):
                part.suspend()

    def resume(self) -> None:
        """Let it and its parts go on (SIGCONT)."""
        process = self._require()
        for part in self._parts(process):
            with suppress(psutil.NoSuchProcess):
                part.resume()
        process.send_signal(signal.SIGCONT)

    def _end(self, timeout_seconds: float | None) -> int:
        process = self._process
        if process is None:
            return 0
        if process.poll() is None:
            parts = self._parts(process)
            if timeout_seconds is None:
                process.kill()
            else:
                self.ask_to_end()
            try:
                process.wait(timeout_seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            # The parts notice that it is gone, and hold what it held until they do.
            if timeout_seconds is None or not _wait_until_gone(parts, timeout_seconds):
                for part in parts:
                    with suppress(psutil.NoSuchProcess):
                        part.kill()
                _wait_until_gone(parts, KEEPER_SECONDS)
        self._process = None
        if self._lifeline is not None:
            with suppress(BrokenPipeError):  # the shell is gone, and with it what this is for
                os.write(self._lifeline, b"ended\n")
            os.close(self._lifeline)
            self._lifeline = None
        return process.wait()

    def _require(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(f"{self.name} is not running")
        return self._process

    def _parts(self, process: subprocess.Popen[bytes]) -> list[psutil.Process]:
        if self._part_name is None:
            return []
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(process.pid).children(recursive=True)
            return [child for child in children if child.name() == self._part_name]
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
