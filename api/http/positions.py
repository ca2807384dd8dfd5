"""How far into the log of decisions something is: what a write answers, and what a read may ask to have seen.

A position is opaque to clients. Inside it is a vector, the next offset by partition of berth.decisions, so that one
token can also say where a reader of many agents stands.
"""

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

TOKEN_CHARACTERS_MAX: Final = 20_000
_ENTRY: Final = re.compile(r"(\d{1,5}):(\d{1,19})", re.ASCII)


@dataclass(frozen=True, slots=True)
class LogPosition:
    """Next offset by partition of berth.decisions; a partition that isn't named is not asked about."""

    next_offsets: Mapping[int, int] = field(default_factory=dict)

    def is_reached_by(self, next_offsets: Mapping[int, int]) -> bool:
        """Whether who stands at ``next_offsets`` has seen everything before this position."""
        return all(next_offsets.get(partition, 0) >= offset for partition, offset in self.next_offsets.items())

    def __str__(self) -> str:
        text = ",".join(f"{partition}:{offset}" for partition, offset in sorted(self.next_offsets.items()))
        return base64.urlsafe_b64encode(f"d{text}".encode()).decode().rstrip("=")


def read_position(token: str) -> LogPosition:
    """The position that a client sends back. ValueError if it is none of ours."""
    if len(token) > TOKEN_CHARACTERS_MAX:
        raise ValueError("is too long")
    try:
        text = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True).decode("ascii")
    except (binascii.Error, UnicodeError, ValueError):
        raise ValueError("is no position of a write's answer") from None
    entries = [_ENTRY.fullmatch(entry) for entry in text[1:].split(",")]
    if text[:1] != "d" or not all(entries):
        raise ValueError("is no position of a write's answer")
    return LogPosition({int(entry[1]): int(entry[2]) for entry in entries if entry})
