"""One trigger's life as the log tells it: what it waited for and who held that, who acted, and why it was first."""

from collections import Counter

import pytest

from api.cli.explain import _waited
from streams.audit.causes import Holder, TriggerId, causes
from streams.audit.explain import Explained, Happened, Waited, explain
from streams.audit.past import Past
from streams.audit.precedence import Comparison, Precedence
from streams.rules.messages import Trigger
from streams.rules.order import SECOND
from tests.audits import log_of
from tests.driving import T0, Driven, at_seconds
from tests.offices import Office


def life_of(driven: Driven, trigger_id: str, agent_id: str = "A") -> Explained:
    found = explain(log_of(driven), agent_id, trigger_id)
    assert found is not None
    return found


def happened(found: Explained) -> list[tuple[str, str]]:
    return [(one.what, one.by) for one in found.timeline if isinstance(one, Happened)]


def waited(found: Explained) -> list[tuple[str, float]]:
    return [(one.reason, one.seconds(found.at)) for one in found.timeline if isinstance(one, Waited)]


def holders(found: Explained) -> list[tuple[str | None, float, float | None]]:
    return [
        (
            held.holder.trigger_id,
            (held.from_at - T0) / SECOND,
            None if held.to_at is None else (held.to_at - T0) / SECOND,
        )
        for one in found.timeline
        if isinstance(one, Waited)
        for held in one.holders
    ]


def test_a_life_over_two_attempts_with_every_wait_and_its_holders() -> None:
    driven = Driven(default_limit=2)
    driven.trigger("a")
    driven.trigger("b")
    driven.trigger("c", conversation_id="c-b")
    driven.trigger("d", requested_by="ann")
    driven.advance(10)
    driven.finish("a")
    driven.advance(5)
    driven.trigger("e")
    driven.fail("d", error="disk")
    driven.advance(30)
    driven.finish("e")
    driven.advance(10)
    driven.finish("d")
    found = life_of(driven, "d")
    assert [what for what, _ in happened(found)] == [
        "accepted", "placed", "dispatched", "attempt_failed", "dispatched", "finished",
    ]  # fmt: skip
    assert [by for _, by in happened(found)] == ["ann", "ann", "runner", "runner", "runner", "runner"]
    (first, _), (backoff, backoff_seconds), (full, full_seconds) = waited(found)
    assert (first, backoff, full) == (
        "agent_parallelism_limit_reached", "not_yet_available", "agent_parallelism_limit_reached",
    )  # fmt: skip
    assert 4.5 <= backoff_seconds <= 5
    assert full_seconds == 30
    assert holders(found)[:2] == [("a", 0, 10), ("b", 0, 10)]
    assert ("e", 15, 45) in holders(found)
    assert found.state == "finished"
    ran = [
        one.facts["ran_seconds"] for one in found.timeline if isinstance(one, Happened) and "ran_seconds" in one.facts
    ]
    assert ran == [5, 10]


def test_waits_at_a_site_name_holders_of_other_agents() -> None:
    driven = Driven(pool=1)
    driven.trigger("x", "X", worker=True)
    driven.trigger("y", "Y", environment_id="e", folder="/a")
    driven.trigger("w", "A", worker=True, environment_id="e", folder="/a/b")
    driven.advance(10)
    driven.finish("y", "Y")
    driven.advance(7)
    driven.finish("x", "X")
    found = life_of(driven, "w")
    assert waited(found) == [("agent_environment_folder_busy", 10), ("site_workers_busy", 17)]
    named = [(held.holder.agent_id, held.holder.trigger_id) for one in found.timeline if isinstance(one, Waited)
             for held in one.holders]  # fmt: skip
    assert named == [("Y", "y"), ("X", "x")], "both are in the way at the same time"
    assert found.state == "running"
    assert ("granted", "site default") in happened(found)


