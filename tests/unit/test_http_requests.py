"""What clients may send: every field like the record's, strictly, and nothing that a worker would not take."""

import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from api.http.answers import Outgoing, digest_of_fields
from api.http.app import create_app
from api.http.auth import Caller
from api.http.requests import (
    ConversationRequest,
    GateRequest,
    MessageRequest,
    RequestBody,
    SettingsRequest,
    SiteCapacityRequest,
    StatusReport,
    TriggerRequest,
    id_from_key,
)
from api.http.writes import Arrival, Writes
from streams.rules import limits
from streams.rules.messages import Configure, Message, Status, Trigger
from streams.rules.site_messages import ConfigureSite, Gate, SiteControl
from tests.tokens import AUTHENTICATION, bearer

KNOWN_BY_THE_API = {
    "type",
    "v",
    "agent_id",
    "requested_by",
    "decide_before",
    "content_sha256",
    "default_limit",
    "repeats",
}


def client(hosts: tuple[str, ...] = (), origins: tuple[str, ...] = ()) -> httpx.AsyncClient:
    """The application without Kafka and Postgres: enough for what is refused before either is needed."""
    database_url = "postgresql://nobody@127.0.0.1:1/nothing"
    app = create_app("127.0.0.1:1", 8, database_url, AUTHENTICATION, hosts=hosts, origins=origins)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", headers=bearer())


def test_a_request_has_every_field_of_the_record_that_the_api_does_not_know_itself() -> None:
    assert set(TriggerRequest.model_fields) == set(Trigger.model_fields) - KNOWN_BY_THE_API
    assert set(ConversationRequest.model_fields) == set(TriggerRequest.model_fields)
    assert set(MessageRequest.model_fields) == set(TriggerRequest.model_fields) - {"conversation_id"}
    ours = set(Configure.model_fields) - KNOWN_BY_THE_API - {"id"}
    assert set(SettingsRequest.model_fields) == ours
    assert set(StatusReport.model_fields) == set(Status.model_fields) - KNOWN_BY_THE_API | {"agent_id"}
    sites = set(ConfigureSite.model_fields) - set(SiteControl.model_fields) - {"type"}
    assert set(SiteCapacityRequest.model_fields) == sites
    assert set(GateRequest.model_fields) | {"scope", "name"} | set(SiteControl.model_fields) | {"type"} == set(
        Gate.model_fields
    )


OF_ITS_OWN_TYPE = {
    # Instants and texts are read as what they are in memory there, and stay as they came here.
    "created_at", "available_at", "expires_at", "at", "message", "payload", "error", "result",
    # Unknown fields are ignored there and refused here, also in these.
    "parent", "depends_on",
    # A choice that there is not is a refusal in the log there, and a field that is wrong here.
    "on_busy",
}  # fmt: skip


@pytest.mark.parametrize(
    ("request_model", "record_model"),
    [
        (TriggerRequest, Trigger),
        (SettingsRequest, Configure),
        (StatusReport, Status),
        (SiteCapacityRequest, ConfigureSite),
        (GateRequest, Gate),
    ],
)
def test_a_field_has_the_type_of_the_record(request_model: type[RequestBody], record_model: type[Message]) -> None:
    """Neither takes what the other doesn't."""
    for name in set(request_model.model_fields) & set(record_model.model_fields) - OF_ITS_OWN_TYPE:
        given, logged = (
            TypeAdapter(model.model_fields[name].rebuild_annotation() | None).json_schema()
            for model in (request_model, record_model)
        )
        assert given == logged, name


