"""Public links: who has one talks to one agent, in the same slots as everybody, and reaches nothing else."""

import asyncio
import time
from typing import Any
from uuid import uuid4

import httpx
import pytest

from streams import DECISIONS, STATUSES, TRIGGERS
from tests.integration.http_stack import Stack, limited, read_at
from tests.integration.test_http_tasks import dispatched, say
from tests.tokens import AUTHENTICATION, bearer, claims, signed

pytestmark = [pytest.mark.kafka, pytest.mark.asyncio(loop_scope="module")]


async def linked(berth: Stack, limit: int = 1, **settings: Any) -> tuple[str, dict[str, Any]]:
    """An agent of ann's and a link to it."""
    agent = f"public-{uuid4().hex[:8]}"
    made = await limited(berth.http, agent, limit, owner="ann", **settings)
    await read_at(berth.http, made, f"/api/agents/{agent}")
    answer = await berth.client_of("person", "ann", (agent,)).post(f"/api/agents/{agent}/public-links")
    assert answer.status_code == 201, answer.text
    link: dict[str, Any] = answer.json()
    assert link["agent_id"] == agent and link["path"] == f"/api/public/chat/{link['token']}"
    return agent, link


class Visitor(httpx.AsyncClient):
    """Somebody without a token; they don't wait for the agent's answer unless they say so."""

    async def say(self, link: dict[str, Any], key: str | None = None, **content: Any) -> httpx.Response:
        headers = {} if key is None else {"Idempotency-Key": key}
        return await self.post(link["path"], json={"wait_seconds": 0, **content}, headers=headers)


def visitor(berth: Stack) -> Visitor:
    return Visitor(base_url=berth.http.base_url, timeout=30)


async def test_a_visitor_talks_to_the_agent_in_a_conversation_of_their_own(berth: Stack) -> None:
    agent, link = await linked(berth)
    async with visitor(berth) as http:
        first = await http.say(link, message="hello")
        told = first.json()
        assert (first.status_code, told["status"]) == (202, "running")
        assert "execution_id" not in told and "location" not in first.headers
        second = await http.say(link, message="and", conversation_id=told["conversation_id"], on_busy="queue")
        assert (second.status_code, second.json()["status"], second.json()["position"]) == (202, "queued", 1)
    for record in await berth.records(TRIGGERS, agent):
        assert (record["kind"], record["interactive"]) == ("public", True)
        assert record["requested_by"] == f"public-link:{link['link_id']}"
        assert record["conversation_id"] == told["conversation_id"]


async def test_a_visitor_gets_the_agents_answer_also_later_with_the_same_key(berth: Stack) -> None:
    agent, link = await linked(berth)
    async with visitor(berth) as http:
        early = await http.say(link, "k", message="hello")
        asked = asyncio.create_task(http.say(link, "k", message="hello", wait_seconds=20))
        began = await dispatched(berth, agent)
        assert not asked.done()
        await say(berth, agent, began, "finished", result={"text": "hi"})
        for answer in (await asked, await http.say(link, "k", message="hello")):
            told = answer.json()
            assert (answer.status_code, told["status"], told["result"]) == (200, "finished", {"text": "hi"})
            assert told["trigger_id"] == early.json()["trigger_id"]
            assert "error" not in told and "execution_id" not in told


async def test_a_visitor_takes_a_slot_like_everybody_and_is_told_when_there_is_none(berth: Stack) -> None:
    agent, link = await linked(berth, 2)
    taken = await berth.http.post(f"/api/agents/{agent}/triggers", json={"id": "t", "conversation_id": "c"})
    async with visitor(berth) as http:
        assert (await http.say(link, message="one")).status_code == 202
        full = await http.say(link, message="two")
        assert (full.status_code, full.headers["retry-after"]) == (429, "30")
        assert full.json()["detail"] == f"Agent '{agent}' is at capacity (2 parallel tasks). Try again later."
        assert "holders" not in full.json() and "t" not in full.json().values()
        about = {"type": "status", "conversation_id": "c", "execution_id": taken.json()["execution_id"]}
        await berth.send(STATUSES, agent, **about, status="finished")
        assert (await http.say(link, message="three", on_busy="queue")).status_code == 202
    decisions = await berth.records(DECISIONS, agent)
    refused = [decision["refusal"]["code"] for decision in decisions if decision.get("refusal")]
    assert refused == ["agent_parallelism_limit_reached"]


