"""Which decision answers which command; without Kafka, clock or waiting.

A decision answers a command when it settles its id, is about the same kind of command, and its content is the same. So
two requests with one id that are under way together, here or through another instance, both get the first decision, and
one with other content waits for its own, the conflict. A ``request_expired`` answers only the record that carried that
very decide_before: it isn't remembered, so a repetition gets a decision of its own.

An ask or force that needs a site is answered in two steps. The decision on its record accepts it and settles nothing.
The answer is a later one, on the site's word or on what came before it (a timer, a stop, a lower limit, the loss of its
payload), which settles the trigger's id and says in its events what became of it. It carries neither the record nor its
content, so it answers only who has seen the acceptance or, repeating it, was told that the same is under way.
"""

import hashlib
import json
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, TypeVar

from pydantic import TypeAdapter

from api.http.positions import LogPosition
from streams import CONTROLS, DECISIONS, SITE_CONTROLS, SITE_DECISIONS, TRIGGERS, Topic
from streams.rules import events
from streams.rules.events import Decision, read_decision
from streams.rules.messages import (
    Control,
    ControlRecord,
    Invalid,
    Message,
    Stop,
    Trigger,
    TriggerRecord,
    content_sha256,
)
from streams.rules.site_events import SiteDecision, read_site_decision
from streams.rules.site_messages import InvalidSite, SiteControl, SiteControlRecord

REMEMBERED_ANSWERS_MAX: Final = 10_000

Kind = Literal["trigger", "stop", "control", "site_control"]
AnyDecision = Decision | SiteDecision
DecisionOf = TypeVar("DecisionOf", bound=AnyDecision)

