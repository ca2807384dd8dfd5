"""F8, C5: the same command again, whenever, gets its first answer and has no effect; other content is a conflict."""

import json
from itertools import product
from typing import Any

import pytest

from streams import CONTROLS, STATUSES, TRIGGERS
from streams.rules import events, limits
from streams.rules.order import SECOND
from tests.driving import Driven, Json, at_seconds

DAY = 86_400
TRIGGER: Json = {"type": "trigger", "v": 1, "id": "t1", "agent_id": "A", "conversation_id": "c1", "message": "do it",
                 "payload": {"a": 1, "b": [2]}, "requested_by": "u"}  # fmt: skip


def answered_again(driven: Driven, topic: str, value: Json, **ignored: Any) -> None:
    before = driven.state()
    decisions = driven.send(topic, value)
    assert len(decisions) == 1
    assert decisions[0].ignored is not None, decisions[0].refusal
    assert decisions[0].ignored.reason == "duplicate"
    for name, expected in ignored.items():
        assert getattr(decisions[0].ignored, name) == expected, name
    assert decisions[0].events == ()
    assert driven.state() == before
    driven.check()


def test_a_trigger_again_in_each_state_gets_the_first_answer_and_the_present_state() -> None:
    """F8, cases 108 and 112."""
    driven = Driven(default_limit=1)
    driven.trigger("other")
    driven.send(TRIGGERS.name, TRIGGER)
    answered_again(driven, TRIGGERS.name, TRIGGER, first_seq=2, state="waiting")
    driven.finish("other")
    answered_again(driven, TRIGGERS.name, TRIGGER, first_seq=2, state="running")
    driven.status("t1", "paused")
    answered_again(driven, TRIGGERS.name, TRIGGER, first_seq=2, state="paused")
    driven.control("resume_trigger", trigger_id="t1")
    driven.fail("t1", retryable=False)
    answered_again(driven, TRIGGERS.name, TRIGGER, first_seq=2, state="failed")
    assert json.loads(driven.values[-1])["command"]["repeats"] == 2


@pytest.mark.parametrize("end", ["finished", "failed", "stopped", "expired", "refused"])
def test_a_trigger_again_after_its_end(end: str) -> None:
    """F8: also after it ended or was refused; nothing is dispatched."""
    driven = Driven(default_limit=1)
    value = TRIGGER | ({"expires_at": at_seconds(5)} if end == "expired" else {})
    if end in ("expired", "refused"):
        driven.trigger("other")
    if end == "refused":
        driven.configure(max_backlog_depth=0)
    driven.send(TRIGGERS.name, value)
    if end == "finished":
        driven.finish("t1")
    elif end == "failed":
        driven.fail("t1", retryable=False)
    elif end == "stopped":
        driven.stop("t1")
        driven.status("t1", "stopped")
    elif end == "expired":
        driven.advance(5)
    assert driven.final("t1") == end
    dispatched = driven.dispatched().count("t1")
    for _ in range(3):
        answered_again(driven, TRIGGERS.name, value, state=end)
        driven.advance(DAY)
    driven.crash()
    answered_again(driven, TRIGGERS.name, value, state=end)
    assert driven.dispatched().count("t1") == dispatched


@pytest.mark.parametrize(
    "spelling",
    [
        {"payload": {"b": [2], "a": 1}},
        {"decide_before": "2030-01-01T00:00:00Z"},
        {"unknown": "field"},
        {"expires_at": None, "on_busy": None, "interactive": None},
    ],
)
def test_the_same_content_in_another_spelling_is_a_repeat(spelling: Json) -> None:
    """F8: canonical JSON of the client's fields; null is absent in a trigger."""
    driven = Driven()
    driven.send(TRIGGERS.name, TRIGGER)
    answered_again(driven, TRIGGERS.name, TRIGGER | spelling, first_seq=1)
    driven.send(TRIGGERS.name, json.dumps(dict(reversed(TRIGGER.items())), indent=1, ensure_ascii=False).encode(), b"A")
    assert driven.last.ignored is not None
    assert driven.last.ignored.reason == "duplicate"