def test_people_timers_and_gates_are_named_as_who_acted() -> None:
    driven = Driven()
    driven.trigger("t", approval_required=True, site="default", worker=True, organization_id="o")
    driven.advance(3)
    driven.site_control("gate", scope="organization", name="o", enabled=False)
    driven.control("approve", trigger_id="t", requested_by="boss")
    driven.advance(4)
    driven.site_control("gate", scope="organization", name="o", enabled=True)
    driven.advance(3600 * 2)
    found = life_of(driven, "t")
    assert ("approved", "boss") in happened(found)
    assert ("lease_expired", "timer (lease)") in happened(found)
    assert waited(found)[0] == ("approval_required", 3)
    assert ("organization_disabled", 4) in waited(found)


def test_refusals_repeats_and_stops_are_in_it() -> None:
    driven = Driven(default_limit=1)
    driven.trigger("holder")
    driven.trigger("asks", interactive=True, on_busy="ask", requested_by="ann")
    driven.trigger("asks", interactive=True, on_busy="ask", requested_by="ann")
    found = life_of(driven, "asks")
    assert happened(found) == [("refused", "ann"), ("repeated", "ann")]
    assert found.state == "refused"
    refusal = found.timeline[0]
    assert isinstance(refusal, Happened)
    assert refusal.facts["code"] == "agent_parallelism_limit_reached"
    assert refusal.facts["holders"] == ("holder",)
    driven.trigger("t")
    driven.stop("t", requested_by="bob")
    driven.stop("t", requested_by="bob")
    stopped = life_of(driven, "t")
    assert happened(stopped)[-2:] == [("stopped", "bob"), ("stop_ignored", "bob")]
    assert stopped.state == "stopped"
    assert explain(log_of(driven), "A", "nobody") is None


def waits_behind_a() -> Explained:
    """The life of b, which still waits when the log ends, 20 s later."""
    driven = Driven(default_limit=1)
    driven.trigger("a")
    driven.trigger("b")
    driven.advance(20)
    driven.trigger("c")
    return life_of(driven, "b")


def test_a_trigger_that_waits_still_waits_up_to_the_end_of_the_log() -> None:
    found = waits_behind_a()
    assert found.state == "waiting"
    assert waited(found) == [("agent_parallelism_limit_reached", 20)]
    assert [one.to_at for one in found.timeline if isinstance(one, Waited)] == [None]


def test_a_holder_is_shown_as_it_was_last() -> None:
    """Who stands before it waits, runs, pauses: an attempt has another id each time."""
    driven = Driven(default_limit=1)
    driven.trigger("other")
    driven.trigger("head", conversation_id="c")
    driven.trigger("behind", conversation_id="c")

    def head() -> Holder:
        (busy,) = [
            one
            for one in life_of(driven, "behind").timeline
            if isinstance(one, Waited) and one.reason == "conversation_busy"
        ]
        (held,) = busy.holders
        assert (held.from_at, held.to_at) == (T0, None)
        return held.holder

    assert (head().state, head().execution_id) == ("waiting", None)
    driven.advance(5)
    driven.finish("other")
    execution_id = driven.dispatch("head")["execution_id"]
    assert (head().state, head().execution_id) == ("running", execution_id)
    driven.advance(5)
    driven.status("head", "paused")
    assert head().state == "paused"


def passes(gap_seconds: float, times: int = 20, seconds: float = 5) -> Driven:
    """A worker that goes from one to the next so many times, and is free in between; "t" may not use it meanwhile."""
    driven = Driven(pool=1)
    driven.configure("B", parallelism_limit="unlimited")
    driven.site_control("gate", scope="organization", name="o", enabled=False)
    driven.trigger("t", worker=True, organization_id="o")
    for number in range(times):
        driven.trigger(f"b{number}", "B", worker=True)
        driven.advance(seconds)
        driven.finish(f"b{number}", "B")
        driven.advance(gap_seconds)
    return driven


