"""What clients send: the fields of each request, strictly.

They are the fields of the records on Kafka (``streams.rules.messages``) with the same types, without what the API
itself knows: the agent (in the path), who asks, and until when it must be decided. An unknown field is refused, since a
misspelt one would otherwise be lost without a word. Dropped are the obsolete ``maxConcurrentRuns``, and
``requested_by``: who asked is what the token says, not the body.
"""

import json
import uuid
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, StrictInt, model_validator

from streams.rules import limits
from streams.rules.messages import (
    Count,
    FolderPath,
    HeartbeatSeconds,
    Id,
    Kind,
    ParallelismLimit,
    TimeoutSeconds,
)
from streams.rules.order import format_instant, parse_instant

DROPPED_FIELDS: Final = ("maxConcurrentRuns", "requested_by")
BULK_MAX: Final = 1_000
"""Triggers of one request."""
WHAT_IF_CHANGES_MAX: Final = 100
"""Of each kind in one request."""
TASK_WAIT_SECONDS_DEFAULT: Final = 60
TASK_WAIT_SECONDS_MAX: Final = 600
_NAMESPACE: Final = uuid.UUID("6f2c1f0e-2f0b-5d9a-9d3e-7a0c6c0a4b11")


def _instant(text: str) -> str:
    return format_instant(parse_instant(text))


def _at_most(bytes_max: int, text: str) -> str:
    size = len(text.encode())
    if size > bytes_max:
        raise ValueError(f"has {size} bytes, {bytes_max} are allowed")
    return text


def _message(text: str) -> str:
    return _at_most(limits.MESSAGE_BYTES_MAX, text)


def _payload(value: Any) -> Any:
    _at_most(limits.PAYLOAD_BYTES_MAX, _json(value))
    return value


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:  # 1e999 is read as infinity
        raise ValueError("holds a number that JSON can't hold") from None


def _outcome(value: Any) -> Any:
    _json(value)
    return value


InstantText = Annotated[
    str, AfterValidator(_instant), Field(json_schema_extra={"format": "date-time"}, examples=["2026-03-01T10:00:00Z"])
]
MessageField = Annotated[str, AfterValidator(_message), Field(description="at most 64 KiB of UTF-8")]
PayloadField = Annotated[
    Any, AfterValidator(_payload), Field(description="any JSON of at most 256 KiB, handed to the runner untouched")
]
OutcomeField = Annotated[
    Any, AfterValidator(_outcome), Field(description="any JSON; what is over 16 KiB is cut for readers")
]
OnBusy = Literal["", "ask", "queue", "force", "interrupt"]


class RequestBody(BaseModel):
    """A JSON object with known fields only."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop(cls, content: Any) -> Any:
        if isinstance(content, dict):
            return {name: value for name, value in content.items() if name not in DROPPED_FIELDS}
        return content


class ParentRef(RequestBody):
    agent_id: Id
    trigger_id: Id


class ConversationRef(RequestBody):
    agent_id: Id
    conversation_id: Id


class TurnRequest(RequestBody):
    """What every request for a turn may say."""

    id: Id | None = None
    kind: Kind | None = None
    interactive: StrictBool | None = None
    on_busy: OnBusy | None = None
    message: MessageField | None = None
    payload: PayloadField | None = None
    created_at: InstantText | None = None
    available_at: InstantText | None = None
    expires_at: InstantText | None = None
    site: Id | None = None
    worker: StrictBool | None = None
    environment_id: Id | None = None
    folder: FolderPath | None = None
    organization_id: Id | None = None
    department_id: Id | None = None
    execution_class: Literal["standard", "background"] | None = None
    parent: ParentRef | None = None
    restarts: Id | None = None
    priority: Annotated[StrictInt, Field(ge=-(2**53), le=2**53)] | None = None
    timeout_seconds: TimeoutSeconds | None = None
    heartbeat_seconds: HeartbeatSeconds | None = None
    max_attempts: Annotated[StrictInt, Field(ge=1, le=limits.ATTEMPTS_MAX)] | None = None
    depends_on: Annotated[list[ConversationRef], Field(max_length=limits.DEPENDENCIES_MAX)] | None = None
    approval_required: StrictBool | None = None

    def given(self) -> dict[str, Any]:
        """The fields that the client gave; null is like absent."""
        return self.model_dump(exclude_unset=True, exclude_none=True)


class TriggerRequest(TurnRequest):
    """Any trigger. Without ``conversation_id`` it begins a conversation, which gets the trigger's id."""

    conversation_id: Id | None = None


class ConversationRequest(TriggerRequest):
    """The first turn of a conversation; interactive and of kind ``chat`` unless it says otherwise."""

    message: MessageField


class MessageRequest(TurnRequest):
    """A further turn of a conversation: a message, a reply to a paused one, or work behind it."""

    message: MessageField


class RestartRequest(TurnRequest):
    """What is to be otherwise than in the trigger that is restarted."""


class BulkItem(TriggerRequest):
    """One of many triggers."""

    agent_id: Id


class BulkRequest(RequestBody):
    """Triggers of any agents."""

    triggers: Annotated[list[BulkItem], Field(min_length=1, max_length=BULK_MAX)]


class TriggerRef(RequestBody):
    agent_id: Id
    trigger_id: Id


class TriggersFilter(RequestBody):
    """Live triggers; what isn't said is any."""

    agents: Annotated[list[Id], Field(min_length=1, max_length=BULK_MAX)] | None = None
    state: Literal["waiting", "running", "paused"] | None = None
    kind: Kind | None = None
    organization_id: Id | None = None
    since: InstantText | None = None


