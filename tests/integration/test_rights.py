"""Who may what, asked of the real service: every cell of the table in docs/rights.md, and the contract's order."""

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
import pytest_asyncio
from aiokafka import AIOKafkaConsumer, TopicPartition

from api.http.auth import ROLES, Role
from streams import CONTROLS, DECISIONS, TOPICS, WORKERS
from tests.integration.http_stack import Stack, limited, read_at
from tests.integration.workers import PARTITIONS
from tests.tokens import bearer

pytestmark = [pytest.mark.kafka, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

DOCUMENT = Path(__file__).parents[2] / "docs" / "rights.md"
ME = "ann"
MADE = "made"
CODES = frozenset({"access_denied", "owner_required", "person_required", "role_required"})
RELATIONS = ("no access", "access", "access to all", "owner", "owner without access")
BODIES: dict[str, dict[str, Any]] = {
    "PUT /api/agents/{agent_id}": {},
    "PATCH /api/agents/{agent_id}": {"display_name": "a name"},
    "PUT /api/agents/{agent_id}/capacity": {"max_parallel_tasks": 2},
    "POST /api/agents/{agent_id}/triggers": {},
    "POST /api/agents/{agent_id}/conversations": {"message": "x"},
    "POST /api/agents/{agent_id}/conversations/{conversation_id}": {"message": "x"},
    "POST /api/agents/{agent_id}/conversations/{conversation_id}/messages": {"message": "x"},
}
"""Enough for what is allowed to be taken; an address that isn't here gets no body."""


@dataclass(frozen=True)
class Cell:
    """One request of the table: who asks what of whose agent, and what the document says of it."""

    address: str
    role: Role
    relation: str
    codes: frozenset[str]
    """The refusals that it may be; none: it is allowed."""


def cells() -> Iterator[Cell]:
    rows = re.findall(r"^\| `([A-Z]+ /[^`]*)` \| (.*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert len(rows) > 20
    for address, columns in rows:
        words = columns.split(" | ")
        assert len(words) == 1 + len(ROLES)
        for role, word in zip(ROLES, words[1:], strict=True):
            for relation in RELATIONS:
                yield Cell(address, role, relation, refusals(word, relation))


def refusals(word: str, relation: str) -> frozenset[str]:
    has_access = relation in ("access", "access to all", "owner")
    is_enough = {
        "yes": True,
        "access": has_access,
        "owner": relation == "owner",
        "all agents": relation == "access to all",
    }
    if is_enough.get(word):
        return frozenset()
    if word in ("access", "owner", "all agents"):
        return frozenset({"owner_required" if has_access and word == "owner" else "access_denied"})
    code = word.strip("`")
    assert code in CODES, word
    return frozenset({code}) if has_access or code == "person_required" else frozenset({code, "access_denied"})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def agents(berth: Stack) -> dict[str, str]:
    """An agent of mine and one of somebody else's, by relation."""
    mine, other = (f"{name}-{uuid4().hex[:8]}" for name in ("mine", "other"))
    for agent, owner in ((mine, ME), (other, "ben")):
        answer = await limited(berth.http, agent, 1, owner=owner)
        await read_at(berth.http, answer, f"/api/agents/{agent}")
    return {relation: mine if relation.startswith("owner") else other for relation in RELATIONS}


async def ask(http: httpx.AsyncClient, cell: Cell, agent: str) -> tuple[int, dict[str, Any]]:
    """Status, and the body of a refusal."""
    allowed = {"access": (agent,), "owner": (agent,), "access to all": ("*",)}.get(cell.relation, ("another",))
    method, _, path = cell.address.partition(" ")
    path = re.sub(r"\{(\w+)\}", lambda found: agent if found[1] == "agent_id" else MADE, path)
    request = http.build_request(method, path, json=BODIES.get(cell.address), headers=bearer(cell.role, ME, allowed))
    answer = await http.send(request, stream=True)
    try:
        is_problem = answer.headers.get("content-type") == "application/problem+json"
        return answer.status_code, answer.json() if is_problem and await answer.aread() else {}
    finally:
        await answer.aclose()


async def ends(berth: Stack) -> dict[TopicPartition, int]:
    """Where every topic ends that an API or a worker writes for somebody."""
    consumer = AIOKafkaConsumer(bootstrap_servers=berth.kafka.bootstrap)
    await consumer.start()
    try:
        names = [topic.name for topic in TOPICS if topic != WORKERS]
        found: dict[TopicPartition, int] = await consumer.end_offsets(
            [TopicPartition(name, number) for name in names for number in range(PARTITIONS)]
        )
        return found
    finally:
        await consumer.stop()


async def test_every_cell_of_the_table_is_as_the_document_says(berth: Stack, agents: dict[str, str]) -> None:
    everything = list(cells())
    refused = [cell for cell in everything if cell.codes]
    # To a public link its own token is what counts: test_public_links.py.
    allowed = [cell for cell in everything if not cell.codes and "{token}" not in cell.address]
    assert len(refused) > 200 and len(allowed) > 200
    # Streams are left while they are sent, which ends their connection: each request has one of its own.
    each = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=berth.http.base_url, limits=each, timeout=20) as http:
        before = await ends(berth)
        for cell in refused:
            status, body = await ask(http, cell, agents[cell.relation])
            assert status == 403 and body["code"] in cell.codes, (cell, status, body)
        assert await ends(berth) == before, "something was written of what was refused"
        for start in range(0, len(allowed), 20):
            part = allowed[start : start + 20]
            answers = await asyncio.gather(*(ask(http, cell, agents[cell.relation]) for cell in part))
            for cell, (status, body) in zip(part, answers, strict=True):
                assert status not in (401, 403, 405) and status < 500, (cell, status, body)


async def test_without_a_token_only_what_is_open_is_answered(berth: Stack, agents: dict[str, str]) -> None:
    rows = re.findall(r"^\| `([A-Z]+) (/[^`]*)` \| (\S+)", DOCUMENT.read_text(), re.MULTILINE)
    async with httpx.AsyncClient(base_url=berth.http.base_url) as nobody:
        for method, path, word in rows:
            address = re.sub(r"\{(\w+)\}", lambda found: agents["owner"] if found[1] == "agent_id" else MADE, path)
            answer = await nobody.request(method, address)
            if word == "401":
                assert (answer.status_code, answer.json()["code"]) == (401, "token_required"), (method, path)
            else:
                assert word == "yes" and answer.status_code != 403, (method, path)


# The contract's order


@pytest.mark.parametrize("role", ["agent", "runner", "upstream", "system"])
async def test_capacity_is_for_people_before_anything_else(berth: Stack, agents: dict[str, str], role: Role) -> None:
    for agent, allowed in ((agents["owner"], ("*",)), (agents["access"], ()), ("no-such-agent", ("*",))):
        for body in ({"max_parallel_tasks": 2}, {"max_parallel_tasks": "x"}, {}):
            answer = await berth.http.put(f"/api/agents/{agent}/capacity", json=body, headers=bearer(role, ME, allowed))
            assert (answer.status_code, answer.json()["code"]) == (403, "person_required")


async def test_then_the_agent_then_access_then_its_owner(berth: Stack, agents: dict[str, str]) -> None:
    mine, other = agents["owner"], agents["access"]

    async def put(agent: str, *allowed: str, role: Role = "person") -> tuple[int, str | None]:
        answer = await berth.http.put(
            f"/api/agents/{agent}/capacity", json={"max_parallel_tasks": 3}, headers=bearer(role, ME, allowed)
        )
        return answer.status_code, answer.json().get("code", answer.json().get("message"))

    assert await put("no-such-agent") == (404, "agent_not_found")
    assert await put("no-such-agent", "no-such-agent") == (404, "agent_not_found")
    assert await put(other) == (403, "access_denied")
    assert await put(mine) == (403, "access_denied")
    assert await put(other, other) == (403, "owner_required")
    assert await put(mine, mine) == (200, "Capacity updated")
    assert await put(other, role="admin") == (403, "access_denied")
    assert await put(other, other, role="admin") == (200, "Capacity updated")


async def test_the_owner_is_what_the_log_says_at_once(berth: Stack) -> None:
    agent = f"given-{uuid4().hex[:8]}"
    await limited(berth.http, agent, 1, owner="ann")
    ann, ben = (berth.client_of("person", who, (agent,)) for who in ("ann", "ben"))
    path, body = f"/api/agents/{agent}/capacity", {"max_parallel_tasks": 2}
    assert (await ben.put(path, json=body)).json()["code"] == "owner_required"
    given = await ann.patch(f"/api/agents/{agent}", json={"owner": "ben"})
    assert given.status_code == 200
    assert (await ann.put(path, json=body)).json()["code"] == "owner_required"
    assert (await ben.put(path, json=body)).status_code == 200


# 136: identity taken from the request body


async def test_who_asked_is_what_the_token_says_whatever_else_does(berth: Stack) -> None:
    """Case 136."""
    agent = f"asked-{uuid4().hex[:8]}"
    made = await limited(berth.http, agent, 1, owner="ann")
    ann = berth.client_of("person", "ann", (agent,))
    false = {"X-User": "root", "X-Forwarded-User": "root", "requested_by": "root"}
    path = f"/api/agents/{agent}"
    refused = await ann.post(f"{path}/triggers?requested_by=root", json={}, headers=false)
    assert (refused.status_code, refused.json()["field"]) == (400, "requested_by")
    trigger = await ann.post(f"{path}/triggers", json={"requested_by": "root"}, headers=false)
    patch = await ann.patch(path, json={"display_name": "n", "requested_by": "root"}, headers=false)
    stop = await ann.delete(f"{path}/triggers/{trigger.json()['trigger_id']}", headers=false)
    assert {made.status_code, trigger.status_code} == {201} and {patch.status_code, stop.status_code} <= {200, 202}
    decisions = await berth.records(DECISIONS, agent)
    assert [decision["command"]["requested_by"] for decision in decisions] == ["tester", "ann", "ann", "ann"]
    controls = await berth.records(CONTROLS, agent)
    assert [record["requested_by"] for record in controls] == ["tester", "ann"]
    told = await read_at(ann, stop, f"{path}/triggers/{trigger.json()['trigger_id']}")
    assert told["requested_by"] == "ann"


async def test_a_key_is_its_users_own(berth: Stack) -> None:
    agent = f"keys-{uuid4().hex[:8]}"
    await limited(berth.http, agent, 10)
    answers = [
        await berth.client_of("upstream", who, (agent,)).post(
            f"/api/agents/{agent}/triggers", json={}, headers={"Idempotency-Key": "k"}
        )
        for who in ("ann", "ben", "ann")
    ]
    ids = [answer.json()["trigger_id"] for answer in answers]
    assert ids[0] == ids[2] != ids[1]
    assert [answer.json()["repeated"] for answer in answers] == [False, False, True]


# 130: any logged-in user can cancel anybody's item


async def test_whoever_has_no_access_sees_and_changes_nothing(berth: Stack) -> None:
    """Case 130."""
    mine, other = (f"{name}-{uuid4().hex[:8]}" for name in ("one", "two"))
    for agent in (mine, other):
        await limited(berth.http, agent, 1)
        running = await berth.http.post(f"/api/agents/{agent}/triggers", json={"id": "t", "conversation_id": "c"})
        await read_at(berth.http, running, f"/api/agents/{agent}")
    ann = berth.client_of("person", "ann", (mine,))
    before = await berth.sent(other), len(await berth.records(CONTROLS, other))
    path = f"/api/agents/{other}"
    for method, end, body in (
        ("DELETE", "/triggers/t", None),
        ("GET", "/triggers/t", None),
        ("POST", "/conversations/c/stop", None),
        ("POST", "/conversations", {"message": "x", "interactive": True, "on_busy": "force"}),
        ("PUT", "/capacity", {"max_parallel_tasks": 9}),
        ("POST", "/pause", None),
        ("GET", "/queue", None),
        ("GET", "", None),
    ):
        answer = await ann.request(method, f"{path}{end}", json=body)
        assert (answer.status_code, answer.json()["code"]) == (403, "access_denied"), (method, end)
    for reference in ({"parent": {"agent_id": other, "trigger_id": "t"}},
                      {"depends_on": [{"agent_id": other, "conversation_id": "c"}]}):  # fmt: skip
        answer = await ann.post(f"/api/agents/{mine}/triggers", json=reference)
        assert (answer.status_code, answer.json()["code"]) == (403, "access_denied")
        assert answer.json()["agent_id"] == other
    assert (await berth.sent(other), len(await berth.records(CONTROLS, other))) == before
    listed = (await ann.get("/api/agents", params={"limit": 1000})).json()["agents"]
    assert [agent["agent_id"] for agent in listed] == [mine]
    assert (await ann.get("/api/agents/slots")).json()["agents"] == {mine: {"max": 1, "active": 1}}
    nobody = berth.client_of("person", "ann", ())
    assert (await nobody.get("/api/agents")).json()["agents"] == []
    assert (await nobody.get("/api/agents/slots")).json()["agents"] == {}
    assert {mine, other} <= set((await berth.http.get("/api/agents/slots")).json()["agents"])


async def test_bulk_calls_act_only_on_what_the_caller_may_touch_and_list_the_rest(berth: Stack) -> None:
    mine, other = (f"{name}-{uuid4().hex[:8]}" for name in ("one", "two"))
    for agent in (mine, other):
        await limited(berth.http, agent, 1)
        last = await berth.http.post(f"/api/agents/{agent}/triggers", json={"id": "t", "conversation_id": "c"})
    await read_at(berth.http, last, f"/api/agents/{other}")
    ann = berth.client_of("upstream", "ann", (mine,))
    before = await berth.sent(other)

    def told(answer: httpx.Response) -> list[tuple[str, int, str | None]]:
        assert answer.status_code == 200, answer.text
        return [
            (result["agent_id"], result["http_status"], result.get("problem", {}).get("code"))
            for result in answer.json()["results"]
        ]

    many = [{"agent_id": agent, "id": "b"} for agent in (other, mine)]
    asked = await ann.post("/api/triggers:bulk", json={"triggers": many})
    assert told(asked) == [(other, 403, "access_denied"), (mine, 202, None)]
    position = asked.json()["results"][1]["answer"]["log_position"]
    listed = (await ann.get("/api/triggers", params={"min_position": position})).json()["triggers"]
    assert {trigger["agent_id"] for trigger in listed} == {mine}
    assert (await ann.get("/api/triggers", params={"agent": other})).json()["code"] == "access_denied"
    both = [{"agent_id": agent, "trigger_id": "t"} for agent in (other, mine)]
    stopped = await ann.post("/api/triggers:stop", json={"triggers": both})
    assert told(stopped) == [(other, 403, "access_denied"), (mine, 202, None)]
    by_filter = await ann.post("/api/triggers:stop", json={"filter": {}})
    assert {agent for agent, _, _ in told(by_filter)} == {mine}
    assert (await ann.post("/api/triggers:stop", json={"filter": {"agents": [other]}})).json()[
        "code"
    ] == "access_denied"
    nobody = berth.client_of("upstream", "ann", ())
    assert told(await nobody.post("/api/triggers:stop", json={"filter": {}})) == []
    assert await berth.sent(other) == before


async def test_a_person_with_access_approves_and_nobody_else(berth: Stack) -> None:
    agent = f"approved-{uuid4().hex[:8]}"
    await limited(berth.http, agent, 1)
    await berth.http.post(f"/api/agents/{agent}/triggers", json={"id": "t", "approval_required": True})
    path = f"/api/agents/{agent}/triggers/t/approve"
    for role in ("agent", "runner", "upstream", "system"):
        for named in (agent, "another"):
            answer = await berth.http.post(path, headers=bearer(role, "ann", (named,)))
            assert (answer.status_code, answer.json()["code"]) == (403, "person_required")
    denied = await berth.http.post(path, headers=bearer("person", "ann", ("another",)))
    assert (denied.status_code, denied.json()["code"]) == (403, "access_denied")
    approved = await berth.http.post(path, headers=bearer("person", "ann", (agent,)))
    assert (approved.status_code, approved.json()["status"]) == (200, "running")
    commands = [decision["command"] for decision in await berth.records(DECISIONS, agent)]
    assert [command["requested_by"] for command in commands if command["type"] == "approve"] == ["ann"]


async def test_a_runner_without_agents_gets_nothing_and_waits_no_longer_than_it_asked(berth: Stack) -> None:
    answer = await berth.http.get("/api/runners/dispatches?agents=*&wait_seconds=1", headers=bearer("runner", "r", ()))
    assert (answer.status_code, answer.json()["dispatches"]) == (200, [])
