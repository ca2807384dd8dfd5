"""A broker as empty as a new one, without paying for a new one in every test."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from aiokafka.protocol.group import LeaveGroupRequest

from streams import APPLICATION_ID, TOPICS
from streams.kafka import topics

WAIT_SECONDS: Final = 90.0
"""How long a test waits for anything to happen at all, on a slow machine too: whatever is tested has its own bound.

Also longer than any session timeout in the tests: a killed worker stays a member until its session ends.
"""


async def empty_topics(bootstrap: str, partitions: int) -> None:
    """Leave every topic of Berth new and empty, nobody in its group, and no transaction open.

    An open transaction is ended first, or its abort marker would be written to the new topic and take an offset there.
    """
    await asyncio.gather(*(fence(bootstrap, partition) for partition in range(partitions)))
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        await until(lambda: _group_is_empty(admin))
        await delete_topics(admin, [topic.name for topic in TOPICS])
    finally:
        await admin.close()
    created = await topics.create(bootstrap, partitions)
    assert len(created) == len(TOPICS)


async def delete_topics(admin: AIOKafkaAdminClient, names: Sequence[str]) -> None:
    """Delete those of the topics that exist, and wait until the broker knows that they are gone."""
    existing = set(await admin.list_topics()) & set(names)

    async def gone() -> bool:
        return not existing & set(await admin.list_topics())

    if existing:
        await admin.delete_topics(sorted(existing))
        await until(gone)


async def forget_members(bootstrap: str) -> None:
    """Take everybody out of Berth's group: for workers that are dead, whose session nobody wants to wait for."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        (answer,) = await admin.describe_consumer_groups([APPLICATION_ID])
        coordinator = await admin.find_coordinator(APPLICATION_ID)
        for group in answer.groups:
            for member_id, *_ in group[5]:
                left = await admin._client.send(coordinator, LeaveGroupRequest(APPLICATION_ID, member_id))
                assert left.error_code == 0
        await until(lambda: _group_is_empty(admin))
    finally:
        await admin.close()


async def until(condition: Callable[[], Awaitable[bool]], *, timeout_seconds: float = WAIT_SECONDS) -> None:
    """Ask again and again until the condition holds; TimeoutError when it doesn't in time."""
    async with asyncio.timeout(timeout_seconds):
        while not await condition():
            await asyncio.sleep(0.02)


async def _group_is_empty(admin: AIOKafkaAdminClient) -> bool:
    try:
        (answer,) = await admin.describe_consumer_groups([APPLICATION_ID])
    except KafkaError as error:
        if error.retriable:  # the group's coordinator isn't there yet on a new broker
            return False
        raise
    return all(group[2] in ("Empty", "Dead", "") for group in answer.groups)


async def fence(bootstrap: str, partition: int) -> None:
    """End what a partition's writers have begun; what one of them has committed or aborted is there, or gone, then."""
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=f"{APPLICATION_ID}-{partition}")
    try:
        await producer.start()
    finally:
        await producer.stop()
