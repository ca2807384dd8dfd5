"""A random load through real Kafka, and rows that are lost: what tests of ``berth recover`` do and look at."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

from streams import CHANGELOG, DECISIONS, DISPATCHES, SITE_DECISIONS, STATUSES, TRIGGERS, codec
from streams.audit.logged import read
from streams.audit.past import Past
from streams.audit.recover import POSITION_KEY
from streams.codec import Headers, partition_of
from streams.kafka import edge
from streams.kafka import topics as kafka_topics
from streams.kafka.clients import reading
from streams.rules.agent.rows import TriggerRow
from streams.rules.agent.state import Agent
from tests.brokers import WAIT_SECONDS, delete_topics
from tests.integration.site_work import names
from tests.integration.workers import PARTITIONS, Log, sending
from tests.simulation.cluster import Cluster
from tests.simulation.users import COMMANDS, Users

Rows = dict[bytes, bytes]
NOT_HERE: Final = ("burst", "burst_ends", "archive")
"""Commands that make a run long, or end everything."""
MARKERS_MAX: Final = 3
"""Of transactions, which end in a row behind the last record of a topic."""
STAGED: Final = "staged"
"""An agent and a site beside those of the random load."""


def is_staged(past: Past) -> bool:
    """Whether the staged triggers are in the states in which they stay."""
    rows = past.agents[STAGED].triggers.values() if STAGED in past.agents else ()
    found = sorted((row.state, row.claim_state or "") for row in rows)
    return found == [("paused", ""), ("running", ""), ("running", "granted"), ("waiting", "standing")]


class Sender(Cluster):
    """What the simulation's users send goes to Kafka, with texts for everybody."""

    def __init__(self, seed: int) -> None:
        super().__init__(random.Random(seed), partitions=PARTITIONS)
        self.to_send: list[tuple[str, str, bytes, Headers]] = []

    def send(self, topic: str, key: str, value: dict[str, Any], headers: Headers = ()) -> None:
        if topic == TRIGGERS.name and value.get("type") == "trigger":
            text = self.random.choice(["", "é", "plain", "\U0001f600" * 9])
            texts = {"message": text, "payload": {"z": text, "a": [self.sent, 1.5, None]}}
            value = {**{name: texts[name] for name in texts if self.random.random() < 0.8}, **value}
        self.to_send.append((topic, key, json.dumps(value).encode(), tuple(headers)))


