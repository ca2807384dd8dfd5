"""Writes over HTTP: the decision answers, and whoever asks again gets the same answer."""

import asyncio
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import httpx
import pytest

from api.http.positions import read_position
from streams import CONTROLS, DECISIONS, STATUSES, TRIGGERS
from streams.codec import partition_of
from tests.brokers import WAIT_SECONDS
from tests.integration.http_stack import Stack, limited, read_at
from tests.integration.workers import PARTITIONS
from tests.tokens import TESTER

pytestmark = [pytest.mark.kafka, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture
def agent() -> str:
    return f"agent-{uuid4().hex[:12]}"


async def test_a_trigger_runs_at_once_and_the_next_waits_with_its_position_and_reason(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1)
    path = f"/api/agents/{agent}/triggers"
    first, second, third = [await berth.http.post(path, json={"kind": "task_assigned"}) for _ in range(3)]
    assert (first.status_code, first.json()["status"], first.json()["slot_number"]) == (201, "running", 1)
    for place, answer in ((1, second), (2, third)):
        body = answer.json()
        assert (answer.status_code, body["status"], body["position"]) == (202, "queued", place)
        assert body["reason"] == "agent_parallelism_limit_reached"
    assert (await berth.http.get(first.headers["location"])).status_code == 200
    assert await berth.accepted(agent) == [answer.json()["trigger_id"] for answer in (first, second, third)]


async def test_the_record_is_what_a_worker_reads_with_its_key_its_partition_and_how_it_came(
    berth: Stack, agent: str
) -> None:
    await limited(berth.http, agent)
    content = {"message": "ä", "payload": {"b": [1, 2.5, None], "a": "ö"}, "created_at": "2026-03-01T11:00:00+01:00"}
    answer = await berth.http.post(f"/api/agents/{agent}/triggers", json=content)
    (record,) = await berth.records(TRIGGERS, agent)  # read from the partition that murmur2 of the key gives
    assert partition_of(agent, PARTITIONS) == int(next(iter(_offsets(answer))))
    assert record["headers"] == [("via", b"http")]
    assert (record["payload"], record["message"]) == (content["payload"], "ä")
    assert record["created_at"] == "2026-03-01T10:00:00.000000Z"
    assert (record["requested_by"], "decide_before" in record) == (TESTER, False)
    (_, decision) = await berth.records(DECISIONS, agent)
    assert decision["via"] == "http"
    assert decision["command"]["content_sha256"] == record["content_sha256"]


def _offsets(answer: httpx.Response) -> dict[int, int]:
    return dict(read_position(answer.json()["log_position"]).next_offsets)


# 108: the client times out and sends again


async def test_repeats_at_the_same_time_and_through_another_instance_are_one_item_with_one_answer(
    berth: Stack, agent: str
) -> None:
    await limited(berth.http, agent, 1)
    path, headers = f"/api/agents/{agent}/conversations", {"Idempotency-Key": "k1"}
    content = {"message": "hello", "on_busy": "queue"}
    at_once = await asyncio.gather(
        *(berth.clients[number % 2].post(path, json=content, headers=headers) for number in range(20))
    )
    later = [await client.post(path, json=content, headers=headers) for client in berth.clients]
    answers = [*at_once, *later]
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.json()["trigger_id"] for answer in answers}) == 1
    assert len({(answer.json()["seq"], answer.json()["execution_id"]) for answer in answers}) == 1
    assert [answer.json()["repeated"] for answer in later] == [True, True]
    assert [answer.json()["state"] for answer in later] == ["running", "running"]
    assert await berth.accepted(agent) == [answers[0].json()["trigger_id"]]


async def test_a_client_that_gave_up_waiting_sends_again_and_there_is_one_item(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1)
    path, headers = f"/api/agents/{agent}/triggers", {"Idempotency-Key": "k1"}
    with pytest.raises(httpx.TimeoutException):
        await berth.http.post(path, json={"message": "x"}, headers=headers, timeout=0.001)
    answers = await asyncio.gather(
        *(client.post(path, json={"message": "x"}, headers=headers) for client in berth.clients)
    )
    assert len({answer.json()["trigger_id"] for answer in answers}) == 1
    assert await berth.accepted(agent) == [answers[0].json()["trigger_id"]]


