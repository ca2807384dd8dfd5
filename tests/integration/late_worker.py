"""A worker that has met Kafka and asks for its topics only when Kafka is away again.

It logs "subscribes" when it waits for that, and "subscribed" when it has asked.
"""

import asyncio
from collections.abc import Iterable

import structlog

from api.cli.service import log_as_json, run_service
from streams.kafka import transport
from streams.kafka.worker import run_worker
from streams.settings import load_settings

log = structlog.get_logger()


class LateConsumer(transport.Consumer):
    async def subscribe(self, topics: Iterable[str]) -> None:
        log.info("subscribes")
        host, _, port = load_settings().kafka_addresses().partition(":")
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except OSError:
                break
            writer.close()
        await super().subscribe(topics)
        log.info("subscribed")


if __name__ == "__main__":
    log_as_json()
    vars(transport)["Transport"].Consumer = LateConsumer
    run_service(lambda ending: run_worker(load_settings(), ending))
