"""What an operator relies on: /readyz turns bad in time, whatever is wrong, and a restart of anything loses nothing."""

import asyncio
import json
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from api.cli.embedded_kafka import EmbeddedKafka
from api.cli.embedded_postgres import EmbeddedPostgres
from streams import DECISIONS, DISPATCHES, STATUSES, TRIGGERS
from streams.codec import partition_of
from streams.kafka import topics
from tests.brokers import until
from tests.integration.events import Json, Listener, decisions_by_key
from tests.integration.http_stack import Stack, read_at, stack, until_status
from tests.integration.workers import PARTITIONS, SESSION_SECONDS, Log, WorkerProcess, sending

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="module")]

NOTICED_SECONDS_MAX = SESSION_SECONDS + 14
LAG_SECONDS_MAX = 2
BACK_SECONDS_MAX = 40.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def berth() -> AsyncIterator[Stack]:
    with tempfile.TemporaryDirectory(prefix="berth-test-", ignore_cleanup_errors=True) as directory:
        kafka = EmbeddedKafka(Path(directory) / "kafka", port=None).start()
        postgres = EmbeddedPostgres(Path(directory) / "postgres", port=None).start()
        try:
            await topics.create(kafka.bootstrap, PARTITIONS)
            async with stack(kafka, postgres, BERTH_PROJECTION_LAG_SECONDS_MAX=str(LAG_SECONDS_MAX)) as running:
                yield running
        finally:
            postgres.stop()
            kafka.stop()


async def request_turns(berth: Stack, *ids: str, agent_id: str = "a", per_second: float = 1e9) -> None:
    began = time.monotonic()
    async with sending(berth.kafka.bootstrap) as producer:
        for number, id in enumerate(ids):
            content = {"type": "trigger", "v": 1, "id": id, "agent_id": agent_id, "conversation_id": id}
            partition = partition_of(agent_id, PARTITIONS)
            await producer.send_and_wait(TRIGGERS.name, json.dumps(content).encode(), agent_id.encode(), partition)
            await asyncio.sleep(max(0.0, began + number / per_second - time.monotonic()))


async def until_reason(http: httpx.AsyncClient, words: str, since_seconds: float) -> Json:
    """Ask /readyz until it is bad for this reason; not later than it may be."""
    told: Json = {}
    while time.monotonic() - since_seconds < NOTICED_SECONDS_MAX:
        answer = await http.get("/readyz")
        told = answer.json()
        if any(words in reason for reason in told["reasons"]):
            assert answer.status_code == 503
            return told
        await asyncio.sleep(0.1)
    raise AssertionError(f"in {NOTICED_SECONDS_MAX} s no reason says {words!r}: {told}")


async def client_of(process: WorkerProcess, event: str) -> httpx.AsyncClient:
    """For the /readyz of a worker or projector."""
    address = str((await process.logged(event))["readyz"]).removesuffix("/readyz")
    return httpx.AsyncClient(base_url=address, timeout=10)


async def test_what_happened_is_in_the_metrics_and_what_was_lost_in_the_log(berth: Stack) -> None:
    assert berth.projector is not None and berth.worker is not None
    agent_id = "metered"
    await request_turns(berth, "t1", "t2", "t3", agent_id=agent_id)
    async with await client_of(berth.worker, "worker_listens") as worker:
        await until_metric(worker, 'berth_waiting_triggers{reason="agent_parallelism_limit_reached"}', 2)
        (first,) = [record for record in await berth.records(DISPATCHES, agent_id) if record["type"] == "dispatch"]
        about = {"type": "status", "v": 1, "conversation_id": "t1", "execution_id": first["execution_id"]}
        for status in ("finished", "finished"):
            await berth.send(STATUSES, agent_id, **about, status=status)
        async with sending(berth.kafka.bootstrap) as producer:
            sent = await producer.send_and_wait(STATUSES.name, b"no JSON at all", agent_id.encode(), 3)
        for name, value in {
            "berth_freed_to_next_seconds_count": 1,
            'berth_ignored_statuses_total{reason="after_final"}': 1,
            "berth_dead_letters_total": 1,
            'berth_decisions_total{decider="agent"}': 5,
            'berth_running_attempts{forced="no"}': 1,
            'berth_waiting_triggers{reason="agent_parallelism_limit_reached"}': 1,
            "berth_lag_records": 0,
            "berth_partition_ready": PARTITIONS,
        }.items():
            await until_metric(worker, name, value)
        told = await berth.worker.logged("dead_letter")
        assert (told["topic"], told["partition"], told["offset"]) == (STATUSES.name, 3, sent.offset)
    async with await client_of(berth.projector, "projector_listens") as projector:
        await until_metric(projector, "berth_projection_decisions_total", 5)
        await until_metric(projector, "berth_projection_lag_records", 0)
        await until_metric(projector, "berth_projector_ready", 1)
    assert (await berth.http.get("/api/agents/nobody")).status_code == 404
    asked = 'berth_http_requests_total{method="GET",route="/api/agents/{agent_id}",status="404"}'
    await until_metric(berth.http, asked, 1)
    await until_metric(berth.http, "berth_ready", 1)


async def until_metric(http: httpx.AsyncClient, name: str, value: float) -> None:
    """Ask until the sum of this metric over all labels that ``name`` doesn't give is this."""
    wanted = parse(name)
    found: list[float] = []
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        lines = [line for line in (await http.get("/metrics")).text.splitlines() if not line.startswith("#")]
        samples = [(parse(line.rpartition(" ")[0]), float(line.rpartition(" ")[2])) for line in lines]
        found = [number for (series, labels), number in samples if series == wanted[0] and labels >= wanted[1]]
        if found and sum(found) == value:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{name} is {found}, not {value}")


