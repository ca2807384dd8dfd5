"""Agents that use sites, on real Kafka: what tests send, and the log as it grows, to wait on.

``Log`` of workers.py reads everything once; ``Play`` follows the log, because the tests of sites answer to what they
see: it is the only runner there is. It looks at each dispatch as a runner would, and notes when two attempts that it
has not ended yet are in overlapping folders of one environment.
"""

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from streams import (
    CLAIMS,
    CONTROLS,
    DEAD_LETTERS,
    DECISIONS,
    DISPATCHES,
    SIGNALS,
    SITE_CONTROLS,
    SITE_DECISIONS,
    STATUSES,
    TRIGGERS,
)
from streams.codec import partition_of
from streams.rules.folders import overlap, segments
from tests.brokers import WAIT_SECONDS
from tests.integration.workers import PARTITIONS, Json, Log, sending

WORKER: Final = ("-m", "api.cli", "worker")
FOLLOWED: Final = (DECISIONS.name, SITE_DECISIONS.name, DISPATCHES.name, DEAD_LETTERS.name)
POLL_MILLISECONDS: Final = 100
Id = tuple[str, str]
"""Agent and trigger."""


def names(kind: str, partition: int) -> Iterator[str]:
    """Ids of agents or sites that live on this partition."""
    candidates = (f"{kind}-{partition}-{number}" for number in count())
    return (name for name in candidates if partition_of(name, PARTITIONS) == partition)


def after(seconds: float) -> str:
    """A time so far from now, as it is written."""
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat(timespec="microseconds")


