"""Projectors that tests start and kill, a log for them on a real Kafka, and what must be in the tables in the end."""

import asyncio
import json
import logging
import multiprocessing
import os
import random
import signal
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from multiprocessing.process import BaseProcess
from typing import Any, Final, cast

import psycopg
import structlog
from aiokafka import AIOKafkaProducer
from psycopg import sql
from psycopg.rows import TupleRow

from api.cli.service import run_service
from projections import projector as projector_module
from projections import schema
from projections.projector import Projector
from projections.rebuild import compare
from projections.row_sets import RowSets
from projections.store import Applied, LogRecord, Store
from projections.tables import FOLDED, TABLES, key_of
from streams.rules.agent.state import Agent
from tests.brokers import WAIT_SECONDS, until
from tests.histories import SITES, History, batch_of
from tests.integration.workers import WorkerProcess
from tests.projected import check_agent_rows, check_site_rows

_COUNTED: Final = (
    ("decisions", "decisions"),
    ("site-decisions", "site_decisions"),
    ("dead-letters", "dead_letters"),
)


class Publisher:
    """Writes histories to Kafka as workers do: one transaction after the other for each partition, some aborted."""

    def __init__(self, bootstrap: str, seed: int) -> None:
        self.counts: dict[str, int] = {}
        """Committed records by topic."""
        self._bootstrap = bootstrap
        self._random = random.Random(seed)
        self._producers: dict[int, AIOKafkaProducer] = {}

    async def publish(self, transactions: Iterable[tuple[int, list[LogRecord]]]) -> None:
        for number, records in transactions:
            producer = await self._producer(number)
            if self._random.random() < 0.05:
                await producer.begin_transaction()
                await self._send(producer, records)
                await producer.abort_transaction()
            async with producer.transaction():
                await self._send(producer, records)
            for record in records:
                self.counts[record.topic] = self.counts.get(record.topic, 0) + 1

    @staticmethod
    async def _send(producer: AIOKafkaProducer, records: list[LogRecord]) -> None:
        for record in records:
            await producer.send(
                record.topic, record.value, record.key, partition=record.partition, headers=list(record.headers)
            )
        await producer.flush()

    async def _producer(self, number: int) -> AIOKafkaProducer:
        if number not in self._producers:
            self._producers[number] = AIOKafkaProducer(
                bootstrap_servers=self._bootstrap, transactional_id=f"history-{number}", retry_backoff_ms=5
            )
            await self._producers[number].start()
        return self._producers[number]

    async def stop(self) -> None:
        await asyncio.gather(*(producer.stop() for producer in self._producers.values()))

    async def projected(self, url: str, timeout_seconds: float = WAIT_SECONDS) -> None:
        """Wait until everything committed is in the tables."""
        seen: dict[str, int] = {}

        async def all_there() -> bool:
            try:
                async with await psycopg.AsyncConnection.connect(url) as connection:
                    for topic, table in _COUNTED:
                        cursor = await connection.execute(f"SELECT count(*) FROM berth.{table}")
                        seen[f"berth.{topic}"] = cast("tuple[int]", await cursor.fetchone())[0]
                    positions = await connection.execute(
                        "SELECT sum(next_offset) FROM berth.checkpoints WHERE topic = 'berth.texts'"
                    )
                    texts = cast("tuple[int | None]", await positions.fetchone())[0] or 0
            except (psycopg.OperationalError, psycopg.errors.UndefinedTable):
                return False
            has_texts = texts >= self.counts.get("berth.texts", 0)
            return has_texts and all(count == self.counts.get(topic, 0) for topic, count in seen.items())

        try:
            await until(all_there, timeout_seconds=timeout_seconds)
        except TimeoutError:
            raise TimeoutError(f"published {self.counts}, in the tables {seen}") from None


@asynccontextmanager
async def publisher(bootstrap: str, seed: int) -> AsyncIterator[Publisher]:
    opened = Publisher(bootstrap, seed)
    try:
        yield opened
    finally:
        await opened.stop()


class ProjectorProcess(WorkerProcess):
    """A real ``berth projector``."""

    @classmethod
    async def of(cls, bootstrap: str, url: str, partitions: int) -> "ProjectorProcess":
        return await cls.start(
            bootstrap,
            ("-m", "api.cli", "projector"),
            BERTH_DATABASE_URL=url,
            BERTH_PARTITIONS=str(partitions),
        )

    async def address(self) -> str:
        return str((await self.logged("projector_listens"))["readyz"]).removesuffix("/readyz")

    async def readiness_is(self, ready: bool, timeout_seconds: float = WAIT_SECONDS) -> dict[str, Any]:
        """Wait until /readyz says so; what it says."""
        body: dict[str, Any] = {}

        async def as_wanted() -> bool:
            status, found = await self.readiness()
            body.update(found)
            assert (status == 200) == found["ready"]
            return bool(found["ready"]) is ready

        try:
            await until(as_wanted, timeout_seconds=timeout_seconds)
        except TimeoutError:
            raise TimeoutError(f"/readyz still says {body}; {self.account()}") from None
        return body


@asynccontextmanager
async def projector(bootstrap: str, url: str, partitions: int) -> AsyncIterator[ProjectorProcess]:
    process = await ProjectorProcess.of(bootstrap, url, partitions)
    try:
        yield process
    finally:
        await process.discard()


