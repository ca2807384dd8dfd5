"""The site's decider once more, as plainly as the protocol says it: a list of claims, scanned in order at every step.

No index, no tree, no bound on a step. It takes the same commands and must give the same answers and end in the same
state as the real one, once that has worked off what it noted.
"""

from dataclasses import dataclass, field

from streams.rules.site.rows import GateScope
from streams.rules.site.state import Site, place_of
from streams.rules.site_messages import (
    Claim,
    ConfigureSite,
    DeleteEnvironment,
    DeleteFolder,
    Gate,
    PauseSite,
    Release,
    ResumeSite,
    SiteControl,
)

B = 5
Answer = tuple[str, str, str, int]
"""(kind, agent, trigger, n)"""


def parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


@dataclass
class PlainClaim:
    agent: str
    trigger: str
    n: int
    key: tuple[int, int, bytes, bytes]
    accepted: int
    worker: bool
    environment: str | None
    path: list[str] | None
    gates: list[tuple[str, str]]
    granted: bool = False
    passed: int = 0

    def overlaps(self, other: "PlainClaim") -> bool:
        if self.path is None or other.path is None or self.environment != other.environment:
            return False
        return all(mine == theirs for mine, theirs in zip(self.path, other.path, strict=False))

    def within(self, path: list[str]) -> bool:
        return self.path is not None and self.path[: len(path)] == path


@dataclass
class PlainGate:
    enabled: bool = True
    budget: int | None = None
    given: list[PlainClaim] = field(default_factory=list)
    """What took from this budget."""


@dataclass
class PlainSite:
    capacity: int
    paused: bool = False
    is_known: bool = True
    """Claims at a site that nobody has configured wait."""
    claims: list[PlainClaim] = field(default_factory=list)
    gates: dict[tuple[str, str], PlainGate] = field(default_factory=dict)
    deleted: list[tuple[str, list[str], int]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def say(self, kind: str, claim: PlainClaim) -> None:
        self.answers.append((kind, claim.agent, claim.trigger, claim.n))

    def control(self, command: SiteControl, at: int) -> None:
        match command:
            case Gate():
                self.set_gate(command)
            case PauseSite() | ResumeSite():
                self.pause(isinstance(command, PauseSite))
            case ConfigureSite(capacity=int() as capacity):
                self.set_capacity(capacity)
            case DeleteFolder() | DeleteEnvironment():
                self.delete(command, at)
            case _:
                raise AssertionError(command)

    def claim(self, command: Claim) -> None:
        key = (command.key.available_at, command.key.created_at, command.key.id.encode(), command.agent_id.encode())
        named = (("organization", command.organization_id), ("department", command.department_id))
        claim = PlainClaim(
            command.agent_id,
            command.trigger_id,
            command.n,
            key,
            command.accepted_at,
            bool(command.worker),
            command.environment_id,
            parts(command.path or "/") if command.environment_id is not None else None,
            [(scope, name) for scope, name in named if name is not None],
        )
        self.claims.append(claim)
        self.lose_folders([claim])
        self.grant()
        if not claim.granted:
            self.say("denied" if command.ask else "waiting", claim)
            if command.ask:
                self.claims.remove(claim)

    def release(self, command: Release) -> None:
        for claim in list(self.claims):
            if (claim.agent, claim.trigger, claim.n) == (command.agent_id, command.trigger_id, command.n):
                self.claims.remove(claim)
                if claim.granted and not command.started:
                    for gate in claim.gates:
                        if gate in self.gates and claim in self.gates[gate].given:
                            self.gates[gate].budget = (self.gates[gate].budget or 0) + 1
        self.grant()

    def pause(self, paused: bool) -> None:
        if self.paused != paused and self.is_known:
            self.paused = paused
            if paused:
                self.recall(self.claims)
            self.grant()

    def set_capacity(self, capacity: int) -> None:
        self.capacity, self.is_known = capacity, True
        self.grant()

    def set_gate(self, command: Gate) -> None:
        gate = self.gates.setdefault((command.scope, command.name), PlainGate())
        was_enabled = gate.enabled
        gate.enabled = gate.enabled if command.enabled is None else command.enabled
        if "run_budget" in command.model_fields_set and command.run_budget != gate.budget:
            gate.budget, gate.given = command.run_budget, []
        if was_enabled and not gate.enabled:
            self.recall([claim for claim in self.claims if (command.scope, command.name) in claim.gates])
        self.grant()

    def recall(self, claims: list[PlainClaim]) -> None:
        """Somebody has closed what they stand behind; a budget that was used up recalls nobody."""
        for claim in sorted(claims, key=lambda claim: (claim.agent, claim.trigger)):
            if claim.granted:
                self.say("recall", claim)

    def delete(self, command: DeleteFolder | DeleteEnvironment, at: int) -> None:
        path = parts(command.path) if isinstance(command, DeleteFolder) else []
        self.deleted.append((command.environment_id, path, at))
        self.lose_folders(sorted(self.claims, key=lambda claim: (claim.agent, claim.trigger)))
        self.grant()

    def lose_folders(self, claims: list[PlainClaim]) -> None:
        for claim in claims:
            gone = any(
                claim.environment == environment and claim.within(path) and claim.accepted <= at
                for environment, path, at in self.deleted
            )
            if gone and not claim.granted:
                claim.path, claim.passed = None, 0
                self.say("degraded", claim)

    def same_as(self, real: Site) -> None:
        """The real one has the same claims and gates, and nothing waits that could start (I5)."""
        theirs = {}
        for claim in real.claims.values():
            at = place_of(claim)
            theirs[claim.id] = (claim.n, claim.granted, claim.passed, None if at is None else [*at.segments])
        ours = {(one.agent, one.trigger): (one.n, one.granted, one.passed, one.path) for one in self.claims}
        assert theirs == ours
        assert (real.row.paused, real.row.created, real.row.capacity) == (self.paused, self.is_known, self.capacity)
        for id, gate in self.gates.items():
            scope: GateScope = "organization" if id[0] == "organization" else "department"
            other = real.gate((scope, id[1]))
            assert (other.enabled, other.run_budget) == (gate.enabled, gate.budget), id
        for one in self.claims:
            assert one.granted or not self.may_start(one), "I5"
            assert one.passed <= B

    def is_gated(self, claim: PlainClaim) -> bool:
        gates = [self.gates[gate] for gate in claim.gates if gate in self.gates]
        return self.paused or not self.is_known or any(not gate.enabled or gate.budget == 0 for gate in gates)

    def may_start(self, claim: PlainClaim) -> bool:
        if claim.granted or self.is_gated(claim):
            return False
        for other in self.claims:
            if other is claim or not claim.overlaps(other):
                continue
            blocks = other.key < claim.key and other.passed >= B and not self.is_gated(other)
            if other.granted or blocks:
                return False
        return not claim.worker or sum(other.worker for other in self.claims if other.granted) < self.capacity

    def grant(self) -> None:
        while (
            claim := next((c for c in sorted(self.claims, key=lambda c: c.key) if self.may_start(c)), None)
        ) is not None:
            passed = [
                other
                for other in sorted(self.claims, key=lambda other: other.key)
                if other.key < claim.key and not other.granted and not self.is_gated(other) and claim.overlaps(other)
            ]
            if passed:
                passed[0].passed += 1
            claim.granted = True
            for gate in claim.gates:
                if gate in self.gates and (budget := self.gates[gate].budget) is not None:
                    self.gates[gate].budget = budget - 1
                    self.gates[gate].given.append(claim)
            self.say("granted", claim)
