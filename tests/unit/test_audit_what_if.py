"""Recorded traffic again: unchanged it comes out as it was; changed it obeys, and says what it can't know."""

from typing import Any

import pytest

from streams.audit.logged import Logged
from streams.audit.simulate import Change, Durations, Run, Simulation
from streams.audit.traffic import Traffic, recorded
from streams.audit.what_if import WhatIf, what_if
from streams.rules import events
from streams.rules.messages import Trigger
from streams.rules.order import SECOND
from streams.rules.site.rows import GateScope
from tests.audits import log_of
from tests.driving import T0, Driven, at_seconds
from tests.offices import Office

MINUTE = 60 * SECOND


def traffic_of(log: list[Logged], since: int = 0, until: int | None = None) -> Traffic:
    return recorded(log, since, log[-1].decision.at if until is None else until)


def asked(driven: Driven, change: Change, since: int = 0) -> WhatIf:
    return what_if(traffic_of(list(log_of(driven)), since), change)


def run(traffic: Traffic, change: Change) -> Run:
    return Simulation(traffic, change, Durations(traffic.attempts.items())).go()


@pytest.mark.parametrize("simple", [True, False], ids=["simple", "everything"])
@pytest.mark.parametrize("number", range(3))
def test_unchanged_traffic_comes_out_as_it_was(simple: bool, number: int, seed: int) -> None:
    """Also from the middle of the day, with what was running, asked, paused and under way then."""
    log = list(log_of(Office(seed * 100 + number, simple).work(150, 600).driven))
    for since, until in ((0, None), (T0 + 4 * MINUTE, T0 + 8 * MINUTE), (T0 + 5 * MINUTE, None)):
        traffic = traffic_of(log, since, until)
        again = run(traffic, Change())
        assert again.waits == traffic.waits
        assert len(again.waits) > 20


def test_the_same_traffic_gives_the_same_answer(seed: int) -> None:
    log = list(log_of(Office(seed + 50).work(100, 300).driven))
    change = Change({"*": 3}, {"default": 5})
    assert what_if(traffic_of(log), change) == what_if(traffic_of(log), change)


def test_more_slots_let_its_agent_wait_less_and_nobody_longer(seed: int) -> None:
    office = Office(seed + 7, simple=True, limit=1).work(200, 600)
    found = asked(office.driven, Change({"ann": 4}))
    effects = {effect.name: effect for effect in found.agents}
    ann = effects.pop("ann")
    assert found.agents[0] == ann, "who is changed most comes first"
    assert ann.after.mean < ann.before.mean
    assert ann.gained > ann.lost == 0
    assert ann.utilisation_before is not None and ann.utilisation_after is not None
    assert ann.utilisation_after < ann.utilisation_before <= 1
    assert all(effect.before == effect.after and effect.gained == effect.lost == 0 for effect in effects.values())
    assert {effect.name for effect in found.organizations} == {"red", "blue"}
    assert found.total.gained == ann.gained


def test_without_limits_nobody_waits_whatever_the_log_configured(seed: int) -> None:
    office = Office(seed + 8, simple=True, limit=1)
    office.work(50, 100)
    office.driven.configure("bob", parallelism_limit=1)
    office.work(50, 100)
    found = asked(office.driven, Change({"*": "unlimited"}))
    assert found.total.before.max > 0
    assert found.total.after.max == 0
    assert found.total.after.not_started == 0


def test_a_lower_limit_holds_for_those_that_run_already() -> None:
    """A3: nothing is stopped, nothing starts before there is room."""
    driven = Driven(default_limit=3)
    for number in range(5):
        driven.trigger(f"t{number}")
    driven.advance(100)
    for number in range(5):
        driven.finish(f"t{number}")
        driven.advance(10)
    traffic = traffic_of(list(log_of(driven)), T0 + 50 * SECOND)
    before, after = run(traffic, Change()), run(traffic, Change({"A": 1}))
    assert before.waits["A", "t3"].started_at == T0 + 100 * SECOND
    assert after.waits["A", "t3"].started_at == T0 + 120 * SECOND
    assert after.busy["A"] <= before.busy["A"]


