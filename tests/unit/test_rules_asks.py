"""B2-B6, E4, F7: people who don't wait: ask, force, interrupt; refusals with their codes in order of precedence."""

import itertools
from typing import Any

import pytest

from streams import TRIGGERS
from streams.rules import events
from tests.driving import Driven, Json, at_seconds

PERSON: Json = {"interactive": True, "kind": "chat"}


def code(decision: events.Decision) -> str | None:
    return decision.refusal.code if decision.refusal else None


def ask(driven: Driven, id: str, on_busy: str | None = "ask", agent_id: str = "A", **fields: Any) -> str | None:
    return code(driven.trigger(id, agent_id, **PERSON, on_busy=on_busy, **fields))


@pytest.mark.parametrize("on_busy", [None, "", "ask"])
def test_an_ask_starts_now_or_leaves_no_trace(on_busy: str | None) -> None:
    """B2, B3: refused, never queued unasked; its answer is remembered like any other."""
    driven = Driven(twice=True)
    assert ask(driven, "t1", on_busy) is None
    assert driven.running() == ["t1"]
    before = driven.state()
    assert ask(driven, "t2", on_busy) == "agent_parallelism_limit_reached"
    assert driven.state() == before
    assert driven.final("t2") == "refused"
    driven.finish("t1")
    assert driven.running() == []
    assert ask(driven, "t3", on_busy) is None
    assert driven.running() == ["t3"]
    driven.check()


def test_an_ask_never_passes_who_is_older_and_may_start() -> None:
    """B2, C2: room that an older one takes in the same step is no room."""
    driven = Driven(default_limit=2)
    driven.trigger("r1")
    driven.trigger("soon", available_at=at_seconds(5))
    driven.skip(6)
    assert ask(driven, "t1") == "agent_parallelism_limit_reached"
    assert driven.running() == ["r1"], "a refusal starts nobody"
    driven.fire()
    assert driven.running() == ["r1", "soon"]
    driven.check()


def test_an_ask_does_not_take_the_last_of_a_budget_from_who_is_older() -> None:
    """E4, C2: refused at once with its own code, and not accepted first."""
    driven = Driven(default_limit=3)
    driven.configure(run_budget=1)
    driven.trigger("soon", available_at=at_seconds(5))
    driven.skip(6)
    decision = driven.trigger("t1", **PERSON, on_busy="ask")
    assert (code(decision), decision.events) == ("run_budget_used_up", ())
    driven.fire()
    assert driven.running() == ["soon"]
    driven.check()


@pytest.mark.parametrize("on_busy", ["ask", "force"])
def test_a_reply_refused_because_of_an_older_trigger_leaves_the_paused_one_paused(on_busy: str) -> None:
    """F4, B6: also when the older one has become available and no timer has fired since."""
    driven = Driven(default_limit=2)
    driven.trigger("t1", conversation_id="c")
    driven.trigger("soon", conversation_id="c", available_at=at_seconds(5))
    driven.status("t1", "paused")
    driven.skip(6)
    decision = driven.trigger("reply", conversation_id="c", **PERSON, on_busy=on_busy)
    assert (code(decision), decision.events) == ("conversation_busy", ())
    assert driven.agent().triggers["t1"].state == "paused"
    driven.fire()
    driven.check()


@pytest.mark.parametrize("on_busy", ["ask", "force"])
@pytest.mark.parametrize("first", ["running", "waiting", "retrying"])
def test_an_ask_behind_its_own_conversation_is_refused(on_busy: str, first: str) -> None:
    """B6: also when the agent has room, and force never passes its own conversation."""
    driven = Driven(default_limit=5)
    driven.trigger("t1", conversation_id="c")
    if first == "waiting":
        driven.status("t1", "paused")
        driven.configure(parallelism_limit=1)
        driven.trigger("other")
        driven.control("resume_trigger", trigger_id="t1")
        driven.configure(parallelism_limit=5, run_budget=0)
    if first == "retrying":
        driven.fail("t1")
    before = driven.state()
    assert ask(driven, "t2", on_busy, conversation_id="c") == "conversation_busy"
    assert driven.state() == before
    driven.check()


