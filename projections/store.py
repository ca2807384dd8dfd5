"""The only place that writes the projections: batches of the log into PostgreSQL, each in one transaction.

A transaction takes the writer's lock, moves the checkpoints from where the batch begins to where it ends (by compare
and set), reads the rows that the batch names, folds the decisions over them (rows.py) and writes them whole. So

* a crash anywhere leaves the batch applied with its positions, or nothing of it;
* a batch that was applied before, or that another projector was quicker with, changes nothing: ``Moved`` says where
  the checkpoints are;
* how the log is cut into batches makes no difference.

New rows are copied into their tables; changed ones into temporary tables, and from there over the old ones. Lookups by
key may only use indexes: right after a start the statistics know nothing yet, and a scan of a table that grows with
every batch would make catching up slower the longer it takes.

Not safe for use by several threads at a time. Errors of the database are psycopg's.
"""

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Final, NamedTuple

import psycopg
from psycopg import sql
from psycopg.adapt import Dumper, Loader
from psycopg.pq import Format
from psycopg.rows import TupleRow
from pydantic import ValidationError

from projections import rows as projected
from projections import schema, snapshots
from projections.rows import CannotApply, Named, Rows
from projections.schema import LOCK_CLASS, PROJECTOR_LOCK, Connection
from streams import DEAD_LETTERS, DECISIONS, TEXTS
from streams.rules.events import Decision, read_decision

CHANNEL: Final = "berth_projections"
"""NOTIFY with an empty payload after every batch: who waits for a position looks at the checkpoints again."""

Cursor = psycopg.Cursor[TupleRow]
Position = tuple[str, int]
"""(topic, partition)"""


class LogRecord(NamedTuple):
    """One record of a topic that is projected."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes]]
    written_at: int
    """Kafka's time of the record, in microseconds."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Records in the order of their partitions, and which offsets they are: moves from ``begins`` to ``ends``."""

    records: Sequence[LogRecord]
    begins: Mapping[Position, int]
    ends: Mapping[Position, int]

    def before(self, topic: str, partition: int, offset: int) -> "Batch":
        """What of it comes before an offset of one partition, and of the others."""
        kept = [
            record
            for record in self.records
            if (record.topic, record.partition) != (topic, partition) or record.offset < offset
        ]
        position = topic, partition
        return Batch(kept, self.begins, {**self.ends, position: max(offset, self.begins[position])})


@dataclass(frozen=True, slots=True)
class Applied:
    """The batch is applied. ``decided_at`` of its decisions; agents that may need a snapshot now."""

    decided_at: list[int]
    snapshots_due: list[str]


@dataclass(frozen=True, slots=True)
class Moved:
    """Nothing was applied: the checkpoints are not where the batch begins."""

    positions: dict[Position, int]


@dataclass(frozen=True, slots=True)
class _Table:
    """How rows of one kind get into their table."""

    name: str
    columns: tuple[str, ...]
    keys: tuple[str, ...]
    row: Callable[..., Any]
    values: Callable[[Any], Sequence[Any]]


def _table(name: str, row: type[Any], *keys: str) -> _Table:
    if hasattr(row, "_fields"):
        return _Table(name, row._fields, keys, row, tuple)
    columns = tuple(field.name for field in fields(row))
    return _Table(name, columns, keys, row, attrgetter(*columns))


_AGENTS: Final = _table("agents", projected.AgentRow, "agent_id")
_CONVERSATIONS: Final = _table("conversations", projected.ConversationRow, "agent_id", "conversation_id")
_TRIGGERS: Final = _table("triggers", projected.TriggerRow, "agent_id", "trigger_id")
_ATTEMPTS: Final = _table("attempts", projected.AttemptRow, "agent_id", "trigger_id", "execution_id")
_DECISIONS: Final = _table("decisions", projected.DecisionRow)
_DECISION_IDS: Final = _table("decision_ids", projected.DecisionIdRow)
_TEXTS: Final = _table("texts", projected.TextRow, "agent_id", "trigger_id", "execution_id", "kind")
_DEAD_LETTERS: Final = _table("dead_letters", projected.DeadLetterRow)
_CHANGING: Final = (_AGENTS, _CONVERSATIONS, _TRIGGERS, _ATTEMPTS)
TABLES: Final = (*_CHANGING, _TEXTS, _DECISIONS, _DECISION_IDS, _DEAD_LETTERS)


