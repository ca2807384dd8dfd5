"""G2, G3: every kind of bad record on every input topic has a stated fate, and the good one behind it is handled."""

import hashlib
import json
from typing import Any

import pytest

from streams import CLAIMS, CONTROLS, SIGNALS, SITE_CONTROLS, STATUSES, TRIGGERS
from streams.rules import limits
from streams.rules.messages import Invalid
from tests.driving import Driven, Json, at_seconds

TRIGGER: Json = {"type": "trigger", "v": 1, "id": "t-bad", "agent_id": "A", "conversation_id": "c-bad"}
STOP: Json = {"type": "stop", "v": 1, "id": "s-bad", "agent_id": "A", "trigger_id": "t1"}
STATUS: Json = {
    "type": "status",
    "v": 1,
    "agent_id": "A",
    "conversation_id": "c1",
    "execution_id": "e",
    "status": "failed",
}
CONFIGURE: Json = {"type": "configure", "v": 1, "id": "k-bad", "agent_id": "A", "requested_by": "u"}
BASES = {TRIGGERS.name: TRIGGER, STATUSES.name: STATUS, CONTROLS.name: CONFIGURE}

UNREADABLE: dict[str, tuple[bytes | None, str]] = {
    "null": (None, "null_value"),
    "empty": (b"", "not_json"),
    "no JSON": (b"{nonsense", "not_json"),
    "half": (b'{"type":"trigger","v":1,"id":"t', "not_json"),
    "two objects": (b"{}{}", "not_json"),
    "byte order mark": (b"\xef\xbb\xbf{}", "not_json"),
    "no UTF-8": (b'{"type":"trigger","id":"\xff\xfe"}', "not_utf8"),
    "surrogates as UTF-8": (b'{"type":"trigger","id":"\xed\xa0\x80"}', "not_utf8"),
    "UTF-16": ('{"type":"trigger"}'.encode("utf-16"), "not_utf8"),
    "list": (b"[1,2]", "not_an_object"),
    "string": (b'"trigger"', "not_an_object"),
    "number": (b"1", "not_an_object"),
    "null as JSON": (b"null", "not_an_object"),
    "NaN": (b'{"type":"trigger","v":1,"id":"t","agent_id":"A","conversation_id":"c","payload":NaN}', "not_json"),
    "endless nesting": (b'{"payload":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not_json: nested too deeply"),
    "object without fields": (b"{}", "missing_field"),
}


def good_one_is_handled(driven: Driven) -> None:
    before = driven.partition.positions
    assert all(driven.offset(topic) == offset for topic, offset in list(before.items())), "nothing was left out"
    driven._offsets = dict(driven.partition.positions)
    assert driven.trigger("good").events
    assert driven.running() == ["good"]
    driven.check()


@pytest.mark.parametrize("topic", [TRIGGERS.name, STATUSES.name, CONTROLS.name])
@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_names_nobody_is_a_dead_letter_with_its_place_and_the_next_is_handled(topic: str, kind: str) -> None:
    """G2, case 91."""
    value, reason = UNREADABLE[kind]
    driven = Driven()
    driven.send(topic, value, key=b"some key")
    [letter] = driven.dead_letters
    assert (letter.key, letter.value) == (b"some key", value)
    headers = dict(letter.headers)
    assert headers.pop("reason").decode().startswith(reason)
    assert headers == {"topic": topic.encode(), "partition": b"0", "offset": b"0", "at": at_seconds(0).encode()}
    assert not driven.decisions
    good_one_is_handled(driven)


@pytest.mark.parametrize("topic", [SITE_CONTROLS.name, CLAIMS.name, SIGNALS.name])
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"{}", b"missing_field: type"),
        (None, b"null_value"),
        (b"\xff", b"not_utf8"),
        (b'{"type":"dance","v":1,"site":"default"}', b"unknown_type"),
        (b'{"type":"trigger","v":1,"id":"t","agent_id":"A","conversation_id":"c"}', b"unknown_type"),
    ],
)
def test_records_of_sites_that_nobody_waits_for_are_dead_letters(
    topic: str, value: bytes | None, reason: bytes
) -> None:
    """G2: also on the topics that only deciders write."""
    driven = Driven()
    driven.send(topic, value, key=b"default")
    assert [dict(letter.headers)["reason"] for letter in driven.dead_letters] == [reason]
    assert not driven.site_decisions
    good_one_is_handled(driven)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"type": "pause_site"}, "missing_field: requested_by"),
        ({"type": "configure_site", "requested_by": "u", "capacity": 10_001}, "invalid_field: capacity"),
        ({"type": "configure_site", "requested_by": "u", "capacity": True}, "invalid_field: capacity"),
        ({"type": "configure_site", "requested_by": "u", "capacity": -1}, "invalid_field: capacity"),
        ({"type": "gate", "requested_by": "u", "scope": "team", "name": "o"}, "invalid_field: scope"),
        ({"type": "pause_site", "requested_by": "u", "v": 2}, "future_schema"),
        ({"type": "dance", "requested_by": "u"}, "unknown_type"),
    ],
)
def test_a_control_of_a_site_that_cannot_be_read_is_a_refusal_of_that_site(value: Json, reason: str) -> None:
    """G2: whoever waits hears of it, and it changes nothing."""
    driven = Driven()
    driven.send(SITE_CONTROLS.name, {"v": 1, "id": "k", "site": "default", **value}, key=b"default")
    [decision] = driven.site_decisions
    assert decision.refusal is not None
    assert decision.refusal.code == "invalid_record"
    assert (decision.refusal.reason or "").startswith(reason)
    assert (decision.command_id, decision.settles) == ("k", ("k",))
    assert not driven.dead_letters
    driven.check()


