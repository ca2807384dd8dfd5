"""One partition: rows in, records handled one by one, changes out. Synchronous, and without clock or I/O.

The Faust worker, the tests' simulator and the audit drive this same class. Its caller gives the time and writes what
``take_changes`` returns in one transaction; a crash before that leaves the rows as they were, and the same input is
handled again (F1).

Order of work: what an earlier step left over (F1), then a record or a timer. Timers fire only at the caller's word,
so that none comes before the input that was there when the partition was taken over (F9).

An exception of the rules becomes ``RuleFailure``; the object is unusable after it. The caller loads a new one, and goes
on in single steps to find the record (which stops the partition) or the timer (which parks its agent) (G4).
"""

import hashlib
from collections.abc import Mapping
from itertools import islice
from typing import Final, NamedTuple

from streams import DEAD_LETTERS, DECISIONS, DISPATCHES, SITE_DECISIONS, STATUSES, codec
from streams.codec import Output, Record
from streams.rules import dispatches, events, limits, verdicts
from streams.rules.agent.decide import decide
from streams.rules.agent.rows import Watcher
from streams.rules.agent.state import Agent
from streams.rules.agent.step import RunnerOutput, Step, Via
from streams.rules.agent.timers import Deadline
from streams.rules.commands import AgentCommand
from streams.rules.messages import (
    Configure,
    Continue,
    Control,
    Invalid,
    LosePayload,
    Park,
    Status,
    Stop,
    Timer,
    Trigger,
)
from streams.rules.order import SECOND, format_instant
from streams.rules.site.state import Site
from streams.rules.site_events import SiteCommand
from streams.rules.site_messages import Internal
from streams.sites import Sites
from streams.stored_agents import key_of, value_of
from streams.tally import Tally
from streams.timers import Timers

_ERROR_CHARACTERS_MAX: Final = 500
_WITH_ID: Final = (Trigger, Stop, Control, Invalid)
_ENDS_BY_RUNNER: Final = (events.Finished, events.AttemptFailed, events.TriggerPaused, events.Stopped)


class Changes(NamedTuple):
    """Everything since the last time: one transaction."""

    outputs: list[Output]
    rows: dict[bytes, bytes | None]
    """Changelog rows, None to delete; the position row is among them."""


class RuleFailure(Exception):  # noqa: N818 - it reads as what it is
    """The rules failed on a record, or on a timer or left-over work of an agent: a bug, not an outage."""

    def __init__(
        self, record: Record | None, agent_id: str | None, error: BaseException, site_id: str | None = None
    ) -> None:
        if record is not None:
            where = f"{record.topic}/{record.partition}@{record.offset}"
        elif agent_id is not None:
            where = f"a timer of agent {agent_id!r}"
        elif site_id is not None:
            where = f"left-over work of site {site_id!r}"
        else:
            where = "what timers and left-over work wrote"
        super().__init__(f"the rules failed on {where}: {type(error).__name__}: {error}")
        self.record = record
        self.agent_id = agent_id
        """Whose timer or left-over work it was."""
        self.site_id = site_id
        """Whose left-over work it was; a site can't be parked."""


class RowsMissing(Exception):  # noqa: N818 - it reads as what it is
    """Decisions were written by this partition, but its rows are gone: it can't know what is running."""


