"""How a service ends: when it is asked to, when it must, and in any case.

A service that was to end and doesn't is worse than one that died: its supervisor takes it for alive and starts no
other, and its partitions stay where nobody works. Clients of Kafka swallow cancellations, Faust holds up the event loop
until its threads have ended, the interpreter waits for threads, and standard output may be a pipe that nobody reads. So
nothing of this is asked for leave:

* SIGTERM and SIGINT are heard by a thread that does nothing else, so also while the event loop stands still: they go
  through a pipe, into which Python writes where the signal arrives. Blocking them for ``sigwait`` would be simpler, but
  a program that the service starts would inherit that and couldn't be ended by them.
* Before the service holds anything that others wait for, they end the process at once; afterwards ``asked`` is set.
* From that moment on, or from when the service says that it must end, another thread counts. When the time is over the
  process ends, and the log says where everything was. The count can't be stopped.
* When the service's own work is over, so is the process: what it has started and not ended is not waited for.

The exit code is what the service said, 0 when it was asked. What a service owes to others has to be safe without its
help anyway: it may be killed at any time.
"""

import asyncio
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType
from typing import Any, Final, NoReturn

import structlog

ENDS_SECONDS_MAX: Final = 10.0
"""From being asked to the end of the process. Supervisors usually kill after 10 to 30 s."""
TELL_SECONDS_MAX: Final = 1.0
EXIT_ASKED: Final = 0
ASKING: Final = frozenset({signal.SIGTERM, signal.SIGINT})
PLACES_MAX: Final = 8
"""Of each thread and task, the innermost."""

log = structlog.get_logger()


class Ending:
    """The end of this process, whose service runs in ``loop``. Made once, by the main thread.

    ``ends_seconds_max``: how long an end in order may take.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ends_seconds_max: float = ENDS_SECONDS_MAX) -> None:
        self._loop = loop
        self._ends_seconds_max = ends_seconds_max
        self._asked = asyncio.Event()
        self._lock = threading.Lock()
        self._is_in_order = False
        self._begun = threading.Event()
        self._exit_code = EXIT_ASKED
        self._signals, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        for number in ASKING:
            signal.signal(number, _already_heard)
        for work in (self._hear, self._count):
            threading.Thread(target=work, name=f"ending{work.__name__}", daemon=True).start()

    def in_order(self) -> asyncio.Event:
        """From now on the service ends by itself when it is asked; this is set then."""
        with self._lock:
            self._is_in_order = True
        return self._asked

    def begin(self, exit_code: int) -> None:
        """The service ends, with this code; it has ``ends_seconds_max`` from the first time that it says so."""
        with self._lock:
            if not self._begun.is_set():
                self._exit_code = exit_code
                self._begun.set()

    def finish(self, exit_code: int) -> NoReturn:
        """The service's own work is over: end the process, with what else is in it."""
        self.begin(exit_code)
        self._exit_code = exit_code
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)

    def _hear(self) -> None:
        while (number := os.read(self._signals, 1)[0]) not in ASKING:
            pass
        with self._lock:
            is_in_order = self._is_in_order
        self.begin(EXIT_ASKED)
        if not is_in_order:
            log.info("asked_to_stop_before_it_began", signal=signal.Signals(number).name, exit_code=EXIT_ASKED)
            self.finish(EXIT_ASKED)
        with suppress(RuntimeError):  # the loop is closed: it has ended meanwhile
            self._loop.call_soon_threadsafe(self._asked.set)

    def _count(self) -> None:
        self._begun.wait()
        threading.Event().wait(self._ends_seconds_max)
        # The log may be what it hangs on.
        telling = threading.Thread(target=self._tell, name="ending_tell", daemon=True)
        telling.start()
        telling.join(TELL_SECONDS_MAX)
        os._exit(self._exit_code)

    def _tell(self) -> None:
        log.error(
            "service_ended_hard",
            error=f"a part of it did not end within {self._ends_seconds_max:g} s",
            kept="everything that was committed; others go on from there",
            advice="nothing now; when it happens again, report where it was",
            exit_code=self._exit_code,
            where=dict(_places(self._loop)),
        )


def _already_heard(_number: int, _frame: FrameType | None) -> None:
    """Python calls this when it gets round to it."""


def _places(loop: asyncio.AbstractEventLoop) -> Iterator[tuple[str, list[str]]]:
    """What each thread and each task of the loop is in, the outermost call first."""
    frames = sys._current_frames()  # noqa: SLF001 - there is no other way to see another thread's calls
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if frame is not None and thread is not threading.current_thread():
            yield f"thread {thread.name}", _inner(_called(frame))
    for task in asyncio.all_tasks(loop):
        yield f"task {task.get_name()}", _inner(_awaited(task.get_coro()))


def _called(frame: FrameType) -> list[str]:
    return [f"{place.filename}:{place.lineno} {place.name}" for place in traceback.extract_stack(frame)]


def _awaited(work: Any) -> list[str]:
    """A coroutine and what it waits for, as far as these are coroutines."""
    places = []
    while (frame := getattr(work, "cr_frame", None)) is not None:
        places.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        work = work.cr_await
    return places


def _inner(places: list[str]) -> list[str]:
    return places[-PLACES_MAX:]
