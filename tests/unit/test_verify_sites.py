"""``berth verify`` of sites: each kind of damage to the log of site decisions is found, where it is."""

import hashlib
import json
from collections.abc import Callable

import pytest

from streams import DECISIONS, SITE_DECISIONS
from streams.audit.agreement import Agreement
from streams.audit.verify import Head, Violation
from streams.audit.verify_sites import SiteVerifier
from streams.rules import events, site_events, verdicts
from tests.driving import Driven, Json

Damage = Callable[[list[Json]], object]


def log() -> list[Json]:
    """Four decisions: the claims of t1 (granted), t2 (waits for its folder), t3 (waits for a worker), and t1's end."""
    driven = Driven(pool=1)
    driven.trigger("t1", "A1", worker=True, environment_id="e", folder="/a")
    driven.trigger("t2", "A2", environment_id="e", folder="/a/b")
    driven.trigger("t3", "A3", worker=True)
    driven.finish("t1", "A1")
    return log_of(driven)


def check(decisions: list[Json], chained: bool = True, heads: dict[str, Head] | None = None) -> Violation | None:
    """The first violation; ``chained``: with the digests that the damaged decisions have."""
    verifier = SiteVerifier(heads)
    prev = None
    for offset, decision in enumerate(decisions):
        if chained:
            decision["prev"] = prev
        value = json.dumps(decision, separators=(",", ":")).encode()
        prev = hashlib.sha256(value).hexdigest()
        violation = verifier.check(value, offset)
        if violation is not None:
            return violation
    return verifier.finish()


def grant(decisions: list[Json], number: int, agent_id: str, trigger_id: str) -> None:
    event = {"type": "claim_granted", "agent_id": agent_id, "trigger_id": trigger_id, "n": 1}
    decisions[number].setdefault("events", []).append(event)


def end(decisions: list[Json], number: int, agent_id: str, trigger_id: str, kind: str = "claim_closed") -> None:
    event = {"type": kind, "agent_id": agent_id, "trigger_id": trigger_id, "n": 1}
    event |= {"started": True} if kind == "claim_closed" else {"reason": "site_workers_busy"}
    decisions[number].setdefault("events", []).append(event)


def drop(decisions: list[Json], number: int, *kinds: str) -> None:
    decisions[number]["events"] = [e for e in decisions[number]["events"] if e["type"] not in kinds]


def gated(**gate: object) -> list[Json]:
    """0: the site, 1: paused or a gate of o, 2: the claim of t1 waits behind it."""
    driven = Driven()
    driven.site_control("configure_site", capacity=3)
    if gate:
        driven.site_control("gate", scope="organization", name="o", **gate)
    else:
        driven.site_control("pause_site")
    driven.trigger("t1", "A1", worker=True, organization_id="o")
    return log_of(driven)


def returned(started: bool) -> list[Json]:
    """0: the site, 1: a budget of one, 2: t1 takes it, 3: t2 waits, 4: t1 ends (not started: t2 takes it)."""
    driven = Driven(delivers=False)
    driven.site_control("configure_site", capacity=3)
    driven.site_control("gate", scope="organization", name="o", run_budget=1)
    driven.trigger("t1", "A1", worker=True, organization_id="o")
    driven.trigger("t2", "A2", worker=True, organization_id="o")
    driven.deliver(2)
    if not started:
        driven.stop("t1", "A1")
    while driven.undelivered:
        driven.deliver()
    if started:
        driven.finish("t1", "A1")
        driven.deliver()
    return log_of(driven)


def passing() -> list[Json]:
    """0: t1 has /a/1, 1: t2 waits for /a, 2: t3 passes it for /a/2; a deletion of /b."""
    driven = Driven()
    for number, path in enumerate(["/a/1", "/a", "/a/2"], 1):
        driven.trigger(f"t{number}", f"A{number}", environment_id="e", folder=path)
        driven.advance(1)
    driven.site_control("delete_folder", environment_id="e", path="/b")
    return log_of(driven)


