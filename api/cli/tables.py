"""How operators' commands show what the API says: tables that keep ids whole, times as ages, harmless texts.

Texts of people and records may hold anything; what a terminal might obey is shown as U+FFFD. Into a pipe a table is as
wide as its content, so that whoever looks for a line finds it whole.
"""

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

PIPE_COLUMNS: Final = 10_000
_TO_COME: Final = "in "
_UNITS: Final = ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s"))


def say_json(content: Any) -> None:
    """One JSON object on one line, in ASCII."""
    typer.echo(json.dumps(content))


def say(*lines: str) -> None:
    """Sentences, each on a line of its own."""
    console = _console()
    for line in lines:
        console.print(Text(plain(line)), soft_wrap=True)


def say_fields(title: str, fields: Iterable[tuple[str, Any]]) -> None:
    """A heading and what there is to say below it; what is None or empty is left out."""
    console = _console()
    console.print(Text(plain(title), style="bold"), soft_wrap=True)
    shown = Table(Column("", style="dim"), Column("", overflow="fold"), box=None, show_header=False, padding=(0, 2))
    for name, value in fields:
        if value is not None and value != "":
            shown.add_row(name, Text(plain(str(value))))
    if shown.row_count:
        console.print(shown)


def say_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], nothing: str = "") -> None:
    """A table below its heading, without columns in which nothing is; without rows ``nothing``, or nothing at all."""
    found = [[Text("" if value is None else plain(str(value))) for value in row] for row in rows]
    console = _console()
    if not found and not nothing:
        return
    if title:
        console.print(Text(plain(title), style="bold"), soft_wrap=True)
    if not found:
        console.print(Text(plain(nothing)), soft_wrap=True)
        return
    filled = [index for index in range(len(columns)) if any(row[index] for row in found)]
    shown = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for index in filled:
        shown.add_column(columns[index], overflow="fold")
    for row in found:
        shown.add_row(*(row[index] for index in filled))
    console.print(shown)


def plain(text: str) -> str:
    """The text without what a terminal would obey; lines are kept."""
    return "".join(one if one.isprintable() or one == "\n" else "\ufffd" for one in text)


def one_line(text: str | None, characters_max: int = 100) -> str | None:
    """The beginning of a text."""
    if text is None:
        return None
    joined = " ".join(text.split())
    return joined if len(joined) <= characters_max else joined[: characters_max - 1] + "…"


def clock(instant: str) -> str:
    """A time of the API, to the second: ``2026-11-29 10:00:00Z``."""
    return f"{instant[:10]} {instant[11:19]}Z"


def moment(instant: str | None) -> str | None:
    """The same with how long ago it was: ``2026-11-29 10:00:00Z (3m 20s)``."""
    return None if instant is None else f"{clock(instant)} ({age(instant)})"


def until(instant: str | None) -> str | None:
    """A time that is to come, as ``in 3m 20s``; None when it has come."""
    words = age(instant)
    return words if words is not None and words.startswith(_TO_COME) else None


def age(instant: str | None, now: datetime | None = None) -> str | None:
    """How long ago a time of the API was in its two largest units; with ``in`` before it when it is to come."""
    if instant is None:
        return None
    apart = round(((now or datetime.now(UTC)) - datetime.fromisoformat(instant)).total_seconds())
    left, parts = abs(apart), list[str]()
    for seconds, unit in _UNITS:
        if left >= seconds or parts:
            parts.append(f"{left // seconds}{unit}")
            left %= seconds
    return (_TO_COME if apart < 0 else "") + (" ".join(parts[:2]) or "0s")


def _console() -> Console:
    console = Console(highlight=False, markup=False, emoji=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, emoji=False, width=PIPE_COLUMNS)