class Load:
    """Users and runners. ``patience`` is how likely a runner leaves its attempt running."""

    def __init__(self, producer: AIOKafkaProducer, dispatches: AIOKafkaConsumer, seed: int) -> None:
        self.random = random.Random(seed)
        self.patience = 0.3
        self.sender = Sender(seed)
        self._users = Users(self.sender)
        self._commands = [name for name in COMMANDS if name not in NOT_HERE]
        self._producer, self._dispatches = producer, dispatches
        self._ended: set[str] = set()
        self._kept: dict[str, str] = {}
        """What the runner of a staged trigger says, and nothing after it."""

    async def stage(self) -> None:
        """Of every state one that stays: running, paused, waiting for a worker, with all their texts."""
        trigger = partial(self.sender.trigger, STAGED, message="staged", payload={"of": ["a", 1]})
        self.sender.control(STAGED, "configure", parallelism_limit="unlimited")
        self.sender.site_control(STAGED, "configure_site", capacity=1)
        self._kept[trigger(heartbeat_seconds=3600)] = "running"
        self._kept[trigger(interactive=True, kind="chat", on_busy="queue")] = "paused"
        self._kept[trigger(site=STAGED, worker=True)] = "running"
        self._kept[trigger(site=STAGED, worker=True)] = "running"
        await self._flush()

    async def act(self, count: int) -> None:
        """So many things are asked for, and what has been dispatched until now is answered."""
        self.sender.now = edge.now_us()
        for _ in range(count):
            self._users.act(self.random.choice(self._commands))
        await self._flush()
        await self.work()

    async def settle(self) -> None:
        """Take away what holds work back."""
        send, site = self.sender.control, self.sender.site_control
        for name in ("default", "elsewhere"):
            site(name, "configure_site", capacity=4)
            site(name, "resume_site")
        for scope, name in (("organization", "o1"), ("organization", "o2"), ("department", "d1")):
            site("default", "gate", scope=scope, name=name, enabled=True, run_budget=None)
        for number in range(4):
            send(f"A{number}", "configure", serial=False, parallelism_limit=3, run_budget=None)
            send(f"A{number}", "resume")
        await self._flush()

    async def stop(self, agent_id: str, trigger_id: str) -> None:
        self.sender.stop(agent_id, trigger_id=trigger_id)
        await self._flush()

    async def unhandled(self, number: int) -> None:
        """One more trigger on this partition."""
        agent_id = next(names("late", number))
        self.sender.trigger(agent_id)
        await self._flush()

    async def work(self) -> None:
        """Runners take what was dispatched: some give a sign of life, some end, fail, ask a person, or go on."""
        for records in (await self._dispatches.getmany(timeout_ms=50)).values():
            for record in records:
                dispatch = json.loads(record.value)
                if dispatch["type"] != "dispatch":
                    continue
                if self.patience and dispatch["trigger_id"] in self._kept:
                    await self.say(dispatch, self._kept[dispatch["trigger_id"]])
                    continue
                if self.random.random() < 0.4:
                    await self.say(dispatch, self.random.choice(["running", "heartbeat"]))
                if self.random.random() >= self.patience:
                    ends = (
                        ["finished"] if self.patience == 0 else ["finished", "finished", "failed", "paused", "stopped"]
                    )
                    await self.say(dispatch, self.random.choice(ends))

    async def say(self, about: Mapping[str, Any], status: str) -> None:
        value = {name: about[name] for name in ("agent_id", "conversation_id", "execution_id")}
        self.sender.send(STATUSES.name, value["agent_id"], {"type": "status", "v": 1, "status": status, **value})
        await self._flush()

    async def _flush(self) -> None:
        sent, self.sender.to_send = self.sender.to_send, []
        for topic, key, value, headers in sent:
            number = partition_of(key, PARTITIONS)
            await self._producer.send(topic, value, key.encode(), number, headers=list(headers))
        await self._producer.flush()

    async def all_end(self, bootstrap: str) -> None:
        """Everything that lives ends: what can run does, what waits for a person or for ever is stopped."""
        self.patience = 0
        await self.settle()

        async def step(past: Past) -> bool:
            await self.work()
            alive = live(past)
            for agent, row in alive:
                if row.execution_id not in self._ended and row.state == "running":
                    self._ended.add(row.execution_id or "")
                    about = {"agent_id": agent.agent_id, "conversation_id": row.conversation_id}
                    await self.say({**about, "execution_id": row.execution_id}, "finished")
                elif row.state == "paused" or row.is_blocked:
                    await self.stop(agent.agent_id, row.trigger_id)
            return not alive

        await until_past(bootstrap, step)


def live(past: Past) -> list[tuple[Agent, TriggerRow]]:
    return [(agent, row) for agent in past.agents.values() for row in agent.triggers.values()]


async def until_past(bootstrap: str, condition: Callable[[Past], Any]) -> Past:
    """Fold the log again and again until it is as wanted."""
    past = Past()
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            while not await condition(past := await folded(bootstrap)):
                await asyncio.sleep(0.2)
    except TimeoutError:
        left = [(agent.agent_id, row) for agent, row in live(past)]
        raise AssertionError(f"in {WAIT_SECONDS} s only: {past.decisions} decisions; alive: {left[:6]}") from None
    return past


async def folded(bootstrap: str) -> Past:
    """Everything that was decided."""
    log = await Log.read(bootstrap, DECISIONS.name, SITE_DECISIONS.name)
    past = Past()
    for place, records in log.records.items():
        for record in records:
            past.fold(read(place.topic, place.partition, record.offset, record.value))
    return past