def log_of(driven: Driven) -> list[Json]:
    return [json.loads(output.value or b"") for output in driven.outputs if output.topic == SITE_DECISIONS.name]


def degrade(decisions: list[Json]) -> None:
    decisions[3]["events"].append({"type": "claim_degraded", "agent_id": "A2", "trigger_id": "t2", "n": 1})


def close_by_control(decisions: list[Json]) -> None:
    end(decisions, 3, "A1", "t1")


def grant_after_attempt(decisions: list[Json]) -> None:
    decisions[4]["events"].append({"type": "claim_granted", "agent_id": "A2", "trigger_id": "t2", "n": 1})


DAMAGES: dict[str, tuple[Callable[[], list[Json]], Damage, str, int]] = {
    "an overlapping folder is granted": (log, lambda log: grant(log, 1, "A2", "t2"), "I2", 1),
    "one worker too many is granted": (log, lambda log: grant(log, 2, "A3", "t3"), "I3", 2),
    "a claim is granted twice": (log, lambda log: grant(log, 1, "A1", "t1"), "I4", 1),
    "one that never stood is granted": (log, lambda log: grant(log, 1, "A9", "t9"), "I4", 1),
    "a claim is opened twice": (log, lambda log: log[1]["events"].append(log[1]["events"][0]), "I4", 1),
    "a claim ends twice": (log, lambda log: log[3]["events"].append(log[3]["events"][0]), "I4", 3),
    "another number ends": (log, lambda log: log[3]["events"][0].update(n=2), "I4", 3),
    "a claim ends by a control": (passing, close_by_control, "I4", 3),
    "a release says another word": (log, lambda log: log[3]["command"].update(started=False), "I4", 3),
    "one that is no ask is denied": (log, lambda log: end(log, 2, "A3", "t3", "claim_denied"), "B2", 2),
    "granted at a paused site": (gated, lambda log: grant(log, 2, "A1", "t1"), "E1", 2),
    "granted behind a closed gate": (lambda: gated(enabled=False), lambda log: grant(log, 2, "A1", "t1"), "E1", 2),
    "granted without a budget": (lambda: gated(run_budget=0), lambda log: grant(log, 2, "A1", "t1"), "E4", 2),
    "an attempt's budget comes back": (lambda: returned(True), grant_after_attempt, "E4", 4),
    "the younger first": (log, lambda log: log[3]["events"][1].update(agent_id="A3", trigger_id="t3"), "I6", 3),
    "nobody is granted what is free": (log, lambda log: drop(log, 3, "claim_granted"), "I7", 3),
    "who was passed is not counted": (
        passing,
        lambda log: [log[2]["events"][1].pop(name) for name in ("passed_agent_id", "passed_trigger_id")],
        "D4",
        2,
    ),
    "a folder is lost that was not deleted": (passing, degrade, "D5", 3),
    "one is left out": (log, lambda log: log.pop(1), "seq", 1),
    "unreadable": (log, lambda log: log[1].update(seq="x"), "unreadable", 1),
}


def test_a_sound_log_of_a_site_is_verified() -> None:
    assert len(log()) == 4
    assert [len(returned(started)) for started in (False, True)] == [5, 5]
    assert "claim_granted" in {event["type"] for event in returned(False)[4]["events"]}, "a budget comes back once"


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_a_sites_log_is_found_where_it_is(damage: str) -> None:
    """I2-I4, I6, I7, B2, D4, D5, E1, E4 and the chain."""
    made, change, kind, offset = DAMAGES[damage]
    decisions = made()
    assert check(decisions, chained=False) is None, "the log as it was written is sound"
    change(decisions)
    violation = check(decisions)
    assert violation is not None
    assert (violation.kind, violation.offset) == (kind, offset), violation


def test_a_changed_decision_is_found_where_it_is_by_the_chain_of_the_next_one() -> None:
    decisions = log()
    decisions[1]["via"] = "kafka"
    violation = check(decisions, chained=False)
    assert violation is not None
    assert (violation.kind, violation.offset, violation.decider) == ("chain", 1, "default")