class Store:
    """The tables of one schema, by one connection. ``open_connection`` is for tests that count or cut statements."""

    def __init__(
        self,
        url: str,
        live_schema: str = schema.LIVE_SCHEMA,
        open_connection: Callable[[str, str], Connection] = schema.connect,
    ) -> None:
        self.schema = live_schema
        self._url = url
        self._open_connection = open_connection
        self._connection: Connection | None = None
        self._types: dict[str, list[int]] = {}

    # Connection

    def open(self) -> None:
        """Connect, and bring the tables to this version. Raises psycopg.OperationalError or schema.SchemaRefused."""
        self.close()
        connection = self._open_connection(self._url, self.schema)
        try:
            schema.migrate(connection, self.schema)
            _adapt(connection)
            # What a crash of the server loses is applied again from the log: waiting for the disk protects nothing.
            for name in ("enable_seqscan", "enable_hashjoin", "enable_mergejoin", "synchronous_commit"):
                connection.execute(sql.SQL("SET {} TO off").format(sql.Identifier(name)))
            for table in TABLES:
                self._types[table.name] = _column_types(connection, table)
            for table in (*_CHANGING, _TEXTS):
                connection.execute(
                    sql.SQL("CREATE TEMPORARY TABLE {} (LIKE {}) ON COMMIT DELETE ROWS").format(
                        sql.Identifier("pg_temp", f"changed_{table.name}"), sql.Identifier(table.name)
                    )
                )
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @property
    def connection(self) -> Connection:
        """The open connection: for reads, and for who holds the writer's lock."""
        assert self._connection is not None, "open() first"
        return self._connection

    def claim(self) -> bool:
        """Whether this is the only projector, and stays it until the connection ends."""
        found = self.connection.execute("SELECT pg_try_advisory_lock(%s, %s)", (LOCK_CLASS, PROJECTOR_LOCK))
        return found.fetchone() == (True,)

    # Positions

    def positions(self, wanted: Iterable[Position]) -> dict[Position, int]:
        """Where each partition goes on; one that was never read is noted as beginning at 0."""
        topics, partitions = zip(*wanted, strict=True)
        self.connection.execute(
            "INSERT INTO checkpoints (topic, partition, next_offset)"
            " SELECT topic, partition, 0 FROM unnest(%s::text[], %s::integer[]) AS wanted (topic, partition)"
            " ON CONFLICT DO NOTHING",
            (list(topics), list(partitions)),
        )
        return _positions(self.connection)

    # Batches

    def apply(self, batch: Batch) -> Applied | Moved:
        """Apply the batch and move the checkpoints, in one transaction. Raises CannotApply: then nothing was."""
        decisions = [(record, _read(record)) for record in batch.records if record.topic == DECISIONS.name]
        texts = {}
        for record in batch.records:
            if record.topic == TEXTS.name:
                row = _read_text(record)
                texts[row[:4]] = row
        dead_letters = [_dead_letter(record) for record in batch.records if record.topic == DEAD_LETTERS.name]
        try:
            with self.connection.transaction(), self.connection.cursor(binary=True) as cursor:
                _lock_writer(cursor)
                _move(cursor, batch)
                due = self._apply_decisions(cursor, decisions)
                self._replace(cursor, _TEXTS, texts.values())
                self._copy(cursor, _DEAD_LETTERS, dead_letters)
                cursor.execute(f"NOTIFY {CHANNEL}")
        except _IsElsewhere:
            return Moved(_positions(self.connection))
        return Applied([decision.at for _, decision in decisions], due)

    def _apply_decisions(self, cursor: Cursor, decisions: list[tuple[LogRecord, Decision]]) -> list[str]:
        if not decisions:
            return []
        named = Named()
        for _, decision in decisions:
            named.add(decision)
        rows = Rows()
        known = self._load(cursor, named, rows)
        for record, decision in decisions:
            assert record.value is not None
            rows.apply(record.topic, record.partition, record.offset, decision, record.value)
        kinds: tuple[Mapping[Any, Any], ...] = (rows.agents, rows.conversations, rows.triggers, rows.attempts)
        for table, found, changed in zip(_CHANGING, known, kinds, strict=True):
            self._copy(cursor, table, [row for key, row in changed.items() if key not in found])
            self._update(cursor, table, [row for key, row in changed.items() if key in found])
        self._copy(cursor, _DECISIONS, rows.decisions)
        self._copy(cursor, _DECISION_IDS, rows.decision_ids)
        return [row.agent_id for row in rows.agents.values() if snapshots.newest_due(row.seq) > row.snapshot_seq]

    def _load(self, cursor: Cursor, named: Named, rows: Rows) -> tuple[frozenset[Any], ...]:
        """Read the rows that are named into ``rows``; the keys of those that are there."""
        rows.agents = {row.agent_id: row for row in _select(cursor, _AGENTS, [(id,) for id in named.agents])}
        rows.triggers = {(row.agent_id, row.trigger_id): row for row in _select(cursor, _TRIGGERS, named.triggers)}
        rows.attempts = {
            (row.agent_id, row.trigger_id, row.execution_id): row for row in _select(cursor, _ATTEMPTS, named.attempts)
        }
        conversations = named.conversations | {(row.agent_id, row.conversation_id) for row in rows.triggers.values()}
        rows.conversations = {
            (row.agent_id, row.conversation_id): row for row in _select(cursor, _CONVERSATIONS, conversations)
        }
        found = rows.agents, rows.conversations, rows.triggers, rows.attempts
        return tuple(frozenset(of_a_kind) for of_a_kind in found)

    def _copy(self, cursor: Cursor, table: _Table, new_rows: Iterable[Any], into: str | None = None) -> None:
        new_rows = list(new_rows)
        if not new_rows:
            return
        columns = sql.SQL(", ").join(map(sql.Identifier, table.columns))
        statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT BINARY)").format(
            sql.Identifier(into or table.name), columns
        )
        values = table.values
        with cursor.copy(statement) as copy:
            copy.set_types(self._types[table.name])
            for row in new_rows:
                copy.write_row(values(row))

    def _update(self, cursor: Cursor, table: _Table, changed: list[Any]) -> None:
        if not changed:
            return
        staged = f"changed_{table.name}"
        self._copy(cursor, table, changed, into=staged)
        cursor.execute(
            sql.SQL("UPDATE {table} SET {values} FROM {staged} AS changed WHERE {same}").format(
                table=sql.Identifier(table.name),
                staged=sql.Identifier(staged),
                values=_assignments(table),
                same=_same(table),
            )
        )

    def _replace(self, cursor: Cursor, table: _Table, new_rows: Iterable[Any]) -> None:
        """Write rows over those with the same key."""
        new_rows = list(new_rows)
        if not new_rows:
            return
        staged = f"changed_{table.name}"
        self._copy(cursor, table, new_rows, into=staged)
        columns = sql.SQL(", ").join(map(sql.Identifier, table.columns))
        cursor.execute(
            sql.SQL(
                "INSERT INTO {table} ({columns}) SELECT {columns} FROM {staged}"
                " ON CONFLICT ({keys}) DO UPDATE SET {values}"
            ).format(
                table=sql.Identifier(table.name),
                staged=sql.Identifier(staged),
                columns=columns,
                keys=sql.SQL(", ").join(map(sql.Identifier, table.keys)),
                values=_assignments(table, "excluded"),
            )
        )

    # Snapshots

    def agents_without_snapshot(self) -> list[str]:
        """Agents whose newest snapshot is 1,000 or more decisions behind them. A scan of the agents."""
        found = self.connection.execute(
            "SELECT agent_id FROM agents WHERE seq - snapshot_seq >= %s ORDER BY agent_id",
            (snapshots.SNAPSHOT_DECISIONS,),
        )
        return [agent_id for (agent_id,) in found]

    def make_snapshot(self, agent_id: str) -> bool:
        """Make the agent's next snapshot, in one transaction; whether one is due after it. Raises CannotApply."""
        with self.connection.transaction(), self.connection.cursor(binary=True) as cursor:
            _lock_writer(cursor)
            agent = cursor.execute(
                "SELECT seq, snapshot_seq FROM agents WHERE agent_id = %s FOR UPDATE", (agent_id,)
            ).fetchone()
            if agent is None or agent[0] - agent[1] < snapshots.SNAPSHOT_DECISIONS:
                return False
            seq, previous_seq = agent
            next_seq = previous_seq + snapshots.SNAPSHOT_DECISIONS
            previous = cursor.execute(
                "SELECT state::text FROM agent_snapshots WHERE agent_id = %s AND seq = %s", (agent_id, previous_seq)
            ).fetchone()
            decisions = cursor.execute(
                "SELECT record::text, decided_at, log_partition, log_offset FROM decisions"
                " WHERE agent_id = %s AND seq > %s AND seq <= %s ORDER BY seq",
                (agent_id, previous_seq, next_seq),
            ).fetchall()
            state = snapshots.read(agent_id, previous[0] if previous else None)
            for record, _, partition, offset in decisions:
                try:
                    snapshots.fold(state, [record])
                except (AssertionError, KeyError, ValidationError) as error:
                    why = f"the rules can't fold it: {error!r}"
                    raise CannotApply(DECISIONS.name, partition, offset, why) from error
            cursor.execute(
                "INSERT INTO agent_snapshots (agent_id, seq, decided_at, state) VALUES (%s, %s, %s, %s)",
                (agent_id, next_seq, _Instant(decisions[-1][1]), _Json(snapshots.write(state))),
            )
            cursor.execute("UPDATE agents SET snapshot_seq = %s WHERE agent_id = %s", (next_seq, agent_id))
            return bool(seq - next_seq >= snapshots.SNAPSHOT_DECISIONS)

    # Retention

    def forget_texts(self, before: int, rows_max: int) -> int:
        """Delete the oldest texts and dead letters written before an instant, up to ``rows_max`` of each; how many."""
        deleted = 0
        with self.connection.transaction(), self.connection.cursor() as cursor:
            _lock_writer(cursor)
            for table, key in (("texts", _TEXTS.keys), ("dead_letters", ("log_partition", "log_offset"))):
                keys = sql.SQL(", ").join(map(sql.Identifier, key))
                statement = sql.SQL(
                    "DELETE FROM {table} WHERE ({keys}) IN"
                    " (SELECT {keys} FROM {table} WHERE written_at < %s ORDER BY written_at LIMIT %s)"
                ).format(table=sql.Identifier(table), keys=keys)
                deleted += cursor.execute(statement, (_Instant(before), rows_max)).rowcount
        return deleted


