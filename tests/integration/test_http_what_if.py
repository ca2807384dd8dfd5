"""Another policy over HTTP: the command's own answer, by a process that ends with whoever wanted it."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio

from api.http.problems import Problem
from api.http.requests import WhatIfRequest
from api.http.what_if import BOUNDED, MEMORY_KIB_MAX, WhatIfs, answer_of
from streams import DECISIONS, DISPATCHES, STATUSES
from tests.brokers import until
from tests.integration.http_stack import Stack, limited, read_at
from tests.integration.test_audit_commands import said, written
from tests.integration.workers import PARTITIONS

pytestmark = [pytest.mark.kafka, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

PATH = "/api/audit/what-if"
CHANGE = {"limits": {"w/r=i:ter": 3}}
Json = dict[str, Any]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lived(berth: Stack) -> AsyncIterator[Stack]:
    """An agent with a name that is hard to write on a command line, which had three triggers in turn."""
    agent = "w%2Fr=i:ter"
    made = await berth.http.put("/api/sites/default/capacity", json={"capacity": 2})
    assert made.status_code == 200, made.text
    await limited(berth.http, agent, 1)
    for number in range(3):
        last = await berth.http.post(
            f"/api/agents/{agent}/triggers",
            json={"id": f"t{number}", "conversation_id": f"c{number}", "organization_id": "a/c:m=e"},
        )
    for number in range(3):
        dispatch = (await dispatched(berth, number + 1))[number]
        about = {name: dispatch[name] for name in ("conversation_id", "execution_id")}
        await berth.send(STATUSES, "w/r=i:ter", type="status", v=1, status="finished", **about)
    await until(lambda: all_finished(berth))  # so that nothing is written any more
    await read_at(berth.http, last, f"/api/agents/{agent}")
    yield berth


async def all_finished(berth: Stack) -> bool:
    decisions = await berth.records(DECISIONS, "w/r=i:ter")
    return [event["type"] for one in decisions for event in one.get("events", ())].count("finished") == 3


async def dispatched(berth: Stack, count: int) -> list[Json]:
    async def there() -> bool:
        return len(await berth.records(DISPATCHES, "w/r=i:ter")) >= count

    await until(there)
    return await berth.records(DISPATCHES, "w/r=i:ter")


async def test_the_answer_is_that_of_the_command_and_nothing_is_touched(lived: Stack, tmp_path: Path) -> None:
    before = await written(lived)
    wanted: Json = {
        "limits": {"w/r=i:ter": 3, "*": "unlimited"},
        "capacities": {"default": 8},
        "gates": [{"scope": "organization", "name": "a/c:m=e", "enabled": False}],
        "until": "2099-01-01T00:00:00Z",
    }
    answer = await lived.http.post(PATH, json=wanted, timeout=60)
    assert answer.status_code == 200, answer.text
    words = (
        *("what-if", "--json", "--limit", "w/r=i:ter=3", "--limit", "*=unlimited", "--capacity", "8"),
        *("--gate", "organization:a%2Fc:m=e=closed", "--until", "2099-01-01T00:00:00Z"),
    )
    assert answer.json() == json.loads(await said(lived, tmp_path, *words))
    assert await written(lived) == before, "nothing was sent, and no group joined"
    (effect,) = (one for one in answer.json()["agents"] if one["name"] == "w/r=i:ter")
    assert effect["before"]["triggers"] == 3
    assert effect["after"]["max"] == 0 < effect["before"]["max"]


async def test_a_stretch_in_which_nothing_happened_is_said(lived: Stack) -> None:
    answer = await lived.http.post(PATH, json={**CHANGE, "until": "2020-01-01T00:00:00Z"}, timeout=60)
    assert (answer.status_code, answer.json()["code"]) == (404, "nothing_recorded")


WRONG: list[tuple[str, Json]] = [
    ("body", {}),
    ("body", {"since": "2026-01-01T00:00:00Z"}),
    ("body", {"limits": {}, "capacities": {}, "gates": []}),
    ("body", {**CHANGE, "since": "2026-01-02T00:00:00Z", "until": "2026-01-02T00:00:00Z"}),
    ("limits.a", {"limits": {"a": 0}}),
    ("limits.a", {"limits": {"a": 11}}),
    ("limits.a", {"limits": {"a": "3"}}),
    ("limits.a", {"limits": {"a": True}}),
    ("limits.a", {"limits": {"a": None}}),
    ("limits", {"limits": [1]}),
    ("limits", {"limits": {f"a{number}": 1 for number in range(101)}}),
    ("capacities.s", {"capacities": {"s": -1}}),
    ("capacities.s", {"capacities": {"s": 10_001}}),
    ("capacities.s", {"capacities": {"s": 1.0}}),
    ("gates.0.enabled", {"gates": [{"scope": "organization", "name": "o"}]}),
    ("gates.0.enabled", {"gates": [{"scope": "organization", "name": "o", "enabled": "no"}]}),
    ("gates.0.scope", {"gates": [{"scope": "agent", "name": "o", "enabled": True}]}),
    ("gates.0.name", {"gates": [{"scope": "organization", "name": "", "enabled": True}]}),
    ("gates.0.more", {"gates": [{"scope": "organization", "name": "o", "enabled": True, "more": 1}]}),
    ("since", {**CHANGE, "since": "2h"}),
    ("since", {**CHANGE, "since": "9999-12-31T23:59:59.999999+14:00"}),
    ("until", {**CHANGE, "until": "2026-01-01T00:00:00"}),
    ("more", {**CHANGE, "more": 1}),
]


async def test_a_body_that_cannot_be_is_refused_with_its_field(lived: Stack) -> None:
    for field, body in WRONG:
        answer = await lived.http.post(PATH, json=body)
        assert answer.status_code == 400, (body, answer.text)
        assert answer.json()["field"] == field, (body, answer.text)
    for key in ("", "a\nb", "x" * 201):
        answer = await lived.http.post(PATH, json={"limits": {key: 1}})
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid_field"), answer.text


async def test_stretches_at_the_ends_of_time_are_stretches(lived: Stack) -> None:
    first, last = "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z"
    for stretch, status in (({"since": first, "until": last}, 200), ({"since": first}, 200), ({"until": first}, 404)):
        answer = await lived.http.post(PATH, json={**CHANGE, **stretch}, timeout=60)
        assert answer.status_code == status, (stretch, answer.text)


async def test_whatever_is_sent_is_refused_or_answered(lived: Stack, seed: int) -> None:
    chance = random.Random(seed)
    replayed = 0
    for _ in range(300):
        body = _any_body(chance)
        try:
            WhatIfRequest.model_validate(body)
        except ValueError:
            pass
        else:  # each costs a process
            replayed += 1
            if replayed > 4:
                continue
        answer = await lived.http.post(
            PATH, content=json.dumps(body), headers={"Content-Type": "application/json"}, timeout=60
        )
        assert answer.status_code in (200, 400, 404), (body, answer.status_code, answer.text)
    assert replayed > 0


def _any_body(chance: random.Random) -> Any:
    """A body that could be sent, with about one thing in three replaced by something else."""
    texts = ["a", "*", "w/r=i:ter", "-x", "--json", "=", "a=b", "é😀", "%2F", "$(x)", "'\"", "", "\u0001", "x" * 201]
    others: list[Any] = [None, True, -1, 0, 1, 3, 1e300, 10**30, "unlimited", [], {}, [[]], *texts]
    times = ["2026-01-01T00:00:00Z", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59.999999+14:00", "2026-13-01T00:00:00Z"]

    def maybe(value: Any) -> Any:
        return chance.choice(others) if chance.random() < 0.08 else value

    def gate() -> Any:
        return {
            "site": maybe(chance.choice(texts)),
            "scope": maybe(chance.choice(["organization", "department"])),
            "name": maybe(chance.choice(texts)),
            "enabled": maybe(chance.random() < 0.5),
        }

    body = {
        "limits": maybe({chance.choice(texts): maybe(chance.choice([1, 10, "unlimited"])) for _ in range(2)}),
        "capacities": maybe({chance.choice(texts): maybe(chance.choice([0, 4, 10_000]))}),
        "gates": maybe([maybe(gate()) for _ in range(chance.randrange(3))]),
        "since": chance.choice(times),
        "until": chance.choice(times),
        chance.choice(texts): 1,
    }
    return maybe({name: value for name, value in body.items() if chance.random() < 0.6})


# One process, and its end


def replays(api_pid: int) -> list[psutil.Process]:
    """The processes of an API that replay something, and what watches over them."""
    found = []
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(api_pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child)
    return found


def command_of(process: psutil.Process) -> list[str]:
    """Its command line; empty when it has ended meanwhile."""
    with suppress(psutil.NoSuchProcess):
        words: list[str] = process.cmdline()
        return words
    return []


@asynccontextmanager
async def frozen(
    berth: Stack, http: httpx.AsyncClient, pid: int
) -> AsyncIterator[tuple[asyncio.Task[Any], psutil.Process]]:
    """A request whose replay stands still, so that it doesn't end by itself; its shells have become what they start."""
    asking = asyncio.create_task(http.post(PATH, json=CHANGE, timeout=120))
    found: list[psutil.Process] = []

    async def there() -> bool:
        assert not asking.done(), asking.result().text
        found[:] = [one for one in replays(pid) if command_of(one)[1:4] == ["-m", "api.cli", "what-if"]]
        return bool(found)

    try:
        await until(there)
        found[0].suspend()
        yield asking, found[0]
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest_asyncio.fixture(loop_scope="module")
async def another(lived: Stack) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    """An API for one test, which it may end."""
    http = await lived.start_api()
    yield http, lived.apis[-1]
    await lived.apis[-1].discard()


