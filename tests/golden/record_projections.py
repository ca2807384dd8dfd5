"""``python -m tests.golden.record_projections``: what the newest version of the tables makes of a log, if not recorded.

Two files, kept for ever: the log as this version's deciders write it, and the tables with the rows that it makes of it.
Later versions must upgrade those tables to the rows that they make of that log themselves.
"""

import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from api.cli.embedded_postgres import EmbeddedPostgres
from projections.schema import migrations
from projections.store import Applied, LogRecord, Store
from projections.tables import TABLES
from tests.histories import History, batch_of

DIRECTORY: Final = Path(__file__).parent
STEPS: Final = 90


class Empty(Exception):  # noqa: N818 - it reads as what it is
    """A table has no row that an upgrade could be seen by."""


def tables_file(version: int) -> Path:
    return DIRECTORY / f"projections_{version:04d}.sql"


def log_file(version: int) -> Path:
    return DIRECTORY / f"projections_{version:04d}_log.jsonl"


def recorded_log(version: int) -> list[LogRecord]:
    """The log from which the tables of a version were made."""
    lines = log_file(version).read_text().splitlines()
    return [
        LogRecord(topic, partition, offset, octets(key), octets(value), [(name, octets(h)) for name, h in headers], at)  # type: ignore[misc]
        for topic, partition, offset, key, value, headers, at in map(json.loads, lines)
    ]


def octets(text: str | None) -> bytes | None:
    return None if text is None else text.encode("utf-8", "surrogateescape")


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "surrogateescape")


def _line(record: LogRecord) -> str:
    headers = [[name, _text(value)] for name, value in record.headers]
    about = [record.topic, record.partition, record.offset, _text(record.key), _text(record.value), headers]
    return json.dumps([*about, record.written_at])


def _statements(store: Store) -> Iterator[str]:
    """Every table's rows as an INSERT."""
    checkpoints = ("checkpoints", ("topic", "partition", "next_offset"))
    for name, columns in (*((table.name, table.columns) for table in TABLES), checkpoints):
        found = store.connection.execute(f"SELECT to_jsonb(rows)::text FROM {name} AS rows ORDER BY 1".encode())
        rows = ",\n ".join(row for (row,) in found)
        if not rows:
            raise Empty(name)
        names = ", ".join(columns)
        yield (
            f"INSERT INTO {name} ({names})\nSELECT {names} FROM"
            f" jsonb_populate_recordset(NULL::{name}, $json$[{rows}]$json$);\n"
        )


def main() -> None:
    version = len(migrations())
    if tables_file(version).exists():
        sys.stdout.write(f"version {version} is recorded\n")
        return
    for seed in itertools.count(version, 10):  # not every history has something for every table
        records = History(seed, agents=("A", "a", "a:b", "%", "é")).live(STEPS).records()
        try:
            tables = _tables(records)
        except Empty as empty:
            sys.stdout.write(f"seed {seed} leaves nothing in {empty}\n")
            continue
        tables_file(version).write_text(
            f"-- The tables of version {version} with the rows that it made of {log_file(version).name}.\n\n{tables}"
        )
        log_file(version).write_text("".join(_line(record) + "\n" for record in records))
        return


def _tables(records: list[LogRecord]) -> str:
    """The statements that make these records' rows. Raises Empty."""
    with (
        tempfile.TemporaryDirectory(prefix="berth-postgres-") as directory,
        EmbeddedPostgres(Path(directory), port=None) as server,
    ):
        store = Store(server.url)
        store.open()
        try:
            store.positions({(record.topic, record.partition) for record in records})
            assert isinstance(store.apply(batch_of(records, {})), Applied)
            return "\n".join(_statements(store))
        finally:
            store.close()


if __name__ == "__main__":
    main()
