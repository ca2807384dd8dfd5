"""D1-D6 and the site protocol: workers and folders, claims and their answers, reservations, late grants, stops."""

import json

import pytest

from streams.codec import Output
from streams.rules import events, limits, site_events
from tests.driving import Driven, Json, at_seconds

POOL: Json = {"worker": True}
PERSON: Json = {"interactive": True, "kind": "chat"}


def folder(path: str | None, environment_id: str = "e", **fields: object) -> Json:
    return {"environment_id": environment_id, **({} if path is None else {"folder": path}), **fields}


# D1: the pool


@pytest.mark.parametrize("capacity", [1, 2, 4])
def test_no_more_workers_run_than_the_pool_has(capacity: int) -> None:
    """D1, I3: across agents; the others wait as site_workers_busy and start as workers come free."""
    driven = Driven(pool=capacity)
    for number in range(capacity + 2):
        driven.trigger(f"t{number}", f"A{number}", **POOL)
    assert driven.granted() == [f"t{number}" for number in range(capacity)]
    [waiting] = driven.waiting(f"A{capacity}")
    [event] = [e for e in driven.events_of(events.ClaimWaiting) if e.trigger_id == waiting]
    assert event.reason == "site_workers_busy"
    driven.finish("t0", "A0")
    assert driven.running(f"A{capacity}") == [f"t{capacity}"]
    driven.check()


def test_all_workers_may_serve_one_agent() -> None:
    """D1: no caps per agent, organization or class."""
    driven = Driven("unlimited", pool=10)
    for number in range(11):
        driven.trigger(f"t{number:02}", **POOL, organization_id="o", execution_class="background")
    assert driven.running() == [f"t{number:02}" for number in range(10)]
    assert driven.claim_state("t10") == "standing"
    driven.check()


def test_who_needs_no_site_asks_none() -> None:
    """D1: a site's name alone is no need."""
    driven = Driven(pool=0)
    driven.trigger("t1", site="default", organization_id="o")
    driven.trigger("t2", "B", **POOL)
    assert driven.running() == ["t1"]
    assert [output.topic for output in driven.messages] == ["berth.claims", "berth.signals"]
    driven.check()


def test_the_capacity_is_stamped_and_a_lower_one_stops_nobody() -> None:
    """D1: a redeploy with another default changes no site that exists."""
    driven = Driven("unlimited", pool=2)
    driven.trigger("t1", **POOL)
    assert driven.site_decisions[0].events[0] == site_events.SiteConfigured(capacity=2)
    driven.defaults = limits.Defaults(1, 9)
    driven.crash()
    for number in range(2, 6):
        driven.trigger(f"t{number}", **POOL)
    assert driven.running() == ["t1", "t2"]
    driven.site_control("configure_site", capacity=1)
    driven.finish("t1")
    assert driven.running() == ["t2"]
    driven.site_control("configure_site", capacity=3)
    assert driven.running() == ["t2", "t3", "t4"]
    driven.site_control("configure_site", capacity=None)
    assert driven.site().row.capacity == 9
    driven.check()


@pytest.mark.parametrize("need", [POOL, {"environment_id": "e"}])
def test_a_site_that_nobody_configured_keeps_its_claims_waiting(need: Json) -> None:
    """D1: site_unknown; an ask is refused with it."""
    driven = Driven()
    driven.trigger("t1", **need, site="far")
    driven.trigger("t2", "B", **need, site="far", **PERSON, on_busy="ask")
    assert driven.refused() == {"t2": "site_unknown"}
    [event] = driven.events_of(events.ClaimWaiting)
    assert event.reason == "site_unknown"
    driven.site_control("configure_site", "far", capacity=1)
    assert driven.running() == ["t1"]
    driven.check()


# C2: order


def test_the_oldest_of_all_agents_and_organizations_comes_first_to_the_microsecond() -> None:
    """C2: by the trigger's key, not by the arrival of its claim nor by its id."""
    driven = Driven(pool=1)
    driven.trigger("first", "Z", **POOL)
    for number in range(10):
        late = at_seconds(-(number + 1) / 1e6)
        driven.trigger(f"t{number}", f"A{number}", **POOL, created_at=late, organization_id=f"o{number}")
    for number in range(9, -1, -1):
        agent_id = f"A{number}"
        driven.finish("first" if number == 9 else f"t{number + 1}", "Z" if number == 9 else f"A{number + 1}")
        assert driven.running(agent_id) == [f"t{number}"]
    driven.check()


