"""``berth demo`` and ``berth runner`` with a real worker: load is worked off, and a runner keeps its promises."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import pytest_asyncio
import structlog
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from api.cli.embedded_kafka import EmbeddedKafka
from api.load.runner import Ended, Options, Runner
from streams import CONTROLS, DECISIONS, DISPATCHES, STATUSES, TRIGGERS
from streams.codec import partition_of
from streams.rules.dispatches import Dispatch
from tests.brokers import WAIT_SECONDS, empty_topics
from tests.integration.workers import PARTITIONS, ROOT, Json, Log, WorkerProcess

pytestmark = [pytest.mark.kafka, pytest.mark.asyncio(loop_scope="module")]


async def berth(bootstrap: str, *words: str) -> WorkerProcess:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "api.cli", *words),
        cwd=ROOT,
        env=clean | {"BERTH_KAFKA": bootstrap},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=2**20,
    )
    return WorkerProcess(process)


class System:
    """A worker that is ready, and what was written so far. Each test has agents and runners of its own."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self.programs: list[WorkerProcess] = []
        self.decisions: list[Json] = []
        self.statuses: list[Json] = []
        self.producer = AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all")
        self._consumer = AIOKafkaConsumer(
            DECISIONS.name,
            STATUSES.name,
            bootstrap_servers=bootstrap,
            isolation_level="read_committed",
            auto_offset_reset="earliest",
        )

    async def start(self) -> None:
        await self.producer.start()
        await self._consumer.start()
        worker = await self.run("worker")
        await worker.ready(range(PARTITIONS))

    async def run(self, *words: str) -> WorkerProcess:
        program = await berth(self.bootstrap, *words)
        self.programs.append(program)
        return program

    async def runner(self, agents: str, *words: str) -> WorkerProcess:
        """A runner for these agents that has its partitions."""
        runner = await self.run("runner", "--agents", agents, *words)
        async with asyncio.timeout(WAIT_SECONDS):
            while not any("runner_takes_from" in line for line in runner.errors):
                await asyncio.sleep(0.02)
        return runner

    async def configure(self, agent_id: str, limit: int) -> None:
        await self._send(
            CONTROLS.name,
            {
                "type": "configure",
                "id": f"configure-{agent_id}",
                "agent_id": agent_id,
                "requested_by": "test",
                "parallelism_limit": limit,
            },
        )
        await self.events("configured", agent_id=agent_id)

    async def trigger(self, agent_id: str, id: str, **fields: Any) -> None:
        await self._send(
            TRIGGERS.name,
            {
                "type": "trigger",
                "id": id,
                "agent_id": agent_id,
                "conversation_id": f"of {id}",
                "kind": "task",
                **fields,
            },
        )

    async def stop_trigger(self, agent_id: str, id: str) -> None:
        await self._send(TRIGGERS.name, {"type": "stop", "id": f"stop-{id}", "agent_id": agent_id, "trigger_id": id})

    async def _send(self, topic: str, record: Json) -> None:
        await self.producer.send_and_wait(topic, json.dumps({"v": 1, **record}).encode(), record["agent_id"].encode())

    async def events(self, kind: str, count: int = 1, **facts: Any) -> list[Json]:
        """Wait until so many events of decisions, with these facts of decision or event, are there; those."""

        def found() -> list[Json]:
            return [
                event
                for decision in self.decisions
                for event in decision.get("events", ())
                if event["type"] == kind and facts.items() <= {**decision, **event}.items()
            ]

        await self._until(lambda: len(found()) >= count, f"{kind} {facts}")
        return found()

    async def reported(self, agent_id: str, status: str, count: int = 1) -> list[Json]:
        """Wait until runners have reported this so many times for the agent; those statuses."""

        def found() -> list[Json]:
            return [entry for entry in self.of(agent_id) if entry["status"] == status]

        await self._until(lambda: len(found()) >= count, f"status {status}")
        return found()

    def of(self, agent_id: str) -> list[Json]:
        """The statuses of the agent."""
        return [entry for entry in self.statuses if entry["agent_id"] == agent_id]

    async def dispatches(self, agent_id: str) -> list[Any]:
        """The records of its dispatches so far."""
        partition = TopicPartition(DISPATCHES.name, partition_of(agent_id, PARTITIONS))
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self.bootstrap, isolation_level="read_committed", auto_offset_reset="earliest"
        )
        await consumer.start()
        try:
            consumer.assign([partition])
            records: list[Any] = []
            end = (await consumer.end_offsets([partition]))[partition]
            while await consumer.position(partition) < end:
                records += (await consumer.getmany(timeout_ms=100)).get(partition, [])
            return [record for record in records if record.key == agent_id.encode()]
        finally:
            await consumer.stop()

    async def _until(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come; {[one.account() for one in self.programs]}"
            for partition, records in (await self._consumer.getmany(timeout_ms=100)).items():
                into = self.decisions if partition.topic == DECISIONS.name else self.statuses
                into.extend(json.loads(record.value) | {"record_ms": record.timestamp} for record in records)

    async def end(self) -> None:
        await self.producer.stop()
        await self._consumer.stop()
        await self.end_runners()
        await self.programs.pop().stop()

    async def end_runners(self) -> None:
        """Everything but the worker."""
        while len(self.programs) > 1:
            await self.programs.pop().stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(kafka: EmbeddedKafka) -> AsyncIterator[System]:
    await empty_topics(kafka.bootstrap, PARTITIONS)
    system = System(kafka.bootstrap)
    try:
        await system.start()
        yield system
    finally:
        await system.end()


@pytest_asyncio.fixture(loop_scope="module")
async def system(worker: System) -> AsyncIterator[System]:
    yield worker
    await worker.end_runners()


async def test_all_load_is_worked_off_by_runners_that_come_and_go_and_the_log_holds(system: System) -> None:
    first = await system.runner("demo-*", "--capacity", "20")
    demo = await system.run(
        *("demo", "--json", "--count", "300", "--rate", "150", "--agents", "12", "--limit", "2"),
        *("--seconds-per-token", "0.0005", "--failures", "0.03"),
    )
    await system.events("finished", 60)
    await system.runner("demo-*", "--capacity", "20")
    await system.events("finished", 120)
    await first.stop()
    assert await demo.ended(timeout_seconds=90) == 0
    last = demo.events[-1]
    assert last["state"] == "ended", demo.account()
    assert last["produced"] == 300
    assert last["finished"] + last["failed"] == 300
    assert (last["refused"], last["waiting"], last["running"]) == (0, 0, 0)
    assert last["started"] == 300 + last["failures"] - last["failed"]
    assert last["freed_to_next_ms"]["measured"] > 0
    assert await (await berth(system.bootstrap, "verify")).ended() == 0


async def test_without_a_terminal_the_demo_tells_lines_and_sums_up(system: System) -> None:
    await system.runner("demo-*")
    demo = await system.run(
        *("demo", "--count", "5", "--rate", "50", "--agents", "1", "--limit", "1"),
        *("--seconds-per-token", "0.001", "--failures", "0"),
    )
    assert await demo.ended() == 0
    said = [str(event["event"]) for event in demo.events]
    assert any("started" in line and "freed→next" in line for line in said), said
    assert any("5 triggers in" in line and "5 finished" in line for line in said), said


async def test_a_stop_ends_the_work_and_the_runner_says_so(system: System) -> None:
    await system.runner("stopper", "--work-seconds", "600")
    await system.trigger("stopper", "long")
    await system.reported("stopper", "running")
    await system.stop_trigger("stopper", "long")
    (stopped,) = await system.events("stopped", agent_id="stopper")
    assert stopped["reason"] == "runner"
    assert len(await system.reported("stopper", "stopped")) == 1


async def test_texts_with_lone_surrogates_stop_no_runner(system: System) -> None:
    """Kafka takes them (G3)."""
    await system.runner("odd", "--work-seconds", "0.1")
    await system.trigger("odd", "odd", message="\ud800", payload={"\udfff": ["\ud800"]})
    await system.reported("odd", "finished")


async def test_a_silent_runner_is_noticed_and_the_attempt_is_tried_again(system: System) -> None:
    await system.runner("silent", "--deaths", "1", "--work-seconds", "0.1")
    await system.trigger("silent", "once", heartbeat_seconds=2, max_attempts=2)
    (expired, *_) = await system.events("lease_expired", agent_id="silent")
    assert expired["last_seen_at"] is not None
    assert expired.get("retry_at") is not None
    await system.reported("silent", "running")
    assert {entry["status"] for entry in system.of("silent")} == {"running"}


async def test_signs_of_life_keep_a_lease_that_is_shorter_than_the_work(system: System) -> None:
    await system.runner("busy", "--work-seconds", "3")
    await system.trigger("busy", "slow", heartbeat_seconds=2)
    await system.events("finished", agent_id="busy")
    await system.reported("busy", "heartbeat", 3)
    assert not [entry for entry in system.decisions if entry["agent_id"] == "busy" and "lease_expired" in str(entry)]


async def test_no_more_than_its_capacity_is_in_work(system: System) -> None:
    await system.configure("broad", 10)
    for number in range(10):
        await system.trigger("broad", f"t{number}", payload={"work_seconds": 0.15})
    await system.events("dispatched", 10, agent_id="broad")
    await system.runner("broad", "--capacity", "3")
    await system.reported("broad", "finished", 10)
    in_work = most = 0
    for entry in system.of("broad"):
        in_work += {"running": 1, "finished": -1}[entry["status"]]
        most = max(most, in_work)
    assert most == 3


async def test_a_runner_that_is_asked_to_end_reports_what_it_holds_within_its_time(system: System) -> None:
    runner = await system.runner("held", "--work-seconds", "600", "--end-seconds", "0.5")
    await system.trigger("held", "long")
    await system.reported("held", "running")
    runner.send(signal.SIGTERM)
    assert await runner.ended() == 0, "long before its work is done"
    (failed,) = await system.events("attempt_failed", agent_id="held")
    assert failed.get("retry_at") is not None


async def test_a_dispatch_that_comes_twice_is_taken_once(system: System) -> None:
    await system.runner("twice", "--work-seconds", "0.2")
    await system.trigger("twice", "first")
    await system.events("finished", agent_id="twice")
    (dispatch,) = await system.dispatches("twice")
    await system.producer.send_and_wait(DISPATCHES.name, dispatch.value, dispatch.key, partition=dispatch.partition)
    await system.trigger("twice", "second")
    await system.events("finished", 2, agent_id="twice")
    executions = [entry["execution_id"] for entry in await system.reported("twice", "running", 2)]
    assert len(executions) == len(set(executions)) == 2


async def no_work(_dispatch: Dispatch) -> Ended:
    raise AssertionError("nothing is dispatched")


async def test_kafka_away_just_when_a_runner_asks_for_its_topic(fresh_kafka: EmbeddedKafka) -> None:
    """Else it would lead a group over a topic that it has never heard of, and take nothing for minutes."""
    for is_away in (False, True):  # at first not, so that Kafka has the group: else it is asked for it again
        runner = Runner(fresh_kafka.bootstrap, no_work, Options())
        await runner.start()
        if is_away:
            fresh_kafka.kill()
        with structlog.testing.capture_logs() as logs:
            running = asyncio.create_task(runner.run())
            if is_away:
                await asyncio.to_thread(fresh_kafka.start)
            async with asyncio.timeout(WAIT_SECONDS):
                while not any(entry.get("partitions") == list(range(PARTITIONS)) for entry in logs):
                    assert not running.done(), running
                    await asyncio.sleep(0.02)
        runner.end()
        await running


async def test_a_runner_that_ends_while_kafka_is_away_reports_its_work_when_it_is_back(
    fresh_kafka: EmbeddedKafka, caplog: pytest.LogCaptureFixture
) -> None:
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    async def work(_dispatch: Dispatch) -> Ended:
        has_begun.set()
        await may_end.wait()
        return Ended("finished")

    runner = Runner(fresh_kafka.bootstrap, work, Options(end_seconds=WAIT_SECONDS))
    await runner.start()
    running = asyncio.create_task(runner.run())
    producer = AIOKafkaProducer(bootstrap_servers=fresh_kafka.bootstrap)
    await producer.start()
    now = datetime.now(UTC)
    dispatch = {
        "type": "dispatch",
        "v": 1,
        "execution_id": "x",
        "trigger_id": "t",
        "agent_id": "a",
        "conversation_id": "c",
        "attempt": 1,
        "max_attempts": 3,
        "slot_number": 1,
        "forced": False,
        "kind": "task",
        "degraded": False,
        "execution_class": "standard",
        "timeout_seconds": 1800,
        "dispatched_at": now.isoformat(),
        "lease_until": (now + timedelta(hours=1)).isoformat(),
    }
    await producer.send_and_wait(DISPATCHES.name, json.dumps(dispatch).encode(), b"a", partition=0)
    await producer.stop()
    async with asyncio.timeout(WAIT_SECONDS):
        await has_begun.wait()
    await asyncio.to_thread(fresh_kafka.kill)
    async with asyncio.timeout(WAIT_SECONDS):
        while caplog.text.count("Failed fetch messages") < 6:
            await asyncio.sleep(0.02)
    runner.end()
    await asyncio.to_thread(fresh_kafka.start)
    may_end.set()
    await asyncio.wait({running}, timeout=WAIT_SECONDS)
    assert running.done() and not running.cancelled()
    assert running.exception() is None
    log = await Log.read(fresh_kafka.bootstrap, STATUSES.name)
    found = [said["status"] for number in range(PARTITIONS) for said in log.values(STATUSES.name, number)]
    assert found == ["running", "finished"]


async def test_ctrl_c_ends_a_demo_in_order_while_kafka_is_away(fresh_kafka: EmbeddedKafka) -> None:
    demo = await berth(fresh_kafka.bootstrap, "demo", "--count", "1")
    await demo.logged("waiting for a worker to decide (start one: berth worker)\n")
    await asyncio.to_thread(fresh_kafka.kill)
    async with asyncio.timeout(WAIT_SECONDS):
        while sum("Failed fetch messages" in line for line in demo.errors) < 3:
            await asyncio.sleep(0.02)
    demo.send(signal.SIGINT)
    assert await demo.ended() == 0, demo.account()


async def test_a_demo_without_a_worker_says_what_it_waits_for(
    fresh_kafka: EmbeddedKafka,
) -> None:
    demo = await berth(fresh_kafka.bootstrap, "demo", "--count", "1")
    try:
        await demo.logged("waiting for a worker to decide (start one: berth worker)\n")
    finally:
        assert await demo.stop() == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("demo", "--trace", "no-such-file.csv"), "can't be read"),
        (("demo", "--trace", "pyproject.toml"), "can't be used as a trace"),
        (("runner", "--failures", "0.7", "--deaths", "0.7"), "more than all attempts"),
        (("bench", "W9"), "there is no measure w9"),
    ],
    ids=["missing", "no trace", "rates", "measure"],
)
async def test_wrong_options_are_explained(words: tuple[str, ...], says: str) -> None:
    program = await berth("127.0.0.1:9", *words)
    assert await program.ended() == 1
    assert says in "\n".join(program.errors)