async def test_a_visitor_may_not_force_or_enter_the_conversations_of_others(berth: Stack) -> None:
    agent, link = await linked(berth, 3)
    await berth.http.post(f"/api/agents/{agent}/triggers", json={"id": "t", "conversation_id": "c"})
    other = (await berth.client_of("admin", "ann").post(f"/api/agents/{agent}/public-links")).json()
    async with visitor(berth) as http:
        theirs = (await http.say(other, message="x")).json()["conversation_id"]
        before = await berth.sent(agent)
        for body, status, code in (
            ({"message": "x", "on_busy": "force"}, 400, "agent_on_busy_invalid"),
            ({"message": "x", "on_busy": "interrupt"}, 400, "agent_on_busy_invalid"),
            ({"message": "x", "on_busy": "later"}, 400, "agent_on_busy_invalid"),
            ({"message": "x", "conversation_id": "c"}, 404, "conversation_unknown"),
            ({"message": "x", "conversation_id": theirs}, 404, "conversation_unknown"),
            ({"message": "x", "site": "default"}, 400, "unknown_field"),
            ({"message": "x", "payload": {}}, 400, "unknown_field"),
            ({"message": "x", "wait_seconds": 61}, 400, "invalid_field"),
            ({}, 400, "missing_field"),
        ):
            answer = await http.post(link["path"], json=body)
            assert (answer.status_code, answer.json()["code"]) == (status, code), body
        assert await berth.sent(agent) == before


async def test_what_a_visitor_sends_again_with_a_key_counts_once(berth: Stack) -> None:
    agent, link = await linked(berth, 3)
    async with visitor(berth) as http:
        answers = [await http.say(link, "k", message="x") for _ in range(3)]
    assert {answer.status_code for answer in answers} == {202}
    assert len({(answer.json()["trigger_id"], answer.json()["conversation_id"]) for answer in answers}) == 1
    assert [answer.json()["repeated"] for answer in answers] == [False, True, True]
    assert len(await berth.accepted(agent)) == 1


async def test_a_link_is_no_token_and_a_token_no_link(berth: Stack) -> None:
    agent, link = await linked(berth)
    async with visitor(berth) as http:
        as_token = await http.get(f"/api/agents/{agent}", headers={"Authorization": f"Bearer {link['token']}"})
        assert (as_token.status_code, as_token.json()["code"]) == (401, "token_refused")
        token = bearer()["Authorization"].removeprefix("Bearer ")
        assert (await http.post(f"/api/public/chat/{token}", json={"message": "x"})).status_code == 401
        forged = signed(claims(aud="berth-public-link", agent=agent, jti="x"))  # with the secret of tokens
        assert (await http.post(f"/api/public/chat/{forged}", json={"message": "x"})).status_code == 401


@pytest.mark.parametrize("token", ["x", "%00", "%ff", "a.b.c", "%F0%9F%98%80", "x" * 4000, ".", "%2e%2e"])
async def test_any_other_link_is_refused(berth: Stack, token: str) -> None:
    async with visitor(berth) as http:
        answer = await http.post(f"/api/public/chat/{token}", json={"message": "x"})
    assert (answer.status_code, answer.json()["code"]) in ((401, "token_refused"), (404, "not_found"))


async def test_a_link_ends_at_the_time_that_its_owner_chose(berth: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, _ = await linked(berth)
    ann = berth.client_of("person", "ann", (agent,))
    for hours in (0, 721, True, "24", 1.5):
        answer = await ann.post(f"/api/agents/{agent}/public-links", json={"lifetime_hours": hours})
        assert (answer.status_code, answer.json()["field"]) == (400, "lifetime_hours")
    link = (await ann.post(f"/api/agents/{agent}/public-links", json={"lifetime_hours": 720})).json()
    assert link["expires_at"].endswith("Z")
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now - 2 * 3600)
    _, ended, _ = AUTHENTICATION.issue_link(agent, "ann", 1)
    monkeypatch.undo()
    async with visitor(berth) as http:
        assert (await http.post(f"/api/public/chat/{ended}", json={"message": "x"})).status_code == 401
        assert (await http.say(link, message="x")).status_code == 202


async def test_a_paused_or_archived_agent_answers_no_visitor(berth: Stack) -> None:
    agent, link = await linked(berth)
    async with visitor(berth) as http:
        await berth.http.post(f"/api/agents/{agent}/pause")
        paused = await http.say(link, message="x")
        assert (paused.status_code, paused.json()["code"]) == (409, "agent_paused")
        await berth.http.post(f"/api/agents/{agent}/archive")
        archived = await http.say(link, message="x")
        assert (archived.status_code, archived.json()["code"]) == (409, "agent_archived")


async def test_the_access_log_has_neither_tokens_nor_texts(berth: Stack) -> None:
    agent, link = await linked(berth)
    message = f"message-{uuid4().hex}"
    async with visitor(berth) as http:
        sent = await http.say(link, message=message)
        await http.get(f"/api/agents/{agent}?min_position={message}", headers={"X-Text": message})
        await http.get(f"/no-such/{message}")
        await http.get("/api/agents", headers={"Authorization": f"Bearer {message}"})
    await berth.apis[0].logged("request", route="/api/public/chat/{token}", subject=f"public-link:{link['link_id']}")
    await berth.apis[0].logged("request", route=None, status=404)
    await berth.apis[0].logged("request", route="/api/agents", status=401, subject=None)
    entries = str([entry for entry in berth.apis[0].events if entry.get("event") == "request"])
    assert sent.status_code == 202
    for secret in (message, link["token"], link["token"].rpartition(".")[2], "Bearer"):
        assert secret not in entries
