"""F2-F6, E5: an attempt from its dispatch to its end: words, retries, leases, heartbeats, pauses, expiry."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams import STATUSES
from streams.rules import events, limits
from streams.rules.backoff import backoff_microseconds
from streams.rules.order import SECOND, parse_instant
from tests.driving import T0, Driven, Json, at_seconds

LEASE = 1800 + 300


def ignored(decisions: list[events.Decision]) -> str | None:
    [decision] = decisions
    assert decision.events == ()
    return decision.ignored.reason if decision.ignored else None


# F3


def test_an_execution_id_names_agent_decision_and_event() -> None:
    """events.md: deterministic, never reused, readable."""
    driven = Driven(default_limit=3)
    driven.trigger("t1")
    driven.trigger("t2", "B")
    first, other = driven.dispatches
    assert first["execution_id"] == "kwnovuec-1-3"
    assert driven.last.events[3].type == "dispatched"
    assert other["execution_id"].split("-")[0] != "kwnovuec"
    driven.fail("t1")
    driven.advance(20)
    executions = [d["execution_id"] for d in driven.dispatches if d["type"] == "dispatch"]
    assert len(set(executions)) == len(executions) == 3


@pytest.mark.parametrize(
    "execution_id",
    ["kwnovuec-999-0", "kwnovuec-3-0", "bbbbbbbb-1-3", "kwnovuec-1", "kwnovuec", "kwnovuec--1-3", "kwnovuec-1-3-0",
     "kwnovuec-١-3", "kwnovuec-1-x", "-1-3", "kwnovuec-" + "9" * 150 + "-0", "KWNOVUEC-1-3", "kwnovuec-1-", "x"],
)  # fmt: skip
@pytest.mark.parametrize("status", ["finished", "failed", "heartbeat"])
def test_a_status_of_an_attempt_that_never_was_is_unknown(execution_id: str, status: str) -> None:
    """F3: one whose seq lies beyond the header's, or that has no such form."""
    driven = Driven()
    driven.trigger("t1", conversation_id="c1")
    driven.configure(owner="u")
    before = driven.state()
    decisions = driven.send(STATUSES.name, {"type": "status", "v": 1, "agent_id": "A", "conversation_id": "c1",
                                            "execution_id": execution_id, "status": status})  # fmt: skip
    assert ignored(decisions) == "unknown"
    assert driven.state() == before


@pytest.mark.parametrize("status", ["running", "heartbeat", "paused", "finished", "failed", "stopped"])
def test_a_word_of_an_earlier_attempt_is_stale_and_touches_nobodys_slot(status: str) -> None:
    """F3, F6, cases 16 and 65."""
    driven = Driven()
    driven.trigger("t1")
    old = driven.dispatch("t1")["execution_id"]
    driven.fail("t1")
    driven.trigger("t2")
    assert driven.running() == ["t2"]
    before = driven.state()
    assert ignored(driven.status("t1", status, execution_id=old)) == "stale"
    assert driven.state() == before
    driven.finish("t2")
    driven.advance(5)
    assert driven.running() == ["t1"]
    assert ignored(driven.status("t1", status, execution_id=old)) == "stale"
    assert driven.running() == ["t1"]
    driven.finish("t1")
    assert ignored(driven.status("t1", status, execution_id=old)) == "after_final"
    driven.check()


def test_the_execution_id_decides_and_not_the_conversation_beside_it() -> None:
    """F3: statuses name execution_id."""
    driven = Driven()
    driven.trigger("t1", conversation_id="c1")
    driven.finish("t1", conversation_id="somewhere else")
    assert driven.final("t1") == "finished"


