"""``berth verify`` on a real log: whole, damaged, put down and taken up again."""

import asyncio
import json
import random
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer

from api.cli import verify as command
from api.cli.embedded_kafka import EmbeddedKafka
from api.cli.verify import Verdict, verify_log
from api.http.problems import Problem
from api.http.requests import WhatIfRequest
from api.http.what_if import WhatIfs
from streams import CHANGELOG, codec
from streams.audit import checkpoint
from streams.audit.checkpoint import Checkpoint
from streams.audit.logged import Logged
from streams.kafka import history
from streams.rules.agent.state import Agent
from streams.settings import Settings
from tests.audits import log_of
from tests.conftest import PARTITIONS
from tests.integration.test_up import berth
from tests.offices import Office
from tests.planted import OF_AGENTS, OF_SITES, of_agent, of_site

pytestmark = pytest.mark.kafka


async def write(bootstrap: str, log: list[Logged]) -> None:
    """The log into partition 0, each topic in its order."""
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, linger_ms=20)
    await producer.start()
    try:
        for logged in log:
            await producer.send(logged.topic, logged.value, logged.decider.id.encode(), partition=0)
        await producer.flush()
    finally:
        await producer.stop()


def office(seed: int) -> list[Logged]:
    return list(log_of(Office(seed).work(120, 400).driven))


def figures(verdict: Verdict) -> tuple[int, int, dict[str, int], list[object]]:
    counts = verdict.counts
    return counts.decisions, counts.recomputed, dict(counts.overtakings), list(verdict.violations)


async def test_a_reading_is_the_same_wherever_it_was_put_down(
    topics: EmbeddedKafka, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "RECORDS_MAX", 40)
    monkeypatch.setattr(command, "SAVE_SECONDS", -1)
    log = office(seed)
    await write(topics.bootstrap, log)
    settings = Settings(kafka=topics.bootstrap)
    saved: list[bytes] = []
    whole = await verify_log(settings, save=lambda at: saved.append(checkpoint.write(at)))
    assert figures(whole) == (len(log), len(log), dict(whole.counts.overtakings), [])
    assert whole.counts.overtakings.total() > 0
    begins = [checkpoint.read(value, settings.partitions, True) for value in saved]
    assert {begin.topic for begin in begins} == {"berth.decisions", "berth.site-decisions"}
    for begin in random.Random(seed).sample(begins, 4):
        assert figures(await verify_log(settings, begin=begin)) == figures(whole)


async def test_an_interrupted_reading_is_put_down_where_it_is(
    topics: EmbeddedKafka, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "RECORDS_MAX", 40)
    monkeypatch.setattr(command, "SAVE_SECONDS", -1)
    log = office(seed)
    await write(topics.bootstrap, log)
    settings = Settings(kafka=topics.bootstrap)
    saved: list[Checkpoint] = []

    def save(at: Checkpoint) -> None:
        saved.append(checkpoint.read(checkpoint.write(at), settings.partitions, True))
        if len(saved) == 3:
            monkeypatch.setattr(command, "SAVE_SECONDS", 1_000)
            reading.cancel()

    reading = asyncio.create_task(verify_log(settings, save=save))
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert len(saved) == 4
    assert saved[3].offset >= saved[2].offset > saved[1].offset
    assert figures(await verify_log(settings, begin=saved[3]))[:2] == (len(log), len(log))


async def test_a_log_that_cannot_be_read_is_replayed_by_nobody(topics: EmbeddedKafka, seed: int) -> None:
    log = office(seed)
    damaged = log[-1]._replace(value=log[-1].value[:-1])
    await write(topics.bootstrap, [*log[:-1], damaged])

    async def stay() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Problem) as raised:
        await WhatIfs(topics.bootstrap, PARTITIONS).answer(WhatIfRequest(limits={"*": 2}), stay())
    assert (raised.value.status, raised.value.code) == (409, "log_unreadable")
    assert "berth verify" in raised.value.detail


