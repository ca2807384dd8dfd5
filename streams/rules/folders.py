"""Folders: which spelling is compared, and which of them overlap (D2).

Two folders of one environment overlap when one is the other or lies above it, segment by segment: ``/a/b`` overlaps
``/a`` and ``/a/b/c``, not ``/a/bc``. POSIX rules: case, backslashes, spaces and ``%2e`` are ordinary characters.
"""

import unicodedata
from functools import lru_cache

from streams.rules import limits

SEGMENTS_MAX = 64

Segments = tuple[str, ...]


class FolderInvalid(ValueError):  # noqa: N818 - it reads as what it is
    """The path names no folder that could be compared; the text says why."""


@lru_cache(maxsize=1024)
def segments(path: str) -> Segments:
    """The compared form of an absolute path: NFC, without empty segments. ``/`` is ().

    FolderInvalid for a relative path, ``.`` and ``..``, control characters, and what is too long or too deep.
    """
    if not path.startswith("/"):
        raise FolderInvalid("must be absolute, beginning with /")
    composed = unicodedata.normalize("NFC", path)
    if len(composed.encode("utf-8", "surrogatepass")) > limits.FOLDER_BYTES_MAX:
        raise FolderInvalid(f"has more than {limits.FOLDER_BYTES_MAX} bytes")
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in composed):
        raise FolderInvalid("holds a control character")
    parts = tuple(part for part in composed.split("/") if part)
    if any(part in (".", "..") for part in parts):
        raise FolderInvalid("holds a segment . or ..")
    if len(parts) > SEGMENTS_MAX:
        raise FolderInvalid(f"has more than {SEGMENTS_MAX} segments")
    return parts


def path_of(parts: Segments) -> str:
    """The one spelling that is stored and shown."""
    return "/" + "/".join(parts)


def overlap(one: Segments, other: Segments) -> bool:
    """Whether two folders of the same environment exclude each other."""
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]
