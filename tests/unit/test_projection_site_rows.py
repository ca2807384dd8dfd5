"""What sites, claims, dependencies and approvals change in the rows for readers: hand-counted examples."""

import json
from dataclasses import asdict
from typing import Any

import pytest

from projections.row_types import CannotApply, SiteClaimRow, SiteGateRow
from projections.rows import Rows
from projections.store import LogRecord
from streams import SITE_DECISIONS
from streams.rules import limits
from streams.rules.order import SECOND
from streams.rules.site_events import read_site_decision
from tests.driving import T0, Driven
from tests.projected import READERS, Shelf, check_agent_rows, check_site_rows


def projected(driven: Driven) -> Rows:
    """All decisions so far, of agents and sites; what the rules hold is checked on the way."""
    shelf = Shelf()
    for offset, output in enumerate(driven.outputs):
        if output.topic in READERS:
            shelf.apply([LogRecord(output.topic, 0, offset, output.key, output.value, (), 0)])
    for agent_id, agent in driven.partition.agents.items():
        check_agent_rows(shelf.rows, agent, agent_id)
    for site in driven.partition._sites:
        check_site_rows(shelf.rows, site, site.site_id)
    return shelf.rows


def gate(driven: Driven, name: str = "o") -> SiteGateRow:
    return projected(driven).site_gates["default", "organization", name]


def claim(driven: Driven, trigger_id: str, agent_id: str = "A") -> SiteClaimRow:
    return projected(driven).site_claims["default", agent_id, trigger_id]


# Claims


def test_a_claim_by_hand_from_its_opening_to_its_end() -> None:
    driven = Driven(default_limit=3, pool=1, delivers=False)
    driven.trigger("t1", worker=True)
    rows = projected(driven)
    asked = rows.trigger_claims["A", "t1"]
    assert (asked.site, asked.n, asked.state, asked.since, asked.asked_at) == ("default", 1, "asking", T0, T0)
    assert (rows.agents["A"].asking, rows.agents["A"].standing, rows.agents["A"].held) == (1, 0, 0)
    assert not rows.site_claims
    driven.skip(2)
    driven.deliver()
    opened = claim(driven, "t1")
    assert (opened.opened_at, opened.granted_at, opened.granted_seq) == (T0 + 2 * SECOND, T0 + 2 * SECOND, 1)
    assert projected(driven).trigger_claims["A", "t1"].state == "asking", "the answer is under way"
    driven.skip(3)
    driven.deliver()
    rows = projected(driven)
    assert (rows.triggers["A", "t1"].state, rows.trigger_claims["A", "t1"].state) == ("running", "granted")
    site = rows.sites["default"]
    assert (site.created_at, site.capacity, site.waiting, site.granted, site.workers) == (T0 + 2 * SECOND, 1, 0, 1, 1)
    driven.trigger("t2", worker=True)
    driven.deliver(2)
    rows = projected(driven)
    waits = rows.trigger_claims["A", "t2"]
    assert (waits.state, waits.reason, waits.since) == ("standing", "site_workers_busy", T0 + 5 * SECOND)
    assert (rows.agents["A"].asking, rows.agents["A"].standing) == (0, 1)
    assert (rows.sites["default"].waiting, rows.sites["default"].granted) == (1, 1)
    driven.finish("t1")
    driven.deliver(2)
    rows = projected(driven)
    assert ("default", "A", "t1") not in rows.site_claims and ("A", "t1") not in rows.trigger_claims
    assert rows.trigger_claims["A", "t2"].state == "granted"


def test_a_forced_claim_reserves_no_slot() -> None:
    driven = Driven(delivers=False)
    driven.trigger("runs")
    driven.trigger("forced", interactive=True, on_busy="force", worker=True)
    rows = projected(driven)
    assert (rows.trigger_claims["A", "forced"].state, rows.trigger_claims["A", "forced"].reserves) == ("asking", False)
    assert rows.agents["A"].asking == 0
    driven.deliver(2)
    assert (projected(driven).agents["A"].forced, projected(driven).agents["A"].asking) == (1, 0)


def test_a_site_that_does_not_answer_is_noted_and_its_answer_too() -> None:
    driven = Driven(delivers=False)
    driven.trigger("t", worker=True)
    driven.advance(limits.CLAIM_RESERVED_SECONDS)
    assert projected(driven).trigger_claims["A", "t"].reason == "site_not_answering"
    driven.site_control("configure_site", capacity=0)
    driven.deliver(2)
    assert projected(driven).trigger_claims["A", "t"].reason == "site_workers_busy"


def test_late_grants_are_counted_until_the_trigger_waits_anew() -> None:
    driven = Driven(pool=1, delivers=False)
    driven.trigger("other", "B", worker=True)
    driven.deliver(2)
    driven.trigger("t", worker=True)
    driven.deliver(2)
    driven.trigger("fills")
    driven.finish("other", "B")
    driven.deliver(2)  # the release, and the grant, which comes while the agent is full
    rows = projected(driven)
    assert (rows.trigger_claims["A", "t"].state, rows.trigger_claims["A", "t"].late) == (None, 1)


