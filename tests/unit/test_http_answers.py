"""Which decision answers whom, the codes of refusals, and the opaque tokens."""

import hashlib
import itertools
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.http.answers import _READERS, OUTCOME_TYPES, Answers, Expected, Outgoing
from api.http.positions import LogPosition, read_position
from api.http.problems import REFUSAL_ADVICE, REFUSAL_STATUS, Problem, of_refusal
from api.http.views import cursor, read_cursor
from streams import DECISIONS, SITE_DECISIONS, codec
from streams.rules import events
from streams.rules.agent.step import _ENDS_WAITING
from streams.rules.events import Decision, read_decision, write_decision
from streams.rules.messages import Invalid, Message, Stop, Trigger
from streams.rules.site_events import write_site_decision
from streams.rules.verdicts import REFUSAL_CODES, RecordCause, Refusal
from tests.driving import Driven, at_seconds

SHA = "a" * 64
AT = 1_772_359_200_000_000


def decision(command: Any, **fields: Any) -> Decision:
    given = {"settles": (command.id,), **fields}
    made = Decision(
        agent_id=command.agent_id,
        seq=1,
        at=AT,
        via="http",
        cause=RecordCause(topic="berth.triggers", partition=0, offset=0),
        command=command,
        command_id=command.id,
        policy="1",
        prev=None,
        **given,
    )
    return read_decision(write_decision(made))


def asked(**changes: Any) -> Outgoing:
    fields = {"type": "trigger", "id": "t", "agent_id": "a", "conversation_id": "c", "content_sha256": SHA, **changes}
    return Outgoing.of({name: value for name, value in fields.items() if value is not None})


def decided(**changes: Any) -> Trigger:
    fields = {"id": "t", "agent_id": "a", "conversation_id": "c", "content_sha256": SHA, **changes}
    return Trigger(**fields)


def answers(decision: Decision, command: Outgoing) -> bool:
    return Expected(command).is_answered_by(decision)


def test_the_same_content_is_answered_whoever_sent_the_record() -> None:
    assert answers(decision(decided(conversation_id="c")), asked())


@pytest.mark.parametrize(
    "command",
    [
        decided(content_sha256="b" * 64),
        decided(agent_id="b"),
        Stop(id="t", agent_id="a", trigger_id="t"),
    ],
    ids=["other content", "other agent", "a stop with the same id"],
)
def test_what_only_has_the_same_id_is_not_the_answer(command: Any) -> None:
    assert not answers(decision(command), asked())


def test_what_expired_answers_only_the_record_with_that_deadline() -> None:
    expired = {"refusal": Refusal(code="request_expired")}
    mine = asked(decide_before="2026-03-01T10:00:00.000000Z")
    assert answers(decision(decided(decide_before=AT), **expired), mine)
    assert not answers(decision(decided(decide_before=AT - 1), **expired), mine)
    assert answers(decision(decided(decide_before=AT - 1)), mine)


@pytest.mark.parametrize("same", [True, False])
def test_a_record_that_could_not_be_read_is_known_by_its_bytes(same: bool) -> None:
    mine = asked()
    sha256 = hashlib.sha256(mine.value).hexdigest() if same else SHA
    assert answers(decision(Invalid(id="t", agent_id="a", reason="x", sha256=sha256, bytes=1)), mine) == same


@pytest.mark.parametrize("same", [True, False])
def test_a_stop_and_a_control_are_known_by_their_content(same: bool) -> None:
    for fields, other in (
        ({"type": "stop", "id": "s", "agent_id": "a", "trigger_id": "t"}, {"trigger_id": "u"}),
        (
            {"type": "configure", "id": "s", "agent_id": "a", "requested_by": "x", "parallelism_limit": 2},
            {"parallelism_limit": 3},
        ),
    ):
        sent = Outgoing.of(fields)
        logged = Outgoing.of(fields if same else {**fields, **other})
        command = _READERS[logged.kind].validate_json(logged.value)
        assert answers(decision(command), sent) == same


# Asks of sites: what the rules write down, in the order of the log

ASK: dict[str, Any] = {"worker": True, "interactive": True, "on_busy": "ask"}


class Reading:
    """Commands of an agent, decided by the real rules, and what their senders are told as the log is read."""

    def __init__(self, **driven: Any) -> None:
        self.driven = Driven(**driven)
        self.answers: Answers[Expected] = Answers()
        self.told: dict[str, list[Decision]] = {}
        self._senders: dict[Expected, str] = {}
        self._read = 0

    def expects(self, sender: str, id: str, **fields: Any) -> None:
        """Somebody is about to write this trigger."""
        record = {"type": "trigger", "id": id, "agent_id": "A", "conversation_id": f"c-{id}", "kind": "task", **fields}
        record["content_sha256"] = _digest(record)
        expected = Expected(Outgoing.of(record))
        self._senders[expected] = sender
        self.answers.expect(expected)

    def asks(self, sender: str, id: str, **fields: Any) -> None:
        self.expects(sender, id, **fields)
        record = {"type": "trigger", "id": id, "agent_id": "A", "conversation_id": f"c-{id}", "kind": "task", **fields}
        self.driven.trigger(id, **fields, content_sha256=_digest(record))
        self.read()

    def read(self) -> dict[str, list[Decision]]:
        for value in self.driven.values[self._read :]:
            decided = read_decision(value)
            headers = codec.decision_headers(decided.command_id, decided.settles)
            for expected, answer in self.answers.take(DECISIONS.name, 0, 0, headers, value):
                self.told.setdefault(self._senders[expected], []).append(answer.decision)
        self._read = len(self.driven.values)
        return self.told


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(repr(sorted(record.items())).encode()).hexdigest()


