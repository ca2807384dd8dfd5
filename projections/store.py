"""The only place that writes the projections: batches of the log into PostgreSQL, each in one transaction.

A transaction takes the writer's lock, moves the checkpoints from where the batch begins to where it ends (by compare
and set), reads the rows that the batch names, folds the decisions over them (rows.py) and writes them whole. So

* a crash anywhere leaves the batch applied with its positions, or nothing of it;
* a batch that was applied before, or that another projector was quicker with, changes nothing: ``Moved`` says where
  the checkpoints are;
* how the log is cut into batches makes no difference.

Rows of what lives are kept in memory between batches, since most decisions are about what came a moment ago; what has
ended is read again when it is named. Lookups by key may only use indexes: right after a start the statistics know
nothing yet, and a scan of a table that grows with every batch would make catching up slower the longer it takes.

Not safe for use by several threads at a time. Errors of the database are psycopg's.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, LiteralString, NamedTuple

from psycopg import sql
from pydantic import ValidationError

from projections import schema, snapshots, tables, texts
from projections.row_types import AgentRow, CannotApply, DeadLetterRow, SiteRow, TextRow
from projections.rows import Named, Rows
from projections.schema import LOCK_CLASS, PROJECTOR_LOCK, Connection
from projections.tables import Cursor, Instant, Json, Table, Tables
from streams import DEAD_LETTERS, DECISIONS, SITE_DECISIONS, TEXTS
from streams.rules.events import Decision, read_decision
from streams.rules.site_events import SiteDecision, read_site_decision

CHANNEL: Final = "berth_projections"
"""NOTIFY with an empty payload after every batch: who waits for a position looks at the checkpoints again."""

ROWS_KEPT_MAX: Final = 200_000
"""Beyond that many rows in memory all are read again when they are named."""
_LED_TO: Final = (tables.CONVERSATIONS, tables.DEPENDENCIES, tables.TRIGGER_CLAIMS, tables.SITE_GATES)
"""Tables of which more rows are named by those that were read of the others."""

Position = tuple[str, int]
"""(topic, partition)"""


class Decider(NamedTuple):
    """Who decides a log of its own: snapshots are made of each."""

    kind: Literal["agent", "site"]
    id: str


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
    """The batch is applied. ``decided_at`` of its decisions; who may need a snapshot now."""

    decided_at: list[int]
    snapshots_due: list[Decider]


@dataclass(frozen=True, slots=True)
class Moved:
    """Nothing was applied: the checkpoints are not where the batch begins."""

    positions: dict[Position, int]


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
        self._tables: Tables
        self._rows = Rows()
        """What lives, as the last batch left it; nothing after a failure. Only we write it, as _move makes sure."""

    # Connection

    def open(self) -> None:
        """Connect, and bring the tables to this version. Raises psycopg.OperationalError or schema.SchemaRefused."""
        self.close()
        connection = self._open_connection(self._url, self.schema)
        try:
            schema.migrate(connection, self.schema)
            # What a crash of the server loses is applied again from the log: waiting for the disk protects nothing.
            for name in ("enable_seqscan", "enable_hashjoin", "enable_mergejoin", "synchronous_commit"):
                connection.execute(sql.SQL("SET {} TO off").format(sql.Identifier(name)))
            self._tables = Tables(connection)
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._rows = Rows()

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
        """Where each partition goes on; one that was never read is noted as beginning at 0. Nothing is known before."""
        self._rows = Rows()
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
        decisions = [(record, _read(record)) for record in batch.records if record.topic in _READERS]
        newest_texts = {}
        for record in batch.records:
            if record.topic == TEXTS.name:
                row = _read_text(record)
                newest_texts[row[:4]] = row
        dead_letters = [_dead_letter(record) for record in batch.records if record.topic == DEAD_LETTERS.name]
        named = Named()
        for _, decision in decisions:
            named.add(decision)
        try:
            with self.connection.transaction(), self.connection.cursor(binary=True) as cursor:
                _lock_writer(cursor)
                _move(cursor, batch)
                self._apply_decisions(cursor, decisions, named)
                self._tables.put(cursor, tables.TEXTS, list(newest_texts.values()))
                self._tables.insert(cursor, tables.DEAD_LETTERS, dead_letters)
                cursor.execute(f"NOTIFY {CHANNEL}")
        except BaseException as error:
            self._rows = Rows()
            if isinstance(error, _IsElsewhere):
                return Moved(_positions(self.connection))
            raise
        rows = self._rows
        due = [Decider("agent", id) for id in named.agents if _needs_snapshot(rows.agents[id])]
        due += [Decider("site", id) for id in named.sites if _needs_snapshot(rows.sites[id])]
        self._rows.keep_living(named)
        if len(self._rows) > ROWS_KEPT_MAX:
            self._rows = Rows()
        return Applied([decision.at for _, decision in decisions], due)

    def _apply_decisions(
        self, cursor: Cursor, decisions: list[tuple[LogRecord, Decision | SiteDecision]], named: Named
    ) -> None:
        rows = self._rows
        self._load(cursor, named)
        before = {table: rows.by_table()[table.name].keys() & _keys(named, table) for table in tables.FOLDED}
        for record, decision in decisions:
            assert record.value is not None
            rows.apply(record.topic, record.partition, record.offset, decision, record.value)
        for table, there in before.items():
            kind = rows.by_table()[table.name]
            self._tables.delete(cursor, table, there - kind.keys())
            self._tables.insert(
                cursor, table, [kind[key] for key in _keys(named, table) if key not in there and key in kind]
            )
            self._tables.update(cursor, table, [kind[key] for key in there if key in kind])
        self._tables.insert(cursor, tables.DECISIONS, rows.decisions)
        self._tables.insert(cursor, tables.DECISION_IDS, rows.decision_ids)
        self._tables.insert(cursor, tables.SITE_DECISIONS, rows.site_decisions)

    def _load(self, cursor: Cursor, named: Named) -> None:
        """Read the rows that are named, and those that they lead to, and not known yet."""
        for table in tables.FOLDED:
            if table not in _LED_TO:
                self._load_table(cursor, table, named)
        named.follow(self._rows)
        for table in _LED_TO:
            self._load_table(cursor, table, named)

    def _load_table(self, cursor: Cursor, table: Table, named: Named) -> None:
        kind, key_of = self._rows.by_table()[table.name], tables.key_of(table)
        for row in self._tables.select(cursor, table, _keys(named, table) - kind.keys()):
            kind[key_of(row)] = row

    # Snapshots

    def without_snapshot(self) -> list[Decider]:
        """Whose next snapshot is due. A scan of the agents and sites."""
        found = self.connection.execute(
            "SELECT 'agent', agent_id FROM agents WHERE seq - snapshot_seq >= %(decisions)s"
            " UNION ALL SELECT 'site', site FROM sites WHERE seq - snapshot_seq >= %(decisions)s ORDER BY 1, 2",
            {"decisions": snapshots.SNAPSHOT_DECISIONS},
        )
        return [Decider(kind, id) for kind, id in found]

    def make_snapshot(self, decider: Decider) -> bool:
        """Make the next snapshot, in one transaction; whether one is due after it. Raises CannotApply."""
        id, of = decider.id, _SNAPSHOTS[decider.kind]
        with self.connection.transaction(), self.connection.cursor(binary=True) as cursor:
            _lock_writer(cursor)
            found = cursor.execute(of.select, (id,)).fetchone()
            if found is None or found[0] - found[1] < snapshots.SNAPSHOT_DECISIONS:
                return False
            seq, previous_seq = found
            next_seq = previous_seq + snapshots.SNAPSHOT_DECISIONS
            previous = cursor.execute(of.select_previous, (id, previous_seq)).fetchone()
            decisions = cursor.execute(of.select_decisions, (id, previous_seq, next_seq)).fetchall()
            state = of.read(id, previous[0] if previous else None)
            for record, _, partition, offset in decisions:
                try:
                    of.fold(state, [record])
                except (AssertionError, KeyError, ValidationError) as error:
                    why = f"the rules can't fold it: {error!r}"
                    raise CannotApply(of.topic, partition, offset, why) from error
            cursor.execute(of.insert, (id, next_seq, Instant(decisions[-1][1]), Json(of.write(state))))
            cursor.execute(of.update, (next_seq, id))
        self._rows.agents.pop(id, None)
        self._rows.sites.pop(id, None)
        return bool(seq - next_seq >= snapshots.SNAPSHOT_DECISIONS)

    # Retention

    def forget_texts(self, before: int, rows_max: int) -> int:
        """Delete the oldest texts and dead letters written before an instant, up to ``rows_max`` of each; how many."""
        deleted = 0
        with self.connection.transaction(), self.connection.cursor() as cursor:
            _lock_writer(cursor)
            for table, key in (("texts", tables.TEXTS.keys), ("dead_letters", ("log_partition", "log_offset"))):
                keys = sql.SQL(", ").join(map(sql.Identifier, key))
                statement = sql.SQL(
                    "DELETE FROM {table} WHERE ({keys}) IN"
                    " (SELECT {keys} FROM {table} WHERE written_at < %s ORDER BY written_at LIMIT %s)"
                ).format(table=sql.Identifier(table), keys=keys)
                deleted += cursor.execute(statement, (Instant(before), rows_max)).rowcount
        return deleted


# Statements


class _Snapshots(NamedTuple):
    """How snapshots of one kind of decider are made, and the statements that it takes."""

    topic: str
    read: Callable[[str, str | None], Any]
    fold: Callable[[Any, Iterable[str]], Any]
    write: Callable[[Any], str]
    select: LiteralString
    select_previous: LiteralString
    select_decisions: LiteralString
    insert: LiteralString
    update: LiteralString


_SNAPSHOTS: Final = {
    "agent": _Snapshots(
        DECISIONS.name,
        snapshots.read,
        snapshots.fold,
        snapshots.write,
        "SELECT seq, snapshot_seq FROM agents WHERE agent_id = %s FOR UPDATE",
        "SELECT state::text FROM agent_snapshots WHERE agent_id = %s AND seq = %s",
        "SELECT record::text, decided_at, log_partition, log_offset FROM decisions"
        " WHERE agent_id = %s AND seq > %s AND seq <= %s ORDER BY seq",
        "INSERT INTO agent_snapshots (agent_id, seq, decided_at, state) VALUES (%s, %s, %s, %s)",
        "UPDATE agents SET snapshot_seq = %s WHERE agent_id = %s",
    ),
    "site": _Snapshots(
        SITE_DECISIONS.name,
        snapshots.read_site,
        snapshots.fold_site,
        snapshots.write_site,
        "SELECT seq, snapshot_seq FROM sites WHERE site = %s FOR UPDATE",
        "SELECT state::text FROM site_snapshots WHERE site = %s AND seq = %s",
        "SELECT record::text, decided_at, log_partition, log_offset FROM site_decisions"
        " WHERE site = %s AND seq > %s AND seq <= %s ORDER BY seq",
        "INSERT INTO site_snapshots (site, seq, decided_at, state) VALUES (%s, %s, %s, %s)",
        "UPDATE sites SET snapshot_seq = %s WHERE site = %s",
    ),
}


def _needs_snapshot(row: AgentRow | SiteRow) -> bool:
    return snapshots.newest_due(row.seq) > row.snapshot_seq


def _keys(named: Named, table: Table) -> set[Any]:
    """The keys that are named of a table."""
    keys: set[Any] = getattr(named, table.name)
    return keys


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


# Records


_READERS: Final[dict[str, Callable[[bytes], Decision | SiteDecision]]] = {
    DECISIONS.name: read_decision,
    SITE_DECISIONS.name: read_site_decision,
}


def _read(record: LogRecord) -> Decision | SiteDecision:
    try:
        return _READERS[record.topic](record.value or b"")
    except ValidationError as error:
        raise _unreadable(record, f"it is no decision that this version knows: {error}") from error


def _read_text(record: LogRecord) -> TextRow:
    try:
        return texts.text_row(record.partition, record.offset, record.value or b"", record.written_at)
    except ValueError as error:
        raise _unreadable(record, f"it is no text: {error}") from error


def _dead_letter(record: LogRecord) -> DeadLetterRow:
    return texts.dead_letter_row(
        record.partition, record.offset, record.key, record.value, record.headers, record.written_at
    )


def _unreadable(record: LogRecord, why: str) -> CannotApply:
    return CannotApply(record.topic, record.partition, record.offset, why[:1000])
