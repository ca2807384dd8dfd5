"""What decisions change in the rows for readers: hand-counted examples, and every event that doesn't fit."""

import json
from typing import Any

import pytest

from projections.row_types import AgentRow, CannotApply
from projections.rows import Named, Rows
from projections.texts import clean_json, clean_text, dead_letter_row, text_row
from streams import DECISIONS
from streams.rules import events
from streams.rules.events import read_decision
from streams.rules.order import SECOND
from tests.driving import T0, Driven


def projected(driven: Driven) -> Rows:
    """All decisions so far, with offsets that have holes."""
    rows = Rows()
    for number, value in enumerate(driven.values):
        rows.apply(DECISIONS.name, 0, 3 * number, read_decision(value), value)
    return rows


def counts(row: AgentRow) -> dict[str, int]:
    names = ("running", "forced", "waiting", "on_hold", "accepted", "attempts", "finished", "failed", "stopped")
    return {name: getattr(row, name) for name in (*names, "expired", "refused", "ignored") if getattr(row, name)}


def test_one_life_by_hand() -> None:
    driven = Driven()
    driven.trigger("t1", conversation_id="c1", kind="chat", message="hi", requested_by="ann", priority=5)
    driven.trigger("t2", conversation_id="c1")
    driven.skip(10)
    driven.finish("t1")
    rows = projected(driven)
    agent = rows.agents["A"]
    assert counts(agent) == {"running": 1, "accepted": 2, "attempts": 2, "finished": 1}
    assert (agent.seq, agent.created, agent.created_at, agent.parallelism_limit) == (3, True, T0, 1)
    first, second = rows.triggers["A", "t1"], rows.triggers["A", "t2"]
    assert (first.state, first.state_since, first.ended_at, first.end_reason) == (
        *("finished", T0 + 10 * SECOND, T0 + 10 * SECOND),
        None,
    )
    assert (first.kind, first.requested_by, first.priority, first.accepted_seq) == ("chat", "ann", 5, 1)
    assert (second.state, second.ended_at, second.place_rank, second.place_number) == ("running", None, 1, 2)
    conversation = rows.conversations["A", "c1"]
    assert (conversation.triggers, conversation.live, conversation.last_outcome) == (2, 1, "finished")
    one, other = rows.attempts.values()
    assert (one.outcome, one.ended_at, one.ended_seq, one.slot_number) == ("finished", T0 + 10 * SECOND, 3, 1)
    assert (other.outcome, other.ended_at, other.dispatched_seq, other.slot_number) == (None, None, 3, 1)
    assert [(row.id, row.seq) for row in sorted(rows.decision_ids)] == [("t1", 1), ("t1", 3), ("t2", 2), ("t2", 3)]


def test_retries_pauses_replies_and_stops_by_hand() -> None:
    driven = Driven(default_limit=3)
    driven.trigger("retried", max_attempts=2)
    driven.fail("retried", phase="preparation")
    waiting = projected(driven)
    assert counts(waiting.agents["A"]) == {"waiting": 1, "accepted": 1, "attempts": 1}
    (attempt,) = waiting.attempts.values()
    assert attempt.retry_at == waiting.triggers["A", "retried"].available_at > T0
    assert attempt.phase == "preparation"
    driven.advance(60)
    driven.fail("retried")
    driven.trigger("paused", conversation_id="c", interactive=True, on_busy="queue")
    driven.status("paused", "paused")
    assert counts(projected(driven).agents["A"]) == {"on_hold": 1, "accepted": 2, "attempts": 3, "failed": 1}
    driven.trigger("reply", conversation_id="c", interactive=True, on_busy="queue")
    driven.stop("reply", requested_by="bob")
    asked = projected(driven).triggers["A", "reply"]
    assert (asked.state, asked.stop_requested_by, asked.stop_requested_at) == ("running", "bob", driven.now)
    assert asked.grace_until == driven.now + 60 * SECOND
    driven.status("reply", "stopped")
    rows = projected(driven)
    assert counts(rows.agents["A"]) == {"accepted": 3, "attempts": 4, "failed": 1, "finished": 1, "stopped": 1}
    replied = rows.triggers["A", "paused"]
    assert (replied.state, replied.end_reason, replied.replied_by) == ("finished", "replied", "reply")
    stopped = rows.triggers["A", "reply"]
    assert (stopped.state, stopped.end_reason, stopped.grace_until) == ("stopped", "runner", None)
    assert rows.conversations["A", "c"].last_outcome == "stopped"


def test_late_double_and_odd_statuses_leave_final_states_final() -> None:
    driven = Driven()
    for id, last in (("done", "finished"), ("failed", "failed")):
        driven.trigger(id)
        driven.status(id, last, retryable=False)
        before = projected(driven).triggers["A", id]
        for late in ("running", "heartbeat", "finished", "failed", "paused", "stopped"):
            driven.status(id, late)
        driven.stop(id)
        driven.trigger(id)
        driven.trigger(id, kind="other content")
        assert projected(driven).triggers["A", id] == before
    agent = projected(driven).agents["A"]
    assert counts(agent) == {
        "accepted": 2,
        "attempts": 2,
        "finished": 1,
        "failed": 1,
        "refused": 2,
        "ignored": 16,
    }


