"""Why a trigger waits: every cause that holds, with who holds what since when, and what would release it."""

from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any, get_args

import pytest

from api.http.waiting import Facts, causes, stored_trigger
from streams.audit.causes import Cause, GateId, Holder, PlaceId, place_of
from streams.rules.limits import CLAIM_RESERVED_SECONDS, HOLDERS_MAX
from streams.rules.order import SECOND, instant_of
from streams.rules.verdicts import WaitReason

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
CODES = {*get_args(WaitReason), "agent_archived", "site_asked"}


def ago(minutes: float) -> datetime:
    return NOW - timedelta(minutes=minutes)


def us(minutes: float) -> int:
    """The same instant, as causes have it."""
    return instant_of(ago(minutes))


def agent(**changes: Any) -> dict[str, Any]:
    return {
        "agent_id": "A",
        **dict.fromkeys(("paused", "archived"), False),
        **dict.fromkeys(("parked", "paused_at", "archived_at", "parked_at", "run_budget", "run_budget_at")),
        "max_parallel": 2,
        "running": 0,
        "asking": 0,
        "held": 0,
        **changes,
    }


def trigger(**changes: Any) -> dict[str, Any]:
    return {
        "trigger_id": "t",
        "conversation_id": "c",
        "state_since": ago(10),
        "accepted_at": ago(10),
        "available_at": ago(10),
        "created_at": ago(10),
        "attempt": 0,
        "place_rank": 0,
        "place_number": 1,
        "head_trigger_id": "t",
        "head_state": "waiting",
        "head_state_since": ago(10),
        **dict.fromkeys(("interactive", "worker", "approval_required", "failures_approved", "degraded"), False),
        **dict.fromkeys(("on_busy", "site", "environment_id", "folder", "organization_id", "department_id")),
        **dict.fromkeys(("approved_at", "head_execution_id", "claim_n", "claim_state", "claim_since")),
        **dict.fromkeys(("claim_asked_at", "claim_reason")),
        **changes,
    }


def slot(number: int, minutes: float, newest: float | None = None) -> dict[str, Any]:
    return {
        "trigger_id": f"r{number}",
        "conversation_id": f"c{number}",
        "execution_id": f"x{number}",
        "dispatched_at": ago(minutes),
        "newest_at": ago(minutes if newest is None else newest),
    }


def reservation(id: str, minutes: float, **changes: Any) -> dict[str, Any]:
    """Of a trigger that became available so long ago, which asked its site a minute ago."""
    about = {"trigger_id": id, "conversation_id": f"c-{id}", "state": "asking", "since": ago(1)}
    return {**about, "available_at": ago(minutes), "created_at": ago(minutes), **changes}


def site(**changes: Any) -> dict[str, Any]:
    usual = {"created": True, "capacity": 2, "capacity_at": ago(500), "paused": False, "paused_at": None, "workers": 0}
    return {**usual, **changes}


def gate(**changes: Any) -> dict[str, Any]:
    return {"enabled": True, **dict.fromkeys(("disabled_at", "run_budget", "run_budget_at")), **changes}


def grant(id: str, minutes: float, **changes: Any) -> dict[str, Any]:
    about = {"agent_id": "B", "trigger_id": id, "conversation_id": "b", "execution_id": f"x-{id}"}
    return {**about, "granted_at": ago(minutes), "newest_at": ago(minutes), "holders_count": 1, **changes}


def told(facts: Facts, row: dict[str, Any], now: datetime = NOW) -> list[Cause]:
    found = causes(facts, row, now)
    assert {cause.reason for cause in found} <= CODES
    assert all(cause.released_by for cause in found)
    assert all(cause.since is None or cause.since >= instant_of(row["state_since"]) for cause in found)
    assert all(cause.holders_count >= len(cause.holders) <= HOLDERS_MAX for cause in found)
    return found


def reasons(facts: Facts, row: dict[str, Any]) -> list[str]:
    return [cause.reason for cause in told(facts, row)]


# The agent


