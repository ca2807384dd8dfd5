"""B2, F7: interrupts: they stop their conversation's running attempt when they take their place, and come next."""

import pytest

from streams.rules import events
from tests.driving import Driven, Json, at_seconds

PERSON: Json = {"interactive": True, "kind": "chat"}
INTERRUPT: Json = {**PERSON, "on_busy": "interrupt"}


def test_an_interrupt_stops_the_running_one_and_comes_next() -> None:
    """B2, F7: before those that wait in the conversation; the interrupted one is never retried."""
    driven = Driven()
    driven.trigger("t1", conversation_id="c")
    driven.trigger("t2", conversation_id="c")
    driven.trigger("i1", conversation_id="c", **INTERRUPT)
    driven.trigger("i2", conversation_id="c", **INTERRUPT)
    assert driven.told("stop_requested") == ["t1"], "once"
    assert driven.running() == ["t1"], "its slot is kept until it answers"
    driven.fail("t1", retryable=True)
    assert driven.final("t1") == "stopped"
    assert driven.running() == ["i1"]
    driven.finish("i1")
    driven.finish("i2")
    assert driven.running() == ["t2"]
    driven.check()


@pytest.mark.parametrize("answer", ["finished", "stopped", "paused", "grace"])
def test_whatever_the_interrupted_one_answers_the_interrupt_is_next(answer: str) -> None:
    """F7: finished stays finished."""
    driven = Driven()
    driven.trigger("t1", conversation_id="c")
    driven.trigger("i1", conversation_id="c", **INTERRUPT)
    if answer == "grace":
        driven.advance(60)
        assert driven.told("revoked") == ["t1"]
    else:
        driven.status("t1", answer)
    assert driven.final("t1") == ("finished" if answer == "finished" else "stopped")
    assert driven.running() == ["i1"]
    driven.check()


def test_an_interrupt_with_nothing_running_is_like_queue() -> None:
    """B2: in its conversation it keeps the order."""
    driven = Driven()
    driven.trigger("other")
    driven.trigger("t1", conversation_id="c")
    driven.trigger("i1", conversation_id="c", **INTERRUPT)
    assert driven.told("stop_requested") == []
    driven.finish("other")
    assert driven.running() == ["t1"], "it came first"
    driven.finish("t1")
    assert driven.running() == ["i1"]
    driven.check()


def test_an_interrupt_stops_no_other_conversation_and_waits_for_its_turn() -> None:
    """B2, C2: it has no right to a slot before older ones of the agent."""
    driven = Driven(default_limit=2)
    driven.trigger("t1", conversation_id="c")
    driven.trigger("other")
    driven.trigger("older")
    driven.advance(1)
    driven.trigger("i1", conversation_id="c", **INTERRUPT)
    driven.status("t1", "stopped")
    assert driven.running() == ["other", "older"]
    driven.finish("other")
    assert driven.running() == ["older", "i1"]
    driven.check()


def test_an_interrupt_refused_for_a_full_backlog_stops_nobody() -> None:
    """B3: a refusal has no effect."""
    driven = Driven()
    driven.configure(max_backlog_depth=0)
    driven.trigger("t1", conversation_id="c")
    refusal = driven.trigger("i1", conversation_id="c", **INTERRUPT).refusal
    assert refusal is not None
    assert refusal.code == "agent_backlog_full"
    assert driven.told("stop_requested") == []
    driven.check()


@pytest.mark.parametrize("why", ["future", "approval", "dependency"])
def test_an_interrupt_that_is_not_eligible_yet_stops_nobody_before_it_is(why: str) -> None:
    """B2, B6: it interrupts when it takes its place; what ended by itself before that was not interrupted."""
    driven = Driven(default_limit=2)
    driven.trigger("other", "B", conversation_id="x")
    driven.trigger("t1", conversation_id="c")
    fields: dict[str, Json] = {
        "future": {"available_at": at_seconds(60)},
        "approval": {"approval_required": True},
        "dependency": {"depends_on": [{"agent_id": "B", "conversation_id": "x"}]},
    }
    driven.trigger("i1", conversation_id="c", **INTERRUPT, **fields[why])
    driven.trigger("t2", conversation_id="c")
    assert driven.told("stop_requested") == []
    driven.finish("t1")
    assert driven.running() == ["t2"]
    if why == "future":
        driven.advance(60)
    elif why == "approval":
        driven.control("approve", trigger_id="i1")
    else:
        driven.finish("other", "B")
    assert driven.told("stop_requested") == ["t2"]
    driven.trigger("t3", conversation_id="c")
    driven.status("t2", "stopped")
    assert driven.running() == ["i1"]
    driven.check()


