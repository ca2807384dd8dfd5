"""What must hold of one site, counted from its decisions alone: I2, I3, I5, I7, I11 and who is granted next.

A list of claims, scanned for every question; nothing is asked of the indexes that the rules use.
"""

from collections import Counter
from typing import Any

from streams.rules import limits
from tests.model.plain_site import B, PlainClaim, PlainGate
from tests.model.work import instant

Json = dict[str, Any]
ClaimId = tuple[str, str]


class SiteBook:
    """One site."""

    def __init__(self) -> None:
        self.claims: dict[ClaimId, PlainClaim] = {}
        self.gates: dict[tuple[str, str], PlainGate] = {}
        self.is_known = False
        self.is_paused = False
        self.capacity = 0
        self.workers = 0
        self.older: dict[ClaimId, set[tuple[str, str, int]]] = {}
        """By waiting claim: the older ones of its environment that were seen beside it."""
        self.overtaken: Counter[ClaimId] = Counter()
        self.must_continue = False
        """Whether a step left something over (I7)."""
        self.passed_most = 0

    def read(self, decision: Json) -> None:
        command = decision["command"]
        assert not self.must_continue or command["type"] == "continue", f"I7: {command} came before what was left"
        self.must_continue = False
        said = sum(event["type"] in ("claim_granted", "claim_recalled") for event in decision.get("events", ()))
        assert said <= limits.STEP_CHANGES_MAX, "I7: a step grants and recalls a bounded number"
        for event in decision.get("events", ()):
            self._read(event, command)

    def _read(self, event: Json, command: Json) -> None:
        match event["type"]:
            case "site_configured":
                self.is_known, self.capacity = True, event["capacity"]
            case "site_paused" | "site_resumed":
                self.is_paused = event["type"] == "site_paused"
            case "gate_changed":
                self._gate((event["scope"], event["name"]), event["enabled"], event.get("run_budget"))
            case "claim_opened":
                self._open(event, command)
            case "claim_granted":
                self._grant(event)
            case "claim_degraded":
                claim = self._claim(event)
                assert not claim.granted, "D5: what was granted keeps its folder"
                claim.path, claim.passed = None, 0
            case "claim_recalled":
                claim = self._claim(event)
                gates = [self.gates.get(gate, PlainGate()) for gate in claim.gates]
                assert claim.granted and (self.is_paused or not all(gate.enabled for gate in gates))
            case "claim_closed" | "claim_denied":
                self._close(event, started=bool(event.get("started")))

    def _claim(self, event: Json) -> PlainClaim:
        claim = self.claims[event["agent_id"], event["trigger_id"]]
        assert claim.n == event["n"]
        return claim

    def _gate(self, id: tuple[str, str], enabled: bool, budget: int | None) -> None:
        gate = self.gates.setdefault(id, PlainGate())
        if budget != gate.budget:
            gate.budget, gate.given = budget, []
        gate.enabled = enabled

    def _open(self, event: Json, command: Json) -> None:
        id = (event["agent_id"], event["trigger_id"])
        assert id not in self.claims, "a trigger has one claim at a site"
        named = (("organization", command.get("organization_id")), ("department", command.get("department_id")))
        path = event.get("path")
        claim = PlainClaim(
            id[0],
            id[1],
            event["n"],
            (
                instant(command["key"]["available_at"]) or 0,
                instant(command["key"]["created_at"]) or 0,
                id[1].encode(),
                id[0].encode(),
            ),
            instant(command["accepted_at"]) or 0,
            bool(command["worker"]),
            command.get("environment_id"),
            None if path is None else [part for part in path.split("/") if part],
            [(scope, name) for scope, name in named if name is not None],
        )
        self.older[id] = set()
        for other_id, other in self.claims.items():
            if not other.granted and other.environment == claim.environment is not None:
                if other.key < claim.key:
                    self.older[id].add((*other_id, other.n))
                else:
                    self.older[other_id].add((*id, claim.n))
        self.claims[id] = claim

    def is_open(self, claim: PlainClaim) -> bool:
        gates = [self.gates[gate] for gate in claim.gates if gate in self.gates]
        return self.is_known and not self.is_paused and all(gate.enabled and gate.budget != 0 for gate in gates)

    def may_start(self, claim: PlainClaim) -> bool:
        if claim.granted or not self.is_open(claim) or (claim.worker and self.workers >= self.capacity):
            return False
        if claim.path is None:
            return True
        for other in self.claims.values():
            if other is not claim and other.environment == claim.environment and claim.overlaps(other):
                blocks = other.key < claim.key and other.passed >= B and self.is_open(other)
                if other.granted or blocks:
                    return False
        return True

    def _grant(self, event: Json) -> None:
        claim = self._claim(event)
        assert not claim.worker or self.workers < self.capacity, "I3: more than the pool has"
        for other in self.claims.values():
            assert not (other.granted and claim.overlaps(other)), "I2: overlapping folders were granted"
        assert self.may_start(claim), "it was granted while a gate, or a claim passed too often, stood in its way"
        older = [other for other in self.claims.values() if other.key < claim.key and not other.granted]
        assert not any(self.may_start(other) for other in older), "S6: the oldest that can be granted comes first"
        passed = [other for other in older if self.is_open(other) and claim.overlaps(other)]
        oldest = min(passed, key=lambda other: other.key, default=None)
        named = (event.get("passed_agent_id"), event.get("passed_trigger_id"))
        assert named == ((oldest.agent, oldest.trigger) if oldest else (None, None)), "I5: the oldest passed one counts"
        if oldest is not None:
            oldest.passed += 1
            self.passed_most = max(self.passed_most, oldest.passed)
            assert oldest.passed <= limits.CLAIM_PASSES_MAX, "I5: a claim was passed too often while it was the oldest"
        for other in passed:
            id = (other.agent, other.trigger)
            self.overtaken[id] += 1
            assert self.overtaken[id] <= limits.CLAIM_PASSES_MAX * (1 + len(self.older[id])), f"I11: {id} was overtaken"
        claim.granted = True
        self.workers += claim.worker
        for gate in claim.gates:
            if gate in self.gates and (budget := self.gates[gate].budget) is not None:
                self.gates[gate].budget = budget - 1
                self.gates[gate].given.append(claim)

    def _close(self, event: Json, started: bool) -> None:
        claim = self._claim(event)
        id = (claim.agent, claim.trigger)
        del self.claims[id], self.older[id]
        self.overtaken.pop(id, None)
        if claim.granted:
            self.workers -= claim.worker
            for gate in claim.gates:
                if not started and gate in self.gates and claim in self.gates[gate].given:
                    self.gates[gate].budget = (self.gates[gate].budget or 0) + 1

    def check_given_out(self) -> None:
        """Nothing is left over: who can be granted is."""
        for claim in self.claims.values():
            assert not self.may_start(claim), f"I5: {claim} waits, and nothing is in its way"