@pytest.mark.parametrize(
    "change",
    [
        {"message": "do it!"},
        {"payload": {"a": 1, "b": [2, 3]}},
        {"payload": None},
        {"conversation_id": "c2"},
        {"requested_by": "v"},
        {"kind": "chat"},
        {"created_at": at_seconds(-1)},
        {"expires_at": at_seconds(500)},
        {"max_attempts": 3},
        {"priority": 0},
    ],
)
def test_other_content_under_the_same_id_is_a_conflict(change: Json) -> None:
    """F8: trigger_id_conflict, while it lives and after it ended; the first answer stays."""
    driven = Driven()
    driven.send(TRIGGERS.name, TRIGGER)
    for _ in range(2):
        before = driven.state()
        [decision] = driven.send(TRIGGERS.name, TRIGGER | change)
        assert decision.refusal is not None
        assert decision.refusal.code == "trigger_id_conflict"
        assert driven.state() == before
        answered_again(driven, TRIGGERS.name, TRIGGER, first_seq=1)
        if driven.running():
            driven.finish("t1")


def test_the_digest_of_the_api_counts_and_not_the_times_it_has_set() -> None:
    """F8: content_sha256 travels along."""
    driven = Driven()
    sent = TRIGGER | {"content_sha256": "ab" * 32}
    driven.send(TRIGGERS.name, sent | {"created_at": at_seconds(0)})
    answered_again(driven, TRIGGERS.name, sent | {"created_at": at_seconds(9)}, first_seq=1)
    driven.send(TRIGGERS.name, sent | {"content_sha256": "cd" * 32})
    assert driven.last.refusal is not None
    assert driven.last.refusal.code == "trigger_id_conflict"


def test_without_a_digest_the_codec_computes_one_and_the_log_holds_it() -> None:
    """events.md: else computed by the codec over the record."""
    driven = Driven()
    driven.send(TRIGGERS.name, TRIGGER)
    sha256 = json.loads(driven.values[0])["command"]["content_sha256"]
    assert len(sha256) == 64
    assert driven.agent().triggers["t1"].digest == sha256[:32]


STOPS_AND_CONTROLS: list[tuple[str, Json, Json]] = [
    (TRIGGERS.name, {"type": "stop", "trigger_id": "t1"}, {"trigger_id": "t2"}),
    (TRIGGERS.name, {"type": "stop", "conversation_id": "c1"}, {"conversation_id": "c2"}),
    (TRIGGERS.name, {"type": "stop", "trigger_id": "nobody"}, {"trigger_id": "t2"}),
    (CONTROLS.name, {"type": "pause", "requested_by": "u"}, {"requested_by": "v"}),
    (CONTROLS.name, {"type": "resume", "requested_by": "u"}, {"type": "pause"}),
    (CONTROLS.name, {"type": "archive", "requested_by": "u"}, {"requested_by": "v"}),
    (CONTROLS.name, {"type": "configure", "requested_by": "u", "parallelism_limit": 3}, {"parallelism_limit": 4}),
    (CONTROLS.name, {"type": "configure", "requested_by": "u", "owner": None}, {"display_name": None}),
    (CONTROLS.name, {"type": "reschedule", "requested_by": "u", "trigger_id": "t2",
                     "available_at": at_seconds(60)}, {"available_at": at_seconds(61)}),
    (CONTROLS.name, {"type": "resume_trigger", "requested_by": "u", "trigger_id": "t3"}, {"trigger_id": "t2"}),
]  # fmt: skip


@pytest.mark.parametrize(("topic", "value", "change"), STOPS_AND_CONTROLS)
def test_a_stop_or_control_again_changes_nothing_and_another_under_its_id_is_a_conflict(
    topic: str, value: Json, change: Json
) -> None:
    """F8, case 112: also after something has undone what it did."""
    driven = Driven(default_limit=1)
    driven.send(TRIGGERS.name, TRIGGER)
    driven.trigger("t2")
    driven.trigger("t3")
    value |= {"v": 1, "id": "x", "agent_id": "A"}
    driven.send(topic, value)
    seq = driven.decisions[3].seq
    answered_again(driven, topic, value, first_seq=seq)
    driven.configure(parallelism_limit=2)
    driven.control("resume")
    driven.advance(DAY)
    driven.crash()
    answered_again(driven, topic, value, first_seq=seq)
    before = driven.state()
    [decision] = driven.send(topic, value | change)
    assert decision.refusal is not None
    assert decision.refusal.code == "trigger_id_conflict"
    assert driven.state() == before
    answered_again(driven, topic, value, first_seq=seq)