WRONG: list[tuple[str, Any]] = [
    ("id", ""),
    ("id", "x" * 201),
    ("id", "a\nb"),
    ("id", 3),
    ("conversation_id", ["c"]),
    ("kind", ""),
    ("interactive", "true"),
    ("interactive", 1),
    ("message", 3),
    ("message", "ä" * (limits.MESSAGE_BYTES_MAX // 2 + 1)),
    ("payload", ["x" * limits.PAYLOAD_BYTES_MAX]),
    ("created_at", "2026-03-01T10:00:00"),
    ("created_at", 1_772_359_200),
    ("available_at", "tomorrow"),
    ("expires_at", "2026-02-30T10:00:00Z"),
    ("site", False),
    ("worker", "yes"),
    ("worker", 1),
    ("environment_id", {}),
    ("folder", ""),
    ("folder", "relative"),
    ("folder", "/a/../b"),
    ("organization_id", 7),
    ("department_id", 7),
    ("execution_class", "urgent"),
    ("parent", {"agent_id": "a"}),
    ("parent", {"agent_id": "a", "trigger_id": "t", "more": 1}),
    ("restarts", 1),
    ("priority", "3"),
    ("priority", 2.0),
    ("priority", True),
    ("timeout_seconds", "3"),
    ("timeout_seconds", True),
    ("timeout_seconds", 0),
    ("timeout_seconds", 2.0),
    ("heartbeat_seconds", "30"),
    ("max_attempts", True),
    ("max_attempts", 0),
    ("depends_on", [{"agent_id": "a", "conversation_id": "c"}] * 101),
    ("depends_on", {"agent_id": "a", "conversation_id": "c"}),
    ("approval_required", "no"),
]


@pytest.mark.parametrize(("field", "value"), WRONG, ids=lambda part: json.dumps(part)[:30])
async def test_a_wrong_field_is_refused_and_named(field: str, value: Any) -> None:
    async with client() as http:
        answer = await http.post("/api/agents/a/triggers", json={field: value})
    problem = answer.json()
    assert answer.status_code == 400, problem
    assert problem["code"] in ("invalid_field", "missing_field", "unknown_field")
    assert problem["field"].split(".")[0] == field
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("parallelism_limit", 0),
        ("parallelism_limit", 11),
        ("parallelism_limit", True),
        ("parallelism_limit", 2.0),
        ("parallelism_limit", "3"),
        ("parallelism_limit", "Unlimited"),
        ("parallelism_limit", [1]),
        ("serial", 1),
        ("max_backlog_depth", -1),
        ("max_backlog_depth", "10"),
        ("run_budget", 1.5),
        ("default_timeout_seconds", 0),
        ("owner", ""),
        ("display_name", 7),
    ],
)
@pytest.mark.parametrize("method", ["PUT", "PATCH"])
async def test_a_wrong_setting_is_refused_and_named(method: str, field: str, value: Any) -> None:
    async with client() as http:
        answer = await http.request(method, "/api/agents/a", json={field: value})
    assert (answer.status_code, answer.json()["code"], answer.json()["field"]) == (400, "invalid_field", field)
    if field == "parallelism_limit":
        assert answer.json()["detail"] == 'parallelism_limit: must be 1 to 10, or "unlimited". Nothing was changed.'


@pytest.mark.parametrize("path", ["triggers", "conversations", "conversations/c/messages"])
async def test_an_unknown_field_is_refused(path: str) -> None:
    async with client() as http:
        answer = await http.post(f"/api/agents/a/{path}", json={"message": "x", "on_buzy": "queue"})
    assert (answer.status_code, answer.json()["code"], answer.json()["field"]) == (400, "unknown_field", "on_buzy")


@pytest.mark.parametrize("path", ["triggers", "conversations", "conversations/c/messages"])
@pytest.mark.parametrize("on_busy", ["later", "QUEUE", 1, True, ["queue"]])
async def test_an_invalid_on_busy_comes_before_everything_else_that_is_wrong(path: str, on_busy: Any) -> None:
    async with client() as http:
        answer = await http.post(f"/api/agents/a/{path}", json={"a_field": 1, "on_busy": on_busy, "priority": "x"})
    assert (answer.status_code, answer.json()["code"]) == (400, "agent_on_busy_invalid")


WRONG_LIMITS: list[Any] = [0, 11, -1, True, False, "3", 3.0, [3], {}, "unlimited"]


@pytest.mark.parametrize(
    ("given", "detail"),
    [
        ({}, "max_parallel_tasks is required"),
        ({"max_parallel_tasks": None}, "max_parallel_tasks is required"),
        *[({"max_parallel_tasks": x}, "max_parallel_tasks must be an integer between 1 and 10") for x in WRONG_LIMITS],
    ],
)
async def test_the_words_of_a_wrong_capacity_are_a_contract(given: dict[str, Any], detail: str) -> None:
    async with client() as http:
        answer = await http.put("/api/agents/a/capacity", json=given)
    assert (answer.status_code, answer.json()["detail"]) == (400, detail)


async def test_a_trigger_has_an_id_or_a_key_that_makes_one_and_not_both() -> None:
    async with client() as http:
        answer = await http.post("/api/agents/a/triggers", json={"id": "t"}, headers={"Idempotency-Key": "k"})
    assert (answer.status_code, answer.json()["field"]) == (400, "id")


