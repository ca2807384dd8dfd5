"""The examples of docs/http-api.md are run as a reader would type them, against the service."""

import asyncio
import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.integration.http_stack import Stack
from tests.integration.workers import ROOT
from tests.tokens import SECRET

pytestmark = [pytest.mark.kafka, pytest.mark.asyncio(loop_scope="module")]

DOCUMENT = Path(ROOT) / "docs" / "http-api.md"
BLOCKS = re.findall(r"^```console\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)


def script(block: str, address: str) -> str:
    """The commands of a block; berth and the service are those of this test."""
    commands = "\n".join(line.removeprefix("$ ") for line in block.splitlines())
    berth = f"{shlex.quote(sys.executable)} -m api.cli"
    here = commands.replace(".venv/bin/berth", berth).replace("http://127.0.0.1:8080", address)
    return "set -e\n" + here.replace("curl ", "curl --silent --show-error --fail-with-body --write-out '\\n' ")


@pytest.mark.parametrize("number", range(len(BLOCKS)))
async def test_an_example_does_what_it_says(berth: Stack, number: int, tmp_path: Path) -> None:
    assert len(BLOCKS) >= 2
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
    running = await asyncio.create_subprocess_exec(
        "bash",
        "-c",
        script(BLOCKS[number], str(berth.http.base_url).rstrip("/")),
        cwd=ROOT,
        env=kept | {"BERTH_JWT_SECRET": SECRET, "BERTH_DATA_DIRECTORY": str(tmp_path)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    said, errors = await asyncio.wait_for(running.communicate(), 60)
    assert running.returncode == 0, errors.decode() + said.decode()
    assert said.strip()
    if "curl" in BLOCKS[number]:
        assert all("code" not in json.loads(line) for line in said.decode().splitlines())
