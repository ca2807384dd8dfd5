"""Given, when, then for a real ``Partition``: send records, move the clock, read back what was written.

    driven = Driven(default_limit=2)
    driven.trigger("t1", conversation_id="c1")
    driven.advance(60)
    assert driven.running() == ["t1"]

What deciders tell each other is delivered when the record that caused it is committed, unless ``delivers`` is off:
then it lies in ``undelivered``. What the worker does around a Partition is done here in the simplest way: rows and
outputs are taken in one transaction after every record (``commit``), or later when a test holds them back to crash in
between (``crash``). Each decision is checked when it is written: its size, its form read and written back, the chain,
and what ``berth verify`` checks.
``check`` compares the indexes in memory with those rebuilt from the rows, and the state with the fold of the log.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, Final, Literal, NamedTuple

from streams import (
    CLAIMS,
    CONTROLS,
    DEAD_LETTERS,
    DECISIONS,
    DISPATCHES,
    INPUT_TOPICS,
    SIGNALS,
    SITE_CONTROLS,
    SITE_DECISIONS,
    STATUSES,
    TEXTS,
    TRIGGERS,
)
from streams.audit.agreement import Agreement
from streams.audit.verify import Head, Heads, Verifier
from streams.audit.verify_sites import SiteVerifier
from streams.codec import Output, Record, partition_of
from streams.partition import Partition
from streams.rules import events, limits, site_events, verdicts
from streams.rules.agent.state import Agent
from streams.rules.messages import Continue, Message, Trigger
from streams.rules.order import SECOND, format_instant
from streams.rules.site.state import Site
from tests.states import check_room, content, site_content, without_leases

T0: Final = 1_772_359_200 * SECOND
"""2026-03-01T10:00:00Z."""
NOTES_MAX: Final = 4
"""Events of one decision that are no change of a queue: agent_created, configured, revived, stop_noted and the like."""

Json = dict[str, Any]


def at_seconds(seconds: float) -> str:
    """The wire's form of the instant so many seconds after T0."""
    return format_instant(T0 + round(seconds * SECOND))


HELD: Final = events.Decision(
    agent_id="held",
    seq=1,
    at=0,
    via="internal",
    cause=verdicts.ContinueCause(**{"continue": 0}),
    command=Continue(),
    policy=limits.POLICY,
    prev=None,
)
"""Stands for the decision of a record whose transaction is still open."""


class Action(NamedTuple):
    """One thing that was done to a partition."""

    now: int
    what: Literal["record", "fire", "crash"]
    record: Record | None


