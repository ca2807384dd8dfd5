"""``endpoints.json`` in the data directory: where the servers of this directory listen, for every other command.

Several programs write into it (``berth up`` and ``berth api``), each its own entries, one after the other under a lock.
An entry goes when its program ends, so that nobody is sent to a port on which somebody else may listen by then; the
file goes with the last entry.
"""

import fcntl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from api.cli.directory_lock import cannot_write
from streams.settings import ENDPOINTS_FILE_NAME, Endpoints, Settings

_LOCK_FILE_NAME: Final = "endpoints.lock"


@contextmanager
def published(settings: Settings, **entries: str) -> Iterator[None]:
    """The entries are in the file, from here to the end of the block. Raises CommandFailed."""
    path = settings.data_directory / ENDPOINTS_FILE_NAME
    try:
        _change(path, entries)
    except OSError as error:
        raise cannot_write(path, error) from error
    try:
        yield
    finally:
        _withdraw(path, entries)


def listed(settings: Settings) -> dict[str, str]:
    """What is in the file now; empty when there is none."""
    return _read(settings.data_directory / ENDPOINTS_FILE_NAME)


def _withdraw(path: Path, entries: Mapping[str, str]) -> None:
    """Remove the entries, apart from those that another program has replaced meanwhile."""
    present = _read(path)
    _change(path, {name: None for name, value in entries.items() if present.get(name) == value})


def _change(path: Path, changes: Mapping[str, str | None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / _LOCK_FILE_NAME).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        content = {name: value for name, value in {**_read(path), **changes}.items() if value is not None}
        if not content:
            path.unlink(missing_ok=True)
            return
        unfinished = path.with_suffix(".unfinished")
        unfinished.touch(mode=0o600)  # the database's URL holds its password
        unfinished.write_text(Endpoints(**content).model_dump_json(exclude_none=True) + "\n")
        unfinished.replace(path)


def _read(path: Path) -> dict[str, str]:
    try:
        found: dict[str, str] = Endpoints.model_validate_json(path.read_bytes()).model_dump(exclude_none=True)
    except (OSError, ValueError):
        return {}
    return found
