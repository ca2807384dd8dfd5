"""The runners of docs/runner.md as they stand there, on the real thing: each keeps the promises of a runner."""

import asyncio
import os
import re
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import pytest_asyncio

from streams import DECISIONS, DISPATCHES, STATUSES
from tests.brokers import WAIT_SECONDS
from tests.integration.http_stack import Stack, limited
from tests.integration.workers import ROOT, Json, WorkerProcess
from tests.tokens import SECRET

pytestmark = [pytest.mark.kafka, pytest.mark.asyncio(loop_scope="module")]

EXAMPLES = Path(ROOT) / "docs" / "examples"
LINES_MAX = {"kafka": 80, "http": 60}
BLOCKS: list[str] = re.findall(
    r"^```console\n(.*?)^```", (Path(ROOT) / "docs" / "runner.md").read_text(), re.MULTILINE | re.DOTALL
)


class Office:
    """One agent and its runner."""

    def __init__(self, berth: Stack, road: str) -> None:
        self.berth = berth
        self.road = road
        self.agent = f"agent-{uuid4().hex[:12]}"
        self.runners: list[WorkerProcess] = []

    async def start_runner(self) -> WorkerProcess:
        """Start it as docs/runner.md says."""
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", self._command()),
            cwd=ROOT,
            env={**os.environ, "BERTH_JWT_SECRET": SECRET},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        self.runners.append(WorkerProcess(process))
        return self.runners[-1]

    def _command(self) -> str:
        (command,) = (block.removeprefix("$ ") for block in BLOCKS if f"{self.road}_runner.py" in block)
        python = shlex.quote(sys.executable)
        for written, here in (
            (".venv/bin/python", f"exec {python}"),
            (".venv/bin/berth", f"{python} -m api.cli"),
            ("127.0.0.1:9092", self.berth.kafka.bootstrap),
            ("http://127.0.0.1:8080", str(self.berth.http.base_url).rstrip("/")),
            ("my-runners", f"group-{self.agent}"),
            ("writer", self.agent),
        ):
            command = command.replace(written, here)
        return command

    async def ask(self, id: str, **fields: Any) -> None:
        answer = await self.berth.http.post(f"/api/agents/{self.agent}/triggers", json={"id": id, **fields})
        assert answer.status_code in (201, 202), answer.text

    async def reaches(self, id: str, state: str) -> Json:
        """The trigger, once it is in this state."""
        last = ""
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while True:
                    answer = await self.berth.http.get(f"/api/agents/{self.agent}/triggers/{id}")
                    last = answer.text
                    if answer.status_code == 200 and answer.json()["state"] == state:
                        content: Json = answer.json()
                        return content
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise TimeoutError(f"{id} is not {state}: {last}; {[one.account() for one in self.runners]}") from None

    async def said(self, status: str, count: int = 1) -> list[Json]:
        """What runners said of this kind, once it is so much."""
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                records = await self.berth.records(STATUSES, self.agent)
                found = [record for record in records if record["status"] == status]
                if len(found) >= count:
                    return found
                await asyncio.sleep(0.05)

    async def events(self, kind: str, count: int = 1) -> list[Json]:
        """The agent's events of this kind, once there are so many."""
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                decisions = await self.berth.records(DECISIONS, self.agent)
                found = [event for one in decisions for event in one.get("events", ()) if event["type"] == kind]
                if len(found) >= count:
                    return found
                await asyncio.sleep(0.05)


@pytest_asyncio.fixture(params=["kafka", "http"], loop_scope="module")
async def office(berth: Stack, request: pytest.FixtureRequest) -> AsyncIterator[Office]:
    made = Office(berth, request.param)
    await limited(berth.http, made.agent, 2)
    yield made
    await asyncio.gather(*(runner.discard() for runner in made.runners))


async def test_it_works_off_what_comes_and_reports_results_and_failures(office: Office) -> None:
    lines = (EXAMPLES / f"{office.road}_runner.py").read_text().splitlines()
    assert len(lines) <= LINES_MAX[office.road], "docs/runner.md says how short it is"
    await office.start_runner()
    for number in range(4):
        await office.ask(f"t{number}", payload={"work_seconds": 0.1})
    await office.ask("bad", payload={"work_seconds": "long"}, max_attempts=1)
    for number in range(4):
        assert (await office.reaches(f"t{number}", "finished"))["result"] == "done"
    failed = await office.reaches("bad", "failed")
    assert "TypeError" in failed["error"]