# Projectors that die at a given statement


class Fatal(psycopg.Cursor[TupleRow]):
    """A cursor that kills its process before its n-th statement, or between the last of a batch and the commit."""

    left: int = 0

    @classmethod
    def step(cls) -> None:
        Fatal.left -= 1
        if Fatal.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def execute(self, *arguments: Any, **options: Any) -> Any:
        self.step()
        done = super().execute(*arguments, **options)
        if str(arguments[0]).startswith("NOTIFY"):  # the last of a transaction, whose end is no statement of ours
            self.step()
        return done

    def copy(self, *arguments: Any, **options: Any) -> Any:
        self.step()
        return super().copy(*arguments, **options)


def fatal_connection(url: str, name: str) -> schema.Connection:
    connection = schema.connect(url, name)
    connection.cursor_factory = Fatal
    return connection


def project_until_killed(bootstrap: str, url: str, partitions: int, kill_at: int, batch_records: int) -> None:
    """The main function of a forked projector. ``kill_at``: at which statement; 0: never."""
    projector_module.BATCH_RECORDS_MAX = batch_records  # type: ignore[misc]
    Fatal.left = kill_at
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    store = Store(url, open_connection=fatal_connection)
    run_service(Projector(bootstrap, store, url, partitions, 36_500).run)


_FORKS: Final = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([__name__])


def fork_projector(
    bootstrap: str, url: str, partitions: int, *, kill_at: int = 0, batch_records: int = 4_000
) -> BaseProcess:
    """A projector as a process of its own, in a tenth of a second."""
    process = _FORKS.Process(
        target=project_until_killed, args=(bootstrap, url, partitions, kill_at, batch_records), daemon=True
    )
    process.start()
    return process


# What must be in the tables


def positions(store: Store, records: Sequence[LogRecord]) -> dict[tuple[str, int], int]:
    """Where the checkpoints are; the store begins anew only where there are none, and so keeps what it knows."""
    wanted = {(record.topic, record.partition) for record in records}
    rows = store.connection.execute("SELECT topic, partition, next_offset FROM checkpoints")
    found = {(topic, partition): offset for topic, partition, offset in rows}
    return found if wanted <= found.keys() else store.positions(wanted)


def project(store: Store, records: Sequence[LogRecord]) -> None:
    """Apply the records as one batch, from where the checkpoints are."""
    assert isinstance(store.apply(batch_of(records, positions(store, records))), Applied)


def snapshot_all(store: Store) -> None:
    for decider in store.without_snapshot():
        while store.make_snapshot(decider):
            pass


def content(store: Store) -> dict[str, list[str]]:
    """Everything in the tables, in comparable form."""
    found = {}
    for name in [*(table.name for table in TABLES), "agent_snapshots", "site_snapshots", "checkpoints"]:
        rows = store.connection.execute(
            sql.SQL("SELECT to_jsonb(rows) FROM {} AS rows").format(sql.Identifier(name))
        ).fetchall()
        found[name] = sorted(json.dumps(row, sort_keys=True) for (row,) in rows)
    return found


def fresh(database: str, name: str) -> Store:
    other = Store(database, name)
    other.open()
    return other


def check_rows(store: Store, history: History) -> None:
    """The rows of all agents and sites against the state that their deciders hold."""
    rows = stored_rows(store)
    for agent_id in history.agents:
        check_agent_rows(rows, history.agent(agent_id), agent_id)
        check_agent_reads(store, history.agent(agent_id), agent_id)
    for site_id in SITES:
        check_site_rows(rows, history.site(site_id), site_id)


def stored_rows(store: Store) -> RowSets:
    """Every row that changes with decisions, as the projector reads it."""
    rows = RowSets()
    for table in FOLDED:
        names = sql.SQL(", ").join(map(sql.Identifier, table.columns))
        statement = sql.SQL("SELECT {} FROM {}").format(names, sql.Identifier(table.name))
        found = [table.row(*values) for values in store.connection.execute(statement, binary=True)]
        rows.by_table()[table.name].update({key_of(table)(row): row for row in found})
    return rows


def check_agent_reads(store: Store, agent: Agent | None, agent_id: str) -> None:
    """What readers ask of one agent, in the order in which they get it."""
    read = store.connection.execute
    queue = read(
        "SELECT trigger_id FROM triggers WHERE agent_id = %s AND state = 'waiting'"
        " ORDER BY available_at, created_at, trigger_id",
        (agent_id,),
    ).fetchall()
    assert [trigger_id for (trigger_id,) in queue] == [key.id.decode() for key in (agent or Agent(agent_id)).waiting]
    slots = read("SELECT slot_number, execution_id, trigger_id FROM slots WHERE agent_id = %s", (agent_id,)).fetchall()
    assert sorted(slots) == sorted(
        (trigger.slot_number, trigger.execution_id, trigger.trigger_id)
        for trigger in (agent.triggers.values() if agent else ())
        if trigger.state == "running"
    )


async def check_against_log(bootstrap: str, url: str, partitions: int) -> Mapping[str, int]:
    """The tables equal a rebuild; the numbers of rows compared."""
    compared, differences = await compare(bootstrap, url, partitions, 36_500, lambda *_: None)
    assert not differences, differences
    return compared