def outcome(told: Decision) -> str:
    if told.refusal is not None:
        return told.refusal.code
    return next(
        e.code if isinstance(e, events.RefusedLater) else e.type for e in told.events if e.type in OUTCOME_TYPES
    )


@pytest.mark.parametrize(("pool", "expected"), [(1, "dispatched"), (0, "site_workers_busy")])
def test_an_ask_of_a_site_is_answered_on_the_words_of_the_site(pool: int, expected: str) -> None:
    reading = Reading(pool=pool, delivers=False)
    reading.asks("ann", "t", **ASK)
    assert reading.told == {}
    reading.driven.delivers = True
    reading.driven.deliver()
    reading.driven.site_control("gate", scope="organization", name="o", enabled=True)
    [told] = reading.read()["ann"]
    assert outcome(told) == expected
    assert told.command.type == ("granted" if pool else "denied")


HOW = ["timer", "stop", "archive", "pause", "payload", "limit", "budget"]


@pytest.mark.parametrize("how", HOW)
def test_an_ask_of_a_site_is_answered_by_whatever_ends_its_waiting(how: str) -> None:
    reading = Reading(delivers=False)
    reading.asks("ann", "t", **ASK, decide_before=at_seconds(5))
    driven = reading.driven
    match how:
        case "timer":
            driven.advance(5)
        case "stop":
            driven.stop("t", id="t")
        case "archive" | "pause":
            driven.control(how)
        case "payload":
            driven.partition.lose_payload("A", "t", driven.now)
            driven.commit()
        case "limit":
            driven.trigger("older", created_at=at_seconds(-5))
        case "budget":
            driven.configure(run_budget=0)
    reading.read()
    if how in ("limit", "budget"):  # they are noticed when the site has answered
        assert reading.told == {}
        driven.delivers = True
        driven.deliver()
        driven.site_control("gate", scope="organization", name="o", enabled=True)
    codes = {
        "timer": "site_not_answering",
        "stop": "stopped",
        "archive": "stopped",
        "pause": "agent_paused",
        "payload": "payload_lost",
        "limit": "agent_parallelism_limit_reached",
        "budget": "run_budget_used_up",
    }
    [told] = reading.read()["ann"]
    assert outcome(told) == codes[how]


def test_what_answers_an_ask_is_whatever_ends_its_waiting() -> None:
    ends: list[type[Message]] = list(_ENDS_WAITING)  # type: ignore[arg-type]
    assert {str(event.model_fields["type"].default) for event in ends} == set(OUTCOME_TYPES)


def test_everybody_who_asked_the_same_is_answered_and_who_asked_otherwise_is_not() -> None:
    reading = Reading(delivers=False)
    reading.asks("ann", "t", **ASK)
    reading.asks("repeat", "t", **ASK)
    reading.asks("other", "t", **ASK, message="other")
    reading.asks("neighbour", "u", **ASK)
    assert {sender: outcome(*told) for sender, told in reading.told.items()} == {
        "other": "trigger_id_conflict",
        "neighbour": "agent_parallelism_limit_reached",
    }
    reading.driven.delivers = True
    reading.driven.deliver()
    reading.driven.site_control("gate", scope="organization", name="o", enabled=True)
    assert {sender: outcome(*told) for sender, told in reading.read().items()} == {
        "ann": "dispatched",
        "repeat": "dispatched",
        "other": "trigger_id_conflict",
        "neighbour": "agent_parallelism_limit_reached",
    }
    [first], [repeat] = reading.told["ann"], reading.told["repeat"]
    assert first.seq == repeat.seq
    reading.asks("much later", "t", **ASK)
    [later] = reading.told["much later"]
    assert later.ignored is not None
    assert later.ignored.first_seq == reading.driven.decisions[0].seq
    accepted = reading.driven.decisions[0].seq
    given = reading.answers.given(Outgoing.of({**_fields(), "content_sha256": SHA}), accepted)
    assert given is not None
    assert given.decision.seq == first.seq, "whoever asks again later is told what became of it"


def _fields() -> dict[str, Any]:
    return {"type": "trigger", "id": "t", "agent_id": "A", "conversation_id": "c-t"}