async def test_one_at_a_time_and_a_client_that_leaves_takes_it_along(
    lived: Stack, another: tuple[httpx.AsyncClient, Any]
) -> None:
    http, api = another
    pid = api.process.pid
    async with frozen(lived, http, pid) as (asking, process):
        busy = await http.post(PATH, json=CHANGE)
        assert (busy.status_code, busy.json()["code"]) == (429, "what_if_busy")
        assert int(busy.headers["retry-after"]) > 0
        assert (await lived.http.post(PATH, json=CHANGE, timeout=60)).status_code == 200, "another instance has time"
        assert (await http.get("/api/agents")).status_code == 200
        assert process.is_running()
        assert process.nice() > psutil.Process(pid).nice()
        assert not {"BERTH_JWT_SECRET", "BERTH_DATABASE_URL"} & process.environ().keys()
        asking.cancel()
        await until(lambda: gone(process))
    await until(lambda: none_left(pid))
    assert (await http.post(PATH, json=CHANGE, timeout=60)).status_code == 200, "the next one may ask"
    await until(lambda: none_left(pid))


async def none_left(pid: int) -> bool:
    return not replays(pid)


async def test_it_ends_with_the_service_which_says_so(lived: Stack, another: tuple[httpx.AsyncClient, Any]) -> None:
    http, api = another
    async with frozen(lived, http, api.process.pid) as (asking, process):
        watchers = replays(api.process.pid)
        api.send(signal.SIGTERM)
        answer = await asyncio.wait_for(asking, 20)
        assert (answer.status_code, answer.json()["code"]) == (503, "service_stopping")
        assert await api.ended() == 0
        for one in (process, *watchers):
            await until(lambda one=one: gone(one))  # type: ignore[misc]