# Gates and folders


def test_a_budget_is_taken_by_a_grant_and_given_back_if_nothing_started() -> None:
    driven = Driven(default_limit=5, delivers=False)
    driven.site_control("gate", scope="organization", name="o", run_budget=2)
    assert (gate(driven).run_budget, gate(driven).run_budget_at, gate(driven).enabled) == (2, T0, True)
    driven.skip(1)
    driven.trigger("started", worker=True, organization_id="o")
    driven.deliver(2)
    driven.finish("started")
    driven.deliver()
    assert (gate(driven).run_budget, gate(driven).run_budget_at) == (1, T0 + SECOND)
    driven.trigger("stopped", worker=True, organization_id="o")
    driven.deliver()  # granted; before the agent hears of it
    assert gate(driven).run_budget == 0
    driven.stop("stopped")
    driven.deliver(2)
    assert gate(driven).run_budget == 1
    driven.trigger("before", worker=True, organization_id="o")
    driven.deliver()
    driven.site_control("gate", scope="organization", name="o", run_budget=7)
    driven.stop("before")
    driven.deliver(2)
    assert gate(driven).run_budget == 7, "it was taken from the budget before"


def test_a_gate_says_since_when_it_is_closed() -> None:
    driven = Driven()
    driven.site_control("gate", scope="organization", name="o", enabled=False)
    driven.skip(5)
    driven.site_control("gate", scope="organization", name="o", enabled=False, run_budget=3)
    assert (gate(driven).enabled, gate(driven).disabled_at) == (False, T0)
    driven.site_control("gate", scope="organization", name="o", enabled=True)
    assert (gate(driven).enabled, gate(driven).disabled_at, gate(driven).run_budget) == (True, None, 3)
    driven.site_control("pause_site")
    site = projected(driven).sites["default"]
    assert (site.paused, site.paused_at) == (True, T0 + 5 * SECOND)
    driven.site_control("resume_site")
    assert projected(driven).sites["default"].paused_at is None


def test_a_recall_is_noted() -> None:
    driven = Driven(delivers=False)
    driven.trigger("t", worker=True, organization_id="o")
    driven.deliver()
    driven.site_control("gate", scope="organization", name="o", enabled=False)
    assert claim(driven, "t").recalled_at == T0


def test_who_was_passed_too_often_blocks_and_a_lost_folder_begins_anew() -> None:
    driven = Driven(default_limit="unlimited")
    for number in range(2):
        driven.trigger(f"child{number}", "B", environment_id="e", folder=f"/a/{number}")
    driven.trigger("wide", environment_id="e", folder="/a")
    for number in range(2, 2 + limits.CLAIM_PASSES_MAX):
        driven.skip(1)
        driven.trigger(f"child{number}", "B", environment_id="e", folder=f"/a/{number}")
        assert claim(driven, "wide").passed == number - 1
    assert claim(driven, "wide").blocks_since == driven.now
    driven.trigger("last", "B", environment_id="e", folder="/a/last")
    assert claim(driven, "last", "B").granted_at is None
    driven.site_control("pause_site")  # so that it stays there
    driven.site_control("delete_folder", environment_id="e", path="/a")
    wide = claim(driven, "wide")
    assert (wide.passed, wide.blocks_since, wide.path, wide.degraded) == (0, None, None, True)
    rows = projected(driven)
    assert rows.triggers["A", "wide"].degraded and not rows.triggers["B", "child0"].degraded
    assert rows.site_deletions["default", "e", "/a"].deleted_at == driven.now


# Refused later


def test_who_is_refused_later_leaves_nothing_but_decisions() -> None:
    driven = Driven(default_limit=5, pool=1)
    driven.trigger("runs", "B", worker=True)
    driven.trigger("first", conversation_id="old")
    driven.finish("first")
    before = projected(driven)
    agent = asdict(before.agents["A"])
    for conversation_id in ("new", "old"):
        driven.trigger(f"ask-{conversation_id}", conversation_id=conversation_id, interactive=True, worker=True)
    assert driven.refused() == {"ask-new": "site_workers_busy", "ask-old": "site_workers_busy"}
    rows = projected(driven)
    assert asdict(rows.agents["A"]) == agent | {"seq": rows.agents["A"].seq, "refused": 2}
    assert rows.triggers.keys() == before.triggers.keys() and rows.trigger_claims.keys() == before.trigger_claims.keys()
    assert rows.conversations == before.conversations
    assert sum(row.agent_id == "A" for row in rows.decisions) == rows.agents["A"].seq
    named = {row.seq for row in rows.decision_ids if row.id == "ask-new"}
    assert len(named) == 2, "its acceptance and its refusal"


def test_an_ask_that_was_granted_is_a_trigger_like_others() -> None:
    driven = Driven()
    driven.trigger("ask", interactive=True, worker=True)
    rows = projected(driven)
    assert (rows.triggers["A", "ask"].state, rows.agents["A"].accepted, rows.agents["A"].refused) == ("running", 1, 0)


