"""Any interleaving of commands, statuses, messages between agents and sites, timers, repeats, crashes.

Against the naive models of agents and sites (I1 to I8, F1, F8, and the site protocol).
"""

import json
import os
from collections import Counter
from typing import Any, ClassVar

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
from tests.model.test_long_runs import SENT_BY_USERS

AGENTS = st.sampled_from(["A", "A", "A", "B"])
CONVERSATIONS = st.sampled_from(["c0", "c1", "c2"])
OFFSETS = st.sampled_from([-400, -300, -20, -1, 0, 0, 1, 30, 400])
WORKER: dict[str, Any] = {"worker": True}
RESOURCES = st.sampled_from(
    [
        {},
        WORKER,
        WORKER | {"organization_id": "o1"},
        WORKER | {"organization_id": "o2", "department_id": "d1"},
        WORKER | {"site": "elsewhere"},
        *({"environment_id": "e", "folder": folder} for folder in ("/a", "/a/b", "/a/bc", "/")),
        WORKER | {"environment_id": "e", "folder": "/a/b/c", "organization_id": "o1"},
        {"environment_id": "f"},
    ]
)
DEPENDENCIES = st.sampled_from([None, [("A", "c0")], [("B", "c1")], [("A", "c2"), ("B", "c0")], [("A", "c9")]])


ONE_OF_THREE = st.integers(0, 2)
NEW_IDS = st.sampled_from([None] * 8 + [f"t{number}" for number in range(4)])
"""None: an id of its own; else one that may have been there before."""


