"""All of Berth as processes, asked over HTTP: Kafka, PostgreSQL, a worker, a projector, and APIs."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import httpx
import psycopg
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from api.cli.embedded_kafka import EmbeddedKafka
from api.cli.embedded_postgres import EmbeddedPostgres
from api.http.auth import EVERY_AGENT, Role
from streams import DECISIONS, TRIGGERS, Topic
from streams.codec import partition_of
from tests.brokers import WAIT_SECONDS
from tests.integration.workers import PARTITIONS, ROOT, Json, WorkerProcess
from tests.tokens import SECRET, bearer

ANSWER_SECONDS_MAX = 5.0
"""Within which every write is answered, whatever is away; the transport's own share comes on top."""


@dataclass
class Stack:
    """The processes of one test; ``apis`` may be asked through ``http``, as an admin with access to every agent."""

    kafka: EmbeddedKafka
    postgres: EmbeddedPostgres
    database_url: str
    worker: WorkerProcess | None = None
    projector: WorkerProcess | None = None
    apis: list[WorkerProcess] = field(default_factory=list)
    clients: list[httpx.AsyncClient] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    _further_clients: list[httpx.AsyncClient] = field(default_factory=list)

    @property
    def http(self) -> httpx.AsyncClient:
        return self.clients[0]

    async def berth(self, *arguments: str) -> WorkerProcess:
        """A process of ``berth`` on these servers; its log is JSON."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "api.cli",
            *arguments,
            cwd=ROOT,
            env=clean
            | {
                "BERTH_KAFKA": self.kafka.bootstrap,
                "BERTH_DATABASE_URL": self.database_url,
                "BERTH_JWT_SECRET": SECRET,
                "BERTH_DATA_DIRECTORY": str(self.postgres.directory.parent / f"data-{uuid4().hex}"),
            }
            | self.environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=2**20,
        )
        return WorkerProcess(process)

    async def start_worker(self) -> None:
        self.worker = await self.berth("worker")
        await self.worker.ready(range(PARTITIONS))

    @asynccontextmanager
    async def supervised(self) -> AsyncIterator[None]:
        """A worker that ends in the block is started again, as a supervisor does: without Kafka it may have to end."""

        async def keep() -> None:
            while True:
                assert self.worker is not None
                await self.worker.process.wait()
                self.worker = await self.berth("worker")

        keeping = asyncio.create_task(keep())
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def start_projector(self) -> None:
        self.projector = await self.berth("projector")
        await self.projector.logged("projector_follows")

    async def start_api(self) -> httpx.AsyncClient:
        """One more API, which need not be ready; a client of it."""
        api = await self.berth("api", "--port", "0")
        self.apis.append(api)
        address = (await api.logged("api_listens"))["page"]
        client = httpx.AsyncClient(base_url=address, timeout=ANSWER_SECONDS_MAX + 5, headers=bearer())
        self.clients.append(client)
        await until_status(client, "/healthz", 200)
        return client

    def client_of(
        self, role: Role, subject: str = "ann", agents: tuple[str, ...] = (EVERY_AGENT,)
    ) -> httpx.AsyncClient:
        """A client of the first API with a token of its own."""
        client = httpx.AsyncClient(
            base_url=self.http.base_url, timeout=self.http.timeout, headers=bearer(role, subject, agents)
        )
        self._further_clients.append(client)
        return client

    async def stop(self) -> None:
        for client in (*self.clients, *self._further_clients):
            await client.aclose()
        running = [*self.apis, *(process for process in (self.projector, self.worker) if process is not None)]
        await asyncio.gather(*(process.discard() for process in running))
        for api in self.apis:
            print(api.account())  # noqa: T201 - shown by pytest when the test fails

    # -- what Kafka has -------------------------------------------------------------------------------------------

    async def send(self, topic: Topic, agent_id: str, **fields: Any) -> None:
        """A record as an upstream writes it."""

        producer = AIOKafkaProducer(bootstrap_servers=self.kafka.bootstrap)
        await producer.start()
        try:
            value = json.dumps({"agent_id": agent_id, **fields}).encode()
            partition = partition_of(agent_id, PARTITIONS)
            await producer.send_and_wait(topic.name, value, key=agent_id.encode(), partition=partition)
        finally:
            await producer.stop()

    async def records(self, topic: Topic, agent_id: str) -> list[Json]:
        """Everything committed on a topic about an agent, with ``headers``."""

        consumer = AIOKafkaConsumer(
            bootstrap_servers=self.kafka.bootstrap, isolation_level="read_committed", enable_auto_commit=False
        )
        await consumer.start()
        try:
            target = TopicPartition(topic.name, partition_of(agent_id, PARTITIONS))
            consumer.assign([target])
            await consumer.seek_to_beginning()
            end = (await consumer.end_offsets([target]))[target]
            found: list[Json] = []
            while await consumer.position(target) < end:
                for batch in (await consumer.getmany(timeout_ms=200)).values():
                    found += [
                        {**json.loads(record.value), "headers": list(record.headers)}
                        for record in batch
                        if record.key == agent_id.encode()
                    ]
            return found
        finally:
            await consumer.stop()

    async def accepted(self, agent_id: str) -> list[str]:
        """Ids of the triggers that the log says were accepted, once for each time."""
        decisions = await self.records(DECISIONS, agent_id)
        events = [event for decision in decisions for event in decision.get("events", ())]
        return [event["trigger_id"] for event in events if event["type"] == "accepted"]

    async def sent(self, agent_id: str) -> list[str]:
        """Ids of the records on berth.triggers."""
        return [record["id"] for record in await self.records(TRIGGERS, agent_id)]


@asynccontextmanager
async def stack(
    kafka: EmbeddedKafka, postgres: EmbeddedPostgres, apis: int = 1, **environment: str
) -> AsyncIterator[Stack]:
    """All of it, ready, on a database of its own; everything that was started ends with the block."""
    name = f"berth_{uuid4().hex}"
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    running = Stack(kafka, postgres, postgres.url.rpartition("/")[0] + f"/{name}", environment=environment)
    try:
        await asyncio.gather(running.start_worker(), running.start_projector())
        for _ in range(apis):
            client = await running.start_api()
            await until_status(client, "/readyz", 200)
        yield running
    finally:
        await running.stop()


async def until_status(
    client: httpx.AsyncClient, path: str, status: int, timeout_seconds: float = WAIT_SECONDS
) -> Json:
    """Ask until the answer has this status; its body. Fails when it hasn't in time."""
    last = ""
    try:
        async with asyncio.timeout(timeout_seconds):
            while True:
                try:
                    answer = await client.get(path)
                except httpx.TransportError as error:
                    last = repr(error)
                else:
                    last = f"{answer.status_code} {answer.text}"
                    if answer.status_code == status:
                        body: Json = answer.json()
                        return body
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise TimeoutError(f"{path} didn't answer {status} within {timeout_seconds} s, last: {last}") from None


async def got(client: httpx.AsyncClient, path: str, status: int = 200, **parameters: Any) -> Json:
    """What is answered; asked again when it takes longer than the API waits for a ``min_position``."""
    async with asyncio.timeout(WAIT_SECONDS):
        while (answer := await client.get(path, params=parameters)).status_code == 504:
            pass
    assert answer.status_code == status, answer.text
    body: Json = answer.json()
    return body


async def read_at(client: httpx.AsyncClient, write: httpx.Response, path: str) -> Json:
    """What a path says when the projection has seen a write."""
    return await got(client, path, min_position=write.json()["log_position"])


async def limited(client: httpx.AsyncClient, agent_id: str, limit: int | str = 1, **settings: Any) -> httpx.Response:
    """Make an agent."""
    answer = await client.put(f"/api/agents/{agent_id}", json={"parallelism_limit": limit, **settings})
    assert answer.status_code in (200, 201), answer.text
    return answer
