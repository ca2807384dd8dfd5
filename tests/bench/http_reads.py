"""Reads over HTTP at 1,000 agents and 1,000,000 triggers: how long answers take at 100 requests a second.

The tables are filled by SQL (http_reads.sql), as the projector would leave them; PostgreSQL and ``berth api`` are real
processes, and the client shares the machine with them. Requests are sent at their time whether or not earlier ones were
answered, and the time counts from when a request should have been sent, so that a stall isn't hidden.

    python -m tests.bench.http_reads [--agents 1000] [--triggers 1000] [--seconds 20]
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, Final

import aiohttp
import psycopg

from api.cli.embedded_kafka import EmbeddedKafka
from api.cli.embedded_postgres import EmbeddedPostgres
from projections.schema import LIVE_SCHEMA, connect, migrate
from streams.kafka import topics
from tests.bench.processes import child
from tests.tokens import SECRET, bearer

REQUESTS_PER_SECOND: Final = 100
WARM_UP_SECONDS: Final = 3.0
PARTITIONS: Final = 8


async def reads(bootstrap: str, agents: int = 1000, triggers: int = 1000, seconds: float = 20.0) -> dict[str, Any]:
    """Milliseconds by what is read: ``{"slots": {"p50": …, "p99": …, "worst": …}, …}``. ``triggers``: of each agent."""
    with tempfile.TemporaryDirectory(prefix="berth-bench-", ignore_cleanup_errors=True) as directory:
        postgres = EmbeddedPostgres(Path(directory) / "postgres", port=None).start()
        try:
            began = time.monotonic()
            _fill(postgres.url, agents, triggers)
            filled_seconds = time.monotonic() - began
            environment = {
                "BERTH_KAFKA": bootstrap,
                "BERTH_DATABASE_URL": postgres.url,
                "BERTH_DATA_DIRECTORY": directory,
                "BERTH_JWT_SECRET": SECRET,
            }
            async with child("api.cli", "api", "--port", "0", **environment) as api:
                _, listens = await api.event("api_listens")
                measured = await _measure(listens["page"].rstrip("/"), agents, triggers, seconds)
        finally:
            postgres.stop()
    return {"agents": agents, "triggers": agents * triggers, "filled_seconds": round(filled_seconds, 1), **measured}


def _fill(url: str, agents: int, triggers: int) -> None:
    connection = connect(url)
    try:
        migrate(connection, LIVE_SCHEMA)
        statements = (resources.files("tests.bench") / "http_reads.sql").read_text()
        with psycopg.ClientCursor(connection) as cursor:
            cursor.execute(statements.encode(), {"agents": agents, "triggers": triggers})
        connection.execute("VACUUM ANALYZE")
    finally:
        connection.close()


async def _measure(address: str, agents: int, triggers: int, seconds: float) -> dict[str, Any]:
    chance = random.Random(1)

    def agent() -> str:
        return f"agent-{chance.randint(1, agents):06}"

    def trigger(first: int, last: int) -> str:
        return f"t-{chance.randint(first, last):07}"

    paths: dict[str, Callable[[], str]] = {
        "slots": lambda: "/api/agents/slots",
        "page of agents": lambda: "/api/agents?limit=100",
        "capacity": lambda: f"/api/agents/{agent()}/capacity",
        "queue": lambda: f"/api/agents/{agent()}/queue",
        "waiting trigger": lambda: f"/api/agents/{agent()}/triggers/{trigger(triggers - 6, triggers)}",
        "ended trigger": lambda: f"/api/agents/{agent()}/triggers/{trigger(1, triggers - 10)}",
        "conversation": lambda: f"/api/agents/{agent()}/conversations/c-{chance.randint(1, triggers // 10 - 1)}",
    }
    measured: dict[str, Any] = {}
    async with aiohttp.ClientSession(headers=bearer()) as session:
        await _until_readable(session, address)
        for name, path in paths.items():
            await _load(session, address, path, WARM_UP_SECONDS)
            measured[name] = await _load(session, address, path, seconds)
    return measured


async def _until_readable(session: aiohttp.ClientSession, address: str) -> None:
    async with asyncio.timeout(30):
        while True:
            async with session.get(f"{address}/api/agents/slots") as answer:
                if answer.status == 200:
                    return
            await asyncio.sleep(0.1)


async def _load(
    session: aiohttp.ClientSession, address: str, path: Callable[[], str], seconds: float
) -> dict[str, float]:
    began = time.monotonic()

    refused = 0

    async def one(number: int) -> float:
        nonlocal refused
        due = began + number / REQUESTS_PER_SECOND
        await asyncio.sleep(due - time.monotonic())
        async with session.get(address + path()) as answer:
            await answer.read()
            refused += answer.status != 200
        return time.monotonic() - due

    took = sorted(await asyncio.gather(*(one(number) for number in range(int(seconds * REQUESTS_PER_SECOND)))))
    chosen = {"p50": took[len(took) // 2], "p99": took[int(len(took) * 0.99)], "worst": took[-1]}
    return {**{name: round(1000 * value, 1) for name, value in chosen.items()}, "refused": refused}


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--triggers", type=int, default=1000, help="of each agent")
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="berth-bench-") as directory:
        kafka = EmbeddedKafka(Path(directory) / "kafka", port=None).start()
        try:
            await topics.create(kafka.bootstrap, PARTITIONS)
            found = await reads(kafka.bootstrap, given.agents, given.triggers, given.seconds)
        finally:
            kafka.stop()
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    asyncio.run(_main())
