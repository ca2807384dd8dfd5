"""A service ends when it is asked to or must, whatever else it does (streams/ending.py, api/cli/service.py).

Each is a process of its own that says ``"event": "begun"`` when it does what the test is about.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest

ENDS_SECONDS: Final = 1.0
BOUND_SECONDS: Final = 20.0
"""For everything that ends in a second or two on an idle machine."""

PROGRAM: Final = """
import asyncio, logging, os, signal, sys, threading, time, warnings
import structlog
from api.cli.service import log_as_json, run_service
from aiokafka.errors import KafkaConnectionError

log_as_json()
log = structlog.get_logger()
never = threading.Event()

async def deaf():
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass

def print_for_ever():
    while True:
        print("x" * 1000)

def compute_for_ever():
    while True:
        pass

async def work(ending):
    {work}

run_service(work, {ends_seconds})
"""

BEGIN: Final = 'asked = ending.in_order(); log.info("begun")'


@contextmanager
def service(*lines: str) -> Iterator[subprocess.Popen[str]]:
    """A service that does this; killed at the end if it is still there."""
    source = PROGRAM.format(work="\n    ".join(lines), ends_seconds=ENDS_SECONDS)
    process = subprocess.Popen(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def begun(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    said = json.loads(process.stdout.readline())
    assert said["event"] == "begun", said


def ended(process: subprocess.Popen[str]) -> tuple[int, list[dict[str, Any]], list[dict[str, Any]]]:
    """Its exit code, and what it has said on standard output and error since: JSON only."""
    out, err = process.communicate(timeout=BOUND_SECONDS)
    return process.returncode, [json.loads(line) for line in out.splitlines()], list(map(json.loads, err.splitlines()))


LEFT_BEHIND: Final = {
    "nothing": "pass",
    "a task that swallows its cancellation": "global left; left = asyncio.create_task(deaf()); await asyncio.sleep(0)",
    "a thread that the interpreter waits for": "threading.Thread(target=never.wait).start()",
    "a thread of the loop's pool": "asyncio.get_running_loop().run_in_executor(None, never.wait)",
    "a generator that doesn't close": "global left; left = endless(); await anext(left)",
}


@pytest.mark.parametrize("left", LEFT_BEHIND)
def test_the_process_ends_with_its_work_whatever_that_leaves_behind(left: str) -> None:
    endless = (
        "async def endless():",
        "    try:",
        "        while True: yield",
        "    finally: await deaf()",
        LEFT_BEHIND[left],
        "return 69",
    )
    with service(*endless) as process:
        code, said, complaints = ended(process)
    assert (code, said, complaints) == (69, [], []), "at once, without any force"


HANGS: Final = {
    "await deaf()": "deaf",
    "await asyncio.shield(asyncio.create_task(deaf()))": "deaf",
    "never.wait()": "work",
    "threading.Thread(target=never.wait).start(); time.sleep(3600)": "work",
    "compute_for_ever()": "compute_for_ever",
}


@pytest.mark.parametrize(
    ("why", "hangs"),
    [*((signal.SIGTERM, hangs) for hangs in HANGS), (signal.SIGINT, "await deaf()"), (75, "never.wait()")],
)
def test_a_service_that_does_not_end_is_ended_and_says_where_it_was(why: int, hangs: str) -> None:
    lines = (BEGIN, hangs) if isinstance(why, signal.Signals) else (BEGIN, f"ending.begin({why})", hangs)
    with service(*lines) as process:
        begun(process)
        began = time.monotonic()
        if isinstance(why, signal.Signals):
            process.send_signal(why)
            process.send_signal(why)  # who asks twice doesn't get another exit code
        code, said, complaints = ended(process)
        assert time.monotonic() - began > ENDS_SECONDS / 2
    assert code == (0 if isinstance(why, signal.Signals) else why)
    (told,) = said
    assert (told["event"], told["exit_code"]) == ("service_ended_hard", code)
    assert any(HANGS[hangs] in place for places in told["where"].values() for place in places), told
    assert complaints == []


def test_a_service_whose_output_nobody_reads_ends_too() -> None:
    with service(BEGIN, "print_for_ever()") as process:
        begun(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(BOUND_SECONDS) == 0


def test_a_service_that_is_asked_ends_in_order_and_with_its_own_code() -> None:
    with service(BEGIN, "await asked.wait()", 'log.info("in_order")', "return 3") as process:
        begun(process)
        process.send_signal(signal.SIGTERM)
        code, said, complaints = ended(process)
    assert (code, [line["event"] for line in said], complaints) == (3, ["in_order"], [])


@pytest.mark.parametrize("hangs", HANGS)
def test_a_service_that_is_asked_before_it_holds_anything_ends_at_once(hangs: str) -> None:
    with service('log.info("begun")', hangs) as process:
        begun(process)
        process.send_signal(signal.SIGTERM)
        code, said, complaints = ended(process)
    assert (code, [line["event"] for line in said]) == (0, ["asked_to_stop_before_it_began"])
    assert complaints == []


def test_a_program_that_a_service_starts_can_be_ended_as_usual() -> None:
    lines = (
        "program = await asyncio.create_subprocess_exec('sleep', '3600')",
        "program.terminate()",
        "return -await program.wait()",
    )
    with service(*lines) as process:
        assert ended(process) == (signal.SIGTERM, [], [])


def test_an_exception_is_one_line_and_an_exit_code_whatever_it_leaves_behind() -> None:
    left = LEFT_BEHIND["a thread that the interpreter waits for"]
    with service(left, "raise ValueError('a bug')") as process:
        code, (said,), complaints = ended(process)
    assert (code, complaints) == (70, [])
    assert (said["event"], said["level"], said["error"]) == ("service_failed", "critical", "ValueError('a bug')")
    assert "Traceback" in said["exception"] and said["advice"]


def test_what_the_command_line_has_words_for_is_raised_and_ends_the_process_all_the_same() -> None:
    left = LEFT_BEHIND["a thread that the interpreter waits for"]
    with service(left, "raise KafkaConnectionError('away')") as process:
        _, complaint = process.communicate(timeout=BOUND_SECONDS)
    assert process.returncode == 69
    assert complaint.rstrip().endswith("KafkaConnectionError: away")


def test_words_of_libraries_are_json_and_not_said_again_and_again() -> None:
    lines = (
        "library = logging.getLogger('aiokafka')",
        "for number in range(1000): library.error('away: %s', 'refused')",
        "library.info('unimportant')",
        "try: 1 / 0",
        "except ZeroDivisionError: library.exception('it failed')",
        "warnings.warn('old')",
        "thread = threading.Thread(target=lambda: 1 / 0, name='other'); thread.start(); thread.join()",
        "return 0",
    )
    with service(*lines) as process:
        code, (of_thread,), said = ended(process)
    assert code == 0
    assert (of_thread["event"], of_thread["thread"]) == ("thread_ended", "other")
    assert "ZeroDivisionError" in of_thread["exception"]
    assert [(line["logger"], line["level"]) for line in said] == [
        ("aiokafka", "error"),
        ("aiokafka", "error"),
        ("py.warnings", "warning"),
    ]
    assert [line["event"] for line in said[:2]] == ["away: refused", "it failed"]
    assert "ZeroDivisionError" in said[1]["exception"]
