"""Check the log of site decisions: that no folder was given twice and no pool held more than it has.

- the chain, as for agents (verify.py);
- I2: at each grant, no granted claim of the site has an overlapping folder of the same environment;
- I3: at each grant that takes a worker, fewer than ``capacity`` were taken;
- I4: claims are opened by a claim, granted at most once, and closed once, by a release of their own or, where an
  operator gave that up, by a newer claim of their trigger;
- E1, E4: nothing is granted at a site that is paused or unknown, behind a closed gate, or beyond a budget; budgets are
  taken once at the grant, and given back once where no attempt ran;
- I6: who is granted is the oldest that folders and pool have room for; each older claim that it overtook is counted
  under what allowed that, and something must have: the certificate of the order; D4: the claim that it passed is
  counted; I7: after a decision that left nothing over, nobody waits who could be granted;
- B2: only asks are denied; D5: only claims in a deleted folder lose it.

With ``recheck``, each command decided again gives the decision that is there (recompute.py).

Folders, workers, gates and budgets are counted here from the events alone, with none of the indexes that the decider
uses. Who is the oldest that could be granted is asked of the decider's own state, folded from the events.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice

from pydantic import ValidationError
from sortedcontainers import SortedList

from streams.audit.agreement import Agreement
from streams.audit.overtakings import OVERTAKEN_MAX
from streams.audit.past import FoldedSite, walk_through
from streams.audit.recompute import Recheck
from streams.audit.verify import Head, Heads, Violation, changed, following, unreadable
from streams.rules import limits, site_events
from streams.rules.folders import segments
from streams.rules.site.evolve import SiteOrigin, evolve, settle
from streams.rules.site.forest import ClaimKey
from streams.rules.site.rows import ClaimId, ClaimRow
from streams.rules.site.state import Site, key_of, place_of
from streams.rules.site_messages import Claim, ContinueSite, Release
from streams.rules.verdicts import WaitReason

Wrong = tuple[str, str]


Folder = tuple[str, ...]
"""An environment, and the segments of a folder of it."""

_Need = tuple[Folder | None, bool, tuple[tuple[str, str], ...]]
"""Folder, worker and gates: of claims with the same, the same stands in the way, but for blockers."""


class _OpenClaim:
    __slots__ = ("folder", "gates", "granted_seq", "id", "key", "n", "need", "passed", "path", "worker")

    def __init__(self, claim: Claim | ClaimRow, path: str | None) -> None:
        """``claim``: as it was sent, or as an earlier reading has left it. ``path``: in its compared form."""
        self.n = claim.n
        self.id = (claim.agent_id, claim.trigger_id)
        key = claim.key if isinstance(claim, Claim) else claim
        self.key = ClaimKey(key.available_at, key.created_at, claim.trigger_id.encode(), claim.agent_id.encode())
        self.worker = bool(claim.worker)
        self.folder: Folder | None = None
        self.path: list[Folder] = []
        """From its environment down to its folder."""
        if path is not None and claim.environment_id is not None:
            self.folder = (claim.environment_id, *segments(path))
            self.path = [self.folder[:depth] for depth in range(1, len(self.folder) + 1)]
        carried = (("organization", claim.organization_id), ("department", claim.department_id))
        self.gates = [(scope, name) for scope, name in carried if name is not None]
        self.need: _Need = (self.folder, self.worker, tuple(self.gates))
        self.granted_seq = claim.granted_seq if isinstance(claim, ClaimRow) else None
        self.passed = claim.passed if isinstance(claim, ClaimRow) else 0

    def lose_folder(self) -> None:
        self.folder, self.path, self.passed = None, [], 0
        self.need = (None, *self.need[1:])

    def overlaps(self, other: "_OpenClaim") -> bool:
        if self.folder is None or other.folder is None:
            return False
        return self.folder in other.path or other.folder in self.path


class _Gate:
    __slots__ = ("budget", "budget_seq", "enabled")

    def __init__(self, enabled: bool = True, budget: int | None = None, budget_seq: int = 0) -> None:
        self.enabled = enabled
        self.budget = budget
        self.budget_seq = budget_seq


class _SiteLedger:
    __slots__ = (
        "blockers",
        "capacity",
        "claims",
        "exists",
        "gates",
        "held",
        "held_below",
        "offset",
        "overtakings",
        "paused",
        "seq",
        "sha256",
        "site",
        "waiting",
        "workers",
    )

    def __init__(self, site: Site) -> None:
        """``site``: a new one, or as an earlier reading has left it."""
        self.site = site
        self.seq = site.row.seq
        self.sha256: str | None = site.row.prev
        self.offset: int | None = None
        self.exists = site.row.created
        self.paused = site.row.paused
        self.capacity = site.row.capacity
        self.workers = 0
        self.gates: dict[tuple[str, str], _Gate] = {
            id: _Gate(row.enabled, row.run_budget, row.budget_seq) for id, row in site.gates.items()
        }
        self.claims: dict[tuple[str, str], _OpenClaim] = {
            id: _OpenClaim(claim, claim.path) for id, claim in site.claims.items()
        }
        self.held: dict[Folder, _OpenClaim] = {}
        self.held_below: Counter[Folder] = Counter()
        """How many are held in a folder: it, and what lies below it."""
        self.waiting: SortedList[tuple[ClaimKey, _OpenClaim]] = SortedList()
        """In start order, also those behind a closed gate. No two keys are the same."""
        self.blockers: dict[tuple[str, str], _OpenClaim] = {}
        """Waiting claims that were passed too often."""
        self.overtakings: Counter[str] = Counter()
        for id, claim in self.claims.items():
            if claim.granted_seq is not None:
                self.take(claim)
            else:
                self.waiting.add((claim.key, claim))
                if claim.passed >= limits.CLAIM_PASSES_MAX:
                    self.blockers[id] = claim

    def take(self, claim: _OpenClaim) -> None:
        self.workers += claim.worker
        if claim.folder is not None:
            self.held[claim.folder] = claim
            for folder in claim.path:
                self.held_below[folder] += 1

    def give_back(self, claim: _OpenClaim) -> None:
        self.workers -= claim.worker
        if claim.folder is not None:
            del self.held[claim.folder]
            for folder in claim.path:
                self.held_below[folder] -= 1
                if not self.held_below[folder]:
                    del self.held_below[folder]

    def is_held(self, claim: _OpenClaim) -> bool:
        """Whether somebody holds a folder that overlaps the claim's."""
        return claim.folder in self.held_below or not self.held.keys().isdisjoint(claim.path)

    def stands_in_the_way_of(self, claim: _OpenClaim) -> WaitReason | None:
        """Why a waiting claim can't be granted now (B3); None: it could be."""
        if claim.gates and self.gates:
            gates = [(name[0], gate) for name in claim.gates if (gate := self.gates.get(name)) is not None]
            for scope, gate in gates:
                if not gate.enabled:
                    return "organization_disabled" if scope == "organization" else "department_disabled"
            if any(gate.budget == 0 for _, gate in gates):
                return "run_budget_used_up"
        if claim.path and (self.is_held(claim) or (self.blockers and self._is_blocked(claim))):
            return "agent_environment_folder_busy"
        return "site_workers_busy" if claim.worker and self.workers >= self.capacity else None

    def _is_blocked(self, claim: _OpenClaim) -> bool:
        return any(
            one.key < claim.key and one.overlaps(claim) and all(self._is_open(name) for name in one.gates)
            for one in self.blockers.values()
        )

    def _is_open(self, name: tuple[str, str]) -> bool:
        gate = self.gates.get(name)
        return gate is None or (gate.enabled and gate.budget != 0)


