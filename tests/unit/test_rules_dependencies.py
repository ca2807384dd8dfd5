"""E2, E3: triggers that wait for conversations of any agent, and for a person."""

import json
from collections import Counter

import pytest

from streams.rules import events
from streams.rules.limits import CONVERSATION_SECONDS, DEPENDENCIES_MAX, STEP_CHANGES_MAX
from tests.driving import Driven, Json, at_seconds


def needs(*conversations: tuple[str, str]) -> Json:
    return {
        "depends_on": [{"agent_id": agent, "conversation_id": conversation} for agent, conversation in conversations]
    }


def outcomes(driven: Driven, id: str = "w", agent_id: str = "A") -> tuple[str | None, ...]:
    return driven.agent(agent_id).triggers[id].outcomes


@pytest.mark.parametrize("agent_id", ["B", "A"])
def test_it_is_eligible_once_the_other_conversation_has_finished(agent_id: str) -> None:
    """E2: on any agent, its own among them."""
    driven = Driven("unlimited")
    driven.trigger("b1", agent_id, conversation_id="c")
    driven.trigger("w", **needs((agent_id, "c")))
    assert outcomes(driven) == (None,)
    driven.trigger("b2", agent_id, conversation_id="c")
    driven.finish("b1", agent_id)
    assert "w" not in driven.running(), "it still has a live trigger"
    driven.finish("b2", agent_id)
    assert "w" in driven.running()
    driven.check()


def test_it_waits_for_all_of_them() -> None:
    """E2."""
    driven = Driven()
    for agent_id in ("B", "C"):
        driven.trigger("x", agent_id, conversation_id="c")
    driven.trigger("w", **needs(("B", "c"), ("C", "c")))
    driven.finish("x", "B")
    assert driven.running() == []
    driven.finish("x", "C")
    assert driven.running() == ["w"]
    driven.check()


def test_what_had_finished_before_counts() -> None:
    """E2: the conversation's row is asked."""
    driven = Driven()
    driven.trigger("b1", "B", conversation_id="c")
    driven.finish("b1", "B")
    driven.trigger("w", **needs(("B", "c")))
    assert driven.running() == ["w"]
    assert driven.agent("B").watches == {}, "nothing is kept for who knows"
    driven.check()


@pytest.mark.parametrize("how", ["failed", "stopped", "expired"])
@pytest.mark.parametrize("release", ["approve", "stop", "succeeds"])
def test_one_that_failed_blocks_until_a_person_decides_or_it_succeeds(how: str, release: str) -> None:
    """E2: dependency_failed; expired counts as stopped."""
    driven = Driven()
    driven.trigger("r", "B")
    driven.trigger(
        "b1", "B", conversation_id="c", max_attempts=1, expires_at=at_seconds(5) if how == "expired" else None
    )
    driven.trigger("w", **needs(("B", "c")))
    if how == "expired":
        driven.advance(5)
    elif how == "stopped":
        driven.stop("b1", "B")
    else:
        driven.finish("r", "B")
        driven.fail("b1", "B")
    assert outcomes(driven) == ("failed" if how == "failed" else "stopped",)
    driven.trigger("other")
    assert driven.running() == ["other"], "who is blocked holds up nobody (C3)"
    driven.finish("other")
    if release == "approve":
        assert driven.control("approve", trigger_id="w").refusal is None
        assert driven.running() == ["w"]
    elif release == "stop":
        driven.stop("w")
        assert driven.final("w") == "stopped"
    else:
        driven.trigger("b2", "B", conversation_id="c")
        if how != "failed":
            driven.finish("r", "B")
        assert outcomes(driven) == (None,)
        driven.finish("b2", "B")
        assert driven.running() == ["w"]
    driven.check()


def test_one_never_heard_of_or_forgotten_is_waited_for() -> None:
    """E2: dependency_unknown; approving doesn't make it up."""
    driven = Driven()
    driven.trigger("w", **needs(("B", "c")))
    assert outcomes(driven) == ("unknown",)
    driven.control("approve", trigger_id="w")
    assert driven.running() == []
    driven.trigger("b1", "B", conversation_id="c")
    assert outcomes(driven) == (None,)
    driven.finish("b1", "B")
    assert driven.running() == ["w"]
    driven.finish("w")
    driven.advance(CONVERSATION_SECONDS + 1)
    driven.trigger("w2", **needs(("B", "c")))
    assert outcomes(driven, "w2") == ("unknown",)
    driven.check()


