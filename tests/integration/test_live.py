"""Decisions as server-sent events: all of them that may be seen, each once, whatever breaks in between."""

import asyncio
import json
import random
import signal
import socket
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import httpx
import psutil
import pytest

from api.http.live_log import LogVector
from streams import DECISIONS, SITE_DECISIONS, TRIGGERS
from streams.codec import partition_of
from tests.brokers import WAIT_SECONDS
from tests.integration.events import Json, Listener, decisions_by_key
from tests.integration.http_stack import Stack, limited
from tests.integration.workers import PARTITIONS, Log, sending
from tests.tokens import claims, signed

pytestmark = [pytest.mark.kafka, pytest.mark.asyncio(loop_scope="module")]

LARGE_TURNS = 3_000
"""Turns whose decisions together are more than a client's queue and the buffers of its connection hold."""
IDLE_CLIENTS = 1_000
IDLE_CLIENT_BYTES_MAX = 100 * 1024


async def request_turns(bootstrap: str, agents: list[str], count: int, per_second: float = 1e9, **fields: Any) -> None:
    """So many triggers, spread over the agents."""
    began = time.monotonic()
    async with sending(bootstrap) as producer:
        for number in range(count):
            agent_id = agents[number % len(agents)]
            id = f"t{number}"
            content = {"type": "trigger", "v": 1, "id": id, "agent_id": agent_id, "conversation_id": id, **fields}
            await producer.send(
                TRIGGERS.name,
                json.dumps(content).encode(),
                agent_id.encode(),
                partition_of(agent_id, PARTITIONS),
            )
            if number % 20 == 0:
                await asyncio.sleep(max(0.0, began + number / per_second - time.monotonic()))


async def logged(bootstrap: str) -> list[Json]:
    log = await Log.read(bootstrap, DECISIONS.name, SITE_DECISIONS.name)
    return [
        record
        for topic in (DECISIONS.name, SITE_DECISIONS.name)
        for number in range(PARTITIONS)
        for record in log.values(topic, number)
    ]


def has(count: int) -> Callable[[Listener], bool]:
    """Enough are so many decisions; 0: to be connected."""
    return lambda heard: len(heard.told) >= count


def for_ever(_heard: Listener) -> bool:
    return False


def fresh(name: str) -> str:
    return f"{name}-{uuid4().hex[:8]}"


async def test_a_client_gets_what_it_may_see_and_asks_for_and_nothing_else(berth: Stack) -> None:
    mine, other = fresh("mine"), fresh("other")
    of_all, of_one, of_asked = Listener(), Listener(), Listener({"agents": [mine]})
    few = berth.client_of("person", "ann", (mine,))

    def has_all(heard: Listener) -> bool:
        kinds = set(heard.names) if heard is of_all else {"decision", "site_decision"}
        return decisions_by_key(heard.told).get(("agent_id", mine)) == [1, 2, 3] and len(kinds) == 2

    listening = [
        asyncio.create_task(listener.listen(http, has_all))
        for listener, http in ((of_all, berth.http), (of_one, few), (of_asked, berth.http))
    ]
    await asyncio.gather(*(listener.connected.wait() for listener in (of_all, of_one, of_asked)))
    await request_turns(berth.kafka.bootstrap, [other], 2, environment_id="e")
    for limit in (1, 2, 3):
        await limited(berth.http, mine, limit)
    await asyncio.gather(*listening)
    assert decisions_by_key(of_one.told) == decisions_by_key(of_asked.told) == {("agent_id", mine): [1, 2, 3]}
    assert of_one.told == of_asked.told == [told for told in of_all.told if told.get("agent_id") == mine]
    logged_of_mine = await berth.records(DECISIONS, mine)
    assert [record | {"headers": 0} for record in logged_of_mine] == [told | {"headers": 0} for told in of_one.told]
    kinds = {(name, kind) for name, (kind, _) in zip(of_all.names, map(_key, of_all.told), strict=True)}
    assert kinds == {("decision", "agent_id"), ("site_decision", "site")}
    assert ("agent_id", other) in decisions_by_key(of_all.told)
    refused = await few.get("/api/events", params={"agents": [mine, other]})
    assert (refused.status_code, refused.json()["code"]) == (403, "access_denied")
    without = await berth.http.get("/api/events", headers={"Authorization": ""})
    assert without.status_code == 401