def test_who_comes_between_acceptance_and_answer_waits_for_the_decision_on_its_own_record() -> None:
    """The answer carries no content: it may be that of another request with the same id."""
    reading = Reading(delivers=False)
    reading.asks("ann", "t", **ASK)
    reading.expects("late", "t", **ASK)
    reading.expects("other", "t", **ASK, message="other")
    reading.driven.delivers = True
    reading.driven.deliver()
    reading.driven.site_control("gate", scope="organization", name="o", enabled=True)
    assert set(reading.read()) == {"ann"}


def test_a_stop_with_the_id_of_an_ask_is_not_answered_by_the_answer_to_the_ask() -> None:
    reading = Reading(delivers=False)
    reading.asks("ann", "t", **ASK)
    stop = Expected(Outgoing.of({"type": "stop", "id": "t", "agent_id": "A", "trigger_id": "u"}))
    reading._senders[stop] = "stop"
    reading.answers.expect(stop)
    reading.driven.delivers = True
    reading.driven.deliver()
    reading.driven.stop("u", id="t")
    assert {sender: told[0].command.type for sender, told in reading.read().items()} == {
        "ann": "granted",
        "stop": "stop",
    }


def test_a_control_of_a_site_is_answered_by_the_decision_of_the_site() -> None:
    driven = Driven()
    value = write_site_decision(driven.site_control("pause_site", id="p"))
    fields = {"type": "pause_site", "id": "p", "site": "default", "requested_by": "operator"}
    mine, other = (Expected(Outgoing.of({**fields, **more})) for more in ({}, {"requested_by": "somebody"}))
    answers: Answers[Expected] = Answers()
    for expected in (mine, other):
        answers.expect(expected)
    headers = codec.decision_headers("p", ("p",))
    assert answers.take(DECISIONS.name, 3, 7, headers, value) == [], "an agent's decision is another matter"
    [(answered, answer)] = answers.take(SITE_DECISIONS.name, 3, 7, headers, value)
    assert answered is mine
    assert answer.position == LogPosition({}, {3: 8})


@pytest.mark.parametrize("code", REFUSAL_CODES)
def test_every_refusal_is_a_problem_with_the_code_of_the_rules_and_says_what_to_do(code: str) -> None:
    problem: Problem = of_refusal(Refusal(code=code, running=2, limit=2, holders=("x",), holders_count=1), {})
    content = problem.content()
    assert content["code"] == code
    assert content["detail"] == REFUSAL_ADVICE[code]
    assert 400 <= content["status"] < 600
    assert (content["status"] == 503) == ("Retry-After" in problem.headers)
    counts = {"running", "limit", "waiting", "position_if_queued", "force_allowed", "holders", "holders_count"}
    if content["status"] == 409 and code != "trigger_id_conflict":
        assert counts <= set(content)


def test_every_refusal_has_advice_of_its_own_and_nothing_else_has() -> None:
    assert set(REFUSAL_ADVICE) == set(REFUSAL_CODES)
    assert set(REFUSAL_STATUS) <= set(REFUSAL_CODES)
    assert len(set(REFUSAL_ADVICE.values())) == len(REFUSAL_CODES)
    assert all(one not in other for one, other in itertools.permutations(REFUSAL_ADVICE.values(), 2))


OFFSETS = st.dictionaries(st.integers(0, 1023), st.integers(0, 2**63 - 1), max_size=20)


@given(OFFSETS, OFFSETS)
def test_a_position_survives_its_token(agents: dict[int, int], sites: dict[int, int]) -> None:
    position = LogPosition(agents, sites)
    if agents or sites:
        assert read_position(str(position)) == position
    else:
        with pytest.raises(ValueError, match="no position"):
            read_position(str(position))


@given(st.text(max_size=40))
def test_any_text_is_a_position_or_refused(token: str) -> None:
    with suppress(ValueError):
        assert read_position(token).next_offsets is not None


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00")), min_size=1, max_size=3))
def test_a_cursor_survives_its_token(values: list[str]) -> None:
    assert read_cursor(cursor(*values), len(values)) == values


@given(st.text(max_size=40), st.integers(1, 3))
def test_any_text_is_a_cursor_or_refused(token: str, length: int) -> None:
    with suppress(Problem):
        assert len(read_cursor(token, length)) == length


def test_a_position_is_reached_when_every_partition_that_it_names_is() -> None:
    position = LogPosition({0: 5, 3: 9})
    assert position.is_reached_by({0: 5, 3: 9, 4: 0})
    assert not position.is_reached_by({0: 5, 3: 8})
    assert not position.is_reached_by({0: 5})
    assert LogPosition({}).is_reached_by({})
    assert LogPosition({0: 5}, {1: 2}).is_reached_by({0: 5}, {1: 2})
    assert not LogPosition({0: 5}, {1: 2}).is_reached_by({0: 5}, {0: 9})
    assert not LogPosition({}, {1: 2}).is_reached_by({1: 2})