async def test_the_same_key_with_other_content_is_a_conflict_also_at_the_same_time(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1)
    path, headers = f"/api/agents/{agent}/triggers", {"Idempotency-Key": "k1"}
    contents = [{"message": "one"}, {"message": "other"}]
    at_once = await asyncio.gather(
        *(berth.clients[number // 2 % 2].post(path, json=contents[number % 2], headers=headers) for number in range(12))
    )
    won = {answer.status_code for answer in at_once[::2]}
    lost = {answer.status_code for answer in at_once[1::2]}
    assert sorted([won, lost], key=str) == [{201}, {409}]
    assert {answer.json()["code"] for answer in at_once if answer.status_code == 409} == {"trigger_id_conflict"}
    assert len(await berth.accepted(agent)) == 1


async def test_a_refusal_is_repeated_and_a_new_choice_needs_a_new_key(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1, max_backlog_depth=0)
    path = f"/api/agents/{agent}/triggers"
    running = (await berth.http.post(path, json={"conversation_id": "c"})).json()
    refused = await berth.http.post(path, json={}, headers={"Idempotency-Key": "k"})
    assert (refused.status_code, refused.json()["code"]) == (409, "agent_backlog_full")
    assert refused.json()["holders"] == [running["trigger_id"]]
    assert (refused.json()["running"], refused.json()["limit"], refused.json()["waiting"]) == (1, 1, 0)
    await limited(berth.http, agent, 10)
    for client in berth.clients:
        again = await client.post(path, json={}, headers={"Idempotency-Key": "k"})
        assert (again.status_code, again.json()["code"]) == (409, "agent_backlog_full")
        assert (again.json()["seq"], again.json()["repeated"]) == (refused.json()["seq"], True)
    assert (await berth.http.post(path, json={}, headers={"Idempotency-Key": "k2"})).status_code == 201


async def test_the_first_answer_is_given_again_by_an_api_that_never_saw_it(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1)
    path = f"/api/agents/{agent}/triggers"
    answers = [await berth.http.post(path, json={"id": id}) for id in ("t1", "t2")]
    fresh = await berth.start_api()
    for first in answers:
        id = first.json()["trigger_id"]
        again = await fresh.post(path, json={"id": id})
        assert again.status_code == first.status_code
        told = {name for name in first.json() if name not in ("repeated", "log_position", "state")}
        assert {name: again.json()[name] for name in told} == {name: first.json()[name] for name in told}


async def test_a_trigger_and_a_stop_with_the_same_key_do_not_collide(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1)
    headers = {"Idempotency-Key": "k"}
    trigger = await berth.http.post(f"/api/agents/{agent}/triggers", json={"id": "t"})
    other = await berth.http.post(f"/api/agents/{agent}/triggers", json={}, headers=headers)
    stops = [await berth.http.delete(f"/api/agents/{agent}/triggers/t", headers=headers) for _ in range(2)]
    pause = await berth.http.post(f"/api/agents/{agent}/pause", headers=headers)
    assert (trigger.status_code, other.status_code, pause.status_code) == (201, 202, 200)
    assert [answer.status_code for answer in stops] == [202, 202]
    assert [answer.json()["repeated"] for answer in stops] == [False, True]
    assert pause.json()["effect"] is True


# 114: a message to a busy agent is dropped


async def test_a_message_to_a_busy_agent_has_a_place_or_a_clear_refusal(berth: Stack, agent: str) -> None:
    """Case 116: and nobody who runs is stopped for it."""
    await limited(berth.http, agent, 1)
    path = f"/api/agents/{agent}/conversations"
    await berth.http.post(path, json={"conversation_id": "c1", "message": "one", "on_busy": "queue"})
    queued = await berth.http.post(path, json={"conversation_id": "c2", "message": "two", "on_busy": "queue"})
    assert (queued.status_code, queued.json()["status"], queued.json()["position"]) == (202, "queued", 1)
    for on_busy in ({}, {"on_busy": ""}, {"on_busy": "ask"}):
        refused = await berth.http.post(path, json={"message": "three", **on_busy})
        assert (refused.status_code, refused.json()["code"]) == (409, "agent_parallelism_limit_reached")
        told = {name: refused.json()[name] for name in ("running", "limit", "waiting", "position_if_queued")}
        assert told == {"running": 1, "limit": 1, "waiting": 1, "position_if_queued": 2}
        assert refused.json()["force_allowed"] is True
    unknown = await berth.http.post(path, json={"message": "four", "on_busy": "later"})
    assert (unknown.status_code, unknown.json()["code"]) == (400, "agent_on_busy_invalid")
    queue = await read_at(berth.http, queued, f"/api/agents/{agent}/queue")
    assert [entry["conversation_id"] for entry in queue["queue"]] == ["c2"]


async def test_a_further_message_waits_behind_the_turn_before_it(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 5)
    first = await berth.http.post(f"/api/agents/{agent}/conversations", json={"message": "1", "on_busy": "queue"})
    conversation = first.json()["conversation_id"]
    path = f"/api/agents/{agent}/conversations/{conversation}"
    answers = [
        await berth.http.post(f"{path}/messages", json={"message": "2", "on_busy": "queue"}),
        await berth.http.post(path, json={"message": "3", "on_busy": "queue"}),
    ]
    assert [(answer.status_code, answer.json()["reason"]) for answer in answers] == [(202, "conversation_busy")] * 2
    told = await read_at(berth.http, answers[-1], path)
    ids = [answer.json()["trigger_id"] for answer in (first, *answers)]
    assert [trigger["trigger_id"] for trigger in told["triggers"]] == ids[::-1]
    assert (told["state"], told["live_trigger_id"], told["live_count"]) == ("queued", ids[-1], 3)


async def test_a_reply_ends_the_paused_trigger(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1)
    path = f"/api/agents/{agent}/conversations"
    first = (await berth.http.post(path, json={"message": "1", "on_busy": "queue"})).json()
    conversation = first["conversation_id"]
    about = {"type": "status", "conversation_id": conversation, "execution_id": first["execution_id"]}
    await berth.send(STATUSES, agent, **about, status="paused")
    await _until_state(berth, agent, first["trigger_id"], "paused")
    reply = await berth.http.post(f"{path}/{conversation}/messages", json={"message": "2", "on_busy": "queue"})
    assert reply.status_code == 201
    told = await read_at(berth.http, reply, f"/api/agents/{agent}/triggers/{first['trigger_id']}")
    assert (told["state"], told["replied_by"]) == ("finished", reply.json()["trigger_id"])


async def _until_state(berth: Stack, agent: str, trigger_id: str, state: str) -> dict[str, Any]:
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            told: dict[str, Any] = (await berth.http.get(f"/api/agents/{agent}/triggers/{trigger_id}")).json()
            if told.get("state") == state:
                return told
            await asyncio.sleep(0.02)


# Stops and controls


async def test_a_waiting_trigger_is_stopped_at_once_a_running_one_by_its_runner(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1)
    path = f"/api/agents/{agent}/triggers"
    for id in ("t1", "t2"):
        await berth.http.post(path, json={"id": id})
    waiting, running, again = [await berth.http.delete(f"{path}/{id}") for id in ("t2", "t1", "t1")]
    assert (waiting.status_code, waiting.json()["status"]) == (200, "stopped")
    assert (running.status_code, running.json()["status"]) == (202, "stop_requested")
    assert (again.status_code, again.json()["effect"], again.json()["reason"]) == (202, False, "already_stopping")
    over = await berth.http.delete(f"{path}/t2")
    assert (over.status_code, over.json()["effect"], over.json()["status"]) == (200, False, "stopped")
    unknown = await berth.http.delete(f"{path}/t3")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "trigger_unknown")


async def test_stopping_a_conversation_leaves_the_others_alone(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 2)
    path = f"/api/agents/{agent}"
    for id, conversation in (("a1", "a"), ("a2", "a"), ("b1", "b")):
        await berth.http.post(f"{path}/triggers", json={"id": id, "conversation_id": conversation})
    stopped = await berth.http.post(f"{path}/conversations/a/stop")
    assert (stopped.status_code, stopped.json()["stopped"], stopped.json()["stop_requested"]) == (202, ["a2"], ["a1"])
    other = await read_at(berth.http, stopped, f"{path}/triggers/b1")
    assert other["state"] == "running"
    unknown = await berth.http.post(f"{path}/conversations/nothing/stop")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "trigger_unknown")