def test_cycles_wait_and_hold_up_nobody() -> None:
    """E2."""
    driven = Driven()
    driven.trigger("a", conversation_id="ca", **needs(("B", "cb")))
    driven.trigger("b", "B", conversation_id="cb", **needs(("A", "ca")))
    driven.trigger("self", "C", conversation_id="cc", **needs(("C", "cc")))
    driven.trigger("plain")
    driven.trigger("plain", "B")
    assert (driven.running(), driven.running("B"), driven.running("C")) == (["plain"], ["plain"], [])
    driven.stop("a")
    assert outcomes(driven, "b", "B") == ("stopped",)
    driven.check()


def test_once_it_has_its_place_what_happens_later_changes_nothing() -> None:
    """E2, B6: a place is for good."""
    driven = Driven()
    driven.trigger("r")
    driven.trigger("w", **needs(("B", "c")))
    driven.trigger("b1", "B", conversation_id="c")
    driven.finish("b1", "B")
    driven.trigger("b2", "B", conversation_id="c", max_attempts=1)
    driven.fail("b2", "B")
    driven.finish("r")
    assert driven.running() == ["w"]
    driven.check()


def test_one_that_is_blocked_holds_no_place_in_its_conversation() -> None:
    """B6: later ones of the conversation go first; it comes when it may."""
    driven = Driven()
    driven.trigger("w", conversation_id="c", **needs(("B", "x")))
    driven.trigger("p", conversation_id="c", approval_required=True)
    driven.advance(1)
    driven.trigger("t", conversation_id="c")
    assert driven.running() == ["t"]
    driven.control("approve", trigger_id="p")
    driven.finish("t")
    assert driven.running() == ["p"]
    driven.check()


def test_approval_keeps_the_order_of_what_was_asked_first() -> None:
    """E3, C1: with its own key."""
    driven = Driven()
    driven.trigger("r")
    driven.trigger("needs", approval_required=True)
    driven.advance(1)
    driven.trigger("younger")
    driven.control("approve", trigger_id="needs")
    driven.finish("r")
    assert driven.running() == ["needs"]
    again = driven.control("approve", trigger_id="younger")
    assert again.ignored is not None
    assert again.ignored.reason == "unchanged"
    driven.fail("needs")
    driven.advance(60)
    driven.finish("younger")
    assert driven.running() == ["needs"], "its retry needs no other approval"
    driven.check()


@pytest.mark.parametrize("state", ["running", "paused", "finished", "unknown"])
def test_approving_what_does_not_wait_has_no_effect(state: str) -> None:
    """E3, F7."""
    driven = Driven()
    driven.configure()
    if state != "unknown":
        driven.trigger("t1")
    if state in ("paused", "finished"):
        driven.status("t1", state)
    decision = driven.control("approve", trigger_id="t1")
    if state == "unknown":
        assert decision.refusal is not None
        assert decision.refusal.code == "trigger_unknown"
    else:
        assert decision.ignored is not None
        assert decision.ignored.reason == ("already_final" if state == "finished" else "unchanged")


def test_approval_and_dependencies_are_both_needed() -> None:
    """E2, E3."""
    driven = Driven()
    driven.trigger("b1", "B", conversation_id="c")
    driven.trigger("w", approval_required=True, **needs(("B", "c")))
    driven.control("approve", trigger_id="w")
    assert driven.running() == []
    driven.finish("b1", "B")
    assert driven.running() == ["w"]
    driven.check()


