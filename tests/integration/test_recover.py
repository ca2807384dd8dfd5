"""``berth recover`` on real Kafka: rows are lost in many ways, and come back; what can't ends, and is listed."""

import asyncio
import json
import random
import re
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from api.cli.embedded_kafka import EmbeddedKafka
from api.cli.recovering import recover_partition
from api.cli.verify import verify_log
from projections.rebuild import compare
from streams import (
    CHANGELOG,
    CLAIMS,
    DECISIONS,
    DISPATCHES,
    INPUT_TOPICS,
    SIGNALS,
    SITE_DECISIONS,
    TEXTS,
    TRIGGERS,
    codec,
)
from streams.audit.recover import POSITION_KEY
from streams.kafka import recovery
from streams.kafka.commit import Writer
from streams.partition import Changes
from streams.settings import Settings
from tests.brokers import until
from tests.integration.lost_rows import (
    Load,
    check_rows,
    deciding,
    ends_of,
    forget_records,
    is_staged,
    loading,
    lose_changelog,
    stored_rows,
    until_past,
    write_rows,
)
from tests.integration.projectors import projector
from tests.integration.site_work import WORKER, names, playing
from tests.integration.test_up import berth
from tests.integration.workers import PARTITIONS, ROOT, Log, workers

pytestmark = pytest.mark.kafka

Json = dict[str, Any]
ROUNDS = 14
DECISIONS_MIN = 300


async def lived(bootstrap: str, load: Load, commands: int = 20) -> None:
    """A random load, in the midst of which the worker is stopped."""
    async with workers(bootstrap, 1, WORKER) as (worker,):
        await worker.ready()
        await load.stage()
        for _ in range(ROUNDS):
            await load.act(commands)

        async def rich(past: Any) -> bool:
            await load.act(5)
            return past.decisions > DECISIONS_MIN and is_staged(past)

        await until_past(bootstrap, rich)
        assert await worker.stop() == 0, worker.account()


async def recover(bootstrap: str, directory: Path, *words: str) -> tuple[int, Json]:
    done = await asyncio.to_thread(berth, directory, "recover", "--json", *words, BERTH_KAFKA=bootstrap)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


async def goes_on(bootstrap: str, load: Load) -> None:
    """A worker takes over, everything that was accepted ends, and the log is right, decided again."""
    async with workers(bootstrap, 1, WORKER) as (worker,):
        await worker.ready()
        await load.all_end(bootstrap)
        assert await worker.stop() == 0, worker.account()
    verdict = await verify_log(Settings(kafka=bootstrap))
    assert verdict.violations == []
    assert verdict.counts.recomputed == verdict.decisions


@asynccontextmanager
async def projected(bootstrap: str, database: str) -> AsyncIterator[None]:
    """A projector runs through all of it, and in the end its tables are what the log says."""
    async with projector(bootstrap, database, PARTITIONS) as process:
        yield
        log = await Log.read(bootstrap, DECISIONS.name, SITE_DECISIONS.name)
        count = sum(map(len, log.records.values()))

        async def all_there() -> bool:
            async with await psycopg.AsyncConnection.connect(database) as connection:
                cursor = await connection.execute(
                    "SELECT (SELECT count(*) FROM berth.decisions) + (SELECT count(*) FROM berth.site_decisions)"
                )
                return await cursor.fetchone() == (count,)

        await until(all_there)
        compared, differences = await compare(bootstrap, database, PARTITIONS, 36_500, lambda *_: None)
        assert differences == []
        assert compared["decisions"] > 0
        assert process.is_running


@pytest.mark.timeout(300)
async def test_rows_of_a_changelog_that_was_deleted_come_back_byte_for_byte(
    topics: EmbeddedKafka, database: str, tmp_path: Path, seed: int
) -> None:
    bootstrap = topics.bootstrap
    async with projected(bootstrap, database), loading(bootstrap, seed) as load:
        await lived(bootstrap, load)
        before = await stored_rows(bootstrap)
        assert await recover(bootstrap, tmp_path) == (0, {"written": False, "partitions": _any(PARTITIONS)})
        await lose_changelog(bootstrap)
        async with workers(bootstrap, 1, WORKER) as (worker,):
            assert await worker.ended() == 78, worker.account()
            assert "berth recover" in str(await worker.logged("worker_stops"))
        code, found = await recover(bootstrap, tmp_path)
        assert (code, deciding(await stored_rows(bootstrap))) == (1, [])
        assert sum(sum(one["missing"].values()) for one in found["partitions"]) == sum(map(len, deciding(before)))
        code, found = await recover(bootstrap, tmp_path, "--yes")
        assert code == 0
        assert [one["payload_lost"] for one in found["partitions"]] == [[]] * PARTITIONS
        after = await stored_rows(bootstrap)
        assert check_rows(deciding(before), deciding(after)) > sum(map(len, before)) * 0.9
        kinds = {codec.read_key(key)[0] for rows in after for key in rows}
        assert kinds >= {"agent", "trigger", "text", "conversation", "remembered", "site", "claim", "site_control"}
        assert await recover(bootstrap, tmp_path, "--yes") == (0, {"written": True, "partitions": _any(PARTITIONS)})
        assert await stored_rows(bootstrap) == after
        await goes_on(bootstrap, load)


