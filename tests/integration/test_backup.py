"""The procedure of docs/operate.md, rehearsed: back up while work goes on, lose everything, restore, send again."""

import asyncio
import json
import shutil
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import psycopg
import pytest

from api.cli.embedded_postgres import programs
from streams import CONTROLS, DECISIONS, TRIGGERS
from streams.codec import partition_of
from tests.brokers import WAIT_SECONDS, until
from tests.integration.http_stack import Stack, until_status
from tests.integration.workers import PARTITIONS, Log, WorkerProcess, sending

pytestmark = pytest.mark.kafka
AGENTS = [f"agent-{number}" for number in range(8)]
BEFORE, AFTER = range(10), range(10, 15)


async def write(berth: Stack, numbers: Iterable[int]) -> None:
    """What an upstream sends, and what it sends again: the same ids with the same content."""
    async with sending(berth.kafka.bootstrap) as producer:
        for agent_id in AGENTS:
            place = {"key": agent_id.encode(), "partition": partition_of(agent_id, PARTITIONS)}
            settings = {"type": "configure", "id": "limit", "parallelism_limit": 2, "requested_by": "test"}
            await producer.send(CONTROLS.name, json.dumps({"v": 1, "agent_id": agent_id, **settings}).encode(), **place)
            for number in numbers:
                turn = {"type": "trigger", "id": f"t{number}", "conversation_id": f"c{number}", "message": f"m{number}"}
                await producer.send(TRIGGERS.name, json.dumps({"v": 1, "agent_id": agent_id, **turn}).encode(), **place)


async def ends(berth: Stack, kind: str = "finished") -> dict[str, list[str]]:
    """The triggers of which the log says this, by agent."""
    found = defaultdict(list)
    log = await Log.read(berth.kafka.bootstrap, DECISIONS.name)
    for number in range(PARTITIONS):
        for decision in log.values(DECISIONS.name, number):
            for event in decision.get("events", ()):
                if event["type"] == kind:
                    found[decision["agent_id"]].append(event["trigger_id"])
    return found


async def all_end(berth: Stack, count: int, kind: str = "finished") -> None:
    async def have_ended() -> bool:
        found = await ends(berth, kind)
        return all(len(found[agent_id]) >= count for agent_id in AGENTS)

    await until(have_ended)


async def succeeds(berth: Stack, *words: str) -> None:
    process: WorkerProcess = await berth.berth(*words)
    assert await process.ended(WAIT_SECONDS) == 0, process.account()


def pg(name: str, *words: str) -> None:
    subprocess.run([programs() / name, *words], check=True, timeout=WAIT_SECONDS)


async def test_all_goes_on_from_a_backup_as_if_nothing_had_come_after_it(own_berth: Stack, tmp_path: Path) -> None:
    berth, copy, dump = own_berth, tmp_path / "copy", tmp_path / "tables.dump"
    data = berth.kafka.directory / "data"
    assert berth.worker is not None and berth.projector is not None
    await write(berth, BEFORE)
    await all_end(berth, 2, "dispatched")  # nobody runs them yet

    pg("pg_dump", "--format=custom", f"--file={dump}", "--schema=berth", f"--dbname={berth.database_url}")
    await write(berth, AFTER[:1])
    assert await berth.worker.stop() == 0
    await asyncio.to_thread(berth.kafka.stop)
    shutil.copytree(data, copy)
    await asyncio.to_thread(berth.kafka.start)
    await berth.start_worker()

    await write(berth, AFTER)
    runner = await berth.berth("runner", "--work-seconds", "0")
    await all_end(berth, len(BEFORE) + len(AFTER))
    await stop_everything(berth, runner)

    shutil.rmtree(data)
    shutil.copytree(copy, data)
    await asyncio.to_thread(berth.kafka.start)
    with psycopg.connect(berth.database_url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA berth CASCADE")
    pg("pg_restore", f"--dbname={berth.database_url}", "--no-owner", str(dump))
    assert (await ends(berth)) == {}

    await succeeds(berth, "verify")
    await berth.start_worker()
    await berth.start_projector()
    await until_status(await berth.start_api(), "/readyz", 200)
    runner = await berth.berth("runner", "--work-seconds", "0")
    await write(berth, [*BEFORE, *AFTER])
    await all_end(berth, len(BEFORE) + len(AFTER))
    assert await runner.stop() == 0

    for kind in ("accepted", "finished", "dispatched"):
        counted = {agent_id: Counter(ids) for agent_id, ids in (await ends(berth, kind)).items()}
        assert counted == {agent_id: {f"t{number}": 1 for number in (*BEFORE, *AFTER)} for agent_id in AGENTS}, kind
    await succeeds(berth, "verify")
    assert await berth.projector.stop() == 0
    await succeeds(berth, "projections", "diff")


async def stop_everything(berth: Stack, runner: WorkerProcess) -> None:
    assert berth.worker is not None and berth.projector is not None
    codes = await asyncio.gather(*(one.stop() for one in (runner, berth.worker, berth.projector, *berth.apis)))
    assert set(codes) == {0}
    await asyncio.to_thread(berth.kafka.stop)
