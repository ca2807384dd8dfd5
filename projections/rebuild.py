"""Making the tables anew from the log, beside the live ones, to take their place or to be compared with them.

The live projector goes on meanwhile. It is held up only at the end, by the writer's lock, for the moment in which the
new tables catch up the last records to exactly where the live ones are: then the two describe the same decisions, and
no reader goes back in time. After the swap the projector finds its checkpoints where it left them and writes on into
the new tables.

Texts outlive the log: Kafka keeps them for 30 days, the tables as long as the deployment says. Those that the log no
longer holds are copied from the live tables; they can't be compared. So are dead letters, and what was verified last.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import psycopg
from psycopg import sql
from psycopg.rows import TupleRow

from projections import schema
from projections.log import Log
from projections.projector import BATCH_RECORDS_MAX
from projections.schema import (
    COMPARED_SCHEMA,
    LIVE_SCHEMA,
    LOCK_CLASS,
    LOCK_WRITER,
    MIGRATION_LOCK,
    REBUILD_LOCK,
    REBUILT_SCHEMA,
    Connection,
)
from projections.store import Applied, Position, Store
from projections.tables import TABLES
from streams import DEAD_LETTERS, TEXTS

NEAR_RECORDS: Final = 2_000
"""So close to the live tables the rest is done while the projector is held up."""
WAIT_SECONDS: Final = 0.1
RETENTION_MARGIN: Final = timedelta(minutes=10)
"""Texts that end so soon may be gone on one side."""
EXAMPLES_MAX: Final = 5
REPLACED_SCHEMA: Final = "berth_replaced"
_SNAPSHOTS: Final = {"agent_snapshots": "agent_id", "site_snapshots": "site"}
"""Tables of snapshots, and whose each is."""
VERIFICATION_TABLE: Final = "last_verification"
_ENDING: Final = (("texts", TEXTS.name), ("dead_letters", DEAD_LETTERS.name))

Report = Callable[[str, int, int], None]
"""Told (what, how much is done, of how much), again and again."""


class CannotBegin(Exception):  # noqa: N818 - it reads as what it is
    """``happened`` says what is in the way; nothing was changed."""

    def __init__(self, happened: str, advice: str) -> None:
        super().__init__(f"{happened} To do: {advice}")
        self.happened = happened
        self.advice = advice


@dataclass(frozen=True, slots=True)
class Difference:
    """What of one table isn't the same. ``examples``: the first such rows as JSON, those of the live table first."""

    table: str
    only_live: int
    only_rebuilt: int
    examples: list[str]


async def rebuild(bootstrap: str, url: str, partitions: int, report: Report) -> dict[str, int]:
    """Make the tables anew and put them in place of the live ones; rows by table. Nothing is changed if it fails.

    Raises CannotBegin, CannotApply, LogDoesNotFit, KafkaError or psycopg.Error.
    """
    async with _beside(bootstrap, url, partitions, REBUILT_SCHEMA) as (live, reader, store):
        await asyncio.to_thread(_copy_what_the_log_lost, live, await reader.beginnings())

        async def live_positions() -> dict[Position, int]:
            """Where the live tables are, and no further than the log: they may be of one that was lost."""
            at = _live_positions(live, reader)
            ends = await reader.ends_beside(at)
            return {position: min(end, at[position]) for position, end in ends.items()}

        await _catch_up(reader, store, report, reader.ends)
        await asyncio.to_thread(_analyze, store)
        with live.transaction():
            # Nor may somebody who starts be in the midst of making the tables that are replaced.
            live.execute("SELECT pg_advisory_xact_lock(%s, %s)", (LOCK_CLASS, MIGRATION_LOCK))
            live.execute(LOCK_WRITER)
            await _apply_until(reader, store, await live_positions(), report)
            rows = await asyncio.to_thread(_count, store)
            store.close()
            _keep_verification(live)
            for old, new in ((LIVE_SCHEMA, REPLACED_SCHEMA), (REBUILT_SCHEMA, LIVE_SCHEMA)):
                live.execute(sql.SQL("ALTER SCHEMA {} RENAME TO {}").format(sql.Identifier(old), sql.Identifier(new)))
        schema.drop(live, REPLACED_SCHEMA)
        return rows


