"""F4 with sites: replies that ask a site first, and paused triggers that are queued again."""

from typing import Any

import pytest

from streams.rules import events
from tests.driving import Driven, Json, at_seconds

PERSON: Json = {"interactive": True, "kind": "chat"}
POOL: Json = {"worker": True}


def paused(**fields: Any) -> Driven:
    """An agent whose t1 in the conversation c is paused; one worker, which B's t0 has. Messages are held."""
    driven = Driven(pool=1, delivers=False)
    driven.trigger("t1", conversation_id="c", **fields)
    deliver_all(driven)
    driven.status("t1", "paused")
    deliver_all(driven)
    driven.trigger("t0", "B", **POOL)
    deliver_all(driven)
    assert driven.running("B") == ["t0"]
    return driven


def deliver_all(driven: Driven) -> None:
    while driven.undelivered:
        driven.deliver()


def state_of(driven: Driven, id: str) -> str | None:
    row = driven.agent().triggers.get(id)
    return row.state if row is not None else driven.final(id)


@pytest.mark.parametrize("on_busy", ["ask", "force"])
@pytest.mark.parametrize("crashes", [False, True])
def test_a_reply_that_its_site_refuses_leaves_the_paused_trigger_paused(on_busy: str, crashes: bool) -> None:
    """F4, B2: refused, it was no reply, and leaves nothing behind."""
    driven = paused(**POOL)
    before = driven.agent().triggers["t1"]
    decision = driven.trigger("reply", conversation_id="c", **POOL, **PERSON, on_busy=on_busy)
    assert (decision.refusal, decision.settles) == (None, ())
    if crashes:
        driven.crash()
    deliver_all(driven)
    assert driven.refused() == {"reply": "site_workers_busy"}
    assert state_of(driven, "t1") == "paused"
    assert driven.agent().triggers["t1"].place == before.place
    assert driven.events_of(events.Replied) == []
    driven.trigger("again", conversation_id="c", **PERSON)
    assert (state_of(driven, "t1"), driven.running()) == ("finished", ["again"])
    driven.check()


@pytest.mark.parametrize("on_busy", ["ask", "force"])
def test_a_reply_that_its_site_grants_ends_the_paused_trigger_when_it_starts(on_busy: str) -> None:
    """F4: one decision for both."""
    driven = paused(**POOL)
    driven.finish("t0", "B")
    driven.trigger("reply", conversation_id="c", **POOL, **PERSON, on_busy=on_busy)
    assert state_of(driven, "t1") == "paused"
    deliver_all(driven)
    assert (state_of(driven, "t1"), driven.running()) == ("finished", ["reply"])
    [started] = [d for d in driven.decisions if any(e.type == "replied" for e in d.events)]
    assert [event.type for event in started.events] == ["granted", "replied", "dispatched"]
    assert started.settles == ("reply",)
    driven.check()


def test_a_queued_reply_ends_the_paused_trigger_at_once_and_waits_for_its_worker() -> None:
    """F4: it is accepted, and passes the site's admission like any other."""
    driven = paused(**POOL)
    driven.trigger("reply", conversation_id="c", **POOL, **PERSON, on_busy="queue")
    assert state_of(driven, "t1") == "finished"
    deliver_all(driven)
    assert driven.claim_state("reply") == "standing"
    driven.finish("t0", "B")
    deliver_all(driven)
    assert driven.running() == ["reply"]
    driven.check()


