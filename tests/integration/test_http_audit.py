"""Looking back over HTTP: decisions page by page, an agent as it was, and the last verification."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import psycopg
import pytest

from api.http.app import create_app
from api.http.auth import ROLES
from streams import DECISIONS, SITE_DECISIONS
from streams.audit.as_of import AgentThen, agent_then
from streams.audit.logged import merged, read
from streams.audit.past import Past
from streams.codec import partition_of
from streams.rules.order import format_instant
from tests.brokers import until
from tests.integration.http_stack import Stack, got, limited, read_at, until_status
from tests.integration.workers import PARTITIONS, ROOT
from tests.tokens import AUTHENTICATION, bearer

pytestmark = [pytest.mark.kafka, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

Json = dict[str, Any]
PRIVATE = "private words"


@pytest.fixture
def agent() -> str:
    return f"agent-{uuid4().hex[:12]}"


async def pages(http: httpx.AsyncClient, **parameters: Any) -> list[list[Json]]:
    """Every page of decisions, one after the other."""
    found: list[list[Json]] = []
    after = 0
    while True:
        page = await got(http, "/api/audit/decisions", **{"after": after, **parameters})
        found.append(page["decisions"])
        if page["next_cursor"] is None:
            return found
        after = page["next_cursor"]
        assert after == page["decisions"][-1]["decision"]["seq"]


async def work(berth: Stack, agent: str, triggers: int) -> httpx.Response:
    """An agent with a few triggers, of which one runs."""
    last = await limited(berth.http, agent, 1)
    for number in range(triggers):
        last = await berth.http.post(
            f"/api/agents/{agent}/triggers", json={"id": f"t{number}", "message": PRIVATE, "payload": [PRIVATE]}
        )
        assert last.status_code in (201, 202), last.text
    return last


# Decisions


async def test_decisions_are_those_of_the_log_page_by_page_while_others_come(berth: Stack, agent: str) -> None:
    last = await work(berth, agent, 12)
    await read_at(berth.http, last, f"/api/agents/{agent}")
    first = (await got(berth.http, "/api/audit/decisions", agent=agent, limit=5))["decisions"]

    async def go_on() -> httpx.Response:
        for number in range(12):
            answer = await berth.http.delete(f"/api/agents/{agent}/triggers/t{number}")
            assert answer.status_code in (200, 202), answer.text
        return answer

    going_on = asyncio.create_task(go_on())
    while not going_on.done():
        found = [one["decision"]["seq"] for page in await pages(berth.http, agent=agent, limit=5) for one in page]
        assert found == list(range(1, len(found) + 1))
        assert (await got(berth.http, "/api/audit/decisions", agent=agent, limit=5))["decisions"] == first
    position = (await going_on).json()["log_position"]
    found_pages = await pages(berth.http, agent=agent, limit=5, min_position=position)
    assert [len(page) for page in found_pages[:-1]] == [5] * (len(found_pages) - 1)
    logged = [{name: value for name, value in one.items() if name != "headers"} for one in await written(berth, agent)]
    everything = [one for page in found_pages for one in page]
    assert [one["decision"] for one in everything] == logged
    assert {one["partition"] for one in everything} == {partition_of(agent, PARTITIONS)}
    offsets = [one["offset"] for one in everything]
    assert offsets == sorted(set(offsets))
    assert PRIVATE not in json.dumps(everything)
    end = len(logged)
    assert (await got(berth.http, "/api/audit/decisions", agent=agent, after=end))["decisions"] == []


async def written(berth: Stack, agent: str) -> list[Json]:
    return await berth.records(DECISIONS, agent)


async def test_those_of_a_trigger_name_it(berth: Stack, agent: str) -> None:
    await work(berth, agent, 3)
    stopped = await berth.http.delete(f"/api/agents/{agent}/triggers/t1")
    await read_at(berth.http, stopped, f"/api/agents/{agent}")
    found = [one["decision"] for page in await pages(berth.http, agent=agent, trigger="t1", limit=1) for one in page]
    assert [one["command"]["type"] for one in found] == ["trigger", "stop"]
    everything = [one["decision"] for page in await pages(berth.http, agent=agent) for one in page]
    assert [one for one in everything if one in found] == found
    end = found[-1]["seq"]
    assert (await got(berth.http, "/api/audit/decisions", agent=agent, trigger="t1", after=end))["decisions"] == []


async def test_what_cannot_be_paged_is_refused_with_what_to_do(berth: Stack, agent: str) -> None:
    await read_at(berth.http, await work(berth, agent, 1), f"/api/agents/{agent}")
    path = "/api/audit/decisions"
    for parameters in ({}, {"trigger": "t0"}):
        refused = await got(berth.http, path, 400, **parameters)
        assert (refused["code"], refused["field"]) == ("missing_field", "agent")
    assert "trigger needs it too" in refused["detail"]
    assert (await got(berth.http, path, 404, agent="nobody"))["code"] == "agent_not_found"
    assert (await got(berth.http, path, 404, agent=agent, trigger="no"))["code"] == "trigger_unknown"
    for wrong in ({"after": -1}, {"after": 2**63}, {"after": "MTI"}, {"limit": 1001}, {"limit": 0}, {"trigger": ""}):
        refused = await got(berth.http, path, 400, agent=agent, **wrong)
        assert (refused["code"], refused["field"]) == ("invalid_field", next(iter(wrong)))


@pytest.mark.parametrize("role", ROLES)
async def test_decisions_are_for_whoever_has_access_to_the_agent(berth: Stack, agent: str, role: Any) -> None:
    await read_at(berth.http, await work(berth, agent, 1), f"/api/agents/{agent}")
    for allowed, status in (((agent,), 200), (("*",), 200), (("another",), 403), ((), 403)):
        http = berth.client_of(role, "ann", allowed)
        for parameters in ({}, {"trigger": "t0"}, {"trigger": "nothing"} if status == 403 else {}):
            body = await got(http, "/api/audit/decisions", status, agent=agent, **parameters)
            assert body.get("code") == (None if status == 200 else "access_denied")
        for path in ("capacity", "queue"):
            body = await got(http, f"/api/agents/{agent}/{path}", status, as_of=1)
            assert body.get("code") == (None if status == 200 else "access_denied")


@asynccontextmanager
async def served_here(berth: Stack) -> AsyncIterator[httpx.AsyncClient]:
    """An API in this process, on the same servers."""
    app = create_app(berth.kafka.bootstrap, PARTITIONS, berth.database_url, AUTHENTICATION)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", headers=bearer()) as http,
    ):
        await until_status(http, "/api/agents", 200)
        yield http


async def test_a_page_is_bounded_in_bytes_too_and_leaves_nothing_out(
    berth: Stack, agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await read_at(berth.http, await work(berth, agent, 9), f"/api/agents/{agent}")
    ((*whole,),) = await pages(berth.http, agent=agent)
    monkeypatch.setattr("api.http.routes.audit.PAGE_CHARACTERS_MAX", 1_500)
    monkeypatch.setattr("api.http.routes.audit._READ_ROWS", 2)
    async with served_here(berth) as http:
        small = await pages(http, agent=agent)
    assert len(small) > 3
    assert [one for page in small for one in page] == whole


# An agent as it was


async def test_as_of_is_what_was_answered_then(berth: Stack, agent: str) -> None:
    """Every answer about the present, asked for again when it is past; and between them the fold of the log."""
    path = f"/api/agents/{agent}"
    lived: dict[int, tuple[Json, Json]] = {}

    async def step(answer: httpx.Response) -> Json:
        assert answer.status_code < 300, answer.text
        body: Json = answer.json()
        about = await read_at(berth.http, answer, path)
        lived[about["seq"]] = tuple([await got(berth.http, f"{path}/{what}") for what in ("capacity", "queue")])  # type: ignore[assignment]
        return body

    await step(await limited(berth.http, agent, 2))
    first = await step(await berth.http.post(f"{path}/triggers", json={"id": "a", "message": "x" * 300}))
    soon = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    for id, more in (
        ("b", {"conversation_id": first["conversation_id"], "kind": "chat", "priority": 3}),
        ("c", {"interactive": True, "on_busy": "queue", "message": PRIVATE}),
        ("d", {"available_at": soon, "expires_at": "2099-01-01T00:00:00Z"}),
        ("e", {"approval_required": True}),
    ):
        await step(await berth.http.post(f"{path}/triggers", json={"id": id, **more}))
    await step(await berth.http.put(f"{path}/capacity", json={"max_parallel_tasks": 1}))
    forced = {"id": "f", "interactive": True, "on_busy": "force"}
    await step(await berth.http.post(f"{path}/triggers", json=forced))
    await step(await berth.http.post(f"{path}/pause"))
    await step(await berth.http.patch(path, json={"serial": True}))
    await step(await berth.http.delete(f"{path}/triggers/d"))

    decisions = [read(DECISIONS.name, 0, 0, json.dumps(bare(one)).encode()) for one in await written(berth, agent)]
    at_of = {one.decision.seq: one.decision.at for one in decisions}
    for seq, (capacity, queue) in lived.items():
        for moment in (seq, format_instant(at_of[seq]) if at_of.get(seq + 1) != at_of[seq] else seq):
            then = [await got(berth.http, f"{path}/{what}", as_of=moment) for what in ("capacity", "queue")]
            for told in then:
                assert told.pop("as_of") == {"seq": seq, "at": format_instant(at_of[seq])}
            assert (timeless(then[0]), then[1]) == (timeless(capacity), queue), (seq, moment)
    assert len(lived) > 8
    for seq in range(3, len(at_of) + 1):
        if at_of[seq - 1] < at_of[seq]:
            told = await got(berth.http, f"{path}/queue", as_of=format_instant(at_of[seq] - 1))
            assert told["as_of"] == {"seq": seq - 1, "at": format_instant(at_of[seq] - 1)}
    past = Past()
    for logged in decisions:
        past.fold(logged)
        await same_as_fold(berth, agent, past, logged.decision.at)


def bare(record: Json) -> Json:
    return {name: value for name, value in record.items() if name != "headers"}


def timeless(capacity: Json) -> Json:
    """Without what goes on, and without texts, which come into the tables by themselves."""
    left_out = ("duration_seconds", "message_preview")
    slots = [{name: value for name, value in slot.items() if name not in left_out} for slot in capacity["slots"]]
    return {**capacity, "slots": slots}


async def same_as_fold(berth: Stack, agent: str, past: Past, at: int) -> None:
    """Over HTTP, after the last decision that was folded of the agent, is what the fold says at that instant."""
    folded: AgentThen = agent_then(past.agents[agent], at, past.sites)
    path = f"/api/agents/{agent}"
    capacity = await got(berth.http, f"{path}/capacity", as_of=folded.seq)
    limit = None if folded.limit == "unlimited" else folded.limit
    assert (capacity["max_parallel_tasks"], capacity["active_slots"], capacity["available_slots"]) == (
        limit, folded.running, folded.available,
    )  # fmt: skip
    assert (capacity["forced"], capacity["paused"], capacity["serial"]) == (folded.forced, folded.paused, folded.serial)
    assert [
        (slot["slot_number"], slot["trigger_id"], slot["execution_id"], slot["started_at"], slot["duration_seconds"])
        for slot in capacity["slots"]
    ] == [
        (slot.slot_number, slot.trigger_id, slot.execution_id, format_instant(slot.since),
         pytest.approx((at - slot.since) / 1e6, abs=0.001))
        for slot in folded.slots
    ]  # fmt: skip
    queue = await got(berth.http, f"{path}/queue", as_of=folded.seq)
    assert queue["as_of"] == capacity["as_of"] == {"seq": folded.seq, "at": format_instant(at)}
    assert queue["waiting"] == capacity["waiting"] == len(folded.queue)
    assert [(one["position"], one["trigger_id"], one["reasons"]) for one in queue["queue"]] == [
        (one.position, one.trigger_id, [cause.reason for cause in one.causes]) for one in folded.queue
    ]


async def test_as_of_shows_what_the_site_had_decided_by_then(berth: Stack, agent: str) -> None:
    """Two agents want one folder; who waits for it, and that nobody does any more, is what the log says."""
    other, site = f"{agent}-2", f"site-{agent}"
    made = await berth.http.put(f"/api/sites/{site}/capacity", json={"capacity": 2})
    assert made.status_code == 200
    for one in (agent, other):
        await limited(berth.http, one, 2)
    home = {"site": site, "worker": True, "environment_id": "e", "folder": "/x", "interactive": True}
    got_it = await berth.http.post(f"/api/agents/{agent}/triggers", json={"id": "a", "on_busy": "ask", **home})
    assert got_it.status_code == 201, got_it.text
    for id in ("b", "c"):
        waits = await berth.http.post(f"/api/agents/{other}/triggers", json={"id": id, "on_busy": "queue", **home})
        assert waits.status_code == 202, waits.text
    await read_at(berth.http, waits, f"/api/agents/{other}")
    await until_reason(berth, other, "agent_environment_folder_busy")
    await berth.http.delete(f"/api/agents/{other}/triggers/c")
    await until_told(berth, f"/api/sites/{site}", waiting=1, granted=1)  # from here on nothing happens by itself
    records = {
        **{one: await written(berth, one) for one in (agent, other)},
        site: await berth.records(SITE_DECISIONS, site),
    }
    await until_told(berth, f"/api/agents/{other}", seq=len(records[other]))
    await until_told(berth, f"/api/sites/{site}", seq=len(records[site]))
    sources = [
        [
            read((SITE_DECISIONS if decider == site else DECISIONS).name, number, 0, json.dumps(bare(one)).encode())
            for one in found
        ]
        for number, (decider, found) in enumerate(records.items())
    ]
    reasons = set()
    for logged in sources[1]:
        past = Past()
        for earlier in merged(sources, logged.decision.at):
            if earlier.decider != logged.decider or earlier.decision.seq <= logged.decision.seq:
                past.fold(earlier)
        await same_as_fold(berth, other, past, logged.decision.at)
        queue = await got(berth.http, f"/api/agents/{other}/queue", as_of=logged.decision.seq)
        reasons |= {one["reason"] for one in queue["queue"]}
    assert "agent_environment_folder_busy" in reasons


async def until_told(berth: Stack, path: str, **wanted: int) -> None:
    async def is_so() -> bool:
        told = await got(berth.http, path)
        return all(told[name] == value for name, value in wanted.items())

    await until(is_so)


async def until_reason(berth: Stack, agent: str, reason: str) -> None:
    async def is_so() -> bool:
        queue = (await got(berth.http, f"/api/agents/{agent}/queue"))["queue"]
        return bool(queue) and all(one["reason"] == reason for one in queue)

    await until(is_so)


async def test_a_queue_of_the_past_has_pages(berth: Stack, agent: str) -> None:
    await read_at(berth.http, await work(berth, agent, 8), f"/api/agents/{agent}")
    path = f"/api/agents/{agent}/queue"
    seq = (await got(berth.http, f"/api/agents/{agent}"))["seq"]
    stopped = await berth.http.post(f"/api/agents/{agent}/archive")
    assert await read_at(berth.http, stopped, path) is not None
    whole = (await got(berth.http, path, as_of=seq))["queue"]
    found: list[Json] = []
    cursor: Json = {}
    while True:
        page = await got(berth.http, path, as_of=seq, limit=3, **cursor)
        found += page["queue"]
        assert page["waiting"] == 7
        if page["next_cursor"] is None:
            break
        cursor = {"cursor": page["next_cursor"]}
    assert found == whole
    assert [one["position"] for one in found] == list(range(1, 8))
    refused = await got(berth.http, path, 400, as_of=seq, cursor="WyIyMDI2LTAxLTAxIiwgIjIwMjYtMDEtMDEiLCAieCJd")
    assert (refused["code"], refused["field"]) == ("invalid_field", "cursor")


@pytest.mark.parametrize("what", ["capacity", "queue"])
async def test_moments_at_which_there_is_nothing_are_told_apart(berth: Stack, agent: str, what: str) -> None:
    refused_first = await berth.http.post(f"/api/agents/{agent}/pause")
    assert refused_first.json()["code"] == "agent_not_found"
    path = f"/api/agents/{agent}/{what}"
    made = await limited(berth.http, agent, 1)
    about = await read_at(berth.http, made, f"/api/agents/{agent}")
    for moment in (0, "2020-01-01T00:00:00Z", "0001-01-01T00:00:00Z", *((1,) if about["seq"] > 1 else ())):
        early = await got(berth.http, path, 404, as_of=moment)
        assert (early["code"], early["created_at"]) == ("agent_not_made_yet", about["created_at"]), moment
    for moment in (about["seq"] + 1, 10**16 - 1, "9999-12-31T23:59:59Z"):
        late = await got(berth.http, path, 404, as_of=moment)
        assert (late["code"], late["seq"], late["at"]) == ("not_decided_yet", about["seq"], about["decided_at"]), moment
    for moment in (
        "",
        "x",
        "-1",
        "1.5",
        "10" * 9,
        "2026-03-01",
        "2026-03-01T10:00:00",
        "2026-02-30T10:00:00Z",
        "now",
        "2h",
        "١",
    ):
        wrong = await got(berth.http, path, 400, as_of=moment)
        assert (wrong["code"], wrong["field"]) == ("invalid_field", "as_of"), moment
    assert (await got(berth.http, f"/api/agents/nobody/{what}", 404, as_of=1))["code"] == "agent_not_found"
    assert (await got(berth.http, path, as_of=about["decided_at"]))["as_of"]["seq"] == about["seq"]


async def test_texts_are_shown_as_long_as_they_are_kept(berth: Stack, agent: str) -> None:
    await read_at(berth.http, await work(berth, agent, 1), f"/api/agents/{agent}")
    seq = (await got(berth.http, f"/api/agents/{agent}"))["seq"]
    path = f"/api/agents/{agent}/capacity"

    async def is_shown() -> bool:
        (slot,) = (await got(berth.http, path, as_of=seq))["slots"]
        return bool(slot["message_preview"] == PRIVATE)

    await until(is_shown)  # texts come into the tables by themselves
    with psycopg.connect(berth.database_url, autocommit=True) as connection:
        connection.execute("DELETE FROM berth.texts WHERE agent_id = %s", (agent,))
    (slot,) = (await got(berth.http, path, as_of=seq))["slots"]
    assert slot["message_preview"] is None


# The last verification


def run(berth: Stack, directory: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
    known = {"BERTH_KAFKA": berth.kafka.bootstrap, "BERTH_DATABASE_URL": berth.database_url, "COLUMNS": "200"}
    known |= {"BERTH_DATA_DIRECTORY": str(directory), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "api.cli", *words],
        cwd=directory, env=clean | known | environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


async def test_the_last_verification_is_what_the_command_said_also_after_a_rebuild(
    berth: Stack, agent: str, tmp_path: Path
) -> None:
    never = await got(berth.http, "/api/audit/verify", 404)
    assert never["code"] == "never_verified"
    assert "berth verify" in never["detail"]
    await read_at(berth.http, await work(berth, agent, 2), f"/api/agents/{agent}")
    done = await asyncio.to_thread(run, berth, tmp_path, "verify", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    told = await got(berth.http, "/api/audit/verify")
    verified_at = datetime.fromisoformat(told.pop("verified_at"))
    assert abs(datetime.now(UTC) - verified_at) < timedelta(minutes=5)
    assert told == said
    assert (told["sound"], told["recompute"], told["violations"]) == (True, True, [])
    assert {(one["topic"], one["partition"]) for one in told["positions"]} == {
        (topic, number) for topic in (DECISIONS.name, SITE_DECISIONS.name) for number in range(PARTITIONS)
    }
    await berth.http.post(f"/api/agents/{agent}/pause")
    rebuilt = await asyncio.to_thread(run, berth, tmp_path, "projections", "rebuild")
    assert rebuilt.returncode == 0, rebuilt.stderr
    assert (await got(berth.http, "/api/audit/verify"))["decisions"] == said["decisions"]
    again = await asyncio.to_thread(run, berth, tmp_path, "verify", "--no-recompute", "--json")
    assert again.returncode == 0, again.stderr
    told = await got(berth.http, "/api/audit/verify")
    assert (told["recompute"], told["recomputed"]) == (False, 0)
    assert told["decisions"] > said["decisions"]


async def test_a_result_that_cannot_be_kept_fails_nothing_and_is_said(berth: Stack, tmp_path: Path) -> None:
    for url, told in (
        ("postgresql://nobody@127.0.0.1:1/nothing", "onnection"),
        (berth.postgres.url, "berth projector makes them"),
    ):
        done = await asyncio.to_thread(run, berth, tmp_path, "verify", "--json", BERTH_DATABASE_URL=url)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["sound"] is True
        said = " ".join(done.stderr.split())
        assert "isn't in PostgreSQL" in said
        assert told in said