class SiteVerifier:
    """Feed one partition's site decisions in order to ``check``; then ask ``finish``."""

    def __init__(
        self,
        heads: Mapping[str, Head] | None = None,
        agreement: Agreement | None = None,
        recheck: Recheck | None = None,
        known: Iterable[Site] = (),
    ) -> None:
        """``known``: sites as an earlier reading has left them, row.prev the digest of their last decision."""
        self.decisions = 0
        self._ledgers: dict[str, _SiteLedger] = {site.site_id: _SiteLedger(site) for site in known}
        self._heads = Heads(heads)
        self._agreement = agreement
        self._recheck = recheck

    @property
    def overtakings(self) -> Counter[str]:
        """Older claims that grants overtook, by what allowed it."""
        return sum((ledger.overtakings for ledger in self._ledgers.values()), Counter[str]())

    def sites(self) -> list[Site]:
        """As they are after the decisions so far, row.prev the digest of the last one."""
        for ledger in self._ledgers.values():
            ledger.site.row.prev = ledger.sha256
        return [ledger.site for ledger in self._ledgers.values()]

    def check(self, value: bytes, offset: int) -> Violation | None:
        """The violation that this decision is, or None."""
        try:
            decision = site_events.read_site_decision(value)
        except ValidationError as error:
            return unreadable(error, offset)
        ledger = self._ledgers.get(decision.site)
        if ledger is None:
            ledger = self._ledgers[decision.site] = _SiteLedger(FoldedSite(decision.site))
        sha256 = hashlib.sha256(value).hexdigest()
        if decision.seq == ledger.seq + 1 and decision.prev != ledger.sha256:
            return changed(decision.site, decision.seq, decision.prev, offset, ledger.offset)
        wrong = following(ledger.seq, decision.seq) or self._heads.wrong(decision.site, decision.seq, sha256)
        wrong = wrong or _fold(ledger, decision)
        if wrong is None and self._recheck is not None:
            wrong = self._recheck.wrong(decision, value)
        if wrong is not None:
            return Violation(offset, decision.site, decision.seq, *wrong)
        if self._agreement is not None:
            self._agreement.take_site(decision, offset)
        ledger.seq, ledger.sha256, ledger.offset = decision.seq, sha256, offset
        self.decisions += 1
        return None

    def finish(self) -> Violation | None:
        """Whether decisions are missing at the end that the stored heads know of."""
        return self._heads.cut_tail(lambda id: self._ledgers[id].seq if id in self._ledgers else 0)


