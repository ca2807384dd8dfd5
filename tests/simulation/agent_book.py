"""What must hold of one agent, counted from its decisions alone: I1, I4, I6 to I9 of the site protocol.

Nothing here is asked of the rules: a dictionary per trigger and a scan of the conversation for every question.
"""

from dataclasses import dataclass
from typing import Any

from streams.rules import limits
from tests.model.work import instant

Json = dict[str, Any]
ENDS_ATTEMPT = ("finished", "attempt_failed", "lease_expired", "paused", "stopped")
NOT_OF_OWN_TRIGGERS = ("watched", "unwatched", "told")
GIVEN_BACK_FOR_ROOM = ("agent_parallelism_limit_reached", "run_budget_used_up")
"""Why a grant goes back although nobody asked for that: a slot, or the budget, has gone to another trigger since."""


@dataclass
class Life:
    """A live trigger. ``claim_state``: asking, standing, held; granted while an attempt has it."""

    conversation: str
    available_at: int
    is_urgent: bool
    decide_before: int | None
    needs_site: bool
    environment: str | None
    path: list[str] | None
    state: str = "waiting"
    place: tuple[int, int] | None = None
    is_forced: bool = False
    n: int | None = None
    claim_state: str | None = None
    is_mute: bool = False
    claimed_at_change: int = 0
    """How often the agent's room had changed until then."""

    @property
    def is_ahead(self) -> bool:
        """It runs, or has or wants something at its site: one of a conversation may."""
        return self.state == "running" or self.claim_state is not None

    def overlaps(self, other: "Life") -> bool:
        if self.path is None or other.path is None or self.environment != other.environment:
            return False
        return all(mine == theirs for mine, theirs in zip(self.path, other.path, strict=False))


