"""Any interleaving of commands, statuses, timers, repeats and crashes, against the naive model (I1, I4-I8, F1, F8)."""

import json
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from streams import CONTROLS, STATUSES, TRIGGERS
from tests.driving import at_seconds
from tests.model.pair import Pair

AGENTS = st.sampled_from(["A", "A", "A", "B"])
TRIGGER_IDS = st.sampled_from([f"t{number}" for number in range(12)])
CONVERSATIONS = st.sampled_from(["c0", "c1", "c2"])
OFFSETS = st.sampled_from([-400, -300, -20, -1, 0, 0, 1, 30, 400])
KINDS = st.sampled_from(["task", "task", "chat", "chat", "schedule"])
LIMITS = st.sampled_from([1, 1, 2, 3, "unlimited", None])


class AgentsMachine(RuleBasedStateMachine):
    """Hypothesis chooses what happens next; the pair compares after every step."""

    @initialize(limit=st.sampled_from([1, 1, 2, 3, "unlimited"]), twice=st.booleans())
    def begin(self, limit: int | str, twice: bool) -> None:
        self.pair = Pair(limit, twice=twice)

    def relative(self, offset: int | None) -> str | None:
        return None if offset is None else at_seconds(offset + self.pair.seconds)

    @rule(
        agent=AGENTS,
        id=TRIGGER_IDS,
        conversation=CONVERSATIONS,
        kind=KINDS,
        on_busy=st.sampled_from(["queue", "queue", "queue", None, "ask", "force", "force", "interrupt", "later"]),
        created=st.none() | OFFSETS,
        available=st.none() | OFFSETS,
        expires=st.none() | st.none() | OFFSETS,
        tries=st.sampled_from([None, 1, 2]),
        heartbeat=st.sampled_from([None, None, 20]),
        via=st.sampled_from(["kafka", "kafka", "http"]),
        late=st.sampled_from([None, None, None, -1, 5]),
        micros=st.integers(0, 3),
        approval=st.sampled_from([None, None, None, None, True]),
    )
    def trigger(  # noqa: PLR0917 - Hypothesis names them
        self,
        agent: str,
        id: str,
        conversation: str,
        kind: str,
        on_busy: str | None,
        created: int | None,
        available: int | None,
        expires: int | None,
        tries: int | None,
        heartbeat: int | None,
        via: str,
        late: int | None,
        micros: int,
        approval: bool | None,
    ) -> None:
        fields: dict[str, Any] = {
            "kind": kind,
            "interactive": kind != "task",
            "on_busy": on_busy if kind != "task" or on_busy == "later" else None,
            "created_at": None if created is None else at_seconds(created + self.pair.seconds + micros / 1e6),
            "available_at": self.relative(available),
            "expires_at": self.relative(expires),
            "max_attempts": tries,
            "heartbeat_seconds": heartbeat,
            "timeout_seconds": 100,
            "decide_before": self.relative(late),
            "approval_required": approval,
        }
        value = {"type": "trigger", "v": 1, "id": id, "agent_id": agent, "conversation_id": conversation}
        value |= {name: field for name, field in fields.items() if field is not None}
        self.pair.send(TRIGGERS.name, value, via)

    @rule(
        agent=AGENTS,
        which=st.integers(0, 30),
        status=st.sampled_from(
            ["running", "heartbeat", "paused", "paused", "finished", "finished", "failed", "stopped"]
        ),
        retryable=st.sampled_from([None, None, False]),
    )
    def status_of_a_running_attempt(self, agent: str, which: int, status: str, retryable: bool | None) -> None:
        running = self.pair.naive[agent].running() if agent in self.pair.naive else []
        if running:
            work = running[which % len(running)]
            self.status(agent, work.conversation, work.execution, status, retryable)

    @rule(
        agent=AGENTS,
        which=st.integers(0, 30),
        status=st.sampled_from(["running", "heartbeat", "paused", "finished", "failed", "stopped"]),
    )
    def status_of_any_attempt(self, agent: str, which: int, status: str) -> None:
        executions = [*self.pair.executions(agent), "aaaaaaaa-1-1", "nonsense"]
        execution, conversation = executions[which % len(executions)], f"c{which % 3}"
        self.status(agent, conversation, execution, status, None)

    @rule(
        agent=AGENTS,
        conversation=CONVERSATIONS,
        status=st.sampled_from(["running", "paused", "finished", "failed"]),
        at=st.sampled_from([-30, 0, 1]),
    )
    def status_without_execution_id(self, agent: str, conversation: str, status: str, at: int) -> None:
        self.status(agent, conversation, None, status, None, self.relative(at))

    def status(
        self, agent: str, conversation: str, execution: str | None, status: str, retryable: bool | None, at: Any = None
    ) -> None:
        value = {"type": "status", "v": 1, "agent_id": agent, "conversation_id": conversation, "status": status}
        optional = {"execution_id": execution, "retryable": retryable, "at": at}
        value |= {name: field for name, field in optional.items() if field is not None}
        self.pair.send(STATUSES.name, value)

    @rule(agent=AGENTS, id=st.sampled_from(["s0", "s1", "s2", "s3", "s4", "s5"]), trigger=TRIGGER_IDS)
    def stop_trigger(self, agent: str, id: str, trigger: str) -> None:
        self.pair.send(TRIGGERS.name, {"type": "stop", "v": 1, "id": id, "agent_id": agent, "trigger_id": trigger})

    @rule(agent=AGENTS, id=st.sampled_from(["s0", "s6", "s7"]), conversation=CONVERSATIONS)
    def stop_conversation(self, agent: str, id: str, conversation: str) -> None:
        self.pair.send(
            TRIGGERS.name, {"type": "stop", "v": 1, "id": id, "agent_id": agent, "conversation_id": conversation}
        )

    @rule(agent=AGENTS, number=st.integers(0, 40), limit=LIMITS)
    def set_limit(self, agent: str, number: int, limit: int | str | None) -> None:
        self.control(agent, f"k{number}", "configure", parallelism_limit=limit)

    @rule(agent=AGENTS, number=st.integers(0, 40), depth=st.sampled_from([0, 1, 3, None]))
    def set_backlog(self, agent: str, number: int, depth: int | None) -> None:
        self.control(agent, f"k{number}", "configure", max_backlog_depth=depth)

    @rule(agent=AGENTS, number=st.integers(0, 40), name=st.sampled_from(["pause", "resume", "resume"]))
    def pause_or_resume(self, agent: str, number: int, name: str) -> None:
        self.control(agent, f"k{number}", name)

    @rule(agent=AGENTS, number=st.integers(0, 40), revive=st.booleans())
    def archive(self, agent: str, number: int, revive: bool) -> None:
        self.control(agent, f"k{number}", "archive")
        if revive:
            self.control(agent, f"k{number + 41}", "configure")

    @rule(agent=AGENTS, number=st.integers(0, 40), trigger=TRIGGER_IDS, offset=OFFSETS)
    def reschedule(self, agent: str, number: int, trigger: str, offset: int) -> None:
        self.control(agent, f"k{number}", "reschedule", trigger_id=trigger, available_at=self.relative(offset))

    @rule(agent=AGENTS, number=st.integers(0, 40), serial=st.booleans(), limit=st.sampled_from([None, None, 1, 2]))
    def set_serial(self, agent: str, number: int, serial: bool, limit: int | None) -> None:
        fields = {} if limit is None else {"parallelism_limit": limit}
        self.control(agent, f"k{number}", "configure", serial=serial, **fields)

    @rule(agent=AGENTS, number=st.integers(0, 40), budget=st.sampled_from([0, 1, 3, None, None]))
    def set_budget(self, agent: str, number: int, budget: int | None) -> None:
        self.control(agent, f"k{number}", "configure", run_budget=budget)

    @rule(agent=AGENTS, number=st.integers(0, 40), trigger=TRIGGER_IDS)
    def approve(self, agent: str, number: int, trigger: str) -> None:
        works = self.pair.naive[agent].live if agent in self.pair.naive else []
        unapproved = [work.id for work in works if work.needs_approval]
        self.control(agent, f"k{number}", "approve", trigger_id=(unapproved or [trigger])[0])

    @rule(
        agent=AGENTS,
        number=st.integers(0, 40),
        trigger=TRIGGER_IDS,
        on_busy=st.sampled_from([None, None, "queue", "ask", "force", "interrupt", "later"]),
    )
    def resume_trigger(self, agent: str, number: int, trigger: str, on_busy: str | None) -> None:
        paused = (
            [work.id for work in self.pair.naive[agent].live if work.state == "paused"]
            if (agent in self.pair.naive)
            else []
        )
        fields = {} if on_busy is None else {"on_busy": on_busy}
        self.control(agent, f"k{number}", "resume_trigger", trigger_id=(paused or [trigger])[0], **fields)

    def control(self, agent: str, id: str, name: str, **fields: Any) -> None:
        value = {"type": name, "v": 1, "id": id, "agent_id": agent, "requested_by": "operator", **fields}
        self.pair.send(CONTROLS.name, value)

    @precondition(lambda self: self.pair.driven.input)
    @rule(which=st.integers(0, 1000))
    def send_an_old_record_again(self, which: int) -> None:
        records = self.pair.driven.input
        record = records[which % len(records)]
        via = "http" if record.headers else "kafka"
        self.pair.send(record.topic, json.loads(record.value or b""), via)

    @rule()
    def deliver_everything_again(self) -> None:
        self.pair.driven.redeliver()

    @rule(seconds=st.sampled_from([0.000001, 0.5, 1, 3, 5, 20, 61, 301, 401]))
    def let_time_pass(self, seconds: float) -> None:
        self.pair.advance(seconds)

    @rule(seconds=st.sampled_from([3600, 7 * 86_400, 91 * 86_400]))
    def let_much_time_pass(self, seconds: float) -> None:
        self.pair.advance(seconds)

    @rule(seconds=st.sampled_from([1, 30, 401, 1000]))
    def outage(self, seconds: float) -> None:
        """Time passes and nobody fires a timer; what is sent next is handled first."""
        self.pair.skip(seconds)

    @rule()
    def fire_timers(self) -> None:
        self.pair.fire()

    @rule()
    def crash(self) -> None:
        self.pair.crash()

    @invariant()
    def equal(self) -> None:
        if hasattr(self, "pair"):
            self.pair.compare()


@pytest.mark.timeout(600)
def test_any_interleaving_for_a_few_agents_is_decided_as_the_naive_model_says() -> None:
    """I1, I4, I5, I6, I7, I8 after every step.

    BERTH_MODEL_EXAMPLES chooses how many; BERTH_MODEL_SHRINK=1 looks for a shorter way to the same failure (minutes).
    """
    examples = int(os.environ.get("BERTH_MODEL_EXAMPLES", "200"))
    run_state_machine_as_test(
        AgentsMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=60,
            deadline=None,
            phases=[Phase.generate, Phase.shrink] if os.environ.get("BERTH_MODEL_SHRINK") else [Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