def _fold(ledger: _SiteLedger, decision: site_events.SiteDecision) -> Wrong | None:
    site = ledger.site
    origin = SiteOrigin(decision.at, decision.command)
    for index, event in enumerate(decision.events):
        wrong = _count(ledger, decision, event)
        if wrong is None and isinstance(event, site_events.ClaimGranted):
            claim = site.claims[ClaimId(event.agent_id, event.trigger_id)]
            wrong = _order(site, claim, event)
        if wrong is None and isinstance(event, site_events.ClaimDegraded):
            degraded = site.claims.get(ClaimId(event.agent_id, event.trigger_id))
            if degraded is None or not site.is_deleted(degraded):
                wrong = "D5", f"claim {event.n} of {event.trigger_id} lost a folder that was not deleted"
        if wrong is not None:
            return wrong
        try:
            evolve(site, event, origin)
        except (AssertionError, KeyError, ValueError) as error:
            return "I4", f"event {index} ({event.type}) doesn't fit the state: {error!r}"
        if isinstance(event, site_events.WalkNoted):
            walk_through(site, event.walk)
    settle(site, decision.command, decision.seq, decision.at, decision.refusal, decision.ignored)
    site.row.todo.clear()
    site.changed.clear()
    return _stalls(site, decision)


def _count(ledger: _SiteLedger, decision: site_events.SiteDecision, event: site_events.SiteEvent) -> Wrong | None:
    match event:
        case site_events.ClaimOpened():
            id = (event.agent_id, event.trigger_id)
            if id in ledger.claims or not isinstance(decision.command, Claim):
                return "I4", f"claim {event.n} of {id} was opened twice"
            opened = ledger.claims[id] = _OpenClaim(decision.command, event.path)
            ledger.waiting.add((opened.key, opened))
        case site_events.ClaimGranted():
            return _granted(ledger, decision, event)
        case site_events.ClaimClosed() | site_events.ClaimDenied():
            return _ended(ledger, decision, event)
        case site_events.SiteConfigured():
            ledger.exists, ledger.capacity = True, event.capacity
        case site_events.SitePaused() | site_events.SiteResumed():
            ledger.paused = isinstance(event, site_events.SitePaused)
        case site_events.GateChanged():
            gate = ledger.gates.setdefault((event.scope, event.name), _Gate())
            if gate.budget != event.run_budget:
                gate.budget, gate.budget_seq = event.run_budget, decision.seq
            gate.enabled = event.enabled
        case site_events.ClaimDegraded():
            claim = ledger.claims.get((event.agent_id, event.trigger_id))
            if claim is None or claim.granted_seq is not None:
                return "I4", f"claim {event.n} of {event.trigger_id} can't lose its folder now"
            claim.lose_folder()
            ledger.blockers.pop((event.agent_id, event.trigger_id), None)
        case _:
            pass  # recalls and walks change no claim
    return None


def _granted(ledger: _SiteLedger, decision: site_events.SiteDecision, event: site_events.ClaimGranted) -> Wrong | None:
    id = (event.agent_id, event.trigger_id)
    claim = ledger.claims.get(id)
    if claim is None or claim.n != event.n or claim.granted_seq is not None:
        return "I4", f"claim {event.n} of {id} was granted, but it did not wait"
    if ledger.is_held(claim):
        other = next(other for other in ledger.held.values() if claim.overlaps(other))
        return "I2", f"the folder of {id} was granted while {other.id} held an overlapping one"
    if claim.worker and ledger.workers >= ledger.capacity:
        return "I3", f"{ledger.workers} workers were taken, the pool has {ledger.capacity}"
    if ledger.paused or not ledger.exists:
        return "E1", f"claim {event.n} of {id} was granted at a site that is {'paused' if ledger.exists else 'unknown'}"
    wrong = _overtakes(ledger, claim)
    if wrong is not None:
        return wrong
    for name in claim.gates:
        gate = ledger.gates.get(name)
        if gate is not None and not gate.enabled:
            return "E1", f"claim {event.n} of {id} was granted although {' '.join(name)} is disabled"
        if gate is not None and gate.budget is not None:
            if gate.budget == 0:
                return "E4", f"claim {event.n} of {id} was granted although the budget of {' '.join(name)} is used up"
            gate.budget -= 1
    claim.granted_seq = decision.seq
    ledger.take(claim)
    ledger.waiting.remove((claim.key, claim))
    ledger.blockers.pop(id, None)
    passed_id = (event.passed_agent_id or "", event.passed_trigger_id or "")
    passed = ledger.claims.get(passed_id)
    if passed is not None:
        passed.passed += 1
        if passed.passed == limits.CLAIM_PASSES_MAX:
            ledger.blockers[passed_id] = passed
    return None