def test_several_watchers_are_told_in_the_same_order_after_a_restart() -> None:
    """I8: the log alone says what follows, not the order in which rows are loaded."""
    told = []
    for crashes in (False, True):
        driven = Driven("unlimited")
        driven.trigger("b1", "B", conversation_id="c")
        for id in ("z", "m", "a"):
            driven.trigger(id, **needs(("B", "c")))
        if crashes:
            driven.rows = dict(sorted(driven.rows.items()))
            driven.crash()
        driven.finish("b1", "B")
        told.append([event.trigger_id for event in driven.events_of(events.Told)])
        driven.check()
    assert told[0] == told[1]


@pytest.mark.parametrize("step", range(6))
def test_a_crash_between_any_two_messages_changes_nothing(step: int) -> None:
    """F1: watches and outcomes are rows."""
    driven = Driven(delivers=False)
    driven.trigger("b1", "B", conversation_id="c")
    driven.trigger("w", **needs(("B", "c")))
    done = 0
    while driven.undelivered or driven.running("B"):
        if done == step:
            driven.crash()
        if driven.undelivered:
            driven.deliver()
        else:
            driven.finish("b1", "B")
        driven.check()
        done += 1
    assert driven.running() == ["w"]


def test_a_hundred_dependencies_and_thousands_of_watchers_are_told_in_bounded_steps() -> None:
    """F1: a step makes at most 50 changes."""
    driven = Driven("unlimited", verified=False)
    driven.trigger("b1", "B", conversation_id="c")
    with driven.held():
        for number in range(300):
            driven.trigger(f"w{number}", **needs(("B", "c")))
    before = len(driven.decisions)
    driven.finish("b1", "B")
    told = [[e for e in d.events if isinstance(e, events.Told)] for d in driven.decisions[before:] if d.agent_id == "B"]
    assert [len(some) for some in told if some] == [50] * 6
    assert len(driven.running()) == 300
    driven.check()


def test_a_dependency_that_is_named_twice_is_one() -> None:
    """E2: it is asked once, and answered for both."""
    driven = Driven("unlimited")
    driven.trigger("b1", "B", conversation_id="c")
    driven.trigger("w", **needs(("B", "c"), ("B", "c"), ("B", "c")))
    assert sum(output.topic == "berth.signals" for output in driven.messages) == 2, "watch and resolved"
    driven.finish("b1", "B")
    assert driven.running() == ["w"]
    driven.check()


def test_an_approval_given_before_the_failure_does_not_approve_the_failure() -> None:
    """E2, E3: dependency_failed until a person approves it; each failure anew."""
    driven = Driven()
    driven.trigger("b1", "B", conversation_id="c", max_attempts=1)
    driven.trigger("w", approval_required=True, available_at=at_seconds(60), **needs(("B", "c")))
    driven.control("approve", trigger_id="w")
    driven.fail("b1", "B")
    driven.advance(60)
    assert driven.running() == []
    assert driven.control("approve", trigger_id="w").events
    assert driven.running() == ["w"]
    driven.check()


def test_approving_a_failure_holds_until_the_next_failure() -> None:
    """E2: the conversation ran again, and failed again, before the trigger could start."""
    driven = Driven()
    driven.trigger("b1", "B", conversation_id="c", max_attempts=1)
    driven.trigger("w", available_at=at_seconds(60), **needs(("B", "c")))
    driven.fail("b1", "B")
    driven.control("approve", trigger_id="w")
    assert not driven.agent().triggers["w"].is_blocked
    driven.trigger("b2", "B", conversation_id="c", max_attempts=1)
    assert driven.agent().triggers["w"].is_blocked, "it lives"
    driven.fail("b2", "B")
    driven.crash()
    driven.advance(60)
    assert driven.running() == []
    driven.control("approve", trigger_id="w")
    assert driven.running() == ["w"]
    driven.check()


def test_there_is_nothing_to_approve_while_a_dependency_lives_or_is_unknown() -> None:
    """E2: an approval in advance would be one of something that nobody knows yet."""
    driven = Driven()
    driven.trigger("b1", "B", conversation_id="c")
    driven.trigger("w", **needs(("B", "c"), ("B", "never")))
    decision = driven.control("approve", trigger_id="w")
    assert decision.ignored is not None
    assert decision.ignored.reason == "unchanged"
    driven.check()


