"""Which partitions this worker owns: the group's assignments turned into ownerships, and what ends the process.

Kafka's group protocol takes all partitions away before it gives them out anew. What happens in between is kept small:

* ``revoked``: no transaction begins any more; those under way are waited for, at most two seconds.
* ``assigned``: lost partitions are released, new ones fenced, kept ones go on where they were, with their state,
  their writer and their readers untouched.

A partition is only *kept* when this worker also took part in the generation just before this one. Otherwise it was
out of the group for a while (frozen, cut off) or missed an assignment; somebody else may have owned the partition in
between, and what is in memory may be old. Then everything is taken over afresh: fenced and restored.

When Kafka was away, a partition's writer may be of no more use, and what became of its last transaction isn't known.
Such a partition is *broken*: the group is asked to give out its partitions anew, and in that assignment it is fenced
and restored like a new one. Fencing anywhere else could throw out an owner that has taken over meanwhile.

``halt`` ends the process for every reason but a signal: it clears ``stable`` for good, so that no transaction begins
any more, and tells the worker why.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

import structlog
from aiokafka.errors import KafkaError

from streams.kafka import edge
from streams.kafka.clients import STOP_SECONDS_MAX, honest, is_outage
from streams.kafka.ownership import Ownership, Surroundings

log = structlog.get_logger()


class AssignmentsDiffer(Exception):  # noqa: N818 - it reads as what it is
    """The group gave this worker partition n of one input topic and not of another."""


class Membership:
    """The ownerships of one worker."""

    def __init__(self, surroundings: Surroundings, rejoin: Callable[[], Awaitable[None]]) -> None:
        self.owned: dict[int, Ownership] = {}
        self.halted: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self.has_assignment = False
        """Whether the group has given this worker its partitions, be it none, and not taken them away since."""
        self.unassigned_since_seconds = edge.monotonic_seconds()
        self._surroundings = surroundings
        self._rejoin = rejoin
        self._broken: set[int] = set()
        """Partitions that broke and have committed nothing since."""
        self._generation: int | None = None
        self._is_leaving = False
        self._tasks: dict[Ownership, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def halt(self, reason: BaseException) -> None:
        """Stop for good: no transaction begins from now on."""
        self._surroundings.stable.clear()
        if not self.halted.done():
            self.halted.set_result(reason)

    async def revoked(self) -> None:
        """The group is about to give out the partitions anew."""
        self._surroundings.stable.clear()
        self.has_assignment = False
        self.unassigned_since_seconds = began = edge.monotonic_seconds()
        await asyncio.gather(*(ownership.in_flight_done() for ownership in self.owned.values()))
        log.info("revoked", partitions=sorted(self.owned), waited_seconds=round(edge.monotonic_seconds() - began, 3))

    async def assigned(self, numbers_by_topic: Mapping[str, frozenset[int]], generation: int) -> None:
        """The group has given these partitions to this worker, in this generation. Never raises; halts instead."""
        began, new = edge.monotonic_seconds(), list[Ownership]()
        try:
            numbers = _same_numbers(numbers_by_topic)
            was_member = self._generation is not None and generation == self._generation + 1
            sound = {number for number, ownership in self.owned.items() if not ownership.is_broken}
            kept = numbers & sound if was_member else set[int]()
            lost = [self.owned.pop(number) for number in self.owned.keys() - kept]
            self._release(lost)
            new = [Ownership(number, self._surroundings) for number in sorted(numbers - kept)]
            if not await self._fence(new):
                return
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends the process
            self.halt(error)
        if self.halted.done() or self._is_leaving:
            await asyncio.gather(*(ownership.close() for ownership in new))
            return
        for ownership in new:
            self.owned[ownership.number] = ownership
            self._tasks[ownership] = asyncio.create_task(self._run(ownership), name=f"partition-{ownership.number}")
        self._generation = generation
        self.has_assignment = True
        self._surroundings.stable.set()
        log.info(
            "assigned",
            generation=generation,
            kept=sorted(kept),
            new=[ownership.number for ownership in new],
            lost=sorted(ownership.number for ownership in lost),
            was_member=was_member,
            seconds=round(edge.monotonic_seconds() - began, 3),
            interrupted_seconds=round(edge.monotonic_seconds() - self.unassigned_since_seconds, 3),
        )

    async def leave(self) -> None:
        """Release everything, ending the transactions under way; before the group is left."""
        self._is_leaving = True
        await asyncio.gather(*(ownership.in_flight_done() for ownership in self.owned.values()))
        self._release(self.owned.values())
        self.owned.clear()
        self.has_assignment = False
        await asyncio.gather(*self._closing)

    async def _fence(self, new: Sequence[Ownership]) -> bool:
        """Fence all; False when Kafka went away meanwhile, and then the group is asked for another assignment."""
        try:
            await asyncio.gather(*(ownership.fence() for ownership in new))
        except (KafkaError, TimeoutError) as error:
            if not is_outage(error):
                raise
            log.warning("not_fenced", partitions=[ownership.number for ownership in new], error=repr(error))
            self._generation = None
            await asyncio.gather(*(ownership.close() for ownership in new))
            await self._rejoin()
            return False
        return True

    def _release(self, ownerships: Iterable[Ownership]) -> None:
        for ownership in ownerships:
            ownership.release()
            task = asyncio.create_task(self._end(ownership), name=f"release-{ownership.number}")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _end(self, ownership: Ownership) -> None:
        await ownership.in_flight_done()
        task = self._tasks.pop(ownership)
        task.cancel()
        await asyncio.wait({task}, timeout=STOP_SECONDS_MAX)  # aiokafka may swallow the cancellation
        await ownership.close()

    async def _run(self, ownership: Ownership) -> None:
        try:
            await honest(ownership.run)()
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends the process
            # During a rebalance only the assignment tells whether the partition is still ours; nothing begins before.
            await self._surroundings.stable.wait()
            if ownership.is_released:
                log.info("lost_while_being_released", partition=ownership.number, error=repr(error))
                return
            if ownership.has_committed:
                self._broken.discard(ownership.number)
            if not is_outage(error) or ownership.number in self._broken:
                self.halt(error)
                return
            log.warning("to_be_taken_over_again", partition=ownership.number, error=repr(error))
            self._broken.add(ownership.number)
            ownership.is_broken = True
            await self._rejoin()


def _same_numbers(numbers_by_topic: Mapping[str, frozenset[int]]) -> frozenset[int]:
    distinct = set(numbers_by_topic.values())
    if len(distinct) > 1:
        seen = ", ".join(f"{topic}: {sorted(numbers)}" for topic, numbers in sorted(numbers_by_topic.items()))
        raise AssignmentsDiffer(
            f"The group gave this worker different partitions of its input topics ({seen}). Nothing was written. "
            "Let all workers run the same version of Berth, and compare the topics with `berth topics check`."
        )
    return distinct.pop() if distinct else frozenset()