async def compare(
    bootstrap: str, url: str, partitions: int, text_days: int, report: Report
) -> tuple[dict[str, int], list[Difference]]:
    """Build the tables anew up to where the live ones are, and compare. The live ones are only read.

    The number of live rows compared by table, and what differs. Raises as ``rebuild``.
    """
    async with _beside(bootstrap, url, partitions, COMPARED_SCHEMA) as (live, reader, store):
        if live.execute("SELECT to_regclass('checkpoints')").fetchone() == (None,):
            raise CannotBegin("There are no tables to compare.", "start `berth projector`, which makes them.")

        async def live_positions() -> dict[Position, int]:
            at = _live_positions(live, reader)
            await reader.require(at)
            return at

        await _catch_up(reader, store, report, live_positions)
        with schema.connect(url) as frozen:
            with live.transaction():
                live.execute(LOCK_WRITER)
                await _apply_until(reader, store, await live_positions(), report)
                await _make_snapshots(store, report)
                frozen.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                frozen.execute("SELECT 1")  # from here on it sees the tables as they are now
            beginnings = await reader.beginnings()
            return await asyncio.to_thread(_compare, frozen, beginnings, text_days, report)


@asynccontextmanager
async def _beside(bootstrap: str, url: str, partitions: int, name: str) -> AsyncIterator[tuple[Connection, Log, Store]]:
    """A connection to the live tables, the log from its beginning, and empty tables beside; these are removed after."""
    with schema.connect(url) as live:
        if live.execute("SELECT pg_try_advisory_lock(%s, %s)", (LOCK_CLASS, REBUILD_LOCK)).fetchone() != (True,):
            raise CannotBegin("Another rebuild or diff works on this database.", "wait for it, or end it.")
        schema.make_schema(live, LIVE_SCHEMA)
        for left_over in (name, REPLACED_SCHEMA):
            schema.drop(live, left_over)
        store = Store(url, name)
        await asyncio.to_thread(store.open)
        try:
            async with Log(bootstrap, partitions) as reader:
                await reader.seek(await asyncio.to_thread(store.positions, reader.wanted))
                yield live, reader, store
        finally:
            store.close()
            if not live.broken:
                schema.drop(live, name)
                # A server may see only later that the connection has ended, and the next diff may begin at once.
                live.execute("SELECT pg_advisory_unlock(%s, %s)", (LOCK_CLASS, REBUILD_LOCK))


# Reading the log


async def _catch_up(
    reader: Log, store: Store, report: Report, target: Callable[[], Awaitable[dict[Position, int]]]
) -> None:
    """Apply what there is, until little is left."""
    while await reader.remaining(await target()) > NEAR_RECORDS:
        await _apply_until(reader, store, await target(), report)
        await _make_snapshots(store, report)


async def _apply_until(reader: Log, store: Store, until: Mapping[Position, int], report: Report) -> None:
    await reader.seek(dict(reader.positions))
    total = await reader.remaining(until)
    while left := await reader.remaining(until):
        batch = await reader.take(BATCH_RECORDS_MAX, WAIT_SECONDS, until)
        if batch is not None:
            outcome = await asyncio.to_thread(store.apply, batch)
            assert isinstance(outcome, Applied), "nobody else writes these tables"
        report("records of the log", max(0, total - left), total)


async def _make_snapshots(store: Store, report: Report) -> None:
    due = await asyncio.to_thread(store.without_snapshot)
    for number, decider in enumerate(due, start=1):
        while await asyncio.to_thread(store.make_snapshot, decider):
            pass
        report("agents and sites with snapshots", number, len(due))


def _live_positions(live: Connection, reader: Log) -> dict[Position, int]:
    """Where the live tables are; 0 where nothing is known."""
    if live.execute("SELECT to_regclass('checkpoints')").fetchone() == (None,):
        return dict.fromkeys(reader.wanted, 0)
    found = {
        (topic, partition): offset
        for topic, partition, offset in live.execute("SELECT topic, partition, next_offset FROM checkpoints")
    }
    return {position: found.get(position, 0) for position in reader.wanted}


# The tables


def _copy_what_the_log_lost(live: Connection, beginnings: Mapping[Position, int]) -> None:
    """Take over texts and dead letters that are older than what Kafka holds."""
    for table, topic in _ENDING:
        if live.execute("SELECT to_regclass(%s)", (table,)).fetchone() == (None,):
            continue
        columns = sql.SQL(", ").join(sql.Identifier(column) for column in _columns(table))
        live.execute(
            sql.SQL(
                "INSERT INTO {new} ({columns}) SELECT {columns} FROM {old}"
                " WHERE log_offset < (%s::bigint[])[log_partition + 1]"
            ).format(
                new=sql.Identifier(REBUILT_SCHEMA, table), old=sql.Identifier(LIVE_SCHEMA, table), columns=columns
            ),
            (_by_partition(beginnings, topic),),
        )


