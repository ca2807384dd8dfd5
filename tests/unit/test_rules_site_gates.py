"""E1, E4 at a site: pause, organizations, departments, budgets; walks over thousands in bounded steps."""

import json

import pytest

from streams import SITE_CONTROLS
from streams.codec import Record
from streams.rules import events, limits, site_events
from tests.driving import Driven, Json, at_seconds

POOL: Json = {"worker": True}
PERSON: Json = {"interactive": True, "kind": "chat"}
CLOSERS: list[tuple[str, Json, Json, str]] = [
    ("pause_site", {}, {}, "site_paused"),
    ("gate", {"scope": "organization", "name": "o"}, {"organization_id": "o"}, "organization_disabled"),
    ("gate", {"scope": "department", "name": "d"}, {"department_id": "d"}, "department_disabled"),
]


def close(driven: Driven, kind: str, fields: Json) -> None:
    driven.site_control(kind, **fields, **({"enabled": False} if kind == "gate" else {}))


def open_again(driven: Driven, kind: str, fields: Json) -> None:
    driven.site_control("gate" if kind == "gate" else "resume_site", **fields, **({"enabled": True} if fields else {}))


@pytest.mark.parametrize(("kind", "fields", "carries", "reason"), CLOSERS)
def test_a_closed_gate_keeps_new_work_waiting_and_stops_nobody(
    kind: str, fields: Json, carries: Json, reason: str
) -> None:
    """E1: what runs goes on; asks are refused with the reason; others and plain chat are outside."""
    driven = Driven("unlimited")
    driven.trigger("t1", **POOL, **carries)
    close(driven, kind, fields)
    driven.trigger("t2", **POOL, **carries)
    driven.trigger("ask", "B", **POOL, **carries, **PERSON, on_busy="force")
    driven.trigger("chat", **carries)
    driven.trigger("elsewhere", **POOL, organization_id="other")
    assert driven.told("stop_requested") == []
    expected = ["t1", "chat"] if kind == "pause_site" else ["t1", "chat", "elsewhere"]
    assert driven.running() == expected
    assert driven.refused() == {"ask": reason}
    assert {e.trigger_id: e.reason for e in driven.events_of(events.ClaimWaiting)}["t2"] == reason
    driven.crash()
    open_again(driven, kind, fields)
    assert set(driven.running()) == {"t1", "t2", "chat", "elsewhere"}
    driven.check()


@pytest.mark.parametrize(("kind", "fields", "carries", "reason"), CLOSERS)
def test_a_grant_that_was_not_used_comes_back_when_the_gate_closes(
    kind: str, fields: Json, carries: Json, reason: str
) -> None:
    """Z4: held ones are recalled; those on their way start, as a running one ignores it."""
    driven = Driven(pool=1, delivers=False)
    driven.trigger("other", "B", **POOL)
    deliver_all(driven)
    driven.trigger("t1", **POOL, **carries)
    deliver_all(driven)
    driven.trigger("older", **POOL, site="far", created_at="2026-03-01T09:59:00Z")
    [far] = driven.undelivered
    driven.undelivered.clear()
    driven.finish("other", "B")
    deliver_all(driven)
    assert driven.claim_state("t1") == "held"
    close(driven, kind, fields)
    deliver_all(driven)
    assert driven.claim_state("t1") is None
    assert driven.granted() == []
    driven.undelivered.append(far)
    deliver_all(driven)
    assert driven.claim_state("t1") == "standing"
    assert driven.site().why_waiting(next(iter(driven.site().claims.values()))) == reason
    driven.check()


def deliver_all(driven: Driven) -> None:
    while driven.undelivered:
        driven.deliver()


