"""How long a failed attempt's trigger waits for the next one (F5)."""

import hashlib
from typing import Final

from streams.rules import limits
from streams.rules.order import SECOND

_JITTER_SHARE: Final = 0.1
_DOUBLINGS_MAX: Final = (limits.BACKOFF_CAP_SECONDS // limits.BACKOFF_BASE_SECONDS).bit_length()


def backoff_microseconds(trigger_id: str, attempt: int, failures: int) -> int:
    """5 s × 2ⁿ for the n-th repeated failure, at most 15 min, less up to a tenth.

    The exponent is bounded before it is used, so that no attempt number overflows. The jitter spreads triggers that
    failed together; it comes from a hash of trigger and attempt, so that a replay finds the same instant.
    """
    doublings = min(max(failures - 1, 0), _DOUBLINGS_MAX)
    seconds = min(limits.BACKOFF_BASE_SECONDS << doublings, limits.BACKOFF_CAP_SECONDS)
    digest = hashlib.sha256(f"{attempt}:{trigger_id}".encode()).digest()
    jitter = int.from_bytes(digest[:4], "big") / 2**32
    return round(seconds * SECOND * (1 - _JITTER_SHARE * jitter))
