"""What the long-running commands have in common: how they log, and that they end.

A service that was to end and doesn't is worse than one that died: its supervisor takes it for alive and starts no
other. Clients of Kafka may swallow the cancellation that ends them, above all while Kafka is away, and then
``asyncio.run`` waits for them for ever. So what is still there some seconds after a service's own work is over is left
behind, and the process ends with the exit code of that work.
"""

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Coroutine
from typing import Any, Final

import structlog

LEFT_BEHIND_SECONDS: Final = 5.0

log = structlog.get_logger()


def run_service(work: Coroutine[Any, Any, int]) -> int:
    """Run a service; its exit code. Does not return when something of it doesn't end: then the process ends here."""
    with asyncio.Runner() as runner:
        code = runner.run(work)
        hard = threading.Timer(LEFT_BEHIND_SECONDS, _end_hard, (code,))
        hard.daemon = True
        hard.start()
    hard.cancel()
    return code


def _end_hard(code: int) -> None:
    log.error("service_ended_hard", error="a part of it did not end when it was told to", exit_code=code)
    sys.stdout.flush()
    os._exit(code)


def log_as_json() -> None:
    """One JSON object a line, on standard output; words of libraries from warnings on, on standard error."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper("iso"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stdout),
    )
