"""A service ends when its work is over, whatever else it has started (api/cli/service.py)."""

import subprocess
import sys

import pytest

from api.cli.service import LEFT_BEHIND_SECONDS

DEAF = """
import asyncio, sys
from api.cli.service import log_as_json, run_service

async def deaf():
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass

async def work():
    if {starts}:
        global left
        left = asyncio.create_task(deaf())
        await asyncio.sleep(0)
    return 69

log_as_json()
sys.exit(run_service(work()))
"""


@pytest.mark.parametrize("starts", [True, False])
def test_the_process_ends_with_its_exit_code_also_when_a_task_swallows_its_cancellation(starts: bool) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", DEAF.format(starts=starts)],
        capture_output=True,
        text=True,
        check=False,
        timeout=LEFT_BEHIND_SECONDS + 60,
    )
    assert ended.returncode == 69, ended.stderr
    assert ("service_ended_hard" in ended.stdout) is starts
