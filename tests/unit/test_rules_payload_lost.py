"""What becomes of a trigger whose payload is nowhere any more: it fails, and nobody else is touched (berth recover)."""

import pytest

from streams.audit.explain import explain
from streams.rules import events
from streams.rules.order import SECOND
from tests.audits import log_of
from tests.driving import Driven


def lose(driven: Driven, *trigger_ids: str, agent_id: str = "A") -> None:
    """As ``berth recover`` does it: all of them, then what they leave over."""
    with driven.held():
        for trigger_id in trigger_ids:
            driven.partition.lose_payload(agent_id, trigger_id, driven.now)


def test_a_waiting_one_fails_and_the_next_of_its_conversation_starts() -> None:
    driven = Driven()
    driven.trigger("t1", conversation_id="c", max_attempts=2)
    driven.trigger("t2", conversation_id="c")
    driven.fail("t1")
    assert driven.running() == []
    lose(driven, "t1")
    assert (driven.final("t1"), driven.running()) == ("failed", ["t2"])
    assert driven.agent().conversations["c"].outcome == "failed"
    driven.check()


def test_one_after_the_other_is_told_before_anybody_starts() -> None:
    """Who comes next may have lost its own as well: it must not be sent to a runner with nothing."""
    driven = Driven(default_limit=1)
    for number in range(5):
        driven.trigger(f"t{number}", conversation_id="c", payload={"number": number})
    driven.control("pause")
    driven.finish("t0")
    driven.control("resume")
    assert driven.running() == ["t1"]
    driven.finish("t1")
    assert driven.running() == ["t2"]
    lose(driven, "t2", "t3")
    assert driven.running() == ["t2"]
    assert driven.final("t3") == "failed"
    driven.fail("t2")
    assert driven.final("t2") == "failed"
    assert driven.running() == ["t4"]
    assert driven.dispatched() == ["t0", "t1", "t2", "t4"]
    driven.check()


@pytest.mark.parametrize("end", ["finished", "failed", "lease", "paused", "stopped"])
def test_a_running_one_goes_on_and_is_never_started_again(end: str) -> None:
    driven = Driven()
    driven.trigger("t1", conversation_id="c", payload="p", max_attempts=5, timeout_seconds=60)
    lose(driven, "t1")
    assert driven.running() == ["t1"]
    assert [(event.trigger_id, event.final) for event in driven.events_of(events.PayloadLost)] == [("t1", False)]
    if end == "lease":
        driven.advance(1000)
    else:
        driven.status("t1", end)
    if end == "paused":
        assert driven.agent().triggers["t1"].state == "paused"
        driven.control("resume_trigger", trigger_id="t1")
    expected = {"finished": "finished", "stopped": "stopped"}.get(end, "failed")
    assert driven.final("t1") == expected
    driven.advance(3600)
    assert driven.dispatched() == ["t1"]
    driven.check()


def test_a_paused_one_fails_and_those_behind_it_go_on() -> None:
    driven = Driven()
    driven.trigger("t1", conversation_id="c")
    driven.status("t1", "paused")
    driven.trigger("t2", conversation_id="c")
    assert driven.running() == []
    lose(driven, "t1")
    assert (driven.final("t1"), driven.running()) == ("failed", ["t2"])
    driven.check()


def test_what_it_has_at_its_site_is_given_back_and_goes_to_the_next() -> None:
    driven = Driven(default_limit="unlimited", pool=1)
    driven.trigger("t1", worker=True)
    driven.trigger("t2", worker=True)
    driven.trigger("t3", worker=True)
    lose(driven, "t2")
    assert driven.granted() == ["t1"]
    driven.finish("t1")
    assert driven.running() == ["t3"]
    assert len(driven.site().claims) == 1
    driven.check()


def test_a_granted_one_of_a_full_agent_gives_its_worker_back() -> None:
    driven = Driven(default_limit=1, pool=2, delivers=False)
    driven.trigger("t1", worker=True)
    driven.deliver()
    assert driven.granted() == ["t1"]
    lose(driven, "t1")
    driven.deliver(len(driven.undelivered))
    driven.deliver(len(driven.undelivered))
    assert driven.final("t1") == "failed"
    assert driven.granted() == []
    driven.check()


def test_an_ask_that_waits_for_its_site_is_answered() -> None:
    driven = Driven(delivers=False)
    driven.trigger("t1", worker=True, interactive=True, on_busy="ask", decide_before="2026-03-01T11:00:00Z")
    lose(driven, "t1")
    (lost,) = [decision for decision in driven.decisions if decision.command.type == "lose_payload"]
    assert lost.settles == ("t1",)
    assert driven.final("t1") == "failed"


def test_who_depends_on_its_conversation_is_told() -> None:
    driven = Driven()
    driven.trigger("t1", "B", conversation_id="c", available_at="2026-03-01T11:00:00Z")
    driven.trigger("t2", "A", depends_on=[{"agent_id": "B", "conversation_id": "c"}])
    lose(driven, "t1", agent_id="B")
    assert driven.agent().triggers["t2"].outcomes == ("failed",)
    driven.check()


def test_what_it_depends_on_need_not_tell_it_any_more() -> None:
    driven = Driven()
    driven.trigger("t1", "B", conversation_id="c")
    driven.trigger("t2", "A", depends_on=[{"agent_id": "B", "conversation_id": "c"}])
    assert driven.agent("B").watches
    lose(driven, "t2")
    assert not driven.agent("B").watches
    driven.check()


def test_a_crash_before_the_queue_was_looked_at_loses_nothing() -> None:
    driven = Driven()
    driven.trigger("t1", conversation_id="c")
    driven.status("t1", "paused")
    driven.trigger("t2", conversation_id="c")
    driven.partition.lose_payload("A", "t1", driven.now)
    driven.commit()
    assert driven.running() == []
    assert driven.agent().row.todo == "pump"
    driven.crash()
    assert driven.running() == ["t2"]
    driven.check()


def test_it_is_explained() -> None:
    driven = Driven()
    driven.trigger("t1", available_at="2026-03-01T11:00:00Z", payload={"a": 1})
    driven.advance(5)
    lose(driven, "t1")
    explained = explain(log_of(driven), "A", "t1")
    assert explained is not None
    assert explained.state == "failed"
    last = explained.timeline[-1]
    assert (getattr(last, "what", None), getattr(last, "by", None)) == ("payload_lost", "operator of Berth")


def test_thousands_of_them_are_told_in_small_decisions_and_the_rest_goes_on() -> None:
    driven = Driven(default_limit=1)
    for number in range(130):
        driven.trigger(f"t{number}", conversation_id=f"c{number}", payload=number)
    lose(driven, *(f"t{number}" for number in range(1, 129)))
    assert driven.waiting() == ["t129"]
    driven.finish("t0")
    assert driven.running() == ["t129"]
    driven.now += 5 * SECOND
    driven.check()
    lost = [decision for decision in driven.decisions if decision.command.type == "lose_payload"]
    assert [len(decision.events) for decision in lost] == [1] * 128
