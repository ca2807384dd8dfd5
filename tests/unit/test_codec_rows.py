"""What is written can be read back: rows, keys and decisions to the same bytes; what can't be is refused (G5, I8)."""

from dataclasses import fields, replace
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import PydanticSerializationError

from streams import codec
from streams.rules import events, verdicts
from streams.rules.agent.rows import AgentRow, ConversationRow, RememberedRow, TriggerRow
from streams.rules.messages import Pause
from tests.driving import T0, Driven

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
INSTANT = st.integers(-62_135_596_800_000_000, 253_402_300_799_999_999)
COUNT = st.integers(0, 2**53)


def strategy_of(annotation: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation of a row, as the rows use them."""
    arguments = get_args(annotation)
    if annotation is str:
        return TEXT
    if annotation is int:
        return INSTANT
    if annotation is bool:
        return st.booleans()
    if annotation is type(None):
        return st.none()
    if getattr(annotation, "__origin__", None) is tuple:
        if arguments[-1] is Ellipsis:
            return st.lists(strategy_of(arguments[0]), max_size=3).map(tuple)
        return st.tuples(*map(strategy_of, arguments))
    if arguments and not any(isinstance(argument, str) for argument in arguments):
        return st.one_of(*map(strategy_of, arguments))
    if arguments:
        return st.sampled_from(arguments)
    return rows_of(annotation)


def rows_of(row: type[Any]) -> st.SearchStrategy[Any]:
    hints = get_type_hints(row)
    return st.builds(row, **{field.name: strategy_of(hints[field.name]) for field in fields(row)})


@given(rows_of(AgentRow))
def test_an_agents_row_round_trips(row: AgentRow) -> None:
    written = codec.write_agent(row)
    assert codec.read_agent(written) == row
    assert codec.write_agent(codec.read_agent(written)) == written


@given(rows_of(TriggerRow))
def test_a_triggers_row_round_trips(row: TriggerRow) -> None:
    written = codec.write_trigger(row)
    assert codec.read_trigger(written) == row
    assert codec.write_trigger(codec.read_trigger(written)) == written


@given(rows_of(ConversationRow), rows_of(RememberedRow))
def test_conversations_and_remembered_ids_round_trip(conversation: ConversationRow, remembered: RememberedRow) -> None:
    assert codec.read_conversation(codec.write_conversation(conversation)) == conversation
    assert codec.read_remembered(codec.write_remembered(remembered)) == remembered


@given(INSTANT, st.dictionaries(TEXT, COUNT, max_size=6), COUNT)
def test_a_partitions_row_round_trips(at: int, positions: dict[str, int], heartbeats: int) -> None:
    row = codec.PartitionRow(at, positions, heartbeats)
    assert codec.read_partition(codec.write_partition(row)) == row


@given(st.lists(TEXT, min_size=1, max_size=4).map(tuple))
def test_a_rows_key_round_trips(key: tuple[str, ...]) -> None:
    assert codec.read_key(codec.write_key(key)) == key


@given(st.tuples(TEXT, TEXT), st.tuples(TEXT, TEXT))
def test_no_two_different_pairs_have_one_key(one: tuple[str, str], other: tuple[str, str]) -> None:
    """Case 143: agents "a" and "a:b", items "b:c" and "c"."""
    assert (codec.write_key(("trigger", *one)) == codec.write_key(("trigger", *other))) == (one == other)


@pytest.mark.parametrize("row", [AgentRow(), AgentRow(seq=1, prev="0" * 64)])
def test_what_has_its_default_is_left_out_of_a_row(row: AgentRow) -> None:
    """A6: in stored rows an absent field means its documented default."""
    assert codec.read_agent(b"{}") == AgentRow()
    assert b"parallelism_limit" not in codec.write_agent(row)


def test_a_stored_row_of_an_older_version_gets_the_defaults() -> None:
    """Case 126: old rows lack fields that are now there."""
    old = b'{"trigger_id":"t","conversation_id":"c","kind":"task","created_at":1,"available_at":1,"accepted_at":1,'
    old += b'"accepted_seq":1,"digest":"d","timeout_seconds":60,"max_attempts":3}'
    row = codec.read_trigger(old)
    assert (row.state, row.attempt, row.place, row.execution_class, row.depends_on) == (
        "waiting",
        0,
        None,
        "standard",
        (),
    )


ROW = TriggerRow("t", "c", "task", T0, T0, T0, 1, "d", 60, 3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"available_at": "now"},
        {"attempt": "one"},
        {"place": "first"},
        {"trigger_id": b"t"},
        {"conversation_id": 7},
        {"interactive": "yes"},
        {"requested_by": "lone \ud800"},
        {"parent": ("a",)},
    ],
)
def test_a_triggers_row_that_could_not_be_read_back_is_refused_when_it_is_written(wrong: dict[str, Any]) -> None:
    """codec: what can't be read back is refused at the write, before it is in Kafka for ever."""
    with pytest.raises(PydanticSerializationError):
        codec.write_trigger(replace(ROW, **wrong))


@pytest.mark.parametrize("wrong", [{"seq": "x"}, {"paused": "no"}, {"places": 1.5}, {"owner": ["u"]}])
def test_an_agents_row_that_could_not_be_read_back_is_refused_when_it_is_written(wrong: dict[str, Any]) -> None:
    with pytest.raises(PydanticSerializationError):
        codec.write_agent(replace(AgentRow(seq=1), **wrong))


@pytest.mark.parametrize(
    "row",
    [
        ConversationRow("failed", "now"),  # type: ignore[arg-type]
        RememberedRow("d", "1", "done", T0),  # type: ignore[arg-type]
    ],
)
def test_small_rows_that_could_not_be_read_back_are_refused_when_they_are_written(row: Any) -> None:
    write = codec.write_conversation if isinstance(row, ConversationRow) else codec.write_remembered
    with pytest.raises(PydanticSerializationError):
        write(row)


def decision_with(**fields: Any) -> events.Decision:
    good: dict[str, Any] = {
        "agent_id": "A",
        "seq": 1,
        "at": T0,
        "via": "kafka",
        "cause": verdicts.RecordCause(topic="berth.controls", partition=0, offset=0),
        "command": Pause(id="k", agent_id="A", requested_by="u"),
        "policy": "1",
        "prev": None,
    }
    return events.Decision.model_construct(**good).model_copy(update=fields)


@pytest.mark.parametrize(
    "wrong",
    [
        {"at": "yesterday"},
        {"seq": 1.5},
        {"policy": 7},
        {"events": ({"type": "agent_paused"},)},
        {"events": (events.Parked.model_construct(error=5),)},  # type: ignore[arg-type]
        {"refusal": "no"},
        {"command_id": "lone \ud800"},
        {"cause": "who knows"},
    ],
)
def test_a_decision_that_could_not_be_read_back_is_refused_when_it_is_written(wrong: dict[str, Any]) -> None:
    assert events.read_decision(events.write_decision(decision_with())).seq == 1
    with pytest.raises(PydanticSerializationError):
        events.write_decision(decision_with(**wrong))


def test_a_partition_whose_rows_are_gone_refuses_to_start() -> None:
    """G5: decisions exist, rows don't: it can't know what is running."""
    driven = Driven()
    driven.trigger("t1")
    driven.rows.clear()
    with pytest.raises(Exception, match="berth recover"):
        driven.restored()


@pytest.mark.parametrize("key", [b'["mystery","A"]', b'["remembered","A","dance","x"]', b'["trigger","A"]', b"[]"])
def test_a_row_of_an_unknown_kind_stops_the_load_and_is_not_skipped(key: bytes) -> None:
    """G4: nothing is skipped silently."""
    driven = Driven()
    driven.trigger("t1")
    driven.rows[key] = b"{}"
    with pytest.raises(codec.UnreadableRow, match="unknown kind") as refused:
        driven.restored()
    assert str(refused.value).startswith(key.decode())


ROW_KEYS = [
    ("partition",),
    ("agent", "A"),
    ("trigger", "A", "t"),
    ("text", "A", "t"),
    ("conversation", "A", "c"),
    ("remembered", "A", "stop", "s"),
    ("watch", "A", "c", "B", "t"),
    ("site", "S"),
    ("gate", "S", "department", "d"),
    ("deletion", "S", "e", "p"),
    ("claim", "S", "A", "t"),
    ("site_control", "S", "c"),
]


@pytest.mark.parametrize("value", [b'{"garbage":', b"", b"[]", b"null", b"5", b"\xff"])
@pytest.mark.parametrize("name", ROW_KEYS, ids=lambda name: name[0])
def test_a_row_that_cannot_be_read_is_named(name: codec.Key, value: bytes) -> None:
    """Of every kind of row: cut off, of another form, or no text at all."""
    driven = Driven()
    driven.trigger("t1")
    key = codec.write_key(name)
    driven.rows[key] = value
    with pytest.raises(codec.UnreadableRow) as refused:
        driven.restored()
    assert str(refused.value).startswith(key.decode())


@pytest.mark.parametrize(
    "key", [b"not a key", b"", b"\xff", b"5", b'{"agent":"A"}', b'["agent",5]', b'["agent","' + b"A" * 500]
)
def test_a_row_whose_key_cannot_be_read_is_named_in_short(key: bytes) -> None:
    driven = Driven()
    driven.trigger("t1")
    driven.rows[key] = b"{}"
    with pytest.raises(codec.UnreadableRow) as refused:
        driven.restored()
    assert str(refused.value).startswith(key[:200].decode(errors="backslashreplace"))
    assert len(str(refused.value)) < 450


def test_a_row_that_is_deleted_later_in_the_changelog_is_not_loaded() -> None:
    """Restore: tombstones."""
    driven = Driven()
    driven.trigger("t1")
    partition = driven.restored().__class__(0, 1, driven.defaults)
    for key, value in driven.rows.items():
        partition.load(key, value)
        partition.load(key, None)
    assert partition.is_empty
    partition.loaded(T0, False)
    assert partition.agents == {}