@pytest.mark.parametrize(
    ("seconds", "expected"), [(-1, "stale"), (0, "stale"), (0.000001, None), (5, None), (3600, None)]
)
def test_a_status_without_execution_id_means_the_attempt_dispatched_before_it(
    seconds: float, expected: str | None
) -> None:
    """F3: a simple upstream; it needs at."""
    driven = Driven()
    driven.trigger("t1", conversation_id="c1")
    value = {"type": "status", "v": 1, "agent_id": "A", "conversation_id": "c1", "status": "finished"}
    [decision] = driven.send(STATUSES.name, {**value, "at": at_seconds(seconds)})
    assert (decision.ignored.reason if decision.ignored else None) == expected
    assert driven.running() == ([] if expected is None else ["t1"])
    again = driven.send(STATUSES.name, {**value, "at": at_seconds(9999)})
    if expected is None:
        assert ignored(again) == "after_final"


def test_a_status_without_execution_id_of_no_running_attempt_is_ignored() -> None:
    """F3."""
    driven = Driven()
    value = {"type": "status", "v": 1, "agent_id": "A", "status": "finished", "at": at_seconds(100)}
    assert ignored(driven.send(STATUSES.name, {**value, "conversation_id": "c1"})) == "unknown"
    driven.trigger("t0", conversation_id="c0")
    driven.trigger("t1", conversation_id="c1")
    assert ignored(driven.send(STATUSES.name, {**value, "conversation_id": "c1"})) == "stale"
    driven.status("t0", "paused")
    assert ignored(driven.send(STATUSES.name, {**value, "conversation_id": "c0"})) == "stale"
    driven.stop("t0")
    assert ignored(driven.send(STATUSES.name, {**value, "conversation_id": "c0"})) == "after_final"


def test_a_status_without_execution_id_and_without_at_is_a_dead_letter() -> None:
    """F3, G2."""
    driven = Driven()
    driven.trigger("t1", conversation_id="c1")
    driven.send(STATUSES.name, {"type": "status", "v": 1, "agent_id": "A", "conversation_id": "c1", "status": "failed"})
    assert len(driven.dead_letters) == 1
    assert driven.running() == ["t1"]


def test_signs_of_life_write_no_decision_and_are_counted() -> None:
    """events.md: a heartbeat of the current attempt changes the row only (F6)."""
    driven = Driven()
    driven.trigger("t1")
    for status in ("running", "heartbeat", "heartbeat"):
        assert driven.status("t1", status) == []
    assert driven.partition.heartbeats == 3
    driven.crash()
    assert driven.partition.heartbeats == 3
    driven.check()


# F5


@given(st.text(min_size=1, max_size=20), st.integers(0, 10**9), st.integers(0, 10**9))
def test_the_backoff_is_bounded_for_any_number(trigger_id: str, attempt: int, failures: int) -> None:
    """F5, case 57: 5 s doubled each time, at most 15 min, less at most a tenth; nothing overflows."""
    trigger_id = trigger_id.encode("utf-8", "replace").decode()
    delay = backoff_microseconds(trigger_id, attempt, failures)
    full = min(5 * 2 ** min(max(failures - 1, 0), 20), 900) * SECOND
    assert 0.9 * full <= delay <= full
    assert delay == backoff_microseconds(trigger_id, attempt, failures)


def test_the_jitter_spreads_and_comes_from_trigger_and_attempt() -> None:
    """F5: a fixed hash."""
    assert len({backoff_microseconds(f"t{number}", 1, 9) for number in range(100)}) == 100
    assert len({backoff_microseconds("t", number, 9) for number in range(100)}) == 100
    assert backoff_microseconds("t1", 1, 1) == 4_844_702


@pytest.mark.parametrize("max_attempts", [None, 1, 2, 5])
def test_failures_are_retried_until_max_attempts_are_used_up(max_attempts: int | None) -> None:
    """F5: default 3; everything is free at once; the delay doubles."""
    driven = Driven()
    driven.trigger("t1", max_attempts=max_attempts)
    tries = max_attempts or 3
    for number in range(1, tries + 1):
        assert driven.dispatch("t1")["attempt"] == number
        assert driven.dispatch("t1")["max_attempts"] == tries
        [decision] = driven.fail("t1")
        [failed] = decision.events
        assert isinstance(failed, events.AttemptFailed)
        assert failed.failures == number
        assert failed.final is (number == tries)
        assert driven.running() == []
        if number < tries:
            full = min(5 * 2 ** (number - 1), 900) * SECOND
            assert failed.retry_at is not None
            assert 0.9 * full <= failed.retry_at - driven.now <= full
            driven.advance_to(failed.retry_at - 1)
            assert driven.running() == []
            driven.advance_to(failed.retry_at)
            assert driven.running() == ["t1"]
    assert driven.final("t1") == "failed"
    driven.advance(3600)
    assert driven.dispatched() == ["t1"] * tries
    driven.check()


