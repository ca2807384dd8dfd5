"""A1-A3, A6 and the slots: an agent's limit, where it comes from, and what changing it does."""

import json
from typing import Any

import pytest

from streams import CONTROLS, TRIGGERS
from streams.rules import events, limits
from tests.driving import Driven, Json


def filled(limit: int | str, count: int) -> Driven:
    """An agent of that limit with so many triggers, each in its own conversation."""
    driven = Driven(default_limit=limit)
    for number in range(count):
        driven.trigger(f"t{number:02}")
    return driven


@pytest.mark.parametrize("limit", range(1, 11))
def test_exactly_as_many_run_as_the_limit_says(limit: int) -> None:
    """A1, A2."""
    driven = filled(limit, 12)
    assert len(driven.running()) == limit
    assert len(driven.waiting()) == 12 - limit
    driven.check()


def test_unlimited_starts_everything() -> None:
    """A1: only site resources bound it."""
    driven = filled("unlimited", 60)
    assert len(driven.running()) == 60
    assert driven.agent().row.parallelism_limit == "unlimited"
    driven.check()


ODD_LIMITS: list[Any] = [
    0, -1, 11, 100, -2147483649, 2147483648, 9223372036854775808, 10**400, 3.0, 1.5, True, False, "", "3", "Unlimited",
    "unlimited ", "none", [], [3], {}, {"max": 3},
]  # fmt: skip


@pytest.mark.parametrize("limit", ODD_LIMITS, ids=lambda limit: json.dumps(limit)[:20])
@pytest.mark.parametrize("exists", [False, True])
def test_an_odd_limit_is_refused_and_the_old_one_stays(limit: Any, exists: bool) -> None:
    """A1, cases 36 and 38."""
    driven = Driven(default_limit=2)
    if exists:
        driven.configure(parallelism_limit=4)
    decision = driven.configure(parallelism_limit=limit)
    assert decision.refusal is not None
    assert (decision.refusal.code, decision.events) == ("invalid_record", ())
    assert driven.agent().row.created is exists
    for number in range(5):
        driven.trigger(f"t{number}")
    assert len(driven.running()) == (4 if exists else 2)


@pytest.mark.parametrize("literal", [b"1e400", b"NaN", b"Infinity", b"-Infinity", b"1E1", b"01", b"0x3", b"+3", b"3."])
def test_an_odd_number_in_json_changes_no_limit(literal: bytes) -> None:
    """A1, G2, case 38: refused where it is JSON, a dead letter where it is none."""
    driven = Driven(default_limit=2)
    driven.trigger("t1")
    before = driven.state()
    value = b'{"type":"configure","v":1,"id":"k","agent_id":"A","requested_by":"u","parallelism_limit":%s}' % literal
    decisions = driven.send(CONTROLS.name, value, key=b"A")
    if decisions:
        assert decisions[0].refusal is not None
        assert decisions[0].refusal.code == "invalid_record"
    else:
        assert len(driven.dead_letters) == 1
    assert driven.state() == before
    driven.trigger("t2")
    assert driven.running() == ["t1", "t2"]


@pytest.mark.parametrize("default", [1, 3, "unlimited"])
@pytest.mark.parametrize("how", ["trigger", "configure", "configure null", "configure without a limit"])
def test_without_a_limit_the_default_of_the_deployment_is_stamped(default: int | str, how: str) -> None:
    """A1, case 41: a redeploy with another default changes no live agent."""
    driven = Driven(default_limit=default)
    if how == "trigger":
        driven.trigger("t0")
    elif how == "configure null":
        driven.configure(parallelism_limit=None)
    else:
        driven.configure(owner="u1")
    created = driven.events_of(events.AgentCreated)
    assert [event.parallelism_limit for event in created] == [default]
    assert json.loads(driven.values[0])["command"]["default_limit"] == default
    driven.defaults = limits.Defaults(7)
    driven.crash()
    assert driven.agent().row.parallelism_limit == default
    driven.configure(display_name="still the old default")
    assert driven.agent().row.parallelism_limit == default