def test_an_expired_lease_says_when_it_was_heard_last() -> None:
    driven = Driven()
    driven.trigger("t", heartbeat_seconds=30)
    driven.skip(7)
    driven.status("t", "running")
    driven.advance(40)
    (attempt,) = (row for row in projected(driven).attempts.values() if row.outcome is not None)
    assert (attempt.outcome, attempt.last_seen_at) == ("lease_expired", T0 + 7 * SECOND)


def test_settings_flags_and_the_archive() -> None:
    driven = Driven()
    driven.configure(parallelism_limit="unlimited", owner="ann", display_name="A %", default_timeout_seconds=60)
    driven.control("pause")
    agent = projected(driven).agents["A"]
    assert (agent.parallelism_limit, agent.owner, agent.display_name, agent.paused) == (None, "ann", "A %", True)
    driven.configure(parallelism_limit=4, owner=None)
    driven.control("resume")
    driven.trigger("t")
    driven.control("archive")
    agent = projected(driven).agents["A"]
    assert (agent.parallelism_limit, agent.owner, agent.paused, agent.archived) == (4, None, False, True)
    driven.configure(max_backlog_depth=7)
    agent = projected(driven).agents["A"]
    assert (agent.archived, agent.max_backlog_depth, agent.default_timeout_seconds) == (False, 7, 60)


def test_only_refused_records_make_a_header_and_no_agent() -> None:
    driven = Driven()
    driven.trigger("t", on_busy="sometime")
    rows = projected(driven)
    assert (rows.agents["A"].created, counts(rows.agents["A"])) == (False, {"refused": 1})
    assert not rows.triggers and not rows.conversations
    (decision,) = rows.decisions
    assert (decision.refusal_code, decision.command_id, decision.settles) == ("agent_on_busy_invalid", "t", ["t"])


def test_a_trigger_id_that_was_forgotten_may_live_again() -> None:
    driven = Driven()
    driven.trigger("t", kind="first")
    driven.finish("t")
    driven.advance(8 * 24 * 3600)
    assert driven.trigger("t", kind="second").events
    rows = projected(driven)
    assert (rows.triggers["A", "t"].kind, rows.triggers["A", "t"].state) == ("second", "running")
    assert counts(rows.agents["A"]) == {"running": 1, "accepted": 2, "attempts": 2, "finished": 1}
    driven.finish("t")
    driven.advance(100 * 24 * 3600)
    assert projected(driven).conversations["A", "c-t"].forgotten


def test_named_rows_are_all_that_is_read_or_changed() -> None:
    """Applying one decision to only the rows that it names gives the same as to all of them."""
    driven = Driven(default_limit=2)
    for id in ("t1", "t2", "t3"):
        driven.trigger(id, conversation_id="c")
    driven.fail("t1")
    driven.stop(conversation_id="c", id="s")
    driven.advance(4000)
    everything = Rows()
    for offset, value in enumerate(driven.values):
        decision = read_decision(value)
        named, part = Named(), Rows()
        named.add(decision)
        conversations = named.conversations | {
            (row.agent_id, row.conversation_id) for key, row in everything.triggers.items() if key in named.triggers
        }
        for kind, keys in (
            *(("agents", named.agents), ("triggers", named.triggers), ("attempts", named.attempts)),
            ("conversations", conversations),
        ):
            of_all = getattr(everything, kind)
            setattr(part, kind, {key: of_all[key] for key in keys if key in of_all})
        part.apply(DECISIONS.name, 0, offset, decision, value)
        for kind in ("agents", "triggers", "attempts", "conversations"):
            getattr(everything, kind).update(getattr(part, kind))
    whole = projected(driven)
    for kind in ("agents", "triggers", "attempts", "conversations"):
        assert getattr(everything, kind) == getattr(whole, kind)


def changed(value: bytes, **event: Any) -> events.Decision:
    """The decision with its first event replaced."""
    content = json.loads(value)
    content["events"][0] = event
    return read_decision(json.dumps(content).encode())


LEASE = {"lease_until": "2026-03-01T11:00:00Z", "slot_number": 1, "forced": False}


