"""Child processes of one command: started, watched, started again, and never left behind.

* A child ends with its parent, also when that is killed: ``SupervisedProcess``.
* Ctrl-C reaches the parent only, which then ends its children in order.
* A child that exits with an error is started again, after a pause that doubles while it keeps failing at once. One
  exit code, ``HOPELESS_EXIT_CODE``, says that this would not help: then the parent gives up with the end of the log.
* What a child prints goes into a file in the data directory; the one before is kept as ``.previous``.
"""

import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from api.cli.command_failed import CommandFailed
from api.cli.directory_lock import cannot_write
from api.cli.supervised import SupervisedProcess

HOPELESS_EXIT_CODE: Final = 78
PAUSE_FIRST_SECONDS: Final = 0.5
PAUSE_SECONDS_MAX: Final = 10.0
STEADY_SECONDS: Final = 10.0
"""Who has run for so long has not failed at once."""
END_SECONDS: Final = 15.0
LOG_TAIL_BYTES: Final = 2_000


class ChildProcess:
    """``berth`` with ``arguments``, as a child with a log file."""

    def __init__(self, name: str, arguments: Iterable[str], log_path: Path, *, prints_to: int | None = None) -> None:
        """``prints_to``: a descriptor for its standard output, instead of the log file."""
        self.name = name
        self.log_path = log_path
        self.starts = 0
        self._command = [sys.executable, "-m", "api.cli", *arguments]
        self._prints_to = prints_to
        self._process = SupervisedProcess(name, signal.SIGTERM)
        self._started_at = 0.0
        self._again_at: float | None = None
        self._pause_seconds = PAUSE_FIRST_SECONDS

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid

    def start(self) -> None:
        """Start it. Raises CommandFailed when its log can't be written."""
        try:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            if self.starts == 0 and self.log_path.exists():
                self.log_path.replace(self.log_path.with_name(self.log_path.name + ".previous"))
            log = self.log_path.open("ab")
        except OSError as error:
            raise cannot_write(self.log_path, error) from error
        with log:
            output = log if self._prints_to is None else self._prints_to
            self._process.start(self._command, output=output, error=log)
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
        code = self._process.exit_code
        if code is None:
            return None
        self._process.kill()  # what watched over it
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
        self._process.ask_to_end()

    def wait_for_end(self) -> None:
        """Wait until it has ended; after END_SECONDS kill it."""
        self._process.end(END_SECONDS)

    def kill(self) -> None:
        """End it at once."""
        self._again_at = None
        self._process.kill()

    def log_tail(self) -> str:
        """The last lines of its log."""
        try:
            lines = self.log_path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-10:])