def test_the_first_reason_in_order_is_given() -> None:
    """B3: unknown, paused, organization, department, budget, folder, workers."""
    driven = Driven(pool=0)
    place: Json = {"environment_id": "e", "organization_id": "o", "department_id": "d"}
    driven.trigger("holder", "H", environment_id="e")
    driven.site_control("pause_site")
    close(driven, "gate", {"scope": "organization", "name": "o"})
    close(driven, "gate", {"scope": "department", "name": "d"})
    driven.site_control("gate", scope="organization", name="o", run_budget=0)
    codes = []
    opened: list[tuple[str, Json]] = [
        ("configure_site", {"capacity": 0}),
        ("resume_site", {}),
        ("gate", {"scope": "organization", "name": "o", "enabled": True}),
        ("gate", {"scope": "department", "name": "d", "enabled": True}),
        ("gate", {"scope": "organization", "name": "o", "run_budget": 5}),
    ]
    for number, (kind, fields) in enumerate(opened):
        driven.site_control(kind, **fields)
        driven.trigger(f"t{number}", "A", **POOL, **place, **PERSON, on_busy="ask")
        codes.append(driven.refused()[f"t{number}"])
    driven.finish("holder", "H")
    driven.trigger("last", "A", **POOL, **place, **PERSON, on_busy="ask")
    codes.append(driven.refused()["last"])
    assert codes == [
        "site_paused", "organization_disabled", "department_disabled", "run_budget_used_up",
        "agent_environment_folder_busy", "site_workers_busy",
    ]  # fmt: skip
    driven.check()


@pytest.mark.parametrize("scope", ["organization", "department"])
def test_a_budget_is_spent_by_attempts_at_the_site(scope: str) -> None:
    """E4: reserved when granted, spent at dispatch; the rest waits until there is more. Retries cost one each."""
    driven = Driven("unlimited")
    carries = {f"{scope}_id": "x"}
    driven.trigger("t0", **POOL)
    driven.site_control("gate", scope=scope, name="x", run_budget=2)
    for number in range(1, 5):
        driven.trigger(f"t{number}", **POOL, **carries)
    assert driven.running() == ["t0", "t1", "t2"]
    driven.finish("t1")
    assert driven.running() == ["t0", "t2"]
    recalled = [e for d in driven.site_decisions for e in d.events if isinstance(e, site_events.ClaimRecalled)]
    assert recalled == [], "what used the budget up keeps what it has"
    driven.site_control("gate", scope=scope, name="x", run_budget=1)
    assert driven.running() == ["t0", "t2", "t3"]
    driven.site_control("gate", scope=scope, name="x", run_budget=None)
    assert driven.running() == ["t0", "t2", "t3", "t4"]
    driven.check()


def test_a_budget_comes_back_with_a_claim_that_never_started() -> None:
    """E4."""
    driven = Driven(pool=5, delivers=False)
    driven.trigger("x", "B", **POOL)
    deliver_all(driven)
    driven.site_control("gate", scope="organization", name="o", run_budget=1)
    driven.trigger("t1", **POOL, organization_id="o")
    driven.deliver()
    assert driven.site().gate(("organization", "o")).run_budget == 0
    driven.stop("t1")
    driven.trigger("t2", "C", **POOL, organization_id="o")
    deliver_all(driven)
    assert driven.running("C") == ["t2"]
    driven.finish("t2", "C")
    deliver_all(driven)
    assert driven.site().gate(("organization", "o")).run_budget == 0
    driven.check()


@pytest.mark.parametrize("budget", [0, 1])
def test_what_was_granted_before_a_budget_was_set_gives_nothing_back_to_it(budget: int) -> None:
    """E4: what an operator says is left is what is left."""
    driven = Driven(pool=5, delivers=False)
    driven.trigger("x", "B", **POOL)
    deliver_all(driven)
    driven.trigger("t1", **POOL, organization_id="o")
    driven.deliver()
    driven.site_control("gate", scope="organization", name="o", run_budget=budget)
    driven.stop("t1")
    deliver_all(driven)
    assert driven.site().gate(("organization", "o")).run_budget == budget
    driven.crash()
    driven.check()