def test_stretches_that_are_little_apart_are_one_row_and_only_the_time_it_held_counts() -> None:
    found = life_of(passes(0.0004), "t")
    gate, workers = (one for one in found.timeline if isinstance(one, Waited))
    assert (gate.reason, gate.stretches, gate.between_seconds) == ("organization_disabled", 1, 0)
    assert (workers.reason, workers.stretches) == ("site_workers_busy", 20)
    assert workers.between_seconds == pytest.approx(19 * 0.0004)
    assert workers.seconds(found.at) == pytest.approx(100)
    assert [held.holder.trigger_id for held in workers.holders] == [f"b{number}" for number in range(20)]
    apart = life_of(passes(2), "t")
    assert [one.stretches for one in apart.timeline if isinstance(one, Waited)] == [1] * 21
    for one in (found, apart):
        assert [(total.reason, total.name) for total in one.in_all] == [
            ("organization_disabled", "o"), ("site_workers_busy", None),
        ]  # fmt: skip
        assert one.in_all[1].seconds == pytest.approx(100)


def test_short_stretches_are_one_row_however_far_apart() -> None:
    found = life_of(passes(5, seconds=0.0004), "t")
    rows = [one for one in found.timeline if isinstance(one, Waited) and one.reason == "site_workers_busy"]
    assert [one.stretches for one in rows] == [20]
    assert rows[0].seconds(found.at) == pytest.approx(20 * 0.0004)


def test_an_attempt_parts_the_waits_before_and_after_it_however_short_it_was() -> None:
    driven = Driven(default_limit=1)
    driven.trigger("a")
    driven.trigger("t", conversation_id="c")
    driven.advance(10)
    driven.finish("a")
    driven.trigger("b")
    driven.advance(0.0004)
    driven.fail("t")
    driven.advance(10)
    driven.finish("b")
    rows = [one for one in life_of(driven, "t").timeline if isinstance(one, Waited)]
    full = [one for one in rows if one.reason == "agent_parallelism_limit_reached"]
    assert [one.stretches for one in full] == [1, 1]
    begun = next(
        one.at for one in life_of(driven, "t").timeline if isinstance(one, Happened) and one.what == "dispatched"
    )
    assert full[0].to_at == begun


def test_what_still_waits_waits_until_the_last_decision_and_is_said_so() -> None:
    found = waits_behind_a()
    (row,) = (one for one in found.timeline if isinstance(one, Waited))
    assert _waited(row, found.at) == (
        "  waited 20.000 s until the last decision in the log, 2026-03-01T10:00:20.000000Z: "
        "agent_parallelism_limit_reached\n    held by a of A from 2026-03-01T10:00:00.000000Z"
    )


@pytest.mark.parametrize("number", range(2))
def test_what_is_told_together_adds_up_to_what_held(number: int, seed: int) -> None:
    """Of any life in a day: the time of each cause is that of looking at it after every decision."""
    log = list(log_of(Office(seed * 10 + number).work(80, 300).driven))
    for agent_id, trigger_id in sorted({(one.decider.id, one.decision.command.id) for one in log
                                        if isinstance(one.decision.command, Trigger)})[::9]:  # fmt: skip
        found = explain(log, agent_id, trigger_id)
        assert found is not None
        past, plainly = Past(), Counter[tuple[str, str | None]]()
        for logged in log:
            row = past.agent(agent_id).triggers.get(trigger_id)
            if row is not None and row.state == "waiting":
                begin, end = past.at, logged.decision.at
                own_time = min(max(row.available_at, begin), end)
                for start, stop in ((begin, own_time), (own_time, end)):
                    for cause in causes(past.facts(past.agent(agent_id)), row, start) if stop > start else ():
                        plainly[cause.reason, cause.name] += stop - start
            past.fold(logged)
        assert {(one.reason, one.name): round(one.seconds * SECOND) for one in found.in_all} == dict(plainly)


