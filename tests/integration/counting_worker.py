"""A worker process that counts (see counting.py): the tests start, freeze and kill it. Logs one JSON object a line."""

import asyncio
import logging
import sys
from typing import cast

import structlog

from streams.kafka.restore import MakePartition
from streams.kafka.worker import run_worker
from streams.settings import load_settings
from tests.integration.counting import CountingPartition


def log_as_json() -> None:
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


def main() -> int:
    log_as_json()
    return asyncio.run(run_worker(load_settings(), cast("MakePartition", CountingPartition)))


if __name__ == "__main__":
    sys.exit(main())
