"""What operators and upstreams do with triggers over HTTP: approve, reschedule, resume, restart; many at once."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import httpx
import psycopg
import pytest
from psycopg.types.json import Jsonb

from streams import STATUSES
from tests.brokers import WAIT_SECONDS
from tests.integration.http_stack import Stack, got, limited, read_at

pytestmark = [pytest.mark.kafka, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture
def agent() -> str:
    return f"agent-{uuid4().hex[:12]}"


async def ask(berth: Stack, agent: str, id: str, **content: Any) -> httpx.Response:
    return await berth.http.post(f"/api/agents/{agent}/triggers", json={"id": id, **content})


async def word(berth: Stack, agent: str, answer: httpx.Response, status: str, **fields: Any) -> None:
    """The runner says something of the attempt that the answer began; returns when it is in the tables."""
    began = answer.json()
    about = {"conversation_id": began["conversation_id"], "execution_id": began["execution_id"]}
    await berth.send(STATUSES, agent, type="status", status=status, **about, **fields)
    await until(berth, agent, began["trigger_id"], lambda told: told.get("state", "running") != "running")


async def until(berth: Stack, agent: str, id: str, holds: Any) -> dict[str, Any]:
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            told: dict[str, Any] = (await berth.http.get(f"/api/agents/{agent}/triggers/{id}")).json()
            if holds(told):
                return told
            await asyncio.sleep(0.02)


def says(message: str) -> Any:
    """Whether a trigger has this message: texts come into the tables by themselves."""
    return lambda told: told.get("message") == message


# One trigger


async def test_what_a_person_approved_starts_and_approving_it_again_changes_nothing(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1)
    waits = await ask(berth, agent, "t", approval_required=True)
    assert (waits.status_code, waits.json()["reason"]) == (202, "approval_required")
    path = f"/api/agents/{agent}/triggers"
    approved = await berth.http.post(f"{path}/t/approve")
    assert (approved.status_code, approved.json()["status"], approved.json()["slot_number"]) == (200, "running", 1)
    again = await berth.http.post(f"{path}/t/approve")
    assert (again.status_code, again.json()["effect"], again.json()["status"]) == (200, False, "running")
    unknown = await berth.http.post(f"{path}/nothing/approve")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "trigger_unknown")


async def test_a_waiting_trigger_is_rescheduled_and_takes_another_place(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1)
    for id in ("runs", "t1", "t2"):
        await ask(berth, agent, id)
    later = (datetime.now(UTC) + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    path = f"/api/agents/{agent}/triggers"
    moved = await berth.http.post(f"{path}/t1/reschedule", json={"available_at": later})
    assert (moved.status_code, moved.json()["status"], moved.json()["available_at"]) == (200, "queued", later)
    queue = await read_at(berth.http, moved, f"/api/agents/{agent}/queue")
    assert [entry["trigger_id"] for entry in queue["queue"]] == ["t2", "t1"]
    running = await berth.http.post(f"{path}/runs/reschedule", json={"available_at": later})
    assert (running.json()["effect"], running.json()["reason"], running.json()["status"]) == (
        False,
        "not_waiting",
        "running",
    )
    wrong = await berth.http.post(f"{path}/t1/reschedule", json={"available_at": "tomorrow"})
    assert (wrong.status_code, wrong.json()["field"]) == (400, "available_at")


@pytest.mark.parametrize(
    ("on_busy", "status", "code"),
    [({}, 202, None), ({"on_busy": "ask"}, 409, "agent_parallelism_limit_reached"), ({"on_busy": "force"}, 200, None)],
)
async def test_a_paused_trigger_is_resumed_as_its_caller_chooses(
    berth: Stack, agent: str, on_busy: dict[str, str], status: int, code: str | None
) -> None:
    await limited(berth.http, agent, 1)
    first = await ask(berth, agent, "t")
    await word(berth, agent, first, "paused")
    await ask(berth, agent, "other")
    path = f"/api/agents/{agent}/triggers/t"
    resumed = await berth.http.post(f"{path}/resume", json=on_busy)
    assert (resumed.status_code, resumed.json().get("code")) == (status, code)
    told = await read_at(berth.http, resumed, path)
    assert told["state"] == {202: "waiting", 200: "running", 409: "paused"}[status]
    again = await berth.http.post(f"{path}/resume")
    assert again.json()["effect"] == (status == 409)


async def test_a_trigger_that_has_ended_is_restarted_as_a_new_one(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1)
    first = await ask(berth, agent, "t", message="do it", kind="task_assigned", priority=3, max_attempts=1)
    path = f"/api/agents/{agent}/triggers/t"
    live = await berth.http.post(f"{path}/restart")
    assert (live.status_code, live.json()["code"]) == (409, "trigger_not_final")
    await word(berth, agent, first, "failed", retryable=False)
    await until(berth, agent, "t", says("do it"))
    answers = [await berth.http.post(f"{path}/restart", headers={"Idempotency-Key": "k"}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert [answer.json()["repeated"] for answer in answers] == [False, True]
    new = answers[0].json()["trigger_id"]
    told = await read_at(berth.http, answers[0], f"/api/agents/{agent}/triggers/{new}")
    assert told["restarts"] == "t"
    await until(berth, agent, new, says("do it"))
    assert told["conversation_id"] == first.json()["conversation_id"]
    assert (told["kind"], told["priority"], told["max_attempts"]) == ("task_assigned", 3, 1)
    assert (await berth.http.get(path)).json()["state"] == "failed"
    unknown = await berth.http.post(f"/api/agents/{agent}/triggers/nothing/restart")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "trigger_unknown")


async def test_a_payload_is_not_kept_so_a_restart_needs_it_again(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 2)
    first = await ask(berth, agent, "t", payload={"a": 1})
    await word(berth, agent, first, "finished")
    path = f"/api/agents/{agent}/triggers/t/restart"
    without = await berth.http.post(path)
    assert (without.status_code, without.json()["code"], without.json()["field"]) == (400, "missing_field", "payload")
    assert (await berth.http.post(path, json={"payload": {"a": 2}})).status_code == 201


@pytest.mark.parametrize(
    ("since_days", "status", "code"), [(0, 504, "projection_behind"), (2, 400, "missing_field")], ids=["young", "old"]
)
async def test_a_restart_never_runs_without_the_message(
    berth: Stack, agent: str, since_days: int, status: int, code: str
) -> None:
    """It comes into the tables by itself, some time after the decision, and is forgotten after BERTH_TEXT_DAYS."""
    await limited(berth.http, agent, 2)
    await word(berth, agent, await ask(berth, agent, "mute"), "finished")
    assert (await berth.http.post(f"/api/agents/{agent}/triggers/mute/restart")).status_code == 201
    await word(berth, agent, await ask(berth, agent, "t", message="do it"), "finished")
    path = f"/api/agents/{agent}/triggers/t"
    await until(berth, agent, "t", says("do it"))
    with psycopg.connect(berth.database_url) as connection:
        connection.execute("DELETE FROM berth.texts WHERE agent_id = %s", (agent,))
        age = (timedelta(days=since_days), agent)
        connection.execute("UPDATE berth.triggers SET accepted_at = accepted_at - %s WHERE agent_id = %s", age)
    without = await berth.http.post(f"{path}/restart")
    assert (without.status_code, without.json()["code"]) == (status, code)
    assert (await berth.http.get(f"/api/agents/{agent}")).json()["running"] == 1, "nothing was changed"
    again = await berth.http.post(f"{path}/restart", json={"message": "do this"})
    assert again.status_code == 201
    await until(berth, agent, again.json()["trigger_id"], says("do this"))


async def test_a_restart_waits_for_a_message_that_comes_after_its_decision(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 2)
    await word(berth, agent, await ask(berth, agent, "t", message="do it"), "finished")
    await until(berth, agent, "t", says("do it"))
    async with asyncio.timeout(WAIT_SECONDS):
        # On a slow machine its 2 s may be over before it has looked three times.
        while (answer := await restart_with_a_message_there_at_the_third_look(berth, agent)).status_code == 504:
            pass
    assert answer.status_code == 201, answer.text
    await until(berth, agent, answer.json()["trigger_id"], says("do it"))


async def restart_with_a_message_there_at_the_third_look(berth: Stack, agent: str) -> httpx.Response:
    """It looks at the trigger with its texts, then for the text that it lacks, then again."""
    with (
        psycopg.connect(berth.database_url) as hiding,
        psycopg.connect(berth.database_url, autocommit=True) as watching,
    ):
        taken = (
            "WITH taken AS (DELETE FROM berth.texts WHERE agent_id = %s RETURNING *) SELECT to_jsonb(taken) FROM taken"
        )
        (row,) = hiding.execute(taken, (agent,)).fetchall()
        back = "INSERT INTO berth.texts SELECT * FROM jsonb_populate_record(NULL::berth.texts, %s)"
        hiding.commit()
        restarting: asyncio.Task[httpx.Response] | None = None
        for look in range(3):
            hiding.execute("LOCK TABLE berth.texts IN ACCESS EXCLUSIVE MODE")
            restarting = restarting or asyncio.create_task(berth.http.post(f"/api/agents/{agent}/triggers/t/restart"))
            looks = "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND relation = 'berth.texts'::regclass)"
            while watching.execute(looks).fetchone() == (False,) and not restarting.done():
                await asyncio.sleep(0.01)
            if look == 2 or restarting.done():
                hiding.execute(back, (Jsonb(row[0]),))
                break
            hiding.commit()
        hiding.commit()
    assert restarting is not None
    return await restarting


async def test_a_restart_waits_for_the_same_dependencies(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 2)
    first = await ask(berth, agent, "first", conversation_id="c")
    needs = [{"agent_id": agent, "conversation_id": "c"}]
    assert (await ask(berth, agent, "t", depends_on=needs)).json()["reason"] == "dependency_unfinished"
    path = f"/api/agents/{agent}/triggers"
    assert (await berth.http.delete(f"{path}/t")).json()["status"] == "stopped"
    again = await berth.http.post(f"{path}/t/restart")
    assert (again.status_code, again.json()["reason"]) == (202, "dependency_unfinished")
    free = await berth.http.post(f"{path}/t/restart", json={"depends_on": []})
    assert free.status_code == 201
    await word(berth, agent, free, "finished")
    await word(berth, agent, first, "finished")
    told = await until(berth, agent, again.json()["trigger_id"], lambda told: told.get("state") == "running")
    assert told["restarts"] == "t"


async def test_what_was_over_when_it_came_is_restarted_with_its_message(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1)
    before = (datetime.now(UTC) - timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    over = await ask(berth, agent, "t", message="do it", expires_at=before)
    assert (over.status_code, over.json()["status"]) == (202, "expired")
    again = await berth.http.post(f"/api/agents/{agent}/triggers/t/restart")
    assert again.status_code == 201
    await until(berth, agent, again.json()["trigger_id"], says("do it"))


async def test_a_paused_agent_is_drained_when_nothing_of_it_runs(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1)
    first = await ask(berth, agent, "t")
    path = f"/api/agents/{agent}"
    paused = await berth.http.post(f"{path}/pause")
    assert (await read_at(berth.http, paused, path))["drained"] is False
    await word(berth, agent, first, "finished")
    assert (await berth.http.get(path)).json()["drained"] is True
    resumed = await berth.http.post(f"{path}/resume")
    assert (await read_at(berth.http, resumed, path))["drained"] is False


# Many


async def test_many_are_asked_for_at_once_and_each_is_told_its_own(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 2, max_backlog_depth=200)
    items: list[dict[str, Any]] = [{"agent_id": agent, "id": f"t{number:04}"} for number in range(290)]
    items += [{"agent_id": f"{agent}-nobody", "id": "t"}, {"agent_id": agent, "interactive": True, "id": "ask"}]
    content = {"triggers": items}
    first, again = [await client.post("/api/triggers:bulk", json=content, timeout=30) for client in berth.clients[:2]]
    assert (first.status_code, again.status_code) == (200, 200)
    results = again.json()["results"]  # all are decided now, however busy the machine is
    assert [result["agent_id"] for result in results] == [item["agent_id"] for item in items]
    statuses = [result["http_status"] for result in results[:290]]
    assert {status: statuses.count(status) for status in (201, 202, 409)} == {201: 2, 202: 200, 409: 88}
    for one, other in zip(first.json()["results"], results, strict=True):
        told = one.get("answer") or one["problem"]
        if told["status"] != "accepted" and one["http_status"] != 503:
            assert one["http_status"] == other["http_status"]
            assert told.get("seq") == (other.get("answer") or other["problem"]).get("seq")
    *_, unknown, ask = results
    assert (unknown["http_status"], unknown["problem"]["code"]) == (404, "agent_not_found")
    assert (ask["http_status"], ask["problem"]["code"]) == (409, "agent_parallelism_limit_reached")
    assert len(await berth.accepted(agent)) == 202


async def test_many_with_one_key_count_once_each(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 10)
    content = {"triggers": [{"agent_id": agent, "message": "same"} for _ in range(5)]}
    answers = [
        await client.post("/api/triggers:bulk", json=content, headers={"Idempotency-Key": "k"})
        for client in berth.clients[:2]
    ]
    ids = [[result["answer"]["trigger_id"] for result in answer.json()["results"]] for answer in answers]
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 5
    assert len(await berth.accepted(agent)) == 5


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ({"triggers": []}, "triggers"),
        ({"triggers": [{"agent_id": "a"}] * 1001}, "triggers"),
        ({"triggers": [{"agent_id": "a"}, {"agent_id": "a", "priority": "3"}]}, "triggers.1.priority"),
        ({"triggers": [{"agent_id": "a", "on_buzy": ""}]}, "triggers.0.on_buzy"),
        ({"triggers": [{"id": "t"}]}, "triggers.0.agent_id"),
        ({}, "triggers"),
    ],
)
async def test_one_that_is_wrong_among_many_is_named_and_nothing_is_written(
    berth: Stack, content: Any, field: str
) -> None:
    answer = await berth.http.post("/api/triggers:bulk", json=content)
    assert (answer.status_code, answer.json()["field"]) == (400, field)


async def test_what_the_token_gives_no_access_to_is_left_out_and_listed(berth: Stack, agent: str) -> None:
    theirs = f"{agent}-theirs"
    for id in (agent, theirs):
        await limited(berth.http, id, 1)
        for number in (1, 2):
            last = await ask(berth, id, f"t{number}")
        await read_at(berth.http, last, f"/api/agents/{id}")
    client = berth.client_of("upstream", agents=(agent,))
    asked = await client.post("/api/triggers:bulk", json={"triggers": [{"agent_id": agent}, {"agent_id": theirs}]})
    assert [result["http_status"] for result in asked.json()["results"]] == [202, 403]
    refs = [{"agent_id": id, "trigger_id": "t1"} for id in (theirs, agent)]
    stopped = await client.post("/api/triggers:stop", json={"triggers": refs})
    assert [result["http_status"] for result in stopped.json()["results"]] == [403, 202]
    position = asked.json()["results"][0]["answer"]["log_position"]
    listed = await got(client, "/api/triggers", min_position=position)
    assert {trigger["agent_id"] for trigger in listed["triggers"]} == {agent}
    denied = await client.get("/api/triggers", params={"agent": [agent, theirs]})
    assert (denied.status_code, denied.json()["code"]) == (403, "access_denied")
    by_filter = await client.post("/api/triggers:stop", json={"filter": {"state": "waiting"}})
    assert {result["agent_id"] for result in by_filter.json()["results"]} == {agent}
    assert await berth.sent(theirs) == ["t1", "t2"], "nothing else was asked of them"


async def test_triggers_are_stopped_by_what_they_have_in_common(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1)
    organization = f"org-{agent}"
    for number, kind in enumerate(["task", "schedule", "schedule", "task"]):
        last = await ask(berth, agent, f"t{number}", kind=kind, organization_id=organization)
    await read_at(berth.http, last, f"/api/agents/{agent}")
    wanted = {"filter": {"organization_id": organization, "kind": "schedule"}}
    stopped = await berth.http.post("/api/triggers:stop", json=wanted)
    results = stopped.json()["results"]
    assert [(result["trigger_id"], result["answer"]["status"]) for result in results] == [
        ("t1", "stopped"),
        ("t2", "stopped"),
    ]
    assert stopped.json()["more"] is False
    rest = await berth.http.post("/api/triggers:stop", json={"filter": {"organization_id": organization}})
    position = results[-1]["answer"]["log_position"]
    assert {r["trigger_id"]: r["http_status"] for r in rest.json()["results"]} | {"t1": 200, "t2": 200} == {
        "t0": 202,
        "t1": 200,
        "t2": 200,
        "t3": 200,
    }
    told = await got(berth.http, f"/api/agents/{agent}/triggers/t1", min_position=position)
    assert told["state"] == "stopped"
    wrong: list[dict[str, Any]] = [{}, {"triggers": [], "filter": {}}, {"filter": {"state": "finished"}}]
    for content in wrong:
        answer = await berth.http.post("/api/triggers:stop", json=content)
        assert answer.status_code == 400


async def test_a_list_of_triggers_keeps_its_order_over_pages_while_more_come(berth: Stack, agent: str) -> None:
    await limited(berth.http, agent, 1)
    other = f"{agent}-other"
    await limited(berth.http, other, 1)
    for number in range(7):
        last = await ask(berth, agent if number % 2 else other, f"t{number}", kind=f"kind-{agent}")
    params: dict[str, Any] = {"kind": f"kind-{agent}", "limit": 3, "min_position": last.json()["log_position"]}
    await read_at(berth.http, last, f"/api/agents/{agent}")
    found: list[str] = []
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            page = await got(berth.http, "/api/triggers", **params)
            found += [trigger["trigger_id"] for trigger in page["triggers"]]
            if page["next_cursor"] is None:
                break
            if len(found) == 3:
                newer = await ask(berth, agent, "newer", kind=f"kind-{agent}")
                params["min_position"] = newer.json()["log_position"]
            params["cursor"] = page["next_cursor"]
    assert found == [f"t{number}" for number in range(6, -1, -1)]
    of_one = await berth.http.get("/api/triggers", params={"agent": agent, "state": "waiting", "limit": 1000})
    assert [trigger["trigger_id"] for trigger in of_one.json()["triggers"]] == ["newer", "t5", "t3"]
    since = of_one.json()["triggers"][0]["accepted_at"]
    newest = await berth.http.get("/api/triggers", params={"agent": agent, "since": since})
    assert [trigger["trigger_id"] for trigger in newest.json()["triggers"]] == ["newer"]
    for wrong in ({"state": "idle"}, {"since": "monday"}, {"cursor": "x"}, {"agent": ""}, {"limit": 0}):
        assert (await berth.http.get("/api/triggers", params=wrong)).status_code == 400
