"""Seeded working days of agents that share a site, decided by a real partition: what audits of the past are tried on.

Runners take as long as they are told, people answer questions and stop things, gates close. Every trigger ends by
itself in the end; nothing else happens than what is in ``driven``.
"""

import heapq
import random
from itertools import count
from typing import Any, Final

from streams.rules.order import SECOND
from tests.driving import Driven

AGENTS: Final = ("ann", "bob", "cid", "dot", "eve")


class Office:
    """``simple``: no retries, questions, stops, sites or gates: agents with a limit, and work that takes its time."""

    def __init__(self, seed: int, simple: bool = False, limit: int = 2, verified: bool = True) -> None:
        self.random = random.Random(seed)
        self.simple = simple
        self.driven = Driven(default_limit=limit, pool=3, verified=verified)
        self._to_come: list[tuple[int, int, str, dict[str, Any]]] = []
        self._numbers = count()
        self._dispatches = 0

    def work(self, triggers: int, seconds: float, mean_seconds: float = 20.0) -> "Office":
        """So many triggers arrive in that time, each of which takes ``mean_seconds`` on average; then all are done."""
        start = self.driven.now
        for number in range(triggers):
            at = start + round(self.random.random() * seconds * SECOND)
            self._plan(at, "trigger", {"id": f"t{number}-{start // SECOND % 100_000}", "mean": mean_seconds})
        if not self.simple:
            for _ in range(triggers // 25):
                at = start + round(self.random.random() * seconds * SECOND)
                self._plan(at, self.random.choice(["gate", "configure", "stop", "pause"]), {})
        while self._to_come:
            at, _, what, about = heapq.heappop(self._to_come)
            self.driven.advance_to(at)
            getattr(self, f"_{what}")(about)
            self._start_runners()
        return self

    def _plan(self, at: int, what: str, about: dict[str, Any]) -> None:
        heapq.heappush(self._to_come, (at, next(self._numbers), what, about))

    def _trigger(self, about: dict[str, Any]) -> None:
        chance = self.random
        fields: dict[str, Any] = {"organization_id": chance.choice(["red", "blue"])}
        if not self.simple:
            if chance.random() < 0.5:
                fields["worker"] = True
            if chance.random() < 0.3:
                fields |= {"environment_id": "e", "folder": chance.choice(["/a", "/a/b", "/c"])}
            if chance.random() < 0.3:
                fields["conversation_id"] = f"c{chance.randrange(3)}"
            if chance.random() < 0.2:
                fields |= {"interactive": True, "on_busy": chance.choice(["queue", "ask", "force", "interrupt"])}
            if chance.random() < 0.1:
                fields["heartbeat_seconds"] = 600
        self.driven.trigger(about["id"], chance.choice(AGENTS), **fields)

    def _start_runners(self) -> None:
        """Every new dispatch gets its runner, which will report after a while."""
        while self._dispatches < len(self.driven.dispatches):
            record = self.driven.dispatches[self._dispatches]
            self._dispatches += 1
            if record["type"] == "dispatch":
                seconds = self.random.expovariate(1 / 20.0)
                status = "finished"
                if not self.simple:
                    status = self.random.choices(["finished", "failed", "paused"], [80, 12, 8])[0]
                self._plan(self.driven.now + round(seconds * SECOND) + 1, "status", {**record, "status": status})
            elif record["type"] == "stop_requested":
                self._plan(self.driven.now + 2 * SECOND, "status", {**record, "status": "stopped"})

    def _status(self, about: dict[str, Any]) -> None:
        agent = self.driven.agent(about["agent_id"])
        if about["execution_id"] not in agent.executions:
            return
        trigger_id, agent_id = about["trigger_id"], about["agent_id"]
        self.driven.status(trigger_id, about["status"], agent_id, execution_id=about["execution_id"])
        if about["status"] == "paused":
            self._plan(self.driven.now + 30 * SECOND, "resume", {"agent_id": agent_id, "trigger_id": trigger_id})

    def _resume(self, about: dict[str, Any]) -> None:
        self.driven.control("resume_trigger", about["agent_id"], trigger_id=about["trigger_id"])

    def _gate(self, _: dict[str, Any]) -> None:
        self.driven.site_control("gate", scope="organization", name="red", enabled=False)
        self._plan(self.driven.now + 20 * SECOND, "open", {})

    def _open(self, _: dict[str, Any]) -> None:
        self.driven.site_control("gate", scope="organization", name="red", enabled=True)

    def _configure(self, _: dict[str, Any]) -> None:
        self.driven.configure(self.random.choice(AGENTS), parallelism_limit=self.random.choice([1, 2, 3]))

    def _pause(self, _: dict[str, Any]) -> None:
        agent_id = self.random.choice(AGENTS)
        if agent_id in self.driven.partition.agents:
            self.driven.control("pause", agent_id)
            self._plan(self.driven.now + 15 * SECOND, "go_on", {"agent_id": agent_id})

    def _go_on(self, about: dict[str, Any]) -> None:
        self.driven.control("resume", about["agent_id"])

    def _stop(self, _: dict[str, Any]) -> None:
        live = [(a, id) for a, agent in self.driven.partition.agents.items() for id in agent.triggers]
        if live:
            agent_id, trigger_id = self.random.choice(live)
            self.driven.stop(trigger_id, agent_id, requested_by="ann")
