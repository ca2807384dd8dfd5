"""The commands that look back, as a person meets them: on a live service, which they never touch."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import pytest_asyncio
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from api.cli.embedded_kafka import EmbeddedKafka
from api.cli.embedded_postgres import EmbeddedPostgres
from streams import DECISIONS, DISPATCHES, STATUSES, TOPICS, TRIGGERS, WORKERS
from streams.kafka.clients import reading
from tests.brokers import empty_topics, until
from tests.integration.http_stack import Stack, stack
from tests.integration.workers import PARTITIONS
from tests.unit.test_docs import ROOT, SHELLS, blocks, words_after_variables

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]
DOCUMENT = ROOT / "docs" / "audit.md"
Json = dict[str, Any]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def berth(kafka: EmbeddedKafka) -> AsyncIterator[Stack]:
    """A worker and a projector with a little past: one agent's chapters in turn, and two that share a folder."""
    await empty_topics(kafka.bootstrap, PARTITIONS)
    with TemporaryDirectory(prefix="berth-test-", ignore_cleanup_errors=True) as directory:
        postgres = EmbeddedPostgres(Path(directory) / "postgres", port=None).start()
        try:
            async with stack(kafka, postgres, apis=0) as running:
                await _live(running)
                yield running
        finally:
            postgres.stop()


async def _live(berth: Stack) -> None:
    for number in range(1, 4):
        about = {"id": f"chapter-{number}", "conversation_id": f"c{number}", "message": "private words"}
        await berth.send(TRIGGERS, "writer", type="trigger", v=1, requested_by="ann", organization_id="acme", **about)
    await _dispatched(berth, "writer", 1)
    home = {"worker": True, "environment_id": "book", "folder": "/text", "organization_id": "acme"}
    await berth.send(TRIGGERS, "proofs", type="trigger", v=1, id="one", conversation_id="c", **home)
    await _dispatched(berth, "proofs", 1)
    await berth.send(TRIGGERS, "layout", type="trigger", v=1, id="two", conversation_id="c", **home)
    for done in (1, 2):
        await _finish(berth, "writer", done)
        await _dispatched(berth, "writer", done + 1)
    await until(lambda: _applied(berth, 9))


async def _dispatched(berth: Stack, agent_id: str, count: int) -> list[Json]:
    async def there() -> bool:
        return len(await berth.records(DISPATCHES, agent_id)) >= count

    await until(there)
    return await berth.records(DISPATCHES, agent_id)


async def _finish(berth: Stack, agent_id: str, number: int) -> None:
    dispatch = (await _dispatched(berth, agent_id, number))[number - 1]
    names = ("conversation_id", "execution_id")
    about = {name: dispatch[name] for name in names}
    await berth.send(STATUSES, agent_id, type="status", v=1, status="finished", result="private words", **about)


async def _applied(berth: Stack, decisions: int) -> bool:
    """Whether the tables have so many: writer's five, and of the others two each, the second on the site's word."""
    done = await asyncio.to_thread(_berth, berth, ROOT, "as-of", "--at", "now", "--json")
    if done.returncode:
        return False
    found = json.loads(done.stdout)
    waiting = [one["causes"] for agent in found["agents"] for one in agent["queue"]]
    return sum(agent["seq"] for agent in found["agents"]) >= decisions and bool(waiting) and all(waiting)


