"""People who don't wait, over HTTP: ask, force, interrupt; with and without a site whose word it takes."""

import asyncio
from collections import Counter
from typing import Any
from uuid import uuid4

import httpx
import pytest

from streams import DECISIONS, SITE_CONTROLS
from tests.integration.http_stack import Stack, limited, read_at

pytestmark = [pytest.mark.kafka, pytest.mark.asyncio(loop_scope="module")]

FULL = "agent_parallelism_limit_reached"


@pytest.fixture
def agent() -> str:
    return f"agent-{uuid4().hex[:12]}"


@pytest.fixture
def site() -> str:
    return f"site-{uuid4().hex[:12]}"


async def chat(client: httpx.AsyncClient, agent: str, key: str | None = None, **content: Any) -> httpx.Response:
    headers = {} if key is None else {"Idempotency-Key": key}
    content = {"message": "hello", **content}
    return await client.post(f"/api/agents/{agent}/conversations", json=content, headers=headers)


async def capacity(berth: Stack, site: str, capacity: int) -> None:
    """Make a site; it is there before whatever is asked of it afterwards, as claims come to it later."""
    control = {"type": "configure_site", "id": uuid4().hex, "site": site, "requested_by": "op", "capacity": capacity}
    await berth.send(SITE_CONTROLS, site, **control)


# One slot


async def test_of_fifty_who_ask_at_once_one_runs_and_the_others_are_told_the_counts(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1)
    answers = await asyncio.gather(*(chat(berth.clients[number % 2], agent) for number in range(50)))
    assert Counter(answer.status_code for answer in answers) == {201: 1, 409: 49}
    [runs] = [answer.json()["trigger_id"] for answer in answers if answer.status_code == 201]
    for answer in answers:
        if answer.status_code == 409:
            told = answer.json()
            assert (told["code"], told["running"], told["limit"], told["waiting"]) == (FULL, 1, 1, 0)
            assert (told["position_if_queued"], told["force_allowed"]) == (1, True)
            assert (told["holders"], told["holders_count"]) == ([runs], 1)
    assert await berth.accepted(agent) == [runs], "a refusal leaves nothing behind"

    refused = next(answer for answer in answers if answer.status_code == 409)
    chosen = [await chat(berth.clients[number], agent, "choice", on_busy="queue") for number in (0, 1)]
    assert [(answer.status_code, answer.json()["position"]) for answer in chosen] == [(202, 1)] * 2
    queue = await read_at(berth.http, chosen[-1], f"/api/agents/{agent}/queue")
    assert [entry["trigger_id"] for entry in queue["queue"]] == [chosen[0].json()["trigger_id"]]
    assert refused.json()["trigger_id"] != chosen[0].json()["trigger_id"]


