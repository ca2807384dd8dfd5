"""The past as the log tells it: it equals what the deciders had then, and every cut of it is causal."""

import json
import random
from collections import defaultdict
from typing import Any

import pytest
from pydantic import TypeAdapter

from streams.audit.as_of import agent_then, as_json, everything, site_then
from streams.audit.causes import TriggerId
from streams.audit.estimate import History
from streams.audit.explain import explain
from streams.audit.logged import Decider, Logged, Unreadable, merged, read
from streams.audit.past import DoesNotFit, Past
from streams.audit.precedence import Comparison
from streams.audit.simulate import Change
from streams.audit.stored import StoredAgent, StoredSite
from streams.audit.traffic import recorded
from streams.audit.waiting import WaitingTimes
from streams.audit.what_if import what_if
from streams.rules.agent.state import Agent
from streams.rules.messages import Trigger
from streams.rules.order import SECOND
from streams.rules.site.state import Site
from tests.audits import log_of, sources
from tests.driving import T0, Driven
from tests.offices import Office
from tests.states import content, site_content, without_leases


def folded(log: list[Logged]) -> Past:
    past = Past()
    for logged in log:
        past.fold(logged)
    return past


def of_log(agent: Agent) -> object:
    """What the log knows of an agent: the hash of its newest decision, and what a step left over, are not in a fold."""
    copy = without_leases(agent)
    copy.row.prev = None
    return content(copy)


def of_site(site: Site) -> object:
    known = site_content(site)
    known["row"] = {name: known["row"][name] for name in ("seq", "created", "capacity", "paused")}
    return known


@pytest.mark.parametrize("number", range(3))
def test_the_fold_equals_what_the_deciders_hold(number: int, seed: int) -> None:
    """Also the indexes: which claims a gate hides, who is next in a conversation, which folder is busy."""
    driven = Office(seed * 10 + number).work(120, 400).driven
    past = folded(list(log_of(driven)))
    assert past.agents.keys() == driven.partition.agents.keys()
    for agent_id, agent in past.agents.items():
        assert of_log(agent) == of_log(driven.agent(agent_id))
    for site_id, site in past.sites.items():
        assert of_site(site) == of_site(driven.site(site_id))


@pytest.mark.parametrize("number", range(2))
def test_a_fold_can_be_put_down_and_taken_up_again(number: int, seed: int) -> None:
    """At any decision, as JSON, with nothing lost that later ones need."""
    log = list(log_of(Office(seed * 10 + number).work(60, 200).driven))
    whole, parts = folded(log), Past()
    agents, sites = TypeAdapter(StoredAgent), TypeAdapter(StoredSite)
    for place, logged in enumerate(log):
        if place % 40 == 20:
            for agent_id, agent in parts.agents.items():
                written = agents.dump_json(StoredAgent.of(agent))
                parts.agents[agent_id] = agents.validate_json(written).agent(agent_id)
            for site_id, site in parts.sites.items():
                parts.sites[site_id] = sites.validate_json(sites.dump_json(StoredSite.of(site))).site(site_id)
        parts.fold(logged)
    for agent_id, agent in whole.agents.items():
        assert of_log(parts.agents[agent_id]) == of_log(agent)
    for site_id, site in whole.sites.items():
        assert site_content(parts.sites[site_id]) == site_content(site)


def test_a_moment_of_the_past_is_what_was_seen_then(seed: int) -> None:
    """Seen while it was the present, and asked for later: the same."""
    office = Office(seed + 77)
    driven = office.driven
    seen = {}
    for _ in range(4):
        office.work(25, 60)
        driven.advance(1)
        agents = {
            id: agent_then(agent, driven.now, driven.partition.sites) for id, agent in driven.partition.agents.items()
        }
        seen[driven.now] = as_json((sorted(agents.items()), site_then(driven.site())))
    log = list(log_of(driven))
    for at, then in seen.items():
        past = folded(list(merged([log], at)))
        found = everything(past, at)
        assert as_json((sorted((agent.agent_id, agent) for agent in found.agents), found.sites[0])) == then


def test_what_is_shown_of_an_agent_and_a_site() -> None:
    driven = Driven(default_limit=1, pool=1)
    driven.trigger("a", worker=True, environment_id="e", folder="/x/")
    driven.trigger("b", conversation_id="c-a")
    driven.trigger("c", interactive=True, on_busy="force")
    driven.trigger("d", "D", worker=True, organization_id="o")
    driven.site_control("gate", scope="organization", name="p", enabled=False, run_budget=3)
    found = everything(folded(list(log_of(driven))), driven.now)
    first, second = found.agents
    assert (first.limit, first.running, first.forced, first.available) == (1, 2, 1, 0)
    assert [(slot.slot_number, slot.trigger_id, slot.forced, slot.folder) for slot in first.slots] == [
        (1, "a", False, "/x/"), (2, "c", True, None),
    ]  # fmt: skip
    assert [(one.position, one.trigger_id, one.causes[0].reason) for one in first.queue] == [
        (1, "b", "conversation_busy")
    ]
    assert [cause.reason for cause in second.queue[0].causes] == ["site_workers_busy"]
    (site,) = found.sites
    assert (site.capacity, site.workers_in_use) == (1, 1)
    assert [(claim.trigger_id, claim.folder) for claim in site.granted] == [("a", "/x")]
    assert [(claim.trigger_id, claim.reason, [one.who for one in claim.holders]) for claim in site.waiting] == [
        ("d", "site_workers_busy", [("A", "a", None)])
    ]
    assert [(gate.name, gate.enabled, gate.run_budget) for gate in site.gates] == [("p", False, 3)]
    assert as_json(found)["at"] == "2026-03-01T10:00:00.000000Z"