def test_closing_a_gate_whose_budget_is_used_up_takes_back_what_it_granted() -> None:
    """E1: disabled binds whatever the budget was."""
    driven = Driven(pool=1, delivers=False)
    driven.trigger("hog", "B", **POOL)
    deliver_all(driven)
    driven.site_control("gate", scope="organization", name="o", run_budget=1)
    driven.trigger("t1", **POOL, organization_id="o")
    deliver_all(driven)
    driven.finish("hog", "B")
    driven.deliver()
    assert driven.granted() == ["t1"]
    close(driven, "gate", {"scope": "organization", "name": "o"})
    recalled = [
        e.trigger_id for d in driven.site_decisions for e in d.events if isinstance(e, site_events.ClaimRecalled)
    ]
    assert recalled == ["t1"]
    deliver_all(driven)
    driven.check()


def test_a_control_of_a_site_is_answered_once() -> None:
    """F8, B5: repeats, conflicts, late ones, and sites that don't exist."""
    driven = Driven()
    codes: list[str | None] = []
    controls: list[tuple[str, Json]] = [
        ("pause_site", {"id": "k0"}),
        ("configure_site", {"id": "k1", "capacity": 3}),
        ("configure_site", {"id": "k1", "capacity": 3}),
        ("configure_site", {"id": "k1", "capacity": 4}),
        ("configure_site", {"id": "k2", "capacity": 3}),
        ("pause_site", {"id": "k3", "decide_before": "2026-03-01T10:00:00Z"}),
        ("pause_site", {"id": "k3"}),
        ("pause_site", {"id": "k4"}),
    ]
    controls += [
        ("configure_site", {"id": "k5", "capacity": 7, "decide_before": "2026-03-01T10:00:04Z"}),
        ("pause_site", {"id": "k5"}),
    ]
    for kind, fields in controls:
        decision = driven.site_control(kind, "far", **fields)
        codes.append(
            decision.refusal.code if decision.refusal else decision.ignored.reason if decision.ignored else None
        )
    assert codes == [
        "site_unknown", None, "duplicate", "trigger_id_conflict", "unchanged", "request_expired", None, "unchanged",
        None, "trigger_id_conflict",
    ]  # fmt: skip
    driven.skip(5)
    late = driven.site_control("configure_site", "far", id="k5", capacity=7, decide_before="2026-03-01T10:00:04Z")
    assert late.ignored is not None, "a repeat of what was handled in time gets that answer, however late it comes"
    assert (late.ignored.reason, late.ignored.first_seq) == ("duplicate", 9)
    conflict = driven.site_control("pause_site", "far", id="k5", decide_before="2026-03-01T10:00:04Z")
    assert conflict.refusal is not None
    assert conflict.refusal.code == "request_expired", "before trigger_id_conflict (B3)"
    driven.check()


@pytest.mark.parametrize("kind", ["gate", "pause_site"])
def test_a_gate_over_thousands_of_claims_is_worked_off_in_bounded_steps(kind: str) -> None:
    """F1, [f]: parking writes no row; closed at once; opened, they start in order; nothing is granted in between."""
    driven = Driven("unlimited", verified=False, pool=0)
    driven.configure(max_backlog_depth=10_000)
    with driven.held():
        for number in range(1500):
            driven.trigger(f"t{number:04}", **POOL, organization_id="o")
    fields: Json = {"scope": "organization", "name": "o"} if kind == "gate" else {}
    transactions = driven.transactions
    close(driven, kind, fields)
    assert not driven.site().shown
    assert driven.transactions - transactions < 12
    driven.site_control("configure_site", capacity=120)
    assert driven.granted() == []
    open_again(driven, kind, fields)
    assert len(driven.site().shown) == 1380
    assert driven.running() == [f"t{number:04}" for number in range(120)]
    assert max(len(decision.events) for decision in driven.site_decisions) <= limits.STEP_CHANGES_MAX + 2
    driven.check()