class AgentsMachine(RuleBasedStateMachine):
    """Hypothesis chooses what happens next; the pair compares after every step.

    Every rule is chosen about as often as another, so that there are few: what is rare is drawn within one.
    """

    happened: ClassVar[Counter[str]] = Counter()

    @initialize(limit=st.sampled_from([1, 1, 2, 3, "unlimited"]), twice=st.sampled_from([True, False, False, False]))
    def begin(self, limit: int | str, twice: bool) -> None:
        self.pair = Pair(limit, twice=twice)
        self.ids = 0

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.happened.update(self.pair.happened())

    def relative(self, offset: float | None) -> str | None:
        return None if offset is None else at_seconds(offset + self.pair.seconds)

    def new_id(self, prefix: str) -> str:
        self.ids += 1
        return f"{prefix}{100 + self.ids}"

    # Triggers

    def trigger(self, agent: str, id: str | None, via: str = "kafka", **fields: Any) -> None:
        value = {"type": "trigger", "v": 1, "id": id or self.new_id("t"), "agent_id": agent, "timeout_seconds": 100}
        self.pair.send(TRIGGERS.name, value | {name: one for name, one in fields.items() if one is not None}, via)

    @rule(
        agent=AGENTS,
        id=NEW_IDS,
        conversation=CONVERSATIONS,
        times=st.tuples(st.none() | OFFSETS, st.none() | st.none() | OFFSETS, st.none() | st.none() | OFFSETS),
        micros=st.integers(0, 3),
        tries=st.sampled_from([None, 1, 2]),
        heartbeat=st.sampled_from([None, None, 20]),
        via=st.sampled_from(["kafka", "kafka", "http"]),
    )
    def send_a_trigger(
        self,
        agent: str,
        id: str | None,
        conversation: str,
        times: tuple[int | None, int | None, int | None],
        micros: int,
        tries: int | None,
        heartbeat: int | None,
        via: str,
    ) -> None:
        created, available, expires = times
        fields: dict[str, Any] = {
            "created_at": self.relative(None if created is None else created + micros / 1e6),
            "available_at": self.relative(available),
            "expires_at": self.relative(expires),
            "max_attempts": tries,
            "heartbeat_seconds": heartbeat,
        }
        self.trigger(agent, id, via, conversation_id=conversation, **fields)

    @rule(agent=AGENTS, conversation=CONVERSATIONS, resources=RESOURCES, heartbeat=st.sampled_from([None, None, 20]))
    def send_one_for_a_site(
        self, agent: str, conversation: str, resources: dict[str, Any], heartbeat: int | None
    ) -> None:
        self.trigger(agent, None, conversation_id=conversation, heartbeat_seconds=heartbeat, **resources)

    @rule(
        agent=AGENTS,
        id=NEW_IDS,
        conversation=CONVERSATIONS,
        kind=st.sampled_from(["chat", "chat", "chat", "schedule"]),
        on_busy=st.sampled_from(["queue", "queue", None, "ask", "ask", "force", "force", "interrupt", "later"]),
        resources=st.just({}) | RESOURCES,
        times=st.tuples(
            st.sampled_from([None, None, 5, 5, 30, -1]),
            st.sampled_from([None, None, None, -1, 3]),
            st.sampled_from([None, None, None, None, None, 20]),
        ),
    )
    def talk(
        self,
        agent: str,
        id: str | None,
        conversation: str,
        kind: str,
        on_busy: str | None,
        resources: dict[str, Any],
        times: tuple[int | None, int | None, int | None],
    ) -> None:
        """What is interactive: asks, forces, interrupts, replies."""
        names = ("decide_before", "expires_at", "available_at")
        fields = {name: self.relative(offset) for name, offset in zip(names, times, strict=True)}
        about: dict[str, Any] = {"conversation_id": conversation, "kind": kind, "interactive": True, "on_busy": on_busy}
        self.trigger(agent, id, **about | fields | resources)

    @rule(agent=AGENTS, conversation=CONVERSATIONS, depends=DEPENDENCIES, on_busy=st.sampled_from(["queue", "ask"]))
    def send_one_that_is_blocked(
        self, agent: str, conversation: str, depends: list[tuple[str, str]] | None, on_busy: str
    ) -> None:
        """By what it depends on, or until a person approves it."""
        fields: dict[str, Any] = {"kind": "chat", "interactive": True, "on_busy": on_busy}
        if depends is None:
            fields["approval_required"] = True
        else:
            fields["depends_on"] = [{"agent_id": one, "conversation_id": other} for one, other in depends]
        self.trigger(agent, None, conversation_id=conversation, **fields)

    # Words of runners

    @rule(
        agent=AGENTS,
        which=st.integers(0, 30),
        status=st.sampled_from(["running", "paused", "paused", "finished", "finished", "failed", "stopped"]),
        retryable=st.sampled_from([None, None, False]),
    )
    def status_of_a_running_attempt(self, agent: str, which: int, status: str, retryable: bool | None) -> None:
        running = self.pair.naive[agent].running() if agent in self.pair.naive else []
        if running:
            work = running[which % len(running)]
            self.status(agent, work.conversation, work.execution, status, retryable)

    @rule(agent=AGENTS, which=st.integers(0, 30))
    def finish(self, agent: str, which: int) -> None:
        self.status_of_a_running_attempt(agent=agent, which=which, status="finished", retryable=None)

    @rule(
        agent=AGENTS,
        which=st.integers(0, 30),
        status=st.sampled_from(["running", "heartbeat", "paused", "finished", "failed", "stopped"]),
        at=st.sampled_from([None, None, -30, 0, 1]),
    )
    def a_doubtful_word(self, agent: str, which: int, status: str, at: int | None) -> None:
        """Of some attempt that may be over, or of none that is named."""
        if at is not None:
            self.status(agent, f"c{which % 3}", None, status, None, self.relative(at))
            return
        executions = [*self.pair.executions(agent), "aaaaaaaa-1-1", "nonsense"]
        self.status(agent, f"c{which % 3}", executions[which % len(executions)], status, None)

    def status(
        self, agent: str, conversation: str, execution: str | None, status: str, retryable: bool | None, at: Any = None
    ) -> None:
        value = {"type": "status", "v": 1, "agent_id": agent, "conversation_id": conversation, "status": status}
        optional = {"execution_id": execution, "retryable": retryable, "at": at}
        value |= {name: field for name, field in optional.items() if field is not None}
        self.pair.send(STATUSES.name, value)

    # Stops and controls

    @rule(agent=AGENTS, which=st.integers(0, 40), same_id=st.sampled_from([False, False, False, True]))
    def stop(self, agent: str, which: int, same_id: bool) -> None:
        id = "s0" if same_id else self.new_id("s")
        value = {"type": "stop", "v": 1, "id": id, "agent_id": agent}
        if which % 4 == 0:
            value["conversation_id"] = f"c{which % 3}"
        else:
            value["trigger_id"] = self.live(agent, which)
        self.pair.send(TRIGGERS.name, value)

    def live(self, agent: str, which: int, state: str | None = None) -> str:
        """Some live trigger, in that state if there is one; or one that was never there."""
        works = self.pair.naive[agent].live if agent in self.pair.naive else []
        ids = [work.id for work in works if work.state == state] or [work.id for work in works] or ["t9"]
        return ids[which % len(ids)]

    @rule(
        agent=AGENTS,
        fields=st.sampled_from(
            [
                *({"parallelism_limit": limit} for limit in (1, 2, 3, "unlimited", None)),
                *({"max_backlog_depth": depth} for depth in (1, 3, None, None)),
                *({"run_budget": budget} for budget in (0, 2, None, None)),
                {"serial": True},
                {"serial": False},
                {"serial": True, "parallelism_limit": 2},
            ]
        ),
        same_id=st.sampled_from([False, False, False, True]),
    )
    def configure(self, agent: str, fields: dict[str, Any], same_id: bool) -> None:
        self.control(agent, "configure", "k0" if same_id else None, **fields)

    @rule(agent=AGENTS, name=st.sampled_from(["pause", "resume", "resume", "resume", "archive"]))
    def hold(self, agent: str, name: str) -> None:
        self.control(agent, name)
        if name == "archive":
            self.control(agent, "configure")

    @rule(
        agent=AGENTS,
        which=st.integers(0, 40),
        name=st.sampled_from(["approve", "approve", "reschedule", "resume_trigger", "resume_trigger"]),
        on_busy=st.sampled_from([None, None, "queue", "ask", "force", "interrupt", "later"]),
        offset=OFFSETS,
    )
    def control_a_trigger(self, agent: str, which: int, name: str, on_busy: str | None, offset: int) -> None:
        fields: dict[str, Any] = {}
        if name == "resume_trigger":
            fields = {"trigger_id": self.live(agent, which, "paused")} | ({"on_busy": on_busy} if on_busy else {})
        else:
            fields["trigger_id"] = self.live(agent, which, "waiting")
        if name == "reschedule":
            fields["available_at"] = self.relative(offset)
        self.control(agent, name, **fields)

    def control(self, agent: str, name: str, id: str | None = None, /, **fields: Any) -> None:
        about = {"id": id or self.new_id("k"), "agent_id": agent, "requested_by": "operator"}
        self.pair.send(CONTROLS.name, {"type": name, "v": 1, **about, **fields})

    # Sites

    @rule(
        scope=st.sampled_from([("organization", "o1"), ("organization", "o2"), ("department", "d1")]),
        change=st.sampled_from([{"enabled": False}, {"run_budget": 0}, {"run_budget": 2}, *({},) * 3]),
    )
    def set_gate(self, scope: tuple[str, str], change: dict[str, Any]) -> None:
        change = change or {"enabled": True, "run_budget": None}
        self.pair.site_control("gate", scope=scope[0], name=scope[1], **change)

    @rule(
        site=st.sampled_from(["default", "default", "default", "elsewhere"]),
        control=st.sampled_from(
            [
                ("pause_site", {}),
                *(("resume_site", {}),) * 2,
                *(("configure_site", {"capacity": capacity}) for capacity in (0, 1, 2, 5)),
                ("delete_folder", {"environment_id": "e", "path": "/a"}),
                ("delete_folder", {"environment_id": "e", "path": "/a/b"}),
                ("delete_environment", {"environment_id": "e"}),
            ]
        ),
    )
    def control_a_site(self, site: str, control: tuple[str, dict[str, Any]]) -> None:
        self.pair.site_control(control[0], site, **control[1])

    @precondition(lambda self: self.pair.driven.undelivered)
    @rule(which=st.integers(0, 20))
    def deliver(self, which: int) -> None:
        """What an agent tells a site or an agent, or a site an agent: late, if much has happened since."""
        self.pair.deliver(which)

    @precondition(lambda self: self.pair.driven.undelivered)
    @rule()
    def deliver_all(self) -> None:
        self.pair.deliver_all()

    # Repeats, time, faults

    @rule(which=st.integers(0, 1000), again=st.booleans())
    def repeat(self, which: int, again: bool) -> None:
        """A record that was sent before, or all of them once more from the stored positions."""
        records = [record for record in self.pair.driven.input if record.topic in SENT_BY_USERS]
        if again or not records:
            self.pair.driven.redeliver()
            return
        record = records[which % len(records)]
        via = "http" if record.headers else "kafka"
        self.pair.send(record.topic, json.loads(record.value or b""), via)

    @rule(seconds=st.sampled_from([0.000001, 0.5, 1, 1, 3, 3, 5, 5, 20, 20, 61, 301]))
    def let_time_pass(self, seconds: float) -> None:
        self.pair.advance(seconds)

    @rule(
        what=st.sampled_from(["outage", "outage", "fire", "crash", "crash", "lose", "lose", "long"]), wait=ONE_OF_THREE
    )
    def fault(self, what: str, wait: int) -> None:
        """Outage: time passes and nobody fires a timer; what is sent next is handled first. Lose: a new owner loads
        the rows as they were before the next record, and handles that again.
        """
        if what == "outage":
            self.pair.skip((6, 35, 401)[wait])
        elif what == "fire":
            self.pair.fire()
        elif what == "long":
            self.pair.advance((401, 7 * 86_400, 91 * 86_400)[wait])
        elif what == "crash":
            self.pair.crash()
        else:
            self.pair.loses_the_next = True

    @invariant()
    def equal(self) -> None:
        if hasattr(self, "pair"):
            self.pair.compare()


EXPECTED = {
    *("accepted", "placed", "dispatched", "finished", "lease_expired", "stop_requested", "stopped", "expired"),
    *("archived", "revived", "rescheduled", "forgotten", "claimed", "granted", "claim_waiting", "returned"),
    *("watched", "told", "dependency_resolved", "claim_opened", "claim_granted", "gate_changed"),
    *("refused conversation_busy", "crashed with messages under way"),
}
"""A machine that grants nothing proves nothing. What fewer than some twenty do in a run is asserted of long lives."""


@pytest.mark.timeout(600)
def test_any_interleaving_for_a_few_agents_and_sites_is_decided_as_the_naive_models_say() -> None:
    """I1 to I8 after every step.

    BERTH_MODEL_EXAMPLES chooses how many; BERTH_MODEL_SHRINK=1 looks for a shorter way to the same failure (minutes).
    """
    examples = int(os.environ.get("BERTH_MODEL_EXAMPLES", "200"))
    AgentsMachine.happened.clear()
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
    missing = sorted(EXPECTED - set(AgentsMachine.happened))
    assert examples < 200 or not missing, f"never happened: {missing}"
