"""The rows of each table of projections/migrations, field by field; instants are microseconds."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

TriggerState = Literal["waiting", "running", "paused", "finished", "failed", "stopped", "expired"]
AttemptOutcome = Literal["finished", "failed", "lease_expired", "paused", "stopped"]
ClaimState = Literal["asking", "standing", "held", "granted"]
ConversationKey = tuple[str, str]
"""(agent_id, conversation_id)"""
TriggerKey = tuple[str, str]
"""(agent_id, trigger_id)"""
AttemptKey = tuple[str, str, str]
"""(agent_id, trigger_id, execution_id)"""
DependencyKey = tuple[str, str, int]
"""(agent_id, trigger_id, position in the trigger's list)"""
GateScope = Literal["organization", "department"]
GateKey = tuple[str, str, str]
"""(site, scope, name)"""
SiteClaimKey = tuple[str, str, str]
"""(site, agent_id, trigger_id)"""
DeletionKey = tuple[str, str, str]
"""(site, environment_id, path)"""


class CannotApply(Exception):  # noqa: N818 - it reads as what it is
    """A record that can't be applied; nothing of it was. The projector stops there."""

    def __init__(self, topic: str, partition: int, offset: int, why: str) -> None:
        super().__init__(f"{topic} partition {partition} offset {offset}: {why}")
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self.why = why


class DoesNotFit(Exception):  # noqa: N818 - it reads as what it is
    """An event that doesn't fit the rows; whoever knows its position says so with CannotApply."""


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
    paused_at: int | None = None
    archived_at: int | None = None
    parked_at: int | None = None
    run_budget_at: int | None = None
    asking: int = 0
    standing: int = 0
    held: int = 0


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
    approval_required: bool = False
    approved_at: int | None = None
    approved_by: str | None = None
    failures_approved: bool = False
    degraded: bool = False
    dependencies: int = 0

    @property
    def needs_site(self) -> bool:
        return self.worker or self.environment_id is not None


@dataclass(slots=True)
class DependencyRow:
    agent_id: str
    trigger_id: str
    position: int
    dependency_agent_id: str
    dependency_conversation_id: str
    outcome: str | None = None
    told_at: int | None = None


@dataclass(slots=True)
class TriggerClaimRow:
    agent_id: str
    trigger_id: str
    site: str
    n: int | None
    state: ClaimState | None
    since: int
    asked_at: int | None
    reserves: bool
    reason: str | None = None
    late: int = 0


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


@dataclass(slots=True)
class SiteRow:
    site: str
    log_partition: int
    seq: int
    decided_at: int
    created: bool = False
    created_at: int | None = None
    capacity: int = 0
    capacity_at: int | None = None
    paused: bool = False
    paused_at: int | None = None
    waiting: int = 0
    granted: int = 0
    workers: int = 0
    snapshot_seq: int = 0


@dataclass(slots=True)
class SiteGateRow:
    site: str
    scope: GateScope
    name: str
    enabled: bool = True
    disabled_at: int | None = None
    run_budget: int | None = None
    run_budget_at: int | None = None
    budget_seq: int = 0


@dataclass(slots=True)
class SiteClaimRow:
    site: str
    agent_id: str
    trigger_id: str
    n: int
    opened_at: int
    available_at: int
    created_at: int
    accepted_at: int
    worker: bool
    environment_id: str | None
    path: str | None
    organization_id: str | None
    department_id: str | None
    granted_at: int | None = None
    granted_seq: int | None = None
    passed: int = 0
    blocks_since: int | None = None
    recalled_at: int | None = None
    degraded: bool = False

    @property
    def gates(self) -> list[GateKey]:
        """Keys of the gates that it has to pass, whether they have rows or not."""
        found = []
        if self.organization_id is not None:
            found.append((self.site, "organization", self.organization_id))
        if self.department_id is not None:
            found.append((self.site, "department", self.department_id))
        return found


@dataclass(slots=True)
class SiteDeletionRow:
    site: str
    environment_id: str
    path: str
    deleted_at: int


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


class SiteDecisionRow(NamedTuple):
    site: str
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
