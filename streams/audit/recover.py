"""The stored rows of one partition, made anew from the log of its decisions.

Every decision is decided again on the state before it, which gives the state after it as its decider had it, with the
work that a step left over. What these rules don't give back byte for byte (an older policy, a bug mended since, rows
that were damaged when it was decided) is folded from its events instead; then work that was left over isn't known, and
the decider looks at everything anew.

The log alone doesn't have everything. From elsewhere come

- the texts of live triggers, which the log has as digests: from whatever holds them, and only those that fit;
- signs of life of running attempts, which leave no decision: from berth.statuses, at the time at which they were
  written, which may be a moment before they were handled;
- how far the inputs were handled: the last decision that a record of each caused, or a dead letter. What left neither
  is handled once more, and changes nothing: a sign of life, and a record that was copied to its right partition.

A text that nobody has any more is *lost*. Rows that are stored and say the same, or know more of these three, stay.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from pydantic import BaseModel, ValidationError

from streams import CLAIMS, DECISIONS, INPUT_TOPICS, SIGNALS, STATUSES, codec
from streams.audit.logged import Decider, Logged
from streams.audit.past import fold_agent, fold_site
from streams.audit.recompute import Recomputer
from streams.codec import Record
from streams.rules import events, verdicts
from streams.rules.agent.evolve import seen
from streams.rules.agent.rows import AgentRow, TriggerRow
from streams.rules.agent.state import Agent
from streams.rules.messages import Status, Text, Trigger
from streams.rules.site.rows import SiteRow
from streams.rules.site.state import Site
from streams.sites import read_site
from streams.sites import rows_of as rows_of_site
from streams.stored_agents import rows_of as rows_of_agent

TextName = Literal["message", "payload"]
POSITION_KEY: Final = codec.write_key(codec.PARTITION_KEY)


class LogDamaged(ValueError):  # noqa: N818 - it reads as what it is
    """A decision is missing or was changed: what the rows were can't be told from this log."""

    def __init__(self, logged: Logged, why: str) -> None:
        super().__init__(
            f"{logged.topic} partition {logged.partition}, offset {logged.offset}: decision {logged.decision.seq} of "
            f"{logged.decider.kind} {logged.decider.id!r} {why}"
        )


@dataclass(frozen=True, slots=True)
class Lost:
    """A live trigger of which a text is nowhere any more. ``state``: as it was when the log ended."""

    agent_id: str
    trigger_id: str
    conversation_id: str
    state: str
    accepted_at: int


class _Texts:
    """What a live trigger's runner is sent: the texts of the log, without their contents until somebody has them."""

    __slots__ = ("offset", "texts")

    def __init__(self, texts: dict[TextName, Text], offset: int | None) -> None:
        self.texts = texts
        self.offset = offset
        """Of its record in berth.triggers."""

    @property
    def is_complete(self) -> bool:
        return all(text.json is not None for text in self.texts.values())