@pytest.mark.parametrize("end", ["stop", "stop reply", "conversation", "pause", "archive", "decide_before", "resume"])
def test_whatever_happens_while_a_reply_asks_its_site_one_of_the_two_goes_on(end: str) -> None:
    """F4, F7, B5, E1: the paused one is lost only with its conversation."""
    driven = paused(**POOL)
    driven.finish("t0", "B")
    driven.trigger("reply", conversation_id="c", **POOL, **PERSON, on_busy="ask", decide_before=at_seconds(5))
    if end == "stop":
        driven.stop("t1")
    elif end == "stop reply":
        driven.stop("reply")
    elif end == "conversation":
        driven.stop(conversation_id="c")
    elif end in ("pause", "archive"):
        driven.control(end)
    elif end == "decide_before":
        driven.advance(5)
    else:
        driven.control("resume_trigger", trigger_id="t1")
    deliver_all(driven)
    expected = {
        "stop": ("stopped", "running"),
        "stop reply": ("paused", "stopped"),
        "conversation": ("stopped", "stopped"),
        "pause": ("paused", "refused"),
        "archive": ("stopped", "stopped"),
        "decide_before": ("paused", "refused"),
        "resume": ("waiting", "running"),
    }
    assert (state_of(driven, "t1"), state_of(driven, "reply")) == expected[end]
    assert driven.granted() == (["reply"] if end in ("stop", "resume") else [])
    driven.check()


@pytest.mark.parametrize(("on_busy", "accepted"), [("ask", False), ("force", False), ("queue", True)])
def test_a_second_reply_while_the_first_asks_its_site(on_busy: str, accepted: bool) -> None:
    """B6, F4: an ask is behind the first; a queued one is accepted, so that it is the reply whatever the site says."""
    driven = paused(**POOL)
    driven.trigger("first", conversation_id="c", **POOL, **PERSON, on_busy="ask")
    decision = driven.trigger("second", conversation_id="c", **PERSON, on_busy=on_busy)
    assert (decision.refusal.code if decision.refusal else None) == (None if accepted else "conversation_busy")
    deliver_all(driven)
    assert driven.refused()["first"] == "site_workers_busy"
    assert state_of(driven, "t1") == ("finished" if accepted else "paused")
    assert driven.running() == (["second"] if accepted else [])
    driven.check()


# resume_trigger


def test_a_resumed_trigger_claims_its_worker_and_folder_anew() -> None:
    """F4: it passes both admissions, behind what waits there already."""
    driven = paused(**POOL, environment_id="e", folder="/a")
    driven.trigger("t2", "C", **POOL)
    deliver_all(driven)
    driven.advance(1)
    driven.control("resume_trigger", trigger_id="t1")
    deliver_all(driven)
    assert driven.claim_state("t1") == "standing"
    driven.finish("t0", "B")
    deliver_all(driven)
    assert (driven.running("C"), driven.running()) == (["t2"], [])
    driven.finish("t2", "C")
    deliver_all(driven)
    assert driven.running() == ["t1"]
    driven.check()


def test_a_resume_that_asks_waits_at_its_site_like_a_retry() -> None:
    """B4, F4: what only the agent knows refuses it at once; at the site it is an ordinary one."""
    driven = paused(**POOL)
    decision = driven.control("resume_trigger", trigger_id="t1", on_busy="ask")
    assert decision.refusal is None
    deliver_all(driven)
    assert driven.claim_state("t1") == "standing"
    assert driven.agent().triggers["t1"].on_busy == "queue"
    driven.check()


