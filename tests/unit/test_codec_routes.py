"""G2: records on the wrong partition or without a key are re-keyed once; the partitioner is Kafka's."""

import json

import pytest
from aiokafka.partitioner import DefaultPartitioner, murmur2
from hypothesis import given
from hypothesis import strategies as st

from streams import CONTROLS, STATUSES, TRIGGERS
from streams.codec import Record, _murmur2, partition_of
from streams.rules.verdicts import RecordCause
from tests.driving import Driven, Json

PARTITIONS = 8


def trigger_of(agent_id: str, id: str = "t1", **fields: object) -> Json:
    return {"type": "trigger", "v": 1, "id": id, "agent_id": agent_id, "conversation_id": "c1", **fields}


def other_than(partition: int) -> int:
    return (partition + 1) % PARTITIONS


@given(st.binary(max_size=64))
def test_murmur2_is_that_of_kafka_for_any_bytes(data: bytes) -> None:
    """events.md: partitioner murmur2, Java's default."""
    assert _murmur2(data) == murmur2(data) & 0xFFFFFFFF


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), st.integers(1, 64))
def test_a_key_has_the_partition_that_kafkas_partitioner_gives_it(key: str, partitions: int) -> None:
    """events.md: key is the agent id as UTF-8."""
    every = list(range(partitions))
    assert partition_of(key, partitions) == DefaultPartitioner()(key.encode(), every, every)


@pytest.mark.parametrize(
    ("key", "partition"), [("", 1), ("a", 4), ("ab", 2), ("abc", 3), ("abcd", 4), ("agent-1", 7), ("ünï", 3)]
)
def test_known_keys_keep_their_partition_for_ever(key: str, partition: int) -> None:
    """design.md: the number of partitions is fixed for life, and so is the place of an agent."""
    assert partition_of(key, PARTITIONS) == partition


@pytest.mark.parametrize(
    ("topic", "value"),
    [
        (TRIGGERS.name, trigger_of("A")),
        (TRIGGERS.name, {"type": "stop", "v": 1, "id": "s1", "agent_id": "A", "trigger_id": "t1"}),
        (STATUSES.name, {"type": "status", "v": 1, "agent_id": "A", "conversation_id": "c", "execution_id": "e",
                         "status": "finished"}),
        (CONTROLS.name, {"type": "pause", "v": 1, "id": "k1", "agent_id": "A", "requested_by": "u"}),
        (TRIGGERS.name, {"type": "trigger", "v": 9, "id": "bad", "agent_id": "A"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("key", [None, b"A", b"c1", b""])
def test_a_record_without_key_or_on_the_wrong_partition_is_copied_to_its_own_once(
    topic: str, value: Json, key: bytes | None
) -> None:
    """G2, case 97: the copy has the agent's key, the same bytes and headers, and its origin."""
    home = partition_of("A", PARTITIONS)
    where = home if key is None else other_than(home)
    wrong = Driven(partitions=PARTITIONS, number=where)
    wrong.send(topic, value, key=key, headers=[("via", b"http"), ("trace", b"1")])
    [copy] = wrong.rekeyed
    assert (copy.topic, copy.key, copy.partition, copy.value) == (topic, b"A", home, json.dumps(value).encode())
    assert copy.headers[:2] == (("via", b"http"), ("trace", b"1"))
    origin = dict(copy.headers)["origin"]
    assert json.loads(origin) == {"topic": topic, "partition": where, "offset": 0}
    assert not wrong.decisions
    assert not wrong.partition.agents

    right = Driven(partitions=PARTITIONS, number=home)
    [decision] = right.send(topic, copy.value, key=copy.key, headers=copy.headers)
    assert decision.via == "http"
    assert decision.cause == RecordCause(topic=topic, partition=home, offset=0)

    lost = Driven(partitions=PARTITIONS, number=other_than(home))
    lost.send(topic, copy.value, key=copy.key, headers=copy.headers)
    [letter] = lost.dead_letters
    assert dict(letter.headers)["reason"] == b"wrong_partition_twice"
    assert not lost.rekeyed


def test_keyless_records_keep_their_order_and_the_limit_holds() -> None:
    """G2, case 97: what outside producers send without a key is decided in the order in which it came."""
    driven = Driven(default_limit=1)
    for value in (trigger_of("A", "t1"), trigger_of("A", "t2", conversation_id="c2"), trigger_of("A", "t3")):
        driven.send(TRIGGERS.name, value, key=None)
    assert [json.loads(copy.value or b"")["id"] for copy in driven.rekeyed] == ["t1", "t2", "t3"]
    for copy in driven.rekeyed:
        driven.send(copy.topic, copy.value, key=copy.key, headers=copy.headers)
    assert driven.running() == ["t1"]
    assert driven.waiting() == ["t2", "t3"]
    driven.check()


def test_a_finished_that_overtakes_its_start_is_unknown_and_changes_nothing() -> None:
    """Case 97: done before start is handled by a stated rule (F3)."""
    driven = Driven()
    status = {"type": "status", "v": 1, "agent_id": "A", "conversation_id": "c1", "status": "finished"}
    [early] = driven.send(STATUSES.name, {**status, "execution_id": "kwnovuec-1-1"})
    assert early.ignored is not None
    assert early.ignored.reason == "unknown"
    driven.trigger("t1", conversation_id="c1")
    assert driven.running() == ["t1"]


@pytest.mark.parametrize(
    ("headers", "via"),
    [([], "kafka"), ([("via", b"http")], "http"), ([("via", b"HTTP")], "kafka"), ([("Via", b"http")], "kafka"),
     ([("via", b"internal")], "kafka"), ([("x", b"http")], "kafka")],
)  # fmt: skip
def test_via_is_what_the_header_of_the_api_says(headers: list[tuple[str, bytes]], via: str) -> None:
    """events.md: the API marks its records with a header."""
    driven = Driven()
    [decision] = driven.send(CONTROLS.name, {"type": "configure", "v": 1, "id": "k", "agent_id": "A",
                                             "requested_by": "u"}, headers=headers)  # fmt: skip
    assert decision.via == via


def test_a_record_below_the_stored_position_is_skipped() -> None:
    """F1: the positions of the inputs are in the same transaction as what they caused."""
    driven = Driven()
    driven.trigger("t1")
    record = driven.input[0]
    driven.partition.handle(record, driven.now)
    driven.partition.handle(Record(TRIGGERS.name, 0, 0, b"A", b"anything"), driven.now)
    assert driven.partition.take_changes() is None


def test_topics_have_positions_of_their_own() -> None:
    """F1."""
    driven = Driven()
    driven.trigger("t1")
    driven.finish("t1")
    driven.trigger("t2")
    driven.control("pause")
    assert driven.partition.positions == {TRIGGERS.name: 2, STATUSES.name: 1, CONTROLS.name: 1}
    assert driven.restored().positions == driven.partition.positions
