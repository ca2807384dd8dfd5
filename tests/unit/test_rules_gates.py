"""A6, E1, G4: pausing, archiving and reviving an agent, and parking one whose rules fail."""

from collections.abc import Callable

import pytest

from streams.codec import Record
from streams.partition import RuleFailure
from streams.rules import events
from streams.rules.agent import decide, pump, step
from tests.driving import T0, Driven, at_seconds


def ignored(decision: events.Decision) -> str | None:
    return decision.ignored.reason if decision.ignored else None


def test_a_paused_agent_starts_nothing_on_any_door_and_goes_on_after_resume() -> None:
    """E1, cases 42 and 46: limit changes, re-sent settings and restarts don't undo it."""
    driven = Driven(default_limit=1)
    driven.trigger("r1")
    driven.control("pause")
    driven.trigger("t1")
    driven.trigger("t2")
    driven.configure(parallelism_limit=5)
    driven.configure(owner="u", display_name="again")
    driven.crash()
    driven.status("r1", "paused")
    driven.control("resume_trigger", trigger_id="r1")
    driven.trigger("future", available_at=at_seconds(5))
    driven.advance(3600)
    assert driven.running() == []
    assert driven.agent().row.paused
    driven.control("resume")
    assert driven.running() == ["r1", "t1", "t2", "future"]
    driven.check()


def test_a_pause_stops_nobody_who_runs() -> None:
    """E1: they go on, finish, fail and are counted."""
    driven = Driven(default_limit=5)
    for number in range(15):
        driven.trigger(f"t{number:02}")
    driven.control("pause")
    assert driven.told("stop_requested") == []
    for number in range(5):
        driven.finish(f"t{number:02}")
    assert driven.running() == []
    driven.control("resume")
    assert driven.running() == [f"t{number:02}" for number in range(5, 10)], "five at once (case 44)"
    driven.check()


def test_pausing_and_resuming_twice_is_ignored() -> None:
    """E1."""
    driven = Driven()
    driven.configure()
    assert ignored(driven.control("resume")) == "unchanged"
    driven.control("pause")
    assert ignored(driven.control("pause")) == "unchanged"
    driven.control("resume")
    assert ignored(driven.control("resume")) == "unchanged"


def test_leases_and_expiry_go_on_while_paused() -> None:
    """E1: the pause covers dispatch only."""
    driven = Driven(default_limit=2)
    driven.trigger("t1", timeout_seconds=10)
    driven.trigger("t2", max_attempts=1)
    driven.control("pause")
    driven.trigger("t3", expires_at=at_seconds(20))
    driven.advance(311)
    assert driven.running() == ["t2"]
    assert driven.final("t3") == "expired"
    driven.fail("t2")
    assert driven.final("t2") == "failed"
    driven.advance(600)
    assert driven.waiting() == ["t1"]
    driven.check()


def test_archiving_stops_everything_that_lives() -> None:
    """A6: the waiting and paused at once; the running are told, and count until they end."""
    driven = Driven(default_limit=3)
    driven.trigger("paused")
    driven.status("paused", "paused")
    driven.trigger("retrying")
    driven.fail("retrying")
    for number in range(5):
        driven.trigger(f"t{number}")
    driven.stop("t1")
    driven.trigger("future", available_at=at_seconds(60))
    decision = driven.control("archive")
    assert decision.events[0].type == "archived"
    assert {id: driven.final(id) for id in ("paused", "retrying", "t3", "t4", "future")} == dict.fromkeys(
        ("paused", "retrying", "t3", "t4", "future"), "stopped"
    )
    assert driven.running() == ["t0", "t1", "t2"]
    assert driven.told("stop_requested") == ["t1", "t0", "t2"]
    driven.finish("t0")
    driven.fail("t2")
    driven.advance(60)
    assert driven.running() == []
    assert [driven.final(f"t{number}") for number in range(3)] == ["finished", "stopped", "stopped"]
    assert len(driven.dispatched()) == 5
    driven.check()