class Driven:
    """One partition, its clock, and everything that it has written."""

    def __init__(
        self,
        default_limit: int | str = 1,
        partitions: int = 1,
        number: int = 0,
        twice: bool = False,
        verified: bool = True,
        delivers: bool = True,
        pool: int = 4,
    ) -> None:
        """``twice``: every record is sent a second time, and must then change nothing. ``pool``: of new sites."""
        self.default_limit = default_limit
        self.pool = pool
        self.defaults = limits.Defaults(default_limit, pool)  # type: ignore[arg-type]
        self.delivers = delivers
        self.partitions = partitions
        self.number = number
        self.twice = twice
        self.now = self.started_at = T0
        self.rows: dict[bytes, bytes] = {}
        self.input: list[Record] = []
        self.journal: list[Action] = []
        """What was done and when, for whoever wants to do it again."""
        self.outputs: list[Output] = []
        self.decisions: list[events.Decision] = []
        self.values: list[bytes] = []
        self.dispatches: list[Json] = []
        self.texts: list[Json] = []
        self.dead_letters: list[Output] = []
        self.rekeyed: list[Output] = []
        self.site_decisions: list[site_events.SiteDecision] = []
        self.messages: list[Output] = []
        """Everything that deciders told each other."""
        self.undelivered: list[Output] = []
        self.transactions = 0
        self._held = False
        self._offsets: dict[str, int] = {}
        self._ids = 0
        self._agreement = Agreement() if verified else None
        self._verifier = Verifier(agreement=self._agreement) if verified else None
        self._site_verifier = SiteVerifier(agreement=self._agreement) if verified else None
        self._last_sha256: dict[str, str] = {}
        self.partition = Partition(number, partitions, self.defaults)
        self.partition.loaded(self.now, False)

    # When: records

    def send(
        self,
        topic: str,
        value: object,
        key: bytes | None = b"",
        headers: Sequence[tuple[str, bytes]] = (),
        partition: int | None = None,
    ) -> list[events.Decision]:
        """Put one record on an input topic and handle it. ``key`` b"": the agent id of the value. Returns decisions."""
        if not (value is None or isinstance(value, bytes)):
            if key == b"" and isinstance(value, dict):
                key = str(value.get("agent_id", "")).encode("utf-8", "backslashreplace")
            value = json.dumps(value).encode()
        record = Record(topic, self.number if partition is None else partition, self.offset(topic), key, value, headers)
        first = self._handle(record)
        if self.twice and value is not None:
            before = self.state()
            again = self._handle(record._replace(offset=self.offset(topic)))
            assert not any(decision.events for decision in again), f"a repeat changed something: {again}"
            assert self.state() == before
        return first

    def offset(self, topic: str) -> int:
        offset = self._offsets.get(topic, 0)
        self._offsets[topic] = offset + 1
        return offset

    def _handle(self, record: Record) -> list[events.Decision]:
        before = len(self.decisions)
        self._take_in(record)
        self._deliver_all()
        return self.decisions[before:]

    def _take_in(self, record: Record) -> None:
        self.input.append(record)
        self.journal.append(Action(self.now, "record", record))
        self.partition.handle(record, self.now)
        if not self._held:
            self.commit()
            self._work_off()

    def _deliver_all(self) -> None:
        while self.delivers and self.undelivered and not self._held:
            self.deliver()

    def deliver(self, count: int = 1) -> None:
        """Hand on the oldest of what deciders told each other; what is for another partition is dropped."""
        for _ in range(count):
            output = self.undelivered.pop(0)
            if output.partition == self.number:
                offset = self.offset(output.topic)
                self._take_in(Record(output.topic, self.number, offset, output.key, output.value, output.headers))

    def _work_off(self) -> None:
        """What a step left over is done before anything else; a worker comes back at once for it."""
        while self.partition.next_deadline_us() == 0:
            self.partition.fire_timers(self.now, 0)
            if not self._held:
                self.commit()
            if self.partition.remembered > limits.REMEMBERED_IDS_MAX:
                break

    def again(self, record: Record) -> list[events.Decision]:
        """The same record once more, as a producer's or an upstream's repeat: at an offset of its own."""
        return self._handle(record._replace(offset=self.offset(record.topic)))

    def redo(self, record: Record) -> None:
        """Handle a record that was recorded, at the offset that it had; messages between deciders among them."""
        self._take_in(record)

    def redeliver(self) -> None:
        """Kafka delivers everything again from the start: all of it lies below the stored positions."""
        decisions = len(self.decisions)
        for record in list(self.input):
            self.partition.handle(record, self.now)
        self.commit()
        assert len(self.decisions) == decisions

    # When: commands

    def trigger(self, id: str, agent_id: str = "A", **fields: Any) -> events.Decision:
        """A trigger, in a conversation of its own unless one is named."""
        fields.setdefault("conversation_id", f"c-{id}")
        return self._one(TRIGGERS.name, {"type": "trigger", "v": 1, "id": id, "agent_id": agent_id, **fields})

    def stop(self, trigger_id: str | None = None, agent_id: str = "A", **fields: Any) -> events.Decision:
        if trigger_id is not None:
            fields["trigger_id"] = trigger_id
        fields.setdefault("id", self.new_id("stop"))
        return self._one(TRIGGERS.name, {"type": "stop", "v": 1, "agent_id": agent_id, **fields})

    def control(self, name: str, agent_id: str = "A", **fields: Any) -> events.Decision:
        fields.setdefault("id", self.new_id(name))
        fields.setdefault("requested_by", "operator")
        return self._one(CONTROLS.name, {"type": name, "v": 1, "agent_id": agent_id, **fields})

    def site_control(self, kind: str, site: str = "default", /, **fields: Any) -> site_events.SiteDecision:
        """The site's decision on this control."""
        fields = {"id": self.new_id(kind), "requested_by": "operator", **fields}
        before = len(self.site_decisions)
        self.send(SITE_CONTROLS.name, {"type": kind, "v": 1, "site": site, **fields}, key=site.encode())
        return self.site_decisions[before]

    def configure(self, agent_id: str = "A", **fields: Any) -> events.Decision:
        return self.control("configure", agent_id, **fields)

    def status(self, trigger_id: str, status: str, agent_id: str = "A", **fields: Any) -> list[events.Decision]:
        """What the runner says of the newest attempt of the trigger, or of the one named by execution_id."""
        dispatch = self.dispatch(trigger_id, agent_id, fields.get("execution_id"))
        value = {
            "type": "status",
            "v": 1,
            "agent_id": agent_id,
            "conversation_id": dispatch["conversation_id"],
            "execution_id": dispatch["execution_id"],
            "status": status,
            **fields,
        }
        return self.send(STATUSES.name, value)

    def finish(self, trigger_id: str, agent_id: str = "A", **fields: Any) -> list[events.Decision]:
        return self.status(trigger_id, "finished", agent_id, **fields)

    def fail(self, trigger_id: str, agent_id: str = "A", **fields: Any) -> list[events.Decision]:
        return self.status(trigger_id, "failed", agent_id, **fields)

    def _one(self, topic: str, value: Json) -> events.Decision:
        """The decision on this command itself; what it left over follows in ``decisions``."""
        decisions = self.send(topic, value)
        return decisions[0] if decisions else HELD

    def new_id(self, prefix: str) -> str:
        self._ids += 1
        return f"{prefix}-{self._ids}"

    # When: time and faults

    def advance(self, seconds: float) -> None:
        """Move the clock, firing every timer at its time, as a worker does within the second."""
        self.advance_to(self.now + round(seconds * SECOND))

    def advance_to(self, until: int) -> None:
        while (deadline := self.partition.next_deadline_us()) is not None and deadline <= until:
            self.now = max(self.now, deadline)
            self.fire()
        self.now = max(self.now, until)

    def skip(self, seconds: float) -> None:
        """Move the clock without firing a timer: an outage, or the time that handling a backlog takes."""
        self.now += round(seconds * SECOND)

    def fire(self) -> None:
        """Fire all timers that are due."""
        self.journal.append(Action(self.now, "fire", None))
        while (deadline := self.partition.next_deadline_us()) is not None and deadline <= self.now:
            self.partition.fire_timers(self.now, 100)
            self.commit()
            self._deliver_all()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Handle several records in one transaction, which is committed at the end, unless something fails before."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        self.commit()
        self._work_off()
        self._deliver_all()

    def crash(self) -> None:
        """Lose everything that was not committed; a new owner loads the rows and reads on from their positions."""
        self.journal.append(Action(self.now, "crash", None))
        self.partition = self.restored()
        for record in self.input:
            if record.offset >= self.partition.positions.get(record.topic, 0):
                self.partition.handle(record, self.now)
        if not self._held:
            self.commit()
            self._work_off()
            self._deliver_all()

    def restored(self) -> Partition:
        """A partition loaded from what is committed."""
        partition = Partition(self.number, self.partitions, self.defaults)
        for key, value in self.rows.items():
            partition.load(key, value)
        partition.loaded(self.now, bool(self.decisions))
        return partition

    def commit(self) -> None:
        """Take the partition's changes as one transaction."""
        changes = self.partition.take_changes()
        if changes is None:
            return
        self.transactions += 1
        for key, row in changes.rows.items():
            assert row is None or len(row) <= limits.RECORD_BYTES_MAX
            if row is None:
                self.rows.pop(key, None)
            else:
                self.rows[key] = row
        texts_before, decisions_before = len(self.texts), len(self.decisions)
        for output in changes.outputs:
            self._take(output)
        self._check_messages(self.decisions[decisions_before:], self.texts[texts_before:])

    def _take(self, output: Output) -> None:
        self.outputs.append(output)
        if output.topic != DEAD_LETTERS.name:
            assert output.value is None or len(output.value) <= limits.RECORD_BYTES_MAX, "a record must fit into Kafka"
        if output.topic == DECISIONS.name:
            assert output.value is not None
            self._take_decision(output, output.value)
        elif output.topic == DISPATCHES.name:
            self.dispatches.append(json.loads(output.value or b""))
        elif output.topic == TEXTS.name:
            self.texts.append(json.loads(output.value or b""))
        elif output.topic == DEAD_LETTERS.name:
            self.dead_letters.append(output)
        elif output.topic == SITE_DECISIONS.name:
            assert output.value is not None
            self._take_site_decision(output, output.value)
        elif output.topic in (CLAIMS.name, SIGNALS.name) and not any(name == "origin" for name, _ in output.headers):
            self.messages.append(output)
            self.undelivered.append(output)
        else:
            assert output.topic in {topic.name for topic in INPUT_TOPICS}
            self.rekeyed.append(output)

    def _take_site_decision(self, output: Output, value: bytes) -> None:
        decision = site_events.read_site_decision(value)
        assert site_events.write_site_decision(decision) == value
        assert output.key == decision.site.encode()
        assert len(decision.events) <= limits.STEP_CHANGES_MAX + NOTES_MAX
        if self._site_verifier is not None:
            violation = self._site_verifier.check(value, len(self.site_decisions))
            assert violation is None, violation
        self.site_decisions.append(decision)

    def _take_decision(self, output: Output, value: bytes) -> None:
        decision = events.read_decision(value)
        assert events.write_decision(decision) == value, "a decision reads and writes back to the same bytes"
        assert output.key == decision.agent_id.encode()
        changed = {getattr(event, "trigger_id", event.type) for event in decision.events}
        assert len(changed) <= limits.STEP_CHANGES_MAX + NOTES_MAX
        assert len(decision.events) <= 2 * limits.STEP_CHANGES_MAX + NOTES_MAX, "of a trigger: its claim's end, its own"
        assert decision.prev == self._last_sha256.get(decision.agent_id)
        self._last_sha256[decision.agent_id] = hashlib.sha256(value).hexdigest()
        named = [("command_id", decision.command_id)] if decision.command_id is not None else []
        named += [("settles", id) for id in decision.settles]
        assert output.headers == tuple((name, id.encode()) for name, id in named)
        if self._verifier is not None:
            violation = self._verifier.check(value, len(self.values))
            assert violation is None, violation
        self.decisions.append(decision)
        self.values.append(value)

    def _check_messages(self, decisions: Sequence[events.Decision], texts: Sequence[Json]) -> None:
        accepted = [
            (decision.agent_id, event.trigger_id)
            for decision in decisions
            if isinstance(decision.command, Trigger) and decision.command.message is not None
            for event in decision.events
            if isinstance(event, events.Accepted)
        ]
        said = [(text["agent_id"], text["trigger_id"]) for text in texts if text["kind"] == "message"]
        assert said == accepted, "each accepted trigger's message is written beside it, and no other"

    # Then

    @property
    def last(self) -> events.Decision:
        return self.decisions[-1]

    def agent(self, agent_id: str = "A") -> Agent:
        return self.partition.agents[agent_id]

    def site(self, site_id: str = "default") -> Site:
        return self.partition._sites.sites[site_id]

    def granted(self, site_id: str = "default") -> list[str]:
        """Ids of the triggers whose claims are granted, the oldest first."""
        return [key.id.decode() for key in self.site(site_id).granted]

    def refused(self) -> dict[str, str]:
        """Trigger ids of all refusals, of those as well that had to wait for a site -> code."""
        found = {d.command_id: d.refusal.code for d in self.decisions if d.refusal is not None and d.command_id}
        return found | {event.trigger_id: event.code for event in self.events_of(events.RefusedLater)}

    def claim_state(self, trigger_id: str, agent_id: str = "A") -> str | None:
        return self.agent(agent_id).triggers[trigger_id].claim_state

    def running(self, agent_id: str = "A") -> list[str]:
        """Ids of the triggers with a current attempt, in the order of their dispatch."""
        return list(self.agent(agent_id).executions.values())

    def waiting(self, agent_id: str = "A") -> list[str]:
        """Ids of the waiting triggers, in start order."""
        return [key.id.decode() for key in self.agent(agent_id).waiting]

    def final(self, trigger_id: str, agent_id: str = "A") -> str | None:
        remembered = self.agent(agent_id).remembered.get(("trigger", trigger_id))
        return None if remembered is None else remembered.state

    def dispatch(self, trigger_id: str, agent_id: str = "A", execution_id: str | None = None) -> Json:
        """The newest dispatch of the trigger, or the one of this attempt."""
        for dispatch in reversed(self.dispatches):
            about = dispatch["type"], dispatch["agent_id"], dispatch["trigger_id"]
            if about == ("dispatch", agent_id, trigger_id) and execution_id in (None, dispatch["execution_id"]):
                return dispatch
        raise AssertionError(f"{trigger_id} of {agent_id} was never dispatched")

    def dispatched(self, agent_id: str | None = None) -> list[str]:
        """Trigger ids of all dispatches so far, in order."""
        return [
            dispatch["trigger_id"]
            for dispatch in self.dispatches
            if dispatch["type"] == "dispatch" and agent_id in (None, dispatch["agent_id"])
        ]

    def told(self, name: str) -> list[str]:
        """Trigger ids of the runner's records of this type (stop_requested, revoked)."""
        return [dispatch["trigger_id"] for dispatch in self.dispatches if dispatch["type"] == name]

    def events_of(self, kind: type[Message] | None = None) -> list[Any]:
        return [e for decision in self.decisions for e in decision.events if kind is None or isinstance(e, kind)]

    def state(self) -> Json:
        """Live triggers, settings and outcomes of every agent: what a command without effect must not change."""
        return {
            agent_id: {
                "row": asdict(replace(agent.row, seq=0, prev=None)),
                "triggers": {id: asdict(row) for id, row in agent.triggers.items()},
                "waiting": list(agent.waiting),
                "running": list(agent.executions.items()),
                "conversations": {id: asdict(row) for id, row in agent.conversations.items()},
            }
            for agent_id, agent in self.partition.agents.items()
        } | {f"site {site.site_id}": site_content(site, without_head=True) for site in self.partition._sites}

    def check(self) -> None:
        """Indexes equal those rebuilt from the rows (I8), the state equals the fold of the log, and I7."""
        restored = self.restored()
        assert restored.positions == self.partition.positions
        assert restored.at == self.partition.at
        assert restored.heartbeats == self.partition.heartbeats
        assert restored.remembered == self.partition.remembered
        assert restored._texts == self.partition._texts
        assert set(restored.agents) == {id for id, agent in self.partition.agents.items() if agent.row.seq}
        for agent_id, agent in restored.agents.items():
            assert content(agent) == content(self.agent(agent_id))
            check_room(self.agent(agent_id), self.now, self.partition.next_deadline_us())
            if self._verifier is not None:
                folded = self._verifier._ledgers[agent_id]
                folded.agent.row.prev = folded.sha256
                assert content(without_leases(folded.agent)) == content(without_leases(agent))
        assert {site.site_id: site_content(site) for site in restored._sites} == {
            site.site_id: site_content(site) for site in self.partition._sites
        }
        for site in self.partition._sites:
            assert site.row.todo or site.next_grantable() is None, "I5: nothing that could be granted waits"
        if self._verifier is not None:
            heads = {id: Head(agent.row.seq, agent.row.prev) for id, agent in self.partition.agents.items()}
            self._verifier._heads = Heads({id: head for id, head in heads.items() if head.seq})
            assert self._verifier.finish() is None
        if self._agreement is not None:
            assert self._agreement.finish() is None


def number_of(agent_id: str, partitions: int) -> int:
    return partition_of(agent_id, partitions)
