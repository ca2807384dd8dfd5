"""Kafka is away, doesn't answer, or isn't known: every command that needs it says so, and ends with the code for it.

A program that runs one of them tells "something is wrong with the log" (1) from "nobody could look" (69).
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.integration.test_up import berth

AWAY_EXIT_CODE = 69
LOOKS_AT_THE_LOG = (
    ("verify",),
    ("recover",),
    ("as-of", "--at", "now", "--from-log"),
    ("explain", "writer", "t"),
    ("waiting", "causes"),
    ("what-if", "--limit", "*=2"),
    ("topics", "check"),
)
NOBODY = "127.0.0.1:1"
PAGE_BYTES = 4096
"""The smallest pipe that there is."""


@pytest.mark.parametrize("words", LOOKS_AT_THE_LOG, ids=lambda words: words[0])
def test_without_kafka_a_command_ends_with_the_code_for_that(tmp_path: Path, words: tuple[str, ...]) -> None:
    for variables, told in (({}, "No Kafka is known"), ({"BERTH_KAFKA": NOBODY}, "Kafka can't be reached")):
        done = berth(tmp_path, *words, **variables)
        assert done.returncode == AWAY_EXIT_CODE, done.stderr
        assert told in done.stderr and "Kept:" in done.stderr and "To do:" in done.stderr
        assert all(word not in done.stderr for word in ("Traceback", "Unclosed", "Unable connect"))


def test_ctrl_c_while_it_still_imports_shows_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "api.cli", "verify"]
    environment = {**os.environ, "BERTH_KAFKA": NOBODY}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True, pipesize=PAGE_BYTES
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.rstrip().endswith("typer"):  # half of it, and the pipe takes no more than a little of the rest
                break
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == -signal.SIGINT
    assert "Traceback" not in said


@pytest.mark.parametrize("words", [("projections", "diff"), ("projections", "rebuild"), ("as-of",)], ids=" ".join)
def test_so_does_one_that_needs_postgresql(tmp_path: Path, words: tuple[str, ...]) -> None:
    unknown = berth(tmp_path, *words, BERTH_KAFKA=NOBODY)
    refused = berth(tmp_path, *words, BERTH_KAFKA=NOBODY, BERTH_DATABASE_URL=f"postgresql://nobody@{NOBODY}/none")
    for done, told in ((unknown, "No PostgreSQL is known"), (refused, "connection failed")):
        assert done.returncode == AWAY_EXIT_CODE, done.stderr
        assert told in done.stderr and "To do:" in done.stderr and "Traceback" not in done.stderr


def test_the_tables_are_compared_with_no_log(tmp_path: Path, database: str) -> None:
    for words in (("projections", "diff"), ("projections", "rebuild")):
        for variables in ({}, {"BERTH_KAFKA": NOBODY}):
            done = berth(tmp_path, *words, BERTH_DATABASE_URL=database, **variables)
            assert done.returncode == AWAY_EXIT_CODE, done.stderr
            assert "Traceback" not in done.stderr and "Unclosed" not in done.stderr


@pytest.mark.timeout(120)
async def test_a_kafka_that_takes_connections_and_says_nothing_is_away(tmp_path: Path, database: str) -> None:
    with closing(socket.socket()) as frozen:
        frozen.bind(("127.0.0.1", 0))
        frozen.listen(64)
        where = {"BERTH_KAFKA": f"127.0.0.1:{frozen.getsockname()[1]}", "BERTH_DATABASE_URL": database}
        ended = await asyncio.gather(
            *(asyncio.to_thread(berth, tmp_path, *words, **where) for words in (("verify",), ("recover",))),
            asyncio.to_thread(berth, tmp_path, "projections", "diff", **where),
        )
    for done in ended:
        assert done.returncode == AWAY_EXIT_CODE, done.stderr
        assert "Kafka can't be reached" in done.stderr and "Traceback" not in done.stderr