class Rebuilt:
    """Partition ``number`` of ``partitions``.

    In this order: ``take`` every decision of its two logs, each log in order; if ``is_incomplete``, ``take_again`` the
    same; then the rest in any order; then ask.
    """

    def __init__(self, number: int, partitions: int) -> None:
        self.number = number
        self.at = 0
        """The latest instant of a decision; 0: there is none."""
        self.decisions = 0
        self.signs_of_life = 0
        self.positions: dict[str, int] = {}
        """Next offset by input topic; absent: nothing of it is known to have been handled."""
        self.unhandled: dict[str, int] = {}
        """By topic of messages: the first record after the last one that is known to have been handled."""
        self._partitions = partitions
        self._again = Recomputer()
        self._heads: dict[Decider, tuple[int, str]] = {}
        self._folded: set[Decider] = set()
        """Whose newest decision was folded, not decided again."""
        self._not_given_again: set[Decider] = set()
        self._last_messages: dict[str, BaseModel] = {}
        """By topic: the last message of another decider that was decided on."""
        self._texts: dict[tuple[str, str], _Texts] = {}

    # The log

    def take(self, logged: Logged) -> None:
        """The next decision. Raises LogDamaged."""
        decision, decider = logged.decision, logged.decider
        seq, sha256 = self._heads.get(decider, (0, None))
        if decision.seq != seq + 1:
            raise LogDamaged(logged, f"follows decision {seq}: {'a record is missing' if seq else 'the first is not'}")
        if decision.prev != sha256:
            raise LogDamaged(logged, "was written after another decision than the one before it: that was changed")
        self._heads[decider] = decision.seq, hashlib.sha256(logged.value).hexdigest()
        self.at = max(self.at, decision.at)
        self.decisions += 1
        self._note_input(logged)
        if isinstance(decision, events.Decision):
            self._note_texts(decision)
        if decider not in self._not_given_again:
            self._decide_again(logged)

    def _decide_again(self, logged: Logged) -> None:
        try:
            again = self._again.again(logged.decision, logged.value)
        except (AssertionError, KeyError, ValueError):
            again = b""
        if again is None:
            self._folded.add(logged.decider)
        elif again == logged.value:
            self._folded.discard(logged.decider)
        else:
            self._not_given_again.add(logged.decider)
            of_kind: dict[str, Any] = self._again.agents if logged.decider.kind == "agent" else self._again.sites
            of_kind.pop(logged.decider.id, None)

    @property
    def is_incomplete(self) -> bool:
        """Whether some decisions didn't come out again as they are: their deciders are to be folded from the start."""
        return bool(self._not_given_again)

    def take_again(self, logged: Logged) -> None:
        """The log once more, if ``is_incomplete``. Raises LogDamaged."""
        decision = logged.decision
        if logged.decider not in self._not_given_again:
            return
        self._folded.add(logged.decider)
        head = hashlib.sha256(logged.value).hexdigest()
        try:
            if isinstance(decision, events.Decision):
                agent = self._again.agents.setdefault(decision.agent_id, Agent(decision.agent_id))
                fold_agent(agent, decision)
                agent.row.prev = head
            else:
                site = self._again.sites.setdefault(decision.site, Site(decision.site))
                fold_site(site, decision)
                site.row.prev = head
        except (AssertionError, KeyError, ValueError) as error:
            raise LogDamaged(logged, f"doesn't fit those before it: {error!r}") from error

    def _note_input(self, logged: Logged) -> None:
        cause = logged.decision.cause
        if isinstance(cause, verdicts.RecordCause):
            self.positions[cause.topic] = cause.offset + 1
        elif isinstance(cause, verdicts.SenderCause):
            topic = SIGNALS if logged.topic == DECISIONS.name else CLAIMS
            self._last_messages[topic.name] = logged.decision.command

    def _note_texts(self, decision: events.Decision) -> None:
        command = decision.command
        for event in decision.events:
            if isinstance(event, events.Accepted) and isinstance(command, Trigger):
                found: dict[TextName, Text] = {}
                if command.message is not None:
                    found["message"] = command.message
                if command.payload is not None:
                    found["payload"] = command.payload
                if found:
                    is_record = isinstance(decision.cause, verdicts.RecordCause)
                    offset = decision.cause.offset if is_record else None  # type: ignore[union-attr]
                    self._texts[decision.agent_id, command.id] = _Texts(found, offset)
            elif events.is_end(event):
                self._texts.pop((decision.agent_id, event.trigger_id), None)  # type: ignore[union-attr]

    # Inputs

    def seek_message(self, topic: str) -> int | None:
        """The instant from which on the last handled message of a topic between deciders is to be looked for.

        None: none was handled. It was sent no earlier, but for what the clocks of two machines may differ.
        """
        message = self._last_messages.get(topic)
        return None if message is None else int(message.at)  # type: ignore[attr-defined]

    def take_message(self, record: Record) -> None:
        """A record of berth.claims or berth.signals, in order."""
        fate = codec.read(record, self._partitions)
        if (
            isinstance(fate, codec.Command | codec.SiteCommandRead)
            and fate.command == self._last_messages[record.topic]
        ):
            self.handled(record.topic, record.offset)
            self.unhandled.pop(record.topic, None)
        elif record.topic in self.positions:
            self.unhandled.setdefault(record.topic, record.offset)

    def handled(self, topic: str, offset: int) -> None:
        """A record was handled, and so was everything before it."""
        self.positions[topic] = max(self.positions.get(topic, 0), offset + 1)

    def take_dead_letter(self, headers: Mapping[str, bytes]) -> None:
        """A record of berth.dead-letters: what it was made of was handled."""
        topic, partition, offset = (headers.get(name, b"").decode() for name in ("topic", "partition", "offset"))
        if topic in _INPUTS and partition == str(self.number) and offset.isdecimal():
            self.handled(topic, int(offset))

    # Signs of life

    @property
    def running_since(self) -> int | None:
        """When the oldest running attempt began: earlier signs of life are of no use. None: nothing runs."""
        dispatched = (
            agent.triggers[trigger_id].dispatched_at or 0
            for agent in self._again.agents.values()
            for trigger_id in agent.executions.values()
        )
        return min(dispatched, default=None)

    def take_status(self, record: Record) -> None:
        """A record of berth.statuses, in order; only those that were handled count."""
        if record.offset >= self.positions.get(STATUSES.name, 0):
            return
        fate = codec.read(record, self._partitions)
        if not isinstance(fate, codec.Command) or not isinstance(fate.command, Status):
            return
        agent, status, at = self._again.agents.get(fate.agent_id), fate.command, record.timestamp_ms * 1000
        if agent is None or status.status not in ("running", "heartbeat"):
            return
        if status.execution_id is not None:
            trigger_id = agent.executions.get(status.execution_id)
            row = agent.triggers[trigger_id] if trigger_id is not None else None
        else:
            row = agent.head(status.conversation_id)
        if row is None or row.state != "running" or row.dispatched_at is None:
            return
        if status.execution_id is None and (status.at is None or row.dispatched_at >= status.at):
            return
        self.signs_of_life += 1
        seen(agent, row, max(at, row.dispatched_at, row.last_seen_at or 0))

    # Texts

    def missing_texts(self) -> dict[tuple[str, str], int | None]:
        """Live triggers, by agent and id, of which a text has not been found, and their offsets in berth.triggers."""
        return {id: found.offset for id, found in self._texts.items() if not found.is_complete}

    def offer(self, agent_id: str, trigger_id: str, name: TextName, text: Text | None) -> None:
        """A text that somebody has; it is taken if it is the one that the log means."""
        found = self._texts.get((agent_id, trigger_id))
        if found is not None and text is not None and text == found.texts.get(name):
            found.texts[name] = text

    def offer_value(self, agent_id: str, trigger_id: str, value: Mapping[str, Any]) -> None:
        """The same of an object with the fields ``message`` and ``payload``."""
        if (agent_id, trigger_id) not in self._texts:
            return
        names: tuple[TextName, ...] = ("message", "payload")
        for name in names:
            if name in value:
                try:
                    self.offer(agent_id, trigger_id, name, Text.of(value[name]))
                except (ValueError, RecursionError):
                    continue

    def offer_trigger(self, record: Record) -> None:
        """A record of berth.triggers."""
        fate = codec.read(record, self._partitions)
        if isinstance(fate, codec.Command) and isinstance(fate.command, Trigger):
            trigger = fate.command
            self.offer(fate.agent_id, trigger.id, "message", trigger.message)
            self.offer(fate.agent_id, trigger.id, "payload", trigger.payload)

    def lost(self) -> list[Lost]:
        """Live triggers of which a text was not found, by agent, the oldest first."""
        rows = [(id[0], self._again.agents[id[0]].triggers[id[1]]) for id in self.missing_texts()]
        rows.sort(key=lambda item: (item[0].encode(), item[1].accepted_seq))
        return [
            Lost(agent_id, row.trigger_id, row.conversation_id, row.state, row.accepted_at)
            for agent_id, row in rows
            if not row.payload_lost
        ]

    # Rows

    @property
    def agents(self) -> Mapping[str, Agent]:
        return self._again.agents

    @property
    def sites(self) -> Mapping[str, Site]:
        return self._again.sites

    @property
    def looked_at_anew(self) -> list[Decider]:
        """Those whose left-over work isn't known."""
        return sorted(self._folded)

    def rows(self) -> dict[bytes, bytes]:
        """Every row of the partition, in the form in which a worker stores it."""
        rows: dict[bytes, bytes] = {}
        for agent in self._again.agents.values():
            if Decider("agent", agent.agent_id) in self._folded and agent.row.todo is None:
                agent.row.todo, agent.row.todo_since = "pump", agent.row.seq
            rows |= rows_of_agent(agent)
        for site in self._again.sites.values():
            if Decider("site", site.site_id) in self._folded:
                site.row.todo_grant, site.row.todo_since = True, site.row.todo_since or site.row.seq
            rows |= rows_of_site(site)
        for id, found in self._texts.items():
            if found.is_complete:
                value = codec.write_texts(found.texts.get("message"), found.texts.get("payload"))
                assert value is not None
                rows[codec.write_key(("text", *id))] = value
        if self.decisions:
            positions = {
                topic.name: self.positions[topic.name] for topic in INPUT_TOPICS if topic.name in self.positions
            }
            row = codec.PartitionRow(self.at, positions, self.signs_of_life)
            rows[POSITION_KEY] = codec.write_partition(row)
        return rows


