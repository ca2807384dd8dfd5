"""What a site's decision changes in the rows that readers see: pure, one event after the other.

Claims are rows while they stand, and are deleted with their end: what became of them is in the log. Which claims a gate
hides is no fact of its own: readers see it from the gates. Counts are kept on the site's row.
"""

from typing import Final, assert_never

from projections.row_sets import RowSets
from projections.row_types import DoesNotFit, SiteClaimRow, SiteDeletionRow, SiteGateRow, SiteRow
from streams.rules import limits, site_events
from streams.rules.site_events import SiteDecision
from streams.rules.site_messages import Claim

_OfClaim = (
    site_events.ClaimGranted
    | site_events.ClaimDenied
    | site_events.ClaimClosed
    | site_events.ClaimRecalled
    | site_events.ClaimDegraded
)
_OF_CLAIM: Final = (
    site_events.ClaimGranted,
    site_events.ClaimDenied,
    site_events.ClaimClosed,
    site_events.ClaimRecalled,
    site_events.ClaimDegraded,
)


class SiteStep:
    """One decision of a site being applied: its events in order, by ``apply``."""

    def __init__(self, rows: RowSets, site: SiteRow, decision: SiteDecision) -> None:
        self.rows = rows
        self.site = site
        self.decision = decision
        self.at = decision.at

    def apply(self, event: site_events.SiteEvent) -> None:
        site = self.site
        match event:
            case site_events.ClaimOpened():
                self._opened(event)
            case _ if isinstance(event, _OF_CLAIM):
                self._claim(event)
            case site_events.SiteConfigured():
                if not site.created:
                    site.created, site.created_at = True, self.at
                site.capacity, site.capacity_at = event.capacity, self.at
            case site_events.SitePaused():
                site.paused, site.paused_at = True, self.at
            case site_events.SiteResumed():
                site.paused, site.paused_at = False, None
            case site_events.GateChanged():
                self._gate_changed(event)
            case site_events.FolderDeleted():
                key = site.site, event.environment_id, event.path
                self.rows.site_deletions[key] = SiteDeletionRow(*key, deleted_at=self.at)
            case site_events.WalkNoted():
                pass  # how far a step came; what it does are events of its own
            case _:
                assert_never(event)

    def _gate_changed(self, event: site_events.GateChanged) -> None:
        key = self.site.site, event.scope, event.name
        gate = self.rows.site_gates.get(key)
        if gate is None:
            gate = self.rows.site_gates[key] = SiteGateRow(self.site.site, event.scope, event.name)
        if bool(event.enabled) != gate.enabled:
            gate.enabled = bool(event.enabled)
            gate.disabled_at = None if event.enabled else self.at
        if event.run_budget != gate.run_budget:
            gate.run_budget = event.run_budget
            gate.run_budget_at = None if event.run_budget is None else self.at
            gate.budget_seq = self.decision.seq

    # Claims

    def _opened(self, event: site_events.ClaimOpened) -> None:
        command = self.decision.command
        key = self.site.site, event.agent_id, event.trigger_id
        if not isinstance(command, Claim) or (command.agent_id, command.trigger_id) != key[1:]:
            raise DoesNotFit(f"a claim of trigger {event.trigger_id!r} is opened by a command that isn't it")
        if key in self.rows.site_claims:
            raise DoesNotFit(f"a claim of trigger {event.trigger_id!r} is opened while one stands")
        self.rows.site_claims[key] = SiteClaimRow(
            *key,
            n=event.n,
            opened_at=self.at,
            available_at=command.key.available_at,
            created_at=command.key.created_at,
            accepted_at=command.accepted_at,
            worker=bool(command.worker),
            environment_id=command.environment_id,
            path=event.path,
            organization_id=command.organization_id,
            department_id=command.department_id,
        )
        self.site.waiting += 1

    def _claim(self, event: _OfClaim) -> None:
        claim = self._standing(event.agent_id, event.trigger_id)
        if claim.n != event.n:
            raise DoesNotFit(f"claim {event.n} of trigger {event.trigger_id!r} is {event.type}, and {claim.n} stands")
        match event:
            case site_events.ClaimGranted():
                self._granted(claim, event)
            case site_events.ClaimDenied():
                self._remove(claim)
            case site_events.ClaimClosed():
                if claim.granted_at is not None and not event.started:
                    self._give_back(claim)
                self._remove(claim)
            case site_events.ClaimRecalled():
                if claim.granted_at is None:
                    raise DoesNotFit(f"the claim of trigger {claim.trigger_id!r} is recalled, and was not granted")
                claim.recalled_at = self.at
            case site_events.ClaimDegraded():
                if claim.granted_at is not None or claim.path is None:
                    raise DoesNotFit(f"the claim of trigger {claim.trigger_id!r} has no folder to lose")
                claim.path = None
                claim.degraded = True
                claim.passed = 0
                claim.blocks_since = None

    def _standing(self, agent_id: str, trigger_id: str) -> SiteClaimRow:
        claim = self.rows.site_claims.get((self.site.site, agent_id, trigger_id))
        if claim is None:
            raise DoesNotFit(f"trigger {trigger_id!r} of agent {agent_id!r} has no claim at site {self.site.site!r}")
        return claim

    def _granted(self, claim: SiteClaimRow, event: site_events.ClaimGranted) -> None:
        if claim.granted_at is not None:
            raise DoesNotFit(f"the claim of trigger {claim.trigger_id!r} is granted twice")
        claim.granted_at, claim.granted_seq = self.at, self.decision.seq
        self.site.waiting -= 1
        self.site.granted += 1
        self.site.workers += claim.worker
        for key in claim.gates:
            gate = self.rows.site_gates.get(key)
            if gate is not None and gate.run_budget is not None:
                if gate.run_budget == 0:
                    raise DoesNotFit(f"the claim of trigger {claim.trigger_id!r} is granted beyond {key}'s run budget")
                gate.run_budget -= 1
                gate.run_budget_at = self.at
        if event.passed_agent_id is not None and event.passed_trigger_id is not None:
            passed = self._standing(event.passed_agent_id, event.passed_trigger_id)
            passed.passed += 1
            if passed.passed == limits.CLAIM_PASSES_MAX:
                passed.blocks_since = self.at

    def _give_back(self, claim: SiteClaimRow) -> None:
        """No attempt was started on the grant: budgets that it was taken from have it again (E4)."""
        for key in claim.gates:
            gate = self.rows.site_gates.get(key)
            if gate is not None and gate.run_budget is not None and (claim.granted_seq or 0) >= gate.budget_seq:
                gate.run_budget += 1
                gate.run_budget_at = self.at

    def _remove(self, claim: SiteClaimRow) -> None:
        if claim.granted_at is None:
            self.site.waiting -= 1
        else:
            self.site.granted -= 1
            self.site.workers -= claim.worker
        del self.rows.site_claims[self.site.site, claim.agent_id, claim.trigger_id]