def _keep_verification(live: Connection) -> None:
    """Take over what ``berth verify`` found last, which is in no log. Who writes it waits for the lock held now."""
    if live.execute("SELECT to_regclass(%s)", (f"{LIVE_SCHEMA}.{VERIFICATION_TABLE}",)).fetchone() != (None,):
        live.execute(
            sql.SQL("INSERT INTO {} SELECT * FROM {}").format(
                sql.Identifier(REBUILT_SCHEMA, VERIFICATION_TABLE), sql.Identifier(LIVE_SCHEMA, VERIFICATION_TABLE)
            )
        )


def _analyze(store: Store) -> None:
    for table in TABLES:
        store.connection.execute(sql.SQL("ANALYZE {}").format(sql.Identifier(table.name)))


def _count(store: Store) -> dict[str, int]:
    return {table.name: _number(store.connection, _all(store.schema, table.name)) for table in TABLES}


def _compare(
    frozen: Connection, beginnings: Mapping[Position, int], text_days: int, report: Report
) -> tuple[dict[str, int], list[Difference]]:
    compared: dict[str, int] = {}
    differences: list[Difference] = []
    names = [*(table.name for table in TABLES), *_SNAPSHOTS]
    for number, name in enumerate(names, start=1):
        report(f"tables, now {name}", number - 1, len(names))
        live, rebuilt = (_comparable(schema_name, name, beginnings, text_days) for schema_name in _BOTH)
        only_live = sql.SQL("{} EXCEPT ALL {}").format(live, rebuilt)
        only_rebuilt = sql.SQL("{} EXCEPT ALL {}").format(rebuilt, live)
        compared[name] = _number(frozen, live)
        counts = _number(frozen, only_live), _number(frozen, only_rebuilt)
        if any(counts):
            examples = [
                row
                for side in (only_live, only_rebuilt)
                for (row,) in frozen.execute(
                    sql.SQL("SELECT to_jsonb(found)::text FROM ({}) AS found LIMIT {}").format(side, EXAMPLES_MAX)
                )
            ]
            differences.append(Difference(name, *counts, examples))
    return compared, differences


_BOTH: Final = (LIVE_SCHEMA, COMPARED_SCHEMA)


def _comparable(schema_name: str, table: str, beginnings: Mapping[Position, int], text_days: int) -> sql.Composed:
    """The rows of a table that both must have, without what depends on when it was written."""
    where: sql.Composable = sql.SQL("true")
    for name, topic in _ENDING:
        if name == table:  # those that have not ended, and that the log still holds
            where = sql.SQL("log_offset >= ({}::bigint[])[log_partition + 1] AND written_at > now() - {}").format(
                sql.Literal(_by_partition(beginnings, topic)), sql.Literal(timedelta(days=text_days) - RETENTION_MARGIN)
            )
    if table in _SNAPSHOTS:  # the live ones may still be to be made
        where = sql.SQL("({id}, seq) IN (SELECT {id}, seq FROM {live})").format(
            id=sql.Identifier(_SNAPSHOTS[table]), live=sql.Identifier(LIVE_SCHEMA, table)
        )
    columns = sql.SQL(", ").join(sql.Identifier(column) for column in _columns(table))
    source = sql.Identifier(schema_name, table)
    return sql.SQL("(SELECT {} FROM {} WHERE {})").format(columns, source, where)


def _all(schema_name: str, table: str) -> sql.Composed:
    return sql.SQL("(SELECT FROM {})").format(sql.Identifier(schema_name, table))


def _columns(table: str) -> list[str]:
    if table in _SNAPSHOTS:
        return [_SNAPSHOTS[table], "seq", "decided_at", "state"]
    (columns,) = (known.columns for known in TABLES if known.name == table)
    return [column for column in columns if column != "snapshot_seq"]


def _number(connection: psycopg.Connection[TupleRow], rows: sql.Composed) -> int:
    found = connection.execute(sql.SQL("SELECT count(*) FROM ({}) AS counted").format(rows)).fetchone()
    assert found is not None
    return int(found[0])


def _by_partition(beginnings: Mapping[Position, int], topic: str) -> list[int]:
    found = {partition: offset for (name, partition), offset in beginnings.items() if name == topic}
    return [found[partition] for partition in sorted(found)]
