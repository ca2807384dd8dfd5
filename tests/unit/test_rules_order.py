"""B6, C1-C5: who is older, who starts first, and who keeps a place."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.rules.order import first_availability, format_instant, order_key, parse_instant
from tests.driving import T0, Driven, at_seconds

INSTANTS = st.integers(-62_135_596_800_000_000, 253_402_300_799_999_999)


@given(INSTANTS)
def test_an_instant_is_written_and_read_back_to_the_microsecond(instant: int) -> None:
    """C1: from the year 1 to 9999."""
    assert parse_instant(format_instant(instant)) == instant


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("2026-03-01T13:00:00+03:00", "2026-03-01T10:00:00Z"),
        ("2026-03-01T10:00:00.5Z", "2026-03-01T10:00:00.500000Z"),
        ("2026-03-01t10:00:00z", "2026-03-01T10:00:00Z"),
        ("2026-03-01 10:00:00Z", "2026-03-01T10:00:00Z"),
        ("2026-03-01T09:59:59.9999999Z", "2026-03-01T09:59:59.999999Z"),
        ("2026-03-01T10:00:00.000001999Z", "2026-03-01T10:00:00.000001Z"),
        ("2026-02-28T23:30:00-10:30", "2026-03-01T10:00:00Z"),
        ("2024-02-29T00:00:00+00:00", "2024-02-29T00:00:00Z"),
        ("2026-03-29T02:30:00+01:00", "2026-03-29T01:30:00Z"),
    ],
)
def test_times_are_compared_as_instants(text: str, same: str) -> None:
    """C1, case 71: whatever zone they were written in; digits past the sixth are cut."""
    assert parse_instant(text) == parse_instant(same)


NO_TIMES = [
    "2026-03-01T10:00:00", "2026-03-01", "10:00:00Z", "", "now", "2026-03-01T10:00Z", "2026-13-01T10:00:00Z",
    "2026-02-30T10:00:00Z", "2026-03-01T24:00:00Z", "2026-03-01T10:60:00Z", "2026-03-01T10:00:61Z",
    "2026-03-01T10:00:00.Z", "2026-03-01T10:00:00+24:00", "2026-03-01T10:00:00+0300", "2026-03-01T10:00:00 Z",
    "2026-03-01T10:00:00ZZ", " 2026-03-01T10:00:00Z", "2026-03-01T10:00:00Z\n", "1772359200", "+2026-03-01T10:00:00Z",
    "0000-01-01T00:00:00Z", "10000-01-01T00:00:00Z", "0001-01-01T00:00:00+00:01", "9999-12-31T23:59:59-00:01",
    "٢٠٢٦-03-01T10:00:00Z", "2026-03-01T10:00:00.1234567890Z",
]  # fmt: skip


@pytest.mark.parametrize("text", NO_TIMES)
@pytest.mark.parametrize("field", ["created_at", "available_at", "expires_at", "decide_before"])
def test_what_is_no_time_with_a_zone_is_refused_and_never_guessed(text: str, field: str) -> None:
    """C1, case 71; also times whose instant lies outside of the calendar, which could not be written."""
    with pytest.raises(ValueError, match=r"must be a time|no time of the calendar"):
        parse_instant(text)
    driven = Driven()
    decision = driven.trigger("t1", **{field: text})
    assert decision.refusal is not None
    assert decision.refusal.code == "invalid_record"


@pytest.mark.parametrize("text", ["0001-01-01T00:00:00Z", "9999-12-31T23:59:59.999999Z"])
@pytest.mark.parametrize("field", ["created_at", "available_at", "expires_at", "decide_before"])
def test_the_ends_of_the_calendar_are_times_like_others(text: str, field: str) -> None:
    """C1: nothing overflows, in any field, and the decision is written."""
    driven = Driven()
    driven.trigger("t1", **{field: text})
    driven.trigger("t2", available_at="9999-12-31T23:59:59.999999Z")
    driven.advance(3600)
    driven.check()


def started_in_order(driven: Driven) -> list[str]:
    """Finish what runs until nothing waits; the order in which all were started."""
    while driven.running():
        driven.finish(driven.running()[0])
    return driven.dispatched()


def test_microseconds_decide() -> None:
    """C1, case 67: ids in the opposite order."""
    driven = Driven()
    driven.trigger("running")
    for id, micros in (("a", 300), ("m", 200), ("z", 100)):
        driven.trigger(id, created_at=at_seconds(-10 + micros / 1e6))
    assert driven.waiting() == ["z", "m", "a"]
    assert started_in_order(driven) == ["running", "z", "m", "a"]


def test_of_those_available_together_the_first_created_starts_first() -> None:
    """C1: ids in the opposite order."""
    driven = Driven()
    driven.trigger("running")
    for id, created in (("a", -1), ("b", -2), ("c", -3)):
        driven.trigger(id, created_at=at_seconds(created), available_at=at_seconds(0))
    assert driven.waiting() == ["c", "b", "a"]
    assert started_in_order(driven) == ["running", "c", "b", "a"]


UTF8_ORDER = [
    *("A", "Z", "a", "aa", "a\u0301", "z", "\u00e9", "\u0416", "\u6f22", "\ud7ff", "\ufb01", "\uff21", "\uffee"),
    *("\U00010000", "\U0001f600"),
]


def test_ids_compare_by_their_utf8_bytes() -> None:
    """C1: as COLLATE "C"; an astral character comes after the last of the basic plane, unlike in UTF-16."""
    driven = Driven()
    driven.trigger("running")
    shuffled = UTF8_ORDER.copy()
    random.Random(7).shuffle(shuffled)
    for id in shuffled:
        driven.trigger(id, created_at=at_seconds(-1))
    assert driven.waiting() == UTF8_ORDER == sorted(UTF8_ORDER, key=str.encode)
    assert "\uffee".encode("utf-16-be") > "\U00010000".encode("utf-16-be")
    assert started_in_order(driven)[1:] == UTF8_ORDER
    driven.check()


IDS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=3)
TIMES = st.integers(0, 3)


@given(st.lists(st.tuples(TIMES, TIMES, IDS), unique_by=lambda row: row[2], max_size=12))
def test_the_order_is_that_of_available_created_and_id(rows: list[tuple[int, int, str]]) -> None:
    """C1, C2."""
    by_key = sorted(rows, key=lambda row: order_key(*row))
    assert by_key == sorted(rows, key=lambda row: (row[0], row[1], row[2].encode()))


def test_a_batch_with_one_stamp_starts_by_id_each_time() -> None:
    """C1, case 69: also after a replay."""
    ids = [f"t{number:02}" for number in range(50)]
    orders = []
    for seed in (1, 2):
        driven = Driven()
        shuffled = ids.copy()
        random.Random(seed).shuffle(shuffled)
        with driven.held():
            driven.trigger("0", created_at=at_seconds(-100))
            for id in shuffled:
                driven.trigger(id, created_at=at_seconds(-50))
        driven.redeliver()
        orders.append(started_in_order(driven))
    assert orders == [["0", *ids]] * 2


@pytest.mark.parametrize(
    ("created", "available", "expected"),
    [
        (None, None, (0, 0)),
        (-100, None, (-100, -100)),
        (100, None, (100, 0)),
        (None, 50, (0, 50)),
        (-100, 50, (-100, 50)),
        (None, -100, (0, -100)),
        (-300, None, (-300, -300)),
        (-301, None, (-301, -300)),
        (-86_400, None, (-86_400, -300)),
        (None, -86_400, (0, -300)),
        (-86_400, -300.000001, (-86_400, -300)),
    ],
)
def test_absent_and_backdated_times(
    created: float | None, available: float | None, expected: tuple[float, float]
) -> None:
    """C1: absent created_at is the acceptance, absent available_at the earlier of both, never over 300 s before it."""

    def instant(seconds: float | None) -> int | None:
        return None if seconds is None else T0 + round(seconds * 1_000_000)

    assert first_availability(instant(created), instant(available), T0) == tuple(map(instant, expected))
    driven = Driven()
    times = {"created_at": created, "available_at": available}
    driven.trigger("t1", **{name: at_seconds(seconds) for name, seconds in times.items() if seconds is not None})
    row = driven.agent().triggers["t1"]
    assert (row.created_at, row.available_at) == tuple(map(instant, expected))


def test_a_backdated_trigger_precedes_nobody_who_waits_longer_than_the_window() -> None:
    """C1: nobody precedes everybody for ever."""
    driven = Driven()
    driven.trigger("running")
    driven.trigger("old")
    driven.advance(301)
    driven.trigger("backdated", created_at="2020-01-01T00:00:00Z", available_at="2020-01-01T00:00:00Z")
    assert driven.waiting() == ["old", "backdated"]


def test_the_oldest_starts_first_whatever_priority_and_class_say() -> None:
    """C2: they are stored and shown and never change the order."""
    driven = Driven()
    driven.trigger("running")
    driven.trigger("first", created_at=at_seconds(-3), priority=-5, execution_class="background")
    driven.trigger("second", created_at=at_seconds(-2), priority=100)
    driven.trigger("third", created_at=at_seconds(-1), priority=10**9, kind="chat", interactive=True, on_busy="queue")
    assert started_in_order(driven) == ["running", "first", "second", "third"]


def test_a_future_trigger_holds_up_nobody_and_starts_in_time() -> None:
    """C3, cases 27 and 29: without any other traffic."""
    driven = Driven()
    driven.trigger("later", created_at=at_seconds(-50), available_at=at_seconds(30))
    driven.trigger("now")
    assert driven.running() == ["now"]
    driven.finish("now")
    driven.advance(29.999999)
    assert driven.running() == []
    driven.advance(0.000001)
    assert driven.running() == ["later"]
    driven.check()


def test_one_agents_backlog_holds_up_no_other() -> None:
    """C2, case 25."""
    driven = Driven()
    driven.configure("A", parallelism_limit=1)
    driven.configure("B", parallelism_limit=5)
    for number in range(300):
        driven.trigger(f"a{number}", "A", created_at=at_seconds(-100))
    for number in range(3):
        driven.trigger(f"b{number}", "B")
    assert len(driven.running("B")) == 3


def test_a_retry_keeps_everything_but_its_availability() -> None:
    """C4, case 59: id, created_at, payload, requester, settings as they were accepted."""
    driven = Driven(twice=True)
    driven.configure(default_timeout_seconds=60)
    driven.trigger("t1", created_at=at_seconds(-7), payload={"a": [1]}, message="m", requested_by="u1", priority=3)
    before = driven.agent().triggers["t1"]
    kept = (
        before.created_at,
        before.requested_by,
        before.timeout_seconds,
        before.priority,
        before.digest,
        before.place,
    )
    driven.configure(default_timeout_seconds=900, owner="somebody else")
    driven.fail("t1")
    row = driven.agent().triggers["t1"]
    assert row.available_at > driven.now
    assert (row.created_at, row.requested_by, row.timeout_seconds, row.priority, row.digest, row.place) == kept
    driven.advance(10)
    first, second = [dispatch for dispatch in driven.dispatches if dispatch["type"] == "dispatch"]
    changed = {name for name in first if first[name] != second[name]}
    assert changed == {"execution_id", "attempt", "lease_until", "dispatched_at"}
    assert second["payload"] == {"a": [1]}
    driven.check()


def test_a_retry_queues_by_its_new_availability() -> None:
    """C4, case 139: behind those that became available before it, before those after."""
    driven = Driven()
    driven.trigger("t1")
    driven.trigger("earlier")
    driven.fail("t1")
    driven.trigger("later", available_at=at_seconds(60))
    assert driven.running() == ["earlier"]
    driven.advance(100)
    assert driven.waiting() == ["t1", "later"]


def test_being_passed_over_changes_nothing() -> None:
    """C5, cases 31 and 73: a hundred wake-ups while the agent is full."""
    driven = Driven()
    for number in range(20):
        driven.trigger(f"t{number:02}")
    before, decisions = driven.state(), len(driven.decisions)
    for _ in range(100):
        driven.advance(1)
        driven.status("t00", "heartbeat")
    after = driven.state()
    assert after["A"]["waiting"] == before["A"]["waiting"]
    assert len(driven.decisions) == decisions
    driven.finish("t00")
    assert driven.running() == ["t01"]
    assert driven.agent().triggers["t02"].attempt == 0


def test_timers_that_come_twice_or_late_change_nothing() -> None:
    """C5: what no longer holds when it comes is dropped."""
    driven = Driven()
    driven.trigger("t1", available_at=at_seconds(5), expires_at=at_seconds(50))
    driven.control("reschedule", trigger_id="t1", available_at=at_seconds(3))
    driven.advance(3)
    assert driven.running() == ["t1"]
    driven.finish("t1")
    decisions = len(driven.decisions)
    driven.advance(86_400)
    assert len(driven.decisions) == decisions
    driven.check()


# B6


def test_a_conversation_never_has_two_running_attempts() -> None:
    """B6."""
    driven = Driven(default_limit="unlimited")
    for number in range(5):
        driven.trigger(f"t{number}", conversation_id="c")
    assert driven.running() == ["t0"]
    assert driven.last.events[0].reason == "conversation_busy"  # type: ignore[union-attr]
    assert started_in_order(driven) == ["t0", "t1", "t2", "t3", "t4"]


def test_a_retrying_head_keeps_its_later_triggers_waiting_and_no_other_conversation() -> None:
    """B6, C3."""
    driven = Driven(default_limit=1)
    driven.trigger("t1", conversation_id="c")
    driven.trigger("t2", conversation_id="c")
    driven.trigger("other")
    driven.fail("t1")
    assert driven.running() == ["other"]
    driven.finish("other")
    assert driven.running() == []
    driven.advance(5)
    assert driven.running() == ["t1"]
    driven.finish("t1")
    assert driven.running() == ["t2"]


def test_a_place_is_taken_when_a_trigger_is_first_available_and_kept() -> None:
    """B6: an older one that comes later, or becomes available later, stands behind."""
    driven = Driven()
    driven.trigger("running")
    driven.trigger("future", conversation_id="c", created_at=at_seconds(-200), available_at=at_seconds(10))
    driven.trigger("first", conversation_id="c")
    driven.trigger("backdated", conversation_id="c", created_at=at_seconds(-100))
    driven.advance(10)
    driven.trigger("last", conversation_id="c")
    driven.control("reschedule", trigger_id="first", available_at=at_seconds(11))
    driven.advance(5)
    assert started_in_order(driven) == ["running", "first", "backdated", "future", "last"]


def test_a_head_that_is_put_off_keeps_its_place() -> None:
    """B6: reschedule moves the time, not the place."""
    driven = Driven(default_limit=1)
    driven.trigger("running")
    driven.trigger("head", conversation_id="c")
    driven.trigger("next", conversation_id="c")
    driven.control("reschedule", trigger_id="head", available_at=at_seconds(600))
    driven.finish("running")
    assert driven.running() == []
    driven.advance(600)
    assert driven.running() == ["head"]
    driven.check()


def test_stopping_or_expiring_a_head_lets_the_next_start() -> None:
    """B6, case 51: no phantom at the head."""
    driven = Driven(default_limit=1)
    driven.trigger("running")
    driven.trigger("stopped", conversation_id="c")
    driven.trigger("expired", conversation_id="c", expires_at=at_seconds(5))
    driven.trigger("next", conversation_id="c")
    driven.stop("stopped")
    driven.advance(5)
    assert driven.waiting() == ["next"]
    driven.crash()
    driven.finish("running")
    assert driven.running() == ["next"]
    driven.check()


# Position and reason


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("idle", None),
        ("full", "agent_parallelism_limit_reached"),
        ("paused", "agent_paused"),
        ("busy conversation", "conversation_busy"),
        ("paused conversation", "conversation_busy"),
        ("retrying conversation", "conversation_busy"),
        ("future", "not_yet_available"),
    ],
)
def test_an_accepted_trigger_says_whether_it_starts_or_where_and_why_it_waits(given: str, reason: str | None) -> None:
    """events.md: accepted {position, reason}; 0 and no reason: it starts in this decision."""
    driven = Driven(default_limit=1 if given in ("full", "idle") else 3)
    fields = {}
    if given == "paused":
        driven.configure()
        driven.control("pause")
    elif given == "future":
        fields["available_at"] = at_seconds(1)
    elif given != "idle":
        driven.trigger("a", conversation_id="c1" if "conversation" in given else "c0")
        if given == "paused conversation":
            driven.status("a", "paused")
        if given == "retrying conversation":
            driven.fail("a")
    decision = driven.trigger("t", conversation_id="c1", **fields)
    accepted = next(event for event in decision.events if event.type == "accepted")
    assert accepted.reason == reason
    started = [event.type for event in decision.events if event.type == "dispatched"]
    assert bool(started) is (reason is None)
    assert accepted.position == (0 if reason is None else driven.waiting().index("t") + 1)


def test_positions_count_in_start_order() -> None:
    """events.md."""
    driven = Driven()
    driven.trigger("running")
    positions = []
    for id, seconds in (("b", -10), ("a", -20), ("c", -5), ("d", -15)):
        decision = driven.trigger(id, created_at=at_seconds(seconds))
        accepted = decision.events[0]
        positions.append(accepted.position)  # type: ignore[union-attr]
    assert positions == [1, 1, 3, 2]
    assert driven.waiting() == ["a", "d", "b", "c"]


@pytest.mark.parametrize("conversation", ["other", "due"])
def test_a_late_timer_lets_nobody_overtake_who_became_available_before(conversation: str) -> None:
    """C2, F9: while a backlog of input is handled no timer fires; the older one starts first all the same."""
    driven = Driven(default_limit=1)
    driven.trigger("due", conversation_id="due", available_at=at_seconds(10))
    driven.skip(20)
    decision = driven.trigger("new", conversation_id=conversation)
    assert driven.running() == ["due"]
    assert driven.waiting() == ["new"]
    accepted = decision.events[0]
    assert (accepted.position, accepted.reason) == (  # type: ignore[union-attr]
        2, "conversation_busy" if conversation == "due" else "agent_parallelism_limit_reached")  # fmt: skip
    driven.check()
