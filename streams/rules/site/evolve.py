"""``evolve``: the one way in which a site's state changes, the same for live traffic, recovery and audits."""

from itertools import islice
from typing import Literal, NamedTuple, assert_never

from streams.rules import limits, site_events
from streams.rules.agent.evolve import NEVER_REMEMBERED
from streams.rules.agent.rows import RememberedRow
from streams.rules.agent.state import DIGEST_DIGITS
from streams.rules.messages import content_sha256
from streams.rules.order import SECOND
from streams.rules.site.rows import ClaimId, ClaimRow, DeletionRow, GateRow
from streams.rules.site.state import Site, SiteRowRef, key_of, place_of
from streams.rules.site_messages import Claim, SiteControl
from streams.rules.verdicts import Ignored, Refusal


class SiteOrigin(NamedTuple):
    """The decision that an event belongs to, as far as the state needs it."""

    at: int
    command: object


def evolve(site: Site, event: site_events.SiteEvent, origin: SiteOrigin) -> None:  # noqa: C901 - one case an event
    """Apply one event. AssertionError or KeyError: the event doesn't fit the state, the log is corrupt."""
    match event:
        case site_events.ClaimOpened():
            _opened(site, event, origin)
        case site_events.ClaimGranted():
            _granted(site, event)
        case site_events.ClaimClosed():
            _closed(site, event)
        case site_events.ClaimDenied():
            _remove(site, site.claims[ClaimId(event.agent_id, event.trigger_id)])
        case site_events.ClaimRecalled():
            assert site.claims[ClaimId(event.agent_id, event.trigger_id)].granted
        case site_events.ClaimDegraded():
            _degraded(site, site.claims[ClaimId(event.agent_id, event.trigger_id)])
        case site_events.SiteConfigured():
            site.row.created = True
            site.row.capacity = event.capacity
        case site_events.SitePaused():
            site.row.paused = True
        case site_events.SiteResumed():
            site.row.paused = False
        case site_events.GateChanged():
            _gate_changed(site, event)
        case site_events.FolderDeleted():
            site.deletions[event.environment_id, event.path] = DeletionRow(origin.at)
            site.changed[SiteRowRef("deletion", (event.environment_id, event.path))] = None
        case site_events.WalkNoted():
            if event.walk in site.row.todo:  # begun anew: what was seen before the change must be seen again
                site.row.todo.remove(event.walk)
            if not site.row.todo:
                site.row.todo_cursor = ("", "")
            site.row.todo.append(event.walk)
        case _:
            assert_never(event)


def _opened(site: Site, event: site_events.ClaimOpened, origin: SiteOrigin) -> None:
    command = origin.command
    assert isinstance(command, Claim)
    claim = ClaimRow(
        agent_id=command.agent_id,
        trigger_id=command.trigger_id,
        n=command.n,
        available_at=command.key.available_at,
        created_at=command.key.created_at,
        accepted_at=command.accepted_at,
        worker=bool(command.worker),
        environment_id=command.environment_id,
        path=event.path,
        organization_id=command.organization_id,
        department_id=command.department_id,
    )
    assert claim.id not in site.claims
    site.enter(claim)
    site.touch(claim)


def _gate_changed(site: Site, event: site_events.GateChanged) -> None:
    gate = site.gates.setdefault((event.scope, event.name), GateRow())
    if event.run_budget != gate.run_budget:
        gate.budget_seq = site.row.seq + 1
    gate.enabled, gate.run_budget = event.enabled, event.run_budget
    site.changed[SiteRowRef("gate", (event.scope, event.name))] = None


def _granted(site: Site, event: site_events.ClaimGranted) -> None:
    claim = site.claims[ClaimId(event.agent_id, event.trigger_id)]
    assert claim.n == event.n and not claim.granted
    site.hide(claim)
    claim.granted = True
    claim.granted_seq = site.row.seq + 1
    site.take(claim)
    site.touch(claim)
    for gate_id in claim.gates:
        gate = site.gates.get(gate_id)
        if gate is not None and gate.run_budget is not None:
            assert gate.run_budget > 0
            gate.run_budget -= 1
            site.changed[SiteRowRef("gate", gate_id)] = None
    if event.passed_agent_id is not None and event.passed_trigger_id is not None:
        passed = site.claims[ClaimId(event.passed_agent_id, event.passed_trigger_id)]
        passed.passed += 1
        place = place_of(passed)
        if passed.passed == limits.CLAIM_PASSES_MAX and place is not None and passed.id in site.shown:
            site.forest.block(place, key_of(passed))
        site.touch(passed)


def _closed(site: Site, event: site_events.ClaimClosed) -> None:
    claim = site.claims[ClaimId(event.agent_id, event.trigger_id)]
    assert claim.n == event.n
    if claim.granted and not event.started:
        assert claim.granted_seq is not None
        for gate_id in claim.gates:
            gate = site.gates.get(gate_id)
            if gate is not None and gate.run_budget is not None and claim.granted_seq >= gate.budget_seq:
                gate.run_budget += 1
                site.changed[SiteRowRef("gate", gate_id)] = None
    _remove(site, claim)


def _remove(site: Site, claim: ClaimRow) -> None:
    site.leave(claim)
    site.touch(claim)


def _degraded(site: Site, claim: ClaimRow) -> None:
    assert not claim.granted and claim.path is not None
    was_shown = claim.id in site.shown
    site.hide(claim)
    claim.path = None
    claim.passed = 0
    if was_shown:
        site.show(claim)
    site.touch(claim)


def settle(site: Site, command: object, seq: int, at: int, refusal: Refusal | None, ignored: Ignored | None) -> None:
    """The end of every decision: its number, and a control's id, so that a repeat finds it (F8)."""
    site.row.seq = seq
    site.changed[SiteRowRef("site")] = None
    if not isinstance(command, SiteControl) or (ignored is not None and ignored.reason == "duplicate"):
        return
    if refusal is not None and refusal.code in NEVER_REMEMBERED:
        return
    for id in list(islice(site.remembered, limits.STEP_CHANGES_MAX)):  # no timer: a site has few controls
        if site.remembered[id].at + limits.REMEMBERED_SECONDS * SECOND > at:
            break
        del site.remembered[id]
        site.changed[SiteRowRef("remembered", (id,))] = None
    state: Literal["refused", "done"] = "done" if refusal is None else "refused"
    site.remembered[command.id] = RememberedRow(content_sha256(command)[:DIGEST_DIGITS], seq, state, at)
    site.changed[SiteRowRef("remembered", (command.id,))] = None
