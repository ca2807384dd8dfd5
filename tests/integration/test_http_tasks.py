"""Tasks over HTTP: a result in the answer, or a place in the queue; the words of a full agent."""

import asyncio
import signal
import time
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import httpx
import pytest

from streams import DECISIONS, STATUSES
from tests.brokers import WAIT_SECONDS
from tests.integration.http_stack import Stack, limited, read_at

pytestmark = [pytest.mark.kafka, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture
def agent() -> str:
    return f"agent-{uuid4().hex[:12]}"


async def task(client: httpx.AsyncClient, agent: str, key: str | None = None, **content: Any) -> httpx.Response:
    headers = {} if key is None else {"Idempotency-Key": key}
    return await client.post(
        f"/api/agents/{agent}/task", json={"message": "work", **content}, headers=headers, timeout=60
    )


async def dispatched(berth: Stack, agent: str, count: int = 1) -> dict[str, Any]:
    """The newest of so many attempts of the agent; its decision's event with the trigger's conversation."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            decisions = await berth.records(DECISIONS, agent)
            conversations = {
                decision["command"]["id"]: decision["command"]["conversation_id"]
                for decision in decisions
                if decision["command"]["type"] == "trigger"
            }
            events = [event for decision in decisions for event in decision.get("events", ())]
            found = [event for event in events if event["type"] == "dispatched"]
            if len(found) >= count:
                return {**found[count - 1], "conversation_id": conversations[found[count - 1]["trigger_id"]]}


async def say(berth: Stack, agent: str, began: dict[str, Any], status: str, **fields: Any) -> None:
    about = {"conversation_id": began["conversation_id"], "execution_id": began["execution_id"]}
    await berth.send(STATUSES, agent, type="status", status=status, **about, **fields)


RESULT = {"answer": ["42", None, {"ä": 1.5}]}


@pytest.mark.parametrize("instance", [0, 1])
async def test_a_task_is_answered_with_its_result(berth: Stack, agent: str, instance: int) -> None:
    await limited(berth.http, agent, 1)
    asked = asyncio.create_task(task(berth.clients[instance], agent))
    began = await dispatched(berth, agent)
    await say(berth, agent, began, "running")
    assert not asked.done()
    await say(berth, agent, began, "finished", result=RESULT)
    answer = await asked
    told = answer.json()
    assert (answer.status_code, told["status"], told["result"], told["error"]) == (200, "finished", RESULT, None)
    assert (told["execution_id"], told["trigger_id"]) == (began["execution_id"], began["trigger_id"])
    assert (await read_at(berth.http, answer, f"/api/agents/{agent}"))["running"] == 0


@pytest.mark.parametrize(
    ("fields", "state", "error"),
    [({"error": "no disk", "retryable": False}, "failed", "no disk"), ({"retryable": False}, "failed", None)],
)
async def test_a_task_that_fails_is_answered_with_its_error(
    berth: Stack, agent: str, fields: dict[str, Any], state: str, error: str | None
) -> None:
    await limited(berth.http, agent, 1)
    asked = asyncio.create_task(task(berth.http, agent))
    await say(berth, agent, await dispatched(berth, agent), "failed", **fields)
    told = (await asked).json()
    assert (told["status"], told["result"], told["error"], told["result_available"]) == (state, None, error, True)


async def test_a_task_that_is_stopped_is_answered_so(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1)
    asked = asyncio.create_task(task(berth.http, agent))
    began = await dispatched(berth, agent)
    await berth.http.delete(f"/api/agents/{agent}/triggers/{began['trigger_id']}")
    await say(berth, agent, began, "stopped")
    answer = await asked
    assert (answer.status_code, answer.json()["status"]) == (200, "stopped")


async def test_a_task_that_waits_for_a_person_is_answered_at_once(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1)
    asked = asyncio.create_task(task(berth.http, agent))
    await say(berth, agent, await dispatched(berth, agent), "paused")
    answer = await asked
    assert (answer.status_code, answer.json()["status"]) == (202, "paused")


async def test_who_asks_again_while_it_waits_for_a_person_is_told_so_at_once(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1)
    asked = asyncio.create_task(task(berth.http, agent, "k"))
    await say(berth, agent, await dispatched(berth, agent), "paused")
    assert (await asked).json()["status"] == "paused"
    again = await task(berth.clients[1], agent, "k", wait_seconds=2)
    told = again.json()
    assert (again.status_code, told["repeated"], told["state"], told["status"]) == (202, True, "paused", "paused")


@pytest.mark.parametrize(
    ("status", "fields", "texts"),
    [
        ("finished", {}, (None, None)),
        ("finished", {"result": RESULT}, (RESULT, None)),
        ("failed", {"retryable": False}, (None, None)),
        ("failed", {"retryable": False, "error": "no disk"}, (None, "no disk")),
    ],
)
async def test_who_asks_again_after_the_end_is_told_the_same(
    berth: Stack, agent: str, status: str, fields: dict[str, Any], texts: tuple[Any, Any]
) -> None:
    await limited(berth.http, agent, 1)
    asked = asyncio.create_task(task(berth.http, agent, "k"))
    await say(berth, agent, await dispatched(berth, agent), status, **fields)
    for answer in (await asked, await task(berth.http, agent, "k"), await task(berth.clients[1], agent, "k")):
        told = answer.json()
        assert (answer.status_code, told["status"], told["result_available"]) == (200, status, True)
        assert (told["result"], told["error"]) == texts


async def test_a_task_that_was_over_when_it_came_has_no_result_to_wait_for(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1)
    past = (datetime.now(UTC) - timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    for repeated in (False, True):
        answer = await task(berth.http, agent, "k", expires_at=past)
        told = answer.json()
        assert (answer.status_code, told["status"], told["repeated"]) == (200, "expired", repeated)
        assert (told["result"], told["error"], told["result_available"]) == (None, None, True)


async def test_who_waits_no_longer_is_told_where_to_look_and_asks_again_for_the_result(
    berth: Stack, agent: str
) -> None:
    await limited(berth.http, agent, 1)
    at_once = await task(berth.http, agent, "k", wait_seconds=0)
    assert (at_once.status_code, at_once.json()["status"]) == (202, "running")
    assert (await berth.http.get(at_once.headers["location"])).json()["state"] == "running"
    began = time.monotonic()
    later = await task(berth.clients[1], agent, "k", wait_seconds=1)
    assert (later.status_code, later.json()["repeated"]) == (202, True)
    assert time.monotonic() - began >= 1
    asked = asyncio.create_task(task(berth.clients[1], agent, "k", wait_seconds=30))
    await say(berth, agent, await dispatched(berth, agent), "finished", result="done")
    for answer in (await asked, await task(berth.http, agent, "k", wait_seconds=5)):
        assert (answer.status_code, answer.json()["status"], answer.json()["result"]) == (200, "finished", "done")
    assert len(await berth.accepted(agent)) == 1


async def test_who_waits_is_answered_when_the_service_is_stopped(berth: Stack, agent: str) -> None:
    for id in (agent, f"{agent}-idle"):
        await limited(berth.http, id, 1)
    client = await berth.start_api()
    wanted: dict[str, Any] = {"agents": f"{agent}-idle", "wait_seconds": 0}
    wanted["after"] = (await client.get("/api/runners/dispatches", params=wanted)).json()["position"]
    wanted["wait_seconds"] = 60
    polled = asyncio.create_task(client.get("/api/runners/dispatches", params=wanted, timeout=90))
    asked = asyncio.create_task(task(client, agent, wait_seconds=300))
    await dispatched(berth, agent)  # so the poll, which was sent before it, is there as well
    berth.apis[-1].send(signal.SIGTERM)
    async with asyncio.timeout(40):  # they would wait for longer
        answer = await asked
        assert (answer.status_code, answer.json()["status"]) == (202, "running")
        assert (await polled).json()["dispatches"] == []
    assert await berth.apis[-1].ended() == 0


async def test_a_full_agent_is_told_in_the_words_of_the_contract(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 2)
    for _ in range(2):
        assert (await task(berth.http, agent, wait_seconds=0)).status_code == 202
    full = await task(berth.http, agent)
    assert full.status_code == 429
    assert full.json()["detail"] == f"Agent '{agent}' is at capacity (2 parallel tasks). Try again later."
    assert full.headers["retry-after"] == "30"
    assert (full.json()["code"], full.json()["running"], full.json()["limit"]) == (
        "agent_parallelism_limit_reached",
        2,
        2,
    )
    assert len(await berth.accepted(agent)) == 2, "nothing of it is left"


async def test_an_async_task_has_a_place_until_the_backlog_is_full(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1, max_backlog_depth=2)
    answers = [await task(berth.http, agent, async_mode=True) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [202, 202, 202, 429]
    assert [answer.json().get("position") for answer in answers[:3]] == [0, 1, 2]
    assert [answer.json().get("status") for answer in answers[:3]] == ["running", "queued", "queued"]
    assert (answers[3].json()["code"], answers[3].headers["retry-after"]) == ("agent_backlog_full", "30")


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ({"on_busy": "queue"}, "on_busy"),
        ({"on_busy": "interrupt"}, "on_busy"),
        ({"kind": "schedule"}, "kind"),
        ({"wait_seconds": 601}, "wait_seconds"),
        ({"wait_seconds": "1"}, "wait_seconds"),
        ({"async_mode": 1}, "async_mode"),
        ({"message": None}, "message"),
    ],
)
async def test_a_task_that_could_not_be_answered_is_refused(
    berth: Stack, agent: str, content: dict[str, Any], field: str
) -> None:
    answer = await task(berth.http, agent, **content)
    assert (answer.status_code, answer.json()["field"]) == (400, field)


async def test_a_task_in_a_conversation_that_runs_is_refused_as_everywhere(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 5)
    await task(berth.http, agent, conversation_id="c", wait_seconds=0)
    busy = await task(berth.http, agent, conversation_id="c")
    assert (busy.status_code, busy.json()["code"]) == (409, "conversation_busy")


async def test_the_scheduler_names_the_agent_and_an_id_that_counts_once(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1)
    system = berth.client_of("system")
    content = {"agent_id": agent, "id": "run-1", "message": "work", "kind": "schedule", "async_mode": True}
    answers = [await system.post("/api/internal/execute-task", json=content) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [202, 202]
    assert [answer.json()["repeated"] for answer in answers] == [False, True]
    assert await berth.accepted(agent) == ["run-1"]
    full = await system.post("/api/internal/execute-task", json={"agent_id": agent, "id": "run-2", "message": "work"})
    assert full.status_code == 429
    nobody = await system.post("/api/internal/execute-task", json={"agent_id": agent, "message": "work"})
    assert (nobody.status_code, nobody.json()["field"]) == (400, "id")
    person = await berth.client_of("person").post("/api/internal/execute-task", json=content)
    assert (person.status_code, person.json()["code"]) == (403, "role_required")
    elsewhere = berth.client_of("system", agents=("another",))
    denied = await elsewhere.post("/api/internal/execute-task", json=content)
    assert (denied.status_code, denied.json()["code"]) == (403, "access_denied")
