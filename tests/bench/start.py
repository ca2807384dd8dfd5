"""How long a user waits for the first dispatch: ``berth run`` in an empty directory, everything downloaded before."""

import asyncio
import os
import re
import signal
import sys
import tempfile
import time
from typing import Any, Final

from tests.bench.processes import ROOT

_FIRST: Final = re.compile(rb"first dispatch ([0-9.]+) s")
START_TIMEOUT_SECONDS: Final = 90


async def first_dispatch(_bootstrap: str) -> dict[str, Any]:
    """Seconds from the command to the first dispatch, and from Ctrl-C to the end of everything."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
    with tempfile.TemporaryDirectory(prefix="berth-start-") as directory:
        began = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "api.cli", "run"),
            cwd=directory,
            env=environment | {"PYTHONPATH": str(ROOT)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        assert process.stdout is not None
        printed = b""
        try:
            async with asyncio.timeout(START_TIMEOUT_SECONDS):
                while not (found := _FIRST.search(printed)):
                    line = await process.stdout.readline()
                    if not line:
                        raise RuntimeError(f"berth run has ended:\n{printed.decode(errors='replace')}")
                    printed += line
            seen = time.monotonic()
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGINT)
            await process.communicate()
        return {
            "first_dispatch_seconds": round(seen - began, 2),
            "said_seconds": float(found[1]),
            "stop_seconds": round(time.monotonic() - seen, 2),
        }