def test_nothing_in_the_way_is_no_cause() -> None:
    assert told(Facts(agent(running=1)), trigger()) == []
    assert told(Facts(agent(max_parallel=None, running=1000)), trigger()) == []
    needy = trigger(worker=True, environment_id="e", folder="/a", organization_id="o", claim_state="standing")
    open_gate = {GateId("default", "organization", "o"): gate(run_budget=1)}
    own = {("default", "t"): {"granted_at": None, "path": "/a"}}
    facts = Facts(agent(run_budget=1), sites={"default": site(workers=1)}, gates=open_gate, claims=own)
    assert told(facts, needy) == []


@pytest.mark.parametrize("chosen", list(product([False, True], repeat=8)))
def test_every_cause_of_the_agent_that_holds_is_told_in_the_order_of_the_rules(chosen: tuple[bool, ...]) -> None:
    archived, paused, parked, behind, unapproved, early, spent, full = chosen
    flags = {"archived": archived, "archived_at": ago(5), "paused": paused, "paused_at": ago(5)}
    found = reasons(
        Facts(
            agent(
                **flags,
                parked="a bug" if parked else None,
                parked_at=ago(5),
                running=2 if full else 1,
                run_budget=0 if spent else 5,
                run_budget_at=ago(5),
            )
        ),
        trigger(
            head_trigger_id="h" if behind else "t",
            place_number=None,
            approval_required=unapproved,
            available_at=NOW + timedelta(seconds=1) if early else NOW,
        ),
    )
    names = (
        *("agent_archived", "agent_paused", "agent_parked", "conversation_busy", "approval_required"),
        *("not_yet_available", "run_budget_used_up", "agent_parallelism_limit_reached"),
    )
    assert found == [name for name, holds in zip(names, chosen, strict=True) if holds]


def test_who_holds_the_slots_is_told_oldest_first_and_since_when_they_are_all_taken() -> None:
    (full,) = told(Facts(agent(running=2), [slot(2, 30, newest=3), slot(1, 3)]), trigger())
    assert full.holders == (
        Holder("A", "r2", "c2", "x2", "running", us(30)),
        Holder("A", "r1", "c1", "x1", "running", us(3)),
    )
    assert (full.holders_count, full.since) == (2, us(3))
    assert full.released_by == "the end of a running attempt, or a higher limit"


def test_a_cause_older_than_the_trigger_holds_it_up_since_the_trigger_waits() -> None:
    waits = trigger(state_since=ago(1))
    (full,) = told(Facts(agent(running=2), [slot(2, 30)]), waits)
    (paused,) = told(Facts(agent(paused=True, paused_at=ago(60))), waits)
    (later,) = told(Facts(agent(paused=True, paused_at=ago(0.5))), waits)
    assert (full.since, paused.since, later.since) == (us(1), us(1), us(0.5))


def test_holders_are_bounded_and_their_number_is_told() -> None:
    slots = [slot(number, 31 - number) for number in range(1, HOLDERS_MAX + 1)]
    (full,) = told(Facts(agent(max_parallel=10, running=30), slots), trigger())
    assert (len(full.holders), full.holders_count, full.holders[0].trigger_id) == (HOLDERS_MAX, 30, "r1")
    assert full.released_by == "the end of 21 running attempts, or a higher limit"


def test_only_an_older_claim_reserves_a_slot_before_this_trigger() -> None:
    older, younger = reservation("older", 11), reservation("younger", 9)
    (full,) = told(Facts(agent(max_parallel=1, asking=2), reservation_rows=[older, younger]), trigger())
    assert full.holders == (Holder("A", "older", "c-older", None, "asking", us(1)),)
    assert (full.reason, full.since, full.holders_count) == ("agent_parallelism_limit_reached", us(1), 1)
    assert reasons(Facts(agent(max_parallel=1, asking=1), reservation_rows=[younger]), trigger()) == []
    held = reservation("held", 11, state="held")
    assert reasons(Facts(agent(max_parallel=1, held=1), reservation_rows=[held]), trigger()) == []


@pytest.mark.parametrize("state", ["running", "paused", "waiting"])
def test_who_is_before_it_in_the_conversation_is_told(state: str) -> None:
    head = {"head_trigger_id": "h", "head_state": state, "head_execution_id": "x", "head_state_since": ago(4)}
    (busy,) = told(Facts(agent()), trigger(**head))
    assert busy.holders == (Holder("A", "h", "c", "x", state, us(4)),)
    assert busy.since == us(4)
    assert "h" in busy.released_by and state in busy.released_by