@pytest.mark.parametrize("crashes", [False, True])
def test_a_failed_dependency_that_is_forgotten_is_unknown(crashes: bool) -> None:
    """E2: a conversation's row goes 90 days after its last outcome; those that wait for it are told."""
    driven = Driven()
    driven.trigger("b1", "B", conversation_id="c", max_attempts=1)
    driven.trigger("w", **needs(("B", "c")))
    driven.fail("b1", "B")
    assert outcomes(driven) == ("failed",)
    if crashes:
        driven.crash()
    driven.advance(CONVERSATION_SECONDS + 1)
    assert outcomes(driven) == ("unknown",)
    driven.check()


def test_a_trigger_of_the_conversation_that_it_depends_on_waits_for_ever() -> None:
    """E2: a cycle of one; it holds up nobody, and a stop ends it."""
    driven = Driven()
    driven.trigger("w", conversation_id="c", **needs(("A", "c")))
    driven.trigger("t", conversation_id="c")
    driven.finish("t")
    assert outcomes(driven) == (None,)
    assert driven.running() == []
    driven.stop("w")
    assert driven.final("w") == "stopped"
    driven.check()


@pytest.mark.parametrize(
    ("how", "outcome"), [("it expires instead of starting", "stopped"), ("pause", "unknown"), ("late grant", "unknown")]
)
def test_who_depends_on_it_is_told_in_the_very_step_in_which_it_ends(how: str, outcome: str) -> None:
    """E2: also when it ends only because of what else this step does; no other step of its agent may ever come."""
    driven = Driven(delivers=False)
    if how == "it expires instead of starting":
        driven.trigger("b0", "B")
        driven.trigger("b1", "B", conversation_id="c", expires_at=at_seconds(5))
    else:
        ask = {"kind": "chat", "interactive": True, "on_busy": "ask", "decide_before": at_seconds(5), "worker": True}
        driven.trigger("b1", "B", conversation_id="c", **ask)
    driven.trigger("w", **needs(("B", "c")))
    driven.undelivered.sort(key=lambda output: b"watch" not in (output.value or b""))
    driven.deliver(2)
    driven.undelivered.sort(key=lambda output: b"resolved" not in (output.value or b""))
    assert outcomes(driven) == (None,)
    driven.skip(10)
    if how == "it expires instead of starting":
        driven.finish("b0", "B")
    elif how == "pause":
        driven.control("pause", "B")
    else:
        driven.deliver(len(driven.undelivered))
    assert "b1" not in driven.agent("B").triggers
    while driven.undelivered:
        driven.deliver()
    assert outcomes(driven) == (outcome,)
    driven.check()


# Once it has ended, nobody is watched for it


ENDS = ("stop", "conversation", "archive", "expiry", "finish", "failure", "lease", "reply", "stopped by the runner")


def end(driven: Driven, how: str) -> None:
    """Trigger w of A ends in this way; it has a slot, or is paused, where that is needed."""
    match how:
        case "stop":
            driven.stop("w")
        case "conversation":
            driven.stop(conversation_id="c-w")
        case "archive":
            driven.control("archive")
        case "expiry" | "lease":
            driven.advance(2500)
        case "finish":
            driven.finish("w")
        case "failure":
            driven.fail("w", retryable=False)
        case "reply":
            driven.status("w", "paused")
            driven.trigger("r", conversation_id="c-w", interactive=True, kind="chat", on_busy="queue")
        case _:
            driven.status("w", "stopped")


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("crashes", [False, True])
def test_whoever_has_ended_is_watched_for_no_longer(how: str, crashes: bool) -> None:
    """E2: however it ends; also one that a person let start although what it depends on had failed."""
    driven = Driven()
    driven.trigger("b1", "B", conversation_id="c", max_attempts=1)
    fields: Json = {"expires_at": at_seconds(1000)} if how == "expiry" else {}
    driven.trigger("w", max_attempts=1, **needs(("B", "c"), ("nobody", "x")), **fields)
    if how in ENDS[4:]:
        driven = Driven()
        driven.trigger("b1", "B", conversation_id="c", max_attempts=1)
        driven.trigger("w", max_attempts=1, **needs(("B", "c")))
        driven.fail("b1", "B")
        driven.control("approve", trigger_id="w")
        assert driven.running() == ["w"]
    assert list(driven.agent("B").watches) == ["c"]
    if crashes:
        driven.crash()
    end(driven, how)
    assert "w" not in driven.agent().triggers
    assert all(not agent.watches for agent in driven.partition.agents.values())
    assert not [key for key in driven.rows if b'"watch"' in key]
    assert len(driven.events_of(events.Unwatched)) == (1 if how in ENDS[4:] else 2)
    driven.check()