class Partition:
    """The state of one partition of every topic, and its single decider."""

    def __init__(self, number: int, partitions: int, defaults: limits.Defaults) -> None:
        self.number = number
        self.partitions = partitions
        self.defaults = defaults
        self.agents: dict[str, Agent] = {}
        self.positions: dict[str, int] = {}
        """Next offset by input topic; absent: none is stored."""
        self.at = 0
        self.heartbeats = 0
        self.remembered = 0
        """Number of remembered ids of all agents."""
        self.tally = Tally()
        """Since ``take_tally``."""
        self._dispatched = 0
        self._raw: dict[bytes, bytes] = {}
        self._texts: dict[tuple[str, str], bytes] = {}
        self._timers = Timers(self.agents)
        self._unfinished: dict[str, None] = {}
        self._outputs: list[Output] = []
        self._changed_agents: dict[str, Agent] = {}
        self._changed_texts: dict[tuple[str, str], bytes | None] = {}
        self._moved = False
        self._sites = Sites(defaults, partitions)

    @property
    def sites(self) -> Mapping[str, Site]:
        return self._sites.sites

    # Restoring

    def load(self, key: bytes, value: bytes | None) -> None:
        """One changelog record, in order."""
        if value is None:
            self._raw.pop(key, None)
        else:
            self._raw[key] = value

    @property
    def is_empty(self) -> bool:
        """Nothing was ever stored."""
        return not self._raw and not self.positions

    def loaded(self, now: int, decisions_exist: bool) -> None:
        """All rows are there: build the indexes. Heartbeats count as missed only from ``now`` on.

        RowsMissing if there are decisions but no rows, or rows without the partition's own: each transaction writes
        that, and ``berth recover`` writes it last. codec.UnreadableRow names the first one that can't be read.
        """
        if (decisions_exist or self._raw) and codec.write_key(codec.PARTITION_KEY) not in self._raw:
            what = "some of its rows in the changelog are" if self._raw else "its rows in the changelog are"
            raise RowsMissing(
                f"partition {self.number}: decisions exist, but {what} gone. Nothing was written. "
                "Rebuild them from the decisions: berth recover."
            )
        for key, value in self._raw.items():
            try:
                self._load_row(codec.read_key(key), value)
            except (ValueError, TypeError, KeyError) as error:
                raise codec.UnreadableRow(key, error) from error
        self._raw.clear()
        self._sites.loaded()
        for agent in self.agents.values():
            agent.loaded(now)
            self.remembered += len(agent.remembered)
            if agent.has_work:
                self._unfinished[agent.agent_id] = None
        self._timers.rebuild(self.at)

    def _load_row(self, key: codec.Key, value: bytes) -> None:
        match key:
            case ("partition",):
                row = codec.read_partition(value)
                self.at, self.positions, self.heartbeats = row.at, dict(row.positions), row.heartbeats
            case ("agent", agent_id):
                self._agent(agent_id).row = codec.read_agent(value)
            case ("trigger", agent_id, _):
                self._agent(agent_id).load_trigger(codec.read_trigger(value))
            case ("text", agent_id, trigger_id):
                self._texts[agent_id, trigger_id] = codec.checked_texts(value)
            case ("conversation", agent_id, conversation_id):
                self._agent(agent_id).conversations[conversation_id] = codec.read_conversation(value)
            case ("remembered", agent_id, "trigger" | "stop" | "control" as kind, id):
                self._agent(agent_id).remembered[kind, id] = codec.read_remembered(value)
            case ("watch", agent_id, conversation_id, watcher_agent_id, trigger_id):
                watchers = self._agent(agent_id).watches.setdefault(conversation_id, {})
                watchers[Watcher(watcher_agent_id, trigger_id)] = codec.read_watch(value)
            case ("site" | "gate" | "deletion" | "claim" | "site_control", *_):
                self._sites.load_row(key, value)
            case _:
                raise ValueError("a row of an unknown kind")

    @property
    def known_decisions(self) -> dict[str, int]:
        """How many decisions the rows know of, by their topic; it holds at least as many, since it forgets nothing."""
        return {
            DECISIONS.name: sum(agent.row.seq for agent in self.agents.values()),
            SITE_DECISIONS.name: sum(site.row.seq for site in self._sites),
        }

    def _agent(self, agent_id: str) -> Agent:
        agent = self.agents.get(agent_id)
        if agent is None:
            agent = self.agents[agent_id] = Agent(agent_id)
        return agent

    def start_at(self, topic: str, offset: int) -> None:
        """Where to begin with a topic that has no stored position."""
        assert topic not in self.positions
        self.positions[topic] = offset
        self._moved = True

    def passed(self, positions: Mapping[str, int], write: bool) -> None:
        """Inputs were read up to these offsets, and every record before them is handled: the rest were markers.

        ``write``: also when nothing else is to be written.
        """
        for topic, offset in positions.items():
            if offset > self.positions.get(topic, 0):
                self.positions[topic] = offset
                self._moved |= write

    # Handling

    def handle(self, record: Record, now: int) -> None:
        """Handle one input record; one that was handled before is skipped. RuleFailure if the rules fail."""
        if record.offset < self.positions.get(record.topic, 0):
            return
        self._work_off(now)
        dispatched = self._dispatched
        try:
            self._handle(record, now)
        except Exception as error:
            raise RuleFailure(record, None, error) from error
        if self._dispatched != dispatched and record.topic == STATUSES.name:
            self.tally.freed_at_ms.append(record.timestamp_ms)
        self.positions[record.topic] = record.offset + 1
        self._moved = True

    def _handle(self, record: Record, now: int) -> None:
        match codec.read(record, self.partitions):
            case codec.Command(agent_id, command, via):
                self._decide(self._agent(agent_id), command, _cause(record, command), via, now)
            case codec.SiteCommandRead(site_id, command, via):
                at = max(now, self.at, getattr(command, "at", 0))
                self.at = max(self.at, self._sites.handle(site_id, command, _cause(record, command), via, at))
            case codec.Rekeyed(output):
                self._outputs.append(output)
            case codec.DeadLetter(reason):
                self._outputs.append(dead_letter(record, reason, now))

    def next_deadline_us(self) -> int | None:
        """When ``fire_timers`` is next of use (microseconds); None: never, by what is known."""
        if self._unfinished or self._sites.has_work or self.remembered > limits.REMEMBERED_IDS_MAX:
            return 0
        return self._timers.first_at

    def fire_timers(self, now: int, limit: int) -> int:
        """Do what is left over, and fire up to ``limit`` timers that are due: leases, grace, retries, then the rest.

        Returns how many fired. RuleFailure names the agent.
        """
        self._work_off(now)
        fired = 0
        due = self._timers.take_due(now)
        for index, (agent, deadline) in enumerate(due):
            if fired == limit:
                self._timers.put_back(due[index:])
                break
            fired += self._fire(agent, deadline, now)
        while self.remembered > limits.REMEMBERED_IDS_MAX and fired < limit:
            fired += self._forget_early(now)
        return fired

    def park(self, agent_id: str, error: str, now: int) -> None:
        """The rules fail on this agent's timers: it dispatches nothing until it is configured."""
        agent = self._agent(agent_id)
        self._unfinished.pop(agent_id, None)
        cause = _left_over_cause(agent)
        self._decide(agent, Park(error=error[:_ERROR_CHARACTERS_MAX]), cause, "internal", now)

    def lose_payload(self, agent_id: str, trigger_id: str, now: int) -> None:
        """What a runner would be sent for this trigger is nowhere any more: it fails, or what runs is its last attempt.

        The agent looks at its queue again when it is next worked off: until all have lost theirs, nobody starts.
        """
        agent = self.agents[agent_id]
        cause = verdicts.ContinueCause(**{"continue": agent.triggers[trigger_id].accepted_seq})
        self._decide(agent, LosePayload(trigger_id=trigger_id), cause, "internal", now)

    def clock_behind_us(self, now: int) -> int:
        """How far the last decision's time is ahead of the clock (microseconds); not negative."""
        return max(0, self.at - now)

    def take_changes(self) -> Changes | None:
        """What is to be written; None if there is nothing."""
        site_outputs, site_rows = self._sites.take()
        self._outputs.extend(site_outputs)
        if not (self._moved or self._outputs or self._changed_agents or self._changed_texts or site_rows):
            return None
        rows: dict[bytes, bytes | None] = site_rows
        for agent in self._changed_agents.values():
            for ref in agent.changed:
                rows[key_of(agent.agent_id, ref)] = value_of(agent, ref)
            agent.changed.clear()
        for (agent_id, trigger_id), value in self._changed_texts.items():
            rows[codec.write_key(("text", agent_id, trigger_id))] = value
        position = codec.PartitionRow(self.at, self.positions, self.heartbeats)
        rows[codec.write_key(codec.PARTITION_KEY)] = codec.write_partition(position)
        changes = Changes(self._outputs, rows)
        self._outputs = []
        self._changed_agents = {}
        self._changed_texts = {}
        self._moved = False
        return changes

    def take_outputs(self) -> list[Output]:
        """What would be sent, for a replay that stores nothing: changed rows and counts are forgotten."""
        outputs = [*self._outputs, *self._sites.take_outputs()]
        for agent in self._changed_agents.values():
            agent.changed.clear()
        self._outputs, self._changed_agents, self._changed_texts, self._moved = [], {}, {}, False
        self.take_tally()
        return outputs

    def take_tally(self) -> Tally:
        """What was counted since the last time."""
        tally, self.tally = self.tally, Tally()
        return tally

    # Deciding

    def _decide(self, agent: Agent, command: AgentCommand, cause: verdicts.Cause, via: Via, now: int) -> Step:
        at = max(now, self.at, command.at if isinstance(command, Internal) else 0)
        if self._uses_default_limit(agent, command):
            command = command.model_copy(update={"default_limit": self.defaults.parallelism_limit})
        remembered = len(agent.remembered)
        step = decide(agent, command, at, via, self.defaults)
        self.remembered += len(agent.remembered) - remembered
        self._changed_agents[agent.agent_id] = agent
        if step.sign_of_life:
            self.heartbeats += 1
        if step.has_decision:
            self.at = at
            self._write(agent, step, cause, via)
            self.tally.count(step)
        if agent.has_work:
            self._unfinished[agent.agent_id] = None
        else:
            self._unfinished.pop(agent.agent_id, None)
        self._timers.schedule(agent, self.at)
        return step

    @staticmethod
    def _uses_default_limit(agent: Agent, command: AgentCommand) -> bool:
        """The log must hold every input of a decision that the agent's own events don't give."""
        if isinstance(command, Configure):
            asks = "parallelism_limit" in command.model_fields_set and command.parallelism_limit is None
            return asks or not agent.row.created
        return isinstance(command, Trigger) and not agent.row.created

    def _write(self, agent: Agent, step: Step, cause: verdicts.Cause, via: Via) -> None:
        decision = decision_of(agent, step, cause, via)
        command_id, settles = decision.command_id, decision.settles
        value = events.write_decision(decision)
        agent.row.prev = hashlib.sha256(value).hexdigest()
        key = agent.agent_id.encode()
        self._outputs.append(Output(DECISIONS.name, key, value, codec.decision_headers(command_id, settles)))
        self._write_texts(agent, step, key)
        for output in step.outputs:
            self._outputs.append(Output(DISPATCHES.name, key, self._for_runner(agent, output)))
        for message in step.messages:
            self._outputs.append(codec.write_message(message, self.partitions))
        for trigger_id in agent.ended:
            text_key = agent.agent_id, trigger_id
            if self._texts.pop(text_key, None) is not None:
                self._changed_texts[text_key] = None
        agent.ended.clear()

    def _for_runner(self, agent: Agent, output: RunnerOutput) -> bytes:
        value = output.__pydantic_serializer__.to_json(output, exclude_unset=True)
        if isinstance(output, dispatches.Dispatch):
            self._dispatched += 1
            return codec.with_texts(value, self._texts.get((agent.agent_id, output.trigger_id)))
        return value

    def _write_texts(self, agent: Agent, step: Step, key: bytes) -> None:
        command = step.command
        if isinstance(command, Trigger):
            if not any(type(event) is events.Accepted for event in step.emitted):
                return
            if command.id in agent.triggers:  # else its time was over when it came: nobody is sent what it holds
                texts = codec.write_texts(command.message, command.payload)
                if texts is not None:
                    text_key = agent.agent_id, command.id
                    self._texts[text_key] = self._changed_texts[text_key] = texts
            if command.message is not None:
                self._outputs.append(
                    codec.text_output(key, agent.agent_id, command.id, None, "message", command.message)
                )
        elif isinstance(command, Status) and step.emitted:
            ended = next((event for event in step.emitted if isinstance(event, _ENDS_BY_RUNNER)), None)
            if ended is not None:
                about = key, agent.agent_id, ended.trigger_id, ended.execution_id
                if command.error is not None:
                    self._outputs.append(codec.text_output(*about, "error", command.error))
                if command.result is not None:
                    self._outputs.append(codec.text_output(*about, "result", command.result))

    # Left-over work and timers

    def _work_off(self, now: int) -> None:
        """What an earlier step noted comes before anything else (F1)."""
        while self._sites.has_work:
            try:
                self.at = max(self.at, self._sites.work_off(max(now, self.at)))
            except Exception as error:
                raise RuleFailure(None, None, error, self._sites.working_on) from error
        while self._unfinished:
            agent_id = next(iter(self._unfinished))
            agent = self.agents[agent_id]
            cause = _left_over_cause(agent)
            try:
                self._decide(agent, Continue(), cause, "internal", now)
            except Exception as error:
                raise RuleFailure(None, agent_id, error) from error

    def _fire(self, agent: Agent, deadline: Deadline, now: int) -> int:
        if not self._timers.still_holds(agent, deadline, self.at):
            return 0
        row = agent.triggers.get(deadline.trigger_id)
        lease = row if deadline.kind == "lease" else None
        timer = Timer(
            kind=deadline.kind,
            id=deadline.trigger_id,
            deadline=deadline.at,
            execution_id=lease.execution_id if lease else None,
            last_seen_at=lease.last_seen_at if lease else None,
        )
        self._decide_timer(agent, timer, now)
        return 1

    def _decide_timer(self, agent: Agent, timer: Timer, now: int) -> None:
        cause = verdicts.TimerCause(timer=verdicts.TimerRef(kind=timer.kind, id=timer.id, deadline=timer.deadline))
        try:
            self._decide(agent, timer, cause, "timer", now)
            self._work_off(now)
        except RuleFailure:
            raise
        except Exception as error:
            raise RuleFailure(None, agent.agent_id, error) from error

    def _forget_early(self, now: int) -> int:
        """Too many ids are remembered: the agent with the oldest forgets some before their time (F8)."""
        agent = min(
            (agent for agent in self.agents.values() if agent.remembered),
            key=lambda agent: (next(iter(agent.remembered.values())).at, agent.agent_id),
        )
        oldest = list(islice(agent.remembered.values(), limits.STEP_CHANGES_MAX))
        deadline = oldest[-1].at + limits.REMEMBERED_SECONDS * SECOND
        self._decide_timer(agent, Timer(kind="forget", id="", deadline=deadline), now)
        return 1


