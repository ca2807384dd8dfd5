"""F4, F7: stopping triggers and conversations, pausing for a person, replies and resumes, moving in time."""

import json
from typing import Any

import pytest

from streams.rules import events
from streams.rules.order import SECOND
from tests.driving import Driven, Json, at_seconds

PERSON: Json = {"interactive": True, "on_busy": "queue"}


def kinds(decision: events.Decision) -> list[str]:
    return [event.type for event in decision.events]


def ignored(decision: events.Decision) -> tuple[str, str | None]:
    assert decision.ignored is not None, decision
    assert decision.events == ()
    return decision.ignored.reason, decision.ignored.state


def test_a_waiting_trigger_is_gone_at_once_and_lets_nobody_else_in() -> None:
    """F7, case 47."""
    driven = Driven(default_limit=2)
    for number in range(1, 6):
        driven.trigger(f"c{number}")
    decision = driven.stop("c3", requested_by="u")
    assert kinds(decision) == ["stopped"]
    assert (driven.running(), driven.waiting()) == (["c1", "c2"], ["c4", "c5"])
    assert driven.final("c3") == "stopped"
    assert driven.told("stop_requested") == []
    driven.stop("c1")
    assert (driven.running(), driven.waiting()) == (["c1", "c2"], ["c4", "c5"])
    driven.status("c1", "stopped")
    assert (driven.running(), driven.waiting()) == (["c2", "c4"], ["c5"])
    driven.check()


def test_a_running_trigger_keeps_its_slot_until_the_runners_final_word() -> None:
    """F7: the runner is told once, with the attempt."""
    driven = Driven()
    driven.trigger("t1")
    driven.trigger("t2")
    decision = driven.stop("t1", requested_by="u")
    [request] = decision.events
    assert isinstance(request, events.StopRequested)
    assert (request.requested_by, request.grace_until) == ("u", driven.now + 60 * SECOND)
    told = driven.dispatches[-1]
    assert (told["type"], told["execution_id"]) == ("stop_requested", driven.dispatch("t1")["execution_id"])
    assert driven.running() == ["t1"]
    assert driven.status("t1", "heartbeat") == []
    assert driven.status("t1", "running") == []
    driven.status("t1", "stopped")
    assert driven.running() == ["t2"]
    assert driven.told("stop_requested") == ["t1"]


@pytest.mark.parametrize(
    ("word", "state", "reason"),
    [
        ("finished", "finished", None),
        ("failed", "stopped", "failed"),
        ("paused", "stopped", "paused"),
        ("stopped", "stopped", "runner"),
    ],
)
def test_a_stopping_attempt_ends_by_the_runners_word(word: str, state: str, reason: str | None) -> None:
    """F7: finished stays finished; a retry of a stopped trigger never happens."""
    driven = Driven()
    driven.trigger("t1", max_attempts=5)
    driven.stop("t1")
    driven.skip(59)
    [decision] = driven.status("t1", word)
    assert driven.final("t1") == state
    if reason is not None:
        stopped = decision.events[0]
        assert isinstance(stopped, events.Stopped)
        assert (stopped.reason, stopped.execution_id) == (reason, driven.dispatch("t1")["execution_id"])
    driven.advance(7200)
    assert driven.dispatched() == ["t1"]
    assert driven.told("revoked") == []
    driven.check()


def test_the_grace_ends_it_after_sixty_seconds() -> None:
    """F7: not a microsecond earlier; the runner is told that it has lost the attempt."""
    driven = Driven()
    driven.trigger("t1")
    driven.trigger("t2")
    driven.stop("t1")
    driven.advance(59.999999)
    assert driven.running() == ["t1"]
    driven.status("t1", "heartbeat")
    driven.advance(0.000001)
    assert driven.running() == ["t2"]
    assert driven.final("t1") == "stopped"
    assert driven.told("revoked") == ["t1"]
    assert driven.events_of(events.Stopped)[0].reason == "grace"
    driven.check()


def test_the_lease_ends_a_stopping_attempt_as_stopped_when_it_comes_first() -> None:
    """F7."""
    driven = Driven()
    driven.trigger("t1", heartbeat_seconds=20)
    driven.stop("t1")
    driven.advance(20)
    assert driven.final("t1") == "stopped"
    assert driven.events_of(events.LeaseExpired)[0].final == "stopped"
    assert driven.told("revoked") == ["t1"]
    driven.advance(600)
    assert driven.dispatched() == ["t1"]
    driven.check()


