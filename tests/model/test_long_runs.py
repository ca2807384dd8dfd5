"""Long random lives of a few agents against the naive model: thousands of steps, so that rare states are reached."""

import json
import os
import random
from collections import Counter
from typing import Any

import pytest

from streams import CONTROLS, STATUSES, TRIGGERS
from tests.driving import Json, at_seconds
from tests.model.pair import Pair

AGENTS = ("A", "A", "B")
CHECKED_EVERY = 10
LIVES = int(os.environ.get("BERTH_MODEL_LIVES", "24"))
SENT_BY_USERS = (TRIGGERS.name, STATUSES.name, CONTROLS.name)
FOLDERS = ("/a", "/a/b", "/a/bc", "/a/b/c", "/", "/d")
WAYS = ("queue", "queue", "ask", "ask", "force", "force", "interrupt")


class Life:
    """One seed: what is sent and when is chosen at random, weighted so that queues grow and empty again."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.pair = Pair(self.pick(1, 2, 3, "unlimited"))
        self.ids = 0

    def step(self) -> None:
        """One thing happens."""
        what: Any = self.chance.choices(
            [
                *(self.trigger, self.word, self.stop, self.control, self.again, self.time, self.outage, self.crash),
                *(self.deliver, self.site),
            ],
            weights=[30, 40, 6, 12, 6, 14, 2, 2, 60, 9],
        )[0]
        what()

    def pick(self, *values: Any) -> Any:
        return self.chance.choice(values)

    def new_id(self, prefix: str) -> str:
        self.ids += 1
        return f"{prefix}{self.ids}"

    def seconds(self, *offsets: float) -> str:
        return at_seconds(self.pair.seconds + self.pick(*offsets) + self.chance.randrange(5) / 1_000_000)

    def trigger(self) -> None:
        agent = self.pick(*AGENTS)
        value: Json = {"type": "trigger", "v": 1, "id": self.new_id("t"), "agent_id": agent}
        value["timeout_seconds"] = self.pick(1, 200)
        value["conversation_id"] = f"c{self.chance.randrange(8)}"
        if self.chance.random() < 0.4:
            value |= {"kind": "chat", "interactive": True, "on_busy": self.pick(*WAYS)}
        if self.chance.random() < 0.08:
            value["approval_required"] = True
        if self.chance.random() < 0.4:
            value |= self.resources()
        if self.chance.random() < 0.1:
            value["depends_on"] = [{"agent_id": self.pick("A", "B"), "conversation_id": f"c{self.chance.randrange(9)}"}]
        if value.get("interactive") and self.chance.random() < 0.4:
            value["decide_before"] = self.seconds(-1, 3, 20, 40)
        for name, share in (("created_at", 0.5), ("available_at", 0.2)):
            if self.chance.random() < share:
                value[name] = self.seconds(-400, -100, -1, 0, 5, 60)
        if self.chance.random() < 0.15:
            value["expires_at"] = self.seconds(-1, 3, 30, 300)
        if self.chance.random() < 0.3:
            value["heartbeat_seconds"] = self.pick(10, 60)
        if self.chance.random() < 0.3:
            value["max_attempts"] = self.pick(1, 2, 5)
        self.pair.send(TRIGGERS.name, value, self.pick("kafka", "kafka", "http"))

    def resources(self) -> Json:
        """What it needs of a site."""
        needs: Json = {"worker": True} if self.chance.random() < 0.6 else {}
        if not needs or self.chance.random() < 0.3:
            needs |= {"environment_id": self.pick("e", "e", "f"), "folder": self.pick(*FOLDERS)}
        if self.chance.random() < 0.6:
            needs["organization_id"] = self.pick("o1", "o2")
        if self.chance.random() < 0.05:
            needs["site"] = "elsewhere"
        return needs

    def deliver(self) -> None:
        """Some of what lies there; now and then a decider answers nobody for long."""
        self.pair.deliver(self.chance.randrange(100))

    def site(self) -> None:
        site = self.pick("default", "default", "default", "elsewhere")
        kind, fields = self.pick(
            ("pause_site", {}),
            *(("resume_site", {}),) * 4,
            *(("configure_site", {"capacity": capacity}) for capacity in (0, 2, 4, 6)),
            *(("gate", self.gate(change)) for change in ({"enabled": False}, {"run_budget": 0}, {"run_budget": 3})),
            *(("gate", self.gate({"enabled": True, "run_budget": None})),) * 6,
            ("delete_folder", {"environment_id": "e", "path": self.pick(*FOLDERS)}),
            ("delete_environment", {"environment_id": "f"}),
        )
        self.pair.site_control(kind, site, **fields)

    def gate(self, change: Json) -> Json:
        scope, name = self.pick(("organization", "o1"), ("organization", "o2"), ("department", "d1"))
        return {"scope": scope, "name": name} | change

    def word(self) -> None:
        agent = self.pick(*AGENTS)
        model = self.pair.model(agent)
        running = model.running()
        executions = self.pair.executions(agent)
        if running and self.chance.random() < 0.85:
            work = self.pick(*running)
            execution, conversation = work.execution, work.conversation
        elif executions:
            execution, conversation = self.pick(*executions), f"c{self.chance.randrange(8)}"
        else:
            return
        status = self.pick("running", "heartbeat", "paused", "finished", "finished", "finished", "failed", "stopped")
        value = {"type": "status", "v": 1, "agent_id": agent, "conversation_id": conversation, "status": status}
        if self.chance.random() < 0.1:
            value["at"] = self.seconds(-10, 0, 1)
        else:
            value["execution_id"] = execution
        self.pair.send(STATUSES.name, value)

    def live(self, agent: str) -> str:
        live = self.pair.model(agent).live
        if live and self.chance.random() < 0.8:
            return str(self.pick(*live).id)
        return f"t{self.chance.randrange(self.ids + 1)}"

    def stop(self) -> None:
        agent = self.pick(*AGENTS)
        value = {"type": "stop", "v": 1, "id": self.new_id("s"), "agent_id": agent}
        if self.chance.random() < 0.7:
            value["trigger_id"] = self.live(agent)
        else:
            value["conversation_id"] = f"c{self.chance.randrange(8)}"
        self.pair.send(TRIGGERS.name, value)

    def control(self) -> None:
        agent = self.pick(*AGENTS)
        name = self.chance.choices(
            ["configure", "pause", "resume", "archive", "reschedule", "resume_trigger", "approve"],
            weights=[8, 3, 6, 1, 4, 8, 4],
        )[0]
        if self.pair.model(agent).archived and self.chance.random() < 0.5:
            name = "configure"
        value: Json = {"type": name, "v": 1, "id": self.new_id("k"), "agent_id": agent, "requested_by": "u"}
        if name == "configure":
            value["parallelism_limit"] = self.pick(1, 1, 2, 3, 5, "unlimited", None)
            if self.chance.random() < 0.2:
                value["max_backlog_depth"] = self.pick(0, 2, 20, None, None)
            if self.chance.random() < 0.2:
                value["serial"] = self.pick(True, False, False)
            if self.chance.random() < 0.2:
                value["run_budget"] = self.pick(0, 2, 10, None, None)
        if name == "resume_trigger" and self.chance.random() < 0.5:
            value["on_busy"] = self.pick(*WAYS)
        if name in ("reschedule", "resume_trigger", "approve"):
            value["trigger_id"] = self.live(agent)
        if name == "reschedule":
            value["available_at"] = self.seconds(-400, -5, 0, 20, 100)
        self.pair.send(CONTROLS.name, value)

    def again(self) -> None:
        records = [record for record in self.pair.driven.input[-300:] if record.topic in SENT_BY_USERS]
        if records:
            record = self.pick(*records)
            self.pair.send(record.topic, json.loads(record.value or b""), "http" if record.headers else "kafka")

    def time(self) -> None:
        self.pair.advance(self.pick(0.000001, 0.3, 1, 5, 20, 61, 301))

    def outage(self) -> None:
        self.pair.skip(self.pick(5, 70, 600))

    def crash(self) -> None:
        """Now, or after the next record was handled and before it is written."""
        if self.chance.random() < 0.5:
            self.pair.crash()
        else:
            self.pair.loses_the_next = True


TOTAL: Counter[str] = Counter()
"""Of the fixed lives: what these are known to bring can't fail to happen by the luck of a seed."""


