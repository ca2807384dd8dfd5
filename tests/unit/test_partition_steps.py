"""F1, A5: thousands waiting cost no scan, no large record and no large step; and little memory."""

import gc
import json
import sys
import tracemalloc
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import Any

import pytest

from streams import TRIGGERS
from streams.codec import Record
from streams.partition import Partition
from streams.rules import events, limits
from tests.driving import T0, Driven, Json, at_seconds

WAITING = 20_000


def crowded(conversation: bool, count: int = WAITING) -> Driven:
    """One runs and so many wait, in one conversation or each in its own; restored from rows, and its log left out."""
    first, rows, offsets = _crowd(conversation, count)
    driven = Driven(verified=False)
    driven.rows, driven._offsets, driven.dispatches = dict(rows), dict(offsets), [first]
    driven.partition = driven.restored()
    driven._last_sha256["A"] = str(driven.agent().row.prev)
    assert len(driven.waiting()) == count
    return driven


@cache
def _crowd(conversation: bool, count: int) -> tuple[Json, dict[bytes, bytes], dict[str, int]]:
    driven = Driven(verified=False)
    driven.configure(max_backlog_depth=limits.BACKLOG_DEPTH_MAX)
    with driven.held():
        for number in range(count + 1):
            driven.trigger(f"t{number:05}", conversation_id="c" if conversation else f"c{number:05}")
    [first] = driven.dispatches
    return first, driven.rows, driven._offsets


def changes(decision: events.Decision) -> int:
    return sum(event.type not in ("archived", "stop_noted", "configured") for event in decision.events)