def _key(decision: Json) -> tuple[str, str]:
    ((kind, id),) = [(kind, decision[kind]) for kind in ("agent_id", "site") if kind in decision]
    return kind, id


async def test_a_client_that_comes_back_anywhere_misses_nothing_and_gets_nothing_twice(berth: Stack, seed: int) -> None:
    chance = random.Random(seed)
    agents = [fresh(f"a{number}") for number in range(12)]
    before = decisions_by_key(await logged(berth.kafka.bootstrap))
    listener = Listener()
    await listener.listen(berth.http, has(0))  # where it began, and nothing else

    load = asyncio.gather(
        request_turns(berth.kafka.bootstrap, agents, 1_500, 500),
        request_turns(berth.kafka.bootstrap, [f"{agent_id}e" for agent_id in agents], 60, 20, environment_id="e"),
    )
    fresh_api: httpx.AsyncClient | None = None
    while not load.done() or fresh_api is None:
        enough = min(len(listener.told) + chance.choice((0, 1, 20, 300)), 1_500)  # so many come for certain
        await listener.listen(chance.choice(berth.clients), has(enough))
        if fresh_api is None and len(listener.told) > 500:
            fresh_api = await berth.start_api()  # it has nothing of the log in memory
            await listener.listen(fresh_api, has(min(enough + 100, 1_500)))
    await load
    async with asyncio.timeout(WAIT_SECONDS):  # the worker may be behind
        while True:
            expected = await _since(berth, before)
            count = sum(map(len, expected.values()))
            decided = sum(len(seqs) for (_, id), seqs in expected.items() if id in agents)
            if len(listener.told) == count and decided >= 1_500:
                break
            await listener.listen(chance.choice(berth.clients), has(count))
    assert decisions_by_key(listener.told) == expected
    assert any(kind == "site" for kind, _ in expected)
    assert await _metric(fresh_api, "berth_live_slices_total") > 0


async def _since(berth: Stack, before: dict[tuple[str, str], list[int]]) -> dict[tuple[str, str], list[int]]:
    now = decisions_by_key(await logged(berth.kafka.bootstrap))
    later = {key: seqs[len(before.get(key, ())) :] for key, seqs in now.items()}
    return {key: seqs for key, seqs in later.items() if seqs}


async def _metric(http: httpx.AsyncClient, name: str) -> float:
    for line in (await http.get("/metrics")).text.splitlines():
        if line.startswith(f"{name} "):
            return float(line.rpartition(" ")[2])
    raise AssertionError(f"there is no {name}")


async def test_an_id_that_is_none_or_of_another_log_is_refused(berth: Stack) -> None:
    listener = Listener()
    await listener.listen(berth.http, has(0))
    for id in ("x", "MTow", listener.ids[0][:-4], "=" * 30_000):
        refused = await berth.http.get("/api/events", headers={"Last-Event-ID": id})
        assert (refused.status_code, refused.json()["field"]) == (400, "Last-Event-ID"), id
    beyond = LogVector.read(listener.ids[0], PARTITIONS)
    beyond.move(3, beyond.offsets[3] + 1_000)
    refused = await berth.http.get("/api/events", headers={"Last-Event-ID": beyond.token()})
    assert (refused.status_code, refused.json()["code"]) == (409, "position_not_reached")


async def test_an_api_that_has_just_begun_takes_who_comes_back_though_nothing_is_decided(berth: Stack) -> None:
    listener = Listener()
    await listener.listen(berth.http, has(0))
    await listener.listen(await berth.start_api(), lambda heard: len(heard.ids) == 2)  # it isn't connected yet
    assert listener.ids[1] == listener.ids[0]


async def test_an_id_of_an_api_that_began_later_is_good_at_an_older_one_though_nothing_is_decided(berth: Stack) -> None:
    """Where the later one began is behind the marker of the last transaction, which is no record."""
    for _ in range(3):
        await limited(berth.http, fresh("m"), 1)  # the older one has seen a record in that partition
    younger = await berth.start_api()
    listener = Listener()
    await listener.listen(younger, has(0))
    for older in berth.clients:
        await listener.listen(older, has(0))


