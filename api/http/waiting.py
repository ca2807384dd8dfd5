"""Why a trigger waits, seen from the rows of the projections: the facts that causes are computed from (causes.py).

Pure: rows and the time in, causes out. Instants of rows are datetimes, those of causes microseconds.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from streams.audit import causes as computed
from streams.audit.causes import (
    Cause,
    GateFacts,
    GateId,
    Holder,
    Holders,
    OwnClaim,
    PlaceId,
    Reason,
    Reservation,
    SiteFacts,
    Trigger,
)
from streams.rules.agent.rows import DEFAULT_SITE, ClaimState
from streams.rules.order import OrderKey, instant_of, order_key

Row = Mapping[str, Any]


def site_of(trigger: Row) -> str | None:
    """The site whose worker or folder a trigger needs; None: none."""
    return (trigger["site"] or DEFAULT_SITE) if trigger["worker"] or trigger["environment_id"] is not None else None


@dataclass(frozen=True, slots=True)
class StoredTrigger:
    """A waiting trigger, with its claim and the head of its conversation."""

    row: Row
    trigger_id: str
    conversation_id: str
    key: OrderKey
    available_at: int
    accepted_at: int
    attempt: int
    place: tuple[int, int] | None
    approval_required: bool
    approved: bool
    failures_approved: bool
    on_busy: str
    site_id: str | None
    worker: bool
    environment_id: str | None
    folder: str | None
    degraded: bool
    organization_id: str | None
    department_id: str | None
    claim_state: ClaimState | None
    asked_at: int | None
    mute: bool


def stored_trigger(row: Row) -> StoredTrigger:
    """What a row of queue_page or trigger tells."""
    return StoredTrigger(
        row,
        row["trigger_id"],
        row["conversation_id"],
        _key(row),
        instant_of(row["available_at"]),
        instant_of(row["accepted_at"]),
        row["attempt"],
        None if row["place_number"] is None else (row["place_rank"], row["place_number"]),
        row["approval_required"],
        row["approved_at"] is not None,
        row["failures_approved"],
        (row["on_busy"] or "queue") if row["interactive"] else "queue",
        site_of(row),
        row["worker"],
        row["environment_id"],
        row["folder"],
        row["degraded"],
        row["organization_id"],
        row["department_id"],
        row["claim_state"],
        _instant(row["claim_asked_at"]),
        row["claim_reason"] == "site_not_answering",
    )


@dataclass(slots=True)
class Facts:
    """What is stored of an agent, and of the sites that some of its waiting triggers need (waiting_facts.py)."""

    agent: Row
    slot_rows: Sequence[Row] = ()
    """Its oldest running attempts."""
    reservation_rows: Sequence[Row] = ()
    """Its claims that are asking or held, in start order."""
    not_answering: Mapping[str, Row] = field(default_factory=dict)
    """By site: the claim that it owes an answer to."""
    dependencies: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    """By trigger: what has not finished of what it depends on."""
    in_cycles: frozenset[str] = frozenset()
    """Triggers that wait for their own conversations, by way of others; of those of which it was asked."""
    sites: Mapping[str, Row] = field(default_factory=dict)
    gates: Mapping[GateId, Row] = field(default_factory=dict)
    claims: Mapping[tuple[str, str], Row] = field(default_factory=dict)
    """By site and trigger, as the site holds them."""
    deletions: Mapping[PlaceId, datetime] = field(default_factory=dict)
    worker_rows: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    """By site: who has a worker, the oldest first."""
    folder_rows: Mapping[PlaceId, Sequence[Row]] = field(default_factory=dict)
    """Who has an overlapping one, the oldest first."""
    blocker_rows: Mapping[PlaceId, Sequence[Row]] = field(default_factory=dict)
    """Who waits for an overlapping one and was passed too often, in start order."""

    # The agent

    @property
    def agent_id(self) -> str:
        return str(self.agent["agent_id"])

    @property
    def limit(self) -> int | None:
        return self.agent["max_parallel"]  # type: ignore[no-any-return]

    @property
    def running(self) -> int:
        return int(self.agent["running"])

    @property
    def run_budget(self) -> int | None:
        return self.agent["run_budget"]  # type: ignore[no-any-return]

    @property
    def run_budget_at(self) -> int | None:
        return _instant(self.agent["run_budget_at"])

    @property
    def reserved(self) -> int:
        return int(self.agent["asking"] + self.agent["held"])

    def held_back_by(self) -> Iterator[tuple[Literal["agent_archived", "agent_paused", "agent_parked"], int | None]]:
        if self.agent["archived"]:
            yield "agent_archived", _instant(self.agent["archived_at"])
        if self.agent["paused"]:
            yield "agent_paused", _instant(self.agent["paused_at"])
        if self.agent["parked"] is not None:
            yield "agent_parked", _instant(self.agent["parked_at"])

    def slots(self) -> Holders:
        holders = [
            Holder(
                self.agent_id,
                row["trigger_id"],
                row["conversation_id"],
                row["execution_id"],
                "running",
                instant_of(row["dispatched_at"]),
            )
            for row in self.slot_rows
        ]
        return Holders(holders, self.running, _newest_of(self.slot_rows))

    def reservations(self) -> list[Reservation]:
        return [
            Reservation(
                _key(row),
                Holder(
                    self.agent_id,
                    row["trigger_id"],
                    row["conversation_id"],
                    None,
                    "granted" if row["state"] == "held" else "asking",
                    instant_of(row["since"]),
                ),
            )
            for row in self.reservation_rows
        ]

    def silent(self, site: str) -> Holder | None:
        row = self.not_answering.get(site)
        if row is None:
            return None
        about = self.agent_id, row["trigger_id"], row["conversation_id"]
        return Holder(*about, None, "waiting", instant_of(row["since"]))

    # One of its triggers

    def waits_since(self, trigger: Trigger) -> int | None:
        return instant_of(_row(trigger)["state_since"])

    def before(self, trigger: Trigger) -> Holder | None:
        row = _row(trigger)
        head = row["head_trigger_id"]
        if head is None or head == trigger.trigger_id:
            return None
        about = self.agent_id, head, trigger.conversation_id, row["head_execution_id"]
        return Holder(*about, row["head_state"], _instant(row["head_state_since"]))

    def unmet(self, trigger: Trigger) -> list[Holder]:
        """One that nobody has answered for yet is waited for since the trigger waits."""
        waits_since = _row(trigger)["state_since"]
        return [
            Holder(
                row["dependency_agent_id"],
                None,
                row["dependency_conversation_id"],
                None,
                row["outcome"] or "live",
                instant_of((row["lives_since"] if row["outcome"] is None else row["told_at"]) or waits_since),
            )
            for row in self.dependencies.get(trigger.trigger_id, ())
        ]

    def is_in_cycle(self, trigger: Trigger) -> bool:
        return trigger.trigger_id in self.in_cycles

    def claim(self, trigger: Trigger) -> OwnClaim | None:
        row = self.claims.get((trigger.site_id or "", trigger.trigger_id))
        return None if row is None else OwnClaim(row["granted_at"] is not None, row["path"] is not None)

    def told(self, trigger: Trigger) -> tuple[Reason, int | None] | None:
        row = _row(trigger)
        return None if row["claim_reason"] is None else (row["claim_reason"], _instant(row["claim_since"]))

    def claim_since(self, trigger: Trigger) -> int | None:
        return _instant(_row(trigger)["claim_since"])

    # Sites

    def site(self, site: str) -> SiteFacts:
        row = self.sites.get(site)
        if row is None:
            return SiteFacts(created=False)
        paused_at, capacity_at = _instant(row["paused_at"]), _instant(row["capacity_at"])
        return SiteFacts(row["created"], row["paused"], paused_at, row["capacity"], capacity_at, row["workers"])

    def gate(self, gate: GateId) -> GateFacts | None:
        row = self.gates.get(gate)
        if row is None:
            return None
        disabled_at, run_budget_at = _instant(row["disabled_at"]), _instant(row["run_budget_at"])
        return GateFacts(row["enabled"], disabled_at, row["run_budget"], run_budget_at)

    def deleted_at(self, place: PlaceId) -> int | None:
        return _instant(self.deletions.get(place))

    def workers(self, site: str) -> Holders:
        rows = self.worker_rows.get(site, ())
        return Holders([_granted(row) for row in rows], len(rows), _newest_of(rows))

    def folders(self, place: PlaceId) -> Holders:
        rows = self.folder_rows.get(place, ())
        return Holders([_granted(row) for row in rows], rows[0]["holders_count"] if rows else 0, _newest_of(rows))

    def blockers(self, place: PlaceId) -> list[Reservation]:
        return [
            Reservation(
                _key(row),
                Holder(row["agent_id"], row["trigger_id"], None, None, "waiting", instant_of(row["blocks_since"])),
            )
            for row in self.blocker_rows.get(place, ())
        ]


def causes(facts: Facts, trigger: Row, now: datetime) -> list[Cause]:
    """Every cause for which a waiting trigger waits; ``trigger``: a row of queue_page or trigger."""
    return computed.causes(facts, stored_trigger(trigger), instant_of(now))


def _row(trigger: Trigger) -> Row:
    assert isinstance(trigger, StoredTrigger)
    return trigger.row


def _instant(moment: datetime | None) -> int | None:
    return None if moment is None else instant_of(moment)


def _key(row: Row) -> OrderKey:
    return order_key(instant_of(row["available_at"]), instant_of(row["created_at"]), row["trigger_id"])


def _newest_of(rows: Sequence[Row]) -> int | None:
    return instant_of(rows[0]["newest_at"]) if rows else None


def _granted(row: Row) -> Holder:
    state = "running" if row["execution_id"] is not None else "granted"
    about = row["agent_id"], row["trigger_id"], row["conversation_id"], row["execution_id"]
    return Holder(*about, state, instant_of(row["granted_at"]))
