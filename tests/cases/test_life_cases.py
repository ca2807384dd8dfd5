"""Faults that users of comparable systems reported, kinds 6 to 10: as far as rules can fail without Kafka.

Each docstring begins with the number of the case in the list of cases; the scenario is its own.
"""

import json
import random
from typing import Any

import pytest

from streams.rules.backoff import backoff_microseconds
from streams.rules.order import SECOND
from tests.driving import T0, Driven, at_seconds

LEASE = 2100


def triggers(driven: Driven, first: int, last: int, **fields: Any) -> None:
    for number in range(first, last + 1):
        driven.trigger(f"c{number}", **fields)


# 6 Pause and resume


def test_a_settings_update_does_not_un_pause() -> None:
    """Case 42."""
    driven = Driven(default_limit=1)
    driven.configure()
    driven.control("pause")
    triggers(driven, 1, 3)
    driven.configure(parallelism_limit=5)
    driven.configure(parallelism_limit=5, owner="u")
    driven.crash()
    driven.advance(10)
    assert driven.running() == []
    driven.control("resume")
    assert driven.running() == ["c1", "c2", "c3"]


def test_after_pause_and_resume_all_places_are_there() -> None:
    """Case 44."""
    driven = Driven(default_limit=5)
    triggers(driven, 10, 24)
    driven.control("pause")
    for number in range(10, 15):
        driven.finish(f"c{number}")
    driven.control("resume")
    assert driven.running() == [f"c{number}" for number in range(15, 20)]


def test_a_resume_survives_a_crash_and_an_old_pause() -> None:
    """Case 46."""
    driven = Driven(default_limit=1)
    driven.configure()
    driven.control("pause", id="p1")
    driven.control("resume", id="r1")
    driven.crash()
    driven.control("pause", id="p1")
    driven.trigger("c1")
    assert driven.running() == ["c1"]


# 7 Stop


def test_stopping_a_waiting_one_lets_nobody_in_and_stopping_a_running_one_exactly_one() -> None:
    """Case 47."""
    driven = Driven(default_limit=2)
    triggers(driven, 1, 5)
    driven.stop("c3")
    assert (driven.running(), driven.waiting()) == (["c1", "c2"], ["c4", "c5"])
    driven.stop("c1")
    driven.status("c1", "stopped")
    assert (driven.running(), driven.waiting()) == (["c2", "c4"], ["c5"])


@pytest.mark.parametrize("order", ["stop first", "done first"])
def test_the_answer_to_a_stop_is_true(order: str) -> None:
    """Case 49: either never run, or was running and the runner is told."""
    driven = Driven(default_limit=1)
    triggers(driven, 0, 1)
    with driven.held():
        if order == "stop first":
            driven.stop("c1", id="s")
        driven.finish("c0")
        if order == "done first":
            driven.stop("c1", id="s")
    answer = next(decision for decision in driven.decisions if decision.command_id == "s")
    if order == "stop first":
        assert [event.type for event in answer.events] == ["stopped"]
        assert driven.dispatched() == ["c0"]
    else:
        assert [event.type for event in answer.events] == ["stop_requested"]
        assert driven.told("stop_requested") == ["c1"]
    driven.check()


@pytest.mark.parametrize("order", ["stop first", "done first"])
def test_a_stop_never_overwrites_a_result(order: str) -> None:
    """Case 49: a finished one stays finished."""
    driven = Driven(default_limit=1)
    driven.trigger("c1")
    for what in ("stop", "done") if order == "stop first" else ("done", "stop"):
        driven.stop("c1") if what == "stop" else driven.finish("c1")
    assert driven.final("c1") == "finished"


@pytest.mark.parametrize("restart", [False, True])
def test_a_stopped_one_is_no_phantom_at_the_head(restart: bool) -> None:
    """Case 51."""
    driven = Driven(default_limit=1)
    triggers(driven, 1, 3)
    driven.stop("c2")
    if restart:
        driven.crash()
    assert driven.waiting() == ["c3"]
    driven.finish("c1")
    assert driven.running() == ["c3"]


@pytest.mark.parametrize("conversation", ["c-c1", "other"])
def test_follow_ups_behind_a_stopped_one_are_neither_lost_nor_skipped(conversation: str) -> None:
    """Case 53: the same rule in its conversation and in another."""
    driven = Driven(default_limit=1)
    driven.trigger("c1")
    driven.trigger("c2", conversation_id=conversation)
    driven.trigger("c3")
    driven.stop("c1")
    driven.status("c1", "stopped")
    assert (driven.running(), driven.waiting()) == (["c2"], ["c3"])


# 8 Retries


def test_a_crash_loop_runs_out_of_attempts() -> None:
    """Case 55: counted at the start; restarts of the service in between."""
    driven = Driven(default_limit=1)
    driven.trigger("c1", max_attempts=2)
    for _ in range(6):
        driven.crash()
        driven.advance(LEASE + 10)
    assert driven.dispatched() == ["c1", "c1"]
    assert driven.final("c1") == "failed"


@pytest.mark.parametrize("attempt", [16, 47, 1025, 10**9])
def test_the_backoff_is_the_cap_for_any_number(attempt: int) -> None:
    """Case 57: a valid time, and it stays in the queue."""
    assert 810 * SECOND <= backoff_microseconds("c1", attempt, attempt) <= 900 * SECOND


