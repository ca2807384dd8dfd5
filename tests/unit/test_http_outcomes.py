"""What clients are told of triggers in a decision that tells of several, or ends the one that they named."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from api.http.tasks import end_has_text
from api.http.views import timeline
from api.http.writes import _control_outcome, _outcome, _stop_told
from streams.rules import events
from streams.rules.events import Decision
from streams.rules.order import SECOND
from tests.driving import Driven, at_seconds

# Tasks


TEXTS: list[tuple[str, dict[str, Any], bool]] = [
    ("finished", {}, False),
    ("finished", {"result": "r"}, True),
    ("failed", {"error": "e", "retryable": False}, True),
    ("failed", {"retryable": False}, False),
    ("stopped", {"error": "e"}, True),
    ("paused", {"error": "e"}, True),
]


@pytest.mark.parametrize(("status", "fields", "expected"), TEXTS)
def test_a_text_is_that_of_the_attempt_whose_runner_gave_it(
    status: str, fields: dict[str, Any], expected: bool
) -> None:
    driven = Driven()
    driven.trigger("t0")
    driven.trigger("t1", expires_at=at_seconds(30))
    driven.skip(31)
    [decision] = driven.status("t0", status, **fields)
    assert [e.trigger_id for e in driven.events_of(events.Expired)] == ["t1"]
    assert decision is driven.last
    assert (end_has_text(decision, "t0"), end_has_text(decision, "t1")) == (expected, False)


def test_a_text_of_an_attempt_that_was_found_by_its_time_is_its_own() -> None:
    driven = Driven()
    driven.trigger("t0")
    driven.advance(1)
    [decision] = driven.finish("t0", execution_id=None, at=at_seconds(1), result="r")
    assert end_has_text(decision, "t0")


# Asks


def test_an_ask_that_has_lost_its_payload_has_failed() -> None:
    driven = Driven(delivers=False)
    driven.trigger("t", worker=True, interactive=True, on_busy="ask")
    lose_payload(driven)
    answered = next(decision for decision in driven.decisions if "t" in decision.settles)
    assert _outcome(answered, "t") == (202, {"status": "failed", "position": None, "reason": None})


# Controls


def lose_payload(driven: Driven) -> None:
    driven.partition.lose_payload("A", "t", driven.now)
    driven.commit()
    driven._work_off()


def resumed_without_payload() -> Decision:
    driven = Driven()
    driven.trigger("t", message="m")
    lose_payload(driven)
    driven.status("t", "paused")
    return driven.control("resume_trigger", trigger_id="t")


def approved_late() -> Decision:
    driven = Driven()
    driven.trigger("t", approval_required=True, expires_at=at_seconds(30))
    driven.skip(31)
    return driven.control("approve", trigger_id="t")


def rescheduled_late() -> Decision:
    driven = Driven()
    driven.trigger("t", available_at=at_seconds(500), expires_at=at_seconds(30))
    driven.skip(31)
    return driven.control("reschedule", trigger_id="t", available_at=at_seconds(0))


@pytest.mark.parametrize(
    ("ended", "status"),
    [(resumed_without_payload, "failed"), (approved_late, "expired"), (rescheduled_late, "expired")],
)
def test_a_control_that_ends_its_trigger_says_so(ended: Any, status: str) -> None:
    decision = ended()
    assert any(events.is_end(event) for event in decision.events)
    assert _control_outcome(decision, "t")["status"] == status


def test_a_control_says_whether_its_trigger_waits_or_runs_whatever_becomes_of_others() -> None:
    driven = Driven()
    driven.trigger("t", approval_required=True)
    driven.trigger("late", expires_at=at_seconds(30), approval_required=True)
    driven.skip(31)
    assert _control_outcome(driven.control("approve", trigger_id="t"), "t")["status"] == "running"
    driven.trigger("u", approval_required=True)
    assert _control_outcome(driven.control("approve", trigger_id="u"), "u") == {"status": "queued"}
    moved = driven.control("reschedule", trigger_id="u", available_at=at_seconds(500))
    assert _control_outcome(moved, "u") == {"status": "queued", "available_at": at_seconds(500)}


@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_a_stop_of_a_conversation_names_only_whom_it_told_itself(runs: bool, waits: bool) -> None:
    """An interrupt that was due meanwhile tells another runner in the same decision."""
    driven = Driven(default_limit=2)
    driven.trigger("r", conversation_id="other")
    driven.trigger("mine" if runs else "full", conversation_id="c" if runs else "d")
    if waits or not runs:
        driven.trigger("w", conversation_id="c")
    due: dict[str, Any] = {"interactive": True, "on_busy": "interrupt", "available_at": at_seconds(10)}
    driven.trigger("i", conversation_id="other", **due)
    driven.skip(11)
    decision = driven.stop(conversation_id="c")
    told = [event.trigger_id for event in decision.events if isinstance(event, events.StopRequested)]
    assert told == [*(["mine"] if runs else []), "r"]
    assert _stop_told(decision) == (["mine"] if runs else [])


# Timelines


def test_a_timeline_tells_nothing_of_another_agents_trigger_with_the_same_id() -> None:
    driven = Driven()
    driven.configure("B")
    driven.trigger("t", conversation_id="c")
    for id in ("t", "u"):
        driven.trigger(id, "B", conversation_id=f"c-{id}", depends_on=[{"agent_id": "A", "conversation_id": "c"}])
    driven.stop("t", "B")
    driven.finish("t")
    of_others = {type(event) for event in driven.events_of() if isinstance(event, events.OF_OTHERS)}
    assert of_others == set(events.OF_OTHERS)
    entries = timeline("t", [row(decision) for decision in driven.decisions if decision.agent_id == "A"])
    assert [entry["event"] for entry in entries] == ["accepted", "placed", "dispatched", "finished"]


def row(decision: Decision) -> dict[str, Any]:
    return {
        "seq": decision.seq,
        "decided_at": datetime.fromtimestamp(decision.at / SECOND, UTC),
        "command_type": decision.command.type,
        "record": json.loads(events.write_decision(decision)),
        "refusal_code": None,
        "ignored_reason": None,
    }
