"""F2, F3, F5 and the texts: what runners say of attempts, and how often a failed one is tried again."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams import STATUSES
from streams.rules import events, limits
from streams.rules.backoff import backoff_microseconds
from streams.rules.order import SECOND
from tests.driving import Driven, Json, at_seconds


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