# Causal cuts


def apart(driven: Driven, chance: random.Random) -> list[list[Logged]]:
    """Each decider's decisions as a source of its own, in any order: as partitions of many workers are."""
    found = defaultdict(list)
    for source in sources(driven):
        for logged in source:
            found[logged.decider].append(logged)
    result = list(found.values())
    chance.shuffle(result)
    return result


def assert_causal(log: list[Logged]) -> None:
    last: dict[Decider, int] = defaultdict(int)
    for logged in log:
        assert logged.decision.seq == last[logged.decider] + 1
        if logged.cause is not None:
            assert last[logged.cause[0]] >= logged.cause[1], "its cause came before"
        last[logged.decider] = logged.decision.seq


@pytest.mark.parametrize("number", range(3))
def test_every_cut_is_causal_however_the_partitions_are_read(number: int, seed: int) -> None:
    chance = random.Random(seed * 10 + number)
    driven = Office(seed + number).work(80, 200).driven
    every = sum(map(len, sources(driven)))
    log = list(merged(apart(driven, chance)))
    assert len(log) == every
    assert_causal(log)
    for _ in range(10):
        at = T0 + round(chance.random() * 300 * SECOND)
        cut = list(merged(apart(driven, chance), at))
        assert_causal(cut)
        assert len(cut) == sum(logged.decision.at <= at for logged in log)


def test_what_lacks_its_cause_is_left_out(seed: int) -> None:
    """Partitions are read to ends that were not taken at the same moment."""
    chance = random.Random(seed)
    driven = Office(seed + 5).work(80, 200).driven
    for _ in range(20):
        short = [source[: chance.randrange(len(source) + 1)] for source in apart(driven, chance)]
        cut = list(merged(short))
        assert_causal(cut)
    site = [source for source in apart(driven, chance) if source[0].decider.kind == "site"]
    assert list(merged(site)) != site[0], "claims without their agents' decisions"
    assert list(merged(site, is_read=lambda decider: decider.kind == "site")) == site[0]


# Damage


def test_damage_is_named_with_its_place() -> None:
    driven = Driven()
    driven.trigger("a")
    driven.finish("a")
    first, second = log_of(driven)
    past = Past()
    with pytest.raises(DoesNotFit, match=r"offset 1: decision 2 of 'A'.*decision 1 is missing"):
        past.fold(second)
    with pytest.raises(Unreadable, match=r"berth\.decisions partition 3, offset 9"):
        read("berth.decisions", 3, 9, first.value[:-2])
    with pytest.raises(Unreadable):
        read("berth.decisions", 3, 9, None)


def test_no_instant_is_a_bare_number_in_the_json_of_any_audit() -> None:
    log = list(log_of(Office(7).work(60, 200).driven))
    history, times = History(), WaitingTimes()
    for logged in log[: len(log) // 2]:
        history.take(logged)
    for logged in log:
        times.take(logged)
    asked = [
        TriggerId(logged.decider.id, command.id)
        for logged in log
        if isinstance(command := logged.decision.command, Trigger)
    ]
    comparison = Comparison(*asked[:2])
    for logged in log:
        comparison.take(logged)
    failing = Driven()
    failing.trigger("fails")
    failing.fail("fails")
    estimates = history.estimates(history.past.at)
    assert any(estimate.starts_at is not None for estimate in estimates)
    audits = {
        "as-of": everything(history.past, history.past.at),
        "explain": [explain(log, *one) for one in asked[::4]] + [explain(log_of(failing), "A", "fails")],
        "precedence": comparison.precedence(),
        "estimate": estimates,
        "causes": times.total(),
        "what-if": what_if(recorded(log, 0, log[-1].decision.at), Change({"*": 3})),
    }
    for name, found in audits.items():
        assert bare(json.loads(json.dumps(as_json(found)))) == [], name
    assert '"retry_at": "20' in json.dumps(as_json(audits["explain"])), "also where an event names one"


def bare(found: Any) -> list[str]:
    """The fields that hold as much as an instant has microseconds."""
    if isinstance(found, dict):
        own = [name for name, value in found.items() if isinstance(value, int | float) and value > T0 / 2]
        return own + [name for value in found.values() for name in bare(value)]
    return [name for value in found for name in bare(value)] if isinstance(found, list) else []