def test_a_tail_that_was_cut_off_is_missed() -> None:
    decisions = log()
    violation = check(decisions[:-1], chained=False, heads={"default": Head(4, None)})
    assert violation is not None
    assert (violation.kind, violation.seq) == ("tail", 3)


# What agents and sites say of each other


def told(driven: Driven) -> tuple[list[events.Decision], list[site_events.SiteDecision]]:
    return list(driven.decisions), list(driven.site_decisions)


def disagreement(
    agents: list[events.Decision], sites: list[site_events.SiteDecision], sites_first: bool
) -> tuple[str, int, int] | None:
    agreement = Agreement()
    agreement.partition = 3
    for first in (sites_first, not sites_first):
        if first:
            for offset, site_decision in enumerate(sites):
                agreement.take_site(site_decision, offset)
        else:
            for offset, decision in enumerate(agents):
                agreement.take_agent(decision, offset)
    found = agreement.finish()
    return None if found is None else (found[0].topic, found[0].partition, found[0].offset)


def life() -> Driven:
    """Claims that are granted, denied, withdrawn, and degraded; attempts that end; a grant that comes too late."""
    driven = Driven(2, pool=1, delivers=False)
    place: Json = {"environment_id": "e", "folder": "/a"}
    driven.trigger("late", "A2", worker=True)
    driven.deliver()
    driven.stop("late", "A2")
    driven.delivers = True
    driven.deliver()
    driven.trigger("t1", "A1", worker=True)
    driven.trigger("f1", "A3", **place)
    driven.trigger("f2", "A4", **place)
    driven.advance(1)
    driven.site_control("delete_folder", environment_id="e", path="/a")
    driven.trigger("ask", "A5", worker=True, interactive=True, on_busy="ask")
    driven.trigger("gone", "A6", worker=True)
    driven.stop("gone", "A6")
    driven.finish("t1", "A1")
    driven.finish("f2", "A4")
    driven.check()
    return driven


@pytest.mark.parametrize("sites_first", [False, True])
def test_agents_and_sites_agree_in_whatever_order_they_are_read(sites_first: bool) -> None:
    agents, sites = told(life())
    assert disagreement(agents, sites, sites_first) is None


@pytest.mark.parametrize("sites_first", [False, True])
@pytest.mark.parametrize("what", ["claim_granted", "claim_degraded", "claimed", "returned"])
def test_what_was_received_and_never_sent_is_found_where_it_was_received(what: str, sites_first: bool) -> None:
    """D3, E4: each of them, taken out of its sender's log; the place is that of the receiver."""
    agents, sites = told(life())
    senders: list[events.Decision | site_events.SiteDecision] = [*agents, *sites]
    taken = [d for d in senders if any(event.type == what for event in d.events) and d.command.type != "denied"]
    taken = taken[1:] if what == "claim_granted" else taken  # the first came too late to have an effect
    assert taken
    for sender in taken:
        without = sender.model_copy(update={"events": tuple(e for e in sender.events if e.type != what)})
        changed = [without if one is sender else one for one in senders]
        own = [d for d in changed if isinstance(d, events.Decision)]
        others = [d for d in changed if isinstance(d, site_events.SiteDecision)]
        if what == "claimed":  # what the agent says of it later has no claim either
            assert isinstance(sender, events.Decision)
            own = [d for d in own if d.agent_id != sender.agent_id or d is without]
        found = disagreement(own, others, sites_first)
        assert found is not None
        assert found[0] == (DECISIONS.name if what.startswith("claim_") else SITE_DECISIONS.name)
        assert found[1] == 3


def test_a_release_that_says_another_word_of_its_attempt_is_found() -> None:
    """E4: budgets hang on it."""
    agents, sites = told(life())
    number = next(n for n, d in enumerate(sites) if d.command.type == "release" and d.command.started)
    command = sites[number].command.model_copy(update={"started": False})
    sites[number] = sites[number].model_copy(update={"command": command})
    assert disagreement(agents, sites, False) == (SITE_DECISIONS.name, 3, number)