def test_equal_keys_of_two_agents_are_ordered_by_agent() -> None:
    """C1, C2: the same trigger id at two agents."""
    driven = Driven(pool=1)
    driven.trigger("r", "Z", **POOL)
    for agent_id in ("C", "B", "D"):
        driven.trigger("t", agent_id, **POOL)
    driven.finish("r", "Z")
    assert driven.running("B") == ["t"]
    driven.finish("t", "B")
    assert driven.running("C") == ["t"]
    driven.check()


# The claim's life


def test_a_claim_reserves_a_slot_until_it_is_answered() -> None:
    """A2 of the rules: asking counts; waiting gives the slot to others; the grant comes back for it."""
    driven = Driven(pool=0, delivers=False)
    driven.trigger("t1", **POOL)
    driven.advance(1)
    driven.trigger("t2")
    assert (driven.claim_state("t1"), driven.running()) == ("asking", [])
    driven.deliver(2)
    assert (driven.claim_state("t1"), driven.running()) == ("standing", ["t2"])
    driven.check()


def test_a_younger_reservation_keeps_no_slot_from_an_older_trigger() -> None:
    """PUMP 3: only older ones count."""
    driven = Driven(pool=0, delivers=False)
    driven.trigger("young", **POOL)
    driven.trigger("old", created_at=at_seconds(-10))
    assert driven.running() == ["old"]
    driven.check()


def test_an_unanswered_claim_gives_its_slot_up_and_its_site_is_asked_no_more() -> None:
    """R: the claim stands, other sites are asked, and the first answer opens the site again."""
    driven = Driven(2, pool=5, delivers=False)
    driven.trigger("t1", **POOL)
    driven.advance(30)
    assert driven.claim_state("t1") == "standing"
    assert driven.agent().mute == {"default": 1}
    driven.trigger("t2", **POOL)
    driven.trigger("t3", **POOL, **PERSON, on_busy="ask")
    assert driven.refused() == {"t3": "site_not_answering"}
    assert len(driven.messages) == 1, "nothing more is asked"
    driven.trigger("plain")
    assert driven.running() == ["plain"], "what needs no site goes on"
    driven.crash()
    driven.check()
    driven.delivers = True
    driven.deliver()
    driven.site_control("gate", scope="organization", name="o", enabled=True)
    assert (driven.running(), driven.agent().mute) == (["plain", "t1"], {})
    driven.finish("plain")
    assert driven.running() == ["t1", "t2"]
    driven.check()


@pytest.mark.parametrize("seconds", [5, 40])
def test_an_ask_whose_site_says_nothing_is_refused_at_its_deadline(seconds: int) -> None:
    """B5, [e]: at decide_before, at the latest at the end of R; the claim is withdrawn, and with it a late grant."""
    driven = Driven(delivers=False)
    decision = driven.trigger("t1", **POOL, **PERSON, on_busy="ask", decide_before=at_seconds(seconds))
    assert decision.settles == (), "its sender has still to wait"
    driven.advance(min(seconds, limits.CLAIM_RESERVED_SECONDS))
    assert driven.refused() == {"t1": "site_not_answering"}
    assert driven.last.settles == ("t1",)
    assert not driven.agent().triggers
    driven.delivers = True
    driven.deliver()
    driven.trigger("t2", **POOL)
    assert driven.running() == ["t2"]
    assert driven.granted() == ["t2"]
    driven.check()


@pytest.mark.parametrize("on_busy", ["ask", "force"])
def test_an_ask_never_waits_at_its_site(on_busy: str) -> None:
    """B2, Z1: denied with the site's reason and holders; it leaves no claim, no conversation, no entry."""
    driven = Driven(pool=1)
    driven.trigger("t1", **POOL)
    decision = driven.trigger("t2", "B", **POOL, **PERSON, on_busy=on_busy)
    assert (decision.refusal, decision.settles) == (None, ())
    [refused] = driven.events_of(events.RefusedLater)
    assert (refused.code, refused.holders, refused.holders_count) == ("site_workers_busy", ("t1",), 1)
    assert (refused.running, refused.limit, refused.waiting) == (0, 1, 0)
    assert (refused.position_if_queued, refused.force_allowed) == (1, False)
    assert driven.last.settles == ("t2",)
    assert list(driven.site().claims) == [("A", "t1")]
    agent = driven.agent("B")
    assert (agent.triggers, agent.conversations, agent.lines, len(agent.waiting)) == ({}, {}, {}, 0)
    assert driven.final("t2", "B") == "refused"
    again = driven.trigger("t2", "B", **POOL, **PERSON, on_busy=on_busy)
    assert again.ignored is not None
    assert again.ignored.state == "refused"
    driven.check()