def test_a_retry_keeps_what_it_was_accepted_with() -> None:
    """Case 59: requester, created_at, id, and it counts for its agent."""
    driven = Driven(default_limit=1)
    driven.trigger("c1", requested_by="u1", created_at=at_seconds(-5), timeout_seconds=77)
    driven.fail("c1")
    driven.configure(default_timeout_seconds=5, owner="someone")
    driven.advance(10)
    row = driven.agent().triggers["c1"]
    assert (row.requested_by, row.created_at, row.timeout_seconds) == ("u1", T0 - 5 * SECOND, 77)
    driven.trigger("c2")
    assert (driven.running(), driven.waiting()) == (["c1"], ["c2"])


# 9 Reclaiming


def test_age_is_measured_from_the_attempts_own_start() -> None:
    """Case 61: timeout 4 h; the second attempt starts 3.5 h after the first."""
    driven = Driven(default_limit=1)
    driven.trigger("c1", timeout_seconds=4 * 3600)
    driven.advance(3600)
    driven.status("c1", "paused")
    driven.advance(2.5 * 3600)
    driven.control("resume_trigger", trigger_id="c1")
    driven.advance(0.5 * 3600 + 60)
    assert driven.running() == ["c1"]
    driven.advance_to(T0 + round((3.5 + 4) * 3600 + 300) * SECOND - 1)
    assert driven.running() == ["c1"]
    driven.advance_to(T0 + round((3.5 + 4) * 3600 + 300) * SECOND)
    assert driven.running() == []


def test_a_lease_belongs_to_the_attempt_and_not_to_a_workers_name() -> None:
    """Case 63: signs of life of another attempt keep nobody alive."""
    driven = Driven(default_limit=2)
    driven.trigger("c1", timeout_seconds=60)
    driven.trigger("c2", timeout_seconds=60)
    for _ in range(36):
        driven.advance(10)
        driven.status("c2", "heartbeat")
    assert driven.running() == ["c2"]


def test_a_renewal_after_the_end_changes_nothing() -> None:
    """Case 65."""
    driven = Driven(default_limit=1)
    driven.trigger("c1")
    driven.trigger("c2")
    driven.finish("c1")
    lease = driven.agent().triggers["c2"].lease_until
    driven.skip(1)
    [decision] = driven.status("c1", "heartbeat", at=at_seconds(-0.1))
    assert decision.ignored is not None
    assert decision.ignored.reason == "after_final"
    assert driven.final("c1") == "finished"
    assert driven.agent().triggers["c2"].lease_until == lease


# 10 Order, ties and clocks


def test_microseconds_are_kept_in_the_order() -> None:
    """Case 67."""
    driven = Driven(default_limit=1)
    driven.trigger("running")
    for id, micros in (("z1", 100), ("y2", 200), ("x3", 300)):
        driven.trigger(id, created_at=at_seconds(-1 + micros / 1_000_000))
    assert driven.waiting() == ["z1", "y2", "x3"]


def test_a_batch_with_one_stamp_comes_out_in_one_order() -> None:
    """Case 69."""
    ids = [f"c{number}" for number in range(50)]
    for seed in range(3):
        driven = Driven(default_limit=1)
        shuffled = ids.copy()
        random.Random(seed).shuffle(shuffled)
        driven.trigger("first")
        with driven.held():
            for id in shuffled:
                driven.trigger(id, created_at=at_seconds(-1))
        driven.crash()
        assert driven.waiting() == sorted(ids)


def test_times_are_instants_and_one_without_a_zone_is_refused() -> None:
    """Case 71."""
    driven = Driven(default_limit=1)
    driven.trigger("running")
    assert driven.trigger("c1", available_at="2026-03-01T10:00:00").refusal is not None
    driven.trigger("c3", created_at=at_seconds(0), available_at="2026-03-01T13:00:00+03:00")
    driven.trigger("c2", created_at=at_seconds(0), available_at="2026-03-01T10:00:00Z")
    assert driven.waiting() == ["c2", "c3"]
    rows = driven.agent().triggers
    assert rows["c2"].available_at == rows["c3"].available_at == T0


def test_those_passed_over_keep_their_order() -> None:
    """Case 73: a hundred passes."""
    driven = Driven(default_limit=1)
    triggers(driven, 0, 3)
    for _ in range(100):
        driven.advance(1)
        driven.partition.fire_timers(driven.now, 100)
        driven.trigger("c1")
    assert driven.waiting() == ["c1", "c2", "c3"]
    driven.finish("c0")
    assert driven.running() == ["c1"]


def test_a_frozen_clock_gives_distinct_ids() -> None:
    """Case 75."""
    driven = Driven(default_limit=10)
    for number in range(70):
        driven.trigger(f"c{number}")
        driven.stop(f"c{number}")
        driven.configure(parallelism_limit=number % 10 + 1)
    numbers = [(decision.agent_id, decision.seq) for decision in driven.decisions]
    assert len(set(numbers)) == len(numbers) == 210
    executions = [dispatch["execution_id"] for dispatch in driven.dispatches if dispatch["type"] == "dispatch"]
    assert len(set(executions)) == len(executions) > 0
    assert len({json.loads(value)["prev"] for value in driven.values}) == 210
