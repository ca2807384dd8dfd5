"""Runners without Kafka: dispatches by long poll, resumable and at least once; statuses by POST."""

import asyncio
from typing import Any
from uuid import uuid4

import httpx
import pytest

from streams import STATUSES, TRIGGERS
from tests.brokers import WAIT_SECONDS
from tests.integration.http_stack import Stack, limited

pytestmark = [pytest.mark.kafka, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture
def agent() -> str:
    return f"agent-{uuid4().hex[:12]}"


async def poll(client: httpx.AsyncClient, *agents: str, after: str | None = None, **params: Any) -> dict[str, Any]:
    wanted: dict[str, Any] = {"agents": agents, "wait_seconds": 10, **params}
    if after is not None:
        wanted["after"] = after
    answer = await client.get("/api/runners/dispatches", params=wanted, timeout=30)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def ask(berth: Stack, agent: str, id: str, **content: Any) -> httpx.Response:
    return await berth.http.post(f"/api/agents/{agent}/triggers", json={"id": id, **content})


async def report(client: httpx.AsyncClient, content: Any) -> httpx.Response:
    return await client.post("/api/statuses", json=content)


def status_of(dispatch: dict[str, Any], status: str, **fields: Any) -> dict[str, Any]:
    about = {name: dispatch[name] for name in ("agent_id", "conversation_id", "execution_id")}
    return {**about, "status": status, **fields}


async def test_a_runner_works_off_an_agent_over_http_alone(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1)
    runner = berth.client_of("runner", agents=(agent,))
    payload = {"a": [1, "ä", None]}
    for id in ("t1", "t2", "t3"):
        await ask(berth, agent, id, payload=payload, message=id)
    done: list[str] = []
    position: str | None = None
    while len(done) < 3:
        read = await poll(runner, agent, after=position)
        for dispatch in read["dispatches"]:
            assert (dispatch["type"], dispatch["payload"], dispatch["message"]) == (
                "dispatch",
                payload,
                dispatch["trigger_id"],
            )
            taken = await report(
                runner, [status_of(dispatch, "running"), status_of(dispatch, "finished", result={"ok": True})]
            )
            assert (taken.status_code, taken.json()) == (202, {"results": [{"status": "accepted"}] * 2})
            done.append(dispatch["trigger_id"])
        position = read["position"]
    assert done == ["t1", "t2", "t3"]
    path, told = f"/api/agents/{agent}/triggers/t3", dict[str, Any]()
    async with asyncio.timeout(WAIT_SECONDS):  # texts come into the tables by themselves
        while told.get("state") != "finished" or told["result"] is None:
            told = (await berth.http.get(path)).json()
    assert told["result"] == {"ok": True}


async def test_a_position_is_resumed_without_a_gap_and_the_same_one_gives_the_same_again(
    berth: Stack, agent: str
) -> None:
    await limited(berth.http, agent, 10)
    empty = await poll(berth.http, agent, wait_seconds=0)
    assert empty["dispatches"] == []
    for number in range(5):
        await ask(berth, agent, f"t{number}")
    found: list[str] = []
    position = empty["position"]
    while len(found) < 5:
        read = await poll(berth.clients[len(found) % 2], agent, after=position, limit=2)
        again = await poll(berth.http, agent, after=position, limit=2)
        assert again["dispatches"][: len(read["dispatches"])] == read["dispatches"]
        found += [dispatch["trigger_id"] for dispatch in read["dispatches"]]
        position = read["position"]
    assert found == [f"t{number}" for number in range(5)]


async def test_texts_with_lone_surrogates_are_handed_on_as_they_came(berth: Stack, agent: str) -> None:
    """Kafka takes them (G3), so a runner must not stop at one."""
    await limited(berth.http, agent, 1)
    texts = {"message": "\ud800 m", "payload": {"\udfff": ["\ud800\ud800", "ä\U0001f600"]}}
    await berth.send(TRIGGERS, agent, type="trigger", v=1, id="odd", conversation_id="c", **texts)
    for agents in ((agent,), ("*",)):
        position, found = None, dict[str, Any]()
        async with asyncio.timeout(WAIT_SECONDS):
            while found.get("trigger_id") != "odd":
                read = await poll(berth.http, *agents, after=position)
                mine = (dispatch for dispatch in read["dispatches"] if dispatch["agent_id"] == agent)
                position, found = read["position"], next(mine, {})
        assert {name: found[name] for name in texts} == texts


async def test_a_poll_waits_for_what_comes(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1)
    position = (await poll(berth.http, agent, wait_seconds=0))["position"]
    waiting = asyncio.create_task(poll(berth.http, agent, after=position, wait_seconds=20))
    await ask(berth, agent, "t")
    [dispatch] = (await waiting)["dispatches"]
    assert dispatch["trigger_id"] == "t"


async def test_what_was_dispatched_a_moment_ago_is_not_missed_by_a_new_runner(berth: Stack, agent: str) -> None:
    """The tables may not have it yet."""
    for number in range(10):
        await limited(berth.http, f"{agent}{number}", 1)
        await ask(berth, f"{agent}{number}", "t")
        [dispatch] = (await poll(berth.http, f"{agent}{number}"))["dispatches"]
        assert dispatch["agent_id"] == f"{agent}{number}"


async def test_a_new_runner_gets_what_runs_and_nothing_that_has_ended(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 2)
    runner = berth.client_of("runner")
    first = (await ask(berth, agent, "t1")).json()
    ended = {**first, "agent_id": agent}
    await report(runner, status_of(ended, "finished"))
    second = await ask(berth, agent, "t2")
    async with asyncio.timeout(WAIT_SECONDS):
        while (await berth.http.get(f"/api/agents/{agent}/triggers/t1")).json().get("state") != "finished":
            await asyncio.sleep(0.02)
    await berth.http.get(f"/api/agents/{agent}", params={"min_position": second.json()["log_position"]})
    read = await poll(runner, agent)
    assert [dispatch["trigger_id"] for dispatch in read["dispatches"]] == ["t2"]


async def test_a_runner_is_told_to_stop(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1)
    first = (await ask(berth, agent, "t")).json()
    read = await poll(berth.http, agent)
    await berth.http.delete(f"/api/agents/{agent}/triggers/t")
    told = await poll(berth.http, agent, after=read["position"])
    assert [(one["type"], one["execution_id"]) for one in told["dispatches"]] == [
        ("stop_requested", first["execution_id"])
    ]


async def test_a_runner_sees_and_reports_only_what_its_token_gives_access_to(berth: Stack, agent: str) -> None:
    theirs = f"{agent}-theirs"
    began: list[dict[str, Any]] = []
    for id in (theirs, agent):
        await limited(berth.http, id, 1)
        began.append({**(await ask(berth, id, "t")).json(), "agent_id": id})
    runner = berth.client_of("runner", agents=(agent,))
    everything = await poll(runner, "*")
    assert {dispatch["agent_id"] for dispatch in everything["dispatches"]} == {agent}
    denied = await runner.get("/api/runners/dispatches", params={"agents": [agent, theirs]})
    assert (denied.status_code, denied.json()["code"]) == (403, "access_denied")
    one = await report(runner, status_of(began[0], "finished"))
    assert (one.status_code, one.json()["code"]) == (403, "access_denied")
    both = await report(runner, [status_of(dispatch, "finished") for dispatch in began])
    assert [result["status"] for result in both.json()["results"]] == ["refused", "accepted"]
    assert {record["agent_id"] for id in (agent, theirs) for record in await berth.records(STATUSES, id)} == {agent}
    person = await report(berth.client_of("person"), status_of(began[1], "finished"))
    assert (person.status_code, person.json()["code"]) == (403, "role_required")


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ({"agent_id": "a"}, "conversation_id"),
        ({"agent_id": "a", "conversation_id": "c", "execution_id": "x", "status": "done"}, "status"),
        ({"agent_id": "a", "conversation_id": "c", "execution_id": "x", "status": "failed", "x": 1}, "x"),
        ({"agent_id": "a", "conversation_id": "c", "status": "failed"}, "body"),
        ([{"agent_id": "a", "conversation_id": "c", "execution_id": 3, "status": "failed"}], "0.execution_id"),
        ([], "body"),
        ("running", "body"),
    ],
)
async def test_a_wrong_status_is_named(berth: Stack, content: Any, field: str) -> None:
    answer = await report(berth.http, content)
    assert (answer.status_code, answer.json()["field"]) == (400, field)


@pytest.mark.parametrize(
    ("params", "field"),
    [({}, "agents"), ({"agents": "a", "after": "x"}, "after"), ({"agents": "a", "wait_seconds": 61}, "wait_seconds")],
)
async def test_a_poll_that_can_not_be_is_refused(berth: Stack, params: dict[str, Any], field: str) -> None:
    answer = await berth.http.get("/api/runners/dispatches", params=params)
    assert (answer.status_code, answer.json()["field"]) == (400, field)