def decision_of(agent: Agent, step: Step, cause: verdicts.Cause, via: Via) -> events.Decision:
    """What is written of a step that has just been decided."""
    command = step.command
    if step.repeats is not None:
        command = command.model_copy(update={"repeats": step.repeats})
    command_id = command.id if isinstance(command, _WITH_ID) else None
    settles = tuple(step.settles)
    is_open = step.refusal is None and _is_open(agent, command)
    if command_id is not None and command_id not in settles and not is_open:
        settles = (command_id, *settles)
    return events.Decision(
        agent_id=agent.agent_id,
        seq=step.seq,
        at=step.at,
        via=via,
        cause=cause,
        command=command,
        command_id=command_id,
        settles=settles,
        events=tuple(step.emitted),
        refusal=step.refusal,
        ignored=step.ignored,
        policy=limits.POLICY,
        prev=agent.row.prev,
    )


def _is_open(agent: Agent, command: AgentCommand) -> bool:
    """Whether the sender of an ask or force has still to wait, for the answer of a site."""
    row = agent.triggers.get(command.id) if isinstance(command, Trigger) else None
    return row is not None and row.is_urgent and row.state == "waiting"


def _cause(record: Record, command: AgentCommand | SiteCommand) -> verdicts.Cause:
    """The input record; for what other deciders sent their event, since those topics are not kept."""
    if isinstance(command, Internal):
        sender = command.sender
        return verdicts.SenderCause(decider=sender.decider, seq=sender.seq, index=sender.index)
    return verdicts.RecordCause(topic=record.topic, partition=record.partition, offset=record.offset)


def _left_over_cause(agent: Agent) -> verdicts.ContinueCause:
    """The decision that left the work over."""
    return verdicts.ContinueCause(**{"continue": agent.row.todo_since or agent.row.seq})


def dead_letter(record: Record, reason: str, now: int) -> Output:
    """The record as it came, with where it was and why it was not handled."""
    headers: list[tuple[str, bytes]] = [
        ("reason", reason.encode("utf-8", "backslashreplace")),
        ("topic", record.topic.encode()),
        ("partition", str(record.partition).encode()),
        ("offset", str(record.offset).encode()),
        ("at", format_instant(now).encode()),
    ]
    return Output(DEAD_LETTERS.name, record.key, record.value, tuple(headers))