def at_site(driven: Driven, *ids: str, **fields: Any) -> None:
    for id in ids:
        driven.trigger(id, f"agent-{id}", worker=True, **fields)


def test_pools_change_who_has_a_worker() -> None:
    driven = Driven(pool=1)
    at_site(driven, "a", "b", "c")
    for id in ("a", "b", "c"):
        driven.advance(10)
        driven.finish(id, f"agent-{id}")
    found = asked(driven, Change({}, {"default": 3}))
    assert (found.total.before.max, found.total.after.max) == (20, 0)
    (site,) = found.sites
    assert (site.capacity_before, site.capacity_after, site.utilisation_before) == (1, 3, 1)
    closed = asked(driven, Change({}, {"default": 0}))
    assert closed.total.after.not_started == 3
    assert closed.total.after.max == 30, "who never starts has waited to the end"


def test_gates_are_as_the_change_says_whatever_the_log_did() -> None:
    driven = Driven()
    driven.site_control("gate", scope="organization", name="o", enabled=False)
    driven.advance(1)
    at_site(driven, "a", organization_id="o")
    at_site(driven, "b", organization_id="p")
    driven.advance(60)
    driven.site_control("gate", scope="organization", name="o", enabled=True)
    driven.advance(10)
    driven.finish("a", "agent-a")
    driven.finish("b", "agent-b")
    opened = asked(driven, Change(gates={("default", "organization", "o"): True}))
    assert (opened.total.before.max, opened.total.after.max) == (60, 0)
    closed = asked(driven, Change(gates={("default", "organization", "p"): False}))
    assert [effect.after.not_started for effect in closed.organizations if effect.name == "p"] == [1]
    later = asked(driven, Change(gates={("default", "organization", "o"): False}), T0 + 30 * SECOND)
    assert [effect.after.not_started for effect in later.organizations if effect.name == "o"] == [1]


def test_what_answered_something_moves_with_it() -> None:
    """A reply comes as long after the question as it did, a child as long after the start of its parent."""
    driven = Driven(default_limit=1)
    driven.trigger("first")
    driven.trigger("asks", conversation_id="c", interactive=True, on_busy="queue")
    driven.advance(100)
    driven.finish("first")
    driven.advance(10)
    driven.trigger("child", parent={"agent_id": "A", "trigger_id": "asks"}, available_at=at_seconds(111))
    driven.status("asks", "paused")
    driven.advance(20)
    driven.trigger("reply", conversation_id="c", interactive=True, on_busy="queue")
    driven.advance(5)
    driven.finish("child")
    driven.advance(5)
    driven.finish("reply")
    traffic = traffic_of(list(log_of(driven)))
    again = run(traffic, Change({"A": 3}))
    assert again.waits["A", "asks"].started_at == T0
    assert again.waits["A", "child"].from_at == T0 + 11 * SECOND
    assert again.waits["A", "reply"].started_at == T0 + 30 * SECOND
    assert ("commands answered", 2) in {
        (" ".join(unknown.what.split()[:2]), unknown.count) for unknown in what_if(traffic, Change({"A": 2})).unknown
    }


def test_stops_and_lost_attempts_come_again() -> None:
    driven = Driven(default_limit=1)
    driven.trigger("a lost", timeout_seconds=60, max_attempts=1)
    driven.trigger("b stopped")
    driven.trigger("c last")
    driven.advance(400)
    driven.stop("b stopped")
    driven.advance(3)
    driven.status("b stopped", "stopped")
    driven.advance(5)
    driven.finish("c last")
    traffic = traffic_of(list(log_of(driven)))
    assert run(traffic, Change()).waits == traffic.waits
    again = run(traffic, Change({"A": 2}))
    assert again.waits["A", "b stopped"].started_at == T0
    assert again.waits["A", "c last"].started_at == T0 + 43 * SECOND, "b is known to have lasted that long, no longer"
    assert again.cut_short == 1


