"""What operators tell a site, and what agents and sites tell each other (docs/events.md, "Internal").

The forms are fixed here, since berth.claims and berth.signals share the log's life: a record written by one version is
read by the next.
"""

from typing import Annotated, Literal

from pydantic import Field, StrictBool, StrictInt

from streams.rules import limits
from streams.rules.messages import Count, FolderPath, Id, InputCount, Instant, Message, SchemaVersion, Sha256


class SiteControl(Message):
    v: SchemaVersion = 1
    id: Id
    site: Id
    requested_by: Id
    decide_before: Instant | None = None
    repeats: InputCount = None


class ConfigureSite(SiteControl):
    type: Literal["configure_site"] = "configure_site"
    capacity: Annotated[StrictInt, Field(ge=0, le=limits.POOL_CAPACITY_MAX)] | None = None


class PauseSite(SiteControl):
    type: Literal["pause_site"] = "pause_site"


class ResumeSite(SiteControl):
    type: Literal["resume_site"] = "resume_site"


class Gate(SiteControl):
    type: Literal["gate"] = "gate"
    scope: Literal["organization", "department"]
    name: Id
    enabled: StrictBool | None = None
    run_budget: Count | None = None


class DeleteFolder(SiteControl):
    type: Literal["delete_folder"] = "delete_folder"
    environment_id: Id
    path: FolderPath


class DeleteEnvironment(SiteControl):
    type: Literal["delete_environment"] = "delete_environment"
    environment_id: Id


class InvalidSite(Message):
    """A control that could not be read, but that names a site and an id: somebody waits for an answer to it."""

    type: Literal["invalid"] = "invalid"
    id: Id
    site: Id
    reason: str
    sha256: Sha256
    bytes: Count


class ContinueSite(Message):
    """Work that an earlier decision noted in the state, because it was more than one step may do (F1)."""

    type: Literal["continue"] = "continue"


SiteControlRecord = Annotated[
    ConfigureSite | PauseSite | ResumeSite | Gate | DeleteFolder | DeleteEnvironment, Field(discriminator="type")
]


class Sender(Message):
    """Who sent an internal message: the decider, and the event of its decision that did."""

    decider: Id
    seq: Count
    index: Count


class Internal(Message):
    v: SchemaVersion = 1
    at: Instant
    sender: Sender


class ClaimKey(Message):
    available_at: Instant
    created_at: Instant
    id: Id


class Claim(Internal):
    """An agent asks a site for a worker, a folder, or both, for one of its triggers."""

    type: Literal["claim"] = "claim"
    site: Id
    agent_id: Id
    trigger_id: Id
    n: Count
    key: ClaimKey
    accepted_at: Instant
    worker: StrictBool
    environment_id: Id | None = None
    path: FolderPath | None = None
    organization_id: Id | None = None
    department_id: Id | None = None
    ask: StrictBool = False


class Release(Internal):
    """Withdraw, give back, or free after a run: the claim ends, whatever its state."""

    type: Literal["release"] = "release"
    site: Id
    agent_id: Id
    trigger_id: Id
    n: Count
    started: StrictBool


class Signal(Internal):
    agent_id: Id
    trigger_id: Id


class Granted(Signal):
    type: Literal["granted"] = "granted"
    n: Count


class Waiting(Signal):
    type: Literal["waiting"] = "waiting"
    n: Count
    reason: str


class Denied(Signal):
    type: Literal["denied"] = "denied"
    n: Count
    reason: str
    holders: tuple[Id, ...] = ()
    holders_count: Count = 0


class Recall(Signal):
    type: Literal["recall"] = "recall"
    n: Count


class Degraded(Signal):
    type: Literal["degraded"] = "degraded"
    n: Count


class Watch(Signal):
    """agent_id is to tell (watcher_agent_id, trigger_id) how its conversation ends (depends_on)."""

    type: Literal["watch"] = "watch"
    conversation_id: Id
    watcher_agent_id: Id


class Unwatch(Signal):
    """(watcher_agent_id, trigger_id) has ended: agent_id need not tell it any more how its conversation ends."""

    type: Literal["unwatch"] = "unwatch"
    conversation_id: Id
    watcher_agent_id: Id


class Resolved(Signal):
    """How the conversation that agent_id's trigger depends on stands: its last outcome, null while it lives."""

    type: Literal["resolved"] = "resolved"
    dependency_agent_id: Id
    conversation_id: Id
    outcome: Literal["finished", "failed", "stopped", "unknown"] | None = None


ClaimRecord = Annotated[Claim | Release, Field(discriminator="type")]
SignalRecord = Annotated[
    Granted | Waiting | Denied | Recall | Degraded | Watch | Unwatch | Resolved, Field(discriminator="type")
]
