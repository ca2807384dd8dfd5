"""What runners are told (berth.dispatches)."""

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool

from streams.rules.messages import Count, Id, Instant, SchemaVersion
from streams.rules.verdicts import Written


class Dispatch(Written):
    """An attempt for a runner (berth.dispatches); message and payload are appended as they came."""

    type: Literal["dispatch"] = "dispatch"
    v: SchemaVersion = 1
    execution_id: Id
    trigger_id: Id
    agent_id: Id
    conversation_id: Id
    attempt: Count
    max_attempts: Count
    slot_number: Count
    forced: StrictBool
    kind: str
    message: str | None = None
    payload: Any = None
    site: Id | None = None
    environment_id: Id | None = None
    folder: str | None = None
    degraded: StrictBool = False
    execution_class: Literal["standard", "background"] = "standard"
    timeout_seconds: Count
    heartbeat_seconds: Count | None = None
    lease_until: Instant
    dispatched_at: Instant


class StopRequest(Written):
    """Tells the runner to end the attempt (berth.dispatches)."""

    type: Literal["stop_requested"] = "stop_requested"
    v: SchemaVersion = 1
    execution_id: Id
    agent_id: Id
    trigger_id: Id
    reason: str


class Revocation(Written):
    """Tells the runner that the attempt is no longer its own: whatever it says of it is ignored (berth.dispatches)."""

    type: Literal["revoked"] = "revoked"
    v: SchemaVersion = 1
    execution_id: Id
    agent_id: Id
    trigger_id: Id
    reason: str


DispatchRecord = Annotated[Dispatch | StopRequest | Revocation, Field(discriminator="type")]