def test_one_that_is_over_when_it_is_accepted_is_not_watched_for() -> None:
    """E5, E2: the two words keep their order."""
    driven = Driven()
    driven.advance(10)
    driven.trigger("w", expires_at=at_seconds(5), **needs(("B", "c")))
    assert driven.final("w") == "expired"
    assert [json.loads(output.value or b"")["type"] for output in driven.messages] == ["watch", "unwatch", "resolved"]
    assert driven.agent("B").watches == {}
    driven.check()


def test_a_conversation_that_finished_while_the_word_was_under_way_is_watched_no_more() -> None:
    """E2: each of the two takes the watch away, and the other finds none: in either order, and twice."""
    driven = Driven(delivers=False)
    driven.trigger("b1", "B", conversation_id="c")
    driven.trigger("w", **needs(("B", "c")))
    driven.deliver(2)
    driven.finish("b1", "B")
    driven.stop("w")
    while driven.undelivered:
        driven.deliver()
    assert [d.ignored.reason for d in driven.decisions if d.ignored is not None][-2:] == ["stale", "stale"]
    assert driven.agent("B").watches == {}
    record = driven.input[-1]
    assert record.value is not None
    assert b'"unwatch"' in record.value
    [again] = driven.again(record)
    assert again.ignored is not None
    assert again.ignored.reason == "stale"
    driven.check()


def test_who_still_waits_is_told_although_another_has_ended() -> None:
    """E2: a watch is of one trigger, not of its agent, and of one conversation."""
    driven = Driven("unlimited")
    driven.trigger("b1", "B", conversation_id="c")
    for id in ("w1", "w2"):
        driven.trigger(id, **needs(("B", "c")))
    driven.trigger("w1", "C", **needs(("B", "c"), ("B", "d")))
    driven.stop("w1")
    driven.finish("b1", "B")
    assert driven.running() == ["w2"]
    assert outcomes(driven, "w1", "C") == ("finished", "unknown")
    driven.check()


def test_thousands_are_watched_no_more_in_bounded_steps() -> None:
    """F1: archiving sixty triggers that depend on a hundred conversations each says 6,000 words, at most 150 a step."""
    driven = Driven(delivers=False)
    conversations = [("B", f"c{number}") for number in range(DEPENDENCIES_MAX)]
    with driven.held():
        for number in range(60):
            driven.trigger(f"w{number}", **needs(*conversations))
    driven.undelivered.clear()
    before = len(driven.decisions)
    driven.control("archive")
    assert not driven.agent().triggers
    words = [json.loads(output.value or b"") for output in driven.undelivered]
    assert len(words) == 60 * DEPENDENCIES_MAX
    assert {word["type"] for word in words} == {"unwatch"}
    by_step = Counter(word["sender"]["seq"] for word in words)
    assert max(by_step.values()) < STEP_CHANGES_MAX + DEPENDENCIES_MAX
    assert len(driven.decisions) - before == len(by_step)
    driven.check()


def test_a_step_that_says_many_words_leaves_the_slots_to_the_next() -> None:
    """F1, I7: verify knows that the step was full of words; who was to start does so at once after it."""
    driven = Driven(delivers=False)
    driven.trigger("t")
    driven.fail("t")
    driven.trigger("w", **needs(*(("B", f"c{number}") for number in range(STEP_CHANGES_MAX))))
    driven.skip(60)
    stopped = driven.stop("w")
    assert [event.type for event in stopped.events] == ["stopped"]
    assert driven.running() == ["t"]
    driven.check()
