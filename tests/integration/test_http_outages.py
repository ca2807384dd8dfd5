"""The API while Kafka, PostgreSQL, the worker or the projector is away, frozen or killed, and when it is back."""

import asyncio
import json
import random
import signal
import time
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from aiokafka import AIOKafkaProducer

from streams import CONTROLS, WORKERS
from tests.brokers import WAIT_SECONDS, until
from tests.integration.http_stack import ANSWER_SECONDS_MAX, Stack, limited, read_at, until_status
from tests.integration.workers import PARTITIONS
from tests.tokens import bearer

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(180)]

NOTICED_SECONDS_MAX = 20.0
"""Ten, and as much again for a machine that is busy."""
TRANSPORT_SECONDS = 4.0
"""What such a machine may add to an answer on its way: less than clients wait for one that never comes."""

WRITES: list[tuple[str, str, dict[str, Any] | None]] = [
    ("POST", "/triggers", {"id": "t"}),
    ("POST", "/conversations", {"message": "x", "on_busy": "queue"}),
    ("POST", "/conversations", {"message": "x", "on_busy": "ask"}),
    ("DELETE", "/triggers/runs", None),
    ("POST", "/conversations/runs/stop", None),
    ("PUT", "", {"parallelism_limit": 7}),
    ("PATCH", "", {"parallelism_limit": 8}),
    ("PUT", "/capacity", {"max_parallel_tasks": 9}),
    ("POST", "/pause", None),
    ("POST", "/archive", None),
    ("POST", "/triggers/runs/approve", None),
    ("POST", "/triggers/runs/resume", {"on_busy": "ask"}),
    ("POST", "/task", {"message": "x"}),
    ("PUT", "/api/sites/s/capacity", {"capacity": 2}),
    ("POST", "/api/statuses", {"agent_id": "a", "conversation_id": "c", "execution_id": "x", "status": "running"}),
    ("GET", "/api/runners/dispatches?agents=a", None),
]
"""What needs Kafka: of agent a, unless the address is whole."""


def address(path: str) -> str:
    return path if path.startswith("/api/") else f"/api/agents/a{path}"


async def timed(request: Any) -> tuple[httpx.Response, float]:
    began = time.monotonic()
    answer = await request
    return answer, time.monotonic() - began


# 110: 200 OK although nothing was published


async def test_without_kafka_every_write_is_503_in_time_and_has_no_effect_and_a_resend_works(
    own_berth: Stack,
) -> None:
    """Case 110."""
    http = own_berth.http
    await limited(http, "a", 1)
    started = await http.post("/api/agents/a/triggers", json={"id": "runs"})
    assert started.status_code == 201
    await read_at(http, started, "/api/agents/a")  # the tables have it before Kafka goes
    own_berth.kafka.kill()
    answers = await asyncio.gather(
        *(
            timed(http.request(method, address(path), json=content, headers={"Idempotency-Key": f"k{number}"}))
            for number, (method, path, content) in enumerate(WRITES)
            if content != {"id": "t"}
        ),
        timed(http.post("/api/agents/a/triggers", json={"id": "t"})),
    )
    for answer, seconds in answers:
        assert (answer.status_code, answer.json()["code"]) == (503, "log_unavailable"), answer.text
        assert seconds < ANSWER_SECONDS_MAX + TRANSPORT_SECONDS
        assert "retry-after" in answer.headers
    assert (await http.get("/api/agents/a")).json()["running"] == 1  # reads go on
    await _until_reason(http, "Kafka has not answered")
    assert (await http.get("/healthz")).status_code == 200

    async with own_berth.supervised():
        own_berth.kafka.restart()
        await until_status(http, "/readyz", 200, 40)
    resent = await http.post("/api/agents/a/triggers", json={"id": "t"})
    assert resent.status_code == 202
    assert (await own_berth.accepted("a")).count("t") == 1
    told = await read_at(http, resent, "/api/agents/a")
    assert (told["limit"], told["paused"], told["archived"], told["running"]) == (1, False, False, 1)
    assert (await http.get("/api/sites/s")).status_code == 404
    again = await http.post("/api/agents/a/pause", headers={"Idempotency-Key": "k8"})
    assert (again.status_code, again.json()["effect"]) == (200, True)


