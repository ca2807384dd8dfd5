"""``berth verify`` of agents: each kind of damage to a log that the real deciders wrote is found, where it is."""

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from streams.audit.verify import Head, Verifier, Violation
from tests.driving import Driven, Json, at_seconds

PERSON: Json = {"interactive": True, "kind": "chat"}
Damage = Callable[[list[Json]], object]


def check(decisions: list[Json], chained: bool = True, heads: dict[str, Head] | None = None) -> Violation | None:
    """The first violation; ``chained``: with the digests that the damaged decisions have."""
    verifier = Verifier(heads)
    prev = None
    for offset, decision in enumerate(decisions):
        if chained:
            decision["prev"] = prev
        value = json.dumps(decision, separators=(",", ":"), ensure_ascii=False).encode()
        prev = hashlib.sha256(value).hexdigest()
        violation = verifier.check(value, offset)
        if violation is not None:
            return violation
    return verifier.finish()


def log_of(driven: Driven) -> list[Json]:
    return [json.loads(value) for value in driven.values]


def start(
    decisions: list[Json], offset: int, trigger_id: str, slot: int, attempt: int = 1, forced: bool = False
) -> None:
    """Let a decision dispatch a trigger."""
    happened = decisions[offset].setdefault("events", [])
    execution_id = f"kwnovuec-{decisions[offset]['seq']}-{len(happened)}"
    happened.append(
        {
            "type": "dispatched",
            "trigger_id": trigger_id,
            "execution_id": execution_id,
            "attempt": attempt,
            "slot_number": slot,
            "forced": forced,
            "lease_until": at_seconds(2100),
        }
    )


def event(decisions: list[Json], offset: int, kind: str) -> Json:
    found: Json = next(e for e in decisions[offset]["events"] if e["type"] == kind)
    return found


def drop(decisions: list[Json], offset: int, *kinds: str) -> None:
    decisions[offset]["events"] = [e for e in decisions[offset]["events"] if e["type"] not in kinds]


# The logs


def plain() -> Driven:
    """0: t1 runs, 1: t2 waits, 2: t3 waits, 3: t1 ends and t2 runs, 4: t2 ends and t3 runs."""
    driven = Driven()
    for number in (1, 2, 3):
        driven.trigger(f"t{number}")
    driven.finish("t1")
    driven.finish("t2")
    return driven


def one_conversation() -> Driven:
    """0: unlimited, t1 runs, 1: t2 waits behind it."""
    driven = Driven("unlimited")
    driven.trigger("t1", conversation_id="c")
    driven.trigger("t2", conversation_id="c")
    return driven


def held_back(**settings: Any) -> Driven:
    """0: t1 runs, 1: paused or with other settings, 2: t2 waits."""
    driven = Driven(2)
    driven.configure(run_budget=1)
    driven.trigger("t1")
    if settings:
        driven.configure(**settings)
    else:
        driven.control("pause")
    driven.trigger("t2")
    return driven


def asking() -> Driven:
    """0: t1 asks its site, 1: t2 waits for its slot, 2: t1 is granted and runs."""
    driven = Driven(delivers=False)
    driven.trigger("t1", worker=True)
    driven.advance(1)
    driven.trigger("t2")
    driven.delivers = True
    driven.deliver()
    driven.site_control("gate", scope="organization", name="o", enabled=True)
    assert driven.running() == ["t1"]
    return driven


def forcing() -> Driven:
    """0: t1 runs, 1: f1 is forced, 2: f2 asks its site, and may be forced no more."""
    driven = Driven(delivers=False)
    driven.trigger("t1")
    driven.trigger("f2", worker=True, **PERSON, on_busy="force")
    driven.trigger("f1", **PERSON, on_busy="force")
    return driven


def too_late(ask: bool) -> Driven:
    """The last decision finds that the time of t2 is over."""
    driven = Driven(delivers=False)
    if ask:
        driven.trigger("t2", worker=True, **PERSON, on_busy="ask", decide_before=at_seconds(5))
        driven.deliver()
        driven.skip(6)
        driven.deliver()
    else:
        driven.trigger("t1")
        driven.trigger("t2", expires_at=at_seconds(5))
        driven.skip(6)
        driven.finish("t1")
    return driven


def blocked() -> Driven:
    """0: t1 lacks an approval."""
    driven = Driven()
    driven.trigger("t1", approval_required=True)
    return driven


def place_blocked(decisions: list[Json]) -> None:
    decisions[0]["events"].append({"type": "placed", "trigger_id": "t1", "place": [1, 1]})


def start_late(decisions: list[Json]) -> None:
    drop(decisions, -1, "expired", "returned", "refused")
    start(decisions, -1, "t2", 1)


def start_without_claim(decisions: list[Json]) -> None:
    drop(decisions, 0, "claimed")
    start(decisions, 0, "t1", 1)


def grant_by_nobody(decisions: list[Json]) -> None:
    decisions[0]["events"].append({"type": "granted", "trigger_id": "t1", "n": 1})


def another_first(decisions: list[Json]) -> None:
    event(decisions, 3, "dispatched").update(trigger_id="t3")


def rename(decisions: list[Json], kind: str, execution_id: str) -> None:
    event(decisions, 3, kind).update(execution_id=execution_id)


def later_available(decisions: list[Json]) -> None:
    event(decisions, 0, "accepted").update(available_at=at_seconds(60))