_READERS: Final[Mapping[Kind, TypeAdapter[Any]]] = {
    "trigger": TypeAdapter(TriggerRecord),
    "stop": TypeAdapter(TriggerRecord),
    "control": TypeAdapter(ControlRecord),
    "site_control": TypeAdapter(SiteControlRecord),
}
_TOPICS: Final[Mapping[Kind, Topic]] = {
    "trigger": TRIGGERS,
    "stop": TRIGGERS,
    "control": CONTROLS,
    "site_control": SITE_CONTROLS,
}
_OUTCOMES: Final = (events.Dispatched, events.RefusedLater, events.Stopped, events.Expired, events.PayloadLost)
OUTCOME_TYPES: Final = tuple(sorted(str(event.model_fields["type"].default) for event in _OUTCOMES))
"""Types of the events that end an ask's waiting for its site."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A command as a record. ``decider``: its agent or site; ``sha256``: of its content, by which it is known."""

    kind: Kind
    id: str
    decider: str
    decide_before: int | None
    sha256: str
    value: bytes

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Outgoing":
        """A record of ``fields`` (with type, id, agent_id or site; a trigger with content_sha256).

        pydantic.ValidationError if a worker would not take it.
        """
        value = json.dumps(fields, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        type_: str = fields["type"]
        kind: Kind = "trigger" if type_ == "trigger" else "stop" if type_ == "stop" else "control"
        if "agent_id" not in fields:
            kind = "site_control"
        command = _READERS[kind].validate_json(value)
        return cls(
            kind=kind,
            id=command.id,
            decider=command.site if isinstance(command, SiteControl) else command.agent_id,
            decide_before=command.decide_before,
            sha256=digest_of(command),
            value=value,
        )

    @property
    def topic(self) -> Topic:
        return _TOPICS[self.kind]

    @property
    def decisions_topic(self) -> str:
        """Where its answer will be."""
        return SITE_DECISIONS.name if self.kind == "site_control" else DECISIONS.name


def digest_of(command: Message) -> str:
    """The digest of a command's content: what its sender gave, else computed."""
    if isinstance(command, Trigger) and command.content_sha256 is not None:
        return command.content_sha256
    return content_sha256(command)


def digest_of_fields(fields: Mapping[str, Any]) -> str:
    """content_sha256 of a request: of the client's fields as canonical JSON."""
    canonical = json.dumps(fields, sort_keys=True, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Answer(Generic[DecisionOf]):
    """The decision that answers a command, and where the log is after it."""

    decision: DecisionOf
    position: LogPosition


class Expected:
    """One command whose answer somebody waits for."""

    __slots__ = ("_accepted_seq", "command")

    def __init__(self, command: Outgoing) -> None:
        self.command = command
        self._accepted_seq: int | None = None

    @property
    def accepted_seq(self) -> int | None:
        """The decision that accepted it and left the answer to its site."""
        return self._accepted_seq

    def is_answered_by(self, decision: AnyDecision) -> bool:
        """Whether the decision, which is the next one that names the command's id, is the answer to it."""
        command, decided = self.command, decision.command
        if decider_of(decision) != command.decider:
            return False
        settled = command.id in decision.settles
        if isinstance(decided, Invalid | InvalidSite):
            return settled and decided.sha256 == hashlib.sha256(command.value).hexdigest()
        if _kind_of(decided) == command.kind and decision.command_id == command.id:
            return self._is_about_its_content(decision, settled)
        return settled and self._accepted_seq is not None and _outcome_of(decision, command.id)

    def _is_about_its_content(self, decision: AnyDecision, settled: bool) -> bool:
        assert isinstance(decision.command, Message)
        if digest_of(decision.command) != self.command.sha256:
            return False
        if not settled:
            is_repeat = decision.ignored is not None and decision.ignored.first_seq is not None
            self._accepted_seq = decision.ignored.first_seq if is_repeat and decision.ignored else decision.seq
            return False
        is_expired = decision.refusal is not None and decision.refusal.code == "request_expired"
        return not is_expired or getattr(decision.command, "decide_before", None) == self.command.decide_before


def decider_of(decision: AnyDecision) -> str:
    """The agent or site that decided."""
    return decision.site if isinstance(decision, SiteDecision) else decision.agent_id


def _kind_of(command: object) -> Kind | None:
    match command:
        case Trigger():
            return "trigger"
        case Stop():
            return "stop"
        case Control():
            return "control"
        case SiteControl():
            return "site_control"
        case _:
            return None


def _outcome_of(decision: AnyDecision, trigger_id: str) -> bool:
    return any(isinstance(event, _OUTCOMES) and event.trigger_id == trigger_id for event in decision.events)


ExpectedOf = TypeVar("ExpectedOf", bound=Expected)


class Answers(Generic[ExpectedOf]):
    """Everybody in this process who waits for an answer, and the newest answers that were given.

    Only the headers of a record are looked at, unless somebody waits for one of the ids in them.
    """

    def __init__(self) -> None:
        self._expected: defaultdict[tuple[str, str], set[ExpectedOf]] = defaultdict(set)
        self._given: OrderedDict[tuple[str, str, int], Answer[Any]] = OrderedDict()

    def expect(self, expected: ExpectedOf) -> None:
        self._expected[expected.command.decisions_topic, expected.command.id].add(expected)

    def forget(self, expected: ExpectedOf) -> None:
        """Its caller waits no longer; nothing happens if it was answered before."""
        key = expected.command.decisions_topic, expected.command.id
        if key in self._expected:
            self._expected[key].discard(expected)
            if not self._expected[key]:
                del self._expected[key]

    def take(
        self, topic: str, partition: int, offset: int, headers: Iterable[tuple[str, bytes]], value: bytes
    ) -> list[tuple[ExpectedOf, Answer[Any]]]:
        """The next record of a topic of decisions: whom it answers. They are expected no more."""
        named = {id.decode() for name, id in headers if name in ("settles", "command_id")}
        waiting = [expected for id in named for expected in self._expected.get((topic, id), ())]
        if not waiting:
            return []
        next_offset = {partition: offset + 1}
        answer: Answer[Any]
        if topic == SITE_DECISIONS.name:
            answer = Answer(read_site_decision(value), LogPosition({}, next_offset))
        else:
            answer = Answer(read_decision(value), LogPosition(next_offset))
        answered = [(expected, answer) for expected in waiting if expected.is_answered_by(answer.decision)]
        for expected, _ in answered:
            self.forget(expected)
            self._remember(topic, expected.command.decider, answer.decision.seq, answer)
            if expected.accepted_seq is not None:
                self._remember(topic, expected.command.decider, expected.accepted_seq, answer)
        return answered

    def given(self, command: Outgoing, seq: int) -> Answer[Any] | None:
        """What somebody here was answered whose command the decision ``seq`` settled, or accepted."""
        return self._given.get((command.decisions_topic, command.decider, seq))

    def _remember(self, topic: str, decider: str, seq: int, answer: Answer[Any]) -> None:
        self._given[topic, decider, seq] = answer
        if len(self._given) > REMEMBERED_ANSWERS_MAX:
            self._given.popitem(last=False)