# 112: a produce timeout with unknown outcome


async def test_whatever_becomes_of_requests_while_kafka_dies_and_freezes_each_key_counts_once(
    own_berth: Stack, seed: int
) -> None:
    chance = random.Random(seed)
    await limited(own_berth.http, "a", 10)
    clients = [own_berth.http, await own_berth.start_api()]
    keys = [f"k{number}" for number in range(40)]
    answered: dict[str, set[str]] = {key: set() for key in keys}
    unanswered = 0

    async def insist(key: str, delay_seconds: float) -> None:
        nonlocal unanswered
        await asyncio.sleep(delay_seconds)  # requests come at random moments of the outages
        while True:
            for client in chance.sample(clients, 2):
                answer = await client.post(
                    "/api/agents/a/triggers", json={"message": key}, headers={"Idempotency-Key": key}
                )
                if answer.status_code in (201, 202) and answer.json()["status"] != "accepted":
                    answered[key].add(answer.json()["trigger_id"])
                    return
                assert answer.status_code in (202, 503), answer.text
                unanswered += answer.status_code == 503

    async def outages() -> None:
        await asyncio.sleep(0.3)
        own_berth.kafka.pause()
        await asyncio.sleep(6)
        while not unanswered:  # whatever moments the seed has drawn
            await asyncio.sleep(0.05)
        own_berth.kafka.resume()
        await asyncio.sleep(0.5)
        await asyncio.to_thread(own_berth.kafka.kill)
        await asyncio.to_thread(own_berth.kafka.restart)  # else the answers that come meanwhile are not read in time

    async with own_berth.supervised(), asyncio.timeout(120):
        await asyncio.gather(outages(), *(insist(key, chance.uniform(0, 8)) for key in keys))
        await until_status(own_berth.http, "/readyz", 200, 40)
    accepted = await own_berth.accepted("a")
    assert sorted(accepted) == sorted(id for ids in answered.values() for id in ids)
    assert len(accepted) == len(set(accepted)) == len(keys)
    assert unanswered > 0, "no request met an outage"


async def test_without_postgres_writes_go_on_reads_are_503_and_all_is_well_when_it_is_back(own_berth: Stack) -> None:
    http = own_berth.http
    await limited(http, "a", 1, max_backlog_depth=1, owner="ann")
    ann = own_berth.client_of("person", "ann", ("a",))
    path = "/api/agents/a/triggers"
    for id in ("t1", "t2"):
        await http.post(path, json={"id": id})
    refused = await http.post(path, json={"id": "t3"})
    assert refused.json()["code"] == "agent_backlog_full"
    fresh = await own_berth.start_api()
    await until_status(fresh, "/readyz", 200)
    own_berth.postgres.stop()

    looks_back = ("/api/agents/a/queue?as_of=1", "/api/audit/decisions?agent=a", "/api/audit/verify")
    for read in ("/api/agents", "/api/agents/slots", "/api/agents/a/queue", f"{path}/t1", *looks_back):
        answer, seconds = await timed(http.get(read))
        assert (answer.status_code, answer.json()["code"]) == (503, "database_unavailable")
        assert seconds < ANSWER_SECONDS_MAX + TRANSPORT_SECONDS
    stopped, seconds = await timed(http.delete(f"{path}/t2"))
    assert stopped.status_code == 200 and seconds < ANSWER_SECONDS_MAX + TRANSPORT_SECONDS
    assert (await http.post(path, json={"id": "t4"})).status_code == 202
    patched = await http.patch("/api/agents/a", json={"max_backlog_depth": 9})
    assert patched.status_code == 200
    # Whose agent it is can't be read, so who is no admin changes nothing; what needs no owner goes on.
    for owners in (ann.put("/api/agents/a/capacity", json={"max_parallel_tasks": 9}), ann.post("/api/agents/a/pause")):
        answer, seconds = await timed(owners)
        assert (answer.status_code, answer.json()["code"]) == (503, "owner_unknown")
        assert seconds < ANSWER_SECONDS_MAX + TRANSPORT_SECONDS
    assert len(await own_berth.records(CONTROLS, "a")) == 2
    used = await ann.post(path, json={"id": "t5"})
    assert used.status_code == 202
    # What was answered before is known here, and only from the database by an API that didn't give the answer.
    assert (await http.post(path, json={"id": "t3"})).json()["code"] == "agent_backlog_full"
    assert (await fresh.post(path, json={"id": "t3"})).json()["code"] == "first_answer_unavailable"
    assert (await fresh.post(path, json={"id": "t1"})).json()["state"] == "running"
    await _until_reason(http, "the database has not answered")

    own_berth.postgres.start()
    for client in (http, fresh):  # each finds out by itself
        await until_status(client, "/readyz", 200, 30)
    queue = await read_at(http, used, "/api/agents/a/queue")
    assert [entry["trigger_id"] for entry in queue["queue"]] == ["t4", "t5"]
    assert (await ann.put("/api/agents/a/capacity", json={"max_parallel_tasks": 1})).status_code == 200
    assert (await fresh.post(path, json={"id": "t3"})).json()["code"] == "agent_backlog_full"