_INPUTS: Final = frozenset(topic.name for topic in INPUT_TOPICS)


# Stored rows and rebuilt ones


@dataclass(frozen=True, slots=True)
class Ahead:
    """A stored row that knows of more decisions than the log has: the log has lost its end."""

    decider: Decider
    stored_seq: int
    log_seq: int


def ahead(stored: Mapping[bytes, bytes], rebuilt: Rebuilt) -> list[Ahead]:
    """Every decider whose stored row is of a decision that the log doesn't have."""
    found = []
    for key, value in stored.items():
        decider, seq = _head(key, value)
        if decider is not None:
            known: Mapping[str, Agent | Site] = rebuilt.agents if decider.kind == "agent" else rebuilt.sites
            log_seq = known[decider.id].row.seq if decider.id in known else 0
            if seq > log_seq:
                found.append(Ahead(decider, seq, log_seq))
    return sorted(found, key=lambda one: one.decider)


def _head(key: bytes, value: bytes) -> tuple[Decider | None, int]:
    name, row = _read(key, value) or ((), None)
    if isinstance(row, AgentRow):
        return Decider("agent", name[1]), row.seq
    return (Decider("site", name[1]), row.seq) if isinstance(row, SiteRow) else (None, 0)


def stored_texts(stored: Mapping[bytes, bytes]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """(agent, trigger, object) of every row of texts that can be read."""
    for key, value in stored.items():
        row = _read(key, value)
        if row is not None and row[0][0] == "text":
            yield row[0][1], row[0][2], row[1]


def changes(
    stored: Mapping[bytes, bytes], rebuilt: Mapping[bytes, bytes], ends: Mapping[str, tuple[int, int]]
) -> dict[bytes, bytes | None]:
    """What is to be written so that the stored rows say what the rebuilt ones say; None: the row is to go.

    ``ends``: (beginning, end) of each input topic, or the first record that is known not to have been handled: a stored
    position outside of it is not kept. The row with positions
    is kept also where nothing was decided yet, if all of them may be right.
    """
    found: dict[bytes, bytes | None] = {
        key: value
        for key, value in rebuilt.items()
        if key not in stored or (stored[key] != value and not _says_as_much(key, stored[key], value, ends))
    }
    needless = (key for key in stored if key not in rebuilt)
    return found | {key: None for key in needless if key != POSITION_KEY or not _is_within(stored[key], ends)}


def _is_within(value: bytes, ends: Mapping[str, tuple[int, int]]) -> bool:
    """Whether a row of positions can be read, and names none that its topic doesn't have."""
    _, row = _read(POSITION_KEY, value) or (None, None)
    if row is None:
        return False
    return all(
        ends[topic][0] <= position <= ends[topic][1] for topic, position in row.positions.items() if topic in ends
    )


def _says_as_much(key: bytes, stored: bytes, rebuilt: bytes, ends: Mapping[str, tuple[int, int]]) -> bool:
    """Whether the stored row is the rebuilt one, but for what the log doesn't tell."""
    one, other = _read(key, stored), _read(key, rebuilt)
    if one is None or other is None:
        return False
    (_, row), (_, again) = one, other
    if isinstance(row, AgentRow):
        again = replace(again, **{name: getattr(row, name) for name in _LEFT_OVER_OF_AGENT})
    elif isinstance(row, SiteRow):
        again = replace(again, **{name: getattr(row, name) for name in _LEFT_OVER_OF_SITE})
    elif isinstance(row, TriggerRow):
        if (row.last_seen_at or 0) < (again.last_seen_at or 0) or (row.lease_until or 0) < (again.lease_until or 0):
            return False
        again = replace(again, last_seen_at=row.last_seen_at, lease_until=row.lease_until)
    elif isinstance(row, codec.PartitionRow):
        return row.at == again.at and all(_may_be_at(topic, row, again, *ends[topic]) for topic in ends)
    return bool(row == again)


_LEFT_OVER_OF_AGENT: Final = ("todo", "todo_conversation_id", "todo_since")
_LEFT_OVER_OF_SITE: Final = ("todo", "todo_cursor", "todo_grant", "todo_since")


def _may_be_at(topic: str, row: codec.PartitionRow, again: codec.PartitionRow, beginning: int, end: int) -> bool:
    """Whether a stored position may be right: signs of life, copied records and markers leave no decision."""
    position, known = row.positions.get(topic), again.positions.get(topic)
    if position is None or known is None:
        return position == known or (position is not None and beginning <= position <= end)
    if not beginning <= position <= end:
        return False
    return position >= known


def _read(key: bytes, value: bytes) -> tuple[codec.Key, Any] | None:
    """A stored row's key and content; None: it can't be read."""
    try:
        name = codec.read_key(key)
        match name:
            case ("partition",):
                return name, codec.read_partition(value)
            case ("agent", _):
                return name, codec.read_agent(value)
            case ("trigger", _, _):
                return name, codec.read_trigger(value)
            case ("site", _):
                return name, read_site(value)
            case ("text", _, _):
                return name, dict(json.loads(value))
            case _:
                return None
    except (ValidationError, ValueError, KeyError, TypeError):
        return None