def test_a_retry_says_until_when_it_waits() -> None:
    until = NOW + timedelta(seconds=5)
    (early,) = told(Facts(agent()), trigger(attempt=1, available_at=until))
    assert early.until == instant_of(until) and "attempt" in early.released_by
    assert told(Facts(agent()), trigger(attempt=1, available_at=until), until) == []


def test_a_budget_is_used_up_for_who_has_no_claim_as_soon_as_claims_have_reserved_it() -> None:
    facts = Facts(agent(run_budget=1, run_budget_at=ago(3), asking=1), reservation_rows=[reservation("other", 11)])
    (spent,) = told(facts, trigger())
    assert (spent.reason, spent.since, spent.site) == ("run_budget_used_up", us(1), None)
    assert [holder.trigger_id for holder in spent.holders] == ["other"]
    mine = trigger(worker=True, claim_state="held")
    assert reasons(facts, mine) == []
    (spent,) = told(Facts(agent(run_budget=0, run_budget_at=ago(3), held=1)), mine)
    assert (spent.since, spent.holders) == (us(3), ())


# Dependencies


def dependency(conversation_id: str, outcome: str | None, minutes: float | None) -> dict[str, Any]:
    at = None if minutes is None else ago(minutes)
    about = {"dependency_agent_id": "B", "dependency_conversation_id": conversation_id}
    return {"trigger_id": "t", **about, "outcome": outcome, "told_at": at, "lives_since": None}


def test_what_it_depends_on_is_told_by_how_it_stands() -> None:
    rows = [
        dependency("live", None, None),
        dependency("failed", "failed", 4),
        dependency("stopped", "stopped", 6),
        dependency("unheard", "unknown", 8),
    ]
    waits = trigger(place_number=None)
    unfinished, failed, unknown = told(Facts(agent(), dependencies={"t": rows, "other": rows}), waits)
    assert (unfinished.reason, unfinished.since) == ("dependency_unfinished", us(10))
    assert unfinished.holders == (Holder("B", None, "live", None, "live", us(10)),)
    assert (failed.reason, failed.since, failed.holders_count) == ("dependency_failed", us(6), 2)
    assert [(holder.conversation_id, holder.state) for holder in failed.holders] == [
        ("failed", "failed"),
        ("stopped", "stopped"),
    ]
    assert (unknown.reason, unknown.since) == ("dependency_unknown", us(8))
    approved = trigger(place_number=None, failures_approved=True)
    assert reasons(Facts(agent(), dependencies={"t": rows}), approved) == [
        "dependency_unfinished",
        "dependency_unknown",
    ]
    assert reasons(Facts(agent(), dependencies={"t": rows}), trigger()) == [], "who has its place is past them"


def test_who_holds_it_up_by_living_does_so_since_its_oldest_trigger_was_received() -> None:
    rows = [dependency("early", None, None) | {"lives_since": ago(30)}]
    rows.append(dependency("late", None, 1) | {"lives_since": ago(5)})
    (unfinished,) = told(Facts(agent(), dependencies={"t": rows}), trigger(place_number=None))
    assert [(holder.conversation_id, holder.since) for holder in unfinished.holders] == [
        ("early", us(30)),
        ("late", us(5)),
    ]
    assert unfinished.since == us(10)


def test_a_cycle_is_shown() -> None:
    facts = Facts(agent(), dependencies={"t": [dependency("c", None, None)]}, in_cycles=frozenset("t"))
    (cycle,) = told(facts, trigger(place_number=None))
    assert cycle.reason == "dependency_unfinished" and "stopping" in cycle.released_by


# Sites