def _overtakes(ledger: _SiteLedger, claim: _OpenClaim) -> Wrong | None:
    """Count the older claims that wait when this one is granted, each under what stands in its way.

    That is asked once for all that need the same. Only a blocker makes a difference between them: it is in the way of
    those that are younger than it, so what a worker was missing for before may wait for its folder later on.
    """
    own = claim.key, claim
    known: dict[_Need, WaitReason] = {}
    for _, older in islice(ledger.waiting.irange(maximum=own, inclusive=(True, False)), OVERTAKEN_MAX):
        allowed = known.get(older.need)
        if allowed is None or (allowed == "site_workers_busy" and ledger.blockers):
            allowed = ledger.stands_in_the_way_of(older)
            if allowed is None:
                return "I6", f"claim {claim.n} of {claim.id} was granted before {older.id}, which is older and could be"
            known[older.need] = allowed
        ledger.overtakings[allowed] += 1
    return None


def _ended(
    ledger: _SiteLedger, decision: site_events.SiteDecision, event: site_events.ClaimClosed | site_events.ClaimDenied
) -> Wrong | None:
    id = (event.agent_id, event.trigger_id)
    closed = ledger.claims.pop(id, None)
    if closed is None or closed.n != event.n:
        return "I4", f"claim {event.n} of {id} ended, but it did not stand"
    if closed.granted_seq is None:
        ledger.waiting.remove((closed.key, closed))
        ledger.blockers.pop(id, None)
    command = decision.command
    if isinstance(event, site_events.ClaimDenied):
        if not isinstance(command, Claim) or not command.ask or command.n != event.n or closed.granted_seq is not None:
            return "B2", f"claim {event.n} of {id} was denied, but it is no ask that waits"
        return None
    if not isinstance(command, Claim | Release) or (command.agent_id, command.trigger_id) != id:
        may_close = False
    elif isinstance(command, Release):
        may_close = command.n == event.n and bool(command.started) == event.started
    else:  # a newer claim of the same trigger: the release of this one was given up
        may_close = command.n > event.n and event.started == (closed.granted_seq is not None)
    if not may_close:
        return "I4", f"claim {event.n} of {id} was closed by something else than its release"
    if closed.granted_seq is None:
        return (
            ("I4", f"claim {event.n} of {id} ended with an attempt, but was never granted") if event.started else None
        )
    ledger.give_back(closed)
    for name in closed.gates if not event.started else ():
        gate = ledger.gates.get(name)
        if gate is not None and gate.budget is not None and (closed.granted_seq or 0) >= gate.budget_seq:
            gate.budget += 1
    return None


def _order(site: Site, claim: ClaimRow, event: site_events.ClaimGranted) -> Wrong | None:
    first = site.next_grantable()
    if first is not claim:
        other = "nobody" if first is None else f"{first.id} first"
        return "I6", f"claim {event.n} of {claim.id} was granted, it should have been {other}"
    place = place_of(claim)
    oldest = site.forest.oldest_waiting(place) if place is not None else None
    passed = site.by_key[oldest] if oldest is not None and oldest < key_of(claim) else (None, None)
    if passed != (event.passed_agent_id, event.passed_trigger_id):
        return "D4", f"claim {event.n} of {claim.id} passed {passed}, which was not counted"
    return None


def _stalls(site: Site, decision: site_events.SiteDecision) -> Wrong | None:
    """Whether somebody waits who could be granted, after a decision that left nothing over (I7)."""
    waiting = site.next_grantable()
    if waiting is None or len(decision.events) >= limits.STEP_CHANGES_MAX or isinstance(decision.command, ContinueSite):
        return None
    if any(isinstance(event, site_events.WalkNoted) for event in decision.events):
        return None
    return "I7", f"claim {waiting.n} of {waiting.id} waits, but could be granted"
