"""The state of one site: its rows, and the indexes derived from them.

A waiting claim is *shown* while every gate before it is open: only shown claims are looked at when something is given
out. Those behind a closed gate are parked: they lie in no index but those of their gates. Opening and closing a gate
walks over its claims in bounded steps; nothing is granted in between.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Literal, NamedTuple

from sortedcontainers import SortedList

from streams.rules import limits
from streams.rules.agent.rows import RememberedRow
from streams.rules.folders import overlap, segments
from streams.rules.site.forest import ClaimKey, Forest, Place
from streams.rules.site.rows import ClaimId, ClaimRow, DeletionRow, GateRow, GateScope, SiteRow
from streams.rules.verdicts import WaitReason

GateId = tuple[GateScope, str]
SiteRowKind = Literal["site", "gate", "deletion", "claim", "remembered"]


class SiteRowRef(NamedTuple):
    """Which row of the site changed."""

    kind: SiteRowKind
    id: tuple[str, ...] = ()


class Site:
    """One site's rows and indexes. Only evolve.py and the loading functions change it."""

    __slots__ = (
        "all_claims",
        "at_gate",
        "by_key",
        "changed",
        "claims",
        "deletions",
        "folderless",
        "forest",
        "gates",
        "granted",
        "pool_used",
        "remembered",
        "row",
        "shown",
        "site_id",
    )

    def __init__(self, site_id: str) -> None:
        self.site_id = site_id
        self.row = SiteRow()
        self.gates: dict[GateId, GateRow] = {}
        self.deletions: dict[tuple[str, str], DeletionRow] = {}
        """By (environment, compared path); the path "" is the whole environment."""
        self.remembered: dict[str, RememberedRow] = {}
        """Ids of controls, oldest first."""
        self.claims: dict[ClaimId, ClaimRow] = {}
        self.by_key: dict[ClaimKey, ClaimId] = {}
        self.all_claims: SortedList[ClaimId] = SortedList()
        self.at_gate: dict[GateId, SortedList[ClaimId]] = {}
        self.shown: set[ClaimId] = set()
        self.granted: SortedList[ClaimKey] = SortedList()
        self.forest = Forest()
        self.folderless: tuple[SortedList[ClaimKey], SortedList[ClaimKey]] = (SortedList(), SortedList())
        """Shown claims without a folder: without and with a worker."""
        self.pool_used = 0
        self.changed: dict[SiteRowRef, None] = {}

    # What the decider asks

    def gate(self, gate: GateId) -> GateRow:
        return self.gates.get(gate, _OPEN)

    def is_open(self, claim: ClaimRow) -> bool:
        """Whether every gate before the claim is open."""
        return self.row.created and not self.row.paused and all(self.gate(gate).is_open for gate in claim.gates)

    def recalls(self, walk: tuple[str, ...]) -> bool:
        """Whether a walk takes back what was granted: somebody has closed the gate that it is about.

        A budget that is used up takes nothing back: it was used up by those very grants.
        """
        if walk[0] == "site":
            return self.row.paused
        return not self.gate(("organization" if walk[1] == "organization" else "department", walk[2])).enabled

    def next_grantable(self) -> ClaimRow | None:
        """The oldest shown claim that folders and pool have room for."""
        kinds = (False, True) if self.pool_used < self.row.capacity else (False,)
        keys = [
            key for kind in kinds for key in (self.forest.best(kind), _first(self.folderless[kind])) if key is not None
        ]
        return self.claims[self.by_key[min(keys)]] if keys else None

    def why_waiting(self, claim: ClaimRow) -> WaitReason:
        """Why a claim that is not granted waits, in order of precedence (B3)."""
        if not self.row.created:
            return "site_unknown"
        if self.row.paused:
            return "site_paused"
        gates = [(scope, self.gate((scope, name))) for scope, name in claim.gates]
        for scope, gate in gates:
            if not gate.enabled:
                return "organization_disabled" if scope == "organization" else "department_disabled"
        if any(not gate.is_open for _, gate in gates):
            return "run_budget_used_up"
        place = place_of(claim)
        if place is not None and self.forest.is_busy(place, key_of(claim)):
            return "agent_environment_folder_busy"
        return "site_workers_busy"

    def holders(self, claim: ClaimRow, reason: WaitReason) -> tuple[list[str], int]:
        """Ids of granted triggers that hold what the claim waits for, oldest first and bounded, and their number.

        Nobody holds what is behind a gate.
        """
        place = place_of(claim)
        granted = (self.claims[self.by_key[key]] for key in self.granted)
        if reason == "site_workers_busy":
            found = [other.trigger_id for other in granted if other.worker]
        elif reason == "agent_environment_folder_busy" and place is not None:
            found = [other.trigger_id for other in granted if _overlaps(place, other)]
        else:
            found = []
        return found[: limits.HOLDERS_MAX], len(found)

    def walk(self, item: tuple[str, ...], after: tuple[str, str], count: int) -> Iterator[ClaimRow]:
        """Up to ``count`` claims that a walk has still to see, in order."""
        if item[0] == "gate":
            scope: GateScope = "organization" if item[1] == "organization" else "department"
            ids = self.at_gate.get((scope, item[2]))
        else:
            ids = self.all_claims
        if ids is not None:
            start = ids.bisect_right(ClaimId(*after))
            yield from [self.claims[id] for id in islice(ids.islice(start), count)]

    def is_deleted(self, claim: ClaimRow) -> bool:
        """Whether the claim's folder was deleted after its trigger was accepted (D5)."""
        if claim.environment_id is None or claim.path is None:
            return False
        parts = segments(claim.path)
        paths = ["", *("/" + "/".join(parts[:depth]) for depth in range(len(parts) + 1))]
        found = (self.deletions.get((claim.environment_id, path)) for path in paths)
        return any(one is not None and claim.accepted_at <= one.deleted_at for one in found)

    # Index maintenance

    def enter(self, claim: ClaimRow) -> None:
        """A claim is there, waiting or (loaded) granted."""
        key = key_of(claim)
        self.claims[claim.id] = claim
        self.by_key[key] = claim.id
        self.all_claims.add(claim.id)
        for gate in claim.gates:
            self.at_gate.setdefault(gate, SortedList()).add(claim.id)
        if claim.granted:
            self.take(claim)
        elif self.is_open(claim):
            self.show(claim)

    def leave(self, claim: ClaimRow) -> None:
        """The claim is gone."""
        if claim.granted:
            self.give_back(claim)
        else:
            self.hide(claim)
        del self.claims[claim.id]
        del self.by_key[key_of(claim)]
        self.all_claims.remove(claim.id)
        for gate in claim.gates:
            ids = self.at_gate[gate]
            ids.remove(claim.id)
            if not ids:
                del self.at_gate[gate]

    def show(self, claim: ClaimRow) -> None:
        if claim.id in self.shown:
            return
        self.shown.add(claim.id)
        place = place_of(claim)
        if place is None:
            self.folderless[claim.worker].add(key_of(claim))
        else:
            self.forest.wait(place, key_of(claim), claim.worker, claim.passed >= limits.CLAIM_PASSES_MAX)

    def hide(self, claim: ClaimRow) -> None:
        if claim.id not in self.shown:
            return
        self.shown.remove(claim.id)
        place = place_of(claim)
        if place is None:
            self.folderless[claim.worker].remove(key_of(claim))
        else:
            self.forest.leave(place, key_of(claim), claim.worker, claim.passed >= limits.CLAIM_PASSES_MAX)

    def take(self, claim: ClaimRow) -> None:
        self.granted.add(key_of(claim))
        self.pool_used += claim.worker
        place = place_of(claim)
        if place is not None:
            self.forest.hold(place)

    def give_back(self, claim: ClaimRow) -> None:
        self.granted.remove(key_of(claim))
        self.pool_used -= claim.worker
        place = place_of(claim)
        if place is not None:
            self.forest.free(place)

    def touch(self, claim: ClaimRow) -> None:
        self.changed[SiteRowRef("claim", claim.id)] = None


_OPEN = GateRow()


def key_of(claim: ClaimRow) -> ClaimKey:
    return ClaimKey(claim.available_at, claim.created_at, claim.trigger_id.encode(), claim.agent_id.encode())


def place_of(claim: ClaimRow) -> Place | None:
    if claim.environment_id is None or claim.path is None:
        return None
    return Place(claim.environment_id, segments(claim.path))


def _overlaps(place: Place, claim: ClaimRow) -> bool:
    other = place_of(claim)
    if other is None or other.environment_id != place.environment_id:
        return False
    return overlap(place.segments, other.segments)


def _first(keys: "SortedList[ClaimKey]") -> ClaimKey | None:
    return keys[0] if keys else None