@pytest.mark.parametrize("max_attempts", [0, 101, -1, True, 1.0, "3"])
def test_an_odd_number_of_attempts_is_refused(max_attempts: object) -> None:
    """F5, G2."""
    driven = Driven()
    assert driven.trigger("t1", max_attempts=max_attempts).refusal is not None


@pytest.mark.parametrize("phase", [None, "execution", "preparation"])
@pytest.mark.parametrize("retryable", [None, True, False])
def test_a_failed_preparation_counts_like_any_other(phase: str | None, retryable: bool | None) -> None:
    """F2, F5."""
    driven = Driven()
    driven.trigger("t1")
    fields: Json = {
        name: value for name, value in {"phase": phase, "retryable": retryable}.items() if value is not None
    }
    [decision] = driven.fail("t1", **fields)
    [failed] = decision.events
    assert isinstance(failed, events.AttemptFailed)
    assert (failed.failures, failed.phase, failed.final) == (1, phase, retryable is False)
    assert driven.final("t1") == ("failed" if retryable is False else None)


def test_a_failure_frees_the_slot_in_the_same_decision() -> None:
    """F5."""
    driven = Driven()
    driven.trigger("t1")
    driven.trigger("t2")
    [decision] = driven.fail("t1")
    assert [event.type for event in decision.events] == ["attempt_failed", "dispatched"]
    assert driven.running() == ["t2"]


def test_pauses_cost_no_attempt() -> None:
    """F5: attempt only rises, failures count failures."""
    driven = Driven()
    driven.trigger("t1", max_attempts=2)
    for _ in range(5):
        driven.status("t1", "paused")
        driven.control("resume_trigger", trigger_id="t1")
    assert driven.dispatch("t1")["attempt"] == 6
    driven.fail("t1")
    assert driven.final("t1") is None
    driven.advance(10)
    driven.fail("t1")
    assert driven.final("t1") == "failed"
    assert driven.dispatch("t1")["attempt"] == 7


# F6


@pytest.mark.parametrize("timeout", [None, 1, 60, 18_000])
def test_a_lease_is_the_timeout_and_five_minutes_from_its_own_dispatch(timeout: int | None) -> None:
    """F6, cases 14 and 20: not a microsecond earlier; slot free at once, revoked, retried, counted."""
    driven = Driven()
    driven.trigger("t1", timeout_seconds=timeout)
    driven.trigger("t2")
    lease = (timeout or 1800) + 300
    dispatch = driven.dispatch("t1")
    assert parse_instant(dispatch["lease_until"]) == T0 + lease * SECOND
    assert dispatch["timeout_seconds"] == (timeout or 1800)
    driven.advance(lease - 0.000001)
    assert driven.running() == ["t1"]
    assert driven.told("revoked") == []
    driven.advance(0.000001)
    assert driven.running() == ["t2"]
    assert driven.told("revoked") == ["t1"]
    assert driven.last.via == "timer"
    expiry = driven.last.events[0]
    assert isinstance(expiry, events.LeaseExpired)
    assert (expiry.failures, expiry.absences, expiry.last_seen_at, expiry.final) == (1, 0, None, None)
    assert json.loads(driven.values[-1])["cause"]["timer"] == {
        "kind": "lease", "id": "t1", "deadline": at_seconds(lease)}  # fmt: skip
    assert ignored(driven.finish("t1")) == "stale"
    driven.check()