@pytest.mark.parametrize("on_busy", ["ask", "force"])
def test_an_ask_is_the_reply_of_a_paused_conversation(on_busy: str) -> None:
    """F4: it passes admission; the paused one ends when it is accepted."""
    driven = Driven()
    driven.trigger("t1", conversation_id="c")
    driven.status("t1", "paused")
    assert ask(driven, "t2", on_busy, conversation_id="c") is None
    assert (driven.final("t1"), driven.running()) == ("finished", ["t2"])
    driven.check()


def test_a_future_ask_is_refused_and_is_no_reply() -> None:
    """B3, F4."""
    driven = Driven()
    later = at_seconds(60)
    assert ask(driven, "t0", available_at=later) == "not_yet_available"
    driven.trigger("t1", conversation_id="c")
    driven.status("t1", "paused")
    assert ask(driven, "t2", conversation_id="c", available_at=later) == "conversation_busy"
    assert driven.agent().triggers["t1"].state == "paused"


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_at_most_as_many_are_forced_as_the_limit(limit: int) -> None:
    """B4: forced ones count in running, and only those that did exceed the limit are marked."""
    driven = Driven(default_limit=limit)
    for number in range(limit):
        assert ask(driven, f"within{number}", "force") is None
    for number in range(limit):
        assert ask(driven, f"over{number}", "force", requested_by="someone") is None
    assert ask(driven, "more", "force") == "force_limit_reached"
    assert [driven.dispatch(id)["forced"] for id in driven.running()] == [False] * limit + [True] * limit
    assert driven.agent().running == 2 * limit
    assert driven.agent().triggers["over0"].requested_by == "someone"
    driven.finish("within0")
    assert ask(driven, "more2", "force") == "force_limit_reached", "the forced ones still run"
    driven.finish("over0")
    assert ask(driven, "more3", "force") is None
    driven.trigger("queued")
    for number in range(1, limit):
        driven.finish(f"over{number}")
    assert "queued" not in driven.running() or limit > 1
    driven.check()


def test_a_forced_one_keeps_others_waiting_until_there_is_room_again() -> None:
    """B4, A2: running counts it."""
    driven = Driven()
    driven.trigger("t1")
    ask(driven, "forced", "force")
    driven.trigger("t2")
    driven.finish("t1")
    assert driven.running() == ["forced"]
    driven.finish("forced")
    assert driven.running() == ["t2"]
    driven.check()


@pytest.mark.parametrize("how", ["failed", "lost", "paused"])
def test_the_retry_or_resume_of_a_forced_one_is_ordinary(how: str) -> None:
    """B4."""
    driven = Driven()
    driven.trigger("t1")
    ask(driven, "forced", "force", timeout_seconds=10, conversation_id="c")
    if how == "lost":
        driven.advance(320)
    else:
        driven.status("forced", how)
    if how == "paused":
        driven.control("resume_trigger", trigger_id="forced")
    driven.advance(60)
    assert driven.running() == ["t1"]
    assert driven.agent().triggers["forced"].on_busy == "queue"
    driven.finish("t1")
    assert driven.running() == ["forced"]
    assert driven.dispatch("forced")["forced"] is False
    driven.check()


@pytest.mark.parametrize("serial", [{"serial": True}, {"agent_type": "acp"}])
def test_force_never_passes_a_serial_agent(serial: Json) -> None:
    """B4, A4: with the code of a full agent."""
    driven = Driven()
    driven.configure(**serial)
    driven.trigger("t1")
    refused = driven.trigger("t2", **PERSON, on_busy="force")
    assert refused.refusal is not None
    assert (refused.refusal.code, refused.refusal.force_allowed) == ("agent_parallelism_limit_reached", False)
    driven.check()


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("pause", "agent_paused"),
        ("budget", "run_budget_used_up"),
        ("approval", "approval_required"),
        ("depends", "dependency_unfinished"),
    ],
)
@pytest.mark.parametrize("on_busy", ["ask", "force"])
def test_force_passes_nothing_but_the_limit(what: str, expected: str, on_busy: str) -> None:
    """B4."""
    driven = Driven(default_limit=3)
    driven.configure(owner="u")
    fields: Json = {}
    if what == "pause":
        driven.control("pause")
    if what == "budget":
        driven.configure(run_budget=0)
    if what == "approval":
        fields = {"approval_required": True}
    if what == "depends":
        fields = {"depends_on": [{"agent_id": "B", "conversation_id": "c"}]}
    before = driven.state()
    assert ask(driven, "t1", on_busy, **fields) == expected
    assert driven.state() == before
    assert not driven.messages, "a refusal asks nobody to watch"


