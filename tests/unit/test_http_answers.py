"""Which decision answers whom, the codes of refusals, and the opaque tokens."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.http.decisions import _CONTROL_READER, _TRIGGER_READER, Outgoing, _answers
from api.http.positions import LogPosition, read_position
from api.http.problems import REFUSAL_ADVICE, REFUSAL_STATUS, Problem, of_refusal
from api.http.views import cursor, read_cursor
from streams.rules.events import REFUSAL_CODES, Decision, RecordCause, Refusal, read_decision, write_decision
from streams.rules.messages import Invalid, Stop, Trigger

SHA = "a" * 64
AT = 1_772_359_200_000_000


def decision(command: Any, **fields: Any) -> Decision:
    made = Decision(
        agent_id=command.agent_id,
        seq=1,
        at=AT,
        via="http",
        cause=RecordCause(topic="berth.triggers", partition=0, offset=0),
        command=command,
        settles=(command.id,),
        policy="1",
        prev=None,
        **fields,
    )
    return read_decision(write_decision(made))


def asked(**changes: Any) -> Outgoing:
    fields = {"type": "trigger", "id": "t", "agent_id": "a", "conversation_id": "c", "content_sha256": SHA, **changes}
    return Outgoing.of({name: value for name, value in fields.items() if value is not None})


def decided(**changes: Any) -> Trigger:
    fields = {"id": "t", "agent_id": "a", "conversation_id": "c", "content_sha256": SHA, **changes}
    return Trigger(**fields)


def test_the_same_content_is_answered_whoever_sent_the_record() -> None:
    assert _answers(decision(decided(conversation_id="c")), asked())


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
    assert not _answers(decision(command), asked())


def test_what_expired_answers_only_the_record_with_that_deadline() -> None:
    expired = {"refusal": Refusal(code="request_expired")}
    mine = asked(decide_before="2026-03-01T10:00:00.000000Z")
    assert _answers(decision(decided(decide_before=AT), **expired), mine)
    assert not _answers(decision(decided(decide_before=AT - 1), **expired), mine)
    assert _answers(decision(decided(decide_before=AT - 1)), mine)


def test_a_record_that_could_not_be_read_is_answered_by_its_id() -> None:
    assert _answers(decision(Invalid(id="t", agent_id="a", reason="x", sha256=SHA, bytes=1)), asked())


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
        command = _read(logged)
        assert _answers(decision(command), sent) == same


def _read(outgoing: Outgoing) -> Any:
    return (_CONTROL_READER if outgoing.kind == "control" else _TRIGGER_READER).validate_json(outgoing.value)


@pytest.mark.parametrize("code", REFUSAL_CODES)
def test_every_refusal_is_a_problem_with_the_code_of_the_rules(code: str) -> None:
    problem: Problem = of_refusal(Refusal(code=code, running=2, limit=2, holders=("x",), holders_count=1), {})
    content = problem.content()
    assert content["code"] == code
    assert 400 <= content["status"] < 600
    if content["status"] == 409 and code != "trigger_id_conflict":
        assert {"running", "limit", "waiting", "position_if_queued", "force_allowed", "holders"} <= set(content)
    assert set(REFUSAL_STATUS) | set(REFUSAL_ADVICE) <= set(REFUSAL_CODES)


@given(st.dictionaries(st.integers(0, 1023), st.integers(0, 2**63 - 1), min_size=1, max_size=20))
def test_a_position_survives_its_token(offsets: dict[int, int]) -> None:
    assert read_position(str(LogPosition(offsets))) == LogPosition(offsets)


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
