"""What is written down: events (a closed list), refusals, decisions, and texts for the projections.

A decision is kept for ever: its form may grow by optional fields, and nothing in it is ever renamed or given another
meaning. Folding the events of an agent's decisions gives its state (the moves of leases by signs of life aside).
"""

from typing import Annotated, Any, Final, Literal

from pydantic import Field, StrictBool, StrictInt

from streams.rules import limits
from streams.rules.commands import AgentCommand
from streams.rules.messages import (
    LOGGED,
    Count,
    Id,
    Instant,
    Message,
    ParallelismLimit,
    SchemaVersion,
    Sha256,
)
from streams.rules.verdicts import Cause, FinalState, Ignored, Refusal, WaitReason, Written, write_logged


class AgentCreated(Written):
    type: Literal["agent_created"] = "agent_created"
    parallelism_limit: ParallelismLimit
    max_backlog_depth: Count


class Configured(Message):
    """The settings that changed, with the values that now hold; null where there is none."""

    type: Literal["configured"] = "configured"
    parallelism_limit: ParallelismLimit | None = None
    agent_type: str | None = None
    serial: StrictBool | None = None
    default_environment_id: Id | None = None
    default_folder: str | None = None
    max_backlog_depth: Count | None = None
    run_budget: Count | None = None
    default_timeout_seconds: Count | None = None
    owner: Id | None = None
    display_name: Id | None = None


class AgentPaused(Written):
    type: Literal["agent_paused"] = "agent_paused"


class AgentResumed(Written):
    type: Literal["agent_resumed"] = "agent_resumed"


class RefusedLater(Written):
    """An ask or force that had to wait for its site's answer could not start: it leaves nothing behind.

    It says the same as a refusal at once. holders: of what ``code`` names, at the site if it is the site's.
    """

    type: Literal["refused"] = "refused"
    trigger_id: Id
    code: str
    holders: Annotated[tuple[Id, ...], Field(max_length=limits.HOLDERS_MAX)] = ()
    holders_count: Count = 0
    running: Count = 0
    limit: ParallelismLimit | None = None
    waiting: Count = 0
    position_if_queued: Count | None = None
    force_allowed: StrictBool = False


class Watched(Written):
    """Another agent's trigger waits for how this agent's conversation ends (E2)."""

    type: Literal["watched"] = "watched"
    conversation_id: Id
    watcher_agent_id: Id
    trigger_id: Id


class Unwatched(Written):
    """The other agent's trigger has ended before the conversation finished: nobody is told any more."""

    type: Literal["unwatched"] = "unwatched"
    conversation_id: Id
    watcher_agent_id: Id
    trigger_id: Id


class Told(Written):
    """The watcher was told how the conversation stands; after finished it is watched no longer."""

    type: Literal["told"] = "told"
    conversation_id: Id
    watcher_agent_id: Id
    trigger_id: Id
    outcome: Literal["finished", "failed", "stopped", "unknown"] | None


class Archived(Written):
    type: Literal["archived"] = "archived"


class Revived(Written):
    """configure took the agent out of the archive."""

    type: Literal["revived"] = "revived"


class Parked(Written):
    type: Literal["parked"] = "parked"
    error: str


class Unparked(Written):
    type: Literal["unparked"] = "unparked"


class Accepted(Written):
    """The trigger exists. position: from 1 in start order, 0 if it starts in this decision; reason: why it waits."""

    type: Literal["accepted"] = "accepted"
    trigger_id: Id
    created_at: Instant
    available_at: Instant
    timeout_seconds: Count
    max_attempts: Count
    position: Count
    reason: WaitReason | None = None
    environment_id: Id | None = None
    folder: str | None = None
    execution_class: Literal["standard", "background"] | None = None
    """Its parent's, where the trigger names none; None: as the trigger says."""


class Placed(Written):
    """The trigger took its place in its conversation: (rank, number), an interrupt's rank is before the others'."""

    type: Literal["placed"] = "placed"
    trigger_id: Id
    place: tuple[int, int]


class Claimed(Written):
    type: Literal["claimed"] = "claimed"
    trigger_id: Id
    n: Count
    site: Id


class ClaimGranted(Written):
    type: Literal["granted"] = "granted"
    trigger_id: Id
    n: Count


class ClaimWaiting(Written):
    type: Literal["claim_waiting"] = "claim_waiting"
    trigger_id: Id
    n: Count
    reason: WaitReason


class Returned(Written):
    """The claim ended. started: whether an attempt had run on it."""

    type: Literal["returned"] = "returned"
    trigger_id: Id
    n: Count
    started: StrictBool
    reason: str


class Dispatched(Written):
    type: Literal["dispatched"] = "dispatched"
    trigger_id: Id
    execution_id: Id
    attempt: Count
    slot_number: Count
    forced: StrictBool
    lease_until: Instant


class TriggerPaused(Written):
    type: Literal["paused"] = "paused"
    trigger_id: Id
    execution_id: Id


class TriggerResumed(Written):
    type: Literal["resumed"] = "resumed"
    trigger_id: Id
    available_at: Instant
    force: StrictBool = False


class Replied(Written):
    """A reply was accepted: the paused trigger ends, finished."""

    type: Literal["replied"] = "replied"
    trigger_id: Id
    by: Id


class Finished(Written):
    type: Literal["finished"] = "finished"
    trigger_id: Id
    execution_id: Id