def test_the_default_timeout_of_the_agent_is_stamped_at_acceptance() -> None:
    """F6: from stored metadata, never the agent's present default."""
    driven = Driven(default_limit=2)
    driven.configure(default_timeout_seconds=100)
    driven.trigger("t1")
    driven.trigger("t2", timeout_seconds=200)
    driven.configure(default_timeout_seconds=5)
    driven.advance(399)
    assert driven.running() == ["t1", "t2"]
    driven.advance(1)
    assert driven.running() == ["t2"]
    driven.advance(50)
    assert driven.dispatch("t1")["attempt"] == 2
    assert driven.dispatch("t1")["timeout_seconds"] == 100
    driven.check()


def test_a_lease_counts_from_the_attempts_own_dispatch() -> None:
    """F6, case 61: not from the first start ever, nor from the acceptance."""
    driven = Driven()
    driven.trigger("t1", timeout_seconds=14_400)
    driven.advance(3600)
    driven.fail("t1")
    driven.advance(9000)
    assert driven.running() == ["t1"]
    second = parse_instant(driven.dispatch("t1")["dispatched_at"])
    driven.advance_to(second + 14_700 * SECOND - 1)
    assert driven.running() == ["t1"]
    driven.advance_to(second + 14_700 * SECOND)
    assert driven.running() == []


@pytest.mark.parametrize("heartbeat", [None, 60])
@pytest.mark.parametrize("status", ["running", "heartbeat"])
def test_a_sign_of_life_moves_the_lease_to_at_least_its_time_and_the_heartbeat(
    heartbeat: int | None, status: str
) -> None:
    """F6: 300 s if unset; never back."""
    driven = Driven()
    driven.trigger("t1", timeout_seconds=100, heartbeat_seconds=heartbeat)
    for _ in range(100):
        driven.advance(50)
        driven.status("t1", status)
    assert driven.dispatched() == ["t1"], "it lives as long as there are signs of life (case 20)"
    quiet = heartbeat or 300
    driven.advance(quiet - 0.000001)
    assert driven.running() == ["t1"]
    driven.advance(0.000001)
    assert driven.running() == []
    expiry = driven.events_of(events.LeaseExpired)[0]
    assert expiry.last_seen_at == driven.now - quiet * SECOND
    driven.check()


def test_an_early_sign_of_life_never_shortens_a_lease() -> None:
    """F6: at least."""
    driven = Driven()
    driven.trigger("t1", timeout_seconds=1000)
    driven.advance(1)
    driven.status("t1", "heartbeat")
    driven.advance(1298)
    assert driven.running() == ["t1"]
    driven.advance(1)
    assert driven.running() == []


@pytest.mark.parametrize("seen", [False, True])
def test_a_silence_of_heartbeat_seconds_ends_the_attempt_before_its_lease(seen: bool) -> None:
    """F6: only where a heartbeat was promised."""
    driven = Driven()
    driven.trigger("t1", heartbeat_seconds=20)
    if seen:
        driven.advance(15)
        driven.status("t1", "running")
    driven.advance(19.999999)
    assert driven.running() == ["t1"]
    driven.advance(0.000001)
    assert driven.running() == []
    expiry = driven.events_of(events.LeaseExpired)[0]
    assert (expiry.failures, expiry.absences) == ((1, 0) if seen else (0, 1))
    driven.check()


def test_an_attempt_of_which_no_word_ever_came_is_not_counted_ten_times() -> None:
    """F5: runner_absent; with heartbeat_seconds set, at most 10 times."""
    driven = Driven()
    driven.trigger("t1", heartbeat_seconds=10, max_attempts=2)
    driven.advance(86_400)
    assert driven.final("t1") == "failed"
    expiries = driven.events_of(events.LeaseExpired)
    assert [(e.failures, e.absences) for e in expiries] == [
        *((0, number) for number in range(1, 11)), (1, 10), (2, 10)]  # fmt: skip
    assert driven.dispatched() == ["t1"] * 12
    delays = [(e.retry_at - d.at) / SECOND for d in driven.decisions for e in d.events
              if isinstance(e, events.LeaseExpired) and e.retry_at]  # fmt: skip
    assert all(0.9 * min(5 * 2**n, 900) <= delay <= 900 for n, delay in enumerate(delays))
    driven.check()


