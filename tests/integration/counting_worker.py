"""A worker process that counts (see counting.py): the tests start, freeze and kill it. Logs one JSON object a line."""

from typing import cast

from api.cli.service import log_as_json, run_service
from streams.kafka.restore import MakePartition
from streams.kafka.worker import run_worker
from streams.settings import load_settings
from tests.integration.counting import CountingPartition

if __name__ == "__main__":
    log_as_json()
    run_service(lambda ending: run_worker(load_settings(), ending, cast("MakePartition", CountingPartition)))