def _berth(berth: Stack, directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
    return subprocess.run(
        [sys.executable, "-m", "api.cli", *words],
        cwd=directory,
        env=clean
        | {"BERTH_KAFKA": berth.kafka.bootstrap, "BERTH_DATABASE_URL": berth.database_url, "COLUMNS": "200"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


async def said(berth: Stack, directory: Path, *words: str) -> str:
    done = await asyncio.to_thread(_berth, berth, directory, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def written(berth: Stack) -> tuple[dict[TopicPartition, int], list[str]]:
    """How far every topic goes, and which consumer groups there are."""
    partitions = [
        TopicPartition(topic.name, number) for topic in TOPICS if topic != WORKERS for number in range(PARTITIONS)
    ]
    async with reading(berth.kafka.bootstrap, "read_uncommitted") as consumer:
        ends = await consumer.end_offsets(partitions)
    admin = AIOKafkaAdminClient(bootstrap_servers=berth.kafka.bootstrap)
    await admin.start()
    try:
        groups = sorted(str(group) for group in await admin.list_consumer_groups())
    finally:
        await admin.close()
    return ends, groups


async def test_every_command_of_the_document_runs_and_touches_nothing(berth: Stack, tmp_path: Path) -> None:
    before = await written(berth)
    shown = [line for block in blocks(DOCUMENT) if block.language in SHELLS for line in block.text.splitlines()]
    commands = [words_after_variables(line.removeprefix("$ "))[1:] for line in shown]
    assert len(commands) >= 12
    for words in commands:
        done = await asyncio.to_thread(_berth, berth, tmp_path, *words)
        assert done.returncode == 0, (words, done.stderr)
        assert "private words" not in done.stdout
    assert await written(berth) == before, "nothing was sent, and no group joined"


async def test_as_of_shows_the_same_from_the_tables_and_from_kafka(berth: Stack, tmp_path: Path) -> None:
    tables = json.loads(await said(berth, tmp_path, "as-of", "--at", "now", "--json"))
    log = json.loads(await said(berth, tmp_path, "as-of", "--at", "now", "--from-log", "--json"))
    assert (tables["agents"], tables["sites"]) == (log["agents"], log["sites"])
    layout, _proofs, writer = log["agents"]
    assert [slot["trigger_id"] for slot in writer["slots"]] == ["chapter-3"]
    assert [cause["reason"] for cause in layout["queue"][0]["causes"]] == ["agent_environment_folder_busy"]
    assert [claim["trigger_id"] for claim in log["sites"][0]["granted"]] == ["one"]
    one = json.loads(await said(berth, tmp_path, "as-of", "writer", "--seq", "3", "--json"))
    again = json.loads(await said(berth, tmp_path, "as-of", "writer", "--seq", "3", "--from-log", "--json"))
    assert one["agents"] == again["agents"]
    assert [waiting["position"] for waiting in one["agents"][0]["queue"]] == [1, 2]
    text = await said(berth, tmp_path, "as-of", "layout", "--at", "now")
    assert "agent_environment_folder_busy (held by one of proofs)" in text


async def test_explain_waiting_and_estimates(berth: Stack, tmp_path: Path) -> None:
    text = await said(berth, tmp_path, "explain", "writer", "chapter-2", "chapter-3")
    assert "agent_parallelism_limit_reached" in text
    assert "held by chapter-1 of writer" in text
    assert "chapter-2 of writer started first" in text
    found = json.loads(await said(berth, tmp_path, "explain", "writer", "chapter-2", "--json"))["explained"]
    assert (found["state"], found["timeline"][0]["by"]) == ("finished", "ann")
    causes = json.loads(await said(berth, tmp_path, "waiting", "causes", "--json"))
    assert {share["reason"] for share in causes["all"]["shares"]} >= {"agent_parallelism_limit_reached"}
    assert [one["name"] for one in causes["by_organization"]] == ["acme"]
    (estimate,) = json.loads(await said(berth, tmp_path, "waiting", "estimate", "--json"))
    assert estimate["trigger_id"] == "two"


async def test_what_if_on_recorded_traffic(berth: Stack, tmp_path: Path) -> None:
    found = json.loads(await said(berth, tmp_path, "what-if", "--limit", "writer=3", "--json"))
    assert found["total"]["before"]["triggers"] == 5
    writer = next(effect for effect in found["agents"] if effect["name"] == "writer")
    assert writer["after"]["max"] == 0 < writer["before"]["max"]
    refused = await asyncio.to_thread(_berth, berth, tmp_path, "what-if", "--limit", "writer=11")
    assert refused.returncode == 2
    assert "1 to 10" in refused.stderr.replace("\n", " ")


async def test_an_exported_file_is_replayed_without_any_service(berth: Stack, tmp_path: Path) -> None:
    file = tmp_path / "slice.jsonl"
    assert "5 decisions" in await said(berth, tmp_path, "audit", "export", "writer", "--to", str(file))
    content = file.read_bytes()
    assert b"private words" not in content
    assert content.count(b"\n") == 7
    logged = await berth.records(DECISIONS, "writer")
    assert [json.loads(line)["decision"]["seq"] for line in content.splitlines()[1:-1]] == [
        one["seq"] for one in logged
    ]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
    words = [sys.executable, "-m", "api.cli", "audit", "replay", str(file)]
    for damage, code in ((b"", 0), (b'"slot_number":1', 1)):
        file.write_bytes(content.replace(damage, b'"slot_number":2') if damage else content)
        done = await asyncio.to_thread(
            subprocess.run, words, cwd=tmp_path, env=alone, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == code, done.stderr
    again = await asyncio.to_thread(_berth, berth, tmp_path, "audit", "export", "writer", "--to", str(file))
    assert again.returncode == 1
    assert "is there already" in again.stderr


async def test_what_is_not_decided_yet_is_refused_with_the_last_that_is(berth: Stack, tmp_path: Path) -> None:
    for more in ((), ("--from-log",)):
        done = await asyncio.to_thread(_berth, berth, tmp_path, "as-of", "writer", "--seq", "6", *more)
        told = " ".join(done.stderr.replace("│", " ").split())
        assert (done.returncode, done.stdout) == (1, "")
        assert "has no decision 6 yet: the last one that was found is 5" in told
        assert "--seq 5" in told
    future = await asyncio.to_thread(_berth, berth, tmp_path, "as-of", "--at", "9999-01-01T00:00:00Z")
    assert future.returncode == 2
    assert "still to come" in future.stderr


async def test_who_is_unknown_is_said_with_what_to_do(berth: Stack, tmp_path: Path) -> None:
    for words in (
        ("as-of", "nobody"),
        ("as-of", "writer", "--seq", "0"),
        ("explain", "writer", "nobody"),
        ("explain", "writer", "two", "nobody"),
        ("explain", "writer", "two", "two", "--other-agent", "nobody"),
        ("waiting", "estimate", "nobody"),
        ("waiting", "estimate", "nobody", "--json"),
        ("audit", "export", "nobody"),
    ):
        done = await asyncio.to_thread(_berth, berth, tmp_path, *words)
        assert done.returncode == 1
        assert "To do:" in done.stderr
    assert os.listdir(tmp_path) == []  # noqa: PTH208