@pytest.mark.parametrize("chosen", list(product([False, True], repeat=6)))
def test_every_cause_of_the_site_that_holds_is_told_in_the_order_of_the_rules(chosen: tuple[bool, ...]) -> None:
    paused, organization, department, spent, folder, pool = chosen
    needy = trigger(
        worker=True, site="s", environment_id="e", folder="/a/b", organization_id="o", department_id="d",
        claim_state="standing", claim_reason="site_workers_busy", claim_since=ago(9),
    )  # fmt: skip
    place = PlaceId("s", "e", "/a/b")
    found = told(
        Facts(
            agent(),
            sites={"s": site(paused=paused, paused_at=ago(7), workers=2 if pool else 1)},
            gates={
                GateId("s", "organization", "o"): gate(
                    enabled=not organization, disabled_at=ago(6), run_budget=0 if spent else None, run_budget_at=ago(5)
                ),
                GateId("s", "department", "d"): gate(enabled=not department, disabled_at=ago(4), run_budget=3),
            },
            claims={("s", "t"): {"granted_at": None, "path": "/a/b"}},
            folder_rows={place: [grant("f", 3)]} if folder else {},
            worker_rows={"s": [grant("w", 2)]},
        ),
        needy,
    )
    names = (
        *("site_paused", "organization_disabled", "department_disabled", "run_budget_used_up"),
        *("agent_environment_folder_busy", "site_workers_busy"),
    )
    since = dict(zip(names, (7, 6, 4, 5, 3, 2), strict=True))
    assert [(cause.reason, cause.since) for cause in found] == [
        (name, us(since[name])) for name, holds in zip(names, chosen, strict=True) if holds
    ]
    assert {cause.site for cause in found} <= {"s"}
    where = {cause.reason: (cause.scope, cause.name) for cause in found if cause.scope is not None}
    expected = {
        "organization_disabled": ("organization", "o"),
        "department_disabled": ("department", "d"),
        "run_budget_used_up": ("organization", "o"),
    }
    assert where == {reason: value for reason, value in expected.items() if reason in {one.reason for one in found}}


def test_who_has_the_workers_is_told_and_how_many_there_are() -> None:
    rows = [grant("w1", 20, newest_at=ago(4)), grant("w2", 4, execution_id=None)]
    facts = Facts(agent(), sites={"default": site(workers=30, capacity=30)}, worker_rows={"default": rows})
    (busy,) = told(facts, trigger(worker=True))
    assert busy.holders == (
        Holder("B", "w1", "b", "x-w1", "running", us(20)),
        Holder("B", "w2", "b", None, "granted", us(4)),
    )
    assert (busy.holders_count, busy.since) == (30, us(4))
    facts = Facts(agent(), sites={"default": site(capacity=0, capacity_at=ago(2))})
    (none,) = told(facts, trigger(worker=True))
    assert (none.since, none.holders_count) == (us(2), 0) and "has no workers" in none.released_by
    assert reasons(facts, trigger(environment_id="e", folder="/")) == [], "it needs no worker"


def test_who_has_an_overlapping_folder_and_who_waits_before_it_is_told() -> None:
    place = PlaceId("default", "e", "/a")
    older = {"agent_id": "B", "trigger_id": "wide", "path": "/", "available_at": ago(11), "created_at": ago(11)}
    blocker = {**older, "blocks_since": ago(2)}
    holders = [grant("f", 20, newest_at=ago(6), holders_count=25)]
    facts = Facts(agent(), sites={"default": site()}, folder_rows={place: holders}, blocker_rows={place: [blocker]})
    (busy,) = told(facts, trigger(environment_id="e", folder="//a/"))
    assert (busy.reason, busy.since, busy.holders_count) == ("agent_environment_folder_busy", us(2), 26)
    assert [(holder.trigger_id, holder.state) for holder in busy.holders] == [("f", "running"), ("wide", "waiting")]
    facts.folder_rows = {}
    assert reasons(facts, trigger(environment_id="e", folder="/a")) == ["agent_environment_folder_busy"]
    oldest = trigger(environment_id="e", folder="/a", available_at=ago(12))
    assert reasons(facts, oldest) == [], "it waits for nobody who is younger"
    own = {**blocker, "agent_id": "A", "trigger_id": "t", "available_at": ago(10), "created_at": ago(10)}
    facts.blocker_rows = {place: [own]}
    assert reasons(facts, trigger(environment_id="e", folder="/a")) == [], "nor for itself"


