"""A service that can't be had skips a test on somebody's machine, and fails it where every service must be there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("required", "outcome"), [("0", "1 skipped"), ("1", "1 error")])
def test_a_missing_kafka_skips_or_fails(tmp_path: Path, required: str, outcome: str) -> None:
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:1")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-k",
            "two_creates",
            "tests/integration/test_topics.py",
        ],
        cwd=ROOT,
        env=os.environ | proxies | {"XDG_CACHE_HOME": str(tmp_path), "BERTH_REQUIRE_SERVICES": required},
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome in done.stdout
    assert "could not be downloaded" in done.stdout
    assert (done.returncode == 0) == (required == "0")