def test_changes_that_can_do_nothing_are_named() -> None:
    driven = Driven()
    driven.configure(serial=True)
    driven.trigger("t1")
    driven.trigger("t2")
    driven.advance(5)
    driven.finish("t1")
    driven.finish("t2")
    found = asked(driven, Change({"A": 3, "nobody": 2}, {"nowhere": 2}))
    assert len(found.without_effect) == 3
    assert "serial" in found.without_effect[0]
    assert found.total.before == found.total.after


def test_a_gate_that_nothing_had_to_pass_is_named() -> None:
    driven = Driven()
    driven.trigger("without site", organization_id="free")
    at_site(driven, "runs", organization_id="runs")
    driven.advance(5)
    driven.finish("without site")
    at_site(driven, "a", organization_id="o", department_id="d")
    driven.trigger("asks", "agent-asks", interactive=True, on_busy="ask", worker=True, organization_id="asks")
    driven.advance(5)
    at_work: list[tuple[GateScope, str]] = [
        ("organization", "runs"),
        ("organization", "o"),
        ("department", "d"),
        ("organization", "asks"),
    ]
    idle: list[tuple[GateScope, str]] = [("organization", "nobody"), ("organization", "free"), ("department", "o")]
    gates = {("default", scope, name): False for scope, name in [*at_work, *idle]}
    found = asked(driven, Change(gates=gates), T0 + 2 * SECOND)
    assert found.without_effect == tuple(
        f"the gate of {scope} {name} at default: nothing of it needed that site in that time"
        for scope, name in sorted(idle)
    )


def refused_of(driven: Driven) -> set[tuple[str, str]]:
    """By what the log itself says."""
    return {
        (decision.agent_id, id)
        for decision in driven.decisions
        for id in (
            *([decision.command.id] if decision.refusal and isinstance(decision.command, Trigger) else []),
            *(event.trigger_id for event in decision.events if isinstance(event, events.RefusedLater)),
        )
    }


def test_only_what_a_decision_refuses_counts_as_refused() -> None:
    """Not who was over when it came, is known already, or has ended since; also who was refused after it had waited."""
    driven = Driven(default_limit=1, pool=1)
    driven.trigger("runs", "B", worker=True)
    driven.trigger("t0")
    driven.advance(5)
    driven.trigger("over", expires_at=at_seconds(1))
    driven.finish("t0")
    driven.trigger("t0")
    assert run(traffic_of(list(log_of(driven))), Change()).refused == set()
    driven.trigger("t1")
    driven.trigger("at once", interactive=True, on_busy="ask")
    driven.trigger("by its site", "C", worker=True, interactive=True, on_busy="ask", decide_before=at_seconds(60))
    assert refused_of(driven) == {("A", "at once"), ("C", "by its site")}
    assert run(traffic_of(list(log_of(driven))), Change()).refused == refused_of(driven)


@pytest.mark.parametrize("number", range(2))
def test_the_refused_are_those_of_the_log(number: int, seed: int) -> None:
    driven = Office(seed * 10 + number if number else 0).work(150, 300).driven
    refused = refused_of(driven)
    assert refused or number, "the first is the same in every run"
    assert run(traffic_of(list(log_of(driven))), Change()).refused == refused


def test_what_nobody_can_know_is_counted() -> None:
    driven = Driven(default_limit=1)
    driven.trigger("running")
    driven.advance(10)
    driven.trigger("refused", interactive=True, on_busy="ask")
    driven.trigger("never ran")
    driven.advance(10)
    found = asked(driven, Change({"A": 3}), T0 + 5 * SECOND)
    counted = {" ".join(unknown.what.split()[:4]): unknown.count for unknown in found.unknown}
    assert counted == {
        "attempts ran when it": 1,
        "attempts had not ended": 1,
        "attempts never ran, or": 2,
        "attempts were stopped from": 1,
        "requests were refused in": 1,
    }
