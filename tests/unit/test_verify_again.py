"""``berth verify`` decides every command again, certifies the order, and can be put down and taken up again."""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from heapq import nsmallest
from itertools import chain, islice
from typing import Any

import pytest
from pydantic import TypeAdapter

from streams.audit.agreement import Agreement, StoredAgreement
from streams.audit.causes import of_agent as causes_at_agent
from streams.audit.causes import of_answer
from streams.audit.checkpoint import Checkpoint, Counts, NoCheckpoint, read, write
from streams.audit.folded_facts import FoldedFacts
from streams.audit.logged import Logged
from streams.audit.overtakings import OVERTAKEN_MAX
from streams.audit.past import Past, walk_through
from streams.audit.recompute import Recheck, Recomputer
from streams.audit.stored import StoredAgent, StoredSite
from streams.audit.verify import Verifier, Violation
from streams.audit.verify_sites import SiteVerifier
from streams.rules import events, limits, site_events
from streams.rules.agent.evolve import Origin
from streams.rules.agent.evolve import evolve as evolve_agent
from streams.rules.agent.rows import TriggerRow
from streams.rules.agent.state import Agent
from streams.rules.site.evolve import SiteOrigin
from streams.rules.site.evolve import evolve as evolve_site
from streams.rules.site.rows import ClaimId, ClaimRow
from streams.rules.site.state import Site, key_of
from streams.rules.site_messages import Claim
from tests.audits import log_of, sources
from tests.driving import Driven, Json, at_seconds
from tests.offices import Office
from tests.planted import OF_AGENTS, OF_SITES, Planted, of_agent, of_site, rechained


class Reading:
    """All of one partition's log, as berth verify reads it, with everything that it checks."""

    def __init__(self) -> None:
        self.agreement = Agreement()
        self.recheck = Recheck()
        self.agents = Verifier(None, self.agreement, self.recheck)
        self.sites = SiteVerifier(None, self.agreement, self.recheck)

    def read(self, log: list[Logged]) -> Violation | None:
        for logged in log:
            verifier = self.agents if logged.decider.kind == "agent" else self.sites
            violation = verifier.check(logged.value, logged.offset)
            if violation is not None:
                return violation
        return None

    def put_down_and_taken_up(self) -> "Reading":
        """The same in another process: as JSON and back."""
        agents, sites = TypeAdapter(list[tuple[str, StoredAgent]]), TypeAdapter(list[tuple[str, StoredSite]])
        again = Reading()
        stored = TypeAdapter(StoredAgreement)
        again.agreement = Agreement(stored.validate_json(stored.dump_json(self.agreement.stored())))

        def agents_of(some: list[tuple[str, StoredAgent]]) -> dict[str, Any]:
            return {id: one.agent(id) for id, one in agents.validate_json(agents.dump_json(some))}

        def sites_of(some: list[tuple[str, StoredSite]]) -> dict[str, Any]:
            return {id: one.site(id) for id, one in sites.validate_json(sites.dump_json(some))}

        recomputer = Recomputer()
        before = self.recheck.recomputer
        recomputer.agents = agents_of([(id, StoredAgent.of(one)) for id, one in before.agents.items()])
        recomputer.sites = sites_of([(id, StoredSite.of(one)) for id, one in before.sites.items()])
        again.recheck = Recheck(recomputer)
        known = agents_of([(one.agent_id, StoredAgent.of(one)) for one in self.agents.agents()])
        known_sites = sites_of([(one.site_id, StoredSite.of(one)) for one in self.sites.sites()])
        again.agents = Verifier(None, again.agreement, again.recheck, known.values())
        again.sites = SiteVerifier(None, again.agreement, again.recheck, known_sites.values())
        return again


@pytest.mark.parametrize("number", range(2))
def test_a_reading_goes_on_another_day_with_nothing_lost(number: int, seed: int) -> None:
    chance = random.Random(seed * 10 + number)
    log = list(log_of(Office(seed * 10 + number).work(80, 250).driven))
    whole = Reading()
    assert whole.read(log) is None
    reading, decisions, recomputed, overtakings = Reading(), 0, 0, 0
    while log:
        count = chance.randrange(1, 60)
        assert reading.read(log[:count]) is None
        log = log[count:]
        decisions += reading.agents.decisions + reading.sites.decisions
        recomputed += reading.recheck.decisions
        overtakings += reading.agents.overtakings.total() + reading.sites.overtakings.total()
        reading = reading.put_down_and_taken_up()
    assert decisions == recomputed == whole.recheck.decisions
    assert overtakings == whole.agents.overtakings.total() + whole.sites.overtakings.total()
    assert whole.agents.overtakings and whole.sites.overtakings
    assert reading.agreement.stored() == whole.agreement.stored()
    assert reading.agreement.finish() is None