def test_force_under_an_unlimited_agent_is_ordinary() -> None:
    """B4: there is nothing to exceed."""
    driven = Driven(default_limit="unlimited")
    for number in range(20):
        assert ask(driven, f"t{number}", "force") is None
    assert not any(driven.dispatch(f"t{number}")["forced"] for number in range(20))
    driven.check()


def test_a_refusal_says_whether_force_would_do() -> None:
    """B3."""
    driven = Driven()
    driven.trigger("t1")
    driven.trigger("t2")
    first = driven.trigger("t3", **PERSON, on_busy="ask").refusal
    assert first is not None
    assert (first.force_allowed, first.position_if_queued, first.holders, first.waiting) == (True, 2, ("t1",), 1)
    ask(driven, "t4", "force")
    second = driven.trigger("t5", **PERSON, on_busy="ask").refusal
    assert second is not None
    assert (second.force_allowed, second.running, second.limit) == (False, 2, 1)


# B3: precedence

AGENTS_OWN: tuple[tuple[str, Json], ...] = (
    ("invalid_record", {"environment_id": "e", "folder": "/a/.."}),
    ("agent_paused", {}),
    ("conversation_busy", {"conversation_id": "c"}),
    ("approval_required", {"approval_required": True}),
    ("dependency_unfinished", {"depends_on": [{"agent_id": "B", "conversation_id": "c"}]}),
    ("not_yet_available", {"available_at": at_seconds(60)}),
    ("run_budget_used_up", {}),
    ("agent_parallelism_limit_reached", {}),
)


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(range(len(AGENTS_OWN)), 2)))
@pytest.mark.parametrize("on_busy", ["ask", "force"])
def test_of_two_reasons_the_first_in_order_is_given(first: int, second: int, on_busy: str) -> None:
    """B3."""
    driven = Driven()
    driven.trigger("running", conversation_id="c")
    codes = {AGENTS_OWN[first][0], AGENTS_OWN[second][0]}
    if "agent_parallelism_limit_reached" not in codes:
        driven.configure(parallelism_limit=5)
    if "agent_paused" in codes:
        driven.control("pause")
    if "run_budget_used_up" in codes:
        driven.configure(run_budget=0)
    before = driven.state()
    assert ask(driven, "t", on_busy, **(AGENTS_OWN[second][1] | AGENTS_OWN[first][1])) == AGENTS_OWN[first][0]
    assert driven.state() == before


@pytest.mark.parametrize(
    "later", [{"approval_required": True}, {"available_at": at_seconds(60)}, {"conversation_id": "c"}]
)
def test_what_waits_for_any_reason_is_refused_when_the_backlog_is_full(later: Json) -> None:
    """A5, B3: agent_backlog_full is for what would wait, and comes last."""
    driven = Driven(default_limit=5)
    driven.configure(max_backlog_depth=0)
    driven.trigger("running", conversation_id="c")
    assert code(driven.trigger("t", **later)) == "agent_backlog_full"


# B5


@pytest.mark.parametrize("on_busy", ["ask", "force", "interrupt"])
def test_an_ask_that_is_handled_too_late_has_no_effect(on_busy: str) -> None:
    """B5: not remembered: asking again with more time works."""
    driven = Driven()
    assert ask(driven, "t1", on_busy, decide_before=at_seconds(0)) == "request_expired"
    assert ask(driven, "t1", on_busy, decide_before=at_seconds(5)) is None
    assert driven.running() == ["t1"]
    driven.check()