def test_an_ask_that_is_granted_starts_and_is_answered_then() -> None:
    """B2: settles names it in the decision that dispatches it."""
    driven = Driven()
    driven.trigger("t1", **POOL, **PERSON, on_busy="ask")
    assert driven.running() == ["t1"]
    assert driven.last.settles == ("t1",)
    driven.check()


def test_force_passes_the_agents_limit_but_not_the_site() -> None:
    """B4: it asks without a reserved slot, and is forced when it starts over the limit."""
    driven = Driven(pool=1)
    driven.trigger("plain")
    driven.trigger("f1", **POOL, **PERSON, on_busy="force")
    driven.trigger("f2", **POOL, **PERSON, on_busy="force")
    assert driven.running() == ["plain", "f1"]
    assert driven.dispatch("f1")["forced"] is True
    assert driven.refused() == {"f2": "force_limit_reached"}
    driven.configure("B", parallelism_limit=1)
    driven.trigger("f3", "B", **POOL, **PERSON, on_busy="force")
    assert driven.refused()["f3"] == "site_workers_busy"
    driven.check()


def test_two_forced_claims_under_way_are_bounded_when_they_are_granted() -> None:
    """[b]: one may exceed the limit of one; the other is refused, its grant given back."""
    driven = Driven(pool=5, delivers=False)
    driven.trigger("plain")
    for id in ("f1", "f2"):
        driven.trigger(id, **POOL, **PERSON, on_busy="force")
    driven.delivers = True
    driven.deliver()
    driven.site_control("gate", scope="organization", name="o", enabled=True)
    assert driven.running() == ["plain", "f1"]
    assert driven.refused() == {"f2": "force_limit_reached"}
    assert driven.granted() == ["f1"]
    driven.check()


def test_a_late_grant_goes_back_and_is_kept_for_the_oldest_the_fourth_time() -> None:
    """H, K: so that a full agent keeps no worker from others, and yet starts at last."""
    driven = Driven(pool=1)
    driven.trigger("hog", "H", **POOL)
    driven.trigger("t1", **POOL)
    driven.trigger("busy0")
    hog, busy = "hog", "busy0"
    for number in range(1, limits.LATE_GRANTS_MAX + 2):
        assert driven.running() == [busy]
        driven.finish(hog, "H")
        late = driven.agent().triggers["t1"].late
        assert late == min(number, limits.LATE_GRANTS_MAX)
        if number <= limits.LATE_GRANTS_MAX:
            assert driven.claim_state("t1") is None
            driven.trigger(f"hog{number}", "H", **POOL)
            hog = f"hog{number}"
            assert driven.running("H") == [hog]
            driven.trigger(f"busy{number}", created_at=at_seconds(-100))
            driven.finish(busy)
            busy = f"busy{number}"
            driven.advance(0.1)
            driven.finish(busy)
            assert driven.claim_state("t1") == "standing"
            driven.trigger(f"again{number}")
            busy = f"again{number}"
    assert driven.claim_state("t1") == "held"
    driven.finish(busy)
    assert driven.running() == ["t1"]
    driven.check()


def test_of_two_that_came_too_late_often_only_the_oldest_keeps_its_grant() -> None:
    """H: one grant an agent, so that no agent hoards workers."""
    driven = Driven(pool=2)
    driven.configure("H", parallelism_limit="unlimited")
    for id in ("a0", "b0"):
        driven.trigger(id, "H", **POOL)
    driven.trigger("t1", **POOL)
    driven.trigger("t2", **POOL)
    driven.advance(1)
    driven.trigger("busy0")
    for number in range(1, limits.LATE_GRANTS_MAX + 1):
        for hog in "ab":
            driven.finish(f"{hog}{number - 1}", "H")
        assert {driven.agent().triggers[id].late for id in ("t1", "t2")} == {number}
        for hog in "ab":
            driven.trigger(f"{hog}{number}", "H", **POOL)
        driven.trigger(f"busy{number}")
        driven.finish(f"busy{number - 1}")
        assert driven.running() == [f"busy{number}"]
        assert (driven.claim_state("t1"), driven.claim_state("t2")) == ("standing", "standing")
    for hog in "ab":
        driven.finish(f"{hog}{limits.LATE_GRANTS_MAX}", "H")
    assert (driven.claim_state("t1"), driven.claim_state("t2")) == ("held", None)
    assert driven.granted() == ["t1"]
    driven.check()


