"""The tables of the projections and their versions: SQL files, applied in order, each in one transaction, once.

Live tables are in the PostgreSQL schema ``berth``; a rebuild makes its own beside them, by the same files, and takes
their place. What was applied is recorded there with the file's SHA-256: a file that was changed afterwards, or tables
of a newer Berth, are refused, since nobody could say what the tables hold. Two programs that start at the same time
take turns (an advisory lock).
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Final

import psycopg
from psycopg import sql
from psycopg.rows import TupleRow

LIVE_SCHEMA: Final = "berth"
REBUILT_SCHEMA: Final = "berth_rebuilt"
COMPARED_SCHEMA: Final = "berth_compared"
"""Where ``berth projections diff`` builds what it compares the live tables with."""
CONNECT_TIMEOUT_SECONDS: Final = 5
LOCK_CLASS: Final = 0x62657274
"""First number of our advisory locks; the second is one of those below."""
MIGRATION_LOCK: Final = 1
REBUILD_LOCK: Final = 2
"""Held for as long as a rebuild or diff works."""
PROJECTOR_LOCK: Final = 3
"""Held by the session of the projector that works; others wait for its end."""
LOCK_WRITER: Final = "SELECT pg_advisory_xact_lock(hashtext('berth projections'), hashtext(current_schema()))"
"""Begins every transaction that changes tables, and the swap of the live ones: so no transaction spans a swap."""

Connection = psycopg.Connection[TupleRow]


class SchemaRefused(Exception):  # noqa: N818 - it reads as what it is
    """The tables can't be used as they are: ``happened`` says what was found, ``advice`` what to do."""

    def __init__(self, happened: str, advice: str) -> None:
        super().__init__(f"{happened} To do: {advice}")
        self.happened = happened
        self.advice = advice


@dataclass(frozen=True, slots=True)
class Migration:
    number: int
    name: str
    statements: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.statements.encode()).hexdigest()


def migrations(directory: Traversable | None = None) -> list[Migration]:
    """The migrations of this version in order: files ``0001_what.sql``, numbered from 1 without a gap."""
    folder = directory or resources.files(__package__) / "migrations"
    found = []
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        named = re.fullmatch(r"(\d{4})_([a-z0-9_]+)\.sql", file.name)
        if named:
            found.append(Migration(int(named[1]), named[2], file.read_text(encoding="utf-8")))
    assert [migration.number for migration in found] == list(range(1, len(found) + 1)), "numbers have gaps"
    return found


def connect(url: str, schema: str = LIVE_SCHEMA) -> Connection:
    """A connection in autocommit mode that finds the tables of ``schema``. Raises psycopg.OperationalError."""
    connection = psycopg.connect(
        url,
        autocommit=True,
        connect_timeout=CONNECT_TIMEOUT_SECONDS,
        application_name="berth",
        keepalives_idle=5,
        keepalives_interval=2,
        keepalives_count=3,
        tcp_user_timeout=10_000,
    )
    # Locks of a session whose machine is gone end with it, not after the two hours that are usual.
    connection.execute(
        "SELECT set_config('tcp_keepalives_' || name, value, false)"
        " FROM (VALUES ('idle', '5'), ('interval', '2'), ('count', '3')) AS settings (name, value)"
    )
    use(connection, schema)
    return connection


def use(connection: psycopg.Connection[TupleRow], schema: str) -> None:
    """Let unqualified names mean those of ``schema``."""
    connection.execute(sql.SQL("SET search_path TO {}").format(sql.Identifier(schema)))


@contextmanager
def _making(connection: Connection) -> Iterator[None]:
    """Only one makes schemas and tables at a time: IF NOT EXISTS doesn't see what another is about to make."""
    connection.execute("SELECT pg_advisory_lock(%s, %s)", (LOCK_CLASS, MIGRATION_LOCK))
    try:
        yield
    finally:
        if not connection.closed:
            connection.execute("SELECT pg_advisory_unlock(%s, %s)", (LOCK_CLASS, MIGRATION_LOCK))


def make_schema(connection: Connection, schema: str) -> None:
    """Make the schema if there is none, without tables."""
    with _making(connection):
        _make_schema(connection, schema)


def _make_schema(connection: Connection, schema: str) -> None:
    connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(schema)))


def migrate(connection: Connection, schema: str, wanted: Sequence[Migration] | None = None) -> list[Migration]:
    """Bring the tables of ``schema`` to this version; those migrations that were applied. Raises SchemaRefused."""
    known = migrations() if wanted is None else list(wanted)
    with _making(connection):
        _make_schema(connection, schema)
        use(connection, schema)
        connection.execute(
            "CREATE TABLE IF NOT EXISTS migrations (number integer PRIMARY KEY, name text NOT NULL,"
            " sha256 text NOT NULL, applied_at timestamptz NOT NULL DEFAULT now())"
        )
        applied = connection.execute(_APPLIED).fetchall()
        _check(applied, known, schema)
        missing = known[len(applied) :]
        for migration in missing:
            with connection.transaction():
                connection.execute(migration.statements.encode())  # as it stands: % is no parameter there
                connection.execute(
                    "INSERT INTO migrations (number, name, sha256) VALUES (%s, %s, %s)",
                    (migration.number, migration.name, migration.sha256),
                )
        return missing


def applied_migrations(connection: Connection, schema: str) -> int:
    """How many of this version's migrations the tables of ``schema`` have; 0: there are none. Raises SchemaRefused."""
    if connection.execute("SELECT to_regclass(%s)", (f"{schema}.migrations",)).fetchone() == (None,):
        return 0
    use(connection, schema)
    applied = connection.execute(_APPLIED).fetchall()
    _check(applied, migrations(), schema)
    return len(applied)


_APPLIED: Final = "SELECT number, name, sha256 FROM migrations ORDER BY number"


def _check(applied: list[TupleRow], known: list[Migration], schema: str) -> None:
    rebuild = "berth projections rebuild makes them anew from the log."
    if len(applied) > len(known):
        raise SchemaRefused(
            f"The tables in schema {schema} are of a newer Berth: migration {applied[-1][0]} ({applied[-1][1]}) is "
            "unknown here. Nothing was changed.",
            f"run the version that made them; or, to go back, {rebuild}",
        )
    for (number, name, sha256), migration in zip(applied, known, strict=False):
        if (number, name, sha256) != (migration.number, migration.name, migration.sha256):
            raise SchemaRefused(
                f"The tables in schema {schema} were made by another text of migration {number} ({name}) than this "
                f"version has ({migration.name}). Nothing was changed.",
                rebuild,
            )


def drop(connection: Connection, schema: str) -> None:
    """Remove the tables of a rebuild or comparison."""
    assert schema != LIVE_SCHEMA
    connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(schema)))