def test_repeats_of_asks_change_nothing_over_http_as_well() -> None:
    """F8, A6."""
    driven = Driven()
    value: Json = {"type": "trigger", "v": 1, "id": "t", "agent_id": "A", "conversation_id": "c", **PERSON}
    [decision] = driven.send(TRIGGERS.name, value, headers=[("via", b"http")])
    assert code(decision) == "agent_not_found"
    driven.configure()
    [decision] = driven.send(TRIGGERS.name, value | {"id": "t2"}, headers=[("via", b"http")])
    assert code(decision) is None
    [decision] = driven.send(TRIGGERS.name, value | {"id": "t2"})
    assert decision.ignored is not None
    assert (decision.ignored.reason, decision.ignored.state) == ("duplicate", "running")


# E4: the agent's budget


def test_a_run_budget_is_spent_by_attempts_and_holds_back_the_rest() -> None:
    """E4: retries cost one each; what runs goes on; a new budget goes on."""
    driven = Driven(default_limit=5)
    driven.configure(run_budget=3)
    driven.trigger("t1")
    driven.fail("t1")
    driven.advance(5)
    for number in range(2, 5):
        driven.trigger(f"t{number}")
    assert driven.running() == ["t1", "t2"]
    assert driven.agent().row.run_budget == 0
    driven.crash()
    driven.finish("t1")
    assert driven.running() == ["t2"]
    driven.configure(run_budget=1)
    assert driven.running() == ["t2", "t3"]
    driven.configure(run_budget=None)
    assert driven.running() == ["t2", "t3", "t4"]
    driven.check()


# Asks of sites, B3, F8


def test_a_refusal_that_comes_later_has_the_counts_of_one_at_once() -> None:
    """B3: those who wait with it are counted, it itself is not; an agent's holders are its running triggers."""
    driven = Driven(2, delivers=False)
    for id in ("t1", "t2"):
        driven.trigger(id, worker=True, **PERSON, on_busy="ask")
    driven.trigger("queued", created_at=at_seconds(10))
    driven.configure(parallelism_limit=1)
    driven.delivers = True
    driven.deliver()
    driven.site_control("gate", scope="organization", name="o", enabled=True)
    assert driven.running() == ["t1"]
    [refused] = driven.events_of(events.RefusedLater)
    assert (refused.code, refused.holders, refused.holders_count) == ("agent_parallelism_limit_reached", ("t1",), 1)
    assert (refused.running, refused.limit, refused.waiting) == (1, 1, 1)
    assert (refused.position_if_queued, refused.force_allowed) == (1, True)
    driven.check()


@pytest.mark.parametrize("on_busy", ["ask", "force"])
def test_a_refusal_names_who_has_a_slot_reserved_and_who_is_before_it_in_its_conversation(on_busy: str) -> None:
    """B3: with nothing running, the one that has asked its site is what is in the way."""
    driven = Driven(2, delivers=False)
    driven.configure(serial=True)
    driven.trigger("asking", conversation_id="asking", worker=True)
    for conversation_id, expected in (("other", ["asking"]), ("asking", ["asking", "behind"])):
        if conversation_id == "asking":
            driven.trigger("behind", conversation_id="asking")
        fields = {**PERSON, "conversation_id": conversation_id, "on_busy": on_busy}
        refused = driven.trigger(f"in {conversation_id}", **fields).refusal
        assert refused is not None
        assert (list(refused.holders), refused.holders_count, refused.running) == (expected, len(expected), 0)
    driven.check()


def test_a_refusal_names_the_first_twenty_in_the_way_and_how_many_there_are() -> None:
    driven = Driven()
    for number in range(25):
        driven.trigger(f"t{number:02}", conversation_id="c", created_at=at_seconds(number))
    refused = driven.trigger("ask", **{**PERSON, "conversation_id": "c"}, on_busy="ask").refusal
    assert refused is not None and refused.code == "conversation_busy"
    assert (len(refused.holders), refused.holders[0], refused.holders_count) == (20, "t00", 25)


