"""Plain Faust, at least once, as its documentation has it: count the events of each key and forward them.

Arguments: bootstrap, name of the app, input topic, output topic. Counts are in a dict, not in a table with a changelog,
so this is the cheapest plain way, and Berth's drain is compared with it on the same records.
"""

import asyncio
import json
import logging
import sys
import time
from collections import Counter
from typing import Any

import faust

from tests.bench.processes import say

PARTITIONS = 8


class App(faust.App):
    def _create_directories(self) -> None:
        """Nothing is stored here."""


def make_app(bootstrap: str, name: str, source: str, target: str) -> Any:
    app = App(
        name,
        broker=f"kafka://{bootstrap}",
        store="memory://",
        web_enabled=False,
        topic_partitions=PARTITIONS,
        topic_allow_declare=False,
        topic_disable_leader=True,
        key_serializer="raw",
        value_serializer="raw",
        consumer_auto_offset_reset="earliest",
        stream_recovery_delay=0.0,
    )
    output = app.topic(target)
    counts: Counter[bytes] = Counter()

    async def count_and_forward(stream: Any) -> None:
        async for event in stream.events():
            trigger = json.loads(event.value)
            counts[event.key] += 1
            forwarded = {"id": trigger["id"], "agent_id": trigger["agent_id"], "count": counts[event.key]}
            await output.send(key=event.key, value=json.dumps(forwarded).encode())
            if counts.total() == 1:
                say("first", at=time.monotonic())

    app.agent(app.topic(source))(count_and_forward)
    return app


async def main(bootstrap: str, name: str, source: str, target: str) -> None:
    logging.basicConfig(level=logging.CRITICAL, stream=sys.stderr)
    app = make_app(bootstrap, name, source, target)
    await app.start()
    say("ready")
    await app.wait_until_stopped()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:5]))
