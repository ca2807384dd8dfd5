"""Child processes of one command: started, watched, started again, and never left behind.

* A child ends with its parent, also when that is killed: its parent holds the write end of a pipe, and a shell beside
  the child reads it and ends the child at end of file (as for the embedded Kafka).
* Ctrl-C reaches the parent only, which then ends its children in order.
* A child that exits with an error is started again, after a pause that doubles while it keeps failing at once. One
  exit code, ``HOPELESS_EXIT_CODE``, says that this would not help: then the parent gives up with the end of the log.
* What a child prints goes into a file in the data directory; the one before is kept as ``.previous``.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from api.cli.command_failed import CommandFailed
from api.cli.directory_lock import cannot_write

HOPELESS_EXIT_CODE: Final = 78
PAUSE_FIRST_SECONDS: Final = 0.5
PAUSE_SECONDS_MAX: Final = 10.0
STEADY_SECONDS: Final = 10.0
"""Who has run for so long has not failed at once."""
END_SECONDS: Final = 15.0
KEEPER_SECONDS: Final = 10
LOG_TAIL_BYTES: Final = 2_000

_KEEPER: Final = f"""\
exec 3<&0 </dev/null
(
  exec >/dev/null 2>&1
  if read -r line <&3; then exit; fi
  kill -TERM $$; kill -CONT $$
  seconds=0
  while kill -0 $$ && [ $seconds -lt {KEEPER_SECONDS} ]; do sleep 1; seconds=$((seconds + 1)); done
  kill -0 $$ && kill -KILL $$
) &
exec 3<&-
exec "$@"
"""
"""Becomes the child (same process id) after leaving a shell that ends it when the parent is gone."""


class ChildProcess:
    """``berth`` with ``arguments``, as a child with a log file."""

    def __init__(self, name: str, arguments: Iterable[str], log_path: Path, *, prints_to: int | None = None) -> None:
        """``prints_to``: a descriptor for its standard output, instead of the log file."""
        self.name = name
        self.log_path = log_path
        self.starts = 0
        self._command = [sys.executable, "-m", "api.cli", *arguments]
        self._prints_to = prints_to
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None
        self._started_at = 0.0
        self._again_at: float | None = None
        self._pause_seconds = PAUSE_FIRST_SECONDS

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        """Start it. Raises CommandFailed when its log can't be written."""
        self._close_lifeline()
        try:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            if self.starts == 0 and self.log_path.exists():
                self.log_path.replace(self.log_path.with_name(self.log_path.name + ".previous"))
            log = self.log_path.open("ab")
        except OSError as error:
            raise cannot_write(self.log_path, error) from error
        reader, self._lifeline = os.pipe()
        try:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _KEEPER, f"berth-{self.name}", *self._command],
                stdin=reader,
                stdout=log if self._prints_to is None else self._prints_to,
                stderr=log,
                start_new_session=True,
            )
        finally:
            os.close(reader)
            log.close()
        self.starts += 1
        self._started_at = time.monotonic()
        self._again_at = None

    def watch(self) -> str | None:
        """Start it again when it has failed and its pause is over; what has happened, if anything, for people.

        Raises CommandFailed when starting again would not help.
        """
        if self._again_at is not None:
            if time.monotonic() >= self._again_at:
                self.start()
                return f"{self.name} was started again"
            return None
        if self._process is None or (code := self._process.poll()) is None:
            return None
        self._process = None
        self._close_lifeline()
        if code == 0:
            return f"{self.name} has come to its end"
        if code == HOPELESS_EXIT_CODE:
            raise CommandFailed(
                f"the {self.name} can't work with what is set up here:\n{self.log_tail()}",
                kept="all data.",
                advice=f"do what its log says, then start again. Log: {self.log_path}",
            )
        lived_seconds = time.monotonic() - self._started_at
        self._pause_seconds = (
            PAUSE_FIRST_SECONDS if lived_seconds > STEADY_SECONDS else min(PAUSE_SECONDS_MAX, 2 * self._pause_seconds)
        )
        self._again_at = time.monotonic() + self._pause_seconds
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has failed with exit code {code}"
        return f"{self.name} {how} after {lived_seconds:.0f} s; starting again in {self._pause_seconds:.0f} s"

    def ask_to_end(self) -> None:
        """Send SIGTERM; no start again."""
        self._again_at = None
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.send_signal(signal.SIGCONT)

    def wait_for_end(self) -> None:
        """Wait until it has ended; after END_SECONDS kill it."""
        if self._process is not None:
            try:
                self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        self._close_lifeline()

    def kill(self) -> None:
        """End it at once."""
        self._again_at = None
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        self.wait_for_end()

    def log_tail(self) -> str:
        """The last lines of its log."""
        try:
            lines = self.log_path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-10:])

    def _close_lifeline(self) -> None:
        """Let the keeper go; it ends what still runs."""
        if self._lifeline is not None:
            if self._process is None:
                with suppress(BrokenPipeError):  # when the keeper is gone already
                    os.write(self._lifeline, b"ended\n")
            os.close(self._lifeline)
            self._lifeline = None