def test_a_repeat_of_an_ask_under_way_is_answered_with_it_and_a_conflict_at_once() -> None:
    """F8: whoever sent other content with its id must not be given the answer of the site."""
    driven = Driven(delivers=False)
    driven.trigger("t1", worker=True, **PERSON, on_busy="ask")
    repeat = driven.trigger("t1", worker=True, **PERSON, on_busy="ask")
    conflict = driven.trigger("t1", worker=True, **PERSON, on_busy="ask", message="other")
    assert repeat.ignored is not None
    assert (repeat.ignored.reason, repeat.settles) == ("duplicate", ())
    assert conflict.refusal is not None
    assert (conflict.refusal.code, conflict.settles) == ("trigger_id_conflict", ("t1",))
    driven.delivers = True
    driven.deliver()
    driven.site_control("gate", scope="organization", name="o", enabled=True)
    assert driven.running() == ["t1"]
    assert [decision.settles for decision in driven.decisions if decision.command.type == "granted"] == [("t1",)]
    driven.check()


@pytest.mark.parametrize("on_busy", ["ask", "force"])
@pytest.mark.parametrize(("seconds", "starts"), [(4.999999, True), (5, False), (6, False)])
def test_a_grant_that_comes_at_or_after_the_deadline_starts_nothing(on_busy: str, seconds: float, starts: bool) -> None:
    """B5, [e]: also when the grant is handled before the timer, as after an outage; it goes back to the site."""
    driven = Driven(delivers=False)
    driven.trigger("t1", worker=True, **PERSON, on_busy=on_busy, decide_before=at_seconds(5))
    driven.deliver()
    driven.skip(seconds)
    driven.deliver()
    assert driven.running() == (["t1"] if starts else [])
    assert driven.refused() == ({} if starts else {"t1": "site_not_answering"})
    assert driven.last.settles == ("t1",)
    while driven.undelivered:
        driven.deliver()
    assert driven.granted() == (["t1"] if starts else [])
    driven.fire()
    driven.check()


def test_a_repeat_of_a_refused_ask_names_the_decision_that_refused_it() -> None:
    """F8: the first answer is that of the site, not the acceptance that led to it."""
    driven = Driven(pool=0)
    driven.trigger("t1", worker=True, **PERSON, on_busy="ask")
    [refusing] = [d for d in driven.decisions if any(isinstance(e, events.RefusedLater) for e in d.events)]
    repeat = driven.trigger("t1", worker=True, **PERSON, on_busy="ask")
    assert repeat.ignored is not None
    assert (repeat.ignored.first_seq, repeat.ignored.state) == (refusing.seq, "refused")
    driven.check()


def test_an_ask_that_is_moved_into_the_future_while_it_asks_is_refused() -> None:
    """B2: it never waits; its claim goes back."""
    driven = Driven(2, delivers=False)
    driven.trigger("t1", worker=True, **PERSON, on_busy="ask")
    driven.control("reschedule", trigger_id="t1", available_at=at_seconds(60))
    assert driven.refused() == {"t1": "not_yet_available"}
    while driven.undelivered:
        driven.deliver()
    assert driven.granted() == []
    driven.check()


def test_a_force_may_take_the_slot_that_an_older_claim_has_reserved() -> None:
    """B4, C6: it exceeds no limit, so it is not marked; the older one's grant comes late, at most K times."""
    driven = Driven(pool=1, delivers=False)
    driven.trigger("older", worker=True)
    driven.advance(1)
    assert ask(driven, "asks") == "agent_parallelism_limit_reached"
    assert ask(driven, "forced", "force") is None
    assert driven.dispatch("forced")["forced"] is False
    assert ask(driven, "over", "force") is None, "one more exceeds it"
    assert driven.dispatch("over")["forced"] is True
    while driven.undelivered:
        driven.deliver()
    assert driven.agent().triggers["older"].late == 1
    driven.finish("forced")
    driven.finish("over")
    while driven.undelivered:
        driven.deliver()
    assert driven.running() == ["older"]
    driven.check()
