"""F6, F9, E5: what time does: leases, silence, retries, expiry, and the order in which it is done."""

import json

import pytest

from streams.rules import events
from streams.rules.order import SECOND, parse_instant
from tests.driving import T0, Driven, Json, at_seconds

LEASE = 1800 + 300


def ignored(decisions: list[events.Decision]) -> str | None:
    [decision] = decisions
    assert decision.events == ()
    return decision.ignored.reason if decision.ignored else None


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
        monkeypatch.setattr("streams.timers._STALE_MAX", 0)
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
        assert len(driven.partition._timers._heap) < 50
    driven.fire()
    assert driven.running() == ["put off"]
    driven.check()


def test_heartbeats_leave_no_growing_heap_of_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    """F6, F9: a timer is never taken back, but the heap is built anew before it is large."""
    monkeypatch.setattr("streams.timers._STALE_MAX", 100)
    driven = Driven(default_limit=5, verified=False)
    driven.partition._timers._size_max = 100
    for number in range(5):
        driven.trigger(f"t{number}", heartbeat_seconds=600)
    for _ in range(2000):
        driven.status("t1", "heartbeat")
    assert len(driven.partition._timers._heap) <= 130
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
    """E5: accepted and expired in one decision; never dispatched, only its message is left, to restart it with."""
    driven = Driven()
    if full:
        driven.trigger("running")
    decision = driven.trigger("t1", expires_at=at_seconds(seconds), message="m", payload=1)
    assert [event.type for event in decision.events if event.type != "agent_created"] == ["accepted", "expired"]
    assert driven.final("t1") == "expired"
    assert "t1" not in driven.dispatched()
    assert not [key for key in driven.rows if b'"text"' in key]
    assert [(text["trigger_id"], text["kind"], text["text"]) for text in driven.texts] == [("t1", "message", "m")]
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