@pytest.mark.parametrize("late", [False, True])
def test_an_interrupt_whose_time_is_over_stops_nobody(late: bool) -> None:
    """E5, B2: neither one that came too late, nor one whose timer is late."""
    driven = Driven()
    driven.trigger("t1", conversation_id="c")
    if late:
        driven.trigger("i1", conversation_id="c", **INTERRUPT, available_at=at_seconds(5), expires_at=at_seconds(9))
        driven.skip(10)
        driven.trigger("anything")
        driven.fire()
    else:
        driven.trigger("i1", conversation_id="c", **INTERRUPT, expires_at=at_seconds(0))
    assert driven.final("i1") == "expired"
    assert driven.told("stop_requested") == []
    assert driven.running() == ["t1"]
    driven.check()


@pytest.mark.parametrize("why", ["on_busy", "late", "conflict", "archived", "folder"])
def test_an_interrupt_that_is_refused_stops_nobody(why: str) -> None:
    """B3: a refusal has no effect."""
    driven = Driven()
    driven.trigger("t1", conversation_id="c")
    driven.trigger("i0", conversation_id="d", **INTERRUPT)
    if why == "archived":
        driven.control("archive")
    told = len(driven.dispatches)
    fields: dict[str, Json] = {
        "on_busy": {"on_busy": "interrupt!"},
        "late": {"decide_before": at_seconds(-1)},
        "folder": {"environment_id": "e", "folder": "x"},
    }
    id = "i0" if why == "conflict" else "i1"
    decision = driven.trigger(id, **{**INTERRUPT, "conversation_id": "c", **fields.get(why, {})})
    assert decision.refusal is not None
    assert len(driven.dispatches) == told


@pytest.mark.parametrize("held_back", ["pause", "budget"])
def test_an_interrupt_of_an_agent_that_may_start_nothing_still_stops_the_running_one(held_back: str) -> None:
    """B2, E1: a pause binds dispatches only; the interrupt starts when it may."""
    driven = Driven()
    driven.trigger("t1", conversation_id="c")
    driven.trigger("t2", conversation_id="c")
    if held_back == "pause":
        driven.control("pause")
    else:
        driven.configure(run_budget=0)
    driven.trigger("i1", conversation_id="c", **INTERRUPT)
    assert driven.told("stop_requested") == ["t1"]
    driven.status("t1", "stopped")
    assert driven.running() == []
    if held_back == "pause":
        driven.control("resume")
    else:
        driven.configure(run_budget=5)
    assert driven.running() == ["i1"]
    driven.check()


def test_an_interrupt_that_ends_before_its_turn_leaves_the_line_as_it_was() -> None:
    """B2, F7: the interrupted one is gone for good, the others come in their order."""
    driven = Driven()
    driven.trigger("t1", conversation_id="c")
    driven.trigger("t2", conversation_id="c")
    driven.trigger("i1", conversation_id="c", **INTERRUPT)
    driven.stop("i1")
    driven.crash()
    driven.fail("t1")
    assert (driven.final("t1"), driven.running()) == ("stopped", ["t2"])
    driven.check()


def test_an_interrupt_needs_the_same_site_as_the_one_that_it_stops() -> None:
    """B2, D3: its folder comes free when the interrupted one ends, and it claims it then."""
    driven = Driven(pool=1)
    place: Json = {"worker": True, "environment_id": "e", "folder": "/a"}
    driven.trigger("t1", conversation_id="c", **place)
    driven.trigger("i1", conversation_id="c", **INTERRUPT, **place)
    assert driven.granted() == ["t1"]
    assert driven.agent().triggers["i1"].claim_state is None, "only the head may ask (B6)"
    driven.status("t1", "stopped")
    assert (driven.running(), driven.granted()) == (["i1"], ["i1"])
    driven.check()


def test_many_interrupts_of_one_instant_are_worked_off_in_bounded_steps() -> None:
    """F1: to stop one and to place one are two changes."""
    driven = Driven("unlimited")
    for number in range(120):
        driven.trigger(f"t{number}", conversation_id=f"c{number}")
        driven.trigger(f"i{number}", conversation_id=f"c{number}", **INTERRUPT, available_at=at_seconds(60))
    driven.advance(60)
    assert len(driven.told("stop_requested")) == 120
    assert len(driven.events_of(events.StopRequested)) == 120
    driven.check()