def test_a_second_stop_of_a_stopping_one_changes_nothing() -> None:
    """F7: the grace is not extended."""
    driven = Driven()
    driven.trigger("t1", conversation_id="c")
    driven.stop("t1")
    driven.advance(30)
    assert ignored(driven.stop("t1")) == ("already_stopping", "running")
    assert ignored(driven.stop(conversation_id="c")) == ("already_stopping", "running")
    assert driven.told("stop_requested") == ["t1"]
    driven.advance(30)
    assert driven.final("t1") == "stopped"


@pytest.mark.parametrize("end", ["finished", "failed", "stopped"])
def test_stopping_what_is_final_says_so_and_has_no_effect(end: str) -> None:
    """F7, case 49: the answer is true."""
    driven = Driven()
    driven.trigger("t1", max_attempts=1)
    driven.status("t1", end)
    assert ignored(driven.stop("t1")) == ("already_final", end)
    assert driven.final("t1") == end


def test_stopping_what_was_never_accepted_is_refused() -> None:
    """F7: trigger_unknown; also one that was refused."""
    driven = Driven()
    driven.configure(max_backlog_depth=0)
    driven.trigger("t1")
    driven.trigger("refused")
    for target in ({"trigger_id": "nobody"}, {"trigger_id": "refused"}, {"conversation_id": "nowhere"}):
        decision = driven.stop(**target)
        assert decision.refusal is not None
        assert decision.refusal.code == "trigger_unknown"


@pytest.mark.parametrize("how", ["future", "retrying", "paused"])
def test_whatever_waits_is_stopped_at_once(how: str) -> None:
    """F4, F7: stopping a paused one is immediate; a retry never happens."""
    driven = Driven()
    driven.trigger("t1", **({"available_at": at_seconds(60)} if how == "future" else {}))
    if how == "retrying":
        driven.fail("t1")
    if how == "paused":
        driven.status("t1", "paused")
    assert kinds(driven.stop("t1")) == ["stopped"]
    driven.advance(7200)
    assert driven.dispatched() == ([] if how == "future" else ["t1"])
    assert driven.told("stop_requested") == []
    driven.check()


def test_stopping_a_conversation_stops_its_running_one_and_removes_the_waiting() -> None:
    """F7: other conversations are untouched."""
    driven = Driven(default_limit=2)
    driven.trigger("t1", conversation_id="c")
    for number in range(2, 5):
        driven.trigger(f"t{number}", conversation_id="c", **({"available_at": at_seconds(60)} if number == 4 else {}))
    driven.trigger("other1")
    driven.trigger("other2")
    decision = driven.stop(conversation_id="c")
    assert kinds(decision) == ["stop_requested", "stopped", "stopped", "stopped"]
    assert (driven.running(), driven.waiting()) == (["t1", "other1"], ["other2"])
    driven.trigger("after", conversation_id="c")
    assert driven.waiting() == ["after", "other2"]
    driven.status("t1", "stopped")
    driven.finish("other1")
    assert sorted(driven.running()) == ["after", "other2"]
    driven.check()


def test_stopping_a_conversation_that_has_ended_says_so() -> None:
    """F7."""
    driven = Driven()
    driven.trigger("t1", conversation_id="c")
    driven.finish("t1")
    assert ignored(driven.stop(conversation_id="c")) == ("already_final", None)


def test_stopping_a_paused_conversation_is_immediate() -> None:
    """F4, F7."""
    driven = Driven()
    driven.trigger("t1", conversation_id="c")
    driven.status("t1", "paused")
    driven.trigger("t2", conversation_id="c")
    assert kinds(driven.stop(conversation_id="c")) == ["stopped", "stopped"]
    assert driven.agent().triggers == {}


def test_a_stop_leaves_the_ones_behind_it_in_the_queue() -> None:
    """F7, case 53: only the stopped trigger is cancelled, in its conversation too."""
    driven = Driven()
    driven.trigger("t1", conversation_id="c")
    driven.trigger("t2", conversation_id="c")
    driven.trigger("t3")
    driven.stop("t1")
    driven.status("t1", "stopped")
    assert driven.running() == ["t2"]
    driven.finish("t2")
    assert driven.running() == ["t3"]


def test_restarting_a_final_one_is_a_new_trigger_and_passes_admission() -> None:
    """F7, case 5: restarts names the old one."""
    driven = Driven()
    driven.trigger("t1", max_attempts=1)
    driven.fail("t1")
    driven.trigger("running")
    for number in range(10):
        driven.trigger(f"again{number}", restarts="t1")
    assert driven.running() == ["running"]
    assert len(driven.waiting()) == 10
    assert driven.final("t1") == "failed"


# F4


def test_a_paused_attempt_frees_its_slot() -> None:
    """F4: waiting for a person."""
    driven = Driven()
    driven.trigger("t1")
    driven.trigger("t2")
    [decision] = driven.status("t1", "paused", result="a question")
    assert kinds(decision) == ["paused", "dispatched"]
    assert driven.running() == ["t2"]
    assert driven.texts[-1]["kind"] == "result"
    driven.advance(100 * 86_400)
    assert driven.agent().triggers["t1"].state == "paused"
    driven.check()