ODD: dict[str, object] = {
    "true": True,
    "false": False,
    "0": 0,
    "1": 1,
    "-1": -1,
    "3.0": 3.0,
    "1.5": 1.5,
    "huge": 10**40,
    "text": "x",
    "number as text": "3",
    "empty": "",
    "list": [],
    "object": {},
    "list of null": [None],
    "2**63": 2**63,
}
STRINGS = {"id", "agent_id", "conversation_id", "kind", "requested_by", "execution_id", "trigger_id", "owner"}
ALLOWED: dict[str, set[str]] = {
    "v": {"1"},
    "interactive": {"true", "false"},
    "worker": {"true", "false"},
    "approval_required": {"true", "false"},
    "retryable": {"true", "false"},
    "serial": {"true", "false"},
    "priority": {"0", "1", "-1"},
    "timeout_seconds": {"1"},
    "heartbeat_seconds": {"1"},
    "max_attempts": {"1"},
    "default_timeout_seconds": {"1"},
    "max_backlog_depth": {"0", "1"},
    "run_budget": {"0", "1"},
    "parallelism_limit": {"1"},
    "depends_on": {"list"},
    "message": {"text", "number as text", "empty"},
    "type": set(),
    "status": set(),
    "phase": set(),
    "created_at": set(),
    "available_at": set(),
    "expires_at": set(),
    "decide_before": set(),
    "at": set(),
    "execution_class": set(),
    "parent": set(),
    "content_sha256": set(),
} | {name: {"text", "number as text"} for name in STRINGS | {"site", "environment_id", "folder", "restarts"}}
FIELDS = {
    TRIGGERS.name: [
        "v", "type", "id", "agent_id", "conversation_id", "kind", "interactive", "message", "requested_by",
        "created_at", "available_at", "expires_at", "decide_before",
        "site", "worker", "environment_id", "folder",
        "execution_class", "parent", "restarts", "priority", "timeout_seconds", "heartbeat_seconds", "max_attempts",
        "depends_on", "approval_required", "content_sha256",
    ],
    STATUSES.name: ["v", "type", "agent_id", "conversation_id", "execution_id", "status", "retryable", "phase", "at"],
    CONTROLS.name: [
        "v", "type", "id", "agent_id", "requested_by", "decide_before", "parallelism_limit", "serial",
        "max_backlog_depth", "run_budget", "default_timeout_seconds", "owner",
    ],
}  # fmt: skip


@pytest.mark.parametrize("topic", FIELDS)
def test_every_field_refuses_every_value_of_another_type(topic: str) -> None:
    """G2, case 38: a boolean is no number, "3" and 3.0 are none either, and nothing is rounded or cut."""
    for field in FIELDS[topic]:
        for name, value in ODD.items():
            if name in ALLOWED[field]:
                continue
            driven = Driven()
            driven.trigger("t1", conversation_id="c1")
            before = driven.state()
            decisions = driven.send(topic, {**BASES[topic], field: value}, key=b"A")
            answered = topic != STATUSES.name and field not in ("id", "agent_id")
            if answered:
                assert [d.refusal and d.refusal.code for d in decisions] == ["invalid_record"], (field, name)
                assert driven.last.command_id == BASES[topic]["id"]
            else:
                assert len(driven.dead_letters) == 1, (field, name)
                assert not decisions
            assert driven.state() == before, (field, name)