async def test_a_stream_ends_when_the_token_does(berth: Stack) -> None:
    token = signed(claims(exp=int(time.time()) + 3, agents=["*"]))
    listener = Listener()
    async with httpx.AsyncClient(
        base_url=berth.http.base_url, headers={"Authorization": f"Bearer {token}"}
    ) as short_lived:
        await listener.listen(short_lived, for_ever, 10)
        assert listener.ended_with == "token_expired"
        again = await short_lived.get("/api/events", headers={"Last-Event-ID": listener.ids[-1]})
        assert again.status_code == 401


async def test_a_client_that_reads_nothing_is_told_and_dropped_and_can_go_on_without_a_gap(berth: Stack) -> None:
    agents = [fresh(f"s{number}") for number in range(8)]
    where = urlsplit(str(berth.http.base_url))
    stuck = socket.socket()
    stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stuck.connect((where.hostname, where.port))
    stuck.sendall(
        f"GET /api/events HTTP/1.1\r\nHost: {where.netloc}\r\nAuthorization: {berth.http.headers['Authorization']}"
        "\r\n\r\n".encode()
    )
    healthy = Listener({"agents": agents})
    reading = asyncio.create_task(healthy.listen(berth.http, has(LARGE_TURNS), 60))
    await healthy.connected.wait()
    dropped = 'berth_live_ends_total{code="slow_client"}'
    await request_turns(berth.kafka.bootstrap, agents, LARGE_TURNS, folder="/" + "x" * 4_000)
    await reading

    loop = asyncio.get_running_loop()
    stuck.setblocking(False)
    received = b""
    async with asyncio.timeout(WAIT_SECONDS):
        while part := await loop.sock_recv(stuck, 2**20):
            received += part
            if received.endswith(b"0\r\n\r\n"):
                break
    stuck.close()
    assert await _metric(berth.http, dropped) == 1
    last = received[received.rindex(b"event: end") :]
    assert b'"code": "slow_client"' in last
    listener = Listener(ids=[received[: -len(last)].rpartition(b"\nid: ")[2].split(b"\n")[0].decode()])
    seen = received.count(b"event: decision") + received.count(b"event: site_decision")
    missing = len(healthy.told) - seen
    assert missing > 0
    await listener.listen(berth.http, has(missing))
    assert decisions_by_key(listener.told) == decisions_by_key(healthy.told[seen:])


async def test_a_thousand_idle_clients_cost_little_hear_that_it_lives_and_are_told_of_a_stop(berth: Stack) -> None:
    api_client = await berth.start_api()
    api = psutil.Process(berth.apis[-1].process.pid)
    headers = {"Authorization": api_client.headers["Authorization"]}
    listeners = [Listener() for _ in range(IDLE_CLIENTS)]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=api_client.base_url, headers=headers, limits=limits) as crowd:
        first = Listener()
        await first.listen(crowd, has(0))
        before_bytes = api.memory_info().rss
        listening = [asyncio.create_task(listener.listen(crowd, for_ever, 180)) for listener in listeners]
        async with asyncio.timeout(WAIT_SECONDS):
            await asyncio.gather(*(listener.connected.wait() for listener in listeners))
        assert await _metric(api_client, "berth_live_clients") == IDLE_CLIENTS
        assert (await api_client.get("/healthz")).status_code == 200
        async with asyncio.timeout(WAIT_SECONDS):
            while not all(listener.comments for listener in listeners):
                await asyncio.sleep(0.2)
        per_client = (api.memory_info().rss - before_bytes) / IDLE_CLIENTS
        print(f"{per_client / 1024:.1f} KiB for each of {IDLE_CLIENTS} idle clients")  # noqa: T201
        assert per_client < IDLE_CLIENT_BYTES_MAX
        berth.apis[-1].send(signal.SIGTERM)
        await asyncio.gather(*listening)
        assert {listener.ended_with for listener in listeners} == {"service_stopping"}
        assert await berth.apis[-1].ended() == 0
