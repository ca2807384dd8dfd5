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


STREAM_SECONDS = 2
STREAM_EXIT_CODE = 28
"""curl's, when it was told to stop after so long."""


def script(block: str, address: str) -> str:
    """The commands of a block, without what they print; berth and the service are those of this test."""
    commands = "\n".join(re.findall(r"^\$ ((?:.*\\\n)*.*)$", block, re.MULTILINE))
    berth = f"{shlex.quote(sys.executable)} -m api.cli"
    curl = "curl --silent --show-error --fail-with-body --write-out '\\n' "
    here = f'TOKEN="$(.venv/bin/berth token)"\n{commands}'.replace(".venv/bin/berth", berth)
    here = here.replace("http://127.0.0.1:8080", address).replace("curl -N", f"curl -N --max-time {STREAM_SECONDS}")
    return "set -e\n" + here.replace("curl ", curl)


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
    is_stream = "curl -N" in BLOCKS[number]
    assert running.returncode == (STREAM_EXIT_CODE if is_stream else 0), errors.decode() + said.decode()
    assert said.strip()
    if is_stream:
        assert said.startswith(b"id: ")
    elif "curl" in BLOCKS[number]:
        assert all("code" not in json.loads(line) for line in said.decode().splitlines())
