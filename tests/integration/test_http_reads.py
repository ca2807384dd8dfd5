"""Reads over HTTP: slots, queues, triggers with why they wait, conversations; fresh when asked to be."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from api.http.database import _OURS
from projections.schema import connect
from streams import STATUSES, TRIGGERS
from tests.brokers import WAIT_SECONDS
from tests.integration.http_stack import Stack, limited, read_at

pytestmark = [pytest.mark.kafka, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture
def agent() -> str:
    return f"agent-{uuid4().hex[:12]}"


async def test_capacity_has_the_fields_of_the_contract(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 2)
    answer = await berth.http.post(f"/api/agents/{agent}/triggers", json={"id": "t", "message": "x" * 300})
    await _until(berth, f"/api/agents/{agent}/triggers/t", message="x" * 300)  # no position is one of texts
    told = await read_at(berth.http, answer, f"/api/agents/{agent}/capacity")
    (slot,) = told.pop("slots")
    assert told == {
        "agent_name": agent,
        "max_parallel_tasks": 2,
        "active_slots": 1,
        "available_slots": 1,
        "forced": 0,
        "waiting": 0,
        "paused": False,
        "serial": False,
    }
    assert (slot["slot_number"], slot["execution_id"]) == (1, answer.json()["execution_id"])
    assert (slot["started_at"], slot["message_preview"]) == (answer.json()["decided_at"], "x" * 100)
    assert 0 <= slot["duration_seconds"] < 60


async def test_an_unlimited_agent_has_no_number_and_a_lowered_limit_no_negative_one(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, "unlimited")
    for id in ("t1", "t2", "t3"):
        await berth.http.post(f"/api/agents/{agent}/triggers", json={"id": id})
    path = f"/api/agents/{agent}"
    unlimited = await berth.http.patch(path, json={"display_name": "x"})
    told = await read_at(berth.http, unlimited, f"{path}/capacity")
    assert (told["max_parallel_tasks"], told["available_slots"], told["active_slots"]) == (None, None, 3)
    assert (await read_at(berth.http, unlimited, path))["parallelism_limit"] == "unlimited"
    lowered = await berth.http.patch(path, json={"parallelism_limit": 1})
    told = await read_at(berth.http, lowered, f"{path}/capacity")
    assert (told["max_parallel_tasks"], told["available_slots"], told["active_slots"]) == (1, 0, 3)
    slots = await read_at(berth.http, lowered, "/api/agents/slots")
    assert slots["agents"][agent] == {"max": 1, "active": 3}
    assert datetime.fromisoformat(slots["timestamp"]).tzinfo is not None


async def test_agents_are_listed_by_the_bytes_of_their_ids_over_all_pages(berth: Stack, agent: str) -> None:
    ids = [f"{agent}{end}" for end in ("Z", "a", "A", "_", "%", "é", "z", "\uffee", "😀", "a:b")]
    made = [
        await berth.http.put("/api/agents/" + "".join(f"%{byte:02x}" for byte in id.encode()), json={}) for id in ids
    ]
    for answer in made:  # each may be of another partition, and the position of one says nothing of another
        await read_at(berth.http, answer, "/api/agents")
    found: list[str] = []
    cursor: dict[str, str] = {}
    while True:
        page = (await berth.http.get("/api/agents", params={"limit": 3, **cursor})).json()
        assert len(page["agents"]) <= 3
        found += [one["agent_id"] for one in page["agents"]]
        if page["next_cursor"] is None:
            break
        cursor = {"cursor": page["next_cursor"]}
    assert [id for id in found if id.startswith(agent)] == sorted(ids, key=str.encode)
    assert len(found) == len(set(found))


async def test_a_queue_is_in_start_order_with_positions_and_every_reason_over_all_pages(
    berth: Stack, agent: str
) -> None:
    await limited(berth.http, agent, 1)
    path = f"/api/agents/{agent}"
    later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    for content in (
        {"id": "running", "conversation_id": "c"},
        {"id": "t3", "conversation_id": "c", "available_at": later},
        {"id": "t2", "conversation_id": "c"},
        {"id": "t1", "created_at": "2026-03-01T10:00:00Z"},
    ):
        answer = await berth.http.post(f"{path}/triggers", json=content)
    whole = await read_at(berth.http, answer, f"{path}/queue")
    full = "agent_parallelism_limit_reached"
    assert [(entry["trigger_id"], entry["position"], entry["reasons"]) for entry in whole["queue"]] == [
        ("t1", 1, [full]),
        ("t2", 2, ["conversation_busy", full]),
        ("t3", 3, ["conversation_busy", "not_yet_available", full]),
    ]
    assert [entry["reason"] for entry in whole["queue"]] == [full, "conversation_busy", "conversation_busy"]
    assert (whole["queue"][1]["waits_behind"], whole["waiting"], whole["next_cursor"]) == ("running", 3, None)
    pages = []
    cursor: dict[str, Any] = {}
    for _ in range(4):
        page = (await berth.http.get(f"{path}/queue", params={"limit": 1, **cursor})).json()
        pages += page["queue"]
        if page["next_cursor"] is None:
            break
        cursor = {"cursor": page["next_cursor"]}
    assert [(entry["trigger_id"], entry["position"]) for entry in pages] == [("t1", 1), ("t2", 2), ("t3", 3)]


async def test_a_trigger_says_why_it_waits_with_who_holds_what_since_when(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1)
    path = f"/api/agents/{agent}"
    runs = (await berth.http.post(f"{path}/triggers", json={"id": "runs", "conversation_id": "c"})).json()
    waits = await berth.http.post(f"{path}/triggers", json={"id": "waits", "conversation_id": "c"})
    pause = await berth.http.post(f"{path}/pause")
    told = await read_at(berth.http, pause, f"{path}/triggers/waits")
    holder = {
        "agent_id": agent,
        "trigger_id": "runs",
        "conversation_id": "c",
        "execution_id": runs["execution_id"],
        "state": "running",
        "since": runs["decided_at"],
    }
    assert (told["state"], told["position"], told["reason"]) == ("waiting", 1, "agent_paused")
    accepted_at = waits.json()["decided_at"]
    assert [(cause["reason"], cause["since"], cause["holders"]) for cause in told["waits_for"]] == [
        ("agent_paused", pause.json()["decided_at"], []),
        ("conversation_busy", accepted_at, [holder]),
        ("agent_parallelism_limit_reached", accepted_at, [holder]),
    ]
    assert all(cause["released_by"] for cause in told["waits_for"])
    assert [entry["event"] for entry in told["timeline"]] == ["accepted", "placed"]


async def test_who_waits_for_a_folder_is_told_who_has_it_and_an_ask_is_refused_without_a_trace(
    berth: Stack, agent: str
) -> None:
    await limited(berth.http, agent, 5)
    path = f"/api/agents/{agent}"
    where = {"environment_id": f"e-{agent}", "worker": True}
    await berth.http.post(f"{path}/triggers", json={"id": "has", "folder": "/a", **where})
    has = await _until(berth, f"{path}/triggers/has", state="running")
    assert (has["claim"]["state"], has["claim"]["site"], has["depends_on"]) == ("granted", "default", [])
    await berth.http.post(f"{path}/triggers", json={"id": "waits", "folder": "/a/b", **where})
    told = await _until(berth, f"{path}/triggers/waits", reason="agent_environment_folder_busy")
    cause = told["waits_for"][0]  # "site_asked" follows until the agent has heard of it
    (holder,) = cause["holders"]
    assert (holder["agent_id"], holder["trigger_id"], holder["execution_id"]) == (agent, "has", has["execution_id"])
    assert (cause["site"], cause["holders_count"]) == ("default", 1) and "scope" not in cause
    about = {"interactive": True, "on_busy": "ask", "conversation_id": "asked"}
    refused = await berth.http.post(f"{path}/triggers", json={"id": "ask", "folder": "/", **about, **where})
    assert (refused.status_code, refused.json()["code"]) == (409, "agent_environment_folder_busy")
    told = await _until(berth, f"{path}/triggers/ask", state="refused")
    assert (told["code"], told["conversation_id"]) == ("agent_environment_folder_busy", "asked")
    assert (await berth.http.get(f"{path}/conversations/asked")).status_code == 404
    queue = (await berth.http.get(f"{path}/queue")).json()
    assert [(entry["trigger_id"], entry["reasons"]) for entry in queue["queue"]] == [
        ("waits", ["agent_environment_folder_busy"])
    ]


async def test_a_timeline_goes_over_all_attempts(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1)
    path = f"/api/agents/{agent}/triggers/t"
    first = (await berth.http.post(f"/api/agents/{agent}/triggers", json={"id": "t", "conversation_id": "c"})).json()
    about = {"type": "status", "conversation_id": "c", "execution_id": first["execution_id"]}
    await berth.send(STATUSES, agent, **about, status="failed", error="no disk")
    told = await _until(berth, path, state="waiting")
    assert (told["failures"], told["attempt"], told["reason"]) == (1, 1, "not_yet_available")
    (cause,) = told["waits_for"]
    assert cause["until"] == told["attempts"][0]["retry_at"] == told["available_at"]
    assert told["attempts"][0]["outcome"] == "failed"
    stopped = await berth.http.delete(path)
    told = await read_at(berth.http, stopped, path)
    assert (told["state"], told["end_reason"], told["waits_for"], told["position"]) == ("stopped", "stop", [], None)
    assert [entry["event"] for entry in told["timeline"]] == [
        "accepted",
        "placed",
        "dispatched",
        "attempt_failed",
        "stopped",
    ]
    assert [entry["seq"] for entry in told["timeline"]] == sorted(entry["seq"] for entry in told["timeline"])


async def _until(berth: Stack, path: str, **wanted: Any) -> dict[str, Any]:
    told: dict[str, Any] = {}
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            while not wanted.items() <= told.items():
                await asyncio.sleep(0.02)
                told = (await berth.http.get(path)).json()
    except TimeoutError:
        raise TimeoutError(f"{path} never said {wanted}: {told}") from None
    return told


async def test_texts_of_people_come_back_with_what_postgres_cannot_hold_replaced(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1)
    await berth.send(TRIGGERS, agent, type="trigger", id="t", conversation_id="c", message="a\x00b\ud800c")
    # Texts have a topic of their own, which may be read later than the decision.
    told = await _until(berth, f"/api/agents/{agent}/triggers/t", state="running", message="a\ufffdb\ufffdc")
    about = {"type": "status", "conversation_id": "c", "execution_id": told["execution_id"]}
    await berth.send(STATUSES, agent, **about, status="finished", result={"answer\x00": ["\ud800", 1]})
    result = {"answer\ufffd": ["\ufffd", 1]}
    await _until(berth, f"/api/agents/{agent}/triggers/t", state="finished", result=result)


async def test_a_refused_trigger_leaves_its_refusal_and_nothing_else(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1, max_backlog_depth=0)
    path = f"/api/agents/{agent}/triggers"
    await berth.http.post(path, json={})
    refused = await berth.http.post(path, json={"id": "t", "conversation_id": "c"})
    told = await read_at(berth.http, refused, f"{path}/t")
    assert (told["state"], told["code"], told["conversation_id"]) == ("refused", "agent_backlog_full", "c")
    conversation = await berth.http.get(f"/api/agents/{agent}/conversations/c")
    assert (conversation.status_code, conversation.json()["code"]) == (404, "conversation_unknown")
    unknown = await berth.http.get(f"{path}/other")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "trigger_unknown")


async def test_every_write_can_be_read_at_once_with_its_position_through_any_instance(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1)
    for number in range(30):
        writes, reads = berth.clients[number % 2], berth.clients[(number + 1) % 2]
        answer = await writes.post(f"/api/agents/{agent}/triggers", json={"id": f"t{number}"})
        told = await read_at(reads, answer, f"/api/agents/{agent}/queue")
        assert told["waiting"] == number


async def test_a_conversation_is_paged_newest_first(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1)
    path = f"/api/agents/{agent}"
    for number in range(5):
        answer = await berth.http.post(f"{path}/triggers", json={"id": f"t{number}", "conversation_id": "c"})
    found: list[str] = []
    cursor: dict[str, str] = {"min_position": answer.json()["log_position"]}
    while True:
        page = (await berth.http.get(f"{path}/conversations/c", params={"limit": 2, **cursor})).json()
        found += [trigger["trigger_id"] for trigger in page["triggers"]]
        if page["next_cursor"] is None:
            break
        cursor = {"cursor": page["next_cursor"]}
    assert found == ["t4", "t3", "t2", "t1", "t0"]
    assert (page["triggers_count"], page["live_count"], page["state"]) == (5, 5, "queued")


async def test_agents_whose_ids_differ_only_in_case_or_are_patterns_are_different(berth: Stack, agent: str) -> None:
    ends = ("x", "X", "_", "%25")
    answers = [await limited(berth.http, f"{agent}{end}", limit) for limit, end in enumerate(ends, start=1)]
    for limit, (end, answer) in enumerate(zip(ends, answers, strict=True), start=1):
        told = await read_at(berth.http, answer, f"/api/agents/{agent}{end}")
        assert told["limit"] == limit


async def test_a_parameter_that_an_address_does_not_have_is_refused_and_not_passed_over(
    berth: Stack, agent: str
) -> None:
    """A misspelt ``as_of`` would show the present in silence."""
    made = await limited(berth.http, agent)
    for misspelt in ("asof=1", "as_of=1&as-of=1", "LIMIT=3", "%00=1", "=1"):
        refused = await berth.http.get(f"/api/agents/{agent}/queue?{misspelt}")
        assert (refused.status_code, refused.json()["code"]) == (400, "unknown_field"), misspelt
    assert "as_of" in refused.json()["detail"]
    written = await berth.http.post(f"/api/agents/{agent}/pause?force=1", json={})
    assert (written.status_code, written.json()["field"]) == (400, "force")
    assert (await read_at(berth.http, made, f"/api/agents/{agent}"))["paused"] is False
    assert (await berth.http.get("/healthz?probe=1")).status_code == 200


async def test_the_description_names_every_address(berth: Stack) -> None:
    description = (await berth.http.get("/openapi.json")).json()
    assert description["openapi"].startswith("3.1")
    assert {
        "/api/agents",
        "/api/agents/slots",
        "/api/agents/{agent_id}",
        "/api/agents/{agent_id}/capacity",
        "/api/agents/{agent_id}/queue",
        "/api/agents/{agent_id}/triggers",
        "/api/agents/{agent_id}/triggers/{trigger_id}",
        "/api/agents/{agent_id}/conversations/{conversation_id}",
        "/healthz",
        "/readyz",
    } <= set(description["paths"])


NOW = datetime.now(UTC)


@pytest.mark.parametrize("name", sorted(_OURS.keys() - {"last_verification"}))  # there is one, in one row
async def test_our_own_queries_use_an_index(berth: Stack, name: str) -> None:
    parameters: dict[str, Any] = {"agent_id": "a", "id": "t", "seq": 1, "outcomes": [], "after_agent_id": ""}
    parameters |= {"site": "s", "scope": "organization", "gate_name": "o", "partition": 1, "offset": 1, "since": NOW}
    parameters |= {"agent_ids": ["a"], "trigger_ids": ["t"], "execution_ids": ["x"], "before_written_at": NOW}
    parameters |= {"before_partition": 1, "before_offset": 1, "state": None, "kind": None, "organization_id": None}
    parameters |= {"visible": None, "after_seq": 0, "trigger_id": "t"}
    with connect(berth.database_url) as connection:
        connection.execute("SET enable_seqscan TO off")  # the tables are small here
        query = psycopg.ClientCursor(connection).mogrify(_OURS[name], {**parameters, "max_rows": None})
        plan = "\n".join(line for (line,) in connection.execute(f"EXPLAIN {query}".encode()))
    assert "Index" in plan and "Seq Scan" not in plan, plan


async def test_reads_go_on_while_the_tables_are_rebuilt_and_replaced(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1)
    await berth.http.post(f"/api/agents/{agent}/triggers", json={"id": "t", "message": "x"})
    path = f"/api/agents/{agent}"
    before = await _until(berth, f"{path}/triggers/t", message="x")
    over = asyncio.Event()
    addresses = ("/api/agents/slots", f"{path}/capacity", f"{path}/queue", f"{path}/triggers/t")

    async def read() -> set[int]:
        statuses: set[int] = set()
        while not over.is_set():
            statuses |= {(await berth.http.get(address)).status_code for address in addresses}
        return statuses

    reading = asyncio.create_task(read())
    rebuild = await berth.berth("projections", "rebuild")
    assert await rebuild.ended() == 0, rebuild.account()
    over.set()
    assert await reading == {200}
    later = await berth.http.post(f"/api/agents/{agent}/triggers", json={"id": "t2"})
    assert (await read_at(berth.http, later, f"{path}/queue"))["waiting"] == 1
    assert (await berth.http.get(f"{path}/triggers/t")).json() == before
