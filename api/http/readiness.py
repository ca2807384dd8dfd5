"""Whether Berth as a whole does its work, as ``/readyz`` says it: Kafka, every partition, the database, the projection.

The stream workers say once a second in berth.workers how their partitions are; this process reads that topic, asks
Kafka where the log ends, and compares with how far the projection is. What is silent for longer than a worker may be
(its session) counts as gone, so the answer is true within that and 4 s. A partition that stands still is named with its
position, and a projection that is behind with what it would apply next.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError
from pydantic_core import from_json

from api.http.database import Database
from api.http.patience import stop, within
from streams import DECISIONS, SITE_DECISIONS, WORKERS

PROBE_SECONDS: Final = 1.0
ASK_SECONDS_MAX: Final = 3.0
SILENCE_SECONDS_MIN: Final = 3.0
"""A worker speaks once a second, and may be late."""
WORKER_FORGOTTEN_SECONDS: Final = 600.0
MARKER_RECORDS: Final = 1
"""The end of the log lies behind the marker of the last transaction, which is nothing to apply."""
CONNECT_SECONDS_MAX: Final = 10.0
KAFKA_AWAY: Final = (KafkaError, TimeoutError, OSError)

log = structlog.get_logger()


@dataclass(slots=True)
class _Behind:
    """An end of the log that the projection hasn't reached, and since when (event loop's time) it is known."""

    end: int
    since_seconds: float


@dataclass(slots=True)
class _Waits:
    """A partition with records to read: when it last got on, and since when (event loop's time) it hasn't."""

    last_progress_at: str
    since_seconds: float


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long something may be wrong before it counts."""

    session_timeout_seconds: float = 6.0
    """Of the workers' group: after it a silent worker's partitions go to others."""
    projection_lag_seconds_max: float = 5.0

    @property
    def silence_seconds_max(self) -> float:
        """Kafka, the database or a worker that has said nothing for this long is away; a partition that has something
        to read and doesn't get on for this long stands still."""
        return max(SILENCE_SECONDS_MIN, self.session_timeout_seconds)


@dataclass(slots=True)
class Readiness:
    """What is known of the rest of Berth. ``run`` keeps it."""

    bootstrap: str
    partitions: int
    database: Database
    bounds: Bounds = field(default_factory=Bounds)
    _kafka_answered_at_seconds: float | None = None
    _kafka_error: str | None = None
    _workers: dict[str, dict[str, Any]] = field(default_factory=dict)
    _ends: dict[TopicPartition, int] = field(default_factory=dict)
    """Of both logs of decisions."""
    _behind: dict[TopicPartition, _Behind] = field(default_factory=dict)
    _waits: dict[str, _Waits] = field(default_factory=dict)

    async def run(self) -> None:
        """Ask and listen until cancelled."""
        while True:
            try:
                consumer = await self._consumer()
                try:
                    await self._probe(consumer)
                except KAFKA_AWAY as error:
                    self._away(error)
                finally:
                    await stop(consumer)
            except KAFKA_AWAY as error:
                self._away(error)
            await asyncio.sleep(PROBE_SECONDS)

    def _away(self, error: BaseException) -> None:
        self._kafka_error = f"{type(error).__name__}: {error}"

    async def _consumer(self) -> AIOKafkaConsumer:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self.bootstrap,
            isolation_level="read_committed",
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            request_timeout_ms=int(ASK_SECONDS_MAX * 1000),
        )
        try:
            await within(CONNECT_SECONDS_MAX, consumer.start())
        except BaseException:
            await stop(consumer)
            raise
        consumer.assign([TopicPartition(WORKERS.name, number) for number in range(self.partitions)])
        return consumer

    async def _probe(self, consumer: AIOKafkaConsumer) -> None:
        topics = (DECISIONS.name, SITE_DECISIONS.name)
        logs = [TopicPartition(topic, number) for topic in topics for number in range(self.partitions)]
        while True:
            ends = await within(ASK_SECONDS_MAX, consumer.end_offsets(logs))
            self._kafka_answered_at_seconds = _now()
            self._kafka_error = None
            self._ends = dict(ends)
            self._compare()
            until = _now() + PROBE_SECONDS
            while (wait := until - _now()) > 0:
                fetch = consumer.getmany(timeout_ms=max(1, int(wait * 1000)))
                for records in (await within(wait + ASK_SECONDS_MAX, fetch)).values():
                    for record in records:
                        self._hear(record.key, record.value)

    def _hear(self, key: bytes, value: bytes | None) -> None:
        worker_id = key.decode()
        if value is None:
            self._workers.pop(worker_id, None)
            return
        self._workers[worker_id] = heard = from_json(value)
        for number, said in heard["partitions"].items():
            waits = self._waits.get(number)
            if not said["lag"]:
                self._waits.pop(number, None)
            elif waits is None or waits.last_progress_at != said["last_progress_at"]:
                self._waits[number] = _Waits(said["last_progress_at"], _now())
        for other, said in list(self._workers.items()):
            if _age_seconds(said["at"]) > WORKER_FORGOTTEN_SECONDS:
                del self._workers[other]

    def _compare(self) -> None:
        """Since when the projection is behind what ends of the log are known."""
        for log_partition, end in self._ends.items():
            applied = self._next_offset(log_partition) + MARKER_RECORDS
            behind = self._behind.get(log_partition)
            if applied >= end:
                self._behind.pop(log_partition, None)
            elif behind is None or applied >= behind.end:
                self._behind[log_partition] = _Behind(end, _now())

    def _next_offset(self, log_partition: TopicPartition) -> int:
        """What the projection would apply next."""
        is_agents = log_partition.topic == DECISIONS.name
        applied = self.database.next_offsets if is_agents else self.database.site_next_offsets
        return applied.get(log_partition.partition, 0)

    # -- telling --------------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """What ``/readyz`` says; ``ready`` is whether ``reasons`` is empty."""
        partitions = {number: self._partition(number) for number in range(self.partitions)}
        reasons = [
            *self._of_kafka(),
            *(reason for number, said in partitions.items() for reason in self._of_partition(number, said)),
            *self._of_database(),
            *self._of_projection(),
        ]
        since = [behind.since_seconds for behind in self._behind.values()]
        lag = [max(0, end - MARKER_RECORDS - self._next_offset(one)) for one, end in self._ends.items()]
        return {
            "ready": not reasons,
            "reasons": reasons,
            "kafka": {"answered_seconds_ago": _ago(self._kafka_answered_at_seconds)},
            "database": {"answered_seconds_ago": _ago(self.database.answered_at_seconds)},
            "partitions": {str(number): said for number, said in partitions.items()},
            "projection": {
                "lag_records": sum(lag),
                "lag_seconds": round(_now() - min(since), 3) if since else 0.0,
                "next_offsets": _by_number(self.database.next_offsets),
                "site_next_offsets": _by_number(self.database.site_next_offsets),
            },
        }

    def _partition(self, number: int) -> dict[str, Any]:
        """What the worker that spoke last of the partition says of it; state ``unowned`` when nobody did in time."""
        claims = [
            (said["at"], worker_id, said["partitions"][str(number)])
            for worker_id, said in self._workers.items()
            if str(number) in said["partitions"] and _age_seconds(said["at"]) <= self.bounds.silence_seconds_max
        ]
        if not claims:
            return {"state": "unowned", "worker_id": None, "lag": None, "last_progress_at": None, "stopped_at": None}
        _at, worker_id, said = max(claims, key=lambda claim: claim[0])
        return {**said, "worker_id": worker_id}

    def _of_kafka(self) -> list[str]:
        away = _ago(self._kafka_answered_at_seconds)
        if away is not None and away <= self.bounds.silence_seconds_max and self._kafka_error is None:
            return []
        why = f": {self._kafka_error}" if self._kafka_error else ""
        return [f"Kafka has not answered{'' if away is None else f' for {away:.0f} s'}{why}"]

    def _of_partition(self, number: int, said: dict[str, Any]) -> list[str]:
        stopped = said["stopped_at"]
        if stopped is not None:
            where = f" at {stopped['topic']} partition {stopped['partition']} offset {stopped['offset']}"
            return [f"partition {number} stands still{where if stopped['topic'] else ''}: {stopped['error']}"]
        if said["state"] == "unowned":
            return [f"partition {number} is owned by no worker"]
        if said["state"] != "running":
            return [f"partition {number} is {said['state']}"]
        waits = self._waits.get(str(number))
        if waits is not None and _now() - waits.since_seconds > self.bounds.silence_seconds_max:
            return [f"partition {number} has {said['lag']} records to read and makes no progress"]
        return []

    def _of_database(self) -> list[str]:
        away = _ago(self.database.answered_at_seconds)
        if away is not None and away <= self.bounds.silence_seconds_max and self.database.error is None:
            return []
        return [f"the database has not answered{'' if away is None else f' for {away:.0f} s'}"]

    def _of_projection(self) -> list[str]:
        return [
            f"the projection of partition {one.partition} is {_now() - behind.since_seconds:.0f} s behind; "
            f"it would apply {one.topic} partition {one.partition} offset {self._next_offset(one)} next"
            for one, behind in sorted(self._behind.items())
            if _now() - behind.since_seconds > self.bounds.projection_lag_seconds_max
        ]


def _by_number(offsets: Mapping[int, int]) -> dict[str, int]:
    return {str(number): offset for number, offset in sorted(offsets.items())}


def _now() -> float:
    return asyncio.get_running_loop().time()


def _ago(at_seconds: float | None) -> float | None:
    return None if at_seconds is None else round(_now() - at_seconds, 3)


def _age_seconds(instant: str) -> float:
    return time.time() - datetime.fromisoformat(instant).timestamp()
