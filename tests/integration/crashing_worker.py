"""Workers that die at named points of their work, one after the other; children of one process start fast.

CRASH_POINTS is a JSON list of [at, on]. For each, a worker runs until it dies there; then {"event": "died"} is printed,
and the next one begins after SIGUSR1. ``at``:

before      a transaction is about to begin
sent        everything of it is acknowledged, it is not committed
committed   it is committed, and nobody in the worker knows yet
half-way    the same, and what the rules leave over is not worked off in the transaction that leaves it: as at a
            take-over, where that waits for the next record
restoring   a row is being restored

``on``: what must be in that transaction, or in that row: the name of a topic, a space, and a piece of a key or value.
"""

import json
import os
import signal
import sys
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn

import structlog
from aiokafka import AIOKafkaProducer

from api.cli.service import log_as_json, run_service
from streams import CHANGELOG
from streams.kafka import commit, ownership
from streams.kafka.worker import run_worker
from streams.partition import Changes, Partition
from streams.rules.limits import Defaults
from streams.settings import load_settings

CRASHED: Final = 99
log = structlog.get_logger()


class Death(NamedTuple):
    at: str
    topic: str
    piece: bytes

    def is_at(self, at: str, *records: tuple[str, bytes | None, bytes | None]) -> bool:
        return self.at == at and any(
            topic == self.topic and self.piece in (key or b"") + (value or b"") for topic, key, value in records
        )


def crash() -> NoReturn:
    sys.stdout.flush()
    os._exit(CRASHED)


class DyingProducer(AIOKafkaProducer):  # type: ignore[misc] # aiokafka has no types
    is_to_die = False

    async def commit_transaction(self) -> Any:
        if self.is_to_die:
            crash()
        return await super().commit_transaction()


class DyingWriter(commit.Writer):
    death: Death

    async def commit(self, changes: Changes, now_us: int) -> None:
        records = [(output.topic, output.key, output.value) for output in changes.outputs]
        records += [(CHANGELOG.name, key, value) for key, value in changes.rows.items()]
        if self.death.is_at("before", *records):
            crash()
        self._producer.is_to_die = self.death.is_at("sent", *records)
        await super().commit(changes, now_us)
        if self.death.is_at("committed", *records) or self.death.is_at("half-way", *records):
            crash()


class DyingPartition(Partition):
    death: Death

    def load(self, key: bytes, value: bytes | None) -> None:
        if self.death.is_at("restoring", (CHANGELOG.name, key, value)):
            crash()
        super().load(key, value)

    def fire_timers(self, now: int, limit: int) -> int:
        if self.death.at == "half-way" and self.next_deadline_us() == 0:
            return 0
        return super().fire_timers(now, limit)


def work(death: Death) -> NoReturn:
    DyingWriter.death = DyingPartition.death = death
    vars(commit).update(AIOKafkaProducer=DyingProducer)
    vars(ownership).update(Writer=DyingWriter)
    settings = load_settings()
    defaults = Defaults(settings.default_limit, settings.worker_pool_capacity)
    make_partition = partial(DyingPartition, partitions=settings.partitions, defaults=defaults)
    run_service(lambda ending: run_worker(settings, ending, make_partition))


def run_child(death: Death) -> int:
    """Its exit code. When this process is asked to end, the child ends too."""
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        work(death)

    def end(_number: int, _frame: object) -> NoReturn:
        os.kill(child, signal.SIGKILL)
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    _, status = os.waitpid(child, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return os.waitstatus_to_exitcode(status)


def main() -> int:
    log_as_json()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    for at, on in json.loads(os.environ["CRASH_POINTS"]):
        topic, _, piece = on.partition(" ")
        code = run_child(Death(at, topic, piece.encode()))
        log.info("died", at=at, on=on, exit_code=code)
        sys.stdout.flush()
        if code != CRASHED:
            return 1
        signal.sigwait({signal.SIGUSR1})
    return 0


if __name__ == "__main__":
    sys.exit(main())