@pytest.mark.parametrize(
    ("event", "why"),
    [
        ({"type": "finished", "trigger_id": "t9", "execution_id": "x"}, "never accepted"),
        ({"type": "finished", "trigger_id": "waits", "execution_id": "x"}, "is waiting, not running"),
        ({"type": "finished", "trigger_id": "runs", "execution_id": "x"}, "ends, and"),
        ({"type": "stopped", "trigger_id": "done", "reason": "stop"}, "is finished, not waiting or running"),
        ({"type": "stopped", "trigger_id": "runs", "reason": "stop"}, "attempt None"),
        ({"type": "expired", "trigger_id": "runs"}, "is running, not waiting"),
        ({"type": "replied", "trigger_id": "runs", "by": "t"}, "is running, not paused"),
        ({"type": "resumed", "trigger_id": "done", "available_at": "2026-03-01T11:00:00Z"}, "not paused"),
        ({"type": "placed", "trigger_id": "done", "place": [1, 9]}, "not waiting"),
        ({"type": "dispatched", "trigger_id": "waits", "execution_id": "x", "attempt": 2, **LEASE}, "follows 0"),
        ({"type": "dispatched", "trigger_id": "done", "execution_id": "x", "attempt": 2, **LEASE}, "is finished"),
        ({"type": "agent_created", "parallelism_limit": 1, "max_backlog_depth": 1}, "created before"),
        ({"type": "forgotten", "conversations": ["nobody"]}, "never began"),
        ({"type": "granted", "trigger_id": "waits", "n": 1}, "it has None"),
    ],
)
def test_an_event_that_does_not_fit_is_refused(event: dict[str, Any], why: str) -> None:
    driven = Driven()
    driven.trigger("done")
    driven.finish("done")
    driven.trigger("runs")
    driven.trigger("waits")
    rows = projected(driven)
    driven.trigger("last")
    value = driven.values[-1]
    with pytest.raises(CannotApply, match=why) as refused:
        rows.apply(DECISIONS.name, 0, 77, changed(value, **event), value)
    assert (refused.value.topic, refused.value.partition, refused.value.offset) == (DECISIONS.name, 0, 77)


def test_the_examples_of_the_reference_can_be_projected() -> None:
    """Records as an older or other writer sends them: absent fields mean their defaults."""
    value = (
        b'{"type":"decision","v":1,"agent_id":"A","seq":1,"at":"2026-03-01T10:00:00Z","via":"kafka",'
        b'"cause":{"topic":"berth.triggers","partition":0,"offset":17},"command":{"type":"trigger","id":"t",'
        b'"agent_id":"A","conversation_id":"c","content_sha256":"'
        + b"0"
        * 64
        + b'"},"events":[{"type":"agent_created",'
        b'"parallelism_limit":1,"max_backlog_depth":5},{"type":"accepted","trigger_id":"t",'
        b'"created_at":"2026-03-01T10:00:00Z","available_at":"2026-03-01T10:00:00Z","timeout_seconds":9,'
        b'"max_attempts":3,"position":0,"a_field_of_the_future":1}],"policy":"0","prev":null,"another":{}}'
    )
    rows = Rows()
    rows.apply(DECISIONS.name, 0, 0, read_decision(value), value)
    trigger = rows.triggers["A", "t"]
    assert (trigger.kind, trigger.interactive, trigger.worker, trigger.execution_class, trigger.priority) == (
        *("task", False, False, "standard"),
        None,
    )


# What PostgreSQL can't hold


@pytest.mark.parametrize(
    ("text", "copy"),
    [
        ("", ""),
        ("a\x00b", "a\ufffdb"),
        ("\x00\x00", "\ufffd\ufffd"),
        ("\ud800", "\ufffd"),
        ("x\udfffy", "x\ufffdy"),
        ("\ude00\ud83d", "\ufffd\ufffd"),
        ("\U0001f600", "\U0001f600"),
        ("\ufffd\t\x01", "\ufffd\t\x01"),
    ],
)
def test_texts_are_copied_with_replacements(text: str, copy: str) -> None:
    assert clean_text(text) == copy
    for spelled in (json.dumps({text: [text]}), json.dumps({text: [text]}, ensure_ascii=False)):
        encoded = spelled.encode("utf-8", "surrogatepass")
        try:
            encoded.decode()
        except UnicodeDecodeError:
            continue  # no JSON on a topic: not UTF-8
        assert json.loads(clean_json(encoded)) == {copy: [copy]}


def test_an_escape_that_is_only_spelled_stays() -> None:
    assert json.loads(clean_json(rb'{"a": "\\u0000 \\ud800"}')) == {"a": r"\u0000 \ud800"}


def test_rows_of_texts_and_dead_letters() -> None:
    value = json.dumps({"type": "text", "v": 1, "agent_id": "A", "trigger_id": "t", "kind": "message", "text": "\x00"})
    row = text_row(3, 7, value.encode(), 5)
    assert (row.execution_id, row.content, row.truncated, row.log_partition, row.log_offset) == (
        *("", '"\ufffd"', False),
        *(3, 7),
    )
    headers = [("reason", b"bad \x00 \xff"), ("topic", b"x"), ("partition", b"1"), ("offset", b"9" * 40)]
    letter = dead_letter_row(1, 2, None, b"\x00", headers, 5)
    assert (letter.reason, letter.source_topic, letter.source_partition, letter.source_offset) == (
        *("bad \ufffd \ufffd", "x", 1),
        None,
    )
    assert (letter.key, letter.value) == (None, b"\x00")
    assert dead_letter_row(1, 2, b"k", None, [], 5).reason == "unknown"
