"""What clients send: the fields of each request, strictly.

They are the fields of the records on Kafka (``streams.rules.messages``) with the same types, without what the API
itself knows: the agent (in the path), who asks, and until when it must be decided. An unknown field is refused, since a
misspelt one would otherwise be lost without a word. Dropped are the obsolete ``maxConcurrentRuns``, and
``requested_by``: who asked is what the token says, not the body.
"""

import json
import uuid
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
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:  # 1e999 is read as infinity
        raise ValueError("holds a number that JSON can't hold") from None
    _at_most(limits.PAYLOAD_BYTES_MAX, text)
    return value


InstantText = Annotated[
    str, AfterValidator(_instant), Field(json_schema_extra={"format": "date-time"}, examples=["2026-03-01T10:00:00Z"])
]
MessageField = Annotated[str, AfterValidator(_message), Field(description="at most 64 KiB of UTF-8")]
PayloadField = Annotated[
    Any, AfterValidator(_payload), Field(description="any JSON of at most 256 KiB, handed to the runner untouched")
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


class CapacityRequest(RequestBody):
    """How many run at once; checked by its route, whose words are a contract."""

    max_parallel_tasks: Any = None


def id_from_key(agent_id: str, key: str, requester: str) -> str:
    """The id of what a client asks for with an Idempotency-Key: UUIDv5 of (requester, agent, key)."""
    return str(uuid.uuid5(_NAMESPACE, json.dumps([requester, agent_id, key])))


def new_id() -> str:
    """An id that nobody has."""
    return str(uuid.uuid4())


def without(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """``fields`` without some of them."""
    return {name: value for name, value in fields.items() if name not in names}