async def test_pause_holds_what_waits_and_resume_starts_it(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1)
    path = f"/api/agents/{agent}"
    pauses = [await berth.http.post(f"{path}/pause") for _ in range(2)]
    assert [(answer.json()["effect"], answer.json()["reason"]) for answer in pauses] == [
        (True, None),
        (False, "unchanged"),
    ]
    queued = await berth.http.post(f"{path}/triggers", json={"id": "t"})
    assert (queued.status_code, queued.json()["reason"]) == (202, "agent_paused")
    resumed = await berth.http.post(f"{path}/resume")
    assert (await read_at(berth.http, resumed, f"{path}/triggers/t"))["state"] == "running"


async def test_settings_change_only_where_they_are_given_and_null_is_the_default(berth: Stack, agent: str) -> None:
    made = await berth.http.put(f"/api/agents/{agent}", json={"parallelism_limit": 4, "owner": "ann"})
    assert (made.status_code, made.json()["created"]) == (201, True)
    again = await berth.http.put(f"/api/agents/{agent}", json={"parallelism_limit": 4})
    assert (again.status_code, again.json()["created"], again.json()["effect"]) == (200, False, False)
    changed = await berth.http.patch(f"/api/agents/{agent}", json={"parallelism_limit": None, "display_name": "W"})
    assert changed.json()["changed"] == {"parallelism_limit": 1, "display_name": "W"}
    told = await read_at(berth.http, changed, f"/api/agents/{agent}")
    assert (told["parallelism_limit"], told["limit"], told["owner"], told["display_name"]) == (1, 1, "ann", "W")