def test_what_is_remembered_for_days_is_in_memory_once(seed: int) -> None:
    reading = Reading()
    assert reading.read(list(log_of(Office(seed).work(80, 250).driven))) is None
    kept = 0
    for agent in reading.agents.agents():
        again = reading.recheck.recomputer.agents[agent.agent_id]
        assert again.remembered == agent.remembered and again.conversations == agent.conversations
        assert all(again.remembered[id] is row for id, row in agent.remembered.items())
        assert all(again.conversations[id] is row for id, row in agent.conversations.items())
        kept += len(agent.remembered) + len(agent.conversations)
    assert kept


def test_each_overtaking_is_counted_under_what_allowed_it() -> None:
    driven = Driven(default_limit=1)
    driven.trigger("running")
    driven.trigger("behind", conversation_id="c-running")
    driven.trigger("approval", approval_required=True)
    driven.trigger("folder", "B", environment_id="e")
    driven.configure("C", parallelism_limit=3)
    driven.trigger("same folder", "C", environment_id="e")
    driven.advance(1)
    driven.trigger("young", "C")
    driven.trigger("forced", interactive=True, on_busy="force")
    driven.trigger("next")
    driven.finish("running")
    reading = Reading()
    assert reading.read(list(log_of(driven))) is None
    assert reading.agents.overtakings == {
        "waits_at_site": 1, "conversation_busy": 1, "approval_required": 1,
    }  # fmt: skip


def test_each_overtaking_at_a_site_is_counted_under_what_allowed_it() -> None:
    driven = Driven(default_limit=9, pool=1)
    driven.trigger("has both", "H", worker=True, environment_id="e", folder="/a")
    driven.site_control("gate", scope="organization", name="closed", enabled=False)
    driven.site_control("gate", scope="organization", name="spent", run_budget=0)
    driven.trigger("gated", "G", worker=True, organization_id="closed")
    driven.trigger("unpaid", "G", environment_id="other", organization_id="spent")
    driven.trigger("same folder", "F", environment_id="e", folder="/a/b")
    driven.trigger("no worker", "W", worker=True)
    driven.advance(1)
    driven.trigger("young", "Y", environment_id="e", folder="/b")
    driven.trigger("younger", "Y", environment_id="e", folder="/c")
    driven.finish("has both", "H")
    reading = Reading()
    assert reading.read(list(log_of(driven))) is None
    assert reading.sites.overtakings == {
        "organization_disabled": 4, "run_budget_used_up": 2, "agent_environment_folder_busy": 2, "site_workers_busy": 2,
    }  # fmt: skip


def test_every_older_claim_that_waits_at_a_grant_is_counted_once(seed: int) -> None:
    log = list(log_of(Office(seed).work(150, 500).driven))
    waiting: dict[tuple[str, str], tuple[int, int, bytes, bytes]] = {}
    overtaken = 0
    for logged in log:
        for event in logged.decision.events if isinstance(logged.decision, site_events.SiteDecision) else ():
            if isinstance(event, site_events.ClaimOpened):
                claim = logged.decision.command
                assert isinstance(claim, Claim)
                id = event.agent_id, event.trigger_id
                waiting[id] = claim.key.available_at, claim.key.created_at, id[1].encode(), id[0].encode()
            elif isinstance(event, site_events.ClaimGranted):
                key = waiting.pop((event.agent_id, event.trigger_id))
                overtaken += sum(other < key for other in waiting.values())
            elif isinstance(event, site_events.ClaimClosed | site_events.ClaimDenied):
                waiting.pop((event.agent_id, event.trigger_id), None)
    reading = Reading()
    assert reading.read(log) is None
    assert reading.sites.overtakings.total() == overtaken > 0


def counted_plainly(log: list[Logged]) -> tuple[Counter[str], Counter[str]]:
    """Of agents and of sites: every overtaking by itself, as the rules and the words for causes say it."""
    past, of_agents, of_sites = Past(), Counter[str](), Counter[str]()
    for logged in log:
        decision = logged.decision
        if isinstance(decision, events.Decision):
            agent, origin = past.agent(decision.agent_id), Origin(decision.seq, decision.at, decision.command)
            for event in decision.events:
                if isinstance(event, events.Dispatched):
                    of_agents.update(overtaken_plainly(agent, agent.triggers[event.trigger_id], decision.at))
                evolve_agent(agent, event, origin)
        else:
            site, site_origin = past.site(decision.site), SiteOrigin(decision.at, decision.command)
            for site_event in decision.events:
                if isinstance(site_event, site_events.ClaimGranted):
                    claim = site.claims[ClaimId(site_event.agent_id, site_event.trigger_id)]
                    of_sites.update(overtaken_plainly_at(site, claim))
                evolve_site(site, site_event, site_origin)
                if isinstance(site_event, site_events.WalkNoted):
                    walk_through(site, site_event.walk)
        past.fold(logged._replace(decision=decision.model_copy(update={"events": ()})))
    return of_agents, of_sites