def parse(series: str) -> tuple[str, set[str]]:
    name, _, labels = series.partition("{")
    return name, set(labels.removesuffix("}").split(",")) if labels else set()


async def test_readyz_turns_bad_in_time_whatever_is_wrong_and_good_again(berth: Stack) -> None:
    http = berth.http
    assert berth.projector is not None and berth.worker is not None
    async with await client_of(berth.projector, "projector_listens") as projector:
        await _a_partition_that_gets_nowhere(berth)

        since = time.monotonic()
        berth.projector.send(signal.SIGSTOP)
        await request_turns(berth, "while the projector is frozen")
        told = await until_reason(http, "the projection of partition", since)
        assert told["projection"]["lag_records"] > 0
        berth.projector.send(signal.SIGCONT)
        await until_status(http, "/readyz", 200, BACK_SECONDS_MAX)

        since = time.monotonic()
        berth.postgres.pause()
        await asyncio.gather(
            until_reason(http, "the database has not answered", since),
            until_reason(projector, "the database has not answered", since),
        )
        berth.postgres.resume()
        await until_status(http, "/readyz", 200, BACK_SECONDS_MAX)
        await until_status(projector, "/readyz", 200, BACK_SECONDS_MAX)

        listener = Listener({"agents": ["live"]})
        following = asyncio.create_task(listener.listen(http, lambda heard: len(heard.told) == 2, 90))
        await listener.connected.wait()
        await request_turns(berth, "before Kafka froze", agent_id="live")
        async with await client_of(berth.worker, "worker_listens") as worker, berth.supervised():
            since = time.monotonic()
            berth.kafka.pause()
            await asyncio.gather(
                *(until_reason(one, "Kafka has not answered", since) for one in (http, worker, projector))
            )
            assert (await http.get("/metrics")).text.count("berth_ready 0.0") == 1
            berth.kafka.resume()
            await until_status(http, "/readyz", 200, BACK_SECONDS_MAX)
            await request_turns(berth, "after Kafka froze", agent_id="live")
            await following
            assert decisions_by_key(listener.told) == {("agent_id", "live"): [1, 2]}
    assert Counter(await berth.accepted("a")).most_common(1)[0][1] == 1


async def _a_partition_that_gets_nowhere(berth: Stack) -> None:
    """Its worker lives and says so every second, and there is something to read."""
    assert berth.worker is not None
    await berth.worker.stop()
    stuck = await WorkerProcess.start(berth.kafka.bootstrap, ("-m", "tests.integration.stuck_worker"))
    try:
        await stuck.ready(range(PARTITIONS))
        await until_status(berth.http, "/readyz", 200, BACK_SECONDS_MAX)
        since = time.monotonic()
        await request_turns(berth, "stuck")
        await stuck.logged("stuck")  # or it might have taken both at once, and nothing would be left to read
        await request_turns(berth, "behind it")
        async with await client_of(stuck, "worker_listens") as worker:
            words = f"partition {partition_of('a', PARTITIONS)} has 1 records to read and makes no progress"
            await asyncio.gather(until_reason(berth.http, words, since), until_reason(worker, words, since))
    finally:
        await stuck.kill()
    since = time.monotonic()
    await until_reason(berth.http, "is owned by no worker", since)
    await berth.start_worker()
    await until_status(berth.http, "/readyz", 200, BACK_SECONDS_MAX)

    async def both_decided() -> bool:
        return sorted(await berth.accepted("a")) == ["behind it", "stuck"]

    await until(both_decided)


async def test_a_sigterm_of_anything_loses_nothing_and_doubles_nothing(berth: Stack) -> None:
    other = await berth.start_api()
    agents = [f"b{number}" for number in range(6)]
    listener = Listener({"agents": agents})
    following = asyncio.create_task(listener.listen(berth.http, lambda _: False, 60))
    await listener.connected.wait()
    all_ended = asyncio.Event()
    sent: dict[str, list[str]] = {agent_id: [] for agent_id in agents}

    async def load(agent_id: str) -> None:
        while not all_ended.is_set():
            ids = [f"t{len(sent[agent_id]) + number}" for number in range(10)]
            await request_turns(berth, *ids, agent_id=agent_id, per_second=50)
            sent[agent_id] += ids

    loading = asyncio.gather(*map(load, agents))
    async with berth.supervised():
        for process in (berth.worker, berth.projector, berth.apis[0]):
            assert process is not None
            process.send(signal.SIGTERM)
            assert await process.ended() == 0
            if process is berth.projector:
                await berth.start_projector()
        await following
        assert listener.ended_with == "service_stopping"
        all_ended.set()
        await loading
        turns = sum(map(len, sent.values()))
        await listener.listen(other, lambda heard: len(heard.told) >= turns)
        await until_status(other, "/readyz", 200, BACK_SECONDS_MAX)
    log = await Log.read(berth.kafka.bootstrap, DECISIONS.name)
    decided = [told for number in range(PARTITIONS) for told in log.values(DECISIONS.name, number)]
    expected = {key: seqs for key, seqs in decisions_by_key(decided).items() if key[1] in agents}
    assert decisions_by_key(listener.told) == expected
    for agent_id in agents:
        accepted = Counter(
            event["trigger_id"]
            for told in decided
            if told.get("agent_id") == agent_id
            for event in told["events"]
            if event["type"] == "accepted"
        )
        assert accepted == Counter(sent[agent_id])
        newest = await other.patch(f"/api/agents/{agent_id}", json={"display_name": "everything before this is shown"})
        told = await read_at(other, newest, f"/api/agents/{agent_id}")
        assert (told["running"], told["waiting"]) == (1, len(sent[agent_id]) - 1)