async def test_force_exceeds_the_limit_as_often_as_the_agent_has_slots(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1)
    answers = [await chat(berth.http, agent, on_busy="force") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [201, 201, 409]
    assert [answer.json()["forced"] for answer in answers[:2]] == [False, True]
    assert (answers[2].json()["code"], answers[2].json()["running"]) == ("force_limit_reached", 2)
    assert answers[2].json()["force_allowed"] is False


async def test_an_interrupt_stops_its_conversation_and_comes_next_in_it(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1)
    first = (await chat(berth.http, agent)).json()
    path = f"/api/agents/{agent}/conversations/{first['conversation_id']}/messages"
    behind = await berth.http.post(path, json={"message": "behind", "on_busy": "queue"})
    instead = await berth.http.post(path, json={"message": "instead", "on_busy": "interrupt"})
    assert [(answer.status_code, answer.json()["reason"]) for answer in (behind, instead)] == [
        (202, "conversation_busy"),
        (202, "conversation_busy"),
    ]
    told = await read_at(berth.http, instead, f"/api/agents/{agent}/triggers/{first['trigger_id']}")
    assert (told["state"], told["timeline"][-1]["event"]) == ("running", "stop_requested")
    records = await berth.records(DECISIONS, agent)
    assert "decide_before" in records[-1]["command"], "whoever interrupts waits for the decision"
    assert "decide_before" not in records[-2]["command"]


async def test_what_nobody_waits_for_queues_whatever_it_chooses(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1)
    await chat(berth.http, agent)
    content = {"kind": "task_assigned", "interactive": True, "on_busy": "ask"}
    answer = await berth.http.post(f"/api/agents/{agent}/triggers", json=content)
    assert (answer.status_code, answer.json()["position"]) == (202, 1)
    assert "decide_before" not in (await berth.records(DECISIONS, agent))[-1]["command"]


@pytest.mark.parametrize(
    ("code", "content"),
    [
        ("approval_required", {"approval_required": True}),
        ("dependency_unfinished", {"depends_on": [{"agent_id": "nobody", "conversation_id": "c"}]}),
        ("not_yet_available", {"available_at": "2999-01-01T00:00:00Z"}),
    ],
)
async def test_what_can_not_start_now_is_refused_with_its_own_code(
    berth: Stack, agent: str, code: str, content: dict[str, Any]
) -> None:
    await limited(berth.http, agent, 1)
    answer = await chat(berth.http, agent, **content)
    assert (answer.status_code, answer.json()["code"]) == (409, code)


async def test_a_budget_that_is_used_up_is_told(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 5, run_budget=1)
    assert (await chat(berth.http, agent)).status_code == 201
    assert (await chat(berth.http, agent)).json()["code"] == "run_budget_used_up"


# A site has the last word


@pytest.mark.parametrize("on_busy", ["ask", "force"])
async def test_an_ask_of_a_site_is_answered_with_what_the_site_says(
    berth: Stack, agent: str, site: str, on_busy: str
) -> None:
    await limited(berth.http, agent, 5)
    await capacity(berth, site, 1)
    wants: dict[str, Any] = {"worker": True, "site": site, "on_busy": on_busy}
    runs = await chat(berth.http, agent, "k1", **wants)
    assert (runs.status_code, runs.json()["status"], runs.json()["slot_number"]) == (201, "running", 1)
    refused = await chat(berth.http, agent, "k2", **wants)
    told = refused.json()
    assert (refused.status_code, told["code"]) == (409, "site_workers_busy")
    assert (told["holders"], told["holders_count"]) == ([runs.json()["trigger_id"]], 1)
    assert (told["running"], told["limit"], told["waiting"], told["position_if_queued"]) == (1, 5, 0, 1)
    assert told["force_allowed"] is False
    # The first answer again, from either instance, and from one that gave none.
    for client in (*berth.clients[:2], await berth.start_api()):
        again = [await chat(client, agent, key, **wants) for key in ("k1", "k2")]
        assert [answer.status_code for answer in again] == [201, 409]
        assert [answer.json()["repeated"] for answer in again] == [True, True]
        assert again[0].json()["execution_id"] == runs.json()["execution_id"]
        assert (again[1].json()["code"], again[1].json()["seq"]) == ("site_workers_busy", told["seq"])
    other = await chat(berth.http, agent, "k1", **wants, kind="other")
    assert (other.status_code, other.json()["code"]) == (409, "trigger_id_conflict")


async def test_of_many_who_ask_for_one_folder_one_runs_whichever_agent_and_instance(
    berth: Stack, agent: str, site: str
) -> None:
    await capacity(berth, site, 0)
    for number in range(4):
        await limited(berth.http, f"{agent}{number}", 10)
    wants: dict[str, Any] = {"site": site, "environment_id": "e", "folder": "/a"}
    answers = await asyncio.gather(
        *(chat(berth.clients[number % 2], f"{agent}{number % 4}", **wants) for number in range(24))
    )
    codes = Counter(answer.json().get("code", answer.status_code) for answer in answers)
    assert codes == {201: 1, "agent_environment_folder_busy": 23}
    [runs] = [answer.json()["trigger_id"] for answer in answers if answer.status_code == 201]
    assert {tuple(answer.json()["holders"]) for answer in answers if answer.status_code == 409} == {(runs,)}
    below = await chat(berth.http, f"{agent}0", **{**wants, "folder": "/a/b"})
    beside = await chat(berth.http, f"{agent}0", **{**wants, "folder": "/ab"})
    assert (below.status_code, beside.status_code) == (409, 201)


async def test_repeats_under_way_at_once_get_one_answer_and_one_run(berth: Stack, agent: str, site: str) -> None:
    await limited(berth.http, agent, 5)
    await capacity(berth, site, 5)
    wants: dict[str, Any] = {"worker": True, "site": site}
    answers = await asyncio.gather(*(chat(berth.clients[number % 2], agent, "k", **wants) for number in range(20)))
    assert {answer.status_code for answer in answers} == {201}
    assert len({(answer.json()["execution_id"], answer.json()["seq"]) for answer in answers}) == 1
    assert len(await berth.accepted(agent)) == 1


async def test_a_site_that_nobody_configured_is_told_at_once(berth: Stack, agent: str, site: str) -> None:
    await limited(berth.http, agent, 5)
    answer = await chat(berth.http, agent, worker=True, site=site)
    assert (answer.status_code, answer.json()["code"]) == (409, "site_unknown")