class Play:
    """What a test does and what it has seen. ``is_working``: every attempt is ended as soon as it comes."""

    def __init__(self, producer: AIOKafkaProducer) -> None:
        self.is_working = False
        self.kept: set[Id] = set()
        """Triggers whose attempts the test ends itself, also while it is working."""
        self.accepted: list[Id] = []
        """Everything that was asked for."""
        self.dispatches: dict[Id, list[Json]] = defaultdict(list)
        self.order: list[Id] = []
        """Of dispatches, as they came."""
        self.revoked: set[str] = set()
        self.decisions: list[Json] = []
        self.site_decisions: list[Json] = []
        self.answers: dict[str, Json] = {}
        """By command id: the decision that settles it."""
        self.events: dict[tuple[str, str, str], list[Json]] = defaultdict(list)
        """By type, agent and trigger, of agents and sites."""
        self.clashes: list[str] = []
        """What must never be."""
        self._running: dict[str, Json] = {}
        self._producer = producer
        self._seen = asyncio.Condition()
        self._ids = count(1)
        self._executions: set[str] = set()

    # -- sending ------------------------------------------------------------------------------------------------------

    async def trigger(self, agent: str, id: str, **fields: object) -> Id:
        """Ask for a turn, in a conversation of its own unless ``fields`` name one."""
        record = {"conversation_id": f"conversation-{id}", "kind": "task_assigned"} | fields
        await self._send(TRIGGERS.name, agent, type="trigger", id=id, agent_id=agent, **record)
        self.accepted.append((agent, id))
        return agent, id

    async def ask(self, agent: str, id: str, seconds: float, **fields: object) -> Id:
        """Ask for a turn now or not at all, and wait so long for the answer."""
        asking = {"kind": "chat", "interactive": True, "on_busy": "ask", "decide_before": after(seconds)}
        return await self.trigger(agent, id, **(asking | fields))

    async def control(self, agent: str, control: str, **fields: object) -> str:
        id = f"control-{next(self._ids)}-{agent}"
        await self._send(CONTROLS.name, agent, type=control, id=id, agent_id=agent, requested_by="test", **fields)
        return id

    async def site_control(self, site: str, control: str, **fields: object) -> str:
        id = f"control-{next(self._ids)}-{site}"
        await self._send(SITE_CONTROLS.name, site, type=control, id=id, site=site, requested_by="test", **fields)
        return id

    async def unlimited(self, *agents: str) -> None:
        """Give the agents no limit of their own, and wait until they have it."""
        ids = [await self.control(agent, "configure", parallelism_limit="unlimited") for agent in agents]
        await self.until(lambda: all(id in self.answers for id in ids), f"{agents} unlimited")

    async def configured(self, site: str, capacity: int) -> None:
        await self.settled(await self.site_control(site, "configure_site", capacity=capacity))

    async def say(self, dispatch: Json, status: str = "finished", **fields: object) -> None:
        """What a runner says of an attempt."""
        about = {name: dispatch[name] for name in ("agent_id", "conversation_id", "execution_id")}
        if status != "running":
            self._running.pop(dispatch["execution_id"], None)
        await self._send(STATUSES.name, dispatch["agent_id"], type="status", status=status, **about, **fields)

    async def finish(self, id: Id) -> None:
        """End the trigger's last attempt."""
        await self.say(self.dispatches[id][-1])

    async def _send(self, topic: str, key: str, **record: object) -> None:
        value = json.dumps({"v": 1, **record}).encode()
        await self._producer.send(topic, value, key.encode(), partition_of(key, PARTITIONS))

    # -- waiting ------------------------------------------------------------------------------------------------------

    async def until(self, condition: Callable[[], bool], what: str, timeout_seconds: float = WAIT_SECONDS) -> None:
        """Wait until what was seen is as wanted."""
        try:
            async with asyncio.timeout(timeout_seconds), self._seen:
                await self._seen.wait_for(condition)
        except TimeoutError:
            raise AssertionError(f"in {timeout_seconds} s not: {what}\n{self.account()}") from None

    async def dispatched(self, *ids: Id, timeout_seconds: float = WAIT_SECONDS) -> Json:
        """Wait until all of them have been dispatched; the newest attempt of the last."""
        await self.until(lambda: all(self.dispatches[id] for id in ids), f"dispatch of {ids}", timeout_seconds)
        return self.dispatches[ids[-1]][-1]

    async def settled(self, command_id: str, timeout_seconds: float = WAIT_SECONDS) -> Json:
        """The decision that settles the command."""
        await self.until(lambda: command_id in self.answers, f"answer to {command_id}", timeout_seconds)
        return self.answers[command_id]

    async def saw(self, event: str, *ids: Id, timeout_seconds: float = WAIT_SECONDS) -> None:
        """Wait until there is an event of this type for each."""
        await self.until(
            lambda: all(self.events[event, *id] for id in ids), f"{event} of {len(ids)}: {ids[:3]}", timeout_seconds
        )

    def has_ended(self, id: Id) -> bool:
        if any(self.events[end, *id] for end in ("finished", "stopped", "expired", "refused")):
            return True
        return any(event.get("final") for end in ("attempt_failed", "lease_expired") for event in self.events[end, *id])

    def holds_nothing(self, id: Id) -> bool:
        """Every claim of the trigger that a site has opened was closed or denied by it."""
        ended = len(self.events["claim_closed", *id]) + len(self.events["claim_denied", *id])
        return len(self.events["claim_opened", *id]) == ended

    async def all_ended(self, timeout_seconds: float = WAIT_SECONDS) -> None:
        """Everything that was accepted has ended, and holds nothing at any site."""

        def ended() -> bool:
            return all((self.has_ended(id) or self.was_refused(id)) and self.holds_nothing(id) for id in self.accepted)

        await self.until(ended, "all have ended", timeout_seconds)

    def was_refused(self, id: Id) -> bool:
        return bool(self.events["refused", *id]) or "refusal" in self.answers.get(id[1], ())

    def account(self) -> str:
        left = [id for id in self.accepted if not (self.has_ended(id) or self.was_refused(id))]
        seen = {id: [event for event, *of in self.events if tuple(of) == id and self.events[event, *id]] for id in left}
        return f"{len(left)} of {len(self.accepted)} have not ended: {list(seen.items())[:10]}\n{self.clashes}"

    # -- seeing -------------------------------------------------------------------------------------------------------

    async def follow(self, consumer: AIOKafkaConsumer) -> None:
        while True:
            fetched = await consumer.getmany(timeout_ms=POLL_MILLISECONDS)
            async with self._seen:
                for where, records in fetched.items():
                    for record in records:
                        await self._see(where.topic, json.loads(record.value))
                self._seen.notify_all()

    async def _see(self, topic: str, record: Json) -> None:
        if topic == DISPATCHES.name:
            await self._see_for_runner(record)
        elif topic == DEAD_LETTERS.name:
            self.clashes.append(f"dead letter {record}")
        else:
            (self.decisions if topic == DECISIONS.name else self.site_decisions).append(record)
            for id in record.get("settles", ()):
                self.answers[id] = record
            for event in record.get("events", ()):
                agent = event.get("agent_id", record.get("agent_id")) if topic == SITE_DECISIONS.name else None
                self.events[event["type"], agent or record.get("agent_id", ""), event.get("trigger_id", "")].append(
                    event
                )

    async def _see_for_runner(self, record: Json) -> None:
        if record["type"] != "dispatch":
            if record["type"] == "revoked":
                self.revoked.add(record["execution_id"])
                self._running.pop(record["execution_id"], None)
            return
        if record["execution_id"] in self._executions:
            self.clashes.append(f"{record['execution_id']} was dispatched twice")
        self._executions.add(record["execution_id"])
        self.clashes += [
            f"{_who(record)} beside {_who(other)}" for other in self._running.values() if _clash(record, other)
        ]
        self._running[record["execution_id"]] = record
        id = record["agent_id"], record["trigger_id"]
        self.dispatches[id].append(record)
        self.order.append(id)
        if self.is_working and id not in self.kept:
            await self.say(record)


