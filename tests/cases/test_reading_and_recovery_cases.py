"""Faults of comparable systems, kinds 12, 13, 17 and 18: as far as they can occur without Kafka."""

import json

import pytest

from streams import CONTROLS, STATUSES, TRIGGERS
from streams.partition import RowsMissing
from tests.driving import Driven, Json, at_seconds, number_of

# 12 Reading from Kafka


@pytest.mark.parametrize("written", range(6))
def test_a_crash_after_any_number_of_records_loses_none_and_repeats_none(written: int) -> None:
    """Case 87: the position is written with what the records caused, so a later record never passes an earlier one."""
    whole = Driven(default_limit=2)
    crashed = Driven(default_limit=2)
    for number in range(written):
        whole.trigger(f"c{number}")
        crashed.trigger(f"c{number}")
    with pytest.raises(KeyboardInterrupt), crashed.held():  # noqa: PT012 - killed in the middle of a batch
        for number in range(written, 5):
            crashed.trigger(f"c{number}")
        raise KeyboardInterrupt
    for number in range(written, 5):
        whole.trigger(f"c{number}")
    crashed.crash()
    assert crashed.values == whole.values
    assert crashed.dispatched() == whole.dispatched()
    crashed.check()


def test_a_record_whose_handling_failed_is_handled_after_the_restart() -> None:
    """Case 89: no accepted record is skipped because of an error that passes."""
    driven = Driven()
    with pytest.raises(OSError, match="away"), driven.held():  # noqa: PT012 - the write fails
        driven.trigger("c1")
        raise OSError("away")
    assert driven.decisions == []
    driven.crash()
    assert driven.running() == ["c1"]


BAD: list[Json | bytes] = [
    b"not JSON",
    b"[1]",
    {"type": "configure", "v": 1, "id": "k", "agent_id": "A", "requested_by": "u", "parallelism_limit": "abc"},
    {"type": "configure", "v": 1, "id": "k", "requested_by": "u"},
    {"type": "configure", "v": 999, "id": "k", "agent_id": "A", "requested_by": "u"},
]


@pytest.mark.parametrize("topic", [TRIGGERS.name, STATUSES.name, CONTROLS.name])
def test_bad_records_among_good_ones_end_no_reader(topic: str) -> None:
    """Case 91: each goes where somebody sees it, the good ones are handled."""
    driven = Driven(default_limit=10)
    for number, bad in enumerate(BAD):
        driven.send(topic, bad, key=b"A")
        driven.trigger(f"good{number}")
    assert driven.running() == [f"good{number}" for number in range(len(BAD))]
    refused = [decision for decision in driven.decisions if decision.refusal]
    assert len(driven.dead_letters) + len(refused) == len(BAD)
    assert len(refused) == (0 if topic == STATUSES.name else 2)
    for letter in driven.dead_letters:
        assert {"reason", "topic", "partition", "offset", "at"} == {name for name, _ in letter.headers}
    driven.check()


def test_events_of_one_agent_from_several_partitions_are_decided_by_one() -> None:
    """Case 97: without a key, or keyed by the conversation; its limit holds."""
    home = number_of("A1", 8)
    owners = [Driven(default_limit=1, partitions=8, number=number) for number in range(8)]
    for number in range(16):
        value = {"type": "trigger", "v": 1, "id": f"c{number:02}", "agent_id": "A1", "conversation_id": f"c{number:02}"}
        owners[number % 8].send(TRIGGERS.name, value, key=None if number % 2 else f"c{number:02}".encode())
    for owner in owners:
        for copy in owner.rekeyed:
            assert copy.partition == home
            owners[home].send(copy.topic, copy.value, key=copy.key, headers=copy.headers)
    assert all(not owner.partition.agents for owner in owners if owner.number != home)
    assert len(owners[home].running("A1")) == 1
    assert len(owners[home].waiting("A1")) == 15
    owners[home].check()


# 13 Tables and recovery


def test_missing_rows_are_never_taken_for_an_empty_start() -> None:
    """Case 102: no partition that is ready with its slots missing."""
    driven = Driven()
    driven.trigger("c1")
    driven.rows.clear()
    with pytest.raises(RowsMissing, match="Nothing was written"):
        driven.restored()