@pytest.mark.parametrize("on_busy", ["ask", "force"])
@pytest.mark.parametrize(
    ("why", "code"),
    [
        ("paused", "agent_paused"),
        ("reply", "conversation_busy"),
        ("budget", "run_budget_used_up"),
        ("reserved budget", "run_budget_used_up"),
        ("full", "agent_parallelism_limit_reached"),
        ("mute", "site_not_answering"),
    ],
)
def test_a_resume_that_asks_is_refused_with_the_first_reason_and_stays_paused(
    on_busy: str, why: str, code: str
) -> None:
    """B2, B3, E4: with what a refusal carries; a site's trigger is never forced again (B4)."""
    driven = paused(**POOL)
    driven.configure(parallelism_limit=1 if why == "full" else 3, run_budget=0 if why == "budget" else 1)
    if why == "paused":
        driven.control("pause")
    if why == "reply":
        driven.trigger("reply", conversation_id="c", **POOL, **PERSON, on_busy="ask")
    if why in ("reserved budget", "mute"):
        driven.configure(run_budget=1 if why == "reserved budget" else 9)
        driven.trigger("asks", **POOL, site="default" if why == "mute" else "far")
        if why == "mute":
            driven.advance(30)
    if why == "full":
        driven.configure(run_budget=9)
        driven.trigger("full")
    before = driven.state()
    refusal = driven.control("resume_trigger", trigger_id="t1", on_busy=on_busy).refusal
    assert refusal is not None
    assert (refusal.code, refusal.force_allowed) == (code, False)
    assert refusal.position_if_queued == 1 + (why in ("reserved budget", "mute", "reply"))
    assert driven.state() == before
    driven.check()


@pytest.mark.parametrize("on_busy", [None, "ask", "force"])
def test_a_resume_is_not_bound_by_the_time_in_which_the_first_attempt_had_to_start(on_busy: str | None) -> None:
    """B5: whoever asked has had the answer; a resume has a decide_before of its own."""
    driven = Driven(1)
    driven.trigger("t1", **PERSON, on_busy="ask", decide_before=at_seconds(5))
    driven.status("t1", "paused")
    driven.advance(60)
    if on_busy == "force":
        driven.trigger("busy")
    fields = {} if on_busy is None else {"on_busy": on_busy}
    resume = driven.control("resume_trigger", trigger_id="t1", decide_before=at_seconds(65), **fields)
    assert resume.refusal is None
    assert state_of(driven, "t1") == "running"
    driven.advance(60)
    assert state_of(driven, "t1") == "running" and driven.refused() == {}
    driven.check()


@pytest.mark.parametrize(
    ("on_busy", "limit", "budget", "code"),
    [
        ("ask", 1, None, "agent_parallelism_limit_reached"),
        ("ask", 2, 1, "run_budget_used_up"),
        ("force", 1, 1, "run_budget_used_up"),
        ("force", 1, 2, None),
    ],
)
def test_a_resume_that_asks_never_passes_who_became_available_before_it(
    on_busy: str, limit: int, budget: int | None, code: str | None
) -> None:
    """B2, C2, E4: also when no timer has fired since; a forced one that would find no budget stays paused."""
    driven = Driven(limit)
    driven.trigger("t1")
    driven.status("t1", "paused")
    driven.configure(run_budget=budget)
    driven.trigger("soon", available_at=at_seconds(5))
    driven.skip(6)
    decision = driven.control("resume_trigger", trigger_id="t1", on_busy=on_busy)
    assert (decision.refusal.code if decision.refusal else None) == code
    assert state_of(driven, "t1") == ("paused" if code else "running")
    driven.fire()
    assert driven.running() == (["soon"] if code else ["soon", "t1"])
    driven.check()


@pytest.mark.parametrize(
    ("on_busy", "budget", "code"),
    [("ask", 1, "agent_parallelism_limit_reached"), ("force", 1, None), ("force", 0, "run_budget_used_up")],
)
def test_who_became_available_and_finds_no_slot_takes_no_budget_from_a_resume(
    on_busy: str, budget: int, code: str | None
) -> None:
    """B3, B4, E4: the budget is what stops it only if those that start before it use it up."""
    driven = Driven(1)
    driven.trigger("t1")
    driven.status("t1", "paused")
    driven.trigger("busy")
    driven.configure(run_budget=budget)
    driven.trigger("soon", available_at=at_seconds(5))
    driven.skip(6)
    decision = driven.control("resume_trigger", trigger_id="t1", on_busy=on_busy)
    assert (decision.refusal.code if decision.refusal else None) == code
    driven.fire()
    assert driven.running() == (["busy"] if code else ["busy", "t1"])
    driven.check()