async def test_damage_is_found_at_its_offset(topics: EmbeddedKafka, seed: int, tmp_path: Path) -> None:
    log = office(seed + 1)
    agents = [place for place, logged in enumerate(log) if logged.topic == "berth.decisions"]
    place = agents[random.Random(seed).randrange(20, len(agents) // 2)]
    damaged = log[place].value.replace(b'"via":"', b'"via" :"')
    await write(topics.bootstrap, [*log[:place], log[place]._replace(value=damaged), *log[place + 1 :]])
    done = await asyncio.to_thread(berth, tmp_path, "verify", "--json", BERTH_KAFKA=topics.bootstrap)
    assert done.returncode == 1
    assert "no PostgreSQL is known here" in done.stderr
    found = json.loads(done.stdout)
    (violation,) = found["violations"]
    assert not found["sound"]
    read_to = {(one["topic"], one["partition"]): one["next_offset"] for one in found["positions"]}
    assert read_to["berth.decisions", 0] == log[place].offset
    assert read_to["berth.site-decisions", 0] == sum(logged.topic == "berth.site-decisions" for logged in log)
    assert (violation["topic"], violation["partition"]) == ("berth.decisions", 0)
    assert (violation["kind"], violation["offset"], violation["seq"]) == (
        "recomputed", log[place].offset, log[place].decision.seq,
    )  # fmt: skip
    told = (await asyncio.to_thread(berth, tmp_path, "verify", BERTH_KAFKA=topics.bootstrap)).stdout
    assert told.startswith(f"{found['decisions']:,} decisions, 1 violation")
    assert f"{found['recomputed']:,} commands decided again gave the same decision" in told
    assert "; 1 did not: see below\n" in told
    assert found["decisions"] == found["recomputed"] < len(log)
    faster = await asyncio.to_thread(
        berth, tmp_path, "verify", "--no-recompute", "--json", BERTH_KAFKA=topics.bootstrap
    )
    (violation,) = json.loads(faster.stdout)["violations"]
    assert (violation["kind"], violation["offset"]) == ("chain", log[place].offset)
    nothing = await asyncio.to_thread(berth, tmp_path, "verify", "--resume", BERTH_KAFKA=topics.bootstrap)
    assert nothing.returncode == 1
    assert "Nothing was put down" in nothing.stderr


@pytest.mark.parametrize("begin", [0, 8])
async def test_every_planted_violation_is_named_at_its_offset(topics: EmbeddedKafka, begin: int) -> None:
    """One in each partition of each log, with the rows of its deciders stored beside it."""
    settings = Settings(kafka=topics.bootstrap)
    plants = {
        (planted.topic, number): planted
        for some in ([of_agent(kind) for kind in OF_AGENTS], [of_site(kind) for kind in OF_SITES])
        for number, planted in enumerate(some[begin : begin + settings.partitions])
    }
    async with AIOKafkaProducer(bootstrap_servers=topics.bootstrap, linger_ms=20) as producer:
        for (topic, number), planted in plants.items():
            for value in planted.values:
                await producer.send(topic, value, planted.decider.encode(), partition=number)
            for key, row in planted.rows.items():
                await producer.send(CHANGELOG.name, row, key, partition=number)
        await producer.flush()
    verdict = await verify_log(settings)
    found = {(one.topic, one.partition): one.violation for one in verdict.violations}
    assert found.keys() == plants.keys()
    for place, planted in plants.items():
        assert (found[place].decider, found[place].offset) == (planted.decider, planted.offset)
        assert found[place].kind in planted.kinds, found[place]


UNREADABLE = {
    b"not a key": b"{}",
    b'["agent","damaged"]': b"{",
    b'["site","damaged"]': b'{"seq":"seven"}',
    b'["agent"]': b"{}",
    b'["agent",["x"]]': b"{}",
    b'["nothing known","x"]': b"{}",
    b'["trigger","cut off': b"{}",
}


async def test_a_row_that_cannot_be_read_is_a_violation_as_long_as_it_is_there(
    topics: EmbeddedKafka, seed: int, tmp_path: Path
) -> None:
    """What is wrong with one that was removed or written over is in the topic until that is compacted, and is nothing.

    One in each partition, beside a log that is whole.
    """
    log = office(seed)
    await write(topics.bootstrap, log)
    settings = Settings(kafka=topics.bootstrap)
    async with AIOKafkaProducer(bootstrap_servers=topics.bootstrap) as producer:
        offsets = [
            (await producer.send_and_wait(CHANGELOG.name, value, key, partition=number)).offset
            for number, (key, value) in enumerate(UNREADABLE.items())
        ]
        verdict = await verify_log(settings)
        assert verdict.decisions == len(log)
        for number, (key, found) in enumerate(zip(UNREADABLE, verdict.violations, strict=True)):
            assert (found.topic, found.partition) == (CHANGELOG.name, number)
            assert (found.violation.kind, found.violation.offset) == ("row", offsets[number])
            assert key.decode() in found.violation.detail
        done = await asyncio.to_thread(berth, tmp_path, "verify", BERTH_KAFKA=topics.bootstrap)
        assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
        assert f"partition 0, offset {offsets[0]}: row: the stored row with the key not a key" in done.stdout
        for number, key in enumerate(UNREADABLE):
            whole = codec.write_agent(Agent("damaged").row) if number == 1 else None
            await producer.send_and_wait(CHANGELOG.name, whole, key, partition=number)
    assert figures(await verify_log(settings))[3] == []
