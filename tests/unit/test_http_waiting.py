"""Why a trigger waits: every cause that holds, with who holds what since when."""

from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any, get_args

import pytest

from api.http.waiting import Holder, causes
from streams.rules.events import WaitReason
from streams.rules.limits import HOLDERS_MAX

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


def ago(minutes: float) -> datetime:
    return NOW - timedelta(minutes=minutes)


def agent(**changes: Any) -> dict[str, Any]:
    return {"paused": False, "parked": None, "max_parallel": 2, "running": 0, **changes}


def trigger(**changes: Any) -> dict[str, Any]:
    return {
        "trigger_id": "t",
        "state_since": ago(10),
        "available_at": ago(10),
        "attempt": 0,
        "head_trigger_id": "t",
        "head_state": "waiting",
        "head_state_since": ago(10),
        "head_execution_id": None,
        **changes,
    }


def slot(number: int, minutes: float) -> dict[str, Any]:
    return {"trigger_id": f"r{number}", "execution_id": f"x{number}", "dispatched_at": ago(minutes)}


def test_nothing_in_the_way_is_no_cause() -> None:
    assert causes(agent(running=1), trigger(), NOW) == []
    assert causes(agent(max_parallel=None, running=1000), trigger(), NOW) == []


@pytest.mark.parametrize("chosen", list(product([False, True], repeat=5)))
def test_every_cause_that_holds_is_told_and_no_other_in_the_order_of_the_rules(chosen: tuple[bool, ...]) -> None:
    paused, parked, behind, early, full = chosen
    found = causes(
        agent(paused=paused, parked="a bug" if parked else None, running=2 if full else 1),
        trigger(
            head_trigger_id="h" if behind else "t",
            available_at=NOW + timedelta(seconds=1) if early else NOW,
        ),
        NOW,
    )
    names = (
        "agent_paused",
        "agent_parked",
        "conversation_busy",
        "not_yet_available",
        "agent_parallelism_limit_reached",
    )
    assert [cause.reason for cause in found] == [name for name, holds in zip(names, chosen, strict=True) if holds]
    assert {cause.reason for cause in found} <= set(get_args(WaitReason))
    assert all(cause.released_by for cause in found)


def test_who_holds_the_slots_is_told_oldest_first_and_since_when_they_are_all_taken() -> None:
    slots = [slot(1, 3), slot(2, 30)]
    (full,) = causes(agent(running=2), trigger(), NOW, slots)
    assert full.holders == (Holder("r2", "x2", ago(30)), Holder("r1", "x1", ago(3)))
    assert (full.holders_count, full.since) == (2, ago(3))


def test_a_cause_older_than_the_trigger_holds_it_up_since_the_trigger_waits() -> None:
    (full,) = causes(agent(running=2), trigger(state_since=ago(1)), NOW, [slot(1, 3), slot(2, 30)])
    (paused,) = causes(agent(paused=True), trigger(state_since=ago(1)), NOW, held_since=ago(60))
    assert (full.since, paused.since) == (ago(1), ago(1))


def test_holders_are_bounded_and_their_number_is_told() -> None:
    slots = [slot(number, number) for number in range(1, 31)]
    (full,) = causes(agent(max_parallel=10, running=30), trigger(), NOW, slots)
    assert (len(full.holders), full.holders_count) == (HOLDERS_MAX, 30)
    assert full.holders[0].trigger_id == "r30"
    assert full.released_by == "the end of 21 running attempts, or a higher limit"


@pytest.mark.parametrize("state", ["running", "paused", "waiting"])
def test_who_is_before_it_in_the_conversation_is_told(state: str) -> None:
    head = {"head_trigger_id": "h", "head_state": state, "head_execution_id": "x", "head_state_since": ago(4)}
    (busy,) = causes(agent(), trigger(**head), NOW)
    assert busy.holders == (Holder("h", "x", ago(4)),)
    assert busy.since == ago(4)
    assert "h" in busy.released_by and state in busy.released_by


def test_a_retry_says_until_when_it_waits() -> None:
    until = NOW + timedelta(seconds=5)
    (early,) = causes(agent(), trigger(attempt=1, available_at=until), NOW)
    assert early.until == until and "attempt" in early.released_by
    assert causes(agent(), trigger(attempt=1, available_at=until), until) == []
