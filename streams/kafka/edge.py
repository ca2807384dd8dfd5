"""The clock and the ids: the only file of ``streams`` that reads the one or makes the other.

Everything behind it is told what time it is, so the same records give the same decisions wherever they are decided.
"""

import os
import secrets
import socket
import time


def now_us() -> int:
    """The wall clock, in microseconds since 1970 (UTC)."""
    return time.time_ns() // 1000


def monotonic_seconds() -> float:
    """A clock that never jumps; for measuring and for waiting only."""
    return time.monotonic()


def new_worker_id() -> str:
    """Id of this worker process, the key of its record in berth.workers; never used twice."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
