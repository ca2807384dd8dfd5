"""The running service asked by its own description: whatever is sent, the answer is described there, and no 500."""

import asyncio
import re
import sys
from pathlib import Path

import pytest

from tests.integration.http_stack import Stack, limited, read_at
from tests.tokens import bearer

pytestmark = [pytest.mark.kafka, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

EXAMPLES = 10
ASKING_SECONDS_MAX = 30
"""Every address is asked first; then it goes on until this is over."""
SECONDS_MAX = 100
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
    "unsupported_method",
    "ignored_auth",
)
LEFT_OUT = "^/api/events$|/task$|/execute-task$|/archive$|/what-if$"
"""A stream, what waits for a runner, what would end all the others, and what starts a process; they have own tests."""
CONFIGURATION = """
[parameters]
"path.agent_id" = "{agent}"
"path.site" = "{site}"
"query.wait_seconds" = 0
"""


async def test_whatever_is_asked_is_answered_as_described(berth: Stack, tmp_path: Path, seed: int) -> None:
    await limited(berth.http, "fuzzed", 2)
    made = await berth.http.put("/api/sites/fuzzed/capacity", json={"capacity": 2})
    await read_at(berth.http, made, "/api/sites/fuzzed")
    configuration = tmp_path / "schemathesis.toml"
    configuration.write_text(CONFIGURATION.format(agent="fuzzed", site="fuzzed"))
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name("schemathesis")),
        *("--config-file", str(configuration)),
        *("run", f"{str(berth.http.base_url).rstrip('/')}/openapi.json"),
        *("--header", f"Authorization: {bearer()['Authorization']}"),
        *("--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing", "--exclude-path-regex", LEFT_OUT),
        *("--max-time", str(ASKING_SECONDS_MAX), "--max-examples", str(EXAMPLES)),
        *("--seed", str(seed), "--workers", "1", "--request-timeout", "20"),
        *("--continue-on-failure", "--no-color", "--generation-database", "none"),
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(SECONDS_MAX):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    said = output.decode(errors="replace")
    assert process.returncode == 0, said
    tested = re.search(r"Tested: (\d+)", said)
    assert tested is not None and int(tested[1]) > 30, said