def test_what_came_after_the_reading_began_is_not_missed() -> None:
    """Beside live workers the sender's log may have been read before it sent."""
    agents, sites = told(life())
    agreement = Agreement()
    for offset, decision in enumerate(sites):
        agreement.take_site(decision, offset)
    first = next(n for n, d in enumerate(sites) if d.command.type == "claim")
    ends = {(SITE_DECISIONS.name, 0): first, (DECISIONS.name, 0): 0}
    assert agreement.finish(ends) is None
    assert agreement.finish({**ends, (SITE_DECISIONS.name, 0): first + 1}) is not None
    assert agents


def dependents() -> list[events.Decision]:
    """w1 hears that c has finished; w2, which waits for c and d, is stopped, and watched for no longer."""
    driven = Driven()
    driven.trigger("b1", "B", conversation_id="c")
    on_c, on_d = {"agent_id": "B", "conversation_id": "c"}, {"agent_id": "B", "conversation_id": "d"}
    driven.trigger("w1", "A", depends_on=[on_c])
    driven.trigger("w2", "A", depends_on=[on_c, on_d])
    driven.stop("w2")
    driven.finish("b1", "B")
    driven.check()
    return driven.decisions


def test_agents_agree_of_what_they_depend_on() -> None:
    assert disagreement(dependents(), [], False) is None


def _is_heard(event: events.Event) -> bool:
    """It has a dependency; and that a conversation lives is no news to who waits for it."""
    if isinstance(event, events.Told):
        return event.outcome is not None
    return getattr(event, "trigger_id", None) != "b1"


@pytest.mark.parametrize("what", ["accepted", "told", "stopped"])
def test_a_word_between_agents_that_was_never_sent_is_found_where_it_was_received(what: str) -> None:
    """E2: taken out of its sender's log."""
    decisions = dependents()
    senders = [d for d in decisions if any(e.type == what and _is_heard(e) for e in d.events)]
    assert senders
    for sender in senders:
        without = sender.model_copy(update={"events": tuple(e for e in sender.events if e.type != what)})
        found = disagreement([without if one is sender else one for one in decisions], [], False)
        assert found is not None
        heard = decisions[found[2]]
        assert heard.command.type == {"accepted": "watch", "told": "resolved", "stopped": "unwatch"}[what]
        assert isinstance(heard.cause, verdicts.SenderCause)
        assert (heard.cause.decider, heard.cause.seq) == (sender.agent_id, sender.seq)


def superseded() -> list[Json]:
    """0: t1 has the only worker, 1: its next claim comes without a release, and closes the first."""
    driven = Driven(pool=1, verified=False, delivers=False)
    driven.trigger("t1", "A1", worker=True)
    driven.deliver()
    driven.control("pause", "A1")
    driven.control("resume", "A1")
    driven.undelivered = [output for output in driven.undelivered if b'"n":2' in (output.value or b"")]
    driven.deliver()
    return log_of(driven)


def test_a_claim_may_be_closed_by_a_newer_one_of_its_trigger() -> None:
    """I4: its release was given up by an operator."""
    decisions = superseded()
    assert [e["type"] for e in decisions[1]["events"]] == ["claim_closed", "claim_opened", "claim_granted"]
    assert check(decisions) is None


@pytest.mark.parametrize("damage", ["not spent", "older", "same", "of another"])
def test_a_claim_is_closed_by_nothing_else(damage: str) -> None:
    """I4, E4: a granted one counts as used; only a higher number of the same trigger closes it."""
    decisions = superseded()
    closed, opened, granted = decisions[1]["events"]
    if damage == "not spent":
        closed["started"] = False
    elif damage == "of another":
        for event in (decisions[1]["command"], opened, granted):
            event["trigger_id"] = "t2"
    else:
        for event in (decisions[1]["command"], opened, granted):
            event["n"] = 0 if damage == "older" else 1
    violation = check(decisions)
    assert violation is not None
    assert (violation.offset, violation.kind) == (1, "I4")
