"""Recorded traffic through a real ``Partition`` in simulated time, with its own limits, pools or gates if told so.

One partition decides for all agents and sites, and what deciders tell each other arrives at once: the time that
messages take between partitions is not in it. It begins with the state that the log gives for the start of the stretch.
Nothing leaves it.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Final, Literal

from pydantic_core import from_json

from streams import CLAIMS, DECISIONS, DISPATCHES, SIGNALS, SITE_CONTROLS, SITE_DECISIONS, STATUSES, codec
from streams.audit.traffic import Arrival, Attempt, AttemptId, Traffic, Wait, value_of
from streams.codec import Record
from streams.partition import Partition
from streams.rules import events, limits
from streams.rules.agent.rows import TriggerRow
from streams.rules.agent.state import Agent
from streams.rules.messages import Configure, Message, Status, Trigger
from streams.rules.order import SECOND
from streams.rules.site.rows import GateRow, GateScope
from streams.rules.site.state import Site
from streams.rules.site_messages import ConfigureSite, Gate
from streams.sites import rows_of

EVERY_AGENT: Final = "*"
STOP_REPLY_UNKNOWN: Final = SECOND
"""A runner's answer to a request to stop, where the log shows none."""
_FAR: Final = limits.TIMEOUT_SECONDS_MAX
_SENT_ON: Final = frozenset({CLAIMS.name, SIGNALS.name})
_OF_SITES: Final = frozenset({CLAIMS.name, SITE_CONTROLS.name})
_SHIFTED: Final = ("created_at", "available_at", "expires_at", "decide_before")
_REFUSED: Final = b'"refus'
"""In every decision that refuses something, and in few others: the rest need not be read."""
_DECIDED: Final = frozenset({DECISIONS.name, SITE_DECISIONS.name})


@dataclass(frozen=True, slots=True)
class Change:
    """What is to be otherwise, all the time. ``limits``: by agent, ``*`` is every other one. ``gates``: open or not."""

    limits: Mapping[str, int | Literal["unlimited"]] = field(default_factory=dict)
    capacities: Mapping[str, int] = field(default_factory=dict)
    gates: Mapping[tuple[str, GateScope, str], bool] = field(default_factory=dict)

    def limit_of(self, agent_id: str) -> int | Literal["unlimited"] | None:
        return self.limits.get(agent_id, self.limits.get(EVERY_AGENT))


@dataclass(slots=True)
class Run:
    """What came out. Times in microseconds; busy: slots or workers times time, inside of the stretch."""

    decisions: int = 0
    waits: dict[tuple[str, str], Wait] = field(default_factory=dict)
    refused: set[tuple[str, str]] = field(default_factory=set)
    """Requests that a decision refused, when they came or later."""
    busy: Counter[str] = field(default_factory=Counter)
    busy_workers: Counter[str] = field(default_factory=Counter)
    limits: dict[str, int | None] = field(default_factory=dict)
    """Effective ones at the end, by agent; None: unlimited."""
    capacities: dict[str, int] = field(default_factory=dict)
    serial: set[str] = field(default_factory=set)
    gates: set[tuple[str, GateScope, str]] = field(default_factory=set)
    """(site, scope, name) of everything that had to pass one, open or closed."""
    estimated: int = 0
    """Attempts without a recorded one of that number: their duration is the median of their agent's."""
    cut_short: int = 0
    """Attempts whose recorded one was stopped from outside or never seen to end: they would have lasted longer."""


@dataclass(slots=True)
class _Live:
    agent_id: str
    conversation_id: str
    attempt: Attempt
    started_at: int
    site_id: str | None