@pytest.mark.parametrize("life", range(LIVES))
def test_a_long_life_is_decided_as_the_naive_models_say(life: int, seed: int) -> None:
    """I1 to I8: 800 steps a life, compared as they come; BERTH_MODEL_LIVES chooses how many lives.

    Every second one is the same in each run, the others are the seed's.
    """
    fixed = life % 2 == 0
    number = life if fixed else seed * 1000 + life
    print(f"life {number}")  # noqa: T201 - shown when it fails
    lived = Life(number)
    for step in range(800):
        lived.step()
        if step % CHECKED_EVERY == 0:
            lived.pair.compare()
    lived.pair.advance(100 * 86_400)
    lived.pair.compare()
    if fixed:
        TOTAL.update(lived.pair.happened())
        TOTAL["lives"] += 1


def test_everything_that_the_lives_are_for_happened() -> None:
    """Lives in which nothing is granted, recalled or lost prove nothing. Runs after all of them."""
    if TOTAL["lives"] < max(LIVES // 2, 12):
        pytest.skip("too few lives to expect everything")
    expected = (
        *("accepted", "placed", "dispatched", "forced", "finished", "paused", "resumed", "replied", "attempt_failed"),
        *("lease_expired", "stop_requested", "stopped", "expired", "archived", "revived", "approved", "rescheduled"),
        *("agent_paused", "agent_resumed", "forgotten", "claimed", "granted", "claim_waiting", "degraded", "returned"),
        *("refused", "watched", "unwatched", "told", "dependency_resolved"),
        *("claim_granted", "claim_denied", "claim_recalled", "claim_degraded", "gate_changed"),
        *("site_paused", "site_resumed", "folder_deleted"),
        *("refused agent_backlog_full", "refused run_budget_used_up", "refused site_unknown"),
        *("refused conversation_busy", "refused agent_parallelism_limit_reached", "refused not_yet_available"),
        *("refused dependency_unfinished", "refused approval_required"),
        "crashed with messages under way",
    )
    missing = [name for name in expected if not TOTAL[name]]
    assert not missing, missing
