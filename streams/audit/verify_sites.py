"""Check the log of site decisions: that no folder was given twice and no pool held more than it has.

Counted from the events alone, with none of the indexes that the decider uses:

- the chain, as for agents (verify.py);
- I2: at each grant, no granted claim of the site has an overlapping folder of the same environment;
- I3: at each grant that takes a worker, fewer than ``capacity`` were taken;
- I4: claims open once, are granted at most once, and end once.
"""

import hashlib
from collections.abc import Mapping

from pydantic import ValidationError

from streams.audit.verify import Head, Violation
from streams.rules import site_events
from streams.rules.folders import Segments, overlap, segments
from streams.rules.site_messages import Claim


class _OpenClaim:
    __slots__ = ("environment_id", "is_granted", "n", "segments", "worker")

    def __init__(self, command: Claim, path: str | None) -> None:
        self.n = command.n
        self.worker = bool(command.worker)
        self.environment_id = command.environment_id
        self.segments: Segments | None = None if path is None else segments(path)
        self.is_granted = False

    def overlaps(self, other: "_OpenClaim") -> bool:
        if self.segments is None or other.segments is None or self.environment_id != other.environment_id:
            return False
        return overlap(self.segments, other.segments)


class _SiteLedger:
    __slots__ = ("capacity", "claims", "granted", "seq", "sha256", "workers")

    def __init__(self) -> None:
        self.seq = 0
        self.sha256: str | None = None
        self.capacity = 0
        self.workers = 0
        self.claims: dict[tuple[str, str], _OpenClaim] = {}
        self.granted: dict[tuple[str, str], _OpenClaim] = {}


class SiteVerifier:
    """Feed one partition's site decisions in order to ``check``; then ask ``finish``."""

    def __init__(self, heads: Mapping[str, Head] | None = None) -> None:
        self.decisions = 0
        self._ledgers: dict[str, _SiteLedger] = {}
        self._heads = dict(heads or {})

    def check(self, value: bytes, offset: int) -> Violation | None:
        """The violation that this decision is, or None."""
        try:
            decision = site_events.read_site_decision(value)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            return Violation(offset, "", 0, "unreadable", f"{first['loc']}: {first['msg']}")
        ledger = self._ledgers.setdefault(decision.site, _SiteLedger())
        sha256 = hashlib.sha256(value).hexdigest()
        wrong = self._chain(ledger, decision, sha256)
        for event in decision.events:
            wrong = wrong or _fold(ledger, decision, event)
        if wrong is not None:
            return Violation(offset, decision.site, decision.seq, *wrong)
        ledger.seq, ledger.sha256 = decision.seq, sha256
        self.decisions += 1
        return None

    def finish(self) -> Violation | None:
        """Whether decisions are missing at the end that the stored heads know of."""
        for site, head in sorted(self._heads.items()):
            seq = self._ledgers[site].seq if site in self._ledgers else 0
            if seq < head.seq:
                detail = f"the stored head is decision {head.seq}, the log ends at {seq}"
                return Violation(None, site, seq, "tail", detail)
        return None

    def _chain(self, ledger: _SiteLedger, decision: site_events.SiteDecision, sha256: str) -> tuple[str, str] | None:
        if decision.seq != ledger.seq + 1:
            return "seq", f"decision {ledger.seq + 1} was expected, {decision.seq} was found"
        if decision.prev != ledger.sha256:
            return "chain", f"prev is {decision.prev}, the decision before has the digest {ledger.sha256}"
        head = self._heads.get(decision.site)
        if head is not None and head.seq == decision.seq and head.sha256 != sha256:
            return "head", f"its digest is {sha256}, the stored head says {head.sha256}"
        return None


def _fold(
    ledger: _SiteLedger, decision: site_events.SiteDecision, event: site_events.SiteEvent
) -> tuple[str, str] | None:
    match event:
        case site_events.SiteConfigured():
            ledger.capacity = event.capacity
        case site_events.ClaimOpened():
            id = (event.agent_id, event.trigger_id)
            if id in ledger.claims or not isinstance(decision.command, Claim):
                return "I4", f"claim {event.n} of {id} was opened twice"
            ledger.claims[id] = _OpenClaim(decision.command, event.path)
        case site_events.ClaimGranted():
            return _granted(ledger, event)
        case site_events.ClaimDegraded():
            claim = ledger.claims.get((event.agent_id, event.trigger_id))
            if claim is None or claim.is_granted:
                return "I4", f"claim {event.n} of {event.trigger_id} can't lose its folder now"
            claim.segments = None
        case site_events.ClaimClosed() | site_events.ClaimDenied():
            id = (event.agent_id, event.trigger_id)
            closed = ledger.claims.pop(id, None)
            if closed is None or closed.n != event.n:
                return "I4", f"claim {event.n} of {id} ended, but it did not stand"
            if ledger.granted.pop(id, None) is not None:
                ledger.workers -= closed.worker
        case _:
            pass  # gates and deletions bind what is granted later; recalls change no claim
    return None


def _granted(ledger: _SiteLedger, event: site_events.ClaimGranted) -> tuple[str, str] | None:
    id = (event.agent_id, event.trigger_id)
    claim = ledger.claims.get(id)
    if claim is None or claim.n != event.n or claim.is_granted:
        return "I4", f"claim {event.n} of {id} was granted, but it did not wait"
    for other_id, other in ledger.granted.items():
        if claim.overlaps(other):
            return "I2", f"the folder of {id} was granted while {other_id} held an overlapping one"
    if claim.worker and ledger.workers >= ledger.capacity:
        return "I3", f"{ledger.workers} workers were taken, the pool has {ledger.capacity}"
    claim.is_granted = True
    ledger.granted[id] = claim
    ledger.workers += claim.worker
    return None