DAMAGES: dict[str, tuple[Callable[[], Driven], Damage, str, int]] = {
    "one more than the limit": (plain, lambda log: start(log, 1, "t2", 2), "I1", 1),
    "forced within the limit": (plain, lambda log: event(log, 0, "dispatched").update(forced=True), "B4", 0),
    "over the limit and not forced": (forcing, lambda log: event(log, 2, "dispatched").update(forced=False), "I1", 2),
    "forced although it only queues": (forcing, lambda log: log[2]["command"].update(on_busy="queue"), "B4", 2),
    "more are forced than the limit": (forcing, lambda log: start(log, 2, "f2", 3, forced=True), "B4", 2),
    "an attempt under another name": (plain, lambda log: rename(log, "dispatched", "kwnovuec-4-2"), "I5", 3),
    "an attempt ends twice": (plain, lambda log: log[4]["events"].insert(1, log[4]["events"][0]), "I5", 4),
    "an attempt ends that never was": (plain, lambda log: rename(log, "finished", "kwnovuec-1-9"), "I5", 3),
    "a place given twice": (plain, lambda log: log[1]["events"].append(log[1]["events"][-1]), "I4", 1),
    "an attempt of a trigger that doesn't live": (plain, lambda log: start(log, 4, "t1", 1), "I4", 4),
    "a place for who lacks an approval": (blocked, place_blocked, "I4", 0),
    "not the lowest slot": (plain, lambda log: event(log, 0, "dispatched").update(slot_number=2), "I4", 0),
    "the younger first": (plain, another_first, "I6", 3),
    "before it is available": (plain, later_available, "I6", 0),
    "into a reserved slot": (asking, lambda log: start(log, 1, "t2", 1), "I6", 1),
    "nobody starts beside room": (plain, lambda log: drop(log, 3, "dispatched"), "I7", 3),
    "the second of a conversation": (one_conversation, lambda log: start(log, 1, "t2", 2), "B6", 1),
    "of a paused agent": (held_back, lambda log: start(log, 3, "t2", 2), "E1", 3),
    "without a budget": (lambda: held_back(owner="u"), lambda log: start(log, 3, "t2", 2), "E4", 3),
    "after its time": (lambda: too_late(False), start_late, "E5", 2),
    "after the deadline of who asked": (lambda: too_late(True), start_late, "B5", 1),
    "without its claim": (asking, start_without_claim, "D3", 0),
    "granted by nobody": (asking, grant_by_nobody, "D3", 0),
    "one is left out": (plain, lambda log: log.pop(1), "seq", 1),
    "one is there twice": (plain, lambda log: log.insert(1, dict(log[1])), "seq", 2),
    "unreadable": (plain, lambda log: log[1].update(seq="x"), "unreadable", 1),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_an_agents_log_is_found_where_it_is(damage: str) -> None:
    """I1, I4-I7, B4-B6, D3, E1, E4, E5 and the chain."""
    made, change, kind, offset = DAMAGES[damage]
    decisions = log_of(made())
    assert check(decisions, chained=False) is None, "the log as it was written is sound"
    change(decisions)
    violation = check(decisions)
    assert violation is not None
    assert (violation.kind, violation.offset) == (kind, offset), violation
    if kind != "unreadable":
        assert (violation.decider, violation.seq) == ("A", decisions[offset]["seq"])


def test_a_changed_decision_is_found_where_it_is_by_the_chain_of_the_next_one() -> None:
    decisions = log_of(plain())
    decisions[1]["via"] = "http"
    violation = check(decisions, chained=False)
    assert violation is not None
    assert (violation.kind, violation.offset, violation.decider, violation.seq) == ("chain", 1, "A", 2)


def test_a_changed_last_decision_is_another_than_the_stored_head() -> None:
    driven = plain()
    row = driven.agent().row
    decisions = log_of(driven)
    decisions[4]["via"] = "http"
    violation = check(decisions, chained=False, heads={"A": Head(row.seq, row.prev)})
    assert violation is not None
    assert (violation.kind, violation.offset) == ("head", 4)


@pytest.mark.parametrize("cut", [1, 5])
def test_a_tail_that_was_cut_off_is_missed(cut: int) -> None:
    """Also a whole agent."""
    driven = plain()
    row = driven.agent().row
    violation = check(log_of(driven)[:-cut], chained=False, heads={"A": Head(row.seq, row.prev)})
    assert violation is not None
    assert (violation.kind, violation.offset, violation.seq) == ("tail", None, 5 - cut)


def test_an_agents_violation_says_nothing_of_other_agents() -> None:
    """Decisions of several agents lie on one partition: the offset is that of the partition, the number the agent's."""
    driven = Driven()
    driven.trigger("b1", "B")
    driven.trigger("t1")
    driven.trigger("b2", "B")
    driven.trigger("t2")
    decisions = log_of(driven)
    start(decisions, 3, "t2", 2)
    verifier = Verifier()
    prevs: dict[str, str | None] = {}
    found = []
    for offset, decision in enumerate(decisions):
        decision["prev"] = prevs.get(decision["agent_id"])
        value = json.dumps(decision, separators=(",", ":")).encode()
        prevs[decision["agent_id"]] = hashlib.sha256(value).hexdigest()
        found.append(verifier.check(value, offset))
    assert found[:3] == [None] * 3
    assert found[3] is not None
    assert (found[3].kind, found[3].offset, found[3].decider, found[3].seq) == ("I1", 3, "A", 2)