def test_a_reply_ends_the_paused_trigger_as_finished_and_runs() -> None:
    """F4: replied."""
    driven = Driven()
    driven.trigger("t1", conversation_id="c", **PERSON)
    driven.status("t1", "paused")
    decision = driven.trigger("t2", conversation_id="c", **PERSON)
    assert kinds(decision) == ["replied", "accepted", "placed", "dispatched"]
    replied = decision.events[0]
    assert isinstance(replied, events.Replied)
    assert (replied.trigger_id, replied.by) == ("t1", "t2")
    assert (driven.final("t1"), driven.running()) == ("finished", ["t2"])
    driven.check()


@pytest.mark.parametrize(
    "other",
    [
        {"kind": "task"},
        {"kind": "schedule", "interactive": True},
        {**PERSON, "available_at": at_seconds(60)},
        {**PERSON, "expires_at": at_seconds(0)},
    ],
    ids=["not interactive", "a schedule", "not yet available", "expired"],
)
def test_other_triggers_wait_behind_the_paused_one(other: Json) -> None:
    """F4: only an interactive trigger that is available now is a reply."""
    driven = Driven()
    driven.trigger("t1", conversation_id="c", **PERSON)
    driven.status("t1", "paused")
    driven.trigger("t2", conversation_id="c", **other)
    driven.advance(61)
    assert driven.agent().triggers["t1"].state == "paused"
    assert driven.running() == []
    driven.control("resume_trigger", trigger_id="t1")
    assert driven.running() == ["t1"]
    driven.check()


@pytest.mark.parametrize("why", ["archived", "ask", "conflict", "late", "invalid", "backlog"])
def test_a_refused_reply_leaves_the_paused_trigger_paused(why: str) -> None:
    """F4."""
    driven = Driven()
    driven.trigger("t1", conversation_id="c", **PERSON)
    driven.status("t1", "paused")
    fields: dict[str, Any] = {
        "ask": {"on_busy": "ask"},
        "late": {"decide_before": at_seconds(-1)},
        "invalid": {"on_busy": "later"},
    }.get(why, {})
    if why in ("backlog", "ask"):
        driven.configure(max_backlog_depth=0)
        driven.trigger("running")
    if why == "archived":
        driven.control("archive")
    id = "t1" if why == "conflict" else "t2"
    decision = driven.trigger(id, conversation_id="c", **{**PERSON, "message": "yes", **fields})
    assert decision.refusal is not None
    row = driven.agent().triggers.get("t1")
    assert (row.state if row else driven.final("t1")) == ("stopped" if why == "archived" else "paused")


def test_a_reply_behind_waiting_ones_keeps_the_order_of_the_conversation() -> None:
    """F4, B6: the paused one ends; those placed before the reply go first."""
    driven = Driven()
    driven.trigger("t1", conversation_id="c", **PERSON)
    driven.trigger("t2", conversation_id="c")
    driven.status("t1", "paused")
    assert driven.running() == []
    driven.trigger("reply", conversation_id="c", **PERSON)
    assert driven.running() == ["t2"]
    assert driven.waiting() == ["reply"]
    driven.check()


def test_a_reply_to_an_agent_that_is_full_waits_for_its_place() -> None:
    """A2, F4: both pass admission."""
    driven = Driven()
    driven.trigger("t1", conversation_id="c", **PERSON)
    driven.status("t1", "paused")
    driven.trigger("running")
    decision = driven.trigger("reply", conversation_id="c", **PERSON)
    assert kinds(decision) == ["replied", "accepted", "placed"]
    assert (driven.running(), driven.waiting()) == (["running"], ["reply"])


@pytest.mark.parametrize("on_busy", [None, "", "queue"])
def test_resume_trigger_queues_the_same_trigger_with_a_new_attempt(on_busy: str | None) -> None:
    """F4, C4: id, created_at and payload stay, its turn comes by its new availability."""
    driven = Driven()
    driven.trigger("t1", payload=[1], created_at=at_seconds(-9))
    driven.status("t1", "paused")
    driven.trigger("t2")
    driven.advance(5)
    driven.control("resume_trigger", trigger_id="t1", **({} if on_busy is None else {"on_busy": on_busy}))
    assert driven.waiting() == ["t1"]
    row = driven.agent().triggers["t1"]
    assert (row.available_at, row.created_at) == (driven.now, driven.now - 14 * SECOND)
    driven.finish("t2")
    assert (driven.dispatch("t1")["attempt"], driven.dispatch("t1")["payload"]) == (2, [1])
    driven.check()