def test_nothing_is_granted_before_all_that_a_gate_kept_are_seen() -> None:
    """[f], C2: the oldest is the last that the walk comes to."""
    driven = Driven("unlimited", verified=False, pool=0)
    with driven.held():
        for number in range(450):
            created = at_seconds(-number / 1000)
            driven.trigger(f"t{number:03}", **POOL, organization_id="o", created_at=created)
    close(driven, "gate", {"scope": "organization", "name": "o"})
    driven.site_control("configure_site", capacity=2)
    open_again(driven, "gate", {"scope": "organization", "name": "o"})
    assert driven.running() == ["t449", "t448"]
    driven.check()


def test_a_crash_in_the_middle_of_a_walk_goes_on_with_it() -> None:
    """F1: the cursor is a row."""
    driven = Driven("unlimited", verified=False)
    driven.configure(max_backlog_depth=10_000)
    driven.site_control("configure_site", capacity=0)
    with driven.held():
        for number in range(700):
            driven.trigger(f"t{number:04}", **POOL, organization_id="o", environment_id="e", folder=f"/{number}")
    value = {
        "type": "delete_environment",
        "v": 1,
        "id": "k",
        "site": "default",
        "requested_by": "u",
        "environment_id": "e",
    }
    topic = SITE_CONTROLS.name
    driven.partition.handle(Record(topic, 0, driven.offset(topic), b"default", json.dumps(value).encode()), driven.now)
    driven.commit()
    assert driven.site().row.todo
    driven.crash()
    assert all(claim.path is None for claim in driven.site().claims.values())
    assert len(driven.site().claims) == 700
    degraded = [sum(isinstance(e, site_events.ClaimDegraded) for e in d.events) for d in driven.site_decisions]
    assert [number for number in degraded if number] == [50] * 14
    driven.check()


@pytest.mark.parametrize(
    ("need", "reason", "holders"),
    [
        ({**POOL, "environment_id": "e", "folder": "/a"}, "agent_environment_folder_busy", ("child", "same")),
        ({**POOL, "environment_id": "f"}, "site_workers_busy", ("worker1", "same", "worker2")),
        ({"environment_id": "e", "folder": "/a/b/c"}, "agent_environment_folder_busy", ("child",)),
        ({**POOL, "organization_id": "closed"}, "organization_disabled", ()),
    ],
)
def test_the_holders_of_a_refusal_hold_what_its_code_names(need: Json, reason: str, holders: tuple[str, ...]) -> None:
    """B3: oldest first; nobody holds what is behind a gate."""
    driven = Driven(pool=3)
    close(driven, "gate", {"scope": "organization", "name": "closed"})
    holding: list[tuple[str, Json]] = [
        ("worker1", POOL),
        ("child", {"environment_id": "e", "folder": "/a/b"}),
        ("same", {**POOL, "environment_id": "e", "folder": "/a/x"}),
        ("elsewhere", {"environment_id": "e", "folder": "/ab"}),
        ("worker2", POOL),
    ]
    for number, (id, fields) in enumerate(holding):
        driven.trigger(id, f"A{number}", **fields)
        driven.advance(1)
    driven.trigger("ask", **need, **PERSON, on_busy="ask")
    [refused] = driven.events_of(events.RefusedLater)
    assert (refused.code, refused.holders, refused.holders_count) == (reason, holders, len(holders))
    driven.check()


def test_a_refusal_of_a_site_names_at_most_twenty_holders_and_their_number() -> None:
    """B3, F1."""
    driven = Driven("unlimited", pool=25)
    for number in range(25):
        driven.trigger(f"t{number:02}", **POOL)
        driven.advance(0.001)
    driven.trigger("ask", "B", **POOL, **PERSON, on_busy="ask")
    [refused] = driven.events_of(events.RefusedLater)
    assert (refused.holders, refused.holders_count) == (tuple(f"t{number:02}" for number in range(20)), 25)
    driven.check()