def test_without_a_promised_heartbeat_every_lost_attempt_counts() -> None:
    """F5, case 55: attempts are counted at their start; no third one."""
    driven = Driven()
    driven.trigger("t1", max_attempts=2)
    for _ in range(5):
        driven.crash()
        driven.advance(LEASE + 20)
    assert driven.dispatched() == ["t1", "t1"]
    assert driven.final("t1") == "failed"


@pytest.mark.parametrize("heartbeat", [None, 30])
def test_heartbeat_deadlines_start_anew_at_take_over_and_leases_dont(heartbeat: int | None) -> None:
    """F9: silence while nobody read the statuses is no silence; a lease that was promised is kept."""
    driven = Driven()
    driven.trigger("t1", timeout_seconds=600, heartbeat_seconds=heartbeat)
    driven.status("t1", "running")
    driven.skip(500)
    driven.crash()
    driven.advance(29.999999)
    assert driven.running() == ["t1"]
    assert driven.told("revoked") == []
    driven.advance(0.000001)
    assert driven.running() == (["t1"] if heartbeat is None else [])
    driven.advance(370)
    assert driven.events_of(events.LeaseExpired)
    driven.check()


def test_a_lease_kept_by_heartbeats_starts_anew_at_take_over() -> None:
    """F9: a long run that was alive all the time is not revoked because of our outage."""
    driven = Driven()
    driven.trigger("t1", timeout_seconds=100, heartbeat_seconds=30)
    for _ in range(40):
        driven.advance(20)
        driven.status("t1", "heartbeat")
    driven.skip(500)
    driven.crash()
    driven.advance(29.999999)
    driven.status("t1", "heartbeat")
    driven.advance(29)
    assert driven.running() == ["t1"]
    assert driven.told("revoked") == []
    driven.advance(1)
    assert driven.running() == []
    driven.check()


def test_a_finished_that_waited_through_an_outage_beats_the_lease() -> None:
    """F9: no timer fires before the input that was there."""
    driven = Driven()
    driven.trigger("t1")
    driven.skip(LEASE + 100)
    driven.crash()
    driven.finish("t1")
    driven.fire()
    assert driven.final("t1") == "finished"
    assert driven.told("revoked") == []


# F9


def test_what_is_due_together_comes_in_order() -> None:
    """F9: leases, grace, retries, then the rest, each by deadline and id."""
    driven = Driven(default_limit="unlimited")
    for id in ("b-lease", "a-lease"):
        driven.trigger(id, timeout_seconds=50)
    driven.trigger("z-early-lease", timeout_seconds=49)
    for id in ("d-grace", "c-grace"):
        driven.trigger(id)
        driven.stop(id)
    driven.trigger("e-retry", max_attempts=2)
    driven.fail("e-retry")
    driven.trigger("future", available_at=at_seconds(2))
    driven.trigger("f-future-expiry", available_at=at_seconds(900), expires_at=at_seconds(1))
    decisions = len(driven.decisions)
    driven.skip(400)
    driven.fire()
    order = [decision.command.id for decision in driven.decisions[decisions:] if decision.command.type == "timer"]
    assert order[:3] == ["z-early-lease", "a-lease", "b-lease"]
    assert order[3:5] == ["c-grace", "d-grace"]
    started = driven.dispatched()
    assert started.index("e-retry", started.index("e-retry") + 1) > 0
    assert driven.final("f-future-expiry") == "expired"
    assert order[-1] == "f-future-expiry"
    driven.check()


def test_timers_fire_a_bounded_number_at_a_time() -> None:
    """F1, F9: the caller's limit; what is left comes next."""
    driven = Driven(default_limit="unlimited", verified=False)
    for number in range(30):
        driven.trigger(f"t{number}", timeout_seconds=1)
    driven.skip(400)
    assert driven.partition.fire_timers(driven.now, 10) == 10
    assert len(driven.agent().executions) == 20
    assert driven.partition.fire_timers(driven.now, 100) == 20
    assert driven.partition.fire_timers(driven.now, 100) == 0