# Statements


def _lock_writer(cursor: Cursor) -> None:
    cursor.execute(schema.LOCK_WRITER)


class _IsElsewhere(Exception):  # noqa: N818 - it reads as what it is
    """A checkpoint is not where the batch begins."""


def _move(cursor: Cursor, batch: Batch) -> None:
    """Move the checkpoints from where the batch begins to where it ends. Raises _IsElsewhere."""
    moves = [(*position, batch.begins[position], end) for position, end in batch.ends.items()]
    topics, partitions, begins, ends = zip(*moves, strict=True)
    cursor.execute(
        "UPDATE checkpoints SET next_offset = moves.ends"
        " FROM unnest(%s::text[], %s::integer[], %s::bigint[], %s::bigint[]) AS moves (topic, partition, begins, ends)"
        " WHERE checkpoints.topic = moves.topic AND checkpoints.partition = moves.partition"
        " AND checkpoints.next_offset = moves.begins",
        (list(topics), list(partitions), list(begins), list(ends)),
    )
    if cursor.rowcount != len(moves):
        raise _IsElsewhere


def _positions(connection: Connection) -> dict[Position, int]:
    found = connection.execute("SELECT topic, partition, next_offset FROM checkpoints")
    return {(topic, partition): next_offset for topic, partition, next_offset in found}