@pytest.mark.parametrize("control", ["pause", "resume", "archive", "reschedule", "resume_trigger", "approve"])
def test_everything_but_configure_is_refused_by_an_archived_agent(control: str) -> None:
    """A6: agent_archived, for triggers and stops too."""
    driven = Driven()
    driven.trigger("t1")
    driven.control("archive")
    fields = {"trigger_id": "t1"} if control in ("reschedule", "resume_trigger", "approve") else {}
    if control == "reschedule":
        fields["available_at"] = at_seconds(1)
    for decision in (driven.control(control, **fields), driven.trigger("t2"), driven.stop("t1")):
        assert decision.refusal is not None
        assert decision.refusal.code == "agent_archived"
    driven.finish("t1")
    assert driven.final("t1") == "finished", "the runner's words still count"


def test_configure_revives_with_the_settings_kept_and_the_chain_going_on() -> None:
    """A6, case 12: no phantom holders; seq and hash chain go on."""
    driven = Driven()
    driven.configure(parallelism_limit=3, owner="u", max_backlog_depth=7)
    for number in range(20):
        driven.trigger(f"t{number}")
    driven.control("archive")
    for id in driven.running():
        driven.status(id, "stopped")
    seq = driven.last.seq
    decision = driven.configure()
    assert [event.type for event in decision.events] == ["revived"]
    assert decision.seq == seq + 1
    row = driven.agent().row
    assert (row.parallelism_limit, row.owner, row.max_backlog_depth) == (3, "u", 7)
    assert driven.agent().running == 0
    for number in range(4):
        driven.trigger(f"n{number}")
    assert driven.running() == ["n0", "n1", "n2"]
    driven.check()


def test_those_still_stopping_count_after_a_revival() -> None:
    """A6, A2."""
    driven = Driven(default_limit=1)
    driven.trigger("t1")
    driven.control("archive")
    driven.configure()
    driven.trigger("t2")
    assert (driven.running(), driven.waiting()) == (["t1"], ["t2"])
    driven.advance(60)
    assert driven.running() == ["t2"]


def test_a_pause_survives_archive_and_revival() -> None:
    """A6: settings are kept."""
    driven = Driven()
    driven.configure()
    driven.control("pause")
    driven.control("archive")
    driven.configure()
    driven.trigger("t1")
    assert driven.waiting() == ["t1"]


# G4


class RuleBrokenError(Exception):
    """The rules' own bug."""


def test_a_record_on_which_the_rules_fail_says_where_and_nothing_of_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """G4: the partition stops; the same input is decided rightly once the rules are mended."""
    driven = Driven()
    driven.trigger("t1")

    def broken(*_arguments: object) -> None:
        raise RuleBrokenError("oh")

    with monkeypatch.context() as patch:
        patch.setattr(decide, "accept", broken)
        with pytest.raises(RuleFailure, match=r"berth.triggers/0@1: RuleBrokenError: oh") as failure:
            driven.trigger("t2")
        assert isinstance(failure.value.record, Record)
        assert failure.value.agent_id is None
    driven.crash()
    assert driven.waiting() == ["t2"]
    driven.check()


def fail_in_timers(driven: Driven) -> RuleFailure:
    with pytest.raises(RuleFailure, match="a timer of agent 'A': RuleBrokenError") as failure:
        driven.advance(3600)
    assert failure.value.record is None
    assert failure.value.agent_id == "A"
    driven.crash()
    return failure.value


