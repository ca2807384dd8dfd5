"""Instants and the order of waiting triggers (C1).

An instant is an int: microseconds since 1970 in UTC. On the wire it is RFC 3339 with a zone; one without a zone is
refused, because nobody can say which of two machines' local times came first. Ids compare by their UTF-8 bytes, as
COLLATE "C" does in SQL: code point order and UTF-8 order are the same, UTF-16 order is not.
"""

import re
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final, NamedTuple

from streams.rules import limits

SECOND: Final = 1_000_000
"""Microseconds in a second."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_RFC3339: Final = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:[Zz]|[+-]\d\d:\d\d)", re.ASCII)


def parse_instant(text: str) -> int:
    """Microseconds of an RFC 3339 time. ValueError if it has no zone or is no time; digits past the sixth are cut."""
    if len(text) == _WRITTEN_CHARACTERS and text[19] == "." and text[26] == "Z":  # as format_instant writes it
        microseconds = text[20:26]
        if microseconds.isascii() and microseconds.isdecimal():
            return _parse_second(text[:19]) + int(microseconds)
    return _parse(text)


@lru_cache(maxsize=4096)
def _parse_second(text: str) -> int:
    """Most instants that are read lie within few seconds of one another."""
    return _parse(f"{text}Z")


def _parse(text: str) -> int:
    if not _RFC3339.fullmatch(text):
        raise ValueError("must be a time with a zone, as in 2026-03-01T10:00:00.000100Z (RFC 3339)")
    try:
        moment = datetime.fromisoformat(text.upper()).astimezone(UTC)  # fails outside of the years 1 to 9999
        return instant_of(moment)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"is no time of the calendar: {error}") from None


def format_instant(instant: int) -> str:
    """RFC 3339 in UTC with six decimals and ``Z``."""
    seconds, microseconds = divmod(instant, SECOND)
    return f"{_format_second(seconds)}.{microseconds:06d}Z"


@lru_cache(maxsize=4096)
def _format_second(seconds: int) -> str:
    """Most instants that are written lie within few seconds of one another."""
    return (_EPOCH + timedelta(seconds=seconds)).replace(tzinfo=None).isoformat()


_WRITTEN_CHARACTERS: Final = len("2026-03-01T10:00:00.000100Z")


def instant_of(moment: datetime) -> int:
    """The instant of a time with a zone."""
    return (moment - _EPOCH) // _MICROSECOND


def moment_of(instant: int) -> datetime:
    """The time of an instant, in UTC. OverflowError outside of the years 1 to 9999."""
    return _EPOCH + instant * _MICROSECOND


class OrderKey(NamedTuple):
    """Who is older starts first: compare as tuples."""

    available_at: int
    created_at: int
    id: bytes


def order_key(available_at: int, created_at: int, trigger_id: str) -> OrderKey:
    return OrderKey(available_at, created_at, trigger_id.encode())


def first_availability(created_at: int | None, available_at: int | None, at: int) -> tuple[int, int]:
    """(created_at, available_at) as they are stamped when a trigger is accepted at ``at`` (C1)."""
    created = at if created_at is None else created_at
    available = min(created, at) if available_at is None else available_at
    return created, max(available, at - limits.ORDER_WINDOW_SECONDS * SECOND)