@pytest.mark.parametrize("number", range(2))
def test_waits_of_every_life_lie_between_its_reception_and_its_end(number: int, seed: int) -> None:
    """Whatever happened in a day: a wait is over before its trigger runs, and holders hold only inside of it."""
    driven = Office(seed * 10 + number).work(80, 300).driven
    log = list(log_of(driven))
    for agent_id, trigger_id in sorted({(d["agent_id"], d["trigger_id"]) for d in driven.dispatches})[::6]:
        found = explain(log, agent_id, trigger_id)
        assert found is not None
        begun = [one.at for one in found.timeline if isinstance(one, Happened) and one.what == "dispatched"]
        assert begun
        for one in found.timeline:
            if isinstance(one, Waited):
                assert not any(one.from_at < at < (one.to_at or found.at) for at in begun), "nobody runs who waits"
                assert one.to_at is None or one.from_at < one.to_at
                for held in one.holders:
                    assert held.from_at >= one.from_at
                    assert (held.to_at is None) <= (one.to_at is None)


# Two triggers


def precedence(driven: Driven, one: str, other: str, other_agent: str = "A") -> Precedence:
    comparison = Comparison(TriggerId("A", one), TriggerId(other_agent, other))
    for logged in log_of(driven):
        comparison.take(logged)
    found = comparison.precedence()
    assert found is not None
    return found


def full() -> Driven:
    driven = Driven(default_limit=1)
    driven.trigger("holder")
    driven.advance(1)
    return driven


def test_the_older_starts_first_and_the_rule_says_which_part_of_the_key_it_was() -> None:
    driven = full()
    driven.trigger("a")
    driven.advance(1)
    driven.trigger("b")
    driven.trigger("c")
    driven.trigger("d", created_at=at_seconds(2.5), available_at=at_seconds(2))
    for id in ("holder", "a", "b", "c"):
        driven.finish(id)
    for pair, rule in (
        (("b", "a"), "older_available_at"),
        (("b", "c"), "smaller_id"),
        (("d", "c"), "older_created_at"),
    ):
        found = precedence(driven, *pair)
        assert found.rule == rule
        assert found.first.trigger_id == min(pair)


def test_what_let_a_younger_one_by_is_named() -> None:
    driven = full()
    driven.trigger("future", available_at=at_seconds(50))
    driven.trigger("gated", approval_required=True)
    driven.trigger("behind", conversation_id="c-holder")
    driven.advance(5)
    driven.trigger("young")
    driven.advance(1)
    driven.trigger("forced", interactive=True, on_busy="force")
    driven.control("pause")
    driven.control("resume")
    gated, forced = precedence(driven, "young", "gated"), precedence(driven, "forced", "young")
    driven.finish("forced")
    driven.stop("behind")
    driven.finish("holder")
    assert (gated.rule, gated.first.trigger_id) == ("neither_started", "gated")
    assert [cause.reason for cause in gated.causes] == ["agent_parallelism_limit_reached"]
    assert (forced.rule, forced.first.trigger_id) == ("forced", "forced")
    expected = {
        "future": ("older_available_at", ["not_yet_available"]),
        "gated": ("other_could_not_start", ["approval_required"]),
        "behind": ("other_had_ended", []),
    }
    for other, (rule, reasons) in expected.items():
        found = precedence(driven, "young", other)
        assert (found.rule, found.first.trigger_id, [cause.reason for cause in found.causes]) == (
            rule,
            "young",
            reasons,
        )


def test_between_agents_the_site_decides() -> None:
    driven = Driven(pool=2)
    driven.trigger("x", "X", environment_id="e", folder="/a")
    driven.advance(1)
    driven.trigger("wide", environment_id="e")
    driven.advance(1)
    driven.trigger("small", "B", environment_id="e", folder="/b")
    found = precedence(driven, "wide", "small", "B")
    assert (found.rule, found.first) == ("other_could_not_start", TriggerId("B", "small"))
    assert [(cause.reason, [one.trigger_id for one in cause.holders]) for cause in found.causes] == [
        ("agent_environment_folder_busy", ["x"])
    ]
