"""Every bound of the rules, its unit in its name. They belong to ``POLICY``: changing one changes the policy's version.

The letters in the comments are the admission rules (docs/concepts.md).
"""

from dataclasses import dataclass
from typing import Final, Literal

POLICY: Final = "1"
"""Version of the rules and of the constants below; every decision names it."""

SCHEMA_VERSION: Final = 1

PARALLELISM_LIMIT_MIN: Final = 1  # A1
PARALLELISM_LIMIT_MAX: Final = 10
BACKLOG_DEPTH_DEFAULT: Final = 1000  # A5
BACKLOG_DEPTH_MAX: Final = 100_000
BACKLOG_BYTES_MAX: Final = 64 * 1024 * 1024

ORDER_WINDOW_SECONDS: Final = 300  # C1: nobody precedes everybody for ever

STEP_CHANGES_MAX: Final = 50  # F1: M, the changes of one step
STEP_PARKED_MAX: Final = 200  # claims that a walk looks at in one step
HOLDERS_MAX: Final = 20  # ids in a refusal

TIMEOUT_SECONDS_DEFAULT: Final = 1800  # F6
TIMEOUT_SECONDS_MAX: Final = 30 * 24 * 3600
LEASE_GRACE_SECONDS: Final = 300
HEARTBEAT_SECONDS_UNSET: Final = 300  # how far a sign of life moves the lease when no heartbeat was promised
HEARTBEAT_SECONDS_MAX: Final = 24 * 3600
STOP_GRACE_SECONDS: Final = 60  # F7

ATTEMPTS_DEFAULT: Final = 3  # F5
ATTEMPTS_MAX: Final = 100
ABSENCES_MAX: Final = 10
BACKOFF_BASE_SECONDS: Final = 5
BACKOFF_CAP_SECONDS: Final = 900

REMEMBERED_SECONDS: Final = 7 * 24 * 3600  # F8
REMEMBERED_IDS_MAX: Final = 500_000  # per partition
CONVERSATION_SECONDS: Final = 90 * 24 * 3600  # E2: a conversation's row, after its last outcome

CLOCK_AHEAD_SECONDS_MAX: Final = 5  # F9

ID_CHARACTERS_MAX: Final = 200  # G3
PAYLOAD_BYTES_MAX: Final = 256 * 1024
MESSAGE_BYTES_MAX: Final = 64 * 1024
OUTCOME_BYTES_MAX: Final = 16 * 1024  # error, result
DEPENDENCIES_MAX: Final = 100
FOLDER_BYTES_MAX: Final = 4096  # D2
RECORD_BYTES_MAX: Final = 1024 * 1024

POOL_CAPACITY_MAX: Final = 10_000  # D1
CLAIM_RESERVED_SECONDS: Final = 30  # R of the site protocol
CLAIM_PASSES_MAX: Final = 5  # B
LATE_GRANTS_MAX: Final = 3  # K

assert STOP_GRACE_SECONDS < LEASE_GRACE_SECONDS, "a stopping attempt must end by its grace before its lease"
assert BACKOFF_BASE_SECONDS < BACKOFF_CAP_SECONDS < REMEMBERED_SECONDS, "a retry must still find its id remembered"
assert PAYLOAD_BYTES_MAX + MESSAGE_BYTES_MAX + 512 * 1024 <= RECORD_BYTES_MAX, "a dispatch must fit one record"
assert BACKLOG_DEPTH_DEFAULT <= BACKLOG_DEPTH_MAX < REMEMBERED_IDS_MAX, "waiting triggers must stay remembered"
assert HOLDERS_MAX <= STEP_CHANGES_MAX


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a deployment decides; stamped into the events that use it, so that a redeploy changes nothing that lives."""

    parallelism_limit: int | Literal["unlimited"] = 1
    pool_capacity: int = 4