def test_the_next_deadline_is_never_later_than_the_first_timer() -> None:
    """F9: within 1 s without other traffic, so the caller must know when."""
    driven = Driven()
    assert driven.partition.next_deadline_us() is None
    driven.trigger("t1", available_at=at_seconds(100), expires_at=at_seconds(50))
    assert driven.partition.next_deadline_us() == T0 + 50 * SECOND
    driven.stop("t1")
    driven.advance(101)
    driven.trigger("t2", heartbeat_seconds=7)
    assert driven.partition.next_deadline_us() == driven.now + 7 * SECOND


def test_a_decisions_time_never_goes_back() -> None:
    """F9: at = the latest of the clock and the partition's last at, also after a restart."""
    driven = Driven()
    driven.skip(100)
    driven.trigger("t1")
    driven.now = T0
    driven.trigger("t2")
    assert driven.last.at == T0 + 100 * SECOND
    assert driven.partition.clock_behind_us(T0) == 100 * SECOND
    assert driven.partition.clock_behind_us(T0 + 101 * SECOND) == 0
    driven.crash()
    driven.trigger("t3")
    assert driven.last.at == T0 + 100 * SECOND
    assert driven.agent().triggers["t3"].created_at == T0 + 100 * SECOND
    driven.now = T0 + 200 * SECOND
    driven.check()