def _who(dispatch: Json) -> str:
    return f"{dispatch['agent_id']}/{dispatch['trigger_id']} in {dispatch.get('folder')}"


def _clash(one: Json, other: Json) -> bool:
    if one.get("environment_id") is None or one["environment_id"] != other.get("environment_id"):
        return False
    return one.get("site") == other.get("site") and overlap(
        segments(one.get("folder") or "/"), segments(other.get("folder") or "/")
    )


@asynccontextmanager
async def playing(bootstrap: str) -> AsyncIterator[Play]:
    """A play from the beginning of the log."""
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, isolation_level="read_committed", fetch_max_wait_ms=100)
    async with sending(bootstrap) as producer:
        await consumer.start()
        partitions = [TopicPartition(topic, number) for topic in FOLLOWED for number in range(PARTITIONS)]
        consumer.assign(partitions)
        await consumer.seek_to_beginning(*partitions)
        play = Play(producer)
        following = asyncio.create_task(play.follow(consumer))
        try:
            yield play
            if following.done():
                following.result()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await consumer.stop()


# -- the account --------------------------------------------------------------------------------------------------


async def unaccounted_for(bootstrap: str) -> dict[str, str]:
    """Where the causes of the decisions aren't the records of the input, each once and in order.

    What deciders tell each other is known by its sender, everything else by its offset.
    """
    inputs = (TRIGGERS, STATUSES, CONTROLS, SITE_CONTROLS, CLAIMS, SIGNALS)
    log = await Log.read(bootstrap, DECISIONS.name, SITE_DECISIONS.name, *(topic.name for topic in inputs))
    problems: dict[str, str] = {}
    for number in range(PARTITIONS):
        causes: dict[str, list[Any]] = defaultdict(list)
        for topic in (DECISIONS, SITE_DECISIONS):
            for decision in log.values(topic.name, number):
                cause = decision["cause"]
                if "offset" in cause:
                    causes[cause["topic"]].append(cause["offset"])
                elif "decider" in cause:
                    internal = CLAIMS if topic is SITE_DECISIONS else SIGNALS
                    causes[internal.name].append(_sender(cause))
        for topic in inputs:
            records = log.records[TopicPartition(topic.name, number)]
            expected: Sequence[Any] = [record.offset for record in records]
            if topic in (CLAIMS, SIGNALS):
                expected = [_sender(json.loads(record.value)["sender"]) for record in records]
            found = causes[topic.name]
            if topic is STATUSES:  # a sign of life of a running attempt leaves no decision (F6)
                signs = {record.offset for record in records if json.loads(record.value)["status"] == "running"}
                expected = [offset for offset in expected if offset not in signs - set(found)]
            if found != expected:
                missing, more = Counter(expected) - Counter(found), Counter(found) - Counter(expected)
                problems[f"{topic.name}/{number}"] = (
                    f"{len(expected)} records, {len(found)} causes; missing {list(missing)[:5]}, more {list(more)[:5]}"
                )
    return problems


def _sender(sender: Json) -> tuple[str, int, int]:
    return sender["decider"], sender["seq"], sender["index"]