def test_null_goes_back_to_the_default_of_now_and_is_stamped_too() -> None:
    """A1."""
    driven = Driven(default_limit=2)
    driven.configure(parallelism_limit=9)
    driven.defaults = limits.Defaults(3)
    driven.crash()
    driven.configure(parallelism_limit=None)
    assert driven.agent().row.parallelism_limit == 3
    assert driven.events_of(events.Configured)[-1].parallelism_limit == 3
    assert json.loads(driven.values[-1])["command"]["default_limit"] == 3


@pytest.mark.parametrize(("raised", "running"), [(2, 2), (5, 5), (10, 10), ("unlimited", 12)])
def test_raising_the_limit_starts_at_once_the_oldest_first(raised: int | str, running: int) -> None:
    """A3, case 32: no other event is needed."""
    driven = filled(1, 12)
    decision = driven.configure(parallelism_limit=raised)
    assert driven.running() == [f"t{number:02}" for number in range(running)]
    dispatched = [event for event in decision.events if isinstance(event, events.Dispatched)]
    assert len(dispatched) == running - 1
    driven.check()


def test_removing_the_limit_starts_at_once() -> None:
    """A3: null is back to the default, which here is higher."""
    driven = Driven(default_limit=4)
    driven.configure(parallelism_limit=1)
    for number in range(6):
        driven.trigger(f"t{number}")
    driven.configure(parallelism_limit=None)
    assert driven.running() == ["t0", "t1", "t2", "t3"]


@pytest.mark.parametrize("before", [4, "unlimited"])
def test_lowering_the_limit_stops_nothing_and_starts_nothing_until_below(before: int | str) -> None:
    """A3, case 34: four run, two may; the next starts only when one runs."""
    driven = Driven(default_limit=before)
    for number in range(4):
        driven.trigger(f"r{number}")
    driven.configure(parallelism_limit=2)
    driven.trigger("w0")
    driven.trigger("w1")
    assert driven.told("stop_requested") == []
    for ended in ("r0", "r1"):
        driven.finish(ended)
        assert driven.waiting() == ["w0", "w1"]
    driven.finish("r2")
    assert driven.running() == ["r3", "w0"]
    driven.check()


def test_lowering_and_raising_count_what_still_runs() -> None:
    """A2, A3: no permit comes back twice."""
    driven = filled(3, 6)
    driven.configure(parallelism_limit=1)
    driven.configure(parallelism_limit=3)
    assert driven.running() == ["t00", "t01", "t02"]
    driven.finish("t01")
    assert driven.running() == ["t00", "t02", "t03"]


DOORS = ["new work", "reply", "resume", "retry", "schedule", "public link", "limit change", "recovery", "reschedule"]


@pytest.mark.parametrize("door", DOORS)
def test_every_door_waits_while_the_agent_is_full(door: str) -> None:
    """A2, cases 4 and 5: all doors share one count."""
    driven = Driven(default_limit=2)
    if door in ("reply", "resume"):
        driven.trigger("other", conversation_id="c", interactive=True, on_busy="queue")
        driven.status("other", "paused")
    if door == "retry":
        driven.trigger("other")
        driven.fail("other")
    if door == "reschedule":
        driven.trigger("other", available_at="2027-01-01T00:00:00Z")
    driven.trigger("r1")
    driven.trigger("r2")
    if door in ("new work", "schedule", "public link"):
        driven.trigger("other", kind={"new work": "task", "schedule": "schedule", "public link": "public"}[door])
    elif door == "reply":
        driven.trigger("reply", conversation_id="c", interactive=True, on_busy="queue")
    elif door == "resume":
        driven.control("resume_trigger", trigger_id="other")
    elif door == "retry":
        driven.advance(10)
    elif door == "limit change":
        driven.trigger("other")
        driven.configure(parallelism_limit=1)
        driven.configure(parallelism_limit=2)
    elif door == "recovery":
        driven.trigger("other")
        driven.crash()
        driven.fire()
    elif door == "reschedule":
        driven.control("reschedule", trigger_id="other", available_at="2026-03-01T09:59:00Z")
    assert driven.running() == ["r1", "r2"]
    assert driven.waiting() == ["reply" if door == "reply" else "other"]
    driven.check()
    driven.finish("r1")
    assert len(driven.running()) == 2