@pytest.mark.parametrize("after", ["crash", "rebuild"])
def test_no_wake_up_is_lost_when_the_timers_are_built_anew(after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """F9, cases 23 and 29: one that was put off becomes available while another agent decides, then the timers are new.

    A partition's time is past the deadline although its timer has not come yet.
    """
    if after == "rebuild":
        monkeypatch.setattr("streams.partition._TIMERS_STALE_MAX", 0)
    driven = Driven()
    driven.trigger("running")
    driven.trigger("put off")
    driven.control("reschedule", trigger_id="put off", available_at=at_seconds(50))
    driven.finish("running")
    driven.skip(60)
    driven.trigger("elsewhere", "B")
    if after == "crash":
        driven.crash()
    else:
        for _ in range(200):
            driven.status("elsewhere", "heartbeat", "B")
        assert len(driven.partition._timers) < 50
    driven.fire()
    assert driven.running() == ["put off"]
    driven.check()


def test_heartbeats_leave_no_growing_heap_of_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    """F6, F9: a timer is never taken back, but the heap is built anew before it is large."""
    monkeypatch.setattr("streams.partition._TIMERS_STALE_MAX", 100)
    driven = Driven(default_limit=5, verified=False)
    driven.partition._timers_max = 100
    for number in range(5):
        driven.trigger(f"t{number}", heartbeat_seconds=600)
    for _ in range(2000):
        driven.status("t1", "heartbeat")
    assert len(driven.partition._timers) <= 130
    driven.advance(600)
    assert driven.running() == []


# E5


@pytest.mark.parametrize("place", ["waiting", "future", "retrying", "agent paused", "behind a paused one"])
def test_a_waiting_trigger_expires_at_its_time(place: str) -> None:
    """E5: wherever it waits, to the microsecond; it never starts afterwards."""
    driven = Driven()
    fields: Json = {"expires_at": at_seconds(30), "conversation_id": "c"}
    if place == "waiting":
        driven.trigger("running")
    if place == "future":
        fields["available_at"] = at_seconds(60)
    if place == "agent paused":
        driven.configure()
        driven.control("pause")
    if place == "behind a paused one":
        driven.trigger("head", conversation_id="c")
        driven.status("head", "paused")
    driven.trigger("t1", **fields)
    if place == "retrying":
        driven.advance(29)
        driven.fail("t1")
    driven.advance_to(T0 + 30 * SECOND - 1)
    assert driven.final("t1") is None
    driven.advance_to(T0 + 30 * SECOND)
    assert driven.final("t1") == "expired"
    started = driven.dispatched().count("t1")
    driven.advance(7200)
    driven.check()
    assert driven.dispatched().count("t1") == started == (place == "retrying")


def test_running_and_paused_ones_dont_expire() -> None:
    """E5: a waiting trigger ends then."""
    driven = Driven(default_limit=2)
    for id in ("running", "paused"):
        driven.trigger(id, expires_at=at_seconds(10))
    driven.status("paused", "paused")
    driven.advance(20)
    assert driven.running() == ["running"]
    assert driven.agent().triggers["paused"].state == "paused"
    driven.control("resume_trigger", trigger_id="paused")
    driven.fire()
    assert driven.final("paused") == "expired", "it waits again, and its time is over"
    assert driven.dispatched() == ["running", "paused"]
    driven.check()


@pytest.mark.parametrize("seconds", [-100, 0])
@pytest.mark.parametrize("full", [False, True])
def test_a_trigger_that_is_over_at_its_acceptance_expires_there(seconds: float, full: bool) -> None:
    """E5: accepted and expired in one decision; never dispatched, nothing of it is left."""
    driven = Driven()
    if full:
        driven.trigger("running")
    decision = driven.trigger("t1", expires_at=at_seconds(seconds), message="m", payload=1)
    assert [event.type for event in decision.events if event.type != "agent_created"] == ["accepted", "expired"]
    assert driven.final("t1") == "expired"
    assert "t1" not in driven.dispatched()
    assert not [key for key in driven.rows if b'"text"' in key]
    driven.check()


def test_an_expired_one_never_starts_although_its_timer_is_late() -> None:
    """E5, C3: after an outage the freed slot goes to the next."""
    driven = Driven()
    driven.trigger("running")
    driven.trigger("late", expires_at=at_seconds(60))
    driven.trigger("next")
    driven.skip(100)
    driven.crash()
    driven.finish("running")
    assert driven.running() == ["next"]
    assert driven.final("late") == "expired"
    driven.check()


# Texts


def test_texts_of_people_are_in_no_decision_and_in_no_row_but_their_own() -> None:
    """events.md: only as {sha256, bytes}, in commands, events and refusals."""
    driven = Driven()
    secret = "the secret of people"
    driven.configure(max_backlog_depth=0)
    driven.trigger("t1", message=secret, payload={"nested": [secret]}, max_attempts=2)
    driven.fail("t1", error=secret, result={"also": secret})
    driven.advance(10)
    driven.trigger("refused", message=secret, payload=secret)
    driven.trigger("invalid", message=secret, max_attempts=0)
    driven.status("t1", "paused", result=secret)
    driven.stop("t1")
    assert all(secret.encode() not in value for value in driven.values)
    command = json.loads(driven.values[1])["command"]
    assert set(command["message"]) == set(command["payload"]) == {"sha256", "bytes"}
    assert command["message"]["bytes"] == len(secret)
    assert not any(secret.encode() in row for key, row in driven.rows.items() if not key.startswith(b'["text"'))
    assert [record["kind"] for record in driven.texts] == ["message", "error", "result", "result"]


def test_the_texts_row_lives_as_long_as_its_trigger_and_serves_every_attempt() -> None:
    """design.md: a row of their own, written once."""
    driven = Driven()
    driven.trigger("t1", message="m", payload=[1])
    driven.fail("t1")
    driven.crash()
    driven.advance(10)
    assert (driven.dispatch("t1")["message"], driven.dispatch("t1")["payload"]) == ("m", [1])
    assert [key for key in driven.rows if b'"text"' in key]
    driven.finish("t1")
    assert not [key for key in driven.rows if b'"text"' in key]
    driven.trigger("t2")
    assert not [key for key in driven.rows if b'"text"' in key]
    assert "message" not in driven.dispatch("t2")


@pytest.mark.parametrize("payload", [0, False, "", [], {}, 1.5, "text"])
def test_any_json_is_a_payload(payload: Any) -> None:
    """events.md: also those that look like nothing."""
    driven = Driven(twice=True)
    driven.trigger("t1", payload=payload)
    assert driven.dispatch("t1")["payload"] == payload
    driven.check()


def test_the_policy_is_in_every_decision() -> None:
    """events.md."""
    driven = Driven()
    driven.trigger("t1")
    assert {decision.policy for decision in driven.decisions} == {limits.POLICY}