async def test_it_ends_with_a_service_that_is_killed(lived: Stack, another: tuple[httpx.AsyncClient, Any]) -> None:
    http, api = another
    async with frozen(lived, http, api.process.pid) as (_, process):
        watchers = replays(api.process.pid)
        await api.kill()
        for one in (process, *watchers):
            await until(lambda one=one: gone(one))  # type: ignore[misc]


async def _never() -> None:
    await asyncio.Event().wait()


async def test_it_takes_no_longer_than_it_may(lived: Stack) -> None:
    what_ifs = WhatIfs(lived.kafka.bootstrap, PARTITIONS, seconds_max=0.1)
    with pytest.raises(Problem) as raised:
        await what_ifs.answer(WhatIfRequest.model_validate(CHANGE), _never())
    assert (raised.value.status, raised.value.code) == (504, "what_if_too_much")
    assert "since and until" in raised.value.detail

    async def nothing_replays() -> bool:
        return not [one for one in replays(os.getpid()) if "what-if" in command_of(one)]

    await until(nothing_replays)


async def test_its_answer_is_no_larger_than_it_may(lived: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.http.what_if.ANSWER_BYTES_MAX", 100)
    with pytest.raises(Problem) as raised:
        await WhatIfs(lived.kafka.bootstrap, PARTITIONS).answer(WhatIfRequest.model_validate(CHANGE), _never())
    assert (raised.value.status, raised.value.code) == (504, "what_if_too_much")


async def test_it_takes_no_more_memory_than_it_may() -> None:
    with TemporaryFile() as output, TemporaryFile() as errors:
        greedy = f"bytearray({MEMORY_KIB_MAX} * 1024)"
        done = await asyncio.create_subprocess_exec(
            *BOUNDED, sys.executable, "-c", greedy, stdin=subprocess.DEVNULL, stdout=output, stderr=errors
        )
        with pytest.raises(Problem) as raised:
            answer_of(await asyncio.wait_for(done.wait(), 30), output, errors)
    assert (raised.value.status, raised.value.code) == (504, "what_if_too_much")
    assert "memory" in raised.value.detail


async def test_without_kafka_it_is_said() -> None:
    with pytest.raises(Problem) as raised:
        await WhatIfs("127.0.0.1:1", PARTITIONS).answer(WhatIfRequest.model_validate(CHANGE), _never())
    assert (raised.value.status, raised.value.code) == (503, "log_unavailable")