async def test_a_frozen_postgres_is_like_one_that_is_away(own_berth: Stack) -> None:
    http = own_berth.http
    await limited(http, "a", 1)
    own_berth.postgres.pause()
    try:
        reads = 6 * ("/api/agents/slots", "/api/agents/a/capacity?as_of=1")
        answers = await asyncio.gather(*(timed(http.get(read)) for read in reads))
        assert {answer.status_code for answer, _ in answers} == {503}
        assert max(seconds for _, seconds in answers) < ANSWER_SECONDS_MAX + TRANSPORT_SECONDS
        assert (await http.post("/api/agents/a/triggers", json={})).status_code == 201
        await until_status(http, "/readyz", 503, NOTICED_SECONDS_MAX)
    finally:
        own_berth.postgres.resume()
    await until_status(http, "/readyz", 200, 30)
    assert (await http.get("/api/agents/slots")).status_code == 200


async def test_without_a_worker_a_queued_trigger_is_accepted_and_what_must_be_decided_is_not(own_berth: Stack) -> None:
    http = own_berth.http
    await limited(http, "a", 1)
    await http.post("/api/agents/a/triggers", json={"id": "t1"})
    assert own_berth.worker is not None
    await own_berth.worker.kill()

    (queued, waited), (stopped, bounded) = await asyncio.gather(
        timed(http.post("/api/agents/a/triggers", json={"id": "t2"})),
        timed(http.delete("/api/agents/a/triggers/t1")),
    )
    assert (queued.status_code, queued.json()["status"]) == (202, "accepted")
    assert queued.headers["location"] == "/api/agents/a/triggers/t2"
    assert (stopped.status_code, stopped.json()["code"]) == (503, "log_unavailable")
    assert max(waited, bounded) < ANSWER_SECONDS_MAX + TRANSPORT_SECONDS
    await _until_reason(http, f"partition {PARTITIONS - 1} is owned by no worker")

    await _tell_of_a_partition_that_stands_still(own_berth)
    told = await _until_reason(http, "berth.triggers partition 3 offset 17")
    assert told["partitions"]["3"]["stopped_at"]["error"] == "a bug"

    await own_berth.start_worker()
    await until_status(http, "/readyz", 200, 30)
    again = await http.post("/api/agents/a/triggers", json={"id": "t2"})
    assert (again.status_code, again.json()["status"]) == (202, "queued")
    told = await read_at(http, again, "/api/agents/a/triggers/t1")
    assert (told["state"], told["stop_requested_at"]) == ("running", None)
    assert told["timeline"][-1]["event"] != "stop_requested"


