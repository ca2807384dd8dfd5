"""The rows of each table of projections/migrations, field by field; instants are microseconds."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

TriggerState = Literal["waiting", "running", "paused", "finished", "failed", "stopped", "expired"]
AttemptOutcome = Literal["finished", "failed", "lease_expired", "paused", "stopped"]
ConversationKey = tuple[str, str]
"""(agent_id, conversation_id)"""
TriggerKey = tuple[str, str]
"""(agent_id, trigger_id)"""
AttemptKey = tuple[str, str, str]
"""(agent_id, trigger_id, execution_id)"""


class CannotApply(Exception):  # noqa: N818 - it reads as what it is
    """A record that can't be applied; nothing of it was. The projector stops there."""

    def __init__(self, topic: str, partition: int, offset: int, why: str) -> None:
        super().__init__(f"{topic} partition {partition} offset {offset}: {why}")
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self.why = why


@dataclass(slots=True)
class AgentRow:
    agent_id: str
    log_partition: int
    seq: int
    decided_at: int
    created: bool = False
    created_at: int | None = None
    parallelism_limit: int | None = 1
    serial: bool = False
    max_backlog_depth: int = 1000
    default_timeout_seconds: int | None = None
    agent_type: str | None = None
    default_environment_id: str | None = None
    default_folder: str | None = None
    run_budget: int | None = None
    owner: str | None = None
    display_name: str | None = None
    paused: bool = False
    archived: bool = False
    parked: str | None = None
    running: int = 0
    forced: int = 0
    waiting: int = 0
    on_hold: int = 0
    accepted: int = 0
    attempts: int = 0
    finished: int = 0
    failed: int = 0
    stopped: int = 0
    expired: int = 0
    refused: int = 0
    ignored: int = 0
    snapshot_seq: int = 0


@dataclass(slots=True)
class ConversationRow:
    agent_id: str
    conversation_id: str
    created_at: int
    triggers: int = 0
    live: int = 0
    last_outcome: str | None = None
    last_outcome_at: int | None = None
    forgotten: bool = False


@dataclass(slots=True)
class TriggerRow:
    agent_id: str
    trigger_id: str
    conversation_id: str
    state: TriggerState
    state_since: int
    kind: str
    interactive: bool
    on_busy: str | None
    requested_by: str | None
    created_at: int
    available_at: int
    expires_at: int | None
    accepted_at: int
    accepted_seq: int
    content_sha256: str
    site: str | None
    worker: bool
    environment_id: str | None
    folder: str | None
    organization_id: str | None
    department_id: str | None
    execution_class: str
    parent_agent_id: str | None
    parent_trigger_id: str | None
    restarts: str | None
    priority: int | None
    timeout_seconds: int
    heartbeat_seconds: int | None
    max_attempts: int
    payload_bytes: int
    place_rank: int | None = None
    place_number: int | None = None
    attempt: int = 0
    failures: int = 0
    absences: int = 0
    execution_id: str | None = None
    stop_requested_by: str | None = None
    stop_requested_at: int | None = None
    grace_until: int | None = None
    ended_at: int | None = None
    end_reason: str | None = None
    replied_by: str | None = None


@dataclass(slots=True)
class AttemptRow:
    agent_id: str
    trigger_id: str
    execution_id: str
    conversation_id: str
    attempt: int
    slot_number: int
    forced: bool
    dispatched_at: int
    dispatched_seq: int
    lease_until: int
    ended_at: int | None = None
    ended_seq: int | None = None
    outcome: AttemptOutcome | None = None
    phase: str | None = None
    last_seen_at: int | None = None
    retry_at: int | None = None


class DecisionRow(NamedTuple):
    agent_id: str
    seq: int
    decided_at: int
    log_partition: int
    log_offset: int
    command_type: str
    command_id: str | None
    settles: list[str]
    refusal_code: str | None
    ignored_reason: str | None
    record: str


class DecisionIdRow(NamedTuple):
    agent_id: str
    id: str
    seq: int


class TextRow(NamedTuple):
    agent_id: str
    trigger_id: str
    execution_id: str
    kind: str
    content: str
    truncated: bool
    written_at: int
    log_partition: int
    log_offset: int


class DeadLetterRow(NamedTuple):
    log_partition: int
    log_offset: int
    written_at: int
    reason: str
    source_topic: str | None
    source_partition: int | None
    source_offset: int | None
    key: bytes | None
    value: bytes | None