@pytest.mark.parametrize("key", ["", "x" * 201, "a\tb"])
async def test_a_key_that_cannot_be_used_is_refused(key: str) -> None:
    async with client() as http:
        answer = await http.post("/api/agents/a/triggers", json={}, headers={"Idempotency-Key": key})
    assert (answer.status_code, answer.json()["field"]) == (400, "Idempotency-Key")


def test_an_id_from_a_key_is_that_of_requester_agent_and_key() -> None:
    ids = [id_from_key(agent, key, who) for agent in "ab" for key in "xy" for who in ("ben", "ann")]
    assert len(set(ids)) == 8
    assert ids == [id_from_key(agent, key, who) for agent in "ab" for key in "xy" for who in ("ben", "ann")]


@pytest.mark.parametrize("field", ["maxConcurrentRuns", "requested_by"])
def test_what_is_obsolete_or_not_the_clients_to_say_is_dropped(field: str) -> None:
    request = TriggerRequest.model_validate({field: {"any": "thing"}, "message": "x"})
    assert request.given() == {"message": "x"}


IDS = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=200)
SEGMENTS = st.text(st.characters(exclude_categories=["Cc", "Cs"], exclude_characters="/"), max_size=20).filter(
    lambda segment: segment not in (".", "..")
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=12,
)
INSTANTS = st.datetimes().map(lambda moment: moment.isoformat(timespec="microseconds") + "Z")
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "id": IDS,
    "conversation_id": IDS,
    "kind": IDS | st.sampled_from(["task_assigned", "schedule", "chat"]),
    "interactive": st.booleans(),
    "on_busy": st.sampled_from(["", "ask", "queue", "force", "interrupt"]),
    "message": st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=300),
    "payload": JSON,
    "created_at": INSTANTS,
    "available_at": INSTANTS,
    "expires_at": INSTANTS,
    "site": IDS,
    "worker": st.booleans(),
    "environment_id": IDS,
    "folder": st.lists(SEGMENTS, max_size=5).map(lambda segments: "/" + "/".join(segments)),
    "organization_id": IDS,
    "department_id": IDS,
    "execution_class": st.sampled_from(["standard", "background"]),
    "parent": st.fixed_dictionaries({"agent_id": IDS, "trigger_id": IDS}),
    "restarts": IDS,
    "priority": st.integers(-(2**53), 2**53),
    "timeout_seconds": st.integers(1, limits.TIMEOUT_SECONDS_MAX),
    "heartbeat_seconds": st.integers(1, limits.HEARTBEAT_SECONDS_MAX),
    "max_attempts": st.integers(1, limits.ATTEMPTS_MAX),
    "depends_on": st.lists(st.fixed_dictionaries({"agent_id": IDS, "conversation_id": IDS}), max_size=3),
    "approval_required": st.booleans(),
}


def test_the_strategy_covers_every_field() -> None:
    assert set(FIELDS) == set(TriggerRequest.model_fields)


class Recorded(Exception):  # noqa: N818
    """The record that would have been written."""


class _Recorder:
    """Stands where the log is: keeps what would be written. Only to see records; no decision is made up."""

    async def write(self, command: Outgoing, arrived_seconds: float) -> None:
        raise Recorded(command)


@given(st.fixed_dictionaries({}, optional={name: strategy | st.none() for name, strategy in FIELDS.items()}), IDS)
async def test_what_the_api_takes_a_worker_takes(content: dict[str, Any], agent_id: str) -> None:
    request = TriggerRequest.model_validate(content)
    arrival = Arrival.now(Caller("ann", "person", None, 0.0))
    with pytest.raises(Recorded) as recorded:
        await Writes(_Recorder(), None).trigger(agent_id, request.given(), arrival)  # type: ignore[arg-type]
    (command,) = recorded.value.args
    written = json.loads(command.value)
    trigger = Trigger.model_validate_json(command.value)
    assert written["requested_by"] == "ann"
    assert (trigger.agent_id, trigger.content_sha256) == (agent_id, command.sha256)
    for name, value in request.given().items():
        assert written[name] == value
    assert (trigger.decide_before is not None) == (trigger.effective_on_busy != "queue")


@given(JSON)
def test_the_digest_of_a_request_does_not_know_the_order_of_its_fields(payload: Any) -> None:
    one = {"message": "x", "payload": payload}
    other = dict(reversed(one.items()))
    assert digest_of_fields(one) == digest_of_fields(other)
    assert digest_of_fields(one) != digest_of_fields({**one, "kind": "chat"})


def test_a_record_that_no_worker_would_take_is_not_written() -> None:
    with pytest.raises(ValidationError):
        Outgoing.of({"type": "trigger", "id": "t", "agent_id": "a"})
