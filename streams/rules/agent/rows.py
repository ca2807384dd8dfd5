"""The rows of an agent's state, as they are stored in the changelog and held in memory.

A change costs a bounded number of rows and no row grows with the queue. In stored rows an absent field means its
default. Instants are microseconds. Texts are a row of their own, written once (streams/partition.py).
"""

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from streams.rules.order import OrderKey, order_key
from streams.rules.verdicts import FinalState, LiveState

Outcome = Literal["finished", "failed", "stopped"]
"""How a conversation's newest ended trigger ended; expired counts as stopped."""


@dataclass(slots=True)
class AgentRow:
    """An agent's header: settings, flags, counters, and the head of its chain of decisions."""

    seq: int = 0
    prev: str | None = None
    """SHA-256 of the last decision's bytes; the next one names it."""
    created: bool = False
    parallelism_limit: int | Literal["unlimited"] = 1
    max_backlog_depth: int = 1000
    default_timeout_seconds: int | None = None
    agent_type: str | None = None
    serial: bool = False
    default_environment_id: str | None = None
    default_folder: str | None = None
    run_budget: int | None = None
    owner: str | None = None
    display_name: str | None = None
    paused: bool = False
    archived: bool = False
    parked: str | None = None
    """The error for which the agent is parked (G4)."""
    places: int = 0
    """Places given in conversations so far; never reused."""
    claims: int = 0
    """Claim numbers used so far; never reused."""
    todo: Literal["pump", "stop_conversation", "archive"] | None = None
    """Work that was more than one step may do; it is handled before anything else (F1)."""
    todo_conversation_id: str | None = None
    todo_since: int | None = None
    """The decision that began it."""


def is_serial(serial: bool, agent_type: str | None, default_environment_id: str | None) -> bool:
    """Whether an agent with these settings has one slot, whatever its limit says (A4)."""
    return serial or agent_type == "acp" or default_environment_id is not None


ClaimState = Literal["asking", "standing", "held", "granted"]
"""Of a trigger's claim at its site: not answered (a slot is reserved), waiting there, granted, and with an attempt."""

DependencyOutcome = Literal["finished", "failed", "stopped", "unknown"]


