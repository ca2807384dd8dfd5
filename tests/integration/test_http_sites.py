"""Sites over HTTP: pools, folders and who holds them, pause, gates with budgets, deletions."""

import asyncio
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import httpx
import pytest

from streams import STATUSES
from tests.brokers import WAIT_SECONDS
from tests.integration.http_stack import Stack, limited, read_at

pytestmark = [pytest.mark.kafka, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture
def agent() -> str:
    return f"agent-{uuid4().hex[:12]}"


@pytest.fixture
def site() -> str:
    return f"site/{uuid4().hex[:12]}"


def path_of(site: str) -> str:
    return f"/api/sites/{quote(site, safe='')}"


async def capacity(berth: Stack, site: str, number: int | None) -> httpx.Response:
    answer = await berth.http.put(f"{path_of(site)}/capacity", json={"capacity": number})
    assert answer.status_code == 200, answer.text
    return answer


async def ask(berth: Stack, agent: str, id: str, **content: Any) -> httpx.Response:
    return await berth.http.post(f"/api/agents/{agent}/triggers", json={"id": id, **content})


async def until(client: httpx.AsyncClient, path: str, holds: Any) -> dict[str, Any]:
    told: dict[str, Any] = {}
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                told = (await client.get(path)).json()
                if holds(told):
                    return told
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"{path} stays {told}") from None


async def test_a_site_is_made_and_tells_who_holds_what_and_who_waits(berth: Stack, agent: str, site: str) -> None:
    made = await capacity(berth, site, 1)
    assert (made.json()["capacity"], made.json()["effect"], made.json()["site"]) == (1, True, site)
    assert (await capacity(berth, site, 1)).json()["effect"] is False
    await limited(berth.http, agent, 5)
    for id, wants in (
        ("t1", {"worker": True}),
        ("t2", {"worker": True, "organization_id": "o"}),
        ("t3", {"environment_id": "e", "folder": "/a//b/"}),
    ):
        await ask(berth, agent, id, site=site, **wants)
    told = await until(berth.http, path_of(site), lambda told: told.get("granted") == 2 and told["waiting"] == 1)
    assert (told["site"], told["capacity"], told["running"], told["drained"]) == (site, 1, 1, False)
    assert {one["trigger_id"]: (one["worker"], one["path"]) for one in told["held"]} == {
        "t1": (True, None),
        "t3": (False, "/a/b"),
    }
    [waits] = told["queue"]
    assert (waits["trigger_id"], waits["organization_id"], waits["passed"]) == ("t2", "o", 0)
    listed = (await berth.http.get("/api/sites", params={"limit": 1000})).json()["sites"]
    assert [one["running"] for one in listed if one["site"] == site] == [1]
    await capacity(berth, site, 2)
    await until(berth.http, path_of(site), lambda told: told["waiting"] == 0 and told["running"] == 2)


async def test_a_queue_of_a_site_comes_in_pages_in_start_order(berth: Stack, agent: str, site: str) -> None:
    await capacity(berth, site, 0)
    await limited(berth.http, agent, 10)
    for number in range(5):
        await ask(berth, agent, f"t{number}", site=site, worker=True)
    await until(berth.http, path_of(site), lambda told: told.get("waiting") == 5)
    found: list[str] = []
    params: dict[str, Any] = {"limit": 2}
    while True:
        page = (await berth.http.get(path_of(site), params=params)).json()
        found += [claim["trigger_id"] for claim in page["queue"]]
        if page["next_cursor"] is None:
            break
        params["cursor"] = page["next_cursor"]
    assert found == [f"t{number}" for number in range(5)]


async def test_a_paused_site_is_drained_when_nothing_is_left(berth: Stack, agent: str, site: str) -> None:
    await capacity(berth, site, 2)
    await limited(berth.http, agent, 5)
    began = (await ask(berth, agent, "t1", site=site, worker=True)).json()
    await until(berth.http, path_of(site), lambda told: told.get("granted") == 1)
    paused = await berth.http.post(f"{path_of(site)}/pause")
    assert (paused.status_code, paused.json()["effect"]) == (200, True)
    again = await berth.http.post(f"{path_of(site)}/pause")
    assert (again.json()["effect"], again.json()["reason"]) == (False, "unchanged")
    assert (await read_at(berth.http, paused, path_of(site)))["drained"] is False
    refused = await ask(berth, agent, "t2", site=site, worker=True, interactive=True)
    assert (refused.status_code, refused.json()["code"]) == (409, "site_paused")
    runs = await until(
        berth.http, f"/api/agents/{agent}/triggers/t1", lambda told: told.get("execution_id") is not None
    )
    about = {"conversation_id": began["conversation_id"], "execution_id": runs["execution_id"]}
    await berth.send(STATUSES, agent, type="status", status="finished", **about)
    await until(berth.http, path_of(site), lambda told: told["drained"])
    resumed = await berth.http.post(f"{path_of(site)}/resume")
    assert (await read_at(berth.http, resumed, path_of(site)))["paused"] is False