async def test_it_ends_what_is_stopped_and_says_so(office: Office) -> None:
    await office.start_runner()
    await office.ask("long", payload={"work_seconds": 600})
    await office.said("running")
    stop = await office.berth.http.delete(f"/api/agents/{office.agent}/triggers/long")
    assert stop.status_code == 202
    await office.reaches("long", "stopped")
    (stopped,) = await office.events("stopped")
    assert stopped["reason"] == "runner"
    assert len(await office.said("stopped")) == 1


async def test_it_does_a_dispatch_that_comes_twice_once(office: Office) -> None:
    await office.start_runner()
    await office.ask("first", payload={"work_seconds": 1})
    await office.said("running")
    (dispatch,) = await office.berth.records(DISPATCHES, office.agent)
    again = {name: value for name, value in dispatch.items() if name not in ("agent_id", "headers")}
    for _ in range(2):
        await office.berth.send(DISPATCHES, office.agent, **again)
    await office.reaches("first", "finished")
    await office.ask("second", payload={"work_seconds": 0})
    await office.reaches("second", "finished")
    began = [record["execution_id"] for record in await office.said("running", 2)]
    assert len(began) == len(set(began)) == 2
    assert len(await office.said("finished", 2)) == 2


async def test_its_signs_of_life_keep_a_lease_that_is_shorter_than_the_work(office: Office) -> None:
    await office.start_runner()
    await office.ask("first", payload={"work_seconds": 0})
    await office.reaches("first", "finished")
    await office.ask("slow", payload={"work_seconds": 7}, heartbeat_seconds=3)
    await office.reaches("slow", "finished")
    assert len(await office.said("heartbeat", 3)) >= 3
    assert len(await office.events("dispatched")) == 2


async def test_what_was_taken_from_it_while_it_was_frozen_is_ended_and_done_anew(office: Office) -> None:
    runner = await office.start_runner()
    await office.ask("first", payload={"work_seconds": 0})
    await office.reaches("first", "finished")  # it is there, before a short lease begins
    await office.ask("frozen", payload={"work_seconds": 600}, heartbeat_seconds=3)
    taken = (await office.said("running", 2))[-1]["execution_id"]
    runner.send(signal.SIGSTOP)
    (expired,) = await office.events("lease_expired")
    assert expired["execution_id"] == taken
    runner.send(signal.SIGCONT)
    anew = (await office.said("running", 3))[-1]["execution_id"]
    stop = await office.berth.http.delete(f"/api/agents/{office.agent}/triggers/frozen")
    assert stop.status_code == 202
    await office.reaches("frozen", "stopped")
    assert [one["execution_id"] for one in await office.said("stopped", 2)] == [taken, anew]
    (stopped,) = await office.events("stopped")
    assert (stopped["execution_id"], stopped["reason"]) == (anew, "runner")


async def test_a_new_one_goes_on_after_one_that_was_killed(office: Office) -> None:
    runner = await office.start_runner()
    await office.ask("first", payload={"work_seconds": 600}, heartbeat_seconds=2)
    await office.said("running")
    await runner.kill()
    await office.ask("second", payload={"work_seconds": 0})
    await office.start_runner()
    await office.reaches("second", "finished")
    # Over HTTP it takes up what ran; on Kafka the silence ends the attempt, and the trigger is tried again.
    assert len(await office.said("running", 3)) >= 3


async def test_one_on_kafka_that_is_asked_to_end_gives_back_what_it_holds(berth: Stack) -> None:
    office = Office(berth, "kafka")
    await limited(berth.http, office.agent, 1)
    runner = await office.start_runner()
    try:
        await office.ask("long", payload={"work_seconds": 600})
        await office.said("running")
        assert await runner.stop() == 0, runner.account()
        (failed,) = await office.events("attempt_failed")
        assert failed.get("retry_at") is not None
    finally:
        await runner.discard()
