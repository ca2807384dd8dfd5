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
from typing import Final, NamedTuple

from psycopg import sql
from pydantic import ValidationError

from projections import schema, snapshots, tables, texts
from projections.row_types import CannotApply, DeadLetterRow, TextRow
from projections.rows import Named, Rows
from projections.schema import LOCK_CLASS, PROJECTOR_LOCK, Connection
from projections.tables import Cursor, Instant, Json, Tables
from streams import DEAD_LETTERS, DECISIONS, TEXTS
from streams.rules.events import Decision, read_decision

CHANNEL: Final = "berth_projections"
"""NOTIFY with an empty payload after every batch: who waits for a position looks at the checkpoints again."""

ROWS_KEPT_MAX: Final = 200_000
"""Beyond that many rows in memory all are read again when they are named."""
_CHANGING: Final = (tables.AGENTS, tables.CONVERSATIONS, tables.TRIGGERS, tables.ATTEMPTS)

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
        decisions = [(record, _read(record)) for record in batch.records if record.topic == DECISIONS.name]
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
        changed = (self._rows.agents[agent_id] for agent_id in named.agents)
        due = [row.agent_id for row in changed if snapshots.newest_due(row.seq) > row.snapshot_seq]
        self._rows.keep_living(named)
        if len(self._rows) > ROWS_KEPT_MAX:
            self._rows = Rows()
        return Applied([decision.at for _, decision in decisions], due)

    def _apply_decisions(self, cursor: Cursor, decisions: list[tuple[LogRecord, Decision]], named: Named) -> None:
        rows = self._rows
        self._load(cursor, named)
        known = {id(kind): kind.keys() & keys for kind, keys in rows.of(named)}
        for record, decision in decisions:
            assert record.value is not None
            rows.apply(record.topic, record.partition, record.offset, decision, record.value)
        for table, (kind, keys) in zip(_CHANGING, rows.of(named), strict=True):
            there = known[id(kind)]
            self._tables.insert(cursor, table, [kind[key] for key in keys if key not in there and key in kind])
            self._tables.update(cursor, table, [kind[key] for key in there])
        self._tables.insert(cursor, tables.DECISIONS, rows.decisions)
        self._tables.insert(cursor, tables.DECISION_IDS, rows.decision_ids)

    def _load(self, cursor: Cursor, named: Named) -> None:
        """Read the rows that are named and not known yet."""
        rows, select = self._rows, self._tables.select
        for agent in select(cursor, tables.AGENTS, [(id,) for id in named.agents - rows.agents.keys()]):
            rows.agents[agent.agent_id] = agent
        for trigger in select(cursor, tables.TRIGGERS, named.triggers - rows.triggers.keys()):
            rows.triggers[trigger.agent_id, trigger.trigger_id] = trigger
        for attempt in select(cursor, tables.ATTEMPTS, named.attempts - rows.attempts.keys()):
            rows.attempts[attempt.agent_id, attempt.trigger_id, attempt.execution_id] = attempt
        for key in named.ending & rows.triggers.keys():
            named.conversations.add((key[0], rows.triggers[key].conversation_id))
        for conversation in select(cursor, tables.CONVERSATIONS, named.conversations - rows.conversations.keys()):
            rows.conversations[conversation.agent_id, conversation.conversation_id] = conversation

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
                (agent_id, next_seq, Instant(decisions[-1][1]), Json(snapshots.write(state))),
            )
            cursor.execute("UPDATE agents SET snapshot_seq = %s WHERE agent_id = %s", (next_seq, agent_id))
        self._rows.agents.pop(agent_id, None)
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


def _read(record: LogRecord) -> Decision:
    try:
        return read_decision(record.value or b"")
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
