"""Dispatches for runners that have no Kafka: each long poll reads berth.dispatches from where its runner stands.

A position is the next offset by partition. A poll with one gets everything after it, so that a runner which sends the
position of what it has worked off gets nothing lost and, after a crash, something twice; ``execution_id`` tells. A poll
without one begins at the oldest attempt that still runs: work that has ended long ago is not for a new runner.

Every poll has a consumer of its own, for as long as it lasts. That bounds how many polls one process takes; Kafka
itself is the road for more.
"""

import asyncio
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from api.http.patience import result_of, stop, within
from api.http.problems import unavailable
from streams import DISPATCHES
from streams.codec import partition_of

POLLS_MAX: Final = 100
CONNECT_SECONDS_MAX: Final = 4.0
REQUEST_TIMEOUT_MILLISECONDS: Final = 5_000
FETCH_SECONDS_MIN: Final = 0.3
"""Also who doesn't want to wait gets what is there."""
FETCH_SECONDS_MAX: Final = 1.0
ANSWER_BYTES_MAX: Final = 4 * 1024 * 1024
CLOCKS_APART_MILLISECONDS: Final = 10_000
"""A record's time is its producer's; a dispatch's own time may be up to 5 s ahead of the clock."""

log = structlog.get_logger()


@dataclass(slots=True)
class Read:
    """What a poll has read: records as they stand on the topic, and where the next poll begins."""

    records: list[dict[str, Any]] = field(default_factory=list)
    next_offsets: dict[int, int] = field(default_factory=dict)
    is_last: bool = False
    """The service is being stopped: nothing more will come here."""


class Dispatches:
    """The topic as polls read it."""

    def __init__(self, bootstrap: str, partitions: int) -> None:
        self._bootstrap = bootstrap
        self._partitions = partitions
        self._polls = 0
        self._ending = asyncio.Event()

    def end(self) -> None:
        """End all polls: the service is being stopped."""
        self._ending.set()

    async def read(
        self,
        agents: Collection[str] | None,
        after: Mapping[int, int],
        since: datetime | None,
        until_seconds: float,
        rows: int,
    ) -> Read:
        """Wait for dispatches of these agents (None: all) until the event loop's time ``until_seconds``.

        ``since``: where partitions begin that ``after`` doesn't name; None: at their ends. Raises Problem.
        """
        if self._polls >= POLLS_MAX:
            raise unavailable("too_many_clients", f"{POLLS_MAX} polls wait here already. Try another instance.")
        self._polls += 1
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self._bootstrap,
            isolation_level="read_committed",
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            fetch_max_wait_ms=500,
            request_timeout_ms=REQUEST_TIMEOUT_MILLISECONDS,
        )
        try:
            await within(CONNECT_SECONDS_MAX, self._begin(consumer, self._partitions_of(agents), after, since))
            return await self._read(consumer, agents, until_seconds, rows)
        except (KafkaError, TimeoutError, OSError) as error:
            log.warning("dispatches_not_read", error=repr(error))
            raise unavailable(
                "log_unavailable",
                "Kafka can't be reached, so no dispatches can be read now. Ask again with the same `after`.",
            ) from error
        finally:
            self._polls -= 1
            await stop(consumer)

    def _partitions_of(self, agents: Collection[str] | None) -> list[int]:
        if agents is None:
            return list(range(self._partitions))
        return sorted({partition_of(agent_id, self._partitions) for agent_id in agents})

    async def _begin(
        self, consumer: AIOKafkaConsumer, wanted: Sequence[int], after: Mapping[int, int], since: datetime | None
    ) -> None:
        await consumer.start()
        targets = [TopicPartition(DISPATCHES.name, number) for number in wanted]
        consumer.assign(targets)
        unknown = [target for target in targets if target.partition not in after]
        if unknown:
            ends = await consumer.end_offsets(unknown)
            begins: Mapping[TopicPartition, Any] = {}
            if since is not None:
                milliseconds = int(since.timestamp() * 1000) - CLOCKS_APART_MILLISECONDS
                begins = await consumer.offsets_for_times(dict.fromkeys(unknown, milliseconds))
            for target in unknown:
                begin = begins.get(target)
                consumer.seek(target, ends[target] if begin is None else begin.offset)
        for target in targets:
            if target.partition in after:
                consumer.seek(target, after[target.partition])

    async def _read(
        self, consumer: AIOKafkaConsumer, agents: Collection[str] | None, until_seconds: float, rows: int
    ) -> Read:
        keys = None if agents is None else {agent_id.encode() for agent_id in agents}
        read = Read()
        for target in consumer.assignment():
            read.next_offsets[target.partition] = await consumer.position(target)
        loop = asyncio.get_running_loop()
        size = 0
        while not read.records:
            left = until_seconds - loop.time()
            wait_seconds = max(FETCH_SECONDS_MIN, min(left, FETCH_SECONDS_MAX))
            fetch = asyncio.ensure_future(consumer.getmany(timeout_ms=int(1000 * wait_seconds), max_records=rows))
            ending = asyncio.ensure_future(self._ending.wait())
            await asyncio.wait({fetch, ending}, return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
            if not fetch.done():
                fetch.cancel()
                await asyncio.gather(fetch, return_exceptions=True)
                break
            for target, records in result_of(fetch).items():
                for record in records:
                    if len(read.records) == rows or size > ANSWER_BYTES_MAX:
                        return read
                    read.next_offsets[target.partition] = record.offset + 1
                    if keys is None or record.key in keys:
                        # Not the stricter from_json: texts of people may hold lone surrogates (G3).
                        read.records.append(json.loads(record.value))
                        size += len(record.value)
            if left <= 0 or self._ending.is_set():
                break
        read.is_last = self._ending.is_set()
        return read