# Dependencies, approvals, budgets


def test_dependencies_say_what_was_told_and_when_and_go_with_the_trigger() -> None:
    driven = Driven()
    driven.trigger("b1", "B", conversation_id="c")
    on = [{"agent_id": "B", "conversation_id": "c"}, {"agent_id": "B", "conversation_id": "nobody"}]
    driven.trigger("t", depends_on=[*on, on[0]])
    rows = projected(driven)
    assert rows.triggers["A", "t"].dependencies == 2
    told = [(row.dependency_conversation_id, row.outcome, row.told_at) for _, row in sorted(rows.dependencies.items())]
    assert told == [("c", None, None), ("nobody", "unknown", T0)]
    driven.skip(4)
    driven.fail("b1", "B", retryable=False)
    rows = projected(driven)
    assert (rows.dependencies["A", "t", 0].outcome, rows.dependencies["A", "t", 0].told_at) == (
        "failed",
        T0 + 4 * SECOND,
    )
    driven.control("approve", trigger_id="t", requested_by="ann")
    trigger = projected(driven).triggers["A", "t"]
    assert (trigger.approved_at, trigger.approved_by, trigger.failures_approved) == (T0 + 4 * SECOND, "ann", True)
    driven.stop("t")
    assert not projected(driven).dependencies
    assert not {row for row in projected(driven).decision_ids if row.agent_id == "B" and row.id == "t"}, "it is A's"


def test_an_approval_by_hand() -> None:
    driven = Driven()
    driven.trigger("t", approval_required=True)
    assert projected(driven).triggers["A", "t"].approval_required
    driven.control("approve", trigger_id="t", requested_by="ann")
    trigger = projected(driven).triggers["A", "t"]
    assert (trigger.state, trigger.approved_by, trigger.failures_approved) == ("running", "ann", False)


def test_a_run_budget_is_spent_by_dispatches() -> None:
    driven = Driven(default_limit=5)
    driven.configure(run_budget=2)
    assert projected(driven).agents["A"].run_budget_at == T0
    driven.skip(1)
    for id in ("t1", "t2", "t3"):
        driven.trigger(id)
    agent = projected(driven).agents["A"]
    assert (agent.run_budget, agent.run_budget_at, agent.running, agent.waiting) == (0, T0 + SECOND, 2, 1)
    driven.configure(run_budget=None)
    agent = projected(driven).agents["A"]
    assert (agent.run_budget, agent.run_budget_at, agent.running) == (None, None, 3)


# What doesn't fit


@pytest.mark.parametrize(
    ("event", "why"),
    [
        ({"type": "claim_granted", "agent_id": "A", "trigger_id": "runs", "n": 1}, "granted twice"),
        ({"type": "claim_granted", "agent_id": "A", "trigger_id": "waits", "n": 9}, "and 2 stands"),
        ({"type": "claim_granted", "agent_id": "B", "trigger_id": "waits", "n": 2}, "has no claim"),
        ({"type": "claim_closed", "agent_id": "A", "trigger_id": "gone", "n": 1, "started": True}, "has no claim"),
        ({"type": "claim_recalled", "agent_id": "A", "trigger_id": "waits", "n": 2}, "was not granted"),
        ({"type": "claim_degraded", "agent_id": "A", "trigger_id": "waits", "n": 2}, "no folder to lose"),
        ({"type": "claim_opened", "agent_id": "A", "trigger_id": "waits", "n": 3}, "isn't it"),
    ],
)
def test_an_event_of_a_site_that_does_not_fit_is_refused(event: dict[str, Any], why: str) -> None:
    driven = Driven(default_limit=5, pool=1)
    driven.trigger("runs", worker=True)
    driven.trigger("waits", worker=True)
    rows = projected(driven)
    driven.site_control("configure_site", capacity=2)
    values = [output.value or b"" for output in driven.outputs if output.topic == SITE_DECISIONS.name]
    decision = next(one for one in map(json.loads, values) if one["command"]["type"] == "configure_site")
    value = json.dumps({**decision, "events": [event]}).encode()
    with pytest.raises(CannotApply, match=why) as refused:
        rows.apply(SITE_DECISIONS.name, 0, 77, read_site_decision(value), value)
    assert (refused.value.topic, refused.value.offset) == (SITE_DECISIONS.name, 77)


@pytest.mark.parametrize(("partition", "seq", "why"), [(1, 2, "number of partitions"), (0, 4, "is at decision 1")])
def test_a_decision_of_a_site_out_of_its_order_is_refused(partition: int, seq: int, why: str) -> None:
    driven = Driven()
    driven.site_control("configure_site", capacity=3)
    rows = projected(driven)
    (decision,) = driven.site_decisions
    with pytest.raises(CannotApply, match=why):
        rows.apply(SITE_DECISIONS.name, partition, 7, decision.model_copy(update={"seq": seq}), b"{}")
