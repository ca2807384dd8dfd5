"""What a site's decider writes down (berth.site-decisions), a closed list like that of the agents.

A site decision has the form of an agent's, with ``site`` in the place of ``agent_id``.
"""

from typing import Annotated, Literal

from pydantic import Field, StrictBool, StrictInt

from streams.rules.messages import LOGGED, Count, Id, Instant, SchemaVersion, Sha256
from streams.rules.site_messages import (
    Claim,
    ConfigureSite,
    ContinueSite,
    DeleteEnvironment,
    DeleteFolder,
    Gate,
    InvalidSite,
    PauseSite,
    Release,
    ResumeSite,
)
from streams.rules.verdicts import Cause, Ignored, Refusal, WaitReason, Written, write_logged


class SiteConfigured(Written):
    """The site exists, with this capacity of its pool."""

    type: Literal["site_configured"] = "site_configured"
    capacity: Count


class SitePaused(Written):
    type: Literal["site_paused"] = "site_paused"


class SiteResumed(Written):
    type: Literal["site_resumed"] = "site_resumed"


class GateChanged(Written):
    type: Literal["gate_changed"] = "gate_changed"
    scope: Literal["organization", "department"]
    name: Id
    enabled: StrictBool
    run_budget: Count | None = None


class FolderDeleted(Written):
    """path "" : the whole environment."""

    type: Literal["folder_deleted"] = "folder_deleted"
    environment_id: Id
    path: str


class ClaimOpened(Written):
    """A claim stands; its folder in compared form."""

    type: Literal["claim_opened"] = "claim_opened"
    agent_id: Id
    trigger_id: Id
    n: Count
    path: str | None = None


class ClaimGranted(Written):
    """passed_*: the oldest waiting claim with an overlapping folder that this grant passed."""

    type: Literal["claim_granted"] = "claim_granted"
    agent_id: Id
    trigger_id: Id
    n: Count
    passed_agent_id: Id | None = None
    passed_trigger_id: Id | None = None


class ClaimDenied(Written):
    """An ask that could not be granted at once: the claim is gone."""

    type: Literal["claim_denied"] = "claim_denied"
    agent_id: Id
    trigger_id: Id
    n: Count
    reason: WaitReason


class ClaimClosed(Written):
    """The claim is gone. started: an attempt had run on it, so that budgets are spent."""

    type: Literal["claim_closed"] = "claim_closed"
    agent_id: Id
    trigger_id: Id
    n: Count
    started: StrictBool


class ClaimRecalled(Written):
    """A gate closed before the claim was used: its agent is asked to give it back; a running attempt goes on."""

    type: Literal["claim_recalled"] = "claim_recalled"
    agent_id: Id
    trigger_id: Id
    n: Count


class ClaimDegraded(Written):
    """The claim's folder was deleted: it goes on without."""

    type: Literal["claim_degraded"] = "claim_degraded"
    agent_id: Id
    trigger_id: Id
    n: Count


class WalkNoted(Written):
    """Claims behind a gate or in a deleted folder are worked through from here on, before anything else."""

    type: Literal["walk_noted"] = "walk_noted"
    walk: Annotated[tuple[str, ...], Field(min_length=1, max_length=3)]


SiteEvent = Annotated[
    SiteConfigured
    | SitePaused
    | SiteResumed
    | GateChanged
    | FolderDeleted
    | ClaimOpened
    | ClaimGranted
    | ClaimDenied
    | ClaimClosed
    | ClaimRecalled
    | ClaimDegraded
    | WalkNoted,
    Field(discriminator="type"),
]

SiteInput = (
    ConfigureSite | PauseSite | ResumeSite | Gate | DeleteFolder | DeleteEnvironment | Claim | Release | InvalidSite
)
"""What comes from topics."""

SiteCommand = Annotated[SiteInput | ContinueSite, Field(discriminator="type")]


class SiteDecision(Written):
    """One handled command of a site that had an effect, was refused or was ignored."""

    type: Literal["decision"] = "decision"
    v: SchemaVersion = 1
    site: Id
    seq: Annotated[StrictInt, Field(ge=1)]
    at: Instant
    via: Literal["kafka", "http", "internal", "timer"]
    cause: Cause
    command: SiteCommand
    command_id: Id | None = None
    settles: tuple[Id, ...] = ()
    events: tuple[SiteEvent, ...] = ()
    refusal: Refusal | None = None
    ignored: Ignored | None = None
    policy: str
    prev: Sha256 | None


def read_site_decision(value: bytes) -> SiteDecision:
    """pydantic.ValidationError if the value is no site decision of a known schema."""
    return SiteDecision.model_validate_json(value, context=LOGGED)


def write_site_decision(decision: SiteDecision) -> bytes:
    """pydantic_core.PydanticSerializationError if the value could not be read back."""
    return write_logged(decision)