class _any:  # noqa: N801 - stands for a list in a comparison
    """A list of so many partitions whose rows are as the log says."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, list) and len(other) == self.count and all(one["state"] == "as_stored" for one in other)
        )

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.timeout(300)
async def test_rows_that_were_damaged_are_put_right_and_the_others_stay(
    topics: EmbeddedKafka, tmp_path: Path, seed: int
) -> None:
    bootstrap, chance = topics.bootstrap, random.Random(seed)
    async with loading(bootstrap, seed + 1) as load:
        await lived(bootstrap, load)
        before = await stored_rows(bootstrap)
        damaged: set[tuple[int, bytes]] = set()
        for number, rows in enumerate(before):
            some = [key for key in sorted(rows) if chance.random() < 0.2]
            harm: dict[bytes, bytes | None] = {key: chance.choice([None, b"{", b"null", b"7"]) for key in some}
            harm[b'["trigger","nobody","t"]'] = b"{}"
            await write_rows(bootstrap, number, harm)
            if any(key != POSITION_KEY for key in rows):  # of the others there is nothing to put right
                damaged |= {(number, key) for key in some}
        code, found = await recover(bootstrap, tmp_path, "--yes")
        assert code == 0
        put_right = sum(sum(one["missing"].values()) + sum(one["different"].values()) for one in found["partitions"])
        assert put_right == len(damaged)
        after = await stored_rows(bootstrap)
        check_rows(deciding(before), deciding(after))
        for number, rows in enumerate(before):
            for key in rows:
                if (number, key) not in damaged and key != POSITION_KEY:
                    assert after[number][key] == rows[key], "also a sign of life, which the log has not"
        await goes_on(bootstrap, load)


@pytest.mark.timeout(300)
async def test_what_lost_its_payload_ends_as_failed_and_the_rest_goes_on(
    topics: EmbeddedKafka, database: str, tmp_path: Path, seed: int
) -> None:
    bootstrap = topics.bootstrap
    async with projected(bootstrap, database), loading(bootstrap, seed + 2) as load:
        await lived(bootstrap, load)
        before = await stored_rows(bootstrap)
        await lose_changelog(bootstrap)
        await forget_records(bootstrap, TRIGGERS.name, DISPATCHES.name, TEXTS.name)
        with_texts = {codec.read_key(key)[1:] for rows in before for key in rows if codec.read_key(key)[0] == "text"}
        code, found = await recover(bootstrap, tmp_path, "--yes")
        assert code == 0
        lost = {
            (one["agent_id"], one["trigger_id"]): one for part in found["partitions"] for one in part["payload_lost"]
        }
        assert lost.keys() == with_texts
        assert {one["state"] for one in lost.values()} == {"waiting", "running", "paused"}
        after = await stored_rows(bootstrap)
        left = {codec.read_key(key)[1:] for rows in after for key in rows if codec.read_key(key)[0] == "trigger"}
        assert left & lost.keys() == {id for id, one in lost.items() if one["state"] == "running"}
        assert await recover(bootstrap, tmp_path) == (0, {"written": False, "partitions": _any(PARTITIONS)})
        await goes_on(bootstrap, load)
        one = next(id for id, about in lost.items() if about["state"] == "waiting")
        explained = await asyncio.to_thread(berth, tmp_path, "explain", *one, "--json", BERTH_KAFKA=bootstrap)
        assert '"payload_lost"' in explained.stdout, explained.stderr
    with psycopg.connect(database) as connection:
        rows = connection.execute("SELECT agent_id, trigger_id, end_reason FROM berth.triggers").fetchall()
    ended = {(agent_id, trigger_id): reason for agent_id, trigger_id, reason in rows}
    assert {id for id, reason in ended.items() if reason == "payload_lost"} >= {
        id for id, one in lost.items() if one["state"] != "running"
    }


class BrokenOff(Exception):  # noqa: N818 - it reads as what it is
    """The process died here."""


class Dying(Writer):
    """Dies before its n-th transaction."""

    left = 0

    async def commit(self, changes: Changes, now_us: int) -> None:
        Dying.left -= 1
        if Dying.left < 0:
            raise BrokenOff
        await super().commit(changes, now_us)


@pytest.mark.timeout(300)
async def test_a_recovery_that_is_broken_off_anywhere_is_refused_by_workers_and_ends_when_it_is_run_again(
    topics: EmbeddedKafka, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bootstrap = topics.bootstrap
    settings = Settings(kafka=bootstrap)
    async with loading(bootstrap, seed + 3) as load:
        await lived(bootstrap, load)
        before = await stored_rows(bootstrap)
        number = max(range(PARTITIONS), key=lambda one: len(before[one]))
        await forget_records(bootstrap, TRIGGERS.name, DISPATCHES.name, TEXTS.name)
        await lose_changelog(bootstrap)
        monkeypatch.setattr("api.cli.recovering.Writer", Dying)
        monkeypatch.setattr(recovery, "ROWS_MAX", max(1, len(before[number]) // 12))
        monkeypatch.setattr(recovery, "LOST_MAX", 2)
        broken_off = 0
        while True:
            Dying.left = 2
            try:
                found = await recover_partition(settings, number, True, False, lambda _: None)
                break
            except BrokenOff:
                broken_off += 1
                rows = (await stored_rows(bootstrap))[number]
                assert POSITION_KEY not in rows
                if broken_off in (1, 4):
                    await refuses(bootstrap, number)
        assert broken_off >= 4
        assert found.is_written or found.is_as_stored
        monkeypatch.undo()
        assert (await recover_partition(settings, number, False, False, lambda _: None)).is_as_stored
        code, _ = await recover(bootstrap, tmp_path, "--yes")
        assert code == 0
        await goes_on(bootstrap, load)


async def refuses(bootstrap: str, number: int) -> None:
    """No worker starts on what is there in part."""
    async with workers(bootstrap, 1, WORKER) as (worker,):
        assert await worker.ended() == 78, worker.account()
        told = str(await worker.logged("worker_stops"))
        assert "berth recover" in told, number


async def test_it_refuses_while_workers_run_and_says_what_to_do(topics: EmbeddedKafka, tmp_path: Path) -> None:
    async with workers(topics.bootstrap, 1, WORKER) as (worker,):
        await worker.ready()

        async def all_taken_over() -> bool:
            return all(await stored_rows(topics.bootstrap))

        await until(all_taken_over)
        before = await stored_rows(topics.bootstrap)
        for words in ((), ("--yes",)):
            done = await asyncio.to_thread(berth, tmp_path, "recover", *words, BERTH_KAFKA=topics.bootstrap)
            assert done.returncode == 1
            assert "Workers are running: 1 at 127.0.0.1." in done.stderr
            assert "stop every berth worker" in done.stderr
        assert await stored_rows(topics.bootstrap) == before
        assert worker.is_running


async def test_a_log_without_its_end_is_not_gone_back_to_unless_one_says_so(
    topics: EmbeddedKafka, tmp_path: Path, seed: int
) -> None:
    """The stored rows know of a decision that the log has no more: only a person can know what became of it."""
    bootstrap = topics.bootstrap
    async with loading(bootstrap, seed + 4) as load:
        await lived(bootstrap, load)
        before = await stored_rows(bootstrap)
        number, key = next(
            (number, key) for number, rows in enumerate(before) for key in rows if key.startswith(b'["agent",')
        )
        row = codec.read_agent(before[number][key])
        row.seq += 1
        await write_rows(bootstrap, number, {key: codec.write_agent(row)})
        code, found = await recover(bootstrap, tmp_path, "--yes")
        assert code == 1
        (part,) = [one for one in found["partitions"] if one["ahead_of_the_log"]]
        assert (part["state"], part["ahead_of_the_log"][0]["stored"]) == ("not_written", row.seq)
        told = await asyncio.to_thread(berth, tmp_path, "recover", BERTH_KAFKA=bootstrap)
        (cut,) = (line for line in told.stdout.splitlines() if "the log has lost its end" in line)
        assert cut.startswith(f"Partition {number}:")
        words = cut.rpartition(": berth ")[2].split()
        assert words == ["recover", "--yes", "--accept-cut-log", "--partition", str(number)]
        assert told.stdout.endswith("\nNothing was written.\n"), "and no hint that would be refused"
        accepted = await asyncio.to_thread(berth, tmp_path, "recover", "--accept-cut-log", BERTH_KAFKA=bootstrap)
        assert "lost its end" not in accepted.stdout
        assert accepted.stdout.endswith("right: berth recover --yes --accept-cut-log\n")
        code, _ = await recover(bootstrap, tmp_path, *words[1:])
        assert code == 0
        check_rows(before, await stored_rows(bootstrap))


async def test_a_damaged_log_is_not_built_on(topics: EmbeddedKafka, tmp_path: Path) -> None:
    bootstrap = topics.bootstrap
    async with loading(bootstrap, 1) as load, workers(bootstrap, 1, WORKER) as (worker,):
        await worker.ready()
        await load.act(30)
        await until_past(bootstrap, _has_decisions)
        await worker.stop()
    before = await stored_rows(bootstrap)
    log = await Log.read(bootstrap, DECISIONS.name)
    place, records = next((place, records) for place, records in log.records.items() if records)
    async with loading(bootstrap, 2) as load:
        await load._producer.send(DECISIONS.name, records[0].value, records[0].key, place.partition)
        await load._producer.flush()
    done = await asyncio.to_thread(berth, tmp_path, "recover", "--yes", BERTH_KAFKA=bootstrap)
    assert done.returncode == 65
    assert "The log of decisions can't be built on" in done.stderr
    assert "berth verify" in done.stderr
    assert await stored_rows(bootstrap) == before
    assert CHANGELOG.name not in done.stdout


async def _has_decisions(past: Any) -> bool:
    return bool(past.decisions > 10)


async def test_a_partition_that_does_not_exist_is_a_wrong_command_line(topics: EmbeddedKafka, tmp_path: Path) -> None:
    done = await asyncio.to_thread(berth, tmp_path, "recover", "--partition", "8", BERTH_KAFKA=topics.bootstrap)
    assert done.returncode == 2
    assert "from 0 to 7" in done.stderr


async def test_the_steps_of_the_document_do_what_it_says(topics: EmbeddedKafka, tmp_path: Path, seed: int) -> None:
    """docs/operate.md: the topic is gone, and nothing of it is left."""
    bootstrap = topics.bootstrap
    section = (ROOT / "docs" / "operate.md").read_text().split("## When rows are lost")[1].split("\n## ")[0]
    (block,) = re.findall(r"^```console\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    async with loading(bootstrap, seed + 5) as load:
        await lived(bootstrap, load)
        before = await stored_rows(bootstrap)
        await lose_changelog(bootstrap, create=False)
        codes = []
        for line in block.splitlines():
            program, *words = shlex.split(line.removeprefix("$ "))
            assert program == ".venv/bin/berth"
            done = await asyncio.to_thread(berth, tmp_path, *words, BERTH_KAFKA=bootstrap)
            codes.append((words[0], done.returncode))
        assert codes == [("topics", 0), ("recover", 1), ("recover", 0), ("verify", 0)]
        check_rows(deciding(before), deciding(await stored_rows(bootstrap)))


async def test_inputs_that_were_deleted_before_they_were_handled_are_given_up_and_named(
    topics: EmbeddedKafka, tmp_path: Path, seed: int
) -> None:
    """Workers refuse a position before what their topic still holds: a person gives up what is gone."""
    bootstrap = topics.bootstrap
    async with loading(bootstrap, seed + 6) as load:
        await lived(bootstrap, load)
        for number in range(PARTITIONS):
            await load.unhandled(number)
        # Not what deciders tell each other: where that is lost, something waits for ever (docs/operate.md).
        await forget_records(bootstrap, *(topic.name for topic in INPUT_TOPICS if topic not in (CLAIMS, SIGNALS)))
        async with workers(bootstrap, 1, WORKER) as (worker,):
            assert await worker.ended() == 78, worker.account()
            assert "berth recover" in str(await worker.logged("worker_stops"))
        code, found = await recover(bootstrap, tmp_path, "--yes")
        assert code == 0
        wrong = [one for one in found["partitions"] if one["state"] == "written"]
        assert wrong
        for one in wrong:
            assert {*one["different"], *one["needless"]} == {"partition"}
            assert one["missing"] == {} and one["payload_lost"] == []
            assert any("gone unhandled" in note or "from their beginning" in note for note in one["notes"])
        await goes_on(bootstrap, load)


async def test_topics_that_their_retention_has_emptied_need_no_recovery(topics: EmbeddedKafka, tmp_path: Path) -> None:
    """They begin behind the marker of their last transaction, which is no record that was deleted unhandled."""
    bootstrap = topics.bootstrap
    names_of = [topic.name for topic in INPUT_TOPICS]
    async with playing(bootstrap) as play, workers(bootstrap, 1, WORKER) as (worker,):
        await worker.ready()
        play.is_working = True
        for number in range(5):
            await play.trigger(next(names("agent", number)), f"t{number}", worker=True)
        await play.all_ended()

        async def all_read() -> bool:
            ends = await ends_of(bootstrap, *names_of)
            rows = [codec.read_partition(rows[POSITION_KEY]) for rows in await stored_rows(bootstrap)]
            return all(rows[number].positions[topic] == end for (topic, number), end in ends.items())

        await until(all_read)
        assert await worker.stop() == 0, worker.account()
    await forget_records(bootstrap, *names_of)
    assert (await recover(bootstrap, tmp_path))[0] == 0
    async with workers(bootstrap, 1, WORKER) as (worker,):
        await worker.ready()
