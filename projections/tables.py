"""How rows get into their tables and out of them: columns, statements and the binary forms of values.

New rows are copied into their table. Changed ones are copied into a temporary table, and from there over the old ones:
one statement, whatever their number. Rows are read by key, many at a time. Instants are microseconds on this side, and
JSON goes in as the text that it is.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from operator import attrgetter
from typing import Any, Final, get_type_hints

import psycopg
from psycopg import sql
from psycopg.adapt import Dumper, Loader
from psycopg.pq import Format
from psycopg.rows import TupleRow

from projections import row_types
from projections.schema import Connection

Cursor = psycopg.Cursor[TupleRow]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of one kind. ``values`` gives a row's values in the order of ``columns``, ``row`` makes one of them."""

    name: str
    columns: tuple[str, ...]
    keys: tuple[str, ...]
    key_types: tuple[str, ...]
    row: Callable[..., Any]
    values: Callable[[Any], Sequence[Any]]


def _table(name: str, row: type[Any], *keys: str) -> Table:
    kinds = get_type_hints(row)
    key_types = tuple("bigint" if kinds[key] is int else "text" for key in keys)
    if hasattr(row, "_fields"):
        return Table(name, row._fields, keys, key_types, row, tuple)
    columns = tuple(field.name for field in fields(row))
    return Table(name, columns, keys, key_types, row, attrgetter(*columns))


AGENTS: Final = _table("agents", row_types.AgentRow, "agent_id")
CONVERSATIONS: Final = _table("conversations", row_types.ConversationRow, "agent_id", "conversation_id")
TRIGGERS: Final = _table("triggers", row_types.TriggerRow, "agent_id", "trigger_id")
ATTEMPTS: Final = _table("attempts", row_types.AttemptRow, "agent_id", "trigger_id", "execution_id")
DECISIONS: Final = _table("decisions", row_types.DecisionRow)
DECISION_IDS: Final = _table("decision_ids", row_types.DecisionIdRow)
DEPENDENCIES: Final = _table("dependencies", row_types.DependencyRow, "agent_id", "trigger_id", "position")
TRIGGER_CLAIMS: Final = _table("trigger_claims", row_types.TriggerClaimRow, "agent_id", "trigger_id")
SITES: Final = _table("sites", row_types.SiteRow, "site")
SITE_GATES: Final = _table("site_gates", row_types.SiteGateRow, "site", "scope", "name")
SITE_CLAIMS: Final = _table("site_claims", row_types.SiteClaimRow, "site", "agent_id", "trigger_id")
SITE_DELETIONS: Final = _table("site_deletions", row_types.SiteDeletionRow, "site", "environment_id", "path")
SITE_DECISIONS: Final = _table("site_decisions", row_types.SiteDecisionRow)
TEXTS: Final = _table("texts", row_types.TextRow, "agent_id", "trigger_id", "execution_id", "kind")
DEAD_LETTERS: Final = _table("dead_letters", row_types.DeadLetterRow)
FOLDED: Final = (
    *(AGENTS, CONVERSATIONS, TRIGGERS, ATTEMPTS, DEPENDENCIES, TRIGGER_CLAIMS),
    *(SITES, SITE_GATES, SITE_CLAIMS, SITE_DELETIONS),
)
"""Those whose rows change with decisions: row_sets.py has their rows by the same names."""
_CHANGING: Final = (*FOLDED, TEXTS)
TABLES: Final = (*_CHANGING, DECISIONS, DECISION_IDS, SITE_DECISIONS, DEAD_LETTERS)


class Tables:
    """The tables that a connection finds, made ready for it."""

    def __init__(self, connection: Connection) -> None:
        connection.adapters.register_dumper(Instant, _InstantDumper)
        connection.adapters.register_loader("timestamptz", _InstantLoader)
        connection.adapters.register_dumper(Json, _JsonDumper)
        self._types = _column_types(connection)
        staging = sql.SQL("CREATE TEMPORARY TABLE {} (LIKE {}) ON COMMIT DELETE ROWS")
        connection.execute(
            sql.SQL("; ").join(
                staging.format(sql.Identifier("pg_temp", _staged(table)), sql.Identifier(table.name))
                for table in _CHANGING
            )
        )

    def select(self, cursor: Cursor, table: Table, keys: Iterable[Any]) -> list[Any]:
        """The rows that have one of these keys, each a string or a tuple. The cursor is a binary one."""
        lists = _lists(table, keys)
        return [table.row(*found) for found in cursor.execute(_select(table), lists)] if lists else []

    def insert(self, cursor: Cursor, table: Table, rows: Sequence[Any]) -> None:
        """Add rows whose keys are new."""
        self._copy(cursor, table, rows, table.name)

    def update(self, cursor: Cursor, table: Table, rows: Sequence[Any]) -> None:
        """Write rows over those with the same keys, which are there."""
        self._copy(cursor, table, rows, _staged(table))
        if rows:
            cursor.execute(_update(table))

    def delete(self, cursor: Cursor, table: Table, keys: Iterable[Any]) -> None:
        """Delete the rows with these keys."""
        lists = _lists(table, keys)
        if lists:
            cursor.execute(_delete(table), lists)

    def put(self, cursor: Cursor, table: Table, rows: Sequence[Any]) -> None:
        """Write rows, over those with the same keys where there are such."""
        self._copy(cursor, table, rows, _staged(table))
        if rows:
            cursor.execute(_upsert(table))

    def _copy(self, cursor: Cursor, table: Table, rows: Sequence[Any], into: str) -> None:
        if not rows:
            return
        values = table.values
        with cursor.copy(_copy_into(table, into)) as copy:
            copy.set_types(self._types[table.name])
            for row in rows:
                copy.write_row(values(row))


