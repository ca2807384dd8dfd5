"""What the long-running commands have in common: how they log, and that they end."""

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, NoReturn

import structlog
from aiokafka.errors import KafkaConnectionError
from structlog.typing import Processor

from api.cli.command_failed import CommandFailed
from api.cli.failures import failure_of
from streams.ending import ENDS_SECONDS_MAX, Ending
from streams.settings import SettingsRefused

EXIT_ERROR: Final = 70
REPEATED_SECONDS: Final = 10.0
REMEMBERED_MAX: Final = 1_000

log = structlog.get_logger()


def run_service(
    work: Callable[[Ending], Coroutine[Any, Any, int]], ends_seconds_max: float = ENDS_SECONDS_MAX
) -> NoReturn:
    """Run a service and end this process with its exit code, within the time and in the way of ``streams.ending``.

    Raises what ``main.py`` has words for. Anything else that comes out of ``work`` is a bug: the log says it, and the
    exit code is 70.
    """
    with asyncio.Runner() as runner:
        ending = Ending(runner.get_loop(), ends_seconds_max)
        try:
            exit_code = runner.run(work(ending))
        except (CommandFailed, SettingsRefused, KafkaConnectionError) as error:
            failed = failure_of(error)
            ending.begin(failed.exit_code if failed is not None else EXIT_ERROR)
            raise
        except (Exception, asyncio.CancelledError) as error:  # nobody cancels it but a library that cancels itself
            log.critical(
                "service_failed",
                error=repr(error),
                kept="everything that was committed",
                advice="start it again; this is a bug, and the exception says where",
                exit_code=EXIT_ERROR,
                exc_info=error,
            )
            exit_code = EXIT_ERROR
        ending.finish(exit_code)


def log_as_json() -> None:
    """One JSON object a line: the service's words on standard output, on standard error its libraries' warnings.

    An exception is a field of its line, be it one that a library has logged or that has ended a thread. What a library
    says again and again, as aiokafka does thousands of times a second while Kafka is away, comes every 10 s.
    """
    said: list[Processor] = [structlog.processors.add_log_level, structlog.processors.TimeStamper("iso")]
    as_line: list[Processor] = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    structlog.configure(processors=[*said, *as_line], logger_factory=structlog.PrintLoggerFactory(sys.stdout))
    of_libraries = logging.StreamHandler(sys.stderr)
    of_libraries.addFilter(_NotAgain())
    of_libraries.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*said, structlog.stdlib.add_logger_name, structlog.stdlib.ExtraAdder({"repeated"})],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *as_line],
        )
    )
    logging.basicConfig(level=logging.WARNING, handlers=[of_libraries], force=True)
    logging.captureWarnings(capture=True)
    threading.excepthook = _thread_ended


def log_to_terminal() -> None:
    """For people: lines on standard error."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))


class _NotAgain(logging.Filter):
    """Lets the same words through once in REPEATED_SECONDS; ``repeated`` says how many it has kept back since."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        words, now = f"{record.name} {record.getMessage()}", time.monotonic()
        said_at, repeated = self._said.get(words, (-REPEATED_SECONDS, 0))
        if now - said_at < REPEATED_SECONDS:
            self._said[words] = said_at, repeated + 1
            return False
        if len(self._said) >= REMEMBERED_MAX:
            self._said.clear()
        self._said[words] = now, 0
        if repeated:
            record.repeated = repeated
        return True


def _thread_ended(ended: threading.ExceptHookArgs) -> None:
    name = ended.thread.name if ended.thread is not None else ""
    log.error("thread_ended", thread=name, error=repr(ended.exc_value), exc_info=ended.exc_value)