def test_a_pause_that_is_delivered_again_after_the_resume_changes_nothing() -> None:
    """Case 46."""
    driven = Driven()
    driven.trigger("t1")
    driven.control("pause", id="p")
    driven.control("resume", id="r")
    driven.crash()
    driven.control("pause", id="p")
    assert driven.agent().row.paused is False


def test_ids_of_triggers_stops_and_controls_do_not_collide() -> None:
    """F8."""
    driven = Driven()
    assert driven.trigger("x").refusal is None
    assert driven.control("pause", id="x").events
    assert driven.stop("x", id="x").events
    assert driven.configure("A", id="x", owner="u").refusal is not None, "but two controls do"
    assert len({key for key in driven.rows if b'"remembered"' in key}) == 2


def test_ids_of_different_agents_do_not_collide() -> None:
    """F8, case 143: a trigger is (agent_id, trigger_id)."""
    driven = Driven()
    for agent_id in ("A", "a", "A:x", "7"):
        assert driven.trigger("x", agent_id, conversation_id="A").refusal is None
        assert driven.running(agent_id) == ["x"]
    driven.check()


@pytest.mark.parametrize("code", ["request_expired", "invalid_record", "folder", "trigger_id_conflict"])
def test_what_may_be_answered_otherwise_next_time_is_never_remembered(code: str) -> None:
    """F8: logged, never remembered."""
    driven = Driven()
    driven.trigger("t0")
    wrongs: dict[str, Json] = {
        "request_expired": {"decide_before": at_seconds(-1)},
        "invalid_record": {"max_attempts": 0},
        "folder": {"environment_id": "e", "folder": "relative"},
        "trigger_id_conflict": {"message": "x"},
    }
    id = "t0" if code == "trigger_id_conflict" else "t1"
    decision = driven.trigger(id, **wrongs[code])
    assert decision.refusal is not None
    assert decision.refusal.code == ("invalid_record" if code == "folder" else code)
    assert driven.agent().remembered == {}
    assert driven.trigger("t1").refusal is None


@pytest.mark.parametrize("first", ["live", "finished", "refused", "new"])
def test_an_invalid_choice_never_replaces_the_answer_under_its_id(first: str) -> None:
    """F8, B2: agent_on_busy_invalid is said before the id is looked up."""
    driven = Driven(default_limit=1)
    driven.configure(max_backlog_depth=0)
    if first == "refused":
        driven.trigger("other")
    if first != "new":
        driven.send(TRIGGERS.name, TRIGGER)
    if first == "finished":
        driven.finish("t1")
    wrong = TRIGGER | {"on_busy": "later"}
    for _ in range(2):
        [decision] = driven.send(TRIGGERS.name, wrong)
        assert decision.refusal is not None
        assert decision.refusal.code == "agent_on_busy_invalid"
        driven.check()
    if first == "new":
        [decision] = driven.send(TRIGGERS.name, TRIGGER)
        assert decision.refusal is not None
        assert decision.refusal.code == "trigger_id_conflict"
    else:
        state = {"live": "running"}.get(first, first)
        answered_again(driven, TRIGGERS.name, TRIGGER, state=state)


STATUSES_ONCE = ["finished", "failed", "stopped", "paused"]


@pytest.mark.parametrize(("first", "second"), list(product(STATUSES_ONCE, [*STATUSES_ONCE, "running", "heartbeat"])))
def test_a_word_after_the_last_one_of_an_attempt_is_ignored_with_the_reason(first: str, second: str) -> None:
    """F3, cases 16, 65 and 120: nothing is freed twice, final states stay."""
    driven = Driven(default_limit=1)
    driven.send(TRIGGERS.name, TRIGGER)
    driven.status("t1", first)
    before = driven.state()
    [decision] = driven.status("t1", second)
    assert decision.ignored is not None
    live = first in ("failed", "paused")
    expected = "duplicate" if first == second == "paused" else "stale" if live else "after_final"
    assert decision.ignored.reason == expected
    assert driven.state() == before
    driven.trigger("t2")
    assert driven.running() == ["t2"]
    [decision] = driven.status("t1", second)
    assert decision.events == ()
    assert driven.running() == ["t2"]
    driven.check()