class Simulation:
    """One run of a traffic under a change."""

    def __init__(self, traffic: Traffic, change: Change, durations: "Durations") -> None:
        self.run = Run(waits={key: replace(wait, started_at=None) for key, wait in _waiting_at_start(traffic)})
        self._traffic, self._change, self._durations = traffic, change, durations
        self._default = limits.Defaults(1, change.capacities.get("default", traffic.pool_default))
        self._partition = Partition(0, 1, self._default)
        self._events: list[tuple[int, int, Arrival | Status]] = []
        self._numbers = count()
        self._offsets: Counter[str] = Counter()
        self._live: dict[str, _Live] = {}
        self._now = traffic.since

    def go(self) -> Run:
        """Run the whole stretch."""
        self._load()
        for arrival in self._traffic.under_way:
            self._send(arrival.topic, value_of(arrival.command), arrival.command)
        for arrival in self._traffic.arrivals:
            self._push(arrival.at, arrival)
        until = self._traffic.until
        while True:
            deadline = self._partition.next_deadline_us()
            at = self._events[0][0] if self._events else until + 1
            if deadline is not None and deadline <= min(at, until):
                self._now = max(self._now, deadline)
                self._partition.fire_timers(self._now, 100)
                self._drain()
            elif at <= until:
                self._now = max(self._now, at)
                self._happen(heapq.heappop(self._events)[2])
            else:
                break
        return self._finished()

    def _push(self, at: int, event: Arrival | Status) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), event))

    # The state at the start

    def _load(self) -> None:
        partition, past = self._partition, self._traffic.past
        for agent in past.agents.values():
            for row in agent.triggers.values():
                self._comes_to_gates(row)
            for key, value in self._agent_rows(agent).items():
                partition.load(key, value)
        changed = self._change.capacities.keys() | {site for site, _, _ in self._change.gates}
        not_yet = (changed & self._traffic.sites) - past.sites.keys()
        for site in (*past.sites.values(), *map(Site, sorted(not_yet))):
            for key, value in rows_of(self._changed_site(site), with_remembered=False).items():
                partition.load(key, value)
        head = codec.PartitionRow(past.at, {}, 0)
        partition.load(codec.write_key(codec.PARTITION_KEY), codec.write_partition(head))
        partition.loaded(self._now, decisions_exist=False)
        for agent in past.agents.values():
            for execution_id, trigger_id in agent.executions.items():
                self._went_on(agent, agent.triggers[trigger_id], execution_id)

    def _agent_rows(self, agent: Agent) -> dict[bytes, bytes]:
        """The agent as it would be stored, but for ids that it remembers; its limit changed, and looked at anew."""
        row = replace(agent.row, todo=agent.row.todo or "pump", todo_since=agent.row.seq)
        limit = self._change.limit_of(agent.agent_id)
        if limit is not None and row.created and not agent.is_serial:
            row = replace(row, parallelism_limit=limit)
        rows: dict[codec.Key, bytes] = {("agent", agent.agent_id): codec.write_agent(row)}
        for trigger in agent.triggers.values():
            far = trigger.dispatched_at + _FAR * SECOND if trigger.dispatched_at is not None else None
            without = replace(trigger, timeout_seconds=_FAR, heartbeat_seconds=None, lease_until=far)
            rows["trigger", agent.agent_id, trigger.trigger_id] = codec.write_trigger(without)
        for id, conversation in agent.conversations.items():
            rows["conversation", agent.agent_id, id] = codec.write_conversation(conversation)
        for id, watchers in agent.watches.items():
            for watcher, watch in watchers.items():
                rows["watch", agent.agent_id, id, *watcher] = codec.write_watch(watch)
        return {codec.write_key(key): value for key, value in rows.items()}

    def _changed_site(self, site: Site) -> Site:
        """A copy to be stored, whose waiting claims are looked at anew."""
        changed = copy(site)
        changed.row = replace(site.row, todo_grant=True, todo_since=site.row.seq, todo=list(site.row.todo))
        changed.gates = dict(site.gates)
        if site.site_id in self._change.capacities:
            changed.row.created, changed.row.capacity = True, self._change.capacities[site.site_id]
        for (site_id, scope, name), is_open in self._change.gates.items():
            if site_id == site.site_id:
                changed.gates[scope, name] = replace(site.gates.get((scope, name), GateRow()), enabled=is_open)
                changed.row.todo.append(("gate", scope, name))
        return changed

    def _went_on(self, agent: Agent, row: TriggerRow, execution_id: str) -> None:
        """An attempt that ran at the start: it ends when it ended, if the log shows that."""
        id = AttemptId(agent.agent_id, row.trigger_id, row.attempt)
        assert row.dispatched_at is not None
        self._begins(id, execution_id, row.conversation_id, row.dispatched_at, row.site_id if row.worker else None)

    # What happens

    def _happen(self, event: Arrival | Status) -> None:
        if isinstance(event, Status):
            assert event.execution_id is not None
            if event.execution_id in self._live:
                self._ends(event.execution_id)
                self._send(STATUSES.name, event.__pydantic_serializer__.to_json(event, exclude_unset=True), event)
            return
        command = self._as_changed(event)
        if command is None:
            return
        if event.default_limit is not None:
            agent_id = getattr(command, "agent_id", "")
            limit = self._change.limit_of(agent_id) or event.default_limit
            self._partition.defaults = replace(self._default, parallelism_limit=limit)
        headers = ((codec.VIA_HEADER, b"http"),) if event.is_http else ()
        self._send(event.topic, value_of(command), command, headers)
        if isinstance(command, Trigger):
            self._arrived(command)

    def _as_changed(self, arrival: Arrival) -> Message | None:
        """The command without what the change overrides; None: nothing is left of it."""
        command = arrival.command
        later = self._now - arrival.at
        if later:
            shifted = [name for name in _SHIFTED if getattr(command, name, None) is not None]
            command = command.model_copy(update={name: getattr(command, name) + later for name in shifted})
        if isinstance(command, Configure) and self._change.limit_of(command.agent_id) is not None:
            return _without(command, "parallelism_limit")
        if isinstance(command, ConfigureSite) and command.site in self._change.capacities:
            return command.model_copy(update={"capacity": self._change.capacities[command.site]})
        if isinstance(command, Gate) and (command.site, command.scope, command.name) in self._change.gates:
            return _without(command, "enabled") if "run_budget" in command.model_fields_set else None
        return command

    def _comes_to_gates(self, row: TriggerRow) -> None:
        if row.site_id is not None:
            if row.organization_id is not None:
                self.run.gates.add((row.site_id, "organization", row.organization_id))
            if row.department_id is not None:
                self.run.gates.add((row.site_id, "department", row.department_id))

    def _arrived(self, command: Trigger) -> None:
        key = command.agent_id, command.id
        agent = self._partition.agents.get(command.agent_id)
        row = agent.triggers.get(command.id) if agent is not None else None
        if row is not None:
            self._comes_to_gates(row)
        if row is not None and key not in self.run.waits:
            started = row.dispatched_at if row.attempt else None
            self.run.waits[key] = Wait(max(row.accepted_at, row.available_at), row.organization_id, started)

    def _send(self, topic: str, value: bytes, command: Message, headers: tuple[tuple[str, bytes], ...] = ()) -> None:
        decider = getattr(command, "site" if topic in _OF_SITES else "agent_id")
        assert isinstance(decider, str)
        self._handle(topic, decider.encode(), value, headers)
        self._drain()

    def _handle(self, topic: str, key: bytes | None, value: bytes | None, headers: codec.Headers = ()) -> None:
        self._partition.handle(Record(topic, 0, self._offsets[topic], key, value, headers), self._now)
        self._offsets[topic] += 1

    def _drain(self) -> None:
        """Hand on what deciders told each other, and let runners begin and stop."""
        outputs = self._partition.take_outputs()
        while outputs:
            internal = []
            for output in outputs:
                if output.topic in _DECIDED:
                    self.run.decisions += 1
                    if output.topic == DECISIONS.name and output.value is not None and _REFUSED in output.value:
                        self._refused(events.read_decision(output.value))
                elif output.topic == DISPATCHES.name:
                    self._told(from_json(output.value or b"{}"))
                elif output.topic in _SENT_ON:
                    internal.append(output)
            for output in internal:
                self._handle(output.topic, output.key, output.value, output.headers)
            outputs = self._partition.take_outputs()

    def _refused(self, decision: events.Decision) -> None:
        if decision.refusal is not None and isinstance(decision.command, Trigger):
            self.run.refused.add((decision.agent_id, decision.command.id))
        for event in decision.events:
            if isinstance(event, events.RefusedLater):
                self.run.refused.add((decision.agent_id, event.trigger_id))

    # Runners

    def _told(self, record: dict[str, object]) -> None:
        execution_id, agent_id = str(record["execution_id"]), str(record["agent_id"])
        trigger_id = str(record["trigger_id"])
        if record["type"] == "dispatch":
            attempt = record["attempt"]
            assert isinstance(attempt, int)
            row = self._partition.agents[agent_id].triggers[trigger_id]
            wait = self.run.waits.get((agent_id, trigger_id))
            if wait is not None and wait.started_at is None:
                wait.started_at = self._now
            site_id = row.site_id if row.worker else None
            self._begins(
                AttemptId(agent_id, trigger_id, attempt), execution_id, row.conversation_id, self._now, site_id
            )
        elif record["type"] == "stop_requested":
            live = self._live.get(execution_id)
            if live is not None:
                after, outcome = live.attempt.stopped_after, live.attempt.outcome
                if after is None or outcome == "open":
                    after, outcome = STOP_REPLY_UNKNOWN, "stopped"
                self._end_at(self._now + after, execution_id, outcome, live)
        elif execution_id in self._live:
            self._ends(execution_id)

    def _begins(self, id: AttemptId, execution_id: str, conversation_id: str, at: int, site_id: str | None) -> None:
        attempt = self._traffic.attempts.get(id)
        if attempt is None:
            attempt = Attempt("finished", self._durations.median(id.agent_id))
            self.run.estimated += 1
        live = self._live[execution_id] = _Live(id.agent_id, conversation_id, attempt, at, site_id)
        for after, arrival in attempt.reactions:
            self._push(at + after, arrival)
        if attempt.outcome == "open" or attempt.stopped_after is not None:
            self.run.cut_short += 1
        if attempt.outcome != "open":
            self._end_at(at + attempt.duration, execution_id, attempt.outcome, live)

    def _end_at(
        self, at: int, execution_id: str, outcome: Literal["finished", "failed", "paused", "stopped"], live: _Live
    ) -> None:
        status = Status(
            agent_id=live.agent_id, conversation_id=live.conversation_id, execution_id=execution_id, status=outcome
        )
        if outcome == "failed":
            status = status.model_copy(update={"retryable": live.attempt.retryable})
        self._push(at, status)

    def _ends(self, execution_id: str) -> None:
        live = self._live.pop(execution_id)
        lasted = self._now - max(live.started_at, self._traffic.since)
        self.run.busy[live.agent_id] += lasted
        if live.site_id is not None:
            self.run.busy_workers[live.site_id] += lasted

    def _finished(self) -> Run:
        self._now = self._traffic.until
        for execution_id in list(self._live):
            self._ends(execution_id)
        run = self.run
        for agent in self._partition.agents.values():
            run.limits[agent.agent_id] = agent.limit
            if agent.is_serial:
                run.serial.add(agent.agent_id)
        for key in [key for key, wait in run.waits.items() if wait.started_at is None]:
            if key[1] not in self._partition.agents[key[0]].triggers:
                del run.waits[key]  # stopped, expired or refused before it could start
        run.capacities = {site.site_id: site.row.capacity for site in self._partition.sites.values()}
        return run


class Durations:
    """How long attempts of an agent take, from those that ended by themselves."""

    def __init__(self, attempts: Iterable[tuple[AttemptId, Attempt]]) -> None:
        self._of: dict[str, list[int]] = {}
        for id, attempt in attempts:
            if attempt.outcome != "open" and attempt.stopped_after is None:
                self._of.setdefault(id.agent_id, []).append(attempt.duration)
        self._all = sorted(duration for some in self._of.values() for duration in some)
        for some in self._of.values():
            some.sort()

    def median(self, agent_id: str) -> int:
        """Microseconds; of all agents where this one has none, and 0 where nobody has."""
        some = self._of.get(agent_id) or self._all
        return some[len(some) // 2] if some else 0


def _waiting_at_start(traffic: Traffic) -> list[tuple[tuple[str, str], Wait]]:
    """Triggers that waited for their first attempt when the stretch began."""
    past = traffic.past
    return [
        (key, wait)
        for key, wait in traffic.waits.items()
        if key[0] in past.agents and key[1] in past.agents[key[0]].triggers
    ]


def _without(command: Message, name: str) -> Message:
    fields = {field: getattr(command, field) for field in command.model_fields_set if field not in (name, "v", "type")}
    return type(command)(**fields)