@pytest.mark.parametrize("where", ["_lease_expired", "pump"])
def test_a_timer_on_which_the_rules_fail_parks_its_agent_and_no_other(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G4: an event, shown, resumed by configure; also when what fails is the pump that every command ends with."""
    driven = Driven()
    driven.trigger("t1", timeout_seconds=10)
    driven.trigger("b1", "B", timeout_seconds=10)
    driven.trigger("t2", available_at=at_seconds(5))

    original: Callable[..., None] = decide._lease_expired if where == "_lease_expired" else pump.pump

    def broken(made: step.Step, *arguments: object) -> None:
        if made.agent.agent_id == "A" and made.at > T0:
            raise RuleBrokenError
        original(made, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(decide, where, broken)
        fail_in_timers(driven)
        driven.partition.park("A", "Broken", driven.now)
        driven.commit()
        parked = driven.last
        assert [event.type for event in parked.events] == ["parked"]
        assert parked.command.type == "park"
        if where == "_lease_expired":
            driven.advance(3600)
            assert driven.dispatched("B") == ["b1", "b1", "b1"], "the other agent goes on"
            assert driven.dispatched("A") == ["t1"]
            driven.finish("t1")
            assert driven.final("t1") == "finished"
            driven.trigger("t3")
            assert driven.last.events[0].reason == "agent_parked"  # type: ignore[union-attr]
            driven.crash()
            driven.advance(3600)
            assert driven.dispatched("A") == ["t1"]
    assert driven.agent().row.parked == "Broken"
    driven.configure()
    assert len(driven.events_of(events.Unparked)) == 1
    driven.advance(3600)
    assert set(driven.dispatched("A")) >= {"t1", "t2"}
    driven.check()


def test_an_endless_error_does_not_burst_the_decision_that_parks() -> None:
    """G4, F1."""
    driven = Driven()
    driven.trigger("t1")
    driven.partition.park("A", "é" * 2_000_000, driven.now)
    driven.commit()
    assert len(driven.values[-1]) < 4096
    assert driven.agent().row.parked == "é" * 500


def test_timers_that_came_while_parked_are_not_lost() -> None:
    """G4: a lease that ran out meanwhile ends the attempt once the agent is configured."""
    driven = Driven()
    driven.trigger("t1", timeout_seconds=10, max_attempts=1)
    driven.partition.park("A", "why", driven.now)
    driven.commit()
    driven.advance(3600)
    assert driven.running() == ["t1"]
    driven.configure()
    driven.fire()
    assert driven.final("t1") == "failed"
    driven.check()


def test_a_partition_is_unusable_after_a_failure_and_its_rows_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """G4: what was handled before the failing record in one batch is decided again from the rows."""
    driven = Driven()
    driven.trigger("t1")

    def broken(*_arguments: object) -> None:
        raise RuleBrokenError

    with monkeypatch.context() as patch, pytest.raises(RuleFailure), driven.held():  # noqa: PT012 - one batch
        driven.trigger("t2")
        patch.setattr(decide, "_status", broken)
        driven.finish("t1")
    assert len(driven.decisions) == 1
    driven.crash()
    assert driven.final("t1") == "finished"
    assert driven.running() == ["t2"]
    driven.check()


@pytest.mark.parametrize("what", ["archive", "conversation"])
@pytest.mark.parametrize("restart", [False, True])
def test_what_was_to_be_stopped_is_stopped_after_an_agent_was_parked_in_between(
    what: str, restart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G4, F1: the rules fail in the continuation; once the agent is configured nothing that was stopped ever starts."""
    driven = Driven()
    driven.trigger("running", conversation_id="other")
    for number in range(120):
        driven.trigger(f"t{number:03}", conversation_id="c")

    def broken(*_arguments: object) -> None:
        raise RuleBrokenError

    with monkeypatch.context() as patch:
        patch.setattr(decide, "_continue", broken)
        with pytest.raises(RuleFailure, match="a timer of agent 'A'"):
            driven.control("archive") if what == "archive" else driven.stop(conversation_id="c")
        driven.partition = driven.restored()
        driven.partition.park("A", "Broken", driven.now)
        driven.commit()
        driven.finish("running")
        if restart:
            driven.crash()
        driven.advance(60)
    assert len(driven.waiting()) > 60, "parked, it does nothing"
    driven.configure()
    assert driven.waiting() == []
    assert driven.dispatched() == ["running"]
    assert {driven.final(f"t{number:03}") for number in range(120)} == {"stopped"}
    driven.check()


def test_archiving_hundreds_that_wait_at_a_site_withdraws_them_in_bounded_steps() -> None:
    """A6, F1: every claim goes back, at most 50 triggers a step; nothing starts in between."""
    driven = Driven("unlimited", pool=1)
    for number in range(170):
        driven.trigger(f"t{number:03}", worker=True)
    driven.control("archive")
    assert driven.waiting() == []
    driven.status("t000", "stopped")
    assert driven.dispatched() == ["t000"]
    assert not driven.site().claims
    steps = [{e.trigger_id for e in d.events if isinstance(e, events.Stopped)} for d in driven.decisions]
    assert [len(step) for step in steps if step] == [50, 50, 50, 19, 1]
    driven.check()