async def test_a_capacity_is_changed_with_the_words_of_the_contract(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1)
    answer = await berth.http.put(f"/api/agents/{agent}/capacity", json={"max_parallel_tasks": 3})
    body = answer.json()
    assert answer.status_code == 200
    assert (body["message"], body["agent_name"], body["max_parallel_tasks"]) == ("Capacity updated", agent, 3)
    told = await read_at(berth.http, answer, f"/api/agents/{agent}/capacity")
    assert (told["max_parallel_tasks"], told["available_slots"]) == (3, 3)


async def test_an_archived_agent_refuses_until_it_is_configured(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1)
    await berth.http.post(f"/api/agents/{agent}/archive")
    refused = await berth.http.post(f"/api/agents/{agent}/triggers", json={})
    assert (refused.status_code, refused.json()["code"]) == (409, "agent_archived")
    await limited(berth.http, agent, 1)
    assert (await berth.http.post(f"/api/agents/{agent}/triggers", json={})).status_code == 201


@pytest.mark.parametrize(
    ("method", "path", "content"),
    [
        ("POST", "/triggers", {}),
        ("POST", "/conversations", {"message": "x", "on_busy": "queue"}),
        ("POST", "/conversations/c/messages", {"message": "x", "on_busy": "queue"}),
        ("POST", "/pause", None),
        ("POST", "/resume", None),
        ("POST", "/archive", None),
        ("PATCH", "", {}),
        ("PUT", "/capacity", {"max_parallel_tasks": 2}),
        ("GET", "", None),
        ("GET", "/capacity", None),
        ("GET", "/queue", None),
        ("GET", "/triggers/t", None),
        ("GET", "/conversations/c", None),
    ],
)
async def test_an_unknown_agent_is_not_found_and_not_made(
    berth: Stack, agent: str, method: str, path: str, content: Any
) -> None:
    answer = await berth.http.request(method, f"/api/agents/{agent}{path}", json=content)
    assert (answer.status_code, answer.json()["code"]) == (404, "agent_not_found")
    events = [event for decision in await berth.records(DECISIONS, agent) for event in decision.get("events", ())]
    assert events == []


@pytest.mark.parametrize("id", ["a/b", "a:b", "a%2Fb", "A B", "ä€😀", "..x", "a?b#c", "slots2", "%", "a_b", "'"])
async def test_ids_may_hold_anything_that_an_id_may(berth: Stack, agent: str, id: str) -> None:
    named = quote(f"{agent}{id}", safe="")
    await berth.http.put(f"/api/agents/{named}", json={})
    first = await berth.http.post(f"/api/agents/{named}/triggers", json={"id": id, "conversation_id": id})
    assert first.status_code == 201, first.text
    told = await read_at(berth.http, first, first.headers["location"])
    assert (told["agent_id"], told["trigger_id"]) == (f"{agent}{id}", id)
    encoded = id.encode().hex("%")
    conversation = await read_at(berth.http, first, f"/api/agents/{named}/conversations/%{encoded}")
    assert conversation["conversation_id"] == id


async def test_controls_of_an_upstream_and_of_the_api_have_one_order(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1)
    about = {"requested_by": "ann", "id": "c1"}
    await berth.send(CONTROLS, agent, type="configure", parallelism_limit=7, **about)
    answer = await berth.http.patch(f"/api/agents/{agent}", json={"display_name": "x"})
    assert (await read_at(berth.http, answer, f"/api/agents/{agent}"))["parallelism_limit"] == 7


async def test_many_ask_at_once_and_each_gets_its_own_answer(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 3, max_backlog_depth=20)
    answers = await asyncio.gather(
        *(
            berth.clients[number % 2].post(f"/api/agents/{agent}/triggers", json={"id": f"t{number}"})
            for number in range(50)
        )
    )
    assert [answer.json()["trigger_id"] for answer in answers] == [f"t{number}" for number in range(50)]
    counts = {status: sum(answer.status_code == status for answer in answers) for status in (201, 202, 409)}
    assert counts == {201: 3, 202: 20, 409: 27}
    assert sorted(answer.json()["position"] for answer in answers if answer.status_code == 202) == list(range(1, 21))
    assert len(await berth.accepted(agent)) == 23