@pytest.mark.parametrize(("scope", "field"), [("organizations", "organization_id"), ("departments", "department_id")])
async def test_a_gate_is_closed_opened_and_given_a_budget(
    berth: Stack, agent: str, site: str, scope: str, field: str
) -> None:
    await capacity(berth, site, 5)
    await limited(berth.http, agent, 5)
    path = f"{path_of(site)}/{scope}/o%2F1"
    usual = await read_at(berth.http, await capacity(berth, site, 6), path)
    assert (usual["enabled"], usual["run_budget"], usual["drained"], usual["name"]) == (True, None, False, "o/1")
    closed = await berth.http.put(path, json={"enabled": False})
    assert (closed.status_code, closed.json()["enabled"], closed.json()["effect"]) == (200, False, True)
    told = await read_at(berth.http, closed, path)
    assert (told["enabled"], told["drained"], told["granted"]) == (False, True, 0)
    wants: dict[str, Any] = {"site": site, "worker": True, "interactive": True, field: "o/1"}
    refused = await ask(berth, agent, "t1", **wants)
    assert (refused.status_code, refused.json()["code"]) == (409, f"{scope.removesuffix('s')}_disabled")
    opened = await berth.http.put(path, json={"enabled": True, "run_budget": 1})
    assert (opened.json()["enabled"], opened.json()["run_budget"]) == (True, 1)
    assert (await ask(berth, agent, "t2", **wants)).status_code == 201
    used = await ask(berth, agent, "t3", **wants)
    assert (used.status_code, used.json()["code"]) == (409, "run_budget_used_up")
    unbounded = await berth.http.put(path, json={"run_budget": None})
    assert (await read_at(berth.http, unbounded, path))["run_budget"] is None
    assert (await ask(berth, agent, "t4", **wants)).status_code == 201


@pytest.mark.parametrize("what", ["folders?path=/a", ""])
async def test_what_waits_for_a_folder_that_is_deleted_goes_on_without(
    berth: Stack, agent: str, site: str, what: str
) -> None:
    await capacity(berth, site, 5)
    await limited(berth.http, agent, 5)
    for id in ("t1", "t2"):
        await ask(berth, agent, id, site=site, environment_id="e", folder="/a/b")
    await until(berth.http, path_of(site), lambda told: told.get("waiting") == 1)
    deleted = await berth.http.delete(f"{path_of(site)}/environments/e{'/' + what if what else ''}")
    assert (deleted.status_code, deleted.json()["effect"]) == (200, True)
    told = await until(berth.http, f"/api/agents/{agent}/triggers/t2", lambda told: told.get("state") == "running")
    assert "degraded" in [entry["event"] for entry in told["timeline"]]


async def test_the_same_key_gets_the_first_answer_of_a_site_again(berth: Stack, site: str) -> None:
    await capacity(berth, site, 1)
    headers = {"Idempotency-Key": "k"}
    path = f"{path_of(site)}/capacity"
    fresh = await berth.start_api()
    first = await berth.http.put(path, json={"capacity": 3}, headers=headers)
    newer = await capacity(berth, site, 4)
    await read_at(berth.http, first, path_of(site))
    for client in (*berth.clients[:2], fresh):
        again = await client.put(path, json={"capacity": 3}, headers=headers)
        assert (again.status_code, again.json()["seq"], again.json()["repeated"]) == (200, first.json()["seq"], True)
    other = await berth.http.put(path, json={"capacity": 5}, headers=headers)
    assert (other.status_code, other.json()["code"]) == (409, "trigger_id_conflict")
    assert (await read_at(berth.http, newer, path_of(site)))["capacity"] == 4


@pytest.mark.parametrize(
    ("method", "path", "content"),
    [
        ("GET", "", None),
        ("POST", "/pause", None),
        ("POST", "/resume", None),
        ("GET", "/organizations/o", None),
        ("PUT", "/organizations/o", {"enabled": False}),
        ("PUT", "/departments/d", {"enabled": False}),
        ("DELETE", "/environments/e", None),
        ("DELETE", "/environments/e/folders?path=/a", None),
    ],
)
async def test_a_site_that_nobody_made_is_not_found(
    berth: Stack, site: str, method: str, path: str, content: Any
) -> None:
    answer = await berth.http.request(method, f"{path_of(site)}{path}", json=content)
    assert (answer.status_code, answer.json()["code"]) == (404, "site_unknown")


@pytest.mark.parametrize(
    ("path", "content", "field"),
    [
        ("/capacity", {"capacity": -1}, "capacity"),
        ("/capacity", {"capacity": 10_001}, "capacity"),
        ("/capacity", {"capacity": "3"}, "capacity"),
        ("/capacity", {"capacity": True}, "capacity"),
        ("/capacity", {}, "capacity"),
        ("/organizations/o", {"enabled": 1}, "enabled"),
        ("/organizations/o", {"run_budget": -1}, "run_budget"),
        ("/departments/d", {"name": "x"}, "name"),
    ],
)
async def test_wrong_settings_of_a_site_are_named(berth: Stack, site: str, path: str, content: Any, field: str) -> None:
    answer = await berth.http.put(f"{path_of(site)}{path}", json=content)
    assert (answer.status_code, answer.json()["field"]) == (400, field)


@pytest.mark.parametrize("path", ["a", "/..", "/a/../b", "/%00", ""])
async def test_a_folder_that_is_none_is_refused(berth: Stack, site: str, path: str) -> None:
    await capacity(berth, site, 1)
    answer = await berth.http.delete(f"{path_of(site)}/environments/e/folders?path={path}")
    assert (answer.status_code, answer.json()["code"]) in ((400, "invalid_field"), (400, "invalid_record"))
