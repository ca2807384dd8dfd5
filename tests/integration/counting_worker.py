"""A worker process that counts (see counting.py): the tests start, freeze and kill it. Logs one JSON object a line."""

import asyncio
import sys
from typing import cast

from api.cli.service import log_as_json
from streams.kafka.restore import MakePartition
from streams.kafka.worker import run_worker
from streams.settings import load_settings
from tests.integration.counting import CountingPartition


def main() -> int:
    log_as_json()
    return asyncio.run(run_worker(load_settings(), cast("MakePartition", CountingPartition)))


if __name__ == "__main__":
    sys.exit(main())