@pytest.mark.parametrize("topic", FIELDS)
def test_every_required_field_is_missed(topic: str) -> None:
    """G2: a record without an id names nobody; one without another required field is answered."""
    for field in BASES[topic]:
        if field in ("v", "execution_id") or (topic, field) == (STATUSES.name, "type"):
            continue  # absent v means 1; a status without execution_id is one of a simple upstream (F3)
        driven = Driven()
        driven.send(topic, {name: value for name, value in BASES[topic].items() if name != field}, key=b"A")
        if topic == STATUSES.name or field in ("id", "agent_id"):
            assert dict(driven.dead_letters[0].headers)["reason"] == f"missing_field: {field}".encode()
        else:
            assert driven.last.refusal is not None
            assert (driven.last.refusal.code, driven.last.refusal.reason) == (
                "invalid_record",
                f"missing_field: {field}",
            )


@pytest.mark.parametrize(
    ("topic", "change", "reason"),
    [
        (TRIGGERS.name, {"type": "launch"}, "unknown_type"),
        (TRIGGERS.name, {"type": "status"}, "unknown_type"),
        (CONTROLS.name, {"type": "explode"}, "unknown_type"),
        (TRIGGERS.name, {"v": 2}, "future_schema"),
        (TRIGGERS.name, {"v": 999}, "future_schema"),
        (CONTROLS.name, {"v": 2}, "future_schema"),
        (TRIGGERS.name, {"execution_class": "vip"}, "invalid_field: execution_class"),
        (CONTROLS.name, {"parallelism_limit": "many"}, "invalid_field: parallelism_limit"),
        (TRIGGERS.name, {"conversation_id": "c\x00"}, "invalid_field: conversation_id"),
        (TRIGGERS.name, {"conversation_id": "c\ud800"}, "invalid_field: conversation_id"),
        (TRIGGERS.name, {"requested_by": "\udfff"}, "invalid_field: requested_by"),
        (TRIGGERS.name, {"requested_by": "x" * 201}, "invalid_field: requested_by"),
        (TRIGGERS.name, {"created_at": "2026-03-01T10:00:00"}, "invalid_field: created_at"),
        (TRIGGERS.name, {"depends_on": [{"agent_id": "B", "conversation_id": "c"}] * 101}, "invalid_field: depends_on"),
        (TRIGGERS.name, {"depends_on": [{"agent_id": "B"}]}, "missing_field: depends_on.0.conversation_id"),
        (TRIGGERS.name, {"message": 5}, "invalid_field: message"),
        (TRIGGERS.name, {"message": {"\ud800": 1}}, "invalid_field: message"),
        (TRIGGERS.name, {"message": "x" * (64 * 1024 + 1)}, "invalid_field: message"),
        (TRIGGERS.name, {"message": "\ud800" * (64 * 1024 // 3 + 1)}, "invalid_field: message"),
        (TRIGGERS.name, {"payload": "x" * (256 * 1024 + 1)}, "invalid_field: payload"),
        (TRIGGERS.name, {"payload": ["\ud800", "x" * (256 * 1024)]}, "invalid_field: payload"),
        (TRIGGERS.name, {"payload": float("1e400")}, "invalid_field: payload"),
        (TRIGGERS.name, {"type": "stop", "trigger_id": "t", "conversation_id": "c"}, "invalid_field"),
        (TRIGGERS.name, {"type": "stop", "conversation_id": None}, "invalid_field"),
    ],
)
def test_a_bad_record_that_names_an_agent_and_an_id_is_a_refusal(topic: str, change: Json, reason: str) -> None:
    """G2, G3, case 91: whoever waits for it hears of it; the record itself is in the log as its digest only."""
    driven = Driven()
    value = json.dumps(BASES[topic] | change).encode().replace(b"Infinity", b"1e400")
    driven.send(topic, value, key=b"A")
    decision = driven.last
    assert decision.refusal is not None
    assert decision.refusal.code == "invalid_record"
    assert (decision.refusal.reason or "").startswith(reason)
    sha256 = hashlib.sha256(value).hexdigest()
    command = decision.command
    assert isinstance(command, Invalid)
    assert (command.id, command.sha256, command.bytes) == (BASES[topic]["id"], sha256, len(value))
    assert not driven.agent().row.created
    good_one_is_handled(driven)


@pytest.mark.parametrize("id", ["", "x" * 201, "a\nb", "a\x7f", "a\x85", "a\ud800", 7, None, True, ["a"], {}])
@pytest.mark.parametrize("field", ["id", "agent_id"])
def test_an_id_that_is_none_is_a_dead_letter(field: str, id: object) -> None:
    """G3: 1..200 characters, no control characters, no lone surrogates."""
    driven = Driven()
    driven.send(TRIGGERS.name, {**TRIGGER, field: id}, key=b"A")
    assert len(driven.dead_letters) == 1
    assert not driven.decisions
    good_one_is_handled(driven)


@pytest.mark.parametrize(
    "id", ["a", "x" * 200, "\U0001f600" * 200, "a b", "ünï", "a\u2028b", "a:b/c", '"', "\\", "%2e"]
)
def test_every_other_id_is_kept_as_it_is(id: str) -> None:
    """G3, case 143."""
    driven = Driven()
    driven.trigger(id, conversation_id=id)
    assert driven.running() == [id]
    assert driven.dispatch(id)["trigger_id"] == id
    driven.check()


@pytest.mark.parametrize(
    "text", ["nul \x00 byte", "lone \ud800", "\udfff\ud800", "pair \U0001f600", "\x1b[31m", "", " ", "\\u0000", '"}']
)
@pytest.mark.parametrize("payload", [False, True])
def test_texts_keep_what_kafka_holds(text: str, payload: bool) -> None:
    """G3, case 128: U+0000 and lone surrogates reach the runner and the texts as they came; nobody's slot is kept."""
    driven = Driven(twice=True)
    fields: dict[str, Any] = {"message": text} | ({"payload": {"deep": [text, {text: text}]}} if payload else {})
    driven.trigger("t1", **fields)
    dispatch = driven.dispatch("t1")
    assert {name: dispatch[name] for name in fields} == fields
    assert driven.texts[0]["text"] == text
    driven.finish("t1", result=text)
    assert [record["text"] for record in driven.texts[1:]] == [text]
    driven.trigger("t2")
    driven.fail("t2", error=text, retryable=False)
    assert driven.texts[-1]["text"] == text
    assert driven.running() == []
    driven.check()


def test_an_odd_text_in_a_field_that_nobody_knows_is_ignored_as_the_field_is() -> None:
    """G2, G3: unknown extra fields are ignored, whatever they hold."""
    driven = Driven()
    for number, extra in enumerate(["\ud800", {"\ud800": "\ud800"}, [1e999]]):
        decision = driven.trigger(f"t{number}", title=extra) if number < 2 else driven.trigger(f"t{number}")
        assert decision.refusal is None
    for topic in (STATUSES.name, CONTROLS.name):
        driven.send(topic, {**BASES[topic], "note": "\ud800"}, key=b"A")
    assert driven.dead_letters == []
    assert all(decision.refusal is None for decision in driven.decisions)


def test_obsolete_and_unknown_fields_are_dropped() -> None:
    """G2: maxConcurrentRuns and others have no effect and are not in the log."""
    driven = Driven()
    driven.trigger("t1", maxConcurrentRuns=99, default_limit=9, repeats=7, surprise={"a": [1]})
    command = json.loads(driven.values[0])["command"]
    assert "maxConcurrentRuns" not in command
    assert "surprise" not in command
    assert command["default_limit"] == 1, "a client that sends the decider's own inputs is not believed"
    assert command.get("repeats") is None


def test_a_record_larger_than_one_mebibyte_is_refused_or_a_dead_letter() -> None:
    """G2: oversized."""
    pad = "x" * limits.RECORD_BYTES_MAX
    driven = Driven()
    driven.send(TRIGGERS.name, json.dumps({**TRIGGER, "padding": pad}).encode(), key=b"A")
    assert driven.last.refusal is not None
    assert driven.last.refusal.code == "invalid_record"
    driven.send(TRIGGERS.name, json.dumps({**TRIGGER, "padding": pad}).encode(), key=None)
    driven.send(STATUSES.name, json.dumps({**STATUS, "padding": pad}).encode(), key=b"A")
    driven.send(TRIGGERS.name, pad.encode(), key=b"A")
    driven.send(CONTROLS.name, json.dumps(CONFIGURE).encode(), key=b"k" * limits.RECORD_BYTES_MAX)
    reasons = [dict(letter.headers)["reason"].split(b":")[0] for letter in driven.dead_letters]
    assert reasons == [b"oversized"] * 3
    assert [decision.refusal.code for decision in driven.decisions if decision.refusal] == ["invalid_record"] * 2
    assert driven.partition.positions == {TRIGGERS.name: 3, STATUSES.name: 1, CONTROLS.name: 1}


def test_texts_that_grow_beyond_a_record_when_written_are_refused() -> None:
    """G2: a dispatch must fit a record, or the partition could never write it."""
    driven = Driven()
    odd = "\ud800" + "é" * 50_000 + "\x01" * 150_000
    value = json.dumps({**TRIGGER, "payload": odd}, ensure_ascii=False).encode("utf-8", "surrogatepass")
    value = value.replace("\ud800".encode("utf-8", "surrogatepass"), b"\\ud800")
    assert len(value) <= limits.RECORD_BYTES_MAX
    assert len(odd.encode("utf-8", "surrogatepass")) <= limits.PAYLOAD_BYTES_MAX
    driven.send(TRIGGERS.name, value, key=b"A")
    assert driven.last.refusal is not None
    assert driven.last.refusal.code == "invalid_record"
    assert "more than a dispatch can hold" in (driven.last.refusal.reason or "")
    good_one_is_handled(driven)


@pytest.mark.parametrize("character", ["x", "é", "漢", "\U0001f600", "\n"])
def test_payloads_are_measured_as_utf8_whatever_the_language(character: str) -> None:
    """G3: exactly 256 KiB of UTF-8 pass, one byte more is refused; texts of every script alike."""
    size = len(character.encode()) + (character == "\n")  # as compact JSON
    count = (limits.PAYLOAD_BYTES_MAX - len('[""]')) // size
    driven = Driven()
    assert driven.trigger("t1", payload=[character * count]).refusal is None
    assert driven.dispatch("t1")["payload"] == [character * count]
    refused = driven.trigger("t2", payload=[character * (count + 1)])
    assert refused.refusal is not None
    assert refused.refusal.code == "invalid_record"


def test_the_largest_message_and_payload_fit_into_every_record() -> None:
    """G3: 64 KiB and 256 KiB are accepted and dispatched."""
    driven = Driven()
    driven.trigger(
        "t" * 200, conversation_id="c", message="m" * limits.MESSAGE_BYTES_MAX, payload="p" * limits.PAYLOAD_BYTES_MAX
    )
    dispatch = driven.dispatch("t" * 200)
    assert (len(dispatch["message"]), len(dispatch["payload"])) == (64 * 1024, 256 * 1024)
    assert len(driven.values[0]) < 4096


@pytest.mark.parametrize("status", ["finished", "failed", "paused", "stopped"])
@pytest.mark.parametrize("value", ["é" * 20_000, ["x" * 20_000], "\x00" * 30_000], ids=["text", "list", "nul"])
def test_an_outcome_that_is_too_long_is_cut_for_readers_and_never_keeps_the_slot(status: str, value: object) -> None:
    """G3: error and result have 16 KiB; refusing the status would keep the slot."""
    driven = Driven()
    driven.trigger("t1", max_attempts=1)
    driven.status("t1", status, error=value, result=value)
    assert driven.running() == []
    whole = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    for record in driven.texts:
        assert record["truncated"] is True
        assert len(record["text"].encode()) <= limits.OUTCOME_BYTES_MAX
        assert len(record["text"].encode()) >= limits.OUTCOME_BYTES_MAX - 1
        assert whole.startswith(record["text"])
    assert [record["kind"] for record in driven.texts] == ["error", "result"]
    assert {record["execution_id"] for record in driven.texts} == {driven.dispatch("t1")["execution_id"]}


def test_nesting_as_deep_as_json_readers_allow_passes() -> None:
    """G2: deep, but readable."""
    driven = Driven()
    nested: Any = 1
    for _ in range(150):
        nested = [nested]
    driven.trigger("t1", payload=nested)
    assert driven.dispatch("t1")["payload"] == nested


def test_the_payload_reaches_the_runner_with_its_order_of_keys() -> None:
    """events.md: any JSON, handed to the runner untouched."""
    driven = Driven()
    text = '{"z":1,"a":{"c":[1.5,-0.25,12345678901234567890],"b":null},"":"é\\n"}'
    value = json.dumps(TRIGGER)[:-1] + f', "payload": {text}}}'
    driven.send(TRIGGERS.name, value.encode(), key=b"A")
    sent = next(output.value for output in driven.outputs if output.topic == "berth.dispatches")
    assert sent is not None
    assert f'"payload":{text}}}'.encode() in sent


@pytest.mark.parametrize("limit", [0, 11, True, 2.0, "3", "Unlimited", [1], {}], ids=json.dumps)
def test_a_limit_that_cannot_be_is_named_once_by_its_field(limit: object) -> None:
    """A1; a limit has two forms, and whoever sends neither hears of the field, not of the forms."""
    driven = Driven()
    driven.send(CONTROLS.name, CONFIGURE | {"parallelism_limit": limit}, key=b"A")
    [decision] = driven.decisions
    assert decision.refusal is not None and decision.refusal.code == "invalid_record"
    assert decision.refusal.reason == 'invalid_field: parallelism_limit: must be 1 to 10, or "unlimited"'