def test_every_record_sent_twice_has_the_effect_of_one() -> None:
    """F8, case 112: a whole life with each record doubled."""
    outcomes = []
    for twice in (False, True):
        driven = Driven(default_limit=2, twice=twice)
        driven.configure(id="k1", parallelism_limit=2, owner="u")
        for number in range(6):
            driven.trigger(f"t{number}", conversation_id=f"c{number % 4}", message="m", payload=number)
        driven.finish("t0", result={"ok": True})
        driven.fail("t1", error="no")
        driven.status("t2", "paused")
        driven.stop("t3", id="s1")
        driven.control("pause", id="k2")
        driven.advance(61)
        driven.control("resume", id="k3")
        driven.control("archive", id="k4")
        driven.advance(4000)
        outcomes.append(
            (driven.dispatched(), {key: row.state for key, row in driven.agent().remembered.items()}, driven.texts)
        )
        driven.check()
    assert outcomes[0][:2] == outcomes[1][:2]
    plain = [{**record, "execution_id": None} for record in outcomes[0][2]]
    assert plain == [{**record, "execution_id": None} for record in outcomes[1][2]]


def test_a_redelivery_by_kafka_is_no_repeat_and_leaves_no_trace() -> None:
    """F1: what lies below the stored position is skipped."""
    driven = Driven()
    driven.send(TRIGGERS.name, TRIGGER)
    driven.finish("t1")
    driven.redeliver()
    assert len(driven.decisions) == 2


# Forgetting


def test_ids_are_forgotten_after_seven_days_by_an_event() -> None:
    """F8: to the microsecond; then the id is new."""
    driven = Driven()
    driven.send(TRIGGERS.name, TRIGGER)
    driven.finish("t1")
    driven.stop("nobody", id="s1")
    driven.control("pause", id="k1")
    driven.advance(7 * DAY - 0.000001)
    assert len(driven.agent().remembered) == 3
    assert driven.partition.remembered == 3
    driven.advance(0.000001)
    assert driven.agent().remembered == {}
    assert driven.partition.remembered == 0
    assert not [key for key in driven.rows if b'"remembered"' in key]
    [forgotten] = driven.events_of(events.Forgotten)
    assert [(id.kind, id.id) for id in forgotten.ids] == [("trigger", "t1"), ("stop", "s1"), ("control", "k1")]
    assert forgotten.early is False
    driven.control("resume")
    [decision] = driven.send(TRIGGERS.name, TRIGGER)
    assert decision.refusal is None
    assert driven.running() == ["t1"]
    driven.check()


def test_a_live_triggers_id_is_never_forgotten() -> None:
    """F8: it is remembered by its own row, however long it waits, and seven days from its end."""
    driven = Driven()
    driven.configure()
    driven.control("pause")
    driven.send(TRIGGERS.name, TRIGGER)
    driven.advance(20 * DAY)
    answered_again(driven, TRIGGERS.name, TRIGGER, state="waiting")
    driven.control("resume")
    driven.finish("t1")
    driven.advance(6 * DAY)
    answered_again(driven, TRIGGERS.name, TRIGGER, state="finished")


@pytest.mark.parametrize("crashes", [False, True])
def test_many_ids_are_forgotten_in_bounded_steps_in_one_order(crashes: bool) -> None:
    """F1, F8: at most 50 in a decision; the same after a restore, whatever the order of the rows."""
    driven = Driven(default_limit="unlimited")
    with driven.held():
        for number in range(120):
            driven.trigger(f"t{number:03}")
    with driven.held():
        for number in reversed(range(120)):
            driven.finish(f"t{number:03}")
    if crashes:
        driven.rows = dict(sorted(driven.rows.items(), reverse=True))
        driven.crash()
    driven.advance(7 * DAY + 1)
    forgotten = [event.ids for event in driven.events_of(events.Forgotten)]
    assert [len(ids) for ids in forgotten] == [50, 50, 20]
    assert [id.id for ids in forgotten for id in ids] == [f"t{number:03}" for number in range(120)]
    driven.check()


