"""Writes over HTTP: from a request to the answer that holds the decision, at 100 requests a second.

Everything is on this machine, as in ``berth run``: Kafka, PostgreSQL, a worker, the projector, a runner that finishes
all it gets after 50 ms, the API, and the client. Half of the requests are interactive asks of agents without a limit of
their own, which start, half are queued ones of agents with a limit of 1. Requests are sent at their time whether or not
earlier ones were answered, and the time counts from when a request should have been sent.

    python -m tests.bench.http_writes [--seconds 30]
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

import aiohttp

from api.cli.embedded_kafka import EmbeddedKafka
from api.cli.embedded_postgres import EmbeddedPostgres
from streams.kafka import topics
from tests.bench.processes import child
from tests.tokens import SECRET, bearer

REQUESTS_PER_SECOND: Final = 100
WARM_UP_SECONDS: Final = 3.0
PARTITIONS: Final = 8
AGENTS: Final = 20
PAYLOAD: Final = {"work_seconds": 0.05}


async def writes(bootstrap: str, seconds: float) -> dict[str, Any]:
    """Milliseconds: ``{"p50": …, "p99": …, "worst": …, "answers": {status: how many}}``."""
    with tempfile.TemporaryDirectory(prefix="berth-bench-", ignore_cleanup_errors=True) as directory:
        postgres = EmbeddedPostgres(Path(directory) / "postgres", port=None).start()
        environment = {
            "BERTH_KAFKA": bootstrap,
            "BERTH_DATABASE_URL": postgres.url,
            "BERTH_DATA_DIRECTORY": directory,
            "BERTH_JWT_SECRET": SECRET,
        }
        try:
            async with (
                child("api.cli", "worker", **environment) as worker,
                child("api.cli", "projector", **environment),
                child("api.cli", "runner", "--capacity", "1000", **environment),
                child("api.cli", "api", "--port", "0", **environment) as api,
            ):
                await worker.event("restored", PARTITIONS)
                _, listens = await api.event("api_listens")
                async with aiohttp.ClientSession(listens["page"].rstrip("/"), headers=bearer()) as session:
                    await _prepare(session)
                    await _load(session, WARM_UP_SECONDS)
                    return await _load(session, seconds)
        finally:
            postgres.stop()


async def _prepare(session: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(60):
        while True:
            async with session.get("/readyz") as answer:
                if answer.status == 200:
                    break
            await asyncio.sleep(0.1)
        for number in range(AGENTS):
            limit = "unlimited" if number % 2 else 1
            async with session.put(f"/api/agents/agent-{number}", json={"parallelism_limit": limit}) as answer:
                answer.raise_for_status()


async def _load(session: aiohttp.ClientSession, seconds: float) -> dict[str, Any]:
    began = time.monotonic()
    answers: Counter[str] = Counter()

    async def one(number: int) -> float:
        due = began + number / REQUESTS_PER_SECOND
        await asyncio.sleep(due - time.monotonic())
        asks = number % 2 == 1
        body = {"message": "x" * 200, "payload": PAYLOAD, "on_busy": "ask" if asks else "queue"}
        async with session.post(f"/api/agents/agent-{number % AGENTS}/conversations", json=body) as answer:
            told = await answer.json()
            answers[f"{answer.status} {told.get('status') or told.get('code')}"] += 1
        return time.monotonic() - due

    took = sorted(await asyncio.gather(*(one(number) for number in range(int(seconds * REQUESTS_PER_SECOND)))))
    chosen = {"p50": took[len(took) // 2], "p99": took[int(len(took) * 0.99)], "worst": took[-1]}
    return {**{name: round(1000 * value, 1) for name, value in chosen.items()}, "answers": dict(answers)}


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=30.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="berth-bench-") as directory:
        kafka = EmbeddedKafka(Path(directory) / "kafka", port=None).start()
        try:
            await topics.create(kafka.bootstrap, PARTITIONS)
            found = await writes(kafka.bootstrap, given.seconds)
        finally:
            kafka.stop()
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    asyncio.run(_main())
