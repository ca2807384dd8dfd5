"""Faust without its own way of reading: the app, its group membership and its agents, but not its fetches or offsets.

Faust's consumer is a member of the group over the input topics and never fetches: its partitions are paused inside
aiokafka from the moment of the assignment on, and Faust's fetch loop gets nothing. Instead its thread asks that
consumer all the time for records, of which there are none. So the member counts as active (aiokafka leaves the group
when nobody asks for records for ``max_poll_interval``), and errors of the group's coordination come to the surface
instead of leaving an idle process that looks healthy (Faust asks the fetcher only, which doesn't know them).

Heartbeats are sent from Faust's consumer thread, so a long step in the main loop doesn't cost the membership.

The group's offsets are not written, not even for tools that show lag (the worker shows it itself): aiokafka sends
such a commit on the connection on which it waits for the others to join, so in a rebalance it arrives afterwards, with
the number of a generation that is over, and the answer makes aiokafka forget that it is a member. Then its former self
holds up the whole group until that session has ended.

The assignor is Faust's (sticky, topics with equal partition counts together): aiokafka's round robin gives one worker
different partition numbers of different topics. Faust 0.15 takes it only if standby replicas are asked for or tables
exist, hence ``table_standby_replicas=1``, which has no other effect without tables.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

import faust
import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaConnectionError
from faust.transport.drivers import aiokafka as driver
from faust.types import TP
from mode import Service
from mode.utils.queues import FlowControlEvent, ThrowableQueue

from streams import INPUT_TOPICS
from streams.kafka import edge
from streams.kafka.clients import honest
from streams.kafka.membership import Membership

log = structlog.get_logger()


FREEZING_POLL_SECONDS: Final = 0.5
POLL_MILLISECONDS: Final = 1000


class WasFrozen(Exception):  # noqa: N818 - it reads as what it is
    """The whole process did not run for longer than its session."""


class PausingListener(driver.ConsumerRebalanceListener):
    """Pauses what is assigned before anything of it can be fetched. Runs in the consumer's thread."""

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """Pause, then tell the consumer in the main thread."""
        cast("MemberThread", self._thread).pause(assigned)
        await super().on_partitions_assigned(assigned)


class MemberThread(driver.AIOKafkaConsumerThread):
    """The thread that holds the membership."""

    has_left = False

    @Service.task
    async def _poll(self) -> None:
        while not (self.should_stop or self.has_left):
            try:
                await honest(self._ensure_consumer().getmany)(timeout_ms=POLL_MILLISECONDS)
            except KafkaConnectionError as error:
                log.debug("poll_broken_off", error=repr(error))

    @Service.task
    async def _notice_freezing(self) -> None:
        """A process that was stopped for longer than its session has lost its partitions without knowing it."""
        while not self.should_stop:
            began = edge.monotonic_seconds()
            await asyncio.sleep(FREEZING_POLL_SECONDS)
            frozen_seconds = edge.monotonic_seconds() - began
            if frozen_seconds > self.app.conf.broker_session_timeout:
                error = WasFrozen(
                    f"this process was stopped for {frozen_seconds:.1f} s; others have taken over meanwhile"
                )
                membership = cast("Consumer", self.consumer).membership
                self.parent_loop.call_soon_threadsafe(membership.halt, error)

    def on_crash(self, _message: str, *_arguments: Any) -> None:
        """Mode would print a traceback. Why the app has crashed is said by whoever waits for it."""

    def pause(self, assigned: Iterable[TopicPartition]) -> None:
        """Fetch nothing of these."""
        self._ensure_consumer().pause(*assigned)

    async def _fetch_records(
        self,
        consumer: AIOKafkaConsumer,  # noqa: ARG002 - Faust's signature
        active_partitions: set[TP],  # noqa: ARG002 - Faust's signature
        timeout: float | None = None,  # noqa: ASYNC109 - Faust's signature
        max_records: int | None = None,  # noqa: ARG002 - Faust's signature
    ) -> Mapping[TP, list[Any]]:
        await asyncio.sleep(timeout or 1.0)
        return {}

    async def leave(self) -> None:
        """Leave the group now: the others needn't wait for the session to run out."""
        self.has_left = True
        await self._ensure_consumer().stop()

    @property
    def is_member(self) -> bool:
        """Whether it may have begun to join the group."""
        return self._consumer is not None

    async def rejoin(self) -> None:
        """Have the group give out its partitions anew."""
        self._ensure_consumer()._coordinator.request_rejoin()  # noqa: SLF001 - aiokafka has no other word for it


class Consumer(driver.Consumer):
    """Faust's consumer, whose assignments go to the membership."""

    RebalanceListener = PausingListener
    _thread: MemberThread

    def _new_consumer_thread(self) -> MemberThread:
        return MemberThread(self, loop=self.loop, beacon=self.beacon)

    @property
    def membership(self) -> Membership:
        """The membership that the app was made with."""
        membership: Membership = cast("Any", self.app).membership
        return membership

    async def on_partitions_revoked(self, revoked: set[TP]) -> None:
        """Let nothing begin, wait for what is under way, then let Faust keep its books."""
        await self.membership.revoked()
        await super().on_partitions_revoked(revoked)

    async def on_partitions_assigned(self, assigned: set[TP], generation_id: int = 0) -> None:
        """Take over what is new, let go what is lost, then let Faust keep its books."""
        numbers: defaultdict[str, set[int]] = defaultdict(set)
        for topic, number in assigned:
            numbers[topic].add(number)
        await self.membership.assigned(
            {topic.name: frozenset(numbers[topic.name]) for topic in INPUT_TOPICS}, generation_id
        )
        await super().on_partitions_assigned(assigned, generation_id)

    async def perform_seek(self) -> None:
        """Nothing is read from here, so there is nothing to seek."""

    def verify_event_path(self, now: float, tp: TP) -> None:
        """Faust would complain that nothing is fetched."""

    async def leave_group(self) -> None:
        """Leave the group, also when Faust has only begun to start; the process ends afterwards."""
        if self._thread.is_member:
            leaving = asyncio.run_coroutine_threadsafe(self._thread.leave(), self._thread.thread_loop)
            await asyncio.wrap_future(leaving)

    async def rejoin_group(self) -> None:
        """Have the group give out its partitions anew; returns before that has happened."""
        await self._thread.call_thread(self._thread.rejoin)


class Transport(driver.Transport):
    """The transport of the app."""

    Consumer = Consumer


class Channel(faust.Channel[Any]):
    """A channel that Faust never empties.

    Faust clears the queues of all its channels at each rebalance, which would skip what is in them. Nothing in here is
    ever out of place: everything names the ownership it is for, and what is for a former one is dropped there.
    """

    _open = FlowControlEvent(initially_suspended=False)

    @property
    def queue(self) -> ThrowableQueue[Any]:
        """The queue of this subscriber."""
        if self._queue is None:
            self._queue = ThrowableQueue(maxsize=self.maxsize or 0, flow_control=self._open)
        return self._queue