class BulkStopRequest(RequestBody):
    """Either the triggers themselves, or what they have in common."""

    triggers: Annotated[list[TriggerRef], Field(min_length=1, max_length=BULK_MAX)] | None = None
    filter: TriggersFilter | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> "BulkStopRequest":
        if (self.triggers is None) == (self.filter is None):
            raise ValueError("needs either triggers or filter")
        return self


class RescheduleRequest(RequestBody):
    """From when on a waiting trigger may start."""

    available_at: InstantText


class ResumeRequest(RequestBody):
    """What the resumed trigger does when it can't start at once."""

    on_busy: OnBusy | None = None


class TaskRequest(TurnRequest):
    """One turn, answered with its result (sync), or when it is accepted (``async_mode``)."""

    message: MessageField
    conversation_id: Id | None = None
    async_mode: StrictBool = False
    wait_seconds: Annotated[StrictInt, Field(ge=0, le=TASK_WAIT_SECONDS_MAX)] = TASK_WAIT_SECONDS_DEFAULT

    def given(self) -> dict[str, Any]:
        return without(super().given(), "async_mode", "wait_seconds")


class SystemTaskRequest(TaskRequest):
    """A turn that the scheduler asks for, with an id of its own, which counts once."""

    agent_id: Id
    id: Id

    def given(self) -> dict[str, Any]:
        return without(super().given(), "agent_id")


PoolCapacity = Annotated[StrictInt, Field(ge=0, le=limits.POOL_CAPACITY_MAX)]


class SiteCapacityRequest(RequestBody):
    """Workers of a site's pool; null: the deployment's default."""

    capacity: PoolCapacity | None


class GateRequest(RequestBody):
    """An organization or department at a site: absent is unchanged, a run_budget of null is none."""

    enabled: StrictBool | None = None
    run_budget: Count | None = None


class StatusReport(RequestBody):
    """What a runner says of an attempt."""

    agent_id: Id
    conversation_id: Id
    execution_id: Id | None = None
    status: Literal["running", "heartbeat", "paused", "finished", "failed", "stopped"]
    retryable: StrictBool | None = None
    phase: Literal["preparation", "execution"] | None = None
    error: OutcomeField = None
    result: OutcomeField = None
    at: InstantText | None = None

    @model_validator(mode="after")
    def _names_an_attempt(self) -> "StatusReport":
        if self.execution_id is None and self.at is None:
            raise ValueError("needs execution_id, or at to find the attempt by")
        return self


class SettingsRequest(RequestBody):
    """Settings of an agent: absent is unchanged, null is back to the default."""

    parallelism_limit: ParallelismLimit | None = None
    agent_type: Kind | None = None
    serial: StrictBool | None = None
    default_environment_id: Id | None = None
    default_folder: FolderPath | None = None
    max_backlog_depth: Annotated[StrictInt, Field(ge=0, le=limits.BACKLOG_DEPTH_MAX)] | None = None
    run_budget: Count | None = None
    default_timeout_seconds: TimeoutSeconds | None = None
    owner: Id | None = None
    display_name: Id | None = None


class ChangedGate(RequestBody):
    """An organization or department at a site."""

    site: Id = "default"
    scope: Literal["organization", "department"]
    name: Id
    enabled: StrictBool


class WhatIfRequest(RequestBody):
    """Another policy for recorded traffic, and the stretch of it: from the first decision, up to now."""

    limits: Annotated[
        dict[Id, ParallelismLimit],
        Field(max_length=WHAT_IF_CHANGES_MAX, description="by agent; *: every other agent"),
    ] = Field(default_factory=dict)
    capacities: Annotated[
        dict[Id, PoolCapacity],
        Field(max_length=WHAT_IF_CHANGES_MAX, description="workers of the pool, by site"),
    ] = Field(default_factory=dict)
    gates: Annotated[list[ChangedGate], Field(max_length=WHAT_IF_CHANGES_MAX)] = Field(default_factory=list)
    since: InstantText | None = None
    until: InstantText | None = None

    @model_validator(mode="after")
    def _says_what_is_to_be_otherwise(self) -> "WhatIfRequest":
        if not (self.limits or self.capacities or self.gates):
            raise ValueError("needs limits, capacities or gates: what is to be otherwise")
        gates = Counter((gate.site, gate.scope, gate.name) for gate in self.gates)
        twice = next((gate for gate, times in gates.items() if times > 1), None)
        if twice is not None:
            raise ValueError("has the gate of {1} {2!r} at site {0!r} twice".format(*twice))
        if self.since is not None and self.until is not None and parse_instant(self.since) >= parse_instant(self.until):
            raise ValueError("needs since before until")
        return self


_INTEGER_SCHEMA: Final = {
    "type": "integer",
    "minimum": limits.PARALLELISM_LIMIT_MIN,
    "maximum": limits.PARALLELISM_LIMIT_MAX,
}


class CapacityRequest(RequestBody):
    """How many run at once; checked by its route, whose words are a contract."""

    max_parallel_tasks: Annotated[Any, Field(json_schema_extra=_INTEGER_SCHEMA)] = None


def id_from_key(agent_id: str, key: str, requester: str) -> str:
    """The id of what a client asks for with an Idempotency-Key: UUIDv5 of (requester, agent, key)."""
    return str(uuid.uuid5(_NAMESPACE, json.dumps([requester, agent_id, key])))


def new_id() -> str:
    """An id that nobody has."""
    return str(uuid.uuid4())


def without(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """``fields`` without some of them."""
    return {name: value for name, value in fields.items() if name not in names}