def test_conversations_are_forgotten_ninety_days_after_their_last_outcome() -> None:
    """E2."""
    driven = Driven()
    driven.trigger("t1", conversation_id="c1")
    driven.finish("t1")
    driven.advance(50 * DAY)
    driven.trigger("t2", conversation_id="c1")
    driven.fail("t2", retryable=False)
    driven.advance(90 * DAY - 0.000001)
    assert driven.agent().conversations["c1"].outcome == "failed"
    driven.advance(0.000001)
    assert driven.agent().conversations == {}
    assert driven.events_of(events.Forgotten)[-1].conversations == ("c1",)
    assert not [key for key in driven.rows if b'"conversation"' in key]
    driven.check()


@pytest.mark.parametrize(
    ("end", "outcome"), [("finished", "finished"), ("failed", "failed"), ("stopped", "stopped"), ("expired", "stopped")]
)
def test_a_conversation_keeps_the_outcome_of_its_newest_trigger(end: str, outcome: str) -> None:
    """Words: expired counts as stopped."""
    driven = Driven()
    driven.trigger("t0", conversation_id="c")
    driven.finish("t0")
    driven.trigger(
        "t1", conversation_id="c", max_attempts=1, **({"expires_at": at_seconds(0)} if end == "expired" else {})
    )
    if end != "expired":
        driven.status("t1", end)
    assert driven.agent().conversations["c"].outcome == outcome


def test_too_many_ids_are_forgotten_early_the_oldest_of_all_agents_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """F8: a cap per partition; earlier than seven days is said so."""
    monkeypatch.setattr(limits, "REMEMBERED_IDS_MAX", 100)
    driven = Driven(default_limit="unlimited")
    for number in range(60):
        driven.trigger(f"a{number:02}", "A")
        driven.finish(f"a{number:02}", "A")
        driven.now += SECOND
        driven.stop(f"b{number:02}", "B", id=f"s{number:02}")
        driven.now += SECOND
    driven.fire()
    assert driven.partition.remembered <= 100
    forgotten = driven.events_of(events.Forgotten)
    assert all(event.early for event in forgotten)
    gone = {id.id for event in forgotten for id in event.ids}
    assert "a00" in gone
    oldest_kept = min(row.at for agent in driven.partition.agents.values() for row in agent.remembered.values())
    assert oldest_kept > min(d.at for d in driven.decisions)
    assert all(sum(len(e.ids) for e in d.events if isinstance(e, events.Forgotten)) <= 50 for d in driven.decisions)
    driven.check()


def test_early_forgetting_keeps_up_with_any_number_of_new_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """F8: at most so many, also when more come between two looks at the timers than one step may forget."""
    monkeypatch.setattr(limits, "REMEMBERED_IDS_MAX", 100)
    driven = Driven()
    for number in range(4):
        with driven.held():
            for other in range(200):
                driven.stop("nobody", id=f"s{number}-{other}")
        driven.partition.fire_timers(driven.now, 100)
        driven.commit()
        assert driven.partition.remembered <= 100
    driven.check()


def test_the_early_forgetting_stops_at_the_cap() -> None:
    """F8: nothing is forgotten early below the cap."""
    driven = Driven()
    for number in range(5):
        driven.stop("nobody", id=f"s{number}")
    driven.fire()
    assert driven.events_of(events.Forgotten) == []
    assert driven.partition.next_deadline_us() == driven.now + 7 * DAY * SECOND


def test_two_hundred_commands_of_one_instant_are_all_told_apart() -> None:
    """Case 75: a frozen clock."""
    driven = Driven(default_limit=10)
    for number in range(70):
        driven.trigger(f"t{number}")
        driven.stop(f"t{number}", id=f"s{number}")
        driven.configure(id=f"k{number}", parallelism_limit=1 + number % 9)
    assert len({(d.agent_id, d.seq) for d in driven.decisions}) == len(driven.decisions) == 210
    executions = [d["execution_id"] for d in driven.dispatches if d["type"] == "dispatch"]
    assert len(set(executions)) == len(executions)
    driven.check()
    statuses = [key for key in driven.partition.positions if key == STATUSES.name]
    assert statuses == []