@pytest.mark.parametrize("how", ["stop conversation", "archive conversations"])
def test_stopping_or_archiving_thousands_is_worked_off_in_bounded_steps(how: str) -> None:
    """F1: at most 50 changes a decision, each far below a record's size, before anything else is handled."""
    driven = crowded(conversation=how == "stop conversation")
    if how == "stop conversation":
        driven.stop(conversation_id="c", id="s1")
    else:
        driven.control("archive", id="k1")
    assert driven.waiting() == []
    assert len(driven.decisions) == -(-(WAITING + 1) // limits.STEP_CHANGES_MAX)
    assert max(map(changes, driven.decisions)) == limits.STEP_CHANGES_MAX
    assert max(map(len, driven.values)) < 32 * 1024
    first, *rest = driven.decisions
    assert first.events[-1].type == "stop_noted"
    assert {json.loads(value)["cause"]["continue"] for value in driven.values[1:]} == {first.seq}
    assert {decision.via for decision in rest} == {"internal"}
    assert {decision.command.type for decision in rest} == {"continue"}
    stopped = [
        event.trigger_id for decision in driven.decisions for event in decision.events if event.type == "stopped"
    ]
    assert sorted(stopped) == [f"t{number:05}" for number in range(1, WAITING + 1)]
    assert driven.told("stop_requested") == ["t00000"]
    assert driven.dispatched() == ["t00000"]
    assert driven.agent().row.todo is None
    driven.check()


def test_what_is_left_over_comes_before_anything_else_and_survives_a_crash() -> None:
    """F1: it is noted in the state; nobody starts who is about to be stopped."""
    driven = crowded(conversation=True, count=400)
    stop = b'{"type":"stop","v":1,"id":"s1","agent_id":"A","conversation_id":"c"}'
    driven.partition.handle(Record(TRIGGERS.name, 0, driven.offset(TRIGGERS.name), b"A", stop), driven.now)
    driven.commit()
    assert driven.agent().row.todo == "stop_conversation"
    assert driven.partition.next_deadline_us() == 0
    driven.crash()
    assert driven.agent().row.todo is None, "the new owner goes on by itself"
    assert driven.waiting() == []
    driven.trigger("after", conversation_id="c")
    assert driven.waiting() == ["after"]
    driven.check()


def test_a_record_that_comes_while_work_is_left_over_waits_for_it() -> None:
    """F1: before anything else is handled."""
    driven = crowded(conversation=True, count=200)
    with driven.held():
        driven.stop(conversation_id="c", id="s1")
        driven.trigger("other", conversation_id="d")
    types = [decision.command.type for decision in driven.decisions]
    assert types == ["stop", "continue", "continue", "continue", "continue", "trigger"]
    driven.check()


def test_removing_the_limit_starts_thousands_in_bounded_steps_oldest_first() -> None:
    """A3, F1."""
    count = 1500
    driven = crowded(conversation=False, count=count)
    driven.configure(id="raise", parallelism_limit="unlimited")
    assert len(driven.running()) == count + 1
    assert max(map(changes, driven.decisions)) == limits.STEP_CHANGES_MAX
    assert driven.dispatched() == [f"t{number:05}" for number in range(count + 1)]
    assert {dispatch["slot_number"] for dispatch in driven.dispatches} == set(range(1, count + 2))
    driven.check()


def test_thousands_that_become_available_together_take_their_places_in_order() -> None:
    """F1, B6."""
    driven = Driven(verified=False)
    driven.configure(max_backlog_depth=limits.BACKLOG_DEPTH_MAX)
    driven.trigger("running")
    with driven.held():
        for number in range(2000):
            driven.trigger(f"t{number:04}", conversation_id=f"c{number % 3}", available_at=at_seconds(60))
    driven.decisions.clear()
    driven.advance(60)
    assert max(map(changes, driven.decisions)) == limits.STEP_CHANGES_MAX
    places = [driven.agent().triggers[f"t{number:04}"].place for number in range(2000)]
    assert places == [(1, number) for number in range(2, 2002)]
    driven.check()


def finish(driven: Driven, begin: int, end: int) -> None:
    for number in range(begin, end):
        driven.finish(f"t{number:05}")


def lines_run_by(act: Callable[[], None]) -> int:
    """How much Python is run, which no other program on the machine changes."""
    count = 0

    def trace(_frame: FrameType, event: str, _of: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


def test_idle_costs_nothing_and_a_completion_about_one_dispatch() -> None:
    """Case 31: 20,000 waiting, no growth of the log while idle, no scan."""
    driven = crowded(conversation=False)
    transactions = driven.transactions
    driven.advance(60)
    assert driven.transactions == transactions
    deadlines = len(driven.partition._timers._heap)
    assert deadlines < 100
    few = crowded(conversation=False, count=1000)
    lines, lines_of_few = (lines_run_by(lambda one=one: finish(one, 0, 100)) for one in (driven, few))  # type: ignore[misc]
    assert lines < 1.1 * lines_of_few, "no scan"
    finish(driven, 100, 200)
    assert len(driven.decisions) == 200
    assert driven.dispatched() == [f"t{number:05}" for number in range(201)]
    changed = [event.type for decision in driven.decisions for event in decision.events]
    assert changed == ["finished", "dispatched"] * 200


def test_no_row_grows_with_the_queue() -> None:
    """F1: a change costs a bounded number of rows, each of a bounded size."""
    driven = Driven(verified=False)
    sizes = []
    for number in range(500):
        driven.trigger(f"t{number:05}")
        if number in (20, 499):
            driven.partition.take_changes()
            driven.trigger(f"u{number:05}")
            sizes.append(max(map(len, driven.rows.values())))
    assert sizes[1] <= sizes[0] + 8
    assert max(map(len, driven.rows.values())) < 1000


def test_a_waiting_trigger_takes_at_most_two_kibibytes_besides_its_texts() -> None:
    """Target of the engine."""
    count = 2000
    partition = Partition(0, 1, limits.Defaults(1))
    partition.loaded(T0, False)

    def record(offset: int, id: str) -> Record:
        value = {"type": "trigger", "v": 1, "id": id, "agent_id": "A", "conversation_id": f"conversation-{id}",
                 "requested_by": f"user-{id}", "message": "x" * 1000, "payload": "y" * 1000}  # fmt: skip
        return Record(TRIGGERS.name, 0, offset, b"A", json.dumps(value).encode())

    settings = b'{"type":"configure","v":1,"id":"k","agent_id":"A","requested_by":"u","max_backlog_depth":100000}'
    partition.handle(Record("berth.controls", 0, 0, b"A", settings), T0)
    for number in range(100):
        partition.handle(record(number, f"warm-{number}"), T0)
    partition.take_changes()
    gc.collect()
    tracemalloc.start()
    for number in range(count):
        partition.handle(record(100 + number, f"trigger-{number:08}"), T0 + number)
        if number % 100 == 0:
            partition.take_changes()
    partition.take_changes()
    gc.collect()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    texts = sum(len(value) for value in partition._texts.values()) * count / (count + 100)
    assert (taken - texts) / count <= 2048


@pytest.mark.parametrize("order", ["as written", "sorted", "reversed"])
def test_a_restore_takes_rows_in_any_order(order: str) -> None:
    """Compaction keeps the newest record of each key, in the order of the offsets: any."""
    driven = Driven(default_limit=3)
    for number in range(12):
        driven.trigger(f"t{number}", conversation_id=f"c{number % 5}", message="m", interactive=True, on_busy="queue")
    driven.status("t0", "paused")
    driven.fail("t1")
    driven.stop("t2")
    driven.control("pause")
    driven.stop("nobody")
    rows = list(driven.rows.items())
    driven.rows = dict({"as written": rows, "sorted": sorted(rows), "reversed": rows[::-1]}[order])
    driven.check()
    driven.crash()
    driven.check()
    driven.control("archive")
    stopped = [event.trigger_id for event in driven.events_of() if event.type in ("stopped", "stop_requested")]
    waiting = [f"t{number}" for number in (3, 10, 11, 4, 5, 6, 7, 8, 9)]
    assert stopped[0] == "t2"
    assert sorted(stopped[1:]) == sorted(["t0", "t1", *waiting])


@pytest.mark.parametrize("order", ["as written", "reversed"])
def test_decisions_after_a_restore_are_the_same_bytes_as_without_one(order: str) -> None:
    """design.md: the fold decides, not the order of rows or dicts; so that an audit comes to the same."""
    logs = []
    for restore in (False, True):
        driven = Driven(default_limit=4)
        for number in range(12):
            driven.trigger(f"t{number}", conversation_id=f"c{number % 6}", interactive=True, on_busy="queue")
        for id in ("t0", "t1"):
            driven.status(id, "paused")
        driven.fail("t2")
        if restore:
            if order == "reversed":
                driven.rows = dict(reversed(list(driven.rows.items())))
            driven.crash()
        driven.configure(parallelism_limit=2, max_backlog_depth=0)
        driven.trigger("refused")
        driven.control("archive")
        driven.advance(8 * 86_400)
        logs.append(driven.values)
    assert logs[0] == logs[1]
