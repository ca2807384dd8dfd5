"""What a fold of decisions knows of why triggers wait (causes.py).

Most instants are not in it: a fold keeps when a trigger was accepted, asked its site and was dispatched, and no other.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import nsmallest
from itertools import islice
from typing import Final, Literal

from streams.audit.causes import (
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
from streams.rules.agent.rows import TriggerRow
from streams.rules.agent.state import Agent
from streams.rules.folders import overlap, segments
from streams.rules.limits import CLAIM_PASSES_MAX, HOLDERS_MAX
from streams.rules.order import OrderKey
from streams.rules.site.rows import ClaimId, ClaimRow, GateScope
from streams.rules.site.state import Site, key_of, place_of

_NOBODY: Final[Mapping[str, Agent]] = {}


class FoldedFacts:
    """Of one agent, as it is now: ask others after the next decision.

    ``agents``: others that are folded too, for what their triggers do that hold something. ``knows_all``: a site that
    is not among ``sites`` has no decision; otherwise nothing is known of it.
    """

    __slots__ = ("_agent", "_agents", "_knows_all", "_reservations", "_sites", "_slots")

    def __init__(
        self, agent: Agent, sites: Mapping[str, Site], agents: Mapping[str, Agent] = _NOBODY, knows_all: bool = True
    ) -> None:
        self._agent, self._sites, self._agents, self._knows_all = agent, sites, agents, knows_all
        self._slots: Holders | None = None
        self._reservations: list[Reservation] | None = None

    @property
    def agent_id(self) -> str:
        return self._agent.agent_id

    @property
    def limit(self) -> int | None:
        return self._agent.limit

    @property
    def running(self) -> int:
        return self._agent.running

    @property
    def run_budget(self) -> int | None:
        return self._agent.row.run_budget

    @property
    def run_budget_at(self) -> None:
        return None

    @property
    def reserved(self) -> int:
        return len(self._agent.asking) + len(self._agent.held)

    def held_back_by(self) -> Iterator[tuple[Literal["agent_archived", "agent_paused", "agent_parked"], None]]:
        row = self._agent.row
        if row.archived:
            yield "agent_archived", None
        if row.paused:
            yield "agent_paused", None
        if row.parked is not None:
            yield "agent_parked", None

    def slots(self) -> Holders:
        if self._slots is None:
            self._slots = self._running()
        return self._slots

    def _running(self) -> Holders:
        running = [self._agent.triggers[trigger_id] for trigger_id in self._agent.executions.values()]
        running.sort(key=lambda row: (row.dispatched_at or 0, row.trigger_id.encode()))
        holders = [self._of_trigger(row) for row in running]
        return Holders(holders[:HOLDERS_MAX], len(holders), max((one.since or 0 for one in holders), default=None))

    def reservations(self) -> list[Reservation]:
        if self._reservations is None:
            keys = [(key, "asking") for key in self._agent.asking] + [(key, "granted") for key in self._agent.held]
            self._reservations = [self._reservation(key, state) for key, state in nsmallest(HOLDERS_MAX, keys)]
        return self._reservations

    def _reservation(self, key: OrderKey, state: str) -> Reservation:
        row = self._agent.triggers[key.id.decode()]
        since = row.asked_at if state == "asking" else None
        return Reservation(key, Holder(self.agent_id, row.trigger_id, row.conversation_id, None, state, since))

    def silent(self, site: str) -> Holder | None:
        if site not in self._agent.mute:
            return None
        rows = (self._agent.triggers[trigger_id] for _, trigger_id in self._agent.claimed)
        row = next(row for row in rows if row.mute and row.site_id == site)
        return Holder(self.agent_id, row.trigger_id, row.conversation_id, None, "waiting")

    def waits_since(self, trigger: Trigger) -> int | None:
        return None if trigger.attempt else trigger.accepted_at

    def before(self, trigger: Trigger) -> Holder | None:
        head = self._agent.head(trigger.conversation_id)
        return None if head is None or head.trigger_id == trigger.trigger_id else self._of_trigger(head)

    def _of_trigger(self, row: TriggerRow) -> Holder:
        since = row.dispatched_at
        if row.state == "waiting" and not row.attempt:
            since = row.accepted_at
        return Holder(self.agent_id, row.trigger_id, row.conversation_id, row.execution_id, row.state, since)

    def unmet(self, trigger: Trigger) -> list[Holder]:
        row = self._agent.triggers[trigger.trigger_id]
        return [
            Holder(
                agent_id,
                None,
                conversation_id,
                None,
                outcome or "live",
                self._lives_since(agent_id, conversation_id) if outcome is None else None,
            )
            for (agent_id, conversation_id), outcome in zip(row.depends_on, row.outcomes, strict=True)
            if outcome != "finished"
        ]

    def _lives_since(self, agent_id: str, conversation_id: str) -> int | None:
        """When the oldest trigger was received that lives there; None: there is none, or it is not folded."""
        agent = self._agents.get(agent_id)
        if agent is None:
            return None
        return min((agent.triggers[id].accepted_at for id in agent.live_triggers(conversation_id)), default=None)

    def is_in_cycle(self, trigger: Trigger) -> bool:  # noqa: ARG002
        """Not looked for: it takes all agents."""
        return False

    def claim(self, trigger: Trigger) -> OwnClaim | None:
        site = self._sites.get(trigger.site_id or "")
        claim = site.claims.get(ClaimId(self.agent_id, trigger.trigger_id)) if site is not None else None
        return None if claim is None else OwnClaim(claim.granted, claim.path is not None)

    def told(self, trigger: Trigger) -> tuple[Reason, int | None] | None:  # noqa: ARG002
        """What it was told is not kept."""
        return None

    def claim_since(self, trigger: Trigger) -> int | None:
        return trigger.asked_at if trigger.claim_state == "asking" else None

    def site(self, site: str) -> SiteFacts | None:
        found = self._sites.get(site)
        if found is None:
            return SiteFacts(created=False) if self._knows_all else None
        row = found.row
        return SiteFacts(row.created, row.paused, None, row.capacity, None, found.pool_used)

    def gate(self, gate: GateId) -> GateFacts | None:
        site = self._sites.get(gate.site)
        scope: GateScope = "organization" if gate.scope == "organization" else "department"
        row = site.gates.get((scope, gate.name)) if site is not None else None
        return None if row is None else GateFacts(row.enabled, None, row.run_budget, None)

    def deleted_at(self, place: PlaceId) -> int | None:
        site = self._sites.get(place.site)
        row = site.deletions.get((place.environment_id, place.path)) if site is not None else None
        return None if row is None else row.deleted_at

    def workers(self, site: str) -> Holders:
        return self._granted(site, lambda claim: claim.worker)

    def folders(self, place: PlaceId) -> Holders:
        return self._granted(place.site, _overlapping(place))

    def _granted(self, site_id: str, is_one: Callable[[ClaimRow], bool]) -> Holders:
        site = self._sites.get(site_id)
        if site is None:
            return Holders()
        found = [claim for key in site.granted if is_one(claim := site.claims[site.by_key[key]])]
        found.sort(key=lambda claim: (claim.granted_seq or 0, claim.agent_id.encode(), claim.trigger_id.encode()))
        return Holders([self._holding(claim) for claim in islice(found, HOLDERS_MAX)], len(found))

    def _holding(self, claim: ClaimRow) -> Holder:
        agent = self._agents.get(claim.agent_id)
        row = agent.triggers.get(claim.trigger_id) if agent is not None else None
        runs = row is not None and row.state == "running"
        return Holder(
            claim.agent_id,
            claim.trigger_id,
            row.conversation_id if row is not None else None,
            row.execution_id if row is not None and runs else None,
            "running" if runs else "granted",
        )

    def blockers(self, place: PlaceId) -> list[Reservation]:
        site = self._sites.get(place.site)
        if site is None:
            return []
        is_in_it = _overlapping(place)
        found = [
            claim
            for claim in site.claims.values()
            if claim.passed >= CLAIM_PASSES_MAX
            and not claim.granted
            and is_in_it(claim)
            and all(site.gate(gate).is_open for gate in claim.gates)
        ]
        return [
            Reservation(OrderKey(*key_of(claim)[:3]), Holder(claim.agent_id, claim.trigger_id, None, None, "waiting"))
            for claim in nsmallest(HOLDERS_MAX, found, key=key_of)
        ]


def holders_at_site(site: Site, claim: ClaimRow, reason: Reason) -> Sequence[Holder]:
    """Who stands in a claim's way at its site: those with workers, with overlapping folders, or before it there."""
    facts = FoldedFacts(Agent(claim.agent_id), {site.site_id: site})
    if reason == "site_workers_busy":
        return facts.workers(site.site_id).oldest
    place = place_of(claim)
    if reason != "agent_environment_folder_busy" or place is None:
        return ()
    at = PlaceId(site.site_id, place.environment_id, claim.path or "/")
    own = key_of(claim)
    before = [one.holder for one in facts.blockers(at) if (*one.key, one.holder.agent_id.encode()) < own]
    return [*facts.folders(at).oldest, *before][:HOLDERS_MAX]


def _overlapping(place: PlaceId) -> Callable[[ClaimRow], bool]:
    """Whether a claim is for a folder that overlaps one."""
    wanted = segments(place.path)

    def is_in_it(claim: ClaimRow) -> bool:
        other = place_of(claim) if claim.environment_id == place.environment_id else None
        return other is not None and overlap(wanted, other.segments)

    return is_in_it
