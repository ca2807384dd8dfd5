"""Writing rebuilt rows in place of what is stored, as the partition's only writer and while no worker runs.

The partition's own row goes first and comes last: without it no worker takes the partition over, so that one which
starts when only some of the rows are there refuses. A recovery that is broken off is run again, and goes on from what
it finds. Each transaction is small enough to end in time.

A trigger that ends because its payload is lost is a decision like any other, made here by the same ``Partition``: with
its messages to sites and other agents in one transaction, and without anybody being started.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Final

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import GroupCoordinatorNotAvailableError

from streams import APPLICATION_ID, codec
from streams.kafka import edge
from streams.kafka.commit import Writer
from streams.partition import Changes, Partition

ROWS_MAX: Final = 2_000
ROWS_BYTES_MAX: Final = 4 * 1024 * 1024
LOST_MAX: Final = 200
"""Rows, their bytes, and lost triggers of one transaction."""
POSITION_KEY: Final = codec.write_key(codec.PARTITION_KEY)

Rows = Mapping[bytes, bytes | None]


async def members(bootstrap: str) -> list[str]:
    """The hosts of the workers that are in the group now, each as often as it has some.

    One that was killed stays until its session ends.
    """
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    try:
        await admin.start()
        with suppress(GroupCoordinatorNotAvailableError):  # a broker on which there never was a group
            (answer,) = await admin.describe_consumer_groups([APPLICATION_ID])
            return sorted(host.removeprefix("/") for group in answer.groups for _, _, host, *_ in group[5])
        return []
    finally:
        await admin.close()


async def replace_rows(
    writer: Writer, stored: Mapping[bytes, bytes], changes: Rows, partition: Partition, lost: Sequence[tuple[str, str]]
) -> None:
    """Write the changes; then ``lost`` triggers, by agent and id, end. ``partition``: a new one, which loads the rows.

    ``writer`` has fenced. Raises KafkaError; ProducerFenced if a worker has taken the partition over meanwhile.
    """
    after = {key: value for key, value in {**stored, **changes}.items() if value is not None}
    for key, value in after.items():
        partition.load(key, value)
    partition.loaded(edge.now_us(), decisions_exist=bool(after))
    position: bytes | None = after.get(POSITION_KEY)
    if POSITION_KEY in stored:
        await _commit(writer, Changes([], {POSITION_KEY: None}))
    for rows in _parts(changes):
        await _commit(writer, Changes([], rows))
    ending = iter(lost)
    while some := list(islice(ending, LOST_MAX)):
        for agent_id, trigger_id in some:
            partition.lose_payload(agent_id, trigger_id, edge.now_us())
        decided = partition.take_changes()
        assert decided is not None
        position = decided.rows.pop(POSITION_KEY)
        await _commit(writer, decided)
    if position is not None:
        await _commit(writer, Changes([], {POSITION_KEY: position}))


async def _commit(writer: Writer, changes: Changes) -> None:
    await writer.commit(changes, edge.now_us())


def _parts(changes: Rows) -> Iterator[dict[bytes, bytes | None]]:
    """The changed rows but the partition's own, in parts."""
    part: dict[bytes, bytes | None] = {}
    size = 0
    for key, value in changes.items():
        if key == POSITION_KEY:
            continue
        part[key] = value
        size += len(key) + len(value or b"")
        if len(part) == ROWS_MAX or size >= ROWS_BYTES_MAX:
            yield part
            part, size = {}, 0
    if part:
        yield part