class AgentBook:
    """One agent. ``changes``: by trigger, what may make it send and be sent another four messages (I10)."""

    def __init__(self) -> None:
        self.lives: dict[str, Life] = {}
        self.known: set[str] = set()
        self.changes: dict[str, int] = {}
        self.limit: int | None = 1
        self.is_serial = False
        self.is_paused = False
        self.is_archived = False
        self.claims = 0
        self.attempts: dict[str, int] = {}
        self.room_changes = 0
        self.must_continue = False
        """The last decision left something over (I7)."""

    def read(self, decision: Json) -> None:
        command = decision["command"]["type"]
        assert not self.must_continue or command in ("continue", "park"), f"I7: {command} came before what was left"
        self.must_continue = False
        touched = {
            event["trigger_id"]
            for event in decision.get("events", ())
            if "trigger_id" in event and event["type"] not in NOT_OF_OWN_TRIGGERS
        }
        assert len(touched) <= limits.STEP_CHANGES_MAX + 2, "I7: a step changes a bounded number of triggers"
        at = instant(decision["at"])
        assert at is not None
        for event in decision.get("events", ()):
            self._read(event, decision["command"], at)

    def _read(self, event: Json, command: Json, at: int) -> None:
        match event["type"]:
            case "agent_created" | "configured":
                self._configure(event)
            case "agent_paused" | "agent_resumed":
                self.is_paused = event["type"] == "agent_paused"
            case "archived" | "revived":
                self.is_archived = event["type"] == "archived"
            case "accepted":
                self._accept(event, command)
            case "claimed":
                self._claim(event["trigger_id"], event["n"], at)
            case "dispatched":
                self._start(event, at)
            case kind if "trigger_id" in event and kind not in NOT_OF_OWN_TRIGGERS:
                self._change(kind, event, command, at)

    def _configure(self, event: Json) -> None:
        self.room_changes += 1
        if "parallelism_limit" in event:
            self.limit = None if event["parallelism_limit"] == "unlimited" else event["parallelism_limit"]
        if "serial" in event:
            self.is_serial = bool(event["serial"])

    def _accept(self, event: Json, command: Json) -> None:
        id = event["trigger_id"]
        assert id not in self.known, f"{id} was accepted twice"
        self.known.add(id)
        self.changes[id] = 0
        available_at = instant(event["available_at"])
        assert available_at is not None
        environment = event.get("environment_id")
        self.lives[id] = Life(
            command["conversation_id"],
            available_at,
            bool(command.get("interactive")) and command.get("on_busy") in ("ask", "force"),
            instant(command.get("decide_before")),
            bool(command.get("worker")) or environment is not None,
            environment,
            None if environment is None else [part for part in (event.get("folder") or "/").split("/") if part],
        )

    def _acts(self, id: str, life: Life, at: int) -> None:
        """It asks its site, or starts."""
        assert not (self.is_paused or self.is_archived), "I1: its agent is not held back"
        assert life.state == "waiting" and life.available_at <= at, "I1: it is available"
        assert life.place is not None, "I1: it has a place in its conversation"
        for other_id, other in self.lives.items():
            if other_id != id and other.conversation == life.conversation:
                assert not other.is_ahead, f"I6: {other_id} of the conversation of {id} is under way"
                assert other.place is None or life.place < other.place, f"I6: {other_id} comes before {id}"
        late = life.is_urgent and life.decide_before is not None and at >= life.decide_before
        assert not late, f"I9: {id} goes on after its answer was due"

    def _claim(self, id: str, n: int, at: int) -> None:
        life = self.lives[id]
        self._acts(id, life, at)
        assert n == self.claims + 1, "I8: claim numbers count per agent"
        assert life.needs_site and life.claim_state is None
        self.claims = n
        self.room_changes += 1  # a slot is kept for it
        life.n, life.claim_state, life.claimed_at_change = n, "asking", self.room_changes

    def _start(self, event: Json, at: int) -> None:
        life = self.lives[event["trigger_id"]]
        claim_state, life.claim_state = life.claim_state, None
        self._acts(event["trigger_id"], life, at)
        assert claim_state == ("held" if life.needs_site else None), f"I1: it starts with its claim {claim_state}"
        attempt = self.attempts.get(event["trigger_id"], 0) + 1
        assert event["attempt"] == attempt, "I8: attempts count"
        self.attempts[event["trigger_id"]] = attempt
        running = [other for other in self.lives.values() if other.state == "running"]
        limit = 1 if self.is_serial else self.limit
        life.is_forced = bool(event.get("forced"))
        if life.is_forced:
            assert limit is not None and len(running) >= limit, "B4: forced is what exceeds the limit"
            assert not self.is_serial and sum(other.is_forced for other in running) < limit, "I1: too many forced ones"
        else:
            assert limit is None or len(running) < limit, "I1: more than the limit"
        life.state = "running"
        life.claim_state = "granted" if life.needs_site else None
        life.is_urgent = False
        self.room_changes += 1

    def _change(self, kind: str, event: Json, command: Json, at: int) -> None:
        id = event["trigger_id"]
        life = self.lives[id]
        match kind:
            case "placed":
                life.place = (event["place"][0], event["place"][1])
            case "granted":
                assert life.claim_state in ("asking", "standing") and event["n"] == life.n
                life.claim_state, life.is_mute = "held", False
            case "claim_waiting":
                assert life.claim_state in ("asking", "standing") and event["n"] == life.n
                life.claim_state, life.is_mute = "standing", event["reason"] == "site_not_answering"
            case "returned":
                self._give_back(id, life, event, command)
            case "degraded":
                life.environment = life.path = None
            case "rescheduled" | "resumed":
                life.state, life.is_urgent = "waiting", life.is_urgent and kind == "rescheduled"
                life.available_at = instant(event["available_at"]) or 0
                self.changes[id] += 1
            case "approved" | "dependency_resolved" | "stop_requested":
                pass
            case _:
                self._end(kind, id, life, event, at)

    def _give_back(self, id: str, life: Life, event: Json, command: Json) -> None:
        assert life.claim_state is not None and event["n"] == life.n
        life.n, life.claim_state, life.is_mute = None, None, False
        if event["reason"] in GIVEN_BACK_FOR_ROOM and command["type"] != "denied":
            assert self.room_changes > life.claimed_at_change, f"I10: {id} gives back what nobody has taken from it"
        self.changes[id] += 1

    def _end(self, kind: str, id: str, life: Life, event: Json, at: int) -> None:
        """Its attempt ends, or it does."""
        assert life.claim_state is None, f"I3: {id} ends with a claim, {life.claim_state}"
        was_running, life.state = life.state == "running", kind
        assert was_running == ("execution_id" in event), f"{id} was {life.state} when it {kind}"
        life.is_forced = False
        if "retry_at" in event:
            life.state = "waiting"
            life.available_at = instant(event["retry_at"]) or 0
            assert life.available_at >= at
        elif kind != "paused":
            del self.lives[id]