def _select(cursor: Cursor, table: _Table, keys: Iterable[tuple[str, ...]]) -> list[Any]:
    """The rows that have one of these keys."""
    lists = [list(column) for column in zip(*keys, strict=True)]
    if not lists:
        return []
    statement = sql.SQL("SELECT {columns} FROM {table} JOIN unnest({lists}) AS changed ({keys}) ON {same}").format(
        columns=sql.SQL(", ").join(sql.Identifier(table.name, column) for column in table.columns),
        table=sql.Identifier(table.name),
        lists=sql.SQL(", ").join(sql.SQL("%s::text[]") for _ in table.keys),
        keys=sql.SQL(", ").join(map(sql.Identifier, table.keys)),
        same=_same(table),
    )
    return [table.row(*found) for found in cursor.execute(statement, lists)]


def _same(table: _Table) -> sql.Composed:
    return sql.SQL(" AND ").join(
        sql.SQL("{} = {}").format(sql.Identifier(table.name, key), sql.Identifier("changed", key)) for key in table.keys
    )


def _assignments(table: _Table, source: str = "changed") -> sql.Composed:
    return sql.SQL(", ").join(
        sql.SQL("{} = {}").format(sql.Identifier(column), sql.Identifier(source, column))
        for column in table.columns
        if column not in table.keys
    )