def overtaken_plainly_at(site: Site, claim: ClaimRow) -> list[str]:
    older = (one for one in site.claims.values() if not one.granted and key_of(one) < key_of(claim))
    return [site.why_waiting(one) for one in nsmallest(OVERTAKEN_MAX, older, key=key_of)]


def overtaken_plainly(agent: Agent, row: TriggerRow, at: int) -> Iterator[str]:
    facts = FoldedFacts(agent, {}, knows_all=False)
    for key in islice((key for key in agent.waiting if key < row.key), OVERTAKEN_MAX):
        other = agent.triggers[key.id.decode()]
        found = [] if other.claim_state == "standing" else [cause.reason for cause in causes_at_agent(facts, other, at)]
        found += [cause.reason for cause in of_answer(facts, other)]
        own = (reason for reason in found if reason != "agent_parallelism_limit_reached")
        yield "waits_at_site" if other.claim_state == "standing" else next(own, "forced")


@pytest.mark.parametrize("number", range(4))
def test_overtakings_are_those_that_a_plain_count_finds(number: int, seed: int) -> None:
    log = list(log_of(Office(seed * 10 + number, verified=False).work(150, 500).driven))
    reading = Reading()
    assert reading.read(log) is None
    assert (reading.agents.overtakings, reading.sites.overtakings) == counted_plainly(log)
    assert reading.agents.overtakings and reading.sites.overtakings


def test_who_waits_behind_a_blocker_is_told_from_the_older_ones_with_the_same_need() -> None:
    driven = Driven(default_limit=9, pool=1)
    driven.trigger("has the worker", "H", worker=True)
    driven.trigger("has a folder", "H", environment_id="e", folder="/a/b")
    for number in range(2):  # older than the blocker
        driven.advance(1)
        driven.trigger(f"old {number}", f"O{number}", worker=True, environment_id="e", folder="/a/c")
    driven.advance(1)
    driven.trigger("passed too often", "P", environment_id="e", folder="/a")
    driven.advance(1)
    for number in range(2):
        driven.trigger(f"young {number}", f"Y{number}", worker=True, environment_id="e", folder="/a/c")
    for number in range(limits.CLAIM_PASSES_MAX):
        driven.advance(1)
        driven.trigger(f"passes {number}", f"Q{number}", environment_id="e", folder=f"/a/d{number}")
    driven.advance(1)
    driven.trigger("elsewhere", "E", environment_id="other")
    log = list(log_of(driven))
    reading = Reading()
    assert reading.read(log) is None
    assert (Counter(), reading.sites.overtakings) == counted_plainly(log)
    assert set(reading.sites.overtakings) == {"site_workers_busy", "agent_environment_folder_busy"}


# Damage that fits the state and the chain: only deciding again finds it


def changed(driven: Driven, change: Callable[[list[Json]], object]) -> list[bytes]:
    """The agent's log with a change, and a chain that fits it."""
    decisions = [json.loads(value) for value in driven.values]
    change(decisions)
    return rechained(decisions)


def life() -> Driven:
    driven = Driven(default_limit=1)
    driven.trigger("a", requested_by="ann")
    driven.trigger("b", timeout_seconds=60)
    driven.trigger("c", interactive=True, on_busy="ask")
    driven.trigger("a", requested_by="ann")
    driven.fail("a")
    driven.finish("b")
    driven.advance(30)
    driven.configure(parallelism_limit=2)
    return driven