@pytest.mark.parametrize(
    ("on_busy", "code"),
    [("later", "agent_on_busy_invalid"), (5, "agent_on_busy_invalid"), ("ask", "agent_parallelism_limit_reached"),
     ("force", "force_limit_reached")],
)  # fmt: skip
def test_a_resume_that_asks_is_refused_by_a_full_agent_and_it_stays_paused(on_busy: object, code: str) -> None:
    """B2, B4, F4."""
    driven = Driven()
    driven.trigger("t1")
    driven.status("t1", "paused")
    driven.trigger("full")
    driven.trigger("forced", interactive=True, on_busy="force")
    decision = driven.control("resume_trigger", trigger_id="t1", on_busy=on_busy)
    assert decision.refusal is not None
    assert decision.refusal.code == code
    assert driven.agent().triggers["t1"].state == "paused"
    driven.check()


@pytest.mark.parametrize(("on_busy", "forced"), [("ask", False), ("force", False), ("force", True)])
def test_a_resume_that_asks_starts_at_once_where_there_is_room_or_it_may_force(on_busy: str, forced: bool) -> None:
    """B2, B4, F4: a resume passes admission like new work."""
    driven = Driven()
    driven.trigger("t1")
    driven.status("t1", "paused")
    if forced:
        driven.trigger("full")
    decision = driven.control("resume_trigger", trigger_id="t1", on_busy=on_busy)
    assert decision.refusal is None
    assert driven.dispatch("t1")["attempt"] == 2
    assert driven.dispatch("t1")["forced"] is forced
    driven.fail("t1")
    assert driven.agent().triggers["t1"].on_busy == "queue", "its retry is ordinary (B4)"
    driven.check()


@pytest.mark.parametrize("control", ["resume_trigger", "reschedule"])
@pytest.mark.parametrize("state", ["waiting", "running", "paused", "finished", "unknown"])
def test_controls_of_a_trigger_in_another_state_change_nothing(control: str, state: str) -> None:
    """F4: resume_trigger needs a paused one, reschedule one that waits."""
    driven = Driven()
    if state == "waiting":
        driven.trigger("running")
    if state != "unknown":
        driven.trigger("t1")
    if state == "paused":
        driven.status("t1", "paused")
    if state == "finished":
        driven.finish("t1")
    driven.configure(owner="u")
    before = driven.state()
    fields = {"available_at": at_seconds(77)} if control == "reschedule" else {}
    decision = driven.control(control, trigger_id="t1", **fields)
    if (control, state) in (("resume_trigger", "paused"), ("reschedule", "waiting")):
        assert decision.events
        return
    assert driven.state() == before
    if state == "unknown":
        assert decision.refusal is not None
        assert decision.refusal.code == "trigger_unknown"
    elif state == "finished":
        assert ignored(decision) == ("already_final", "finished")
    else:
        assert ignored(decision) == ({"resume_trigger": "not_paused", "reschedule": "not_waiting"}[control], state)


@pytest.mark.parametrize(
    ("seconds", "expected"), [(600, 600), (-100, -100), (-300, -300), (-301, -300), (-86_400 * 9, -300)]
)
def test_a_trigger_is_moved_in_time_within_the_window(seconds: float, expected: float) -> None:
    """C1: reschedule can't put anybody before everybody either."""
    driven = Driven()
    driven.trigger("running")
    driven.trigger("t1")
    driven.trigger("t2", created_at=at_seconds(-299))
    driven.control("reschedule", trigger_id="t1", available_at=at_seconds(seconds))
    assert driven.agent().triggers["t1"].available_at == driven.now + expected * SECOND
    assert driven.waiting() == (["t1", "t2"] if expected == -300 else ["t2", "t1"])
    assert json.loads(driven.values[-1])["events"][0]["available_at"] == at_seconds(expected)
    driven.check()


def test_moving_a_future_trigger_to_now_starts_it_at_once() -> None:
    """F9: no timer is needed."""
    driven = Driven()
    driven.trigger("t1", available_at=at_seconds(86_400))
    decision = driven.control("reschedule", trigger_id="t1", available_at=at_seconds(0))
    assert kinds(decision) == ["rescheduled", "placed", "dispatched"]


def test_moving_a_retry_forward_starts_it_at_once_and_backward_later() -> None:
    """F5."""
    driven = Driven()
    driven.trigger("t1")
    driven.fail("t1")
    driven.control("reschedule", trigger_id="t1", available_at=at_seconds(100))
    driven.advance(99)
    assert driven.running() == []
    driven.control("reschedule", trigger_id="t1", available_at=at_seconds(99))
    assert driven.running() == ["t1"]
    driven.check()