@pytest.mark.parametrize("state", ["asking", "granted on its way", "standing", "held"])
@pytest.mark.parametrize("how", ["stop", "conversation", "archive", "pause", "reschedule", "expiry"])
def test_what_waits_no_longer_withdraws_its_claim_wherever_it_is(state: str, how: str) -> None:
    """S8, A5: also while the grant is on its way, and when it is granted and not started: nothing stays at the site."""
    driven = Driven(pool=1, delivers=False)
    driven.configure()
    if state in ("standing", "held"):
        driven.trigger("other", "B", **POOL)
        deliver_all(driven)
    driven.trigger("t1", **POOL, expires_at=at_seconds(20))
    if state == "granted on its way":
        driven.deliver()
    elif state != "asking":
        deliver_all(driven)
    if state == "held":
        driven.trigger("older", **POOL, site="far", created_at=at_seconds(-9))
        [far] = driven.undelivered
        driven.undelivered.clear()
        driven.finish("other", "B")
        deliver_all(driven)
        driven.undelivered.append(far)
    assert driven.claim_state("t1") == ("asking" if state == "granted on its way" else state)
    withdraw(driven, how)
    row = driven.agent().triggers.get("t1")
    assert row is None or row.claim_n is None
    deliver_all(driven)
    assert driven.granted() == (["other"] if state == "standing" else [])
    assert ("A", "t1") not in driven.site().claims
    assert "t1" not in driven.running()
    driven.check()


def withdraw(driven: Driven, how: str) -> None:
    if how == "stop":
        driven.stop("t1")
    elif how == "conversation":
        driven.stop(conversation_id="c-t1")
    elif how in ("archive", "pause"):
        driven.control(how)
    elif how == "reschedule":
        driven.control("reschedule", trigger_id="t1", available_at=at_seconds(500))
    else:
        driven.advance(20)


def deliver_all(driven: Driven) -> None:
    while driven.undelivered:
        driven.deliver()


def test_a_pause_withdraws_and_a_resume_asks_again_with_a_new_number() -> None:
    """E1, [d]: claim numbers are never reused, so an old answer changes nothing."""
    driven = Driven(pool=1, delivers=False)
    driven.trigger("t1", **POOL)
    driven.control("pause")
    driven.control("resume")
    kinds = [command_of(output) for output in driven.undelivered]
    assert [(kind, n) for kind, n in kinds] == [("claim", 1), ("release", 1), ("claim", 2)]
    deliver_all(driven)
    assert driven.running() == ["t1"]
    assert driven.agent().triggers["t1"].claim_n == 2
    stale = [d for d in driven.decisions if d.ignored is not None]
    assert [d.command.type for d in stale] == ["granted"], "the first grant is of a claim that ended"
    driven.check()


def command_of(output: Output) -> tuple[str, int]:
    value = json.loads(output.value or b"")
    return value["type"], value["n"]


@pytest.mark.parametrize("how", ["finished", "failed", "paused", "stopped", "lost", "not retryable"])
def test_an_attempt_that_ends_frees_its_worker_and_folder_at_once(how: str) -> None:
    """F4-F7, S9: a retry or resume claims anew, behind what waits."""
    driven = Driven(pool=1)
    home = folder("/a")
    driven.trigger("t1", **POOL, **home, timeout_seconds=10)
    driven.advance(1)
    driven.trigger("t2", "B", **POOL, **home)
    if how == "lost":
        driven.advance(309)
    elif how == "stopped":
        driven.stop("t1")
        assert driven.running("B") == [], "kept until the runner answers"
        driven.status("t1", "stopped")
    elif how == "not retryable":
        driven.fail("t1", retryable=False)
    else:
        driven.status("t1", how)
    assert driven.running("B") == ["t2"]
    assert driven.granted() == ["t2"]
    if how == "paused":
        driven.control("resume_trigger", trigger_id="t1")
    driven.advance(60)
    driven.finish("t2", "B")
    assert driven.running() == (["t1"] if how in ("failed", "paused", "lost") else [])
    driven.check()


