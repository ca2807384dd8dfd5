"""How far into the logs of decisions something is: what a write answers, and what a read may ask to have seen.

A position is opaque to clients. Inside it is a vector, the next offset by partition of berth.decisions and of
berth.site-decisions, so that one token can also say where a reader of many agents stands.
"""

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

TOKEN_CHARACTERS_MAX: Final = 40_000
_VECTOR: Final = re.compile(r"r(?P<offsets>[0-9:,]+)", re.ASCII)
_TOKEN: Final = re.compile(r"(?:d(?P<agents>[0-9:,]+))?(?:s(?P<sites>[0-9:,]+))?", re.ASCII)
_ENTRY: Final = re.compile(r"(\d{1,5}):(\d{1,19})", re.ASCII)


@dataclass(frozen=True, slots=True)
class LogPosition:
    """Next offsets by partition; a partition that isn't named is not asked about."""

    next_offsets: Mapping[int, int] = field(default_factory=dict)
    """Of berth.decisions."""
    site_next_offsets: Mapping[int, int] = field(default_factory=dict)
    """Of berth.site-decisions."""

    def is_reached_by(
        self, next_offsets: Mapping[int, int], site_next_offsets: Mapping[int, int] | None = None
    ) -> bool:
        """Whether who stands there has seen everything before this position."""
        return _is_reached(self.next_offsets, next_offsets) and _is_reached(
            self.site_next_offsets, site_next_offsets or {}
        )

    def __str__(self) -> str:
        return _token(_written("d", self.next_offsets) + _written("s", self.site_next_offsets))


def _is_reached(wanted: Mapping[int, int], reached: Mapping[int, int]) -> bool:
    return all(reached.get(partition, 0) >= offset for partition, offset in wanted.items())


def _written(letter: str, offsets: Mapping[int, int]) -> str:
    entries = ",".join(f"{partition}:{offset}" for partition, offset in sorted(offsets.items()))
    return letter + entries if entries else ""


def _token(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def read_position(token: str) -> LogPosition:
    """The position that a client sends back. ValueError if it is none of ours."""
    parts = _parts(token, _TOKEN, "is no position of a write's answer")
    return LogPosition(_read(parts["agents"]), _read(parts["sites"]))


def write_runner_position(next_offsets: Mapping[int, int]) -> str:
    """How far a runner has read berth.dispatches: next offset by partition."""
    return _token(_written("r", next_offsets))


def read_runner_position(token: str) -> dict[int, int]:
    """The position that a runner sends back. ValueError if it is none of ours."""
    return _read(_parts(token, _VECTOR, "is no position that dispatches were read to")["offsets"])


def _parts(token: str, form: "re.Pattern[str]", words: str) -> "re.Match[str]":
    if len(token) > TOKEN_CHARACTERS_MAX:
        raise ValueError("is too long")
    try:
        text = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True).decode("ascii")
    except (binascii.Error, UnicodeError, ValueError):
        raise ValueError(words) from None
    parts = form.fullmatch(text)
    if not text or parts is None:
        raise ValueError(words)
    return parts


def _read(entries: str | None) -> dict[int, int]:
    found = [_ENTRY.fullmatch(entry) for entry in entries.split(",")] if entries else []
    if not all(found):
        raise ValueError("is no position of ours")
    return {int(entry[1]): int(entry[2]) for entry in found if entry}