@dataclass(slots=True)
class TriggerRow:
    """One live trigger without its texts."""

    trigger_id: str
    conversation_id: str
    kind: str
    created_at: int
    available_at: int
    accepted_at: int
    accepted_seq: int
    digest: str
    """Of its content: a repeat with the same id and another digest is a conflict."""
    timeout_seconds: int
    max_attempts: int
    state: LiveState = "waiting"
    interactive: bool = False
    on_busy: Literal["ask", "queue", "force", "interrupt"] = "queue"
    """As it counts: always queue for what nobody waits for, and after an attempt."""
    requested_by: str | None = None
    expires_at: int | None = None
    heartbeat_seconds: int | None = None
    execution_class: Literal["standard", "background"] = "standard"
    parent: tuple[str, str] | None = None
    restarts: str | None = None
    priority: int | None = None
    site: str | None = None
    worker: bool = False
    environment_id: str | None = None
    folder: str | None = None
    organization_id: str | None = None
    department_id: str | None = None
    decide_before: int | None = None
    depends_on: tuple[tuple[str, str], ...] = ()
    """(agent, conversation) of each."""
    outcomes: tuple[DependencyOutcome | None, ...] = ()
    """Of each, as it was told last; None: it lives, or nobody has answered."""
    approval_required: bool = False
    approved: bool = False
    failures_approved: bool = False
    """A person lets it start although what it depends on failed or was stopped; until the next of them does."""
    degraded: bool = False
    payload_bytes: int = 0
    payload_lost: bool = False
    """What a runner would be sent is gone: the running attempt is the last one."""
    place: tuple[int, int] | None = None
    attempt: int = 0
    failures: int = 0
    absences: int = 0
    execution_id: str | None = None
    """Of the current attempt, or of the last one while the trigger is paused or waits for the next."""
    slot_number: int | None = None
    forced: bool = False
    dispatched_at: int | None = None
    lease_until: int | None = None
    last_seen_at: int | None = None
    grace_until: int | None = None
    """Set while the attempt is being stopped."""
    claim_n: int | None = None
    claim_state: ClaimState | None = None
    asked_at: int | None = None
    mute: bool = False
    """The site has not answered the claim in time."""
    late: int = 0
    """Grants given back because the agent was full (K of the site protocol)."""

    @property
    def needs_site(self) -> bool:
        return self.worker or self.environment_id is not None

    @property
    def site_id(self) -> str | None:
        """Where it must have a claim before it runs; None: nowhere."""
        return (self.site or DEFAULT_SITE) if self.needs_site else None

    @property
    def is_urgent(self) -> bool:
        """It starts now or is refused: its sender waits for the answer (B2)."""
        return self.on_busy in ("ask", "force")

    @property
    def answer_until(self) -> int | None:
        """When it is refused unless it has started (B5). A resume has its own answer: this binds the first attempt."""
        return self.decide_before if self.is_urgent and self.attempt == 0 else None

    @property
    def has_no_deadline(self) -> bool:
        """Nothing but its time to start is to come, while it waits."""
        return self.expires_at is None and self.decide_before is None and self.claim_n is None

    def is_over(self, at: int) -> bool:
        """Its time to start is over at this instant (E5)."""
        return self.expires_at is not None and self.expires_at <= at

    @property
    def unfinished_dependencies(self) -> list[tuple[str, str]]:
        """Those whose agents may still tell it how they stand: once one has finished, nobody does any more."""
        return [on for on, outcome in zip(self.depends_on, self.outcomes, strict=True) if outcome != "finished"]

    @property
    def is_blocked(self) -> bool:
        """Whether an approval or a dependency keeps it from a place (E2, E3)."""
        if self.lacks_approval:
            return True
        return bool(self.outcomes) and any(
            outcome != "finished" and not (self.failures_approved and outcome in ("failed", "stopped"))
            for outcome in self.outcomes
        )

    @property
    def lacks_approval(self) -> bool:
        """Whether there is something that a person may approve: the trigger, or that what it depends on failed."""
        if self.approval_required and not self.approved:
            return True
        return not self.failures_approved and any(outcome in ("failed", "stopped") for outcome in self.outcomes)

    @property
    def key(self) -> OrderKey:
        return order_key(self.available_at, self.created_at, self.trigger_id)


@dataclass(slots=True)
class ConversationRow:
    """How a conversation's newest ended trigger ended; whether it lives is known from its live triggers (E2)."""

    outcome: Outcome
    at: int


DEFAULT_SITE: Final = "default"


@dataclass(slots=True)
class WatchRow:
    """Another agent's trigger waits for a conversation of this one (E2)."""

    told: DependencyOutcome | Literal["nothing"] | None = "nothing"
    """What it was told last; None: that the conversation lives."""


RememberedKind = Literal["trigger", "stop", "control"]
RememberedState = FinalState | Literal["refused", "done"]


@dataclass(slots=True)
class RememberedRow:
    """An id that was answered: a repeat gets the same answer (F8). A live trigger's id is remembered by its own row."""

    digest: str
    """The first 32 hex digits of the content's SHA-256."""
    seq: int
    """The decision that settled it."""
    state: RememberedState
    at: int

    @property
    def final_state(self) -> FinalState | None:
        """How the trigger ended; None for what never was a trigger's life."""
        return _FINAL_STATES.get(self.state)


_FINAL_STATES: Final[dict[str, FinalState]] = {
    "finished": "finished",
    "failed": "failed",
    "stopped": "stopped",
    "expired": "expired",
}


RowKind = Literal["agent", "trigger", "conversation", "remembered", "watch"]


class Watcher(NamedTuple):
    """A trigger of some agent that depends on a conversation of this one."""

    agent_id: str
    trigger_id: str


class RowRef(NamedTuple):
    """Which row of the agent changed."""

    kind: RowKind
    id: str = ""
    remembered: RememberedKind | None = None
    watcher: Watcher | None = None