def _column_types(connection: Connection, table: _Table) -> list[int]:
    found: dict[str, int] = dict(
        connection.execute(
            "SELECT attname, atttypid FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0", (table.name,)
        )
    )
    return [found[column] for column in table.columns]


# Records


def _read(record: LogRecord) -> Decision:
    try:
        return read_decision(record.value or b"")
    except ValidationError as error:
        raise _unreadable(record, f"it is no decision that this version knows: {error}") from error


def _read_text(record: LogRecord) -> projected.TextRow:
    try:
        return projected.text_row(record.partition, record.offset, record.value or b"", record.written_at)
    except ValueError as error:
        raise _unreadable(record, f"it is no text: {error}") from error


def _dead_letter(record: LogRecord) -> projected.DeadLetterRow:
    return projected.dead_letter_row(
        record.partition, record.offset, record.key, record.value, record.headers, record.written_at
    )


def _unreadable(record: LogRecord, why: str) -> CannotApply:
    return CannotApply(record.topic, record.partition, record.offset, why[:1000])


# Types: instants are microseconds, and JSON goes in as it stands


class _Instant(int):
    """Microseconds since 1970, to be written as a time."""


class _Json(str):
    """JSON text."""

    __slots__ = ()


_EPOCH_2000: Final = 946_684_800_000_000
"""PostgreSQL's times count from 2000, in microseconds after ours."""
_INT8: Final = struct.Struct("!q")


class _InstantDumper(Dumper):
    oid = psycopg.adapters.types["timestamptz"].oid
    format = Format.BINARY

    def dump(self, obj: int) -> bytes:
        return _INT8.pack(obj - _EPOCH_2000)


class _InstantLoader(Loader):
    format = Format.BINARY

    def load(self, data: bytes | bytearray | memoryview) -> int:
        instant: int = _INT8.unpack(data)[0]
        return instant + _EPOCH_2000


class _JsonDumper(Dumper):
    oid = psycopg.adapters.types["jsonb"].oid
    format = Format.BINARY

    def dump(self, obj: str) -> bytes:
        return b"\x01" + obj.encode()  # the version of jsonb's binary form


def _adapt(connection: Connection) -> None:
    connection.adapters.register_dumper(_Instant, _InstantDumper)
    connection.adapters.register_loader("timestamptz", _InstantLoader)
    connection.adapters.register_dumper(_Json, _JsonDumper)