def test_a_folder_that_was_deleted_is_in_nobodys_way() -> None:
    place = PlaceId("default", "e", "/a/b")
    facts = Facts(agent(), sites={"default": site()}, folder_rows={place: [grant("f", 1)]})
    waits = trigger(environment_id="e", folder="/a/b")
    for deleted in ("", "/", "/a", "/a/b"):
        facts.deletions = {PlaceId("default", "e", deleted): ago(9)}
        assert reasons(facts, waits) == []
        facts.deletions = {PlaceId("default", "e", deleted): ago(11)}
        assert reasons(facts, waits) == ["agent_environment_folder_busy"], "it was accepted after that"
    facts.deletions = {}
    facts.claims = {("default", "t"): {"granted_at": None, "path": None}}
    assert reasons(facts, {**waits, "claim_state": "standing"}) == [], "the site knows that it lost it"
    assert place_of(stored_trigger({**waits, "degraded": True})) is None


def test_a_site_that_nobody_configured_is_unknown_but_for_the_default_one() -> None:
    assert reasons(Facts(agent()), trigger(worker=True, site="s")) == ["site_unknown"]
    assert reasons(Facts(agent(), sites={"s": site(created=False)}), trigger(worker=True, site="s")) == ["site_unknown"]
    assert reasons(Facts(agent()), trigger(worker=True)) == []
    assert reasons(Facts(agent()), trigger(site="s")) == [], "it uses nothing of it"


# Claims under way


def test_a_claim_under_way_says_since_when_and_until_when_its_slot_is_reserved() -> None:
    asked = trigger(worker=True, claim_state="asking", claim_since=ago(0.1), claim_asked_at=ago(0.1))
    (cause,) = told(Facts(agent(asking=1), sites={"default": site()}), asked)
    assert (cause.reason, cause.since) == ("site_asked", us(0.1))
    assert cause.until == us(0.1) + CLAIM_RESERVED_SECONDS * SECOND


def test_a_site_that_does_not_answer_holds_up_who_asked_and_who_would_ask() -> None:
    mute = trigger(worker=True, claim_state="standing", claim_reason="site_not_answering", claim_since=ago(2))
    owed = {"trigger_id": "m", "conversation_id": "c-m", "since": ago(2)}
    facts = Facts(agent(), sites={"default": site()}, not_answering={"default": owed})
    (own,) = told(facts, mute)
    assert (own.reason, own.since, own.holders) == ("site_not_answering", us(2), ())
    (others,) = told(facts, trigger(worker=True))
    assert (others.reason, others.since) == ("site_not_answering", us(2))
    assert others.holders == (Holder("A", "m", "c-m", None, "waiting", us(2)),)
    assert reasons(facts, trigger(worker=True, site="other")) == ["site_unknown"]


def test_what_a_site_has_granted_is_no_cause_although_its_agent_has_not_heard_of_it() -> None:
    full = {"default": site(workers=2)}
    for state in ("asking", "standing"):
        waits = trigger(worker=True, claim_state=state, claim_since=ago(1), claim_asked_at=ago(1))
        granted = {("default", "t"): {"granted_at": ago(0.1), "path": None}}
        assert reasons(Facts(agent(), sites=full, claims=granted), waits) == []
    assert reasons(Facts(agent(), sites=full), trigger(worker=True, claim_state="held", claim_since=ago(1))) == []


def test_what_an_agent_was_told_is_a_cause_while_the_rows_of_the_site_are_behind() -> None:
    reason = "agent_environment_folder_busy"
    waits = trigger(environment_id="e", folder="/", claim_state="standing", claim_reason=reason, claim_since=ago(3))
    (cause,) = told(Facts(agent(), sites={"default": site()}), waits)
    assert (cause.reason, cause.since, cause.holders) == (reason, us(3), ())
    held = {PlaceId("default", "e", "/"): [grant("f", 1)]}
    (cause,) = told(Facts(agent(), sites={"default": site()}, folder_rows=held), waits)
    assert [holder.trigger_id for holder in cause.holders] == ["f"], "what the rows of the site say is said once"
    own = {("default", "t"): {"granted_at": None, "path": "/"}}
    known = Facts(agent(), sites={"default": site()}, claims=own)
    assert reasons(known, waits) == [], "they are not: it is about to go"