class AttemptFailed(Written):
    """The attempt ended without success. Either a retry is due at retry_at, or it was the last one (final)."""

    type: Literal["attempt_failed"] = "attempt_failed"
    trigger_id: Id
    execution_id: Id
    failures: Count
    absences: Count = 0
    retry_at: Instant | None = None
    final: StrictBool = False
    phase: Literal["preparation", "execution"] | None = None


class LeaseExpired(Written):
    """No sign of life in time. last_seen_at null: no word ever came. Then as attempt_failed, or stopped."""

    type: Literal["lease_expired"] = "lease_expired"
    trigger_id: Id
    execution_id: Id
    last_seen_at: Instant | None
    failures: Count
    absences: Count = 0
    retry_at: Instant | None = None
    final: FinalState | None = None


class StopRequested(Written):
    type: Literal["stop_requested"] = "stop_requested"
    trigger_id: Id
    execution_id: Id
    grace_until: Instant
    requested_by: Id | None = None


class Stopped(Written):
    type: Literal["stopped"] = "stopped"
    trigger_id: Id
    execution_id: Id | None = None
    reason: Literal["stop", "conversation_stop", "archive", "runner", "failed", "paused", "grace", "lease", "interrupt"]


class StopNoted(Written):
    """More to stop than one step may: it is worked off before anything else. conversation_id null: the whole agent."""

    type: Literal["stop_noted"] = "stop_noted"
    conversation_id: Id | None = None


class Expired(Written):
    type: Literal["expired"] = "expired"
    trigger_id: Id


class PayloadLost(Written):
    """What a runner would be sent is gone (berth recover). final: it ended as failed; else its running attempt goes on.

    That attempt is its last: a retry could be sent nothing.
    """

    type: Literal["payload_lost"] = "payload_lost"
    trigger_id: Id
    final: StrictBool = False


class TriggerDegraded(Written):
    type: Literal["degraded"] = "degraded"
    trigger_id: Id


class Approved(Written):
    type: Literal["approved"] = "approved"
    trigger_id: Id


class Rescheduled(Written):
    type: Literal["rescheduled"] = "rescheduled"
    trigger_id: Id
    available_at: Instant


class DependencyResolved(Written):
    type: Literal["dependency_resolved"] = "dependency_resolved"
    trigger_id: Id
    agent_id: Id
    conversation_id: Id
    outcome: Literal["finished", "failed", "stopped", "unknown"] | None


class RememberedId(Written):
    kind: Literal["trigger", "stop", "control"]
    id: Id


class Forgotten(Written):
    """Remembered ids and conversations whose time is over. early: before their time, because there were too many."""

    type: Literal["forgotten"] = "forgotten"
    ids: tuple[RememberedId, ...] = ()
    conversations: tuple[Id, ...] = ()
    early: StrictBool = False


Event = Annotated[
    AgentCreated
    | Configured
    | AgentPaused
    | AgentResumed
    | Archived
    | Revived
    | Parked
    | Unparked
    | Accepted
    | Placed
    | Claimed
    | ClaimGranted
    | ClaimWaiting
    | Returned
    | Dispatched
    | TriggerPaused
    | TriggerResumed
    | Replied
    | Finished
    | AttemptFailed
    | LeaseExpired
    | StopRequested
    | Stopped
    | StopNoted
    | Expired
    | PayloadLost
    | TriggerDegraded
    | Approved
    | Rescheduled
    | DependencyResolved
    | RefusedLater
    | Watched
    | Unwatched
    | Told
    | Forgotten,
    Field(discriminator="type"),
]

OF_OTHERS: Final = (Watched, Unwatched, Told)
"""Their trigger is one of another agent, which may have the id of an own one."""

ENDS_ALWAYS: Final = (Finished, Replied, Stopped, Expired, RefusedLater)
"""Their trigger lives no longer."""


def is_end(event: Event) -> bool:
    """Whether the event ends the life of its trigger."""
    if isinstance(event, AttemptFailed | LeaseExpired | PayloadLost):
        return bool(event.final)
    return isinstance(event, ENDS_ALWAYS)


class Decision(Written):
    """One handled command that had an effect, was refused or was ignored (berth.decisions)."""

    type: Literal["decision"] = "decision"
    v: SchemaVersion = 1
    agent_id: Id
    seq: Annotated[StrictInt, Field(ge=1)]
    at: Instant
    via: Literal["kafka", "http", "internal", "timer"]
    cause: Cause
    command: AgentCommand
    command_id: Id | None = None
    settles: tuple[Id, ...] = ()
    events: tuple[Event, ...] = ()
    refusal: Refusal | None = None
    ignored: Ignored | None = None
    policy: str
    prev: Sha256 | None


def read_decision(value: bytes) -> Decision:
    """pydantic.ValidationError if the value is no decision of a known schema."""
    return Decision.model_validate_json(value, context=LOGGED)


def write_decision(decision: Decision) -> bytes:
    """pydantic_core.PydanticSerializationError if the value could not be read back."""
    return write_logged(decision)


class TextRecord(Written):
    """A text of people for the projections (berth.texts), kept apart from the decisions that are kept for ever."""

    type: Literal["text"] = "text"
    v: SchemaVersion = 1
    agent_id: Id
    trigger_id: Id
    execution_id: Id | None = None
    kind: Literal["message", "error", "result"]
    text: Any = None
    truncated: StrictBool = False