def test_an_old_owner_that_goes_on_decides_nothing_that_the_new_one_sees() -> None:
    """Case 106: both fire the same lease; what is written comes from one of them, once."""
    driven = Driven()
    driven.trigger("c1", timeout_seconds=60)
    old_owner = driven.partition
    driven.partition = driven.restored()
    driven.advance(360)
    old_owner.fire_timers(driven.now, 100)
    changes = old_owner.take_changes()
    assert changes is not None, "it has decided, but its producer is fenced: nothing of it is written"
    assert driven.told("revoked") == ["c1"]
    driven.check()


# 17 Restart and recovery


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_no_holder_is_dropped_when_the_state_is_loaded(limit: int) -> None:
    """Case 137: full before the restart, full after it."""
    driven = Driven(default_limit=limit)
    for number in range(limit):
        driven.trigger(f"c{number}")
    driven.rows = dict(reversed(driven.rows.items()))
    driven.crash()
    driven.trigger("more")
    assert len(driven.running()) == limit
    assert driven.waiting() == ["more"]
    driven.check()


def test_recovered_work_is_queued_in_its_place_and_not_run_past_the_limit() -> None:
    """Case 139: the workers of two are lost; three wait."""
    driven = Driven(default_limit=2)
    for number in range(1, 6):
        driven.trigger(f"c{number}", created_at=at_seconds(number - 10))
    driven.skip(2100)
    driven.crash()
    driven.fire()
    assert driven.running() == ["c3", "c4"]
    assert sorted(driven.waiting()) == ["c1", "c2", "c5"]
    driven.advance(10)
    driven.finish("c3")
    assert driven.running() == ["c4", "c5"], "older by its key than the retries, whose availability is new"
    driven.finish("c4")
    driven.finish("c5")
    assert sorted(driven.running()) == ["c1", "c2"]
    driven.check()


def test_what_comes_after_restarts_runs_in_order() -> None:
    """Case 141: three restarts while they run."""
    driven = Driven(default_limit=1)
    for number in range(1, 4):
        driven.trigger(f"c{number}", created_at=at_seconds(number - 10))
    for number in range(1, 4):
        driven.crash()
        driven.finish(f"c{number}")
    driven.trigger("c4", created_at=at_seconds(-2))
    driven.trigger("c5", created_at=at_seconds(-1))
    driven.finish("c4")
    driven.finish("c5")
    assert driven.dispatched() == ["c1", "c2", "c3", "c4", "c5"]
    driven.check()


# 18 Names and keys


def test_no_joined_string_makes_two_pairs_equal() -> None:
    """Case 143: agents and items with separators, of other case, equal to one another; each has its own limit."""
    driven = Driven(default_limit=1)
    pairs = [
        ("a", "b:c"),
        ("a:b", "c"),
        ("A", "c"),
        ("7", "c"),
        ("c", "c"),
        ('a","b', "c"),
        ("a", 'b","c'),
        ("a/b", "c"),
    ]
    for agent_id, id in pairs:
        assert driven.trigger(id, agent_id, conversation_id="a").refusal is None
    assert {agent_id: driven.running(agent_id) for agent_id, _ in pairs if agent_id != "a"} == {
        "a:b": ["c"], "A": ["c"], "7": ["c"], "c": ["c"], 'a","b': ["c"], "a/b": ["c"]}  # fmt: skip
    assert (driven.running("a"), driven.waiting("a")) == (["b:c"], ['b","c'])
    driven.control("pause", "a")
    assert not driven.agent("a:b").row.paused
    assert not driven.agent("A").row.paused
    driven.stop("c", "a:b")
    assert driven.told("stop_requested") == ["c"]
    assert len({key for key in driven.rows if json.loads(key)[0] == "trigger"}) == len(pairs)
    driven.check()


def test_a_number_is_no_agent() -> None:
    """Case 143: the agent "7" and the number 7."""
    driven = Driven()
    driven.send(TRIGGERS.name, {"type": "trigger", "v": 1, "id": "c", "agent_id": 7, "conversation_id": "c"}, key=b"7")
    assert len(driven.dead_letters) == 1
    driven.trigger("c", "7")
    assert driven.running("7") == ["c"]