def test_a_late_word_of_a_lost_attempt_takes_the_folder_from_nobody() -> None:
    """F3, F6: the runner is fenced by its execution id."""
    driven = Driven(pool=1)
    driven.trigger("t1", **folder("/a"), timeout_seconds=10, max_attempts=1)
    lost = driven.dispatch("t1")["execution_id"]
    driven.trigger("t2", "B", **folder("/a"))
    driven.advance(310)
    assert driven.running("B") == ["t2"]
    [decision] = driven.finish("t1", execution_id=lost)
    assert decision.ignored is not None
    assert driven.granted() == ["t2"]
    driven.check()


def test_messages_that_come_twice_change_nothing() -> None:
    """C5: nothing is doubled by Kafka, and yet."""
    driven = Driven(pool=1)
    driven.trigger("t1", **POOL)
    driven.trigger("t2", "B", **POOL)
    before = driven.state()
    for record in [record for record in driven.input if record.topic in ("berth.claims", "berth.signals")]:
        driven.again(record)
    assert driven.state() == before
    driven.check()


@pytest.mark.parametrize("step", range(8))
def test_a_crash_between_any_two_messages_changes_nothing(step: int) -> None:
    """F1: rebuilt from the rows, both deciders go on in mid-protocol."""
    driven = Driven(pool=1, delivers=False)
    driven.trigger("t1", **POOL, **folder("/a"))
    driven.trigger("t2", "B", **POOL, **folder("/a/b"))
    done = 0
    while driven.undelivered or driven.running() == ["t1"]:
        if done == step:
            driven.crash()
        if driven.undelivered:
            driven.deliver()
        else:
            driven.finish("t1")
        driven.check()
        done += 1
    assert driven.running("B") == ["t2"]


def test_a_claim_reserves_one_of_the_agents_budget() -> None:
    """E4: reserved when it asks, so that no second one asks for what the first will spend."""
    driven = Driven(5, delivers=False)
    driven.configure(run_budget=1)
    driven.trigger("t1", **POOL)
    driven.trigger("t2", **POOL)
    assert [command_of(output) for output in driven.messages] == [("claim", 1)]
    refusal = driven.trigger("t3", **POOL, **PERSON, on_busy="ask").refusal
    assert refusal is not None
    assert refusal.code == "run_budget_used_up"
    driven.stop("t1")
    assert driven.claim_state("t2") == "asking"
    deliver_all(driven)
    assert driven.running() == ["t2"]
    driven.check()


@pytest.mark.parametrize("on_busy", ["ask", "force"])
def test_an_ask_whose_budget_was_taken_away_while_it_asked_is_told_so(on_busy: str) -> None:
    """B3, E4: not that the agent is full."""
    driven = Driven(5, delivers=False)
    driven.configure(run_budget=1)
    driven.trigger("t1", **POOL, **PERSON, on_busy=on_busy)
    driven.configure(run_budget=0)
    deliver_all(driven)
    assert driven.refused() == {"t1": "run_budget_used_up"}
    assert driven.granted() == []
    driven.check()


def test_messages_of_one_trigger_are_bounded() -> None:
    """S10, I10: a standing claim costs nothing while others come and go."""
    driven = Driven("unlimited", pool=1)
    driven.trigger("hog", "H", **POOL)
    driven.trigger("t1", **POOL)
    before = len(driven.messages)
    for number in range(30):
        driven.trigger(f"p{number}")
        driven.finish(f"p{number}")
    assert len(driven.messages) == before
    driven.finish("hog", "H")
    own = [m for m in driven.messages if b'"t1"' in (m.value or b"")]
    assert len(own) == 3, "claim, waiting, granted"


def test_a_forced_claim_reserves_no_slot() -> None:
    """B4: it exceeds the limit anyway; what becomes free meanwhile goes to whoever waits."""
    driven = Driven(delivers=False)
    driven.trigger("t1")
    driven.trigger("f", kind="chat", interactive=True, on_busy="force", worker=True)
    assert driven.claim_state("f") == "asking"
    driven.trigger("t2")
    driven.finish("t1")
    assert driven.running() == ["t2"]