def test_a_slot_counts_from_the_decision_and_not_from_the_runners_word() -> None:
    """A2: no status has come, the place is taken all the same."""
    driven = Driven(default_limit=1)
    driven.trigger("t1")
    driven.trigger("t2")
    assert (driven.running(), driven.waiting()) == (["t1"], ["t2"])
    driven.status("t1", "running")
    assert (driven.running(), driven.waiting()) == (["t1"], ["t2"])


def test_slot_numbers_are_the_lowest_free() -> None:
    """events.md: slot_number; also after a restore and after lowering."""
    driven = filled(4, 8)

    def slot(trigger_id: str) -> int:
        number: int = driven.dispatch(trigger_id)["slot_number"]
        return number

    assert [slot(f"t{number:02}") for number in range(4)] == [1, 2, 3, 4]
    driven.finish("t02")
    assert slot("t04") == 3
    driven.control("pause")
    driven.finish("t01")
    driven.finish("t00")
    driven.crash()
    driven.control("resume")
    assert [slot("t05"), slot("t06")] == [1, 2]
    driven.configure(parallelism_limit=1)
    for ended in ("t03", "t04", "t05", "t06"):
        driven.finish(ended)
    assert slot("t07") == 1
    driven.check()


# A6


def test_the_first_accepted_trigger_creates_the_agent_without_an_owner() -> None:
    """A6."""
    driven = Driven(default_limit=3)
    decision = driven.trigger("t1")
    assert [event.type for event in decision.events] == ["agent_created", "accepted", "placed", "dispatched"]
    assert driven.agent().row.owner is None


def test_configure_creates_an_agent_with_its_owner() -> None:
    """A6."""
    driven = Driven()
    decision = driven.configure(owner="u1", parallelism_limit=2)
    assert [event.type for event in decision.events] == ["agent_created", "configured"]
    assert (driven.agent().row.owner, driven.agent().row.parallelism_limit) == ("u1", 2)


def test_over_http_only_configure_creates_an_agent() -> None:
    """A6: agent_not_found."""
    driven = Driven()
    value: Json = {"type": "trigger", "v": 1, "id": "t1", "agent_id": "A", "conversation_id": "c"}
    [decision] = driven.send(TRIGGERS.name, value, headers=[("via", b"http")])
    assert decision.refusal is not None
    assert decision.refusal.code == "agent_not_found"
    assert not driven.agent().row.created
    configure: Json = {"type": "configure", "v": 1, "id": "k", "agent_id": "A", "requested_by": "u"}
    driven.send(CONTROLS.name, configure, headers=[("via", b"http")])
    [decision] = driven.send(TRIGGERS.name, {**value, "id": "t2"}, headers=[("via", b"http")])
    assert decision.refusal is None
    assert driven.running() == ["t2"]


@pytest.mark.parametrize("control", ["pause", "resume", "archive", "reschedule", "resume_trigger", "approve"])
def test_other_controls_create_no_agent(control: str) -> None:
    """A6: a refused or ignored record only makes a header {seq, prev}."""
    driven = Driven()
    fields: Json = {"trigger_id": "t"} if control in ("reschedule", "resume_trigger", "approve") else {}
    if control == "reschedule":
        fields["available_at"] = "2026-03-01T10:00:00Z"
    decision = driven.control(control, **fields)
    assert decision.refusal is not None
    assert decision.refusal.code == "agent_not_found"
    assert decision.refusal.limit is None, "there is none yet"
    assert {json.loads(key)[0] for key in driven.rows} == {"agent", "remembered", "partition"}
    assert set(json.loads(driven.rows[b'["agent","A"]'])) == {"seq", "prev"}


def test_a_stop_or_status_for_an_unknown_agent_only_makes_a_header() -> None:
    """A6, case 120."""
    driven = Driven()
    stop = driven.stop("t1")
    assert stop.refusal is not None
    assert stop.refusal.code == "trigger_unknown"
    driven.send("berth.statuses", {"type": "status", "v": 1, "agent_id": "B", "conversation_id": "c",
                                   "execution_id": "kwnovuec-1-1", "status": "finished"})  # fmt: skip
    assert driven.last.ignored is not None
    assert driven.last.ignored.reason == "unknown"
    assert set(json.loads(driven.rows[b'["agent","B"]'])) == {"seq", "prev"}
    driven.trigger("t1")
    assert driven.last.events[0].type == "agent_created"
    assert driven.last.seq == 2