# Statements, composed once


def _lists(table: Table, keys: Iterable[Any]) -> list[list[Any]]:
    """The keys by column."""
    if len(table.keys) == 1:
        only = list(keys)
        return [only] if only else []
    return [list(column) for column in zip(*keys, strict=True)]


def key_of(table: Table) -> Callable[[Any], Any]:
    """Which key a row has: a string, or a tuple if the table's key has several columns."""
    return attrgetter(*table.keys)


def _staged(table: Table) -> str:
    return f"changed_{table.name}"


@cache
def _copy_into(table: Table, into: str) -> bytes:
    return (
        sql.SQL("COPY {} ({}) FROM STDIN (FORMAT BINARY)")
        .format(sql.Identifier(into), _names(table.columns))
        .as_bytes()
    )


@cache
def _select(table: Table) -> bytes:
    return (
        sql.SQL("SELECT {columns} FROM {table} JOIN unnest({lists}) AS changed ({keys}) ON {same}")
        .format(
            columns=sql.SQL(", ").join(sql.Identifier(table.name, column) for column in table.columns),
            table=sql.Identifier(table.name),
            lists=_parameters(table),
            keys=_names(table.keys),
            same=_same(table),
        )
        .as_bytes()
    )


@cache
def _delete(table: Table) -> bytes:
    return (
        sql.SQL("DELETE FROM {table} USING unnest({lists}) AS changed ({keys}) WHERE {same}")
        .format(table=sql.Identifier(table.name), lists=_parameters(table), keys=_names(table.keys), same=_same(table))
        .as_bytes()
    )


@cache
def _update(table: Table) -> bytes:
    return (
        sql.SQL("UPDATE {table} SET {values} FROM {staged} AS changed WHERE {same}")
        .format(
            table=sql.Identifier(table.name),
            staged=sql.Identifier(_staged(table)),
            values=_assignments(table, "changed"),
            same=_same(table),
        )
        .as_bytes()
    )


@cache
def _upsert(table: Table) -> bytes:
    return (
        sql.SQL(
            "INSERT INTO {table} ({columns}) SELECT {columns} FROM {staged} ON CONFLICT ({keys}) DO UPDATE SET {values}"
        )
        .format(
            table=sql.Identifier(table.name),
            staged=sql.Identifier(_staged(table)),
            columns=_names(table.columns),
            keys=_names(table.keys),
            values=_assignments(table, "excluded"),
        )
        .as_bytes()
    )


def _parameters(table: Table) -> sql.Composed:
    return sql.SQL(", ").join(sql.SQL("%s::" + kind + "[]") for kind in table.key_types)


def _names(columns: Iterable[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, columns))


def _same(table: Table) -> sql.Composed:
    return sql.SQL(" AND ").join(
        sql.SQL("{} = {}").format(sql.Identifier(table.name, key), sql.Identifier("changed", key)) for key in table.keys
    )


def _assignments(table: Table, source: str) -> sql.Composed:
    return sql.SQL(", ").join(
        sql.SQL("{} = {}").format(sql.Identifier(column), sql.Identifier(source, column))
        for column in table.columns
        if column not in table.keys
    )


def _column_types(connection: Connection) -> dict[str, list[int]]:
    """The types of each table's columns, in the order of ``Table.columns``."""
    rows = connection.execute(
        "SELECT name, attname, atttypid FROM unnest(%s::text[]) AS tables (name)"
        " JOIN pg_attribute ON attrelid = name::regclass AND attnum > 0",
        ([table.name for table in TABLES],),
    )
    found = {(table, column): kind for table, column, kind in rows}
    return {table.name: [found[table.name, column] for column in table.columns] for table in TABLES}


# Values


class Instant(int):
    """Microseconds since 1970, to be written as a time."""


class Json(str):
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