@asynccontextmanager
async def loading(bootstrap: str, seed: int) -> AsyncIterator[Load]:
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, isolation_level="read_committed", fetch_max_wait_ms=50)
    async with sending(bootstrap) as producer:
        await consumer.start()
        try:
            places = [TopicPartition(DISPATCHES.name, number) for number in range(PARTITIONS)]
            consumer.assign(places)
            await consumer.seek_to_beginning(*places)
            yield Load(producer, consumer, seed)
        finally:
            await consumer.stop()


# Rows


async def stored_rows(bootstrap: str) -> list[Rows]:
    """The rows of every partition, as a worker would restore them."""
    log = await Log.read(bootstrap, CHANGELOG.name)
    rows: list[Rows] = [{} for _ in range(PARTITIONS)]
    for place, records in log.records.items():
        for record in records:
            if record.value is None:
                rows[place.partition].pop(record.key, None)
            else:
                rows[place.partition][record.key] = record.value
    return rows


async def lose_changelog(bootstrap: str, create: bool = True) -> None:
    """The topic is deleted, and made anew, empty, or not."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        await delete_topics(admin, [CHANGELOG.name])
    finally:
        await admin.close()
    if create:
        assert await kafka_topics.create(bootstrap, PARTITIONS) == [CHANGELOG.name]


async def write_rows(bootstrap: str, number: int, rows: Mapping[bytes, bytes | None]) -> None:
    """Over those that are stored, by somebody who isn't the partition's owner."""
    async with sending(bootstrap) as producer:
        for key, value in rows.items():
            await producer.send(CHANGELOG.name, value, key, number)
        await producer.flush()


async def forget_records(bootstrap: str, *topics: str) -> None:
    """Everything in these topics is older than they keep."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        places = [TopicPartition(topic, number) for topic in topics for number in range(PARTITIONS)]
        await admin.delete_records({place: RecordsToDelete(before_offset=-1) for place in places})
    finally:
        await admin.close()


async def ends_of(bootstrap: str, *topics: str) -> dict[tuple[str, int], int]:
    """Where each partition of these topics ends, behind its last marker."""
    async with reading(bootstrap, "read_committed") as consumer:
        places = [TopicPartition(topic, number) for topic in topics for number in range(PARTITIONS)]
        return {(place.topic, place.partition): end for place, end in (await consumer.end_offsets(places)).items()}


def deciding(rows: list[Rows]) -> list[Rows]:
    """Those of partitions in which anything was decided: a new owner starts the others from nothing."""
    return [some for some in rows if any(key != POSITION_KEY for key in some)]


def check_rows(before: list[Rows], after: list[Rows]) -> int:
    """The same bytes, but for what the log doesn't tell; the number of rows that are the same."""
    same = 0
    for old, new in zip(before, after, strict=True):
        assert old.keys() == new.keys(), (old.keys() - new.keys(), new.keys() - old.keys())
        for key, value in old.items():
            if new[key] == value:
                same += 1
                continue
            kind, *_ = codec.read_key(key)
            assert kind in ("partition", "trigger"), (key, value, new[key])
            (_partition if kind == "partition" else _trigger)(value, new[key])
    return same


def _partition(old: bytes, new: bytes) -> None:
    """Signs of life after the last decision are read again, and counted as far as the topic still has them."""
    one, other = codec.read_partition(old), codec.read_partition(new)
    assert one.at == other.at
    for topic, position in one.positions.items():
        assert other.positions.get(topic, 0) <= position, (topic, one, other)
        if topic != STATUSES.name:
            assert position - other.positions.get(topic, position) <= MARKERS_MAX, (topic, one, other)


def _trigger(old: bytes, new: bytes) -> None:
    """A sign of life counts from when it was written, a moment before it was handled."""
    one, other = codec.read_trigger(old), codec.read_trigger(new)
    assert one.state == "running"
    assert one.last_seen_at is not None
    assert (other.last_seen_at or 0) <= one.last_seen_at
    assert (other.lease_until or 0) <= (one.lease_until or 0)
    one.last_seen_at = other.last_seen_at
    one.lease_until = other.lease_until
    assert one == other
