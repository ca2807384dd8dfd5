"""A worker whose transactions never end in the partition in which somebody asks for a trigger called ``stuck``.

It logs "stuck" when it has come to that.
"""

import asyncio

import structlog

from api.cli.service import log_as_json, run_service
from streams.kafka import commit, ownership
from streams.kafka.worker import run_worker
from streams.partition import Changes
from streams.settings import load_settings


class StuckWriter(commit.Writer):
    async def commit(self, changes: Changes, now_us: int) -> None:
        if any(b'"stuck"' in (output.value or b"") for output in changes.outputs):
            structlog.get_logger().info("stuck")
            await asyncio.Event().wait()
        await super().commit(changes, now_us)


if __name__ == "__main__":
    log_as_json()
    vars(ownership).update(Writer=StuckWriter)
    run_service(lambda ending: run_worker(load_settings(), ending))