CHANGES: dict[str, tuple[int, Callable[[list[Json]], object]]] = {
    "an event's position": (1, lambda log: log[1]["events"][0].update(position=2)),
    "a reason": (1, lambda log: log[1]["events"][0].pop("reason")),
    "a lease": (5, lambda log: log[4]["events"][-1].update(lease_until=at_seconds(9_999))),
    "a refusal": (2, lambda log: log[2]["refusal"].update(code="agent_paused")),
    "its holders": (2, lambda log: log[2]["refusal"].update(holders=["b"])),
    "an answer to a repeat": (3, lambda log: log[3]["ignored"].update(first_seq=2)),
    "a retry's time": (4, lambda log: log[4]["events"][0].update(retry_at=at_seconds(6))),
    "what it settles": (0, lambda log: log[0].update(settles=["a", "b"])),
    "a command": (0, lambda log: log[0]["command"].update(timeout_seconds=5)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_nobody_would_have_decided_is_found_where_it_is(name: str) -> None:
    offset, change = CHANGES[name]
    values = changed(life(), change)
    verifier = Verifier(None, None, Recheck())
    found = [verifier.check(value, at) for at, value in enumerate(values)]
    first = next(one for one in found if one is not None)
    assert (first.kind, first.decider) == ("recomputed", "A"), first
    assert first.offset in (offset, 4 if offset == 5 else offset)
    assert all(one is None for one in found[: first.offset])


def test_the_log_as_it_is_comes_out_again() -> None:
    values = changed(life(), lambda log: None)
    recheck = Recheck()
    verifier = Verifier(None, None, recheck)
    assert [verifier.check(value, at) for at, value in enumerate(values)] == [None] * len(values)
    assert recheck.decisions == len(values)


def test_whoever_asks_for_a_default_that_holds_already_is_decided_again() -> None:
    driven = Driven(3, pool=2)
    for setting in (None, None, 5, None, None):
        driven.configure(parallelism_limit=setting)
        driven.site_control("configure_site", capacity=setting)
        driven.site_control("gate", scope="organization", name="o", run_budget=setting)
        driven.site_control("gate", scope="organization", name="o", enabled=None)
    reading = Reading()
    assert reading.read(list(log_of(driven))) is None
    assert reading.recheck.decisions == len(driven.values) + len(driven.site_decisions) >= 20
    assert (driven.agent().limit, driven.site().row.capacity) == (3, 2)


def test_decisions_of_unknown_policies_are_named_and_still_checked() -> None:
    recheck = Recheck()
    verifier = Verifier(None, None, recheck)
    values = changed(life(), lambda log: [decision.update(policy="0") for decision in log[:2]])
    assert [verifier.check(value, at) for at, value in enumerate(values)] == [None] * len(values)
    assert recheck.unknown == {"0": 2}
    assert recheck.decisions == len(values) - 2


# The planted violations that must be caught, each at its offset, with everything switched on


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize(
    ("made", "kind"), [*((of_agent, kind) for kind in OF_AGENTS), *((of_site, kind) for kind in OF_SITES)]
)
def test_each_planted_violation_is_caught_at_its_offset(
    made: Callable[[str], Planted], kind: str, recompute: bool
) -> None:
    planted = made(kind)
    recheck = Recheck() if recompute else None
    verifier = (Verifier if made is of_agent else SiteVerifier)(planted.heads, Agreement(), recheck)
    found = next(
        (one for at, value in enumerate(planted.values) if (one := verifier.check(value, at)) is not None), None
    )
    found = found or verifier.finish()
    assert found is not None
    assert (found.offset, found.decider) == (planted.offset, planted.decider)
    assert found.kind in planted.kinds, found


# The file


def checkpoint() -> Checkpoint:
    return Checkpoint(8, True, [], 3, "berth.decisions", 17, Counts(5), [], [], [], [], [], StoredAgreement())


def test_a_checkpoint_reads_back_and_another_is_refused_with_the_reason() -> None:
    value = write(checkpoint())
    assert read(value, 8, True) == checkpoint()
    for damage, partitions, recomputes, said in (
        (value, 4, True, "of 8 partitions"),
        (value, 8, False, "it was with"),
        (value.replace(b'"v":2', b'"v":9'), 8, True, "another version"),
        (value[:-9], 8, True, "not what berth verify writes"),
    ):
        with pytest.raises(NoCheckpoint, match=said):
            read(damage, partitions, recomputes)


def test_steps_of_a_site_that_changed_nothing_are_taken_again() -> None:
    """A walk over more claims than one step looks at leaves a decision only where it does something."""
    driven = Driven(default_limit="unlimited", pool=1, verified=False)
    for number in range(3 * limits.STEP_PARKED_MAX):
        driven.trigger(f"t{number:04}", worker=True, organization_id="o")
    driven.finish("t0000")
    for enabled in (False, True):
        driven.site_control("gate", scope="organization", name="o", enabled=enabled)
    driven.site_control("pause_site")
    driven.site_control("resume_site")
    driven.finish(driven.running()[0])
    again = Recomputer()
    for logged in chain(*sources(driven)):
        assert again.again(logged.decision, logged.value) == logged.value
    assert len(driven.site_decisions) > 3 * limits.STEP_PARKED_MAX