def test_settings_are_changed_one_by_one_and_null_is_the_default() -> None:
    """events.md: absent is unchanged, null is back to the default; only what changed is in the event."""
    driven = Driven(default_limit=2)
    driven.configure(parallelism_limit=3, owner="u1", display_name="One", max_backlog_depth=5,
                     default_timeout_seconds=60, agent_type="claude")  # fmt: skip
    driven.configure(owner="u2")
    row = driven.agent().row
    assert (row.parallelism_limit, row.owner, row.display_name, row.max_backlog_depth) == (3, "u2", "One", 5)
    assert json.loads(driven.values[-1])["events"] == [{"type": "configured", "owner": "u2"}]
    driven.configure(owner=None, max_backlog_depth=None, default_timeout_seconds=None, agent_type=None)
    assert json.loads(driven.values[-1])["events"][0] == {
        "type": "configured", "agent_type": None, "max_backlog_depth": 1000, "default_timeout_seconds": None,
        "owner": None,
    }  # fmt: skip
    unchanged = driven.configure(parallelism_limit=3)
    assert unchanged.ignored is not None
    assert unchanged.ignored.reason == "unchanged"
    driven.check()


SERIAL: list[Json] = [{"serial": True}, {"agent_type": "acp"}, {"default_environment_id": "e"}]


@pytest.mark.parametrize("fields", SERIAL)
@pytest.mark.parametrize("limit", [2, 10, "unlimited"])
def test_a_serial_agent_has_no_higher_limit_and_nothing_is_half_applied(fields: Json, limit: int | str) -> None:
    """A4: refused as a whole, in one command or in a later one."""
    driven = Driven(default_limit=2)
    driven.trigger("t1")
    before = driven.state()
    decision = driven.configure(owner="u", parallelism_limit=limit, **fields)
    assert decision.refusal is not None
    assert decision.refusal.code == "agent_parallelism_limit_unsupported"
    assert driven.state() == before
    driven.configure(**fields)
    before = driven.state()
    decision = driven.configure(owner="u", parallelism_limit=limit)
    assert decision.refusal is not None
    assert decision.refusal.code == "agent_parallelism_limit_unsupported"
    assert driven.state() == before
    driven.check()


@pytest.mark.parametrize("fields", SERIAL)
def test_becoming_serial_sets_the_limit_to_one_in_the_same_event(fields: Json) -> None:
    """A4, A3: what runs goes on; nothing starts until none runs."""
    driven = Driven(default_limit=2)
    for number in range(4):
        driven.trigger(f"t{number}")
    [event] = driven.configure(**fields).events
    assert event.model_dump(include={"type", "parallelism_limit"}) == {"type": "configured", "parallelism_limit": 1}
    assert (driven.agent().limit, driven.running()) == (1, ["t0", "t1"])
    driven.finish("t0")
    assert driven.running() == ["t1"]
    driven.finish("t1")
    assert driven.running() == ["t2"]
    undone: Json = dict.fromkeys(fields)
    driven.configure(**undone)
    assert driven.agent().limit == 1, "what it was is not remembered"
    driven.configure(parallelism_limit=2)
    assert driven.running() == ["t2", "t3"]
    driven.check()


@pytest.mark.parametrize("limit", [1, None])
def test_a_serial_agent_may_be_told_its_limit_again(limit: int | None) -> None:
    """A4: 1, or the deployment's default whatever that is."""
    driven = Driven(default_limit="unlimited")
    assert driven.configure(serial=True, parallelism_limit=limit).refusal is None
    assert driven.agent().limit == 1
    driven.check()


@pytest.mark.parametrize("fields", [{"serial": False}, {"run_budget": None}, {"default_folder": None}])
def test_the_defaults_may_be_sent(fields: Json) -> None:
    """A4: they change nothing."""
    assert Driven().configure(**fields).refusal is None
