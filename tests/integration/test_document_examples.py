"""The examples of some documents are run as a reader would type them, against the service and its Kafka."""

import asyncio
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from aiokafka import AIOKafkaProducer

from tests.brokers import WAIT_SECONDS
from tests.integration.http_stack import Stack
from tests.integration.workers import ROOT
from tests.tokens import SECRET

pytestmark = [pytest.mark.kafka, pytest.mark.asyncio(loop_scope="module")]

BLOCKS = [
    pytest.param(block, id=f"{name}-{number}")
    for name in ("http-api", "upstream")
    for number, block in enumerate(
        re.findall(
            r"^```console\n(.*?)^```", (Path(ROOT) / "docs" / f"{name}.md").read_text(), re.MULTILINE | re.DOTALL
        )
    )
]
STREAM_SECONDS = 2
STREAM_EXIT_CODE = 28
"""curl's, when it was told to stop after so long."""


def script(block: str, address: str, bootstrap: str) -> str:
    """The commands of a block, without what they print; berth and the service are those of this test."""
    commands = "\n".join(re.findall(r"^\$ ((?:.*\\\n)*.*)$", block, re.MULTILINE))
    berth = f"{shlex.quote(sys.executable)} -m api.cli"
    curl = "curl --silent --show-error --fail-with-body --write-out '\\n' "
    programs = {".venv/bin/berth": berth, ".venv/bin/python": shlex.quote(sys.executable)}
    here = re.sub(r"\.venv/bin/\w+", lambda found: programs[found[0]], f'TOKEN="$(.venv/bin/berth token)"\n{commands}')
    here = here.replace("127.0.0.1:9092", bootstrap)
    here = here.replace("http://127.0.0.1:8080", address).replace("curl -N", f"curl -N --max-time {STREAM_SECONDS}")
    return "set -e\n" + here.replace("curl ", curl)


@pytest.mark.parametrize("block", BLOCKS)
async def test_an_example_does_what_it_says(berth: Stack, block: str, tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
    running = await asyncio.create_subprocess_exec(
        "bash",
        "-c",
        script(block, str(berth.http.base_url).rstrip("/"), berth.kafka.bootstrap),
        cwd=ROOT,
        env=kept | {"BERTH_JWT_SECRET": SECRET, "BERTH_DATA_DIRECTORY": str(tmp_path)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    said, errors = await asyncio.wait_for(running.communicate(), 60)
    is_stream = "curl -N" in block
    assert running.returncode == (STREAM_EXIT_CODE if is_stream else 0), errors.decode() + said.decode()
    assert said.strip()
    if is_stream:
        assert said.startswith(b"id: ")
    elif "curl" in block:
        assert all("code" not in json.loads(line) for line in said.decode().splitlines())


async def test_the_upstream_on_kafka_hears_what_was_decided_and_asking_again_changes_nothing(berth: Stack) -> None:
    agent = f"agent-{uuid4().hex[:12]}"

    async def ask(id: str, message: str) -> dict[str, Any]:
        running = await asyncio.create_subprocess_exec(
            *(sys.executable, "docs/examples/ask.py", berth.kafka.bootstrap, agent, id, message),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        said, errors = await asyncio.wait_for(running.communicate(), 60)
        assert running.returncode == 0, errors.decode()
        decision: dict[str, Any] = json.loads(said)
        return decision

    first = await ask("q1", "Are you there?")
    assert "dispatched" in [event["type"] for event in first["events"]]
    assert (await ask("q2", "And now?"))["refusal"]["code"] == "agent_parallelism_limit_reached"
    again = (await ask("q1", "Are you there?"))["ignored"]
    assert (again["reason"], again["first_seq"], again["state"]) == ("duplicate", first["seq"], "running")
    assert (await ask("q1", "Something else"))["refusal"]["code"] == "trigger_id_conflict"


async def test_what_an_upstream_sends_twice_with_the_example_in_python_is_accepted_once(berth: Stack) -> None:
    agent = f"agent-{uuid4().hex[:12]}"
    document = (Path(ROOT) / "docs" / "upstream.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", document, re.MULTILINE | re.DOTALL)
    example: dict[str, Any] = {}
    exec(compile(block, "docs/upstream.md", "exec"), example)
    event = {"id": "e1", "issue": "issue-7", "text": "Fix it", "author": "ann", "at": "2026-03-01T10:00:00Z"}
    async with AIOKafkaProducer(bootstrap_servers=berth.kafka.bootstrap) as producer:
        for _ in range(2):
            await example["ask"](producer, agent, event)
        await example["ask"](producer, agent, {**event, "id": "e2"})
    async with asyncio.timeout(WAIT_SECONDS):
        while "e2" not in (accepted := await berth.accepted(agent)):
            await asyncio.sleep(0.05)
    assert accepted == ["e1", "e2"]