async def _tell_of_a_partition_that_stands_still(berth: Stack) -> None:
    now = datetime.now(UTC).isoformat()
    stopped = {"topic": "berth.triggers", "partition": 3, "offset": 17, "error": "a bug"}
    said = {
        "address": "127.0.0.1:1",
        "at": now,
        "partitions": {"3": {"state": "stopped", "lag": 1, "last_progress_at": now, "stopped_at": stopped}},
    }
    producer = AIOKafkaProducer(bootstrap_servers=berth.kafka.bootstrap)
    await producer.start()
    await producer.send_and_wait(WORKERS.name, json.dumps(said).encode(), key=b"another-worker")
    await producer.stop()


async def _until_reason(http: httpx.AsyncClient, words: str) -> dict[str, Any]:
    async with asyncio.timeout(NOTICED_SECONDS_MAX):
        while True:
            told: dict[str, Any] = (await http.get("/readyz")).json()
            if any(words in reason for reason in told["reasons"]):
                return told
            await asyncio.sleep(0.05)


async def test_a_read_that_must_see_a_write_says_when_the_projection_is_behind(own_berth: Stack) -> None:
    http = own_berth.http
    await read_at(http, await limited(http, "a", 1), "/api/agents/a")
    assert own_berth.projector is not None
    await own_berth.projector.kill()
    write = await http.post("/api/agents/a/triggers", json={"id": "t"})
    assert write.status_code == 201
    params = {"min_position": write.json()["log_position"]}
    behind, seconds = await timed(http.get("/api/agents/a", params=params))
    assert (behind.status_code, behind.json()["code"]) == (504, "projection_behind")
    assert 1.9 < seconds < 2.0 + TRANSPORT_SECONDS
    assert (await http.get("/api/agents/a")).json()["running"] == 0
    await _until_reason(http, "it would apply berth.decisions partition")
    await own_berth.start_projector()
    await until_status(http, "/readyz", 200, 30)
    assert (await http.get("/api/agents/a", params=params)).json()["running"] == 1


async def test_an_api_starts_while_everything_is_away_and_works_when_it_is_there(own_berth: Stack) -> None:
    own_berth.kafka.kill()
    own_berth.postgres.stop()
    http = await own_berth.start_api()
    assert (await http.get("/")).status_code == 200
    assert (await http.get("/readyz")).status_code == 503
    assert (await http.get("/api/agents")).json()["code"] == "database_unavailable"
    assert (await http.put("/api/agents/a", json={})).json()["code"] == "log_unavailable"
    async with own_berth.supervised():
        await asyncio.to_thread(own_berth.kafka.restart)
        await asyncio.to_thread(own_berth.postgres.start)
        await until_status(http, "/readyz", 200, 40)
    assert (await limited(http, "a", 1)).status_code == 201
    assert (await http.post("/api/agents/a/triggers", json={})).status_code == 201


async def test_a_sigterm_answers_what_was_asked_and_loses_nothing(own_berth: Stack) -> None:
    await limited(own_berth.http, "a", 1)
    assert own_berth.worker is not None
    own_berth.worker.send(signal.SIGSTOP)  # so that the requests are under way when the signal comes
    clients = [httpx.AsyncClient(base_url=own_berth.http.base_url, timeout=10, headers=bearer()) for _ in range(20)]
    requests = [
        asyncio.create_task(client.post("/api/agents/a/triggers", json={"id": f"t{number}"}))
        for number, client in enumerate(clients)
    ]
    async with asyncio.timeout(WAIT_SECONDS):
        while len(await own_berth.sent("a")) < len(requests):
            await asyncio.sleep(0.05)
    own_berth.apis[0].send(signal.SIGTERM)
    async with own_berth.supervised():  # one that was frozen for longer than its session has to end
        own_berth.worker.send(signal.SIGCONT)
        answers = await asyncio.gather(*requests)
        assert {answer.status_code for answer in answers} <= {201, 202}
        assert await own_berth.apis[0].ended() == 0

        async def all_decided() -> bool:
            return len(await own_berth.accepted("a")) >= len(requests)

        await until(all_decided)
    assert sorted(await own_berth.accepted("a")) == sorted(f"t{n}" for n in range(20))
