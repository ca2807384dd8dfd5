"""Checks the committed log of a simulated cluster, by counting from dispatches and decisions alone."""

import json
from collections import Counter
from typing import Any

from streams import DECISIONS, SITE_DECISIONS
from streams.audit.verify import Verifier
from streams.audit.verify_sites import SiteVerifier
from streams.rules.folders import segments
from tests.simulation.cluster import Cluster

ENDS = {"finished", "attempt_failed", "lease_expired", "paused", "stopped"}
FINAL = {"finished", "stopped", "expired", "refused", "replied"}


def overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    if one["environment_id"] is None or one["environment_id"] != other["environment_id"]:
        return False
    mine, theirs = segments(one["folder"] or "/"), segments(other["folder"] or "/")
    return mine[: len(theirs)] == theirs[: len(mine)]


class Checker:
    """Follows the log as it is committed. Whoever changes the cluster calls ``check`` after each commit."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.verifiers = [Verifier() for _ in range(cluster.partitions)]
        self.site_verifiers = [SiteVerifier() for _ in range(cluster.partitions)]
        self.read = [0] * cluster.partitions
        self.read_sites = [0] * cluster.partitions
        self.triggers: dict[tuple[str, str], dict[str, Any]] = {}
        self.state: dict[tuple[str, str], str] = {}
        self.running: dict[str, tuple[str, str]] = {}
        self.capacity: dict[str, int] = {}
        self.pool: Counter[str] = Counter()
        self.granted: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.claims: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.counts: Counter[str] = Counter()

    def check(self) -> None:
        for number in range(self.cluster.partitions):
            records = self.cluster.log[DECISIONS.name, number]
            for record in records[self.read[number] :]:
                violation = self.verifiers[number].check(record.value or b"", record.offset)
                assert violation is None, violation
                self._decision(json.loads(record.value or b""))
            self.read[number] = len(records)
            records = self.cluster.log[SITE_DECISIONS.name, number]
            for record in records[self.read_sites[number] :]:
                violation = self.site_verifiers[number].check(record.value or b"", record.offset)
                assert violation is None, violation
                self._site_decision(json.loads(record.value or b""))
            self.read_sites[number] = len(records)

    def _decision(self, decision: dict[str, Any]) -> None:
        agent_id = decision["agent_id"]
        assert len(decision.get("events", ())) <= 160
        for event in decision.get("events", ()):
            self.counts[event["type"]] += 1
            if "trigger_id" not in event or event["type"] in ("watched", "told"):
                continue
            id = (agent_id, event["trigger_id"])
            match event["type"]:
                case "accepted":
                    assert id not in self.state, f"{id} was accepted twice"
                    self.state[id] = "waiting"
                    command = decision["command"]
                    self.triggers[id] = {
                        "environment_id": event.get("environment_id"),
                        "folder": event.get("folder"),
                        "worker": bool(command.get("worker")),
                    }
                case "dispatched":
                    assert self.state[id] == "waiting", (id, self.state[id])
                    self._start(id, event["execution_id"])
                case "degraded":
                    self.triggers[id]["environment_id"] = None
                case kind if kind in ENDS | FINAL:
                    if event.get("execution_id"):
                        assert self.running.pop(event["execution_id"]) == id
                    assert self.state[id] not in FINAL, f"{id} ended twice"
                    self.state[id] = self._state_after(event)
                case "resumed":
                    assert self.state[id] == "paused"
                    self.state[id] = "waiting"

    @staticmethod
    def _state_after(event: dict[str, Any]) -> str:
        if event["type"] in ("attempt_failed", "lease_expired"):
            if "retry_at" in event:
                return "waiting"
            return "stopped" if event.get("final") == "stopped" else "finished"
        return "finished" if event["type"] == "replied" else str(event["type"])

    def _start(self, id: tuple[str, str], execution_id: str) -> None:
        self.state[id] = "running"
        mine = self.triggers[id]
        for other in self.running.values():
            assert not overlap(mine, self.triggers[other]), f"I2: {id} and {other} run in overlapping folders"
        self.running[execution_id] = id

    def _site_decision(self, decision: dict[str, Any]) -> None:
        site = decision["site"]
        for event in decision.get("events", ()):
            self.counts[event["type"]] += 1
            if event["type"] == "site_configured":
                self.capacity[site] = event["capacity"]
            if "trigger_id" not in event:
                continue
            id = (site, event["agent_id"], event["trigger_id"])
            match event["type"]:
                case "claim_opened":
                    command = decision["command"]
                    self.claims[id] = {
                        "environment_id": command.get("environment_id"),
                        "folder": event.get("path"),
                        "worker": command["worker"],
                    }
                case "claim_degraded":
                    self.claims[id]["environment_id"] = None
                case "claim_granted":
                    claim = self.claims[id]
                    for other in self.granted.values():
                        assert not overlap(claim, other), "I2: overlapping folders were granted"
                    self.granted[id] = claim
                    self.pool[site] += claim["worker"]
                    assert self.pool[site] <= self.capacity[site] or not claim["worker"], "I3: more than the pool has"
                case "claim_closed" | "claim_denied":
                    self.claims.pop(id)
                    if (claim_given := self.granted.pop(id, None)) is not None:
                        self.pool[site] -= claim_given["worker"]

    def unfinished(self) -> list[tuple[tuple[str, str], str]]:
        return [(id, state) for id, state in self.state.items() if state not in FINAL]
