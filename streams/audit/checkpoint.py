"""How far a reading of the whole log has come, as JSON: it can be put down and taken up again.

Partitions are read one after the other, the agents' decisions of each before the sites'. What is whole needs nothing
but its counts; of the partition under way the state of its deciders is kept, and of all what agents and sites have said
to each other and not heard yet.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from pydantic import TypeAdapter, ValidationError

from streams.audit.agreement import StoredAgreement
from streams.audit.stored import StoredAgent, StoredSite
from streams.audit.verify import Violation
from streams.rules.limits import POLICY

VERSION: Final = 2


class NoCheckpoint(ValueError):  # noqa: N818 - it reads as what it is
    """The file can't be gone on from; the text says why."""


@dataclass(slots=True)
class Counts:
    """What was read. ``overtakings``: of triggers by starts of their agents, and ``overtakings_at_sites``: of claims by
    grants of their sites, by what allowed them; ``unknown``: decisions by unknown policies.
    """

    decisions: int = 0
    forced: int = 0
    recomputed: int = 0
    overtakings: Counter[str] = field(default_factory=Counter)
    overtakings_at_sites: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """``number``, ``topic``, ``offset``: where the reading goes on. ``ends``: where it ends, by topic and partition."""

    partitions: int
    recomputes: bool
    ends: list[tuple[str, int, int]]
    number: int
    topic: str
    offset: int
    counts: Counts
    violations: list[tuple[str, int, Violation]]
    agents: list[tuple[str, StoredAgent]]
    sites: list[tuple[str, StoredSite]]
    rechecked_agents: list[tuple[str, StoredAgent]]
    rechecked_sites: list[tuple[str, StoredSite]]
    agreement: StoredAgreement
    policy: str = POLICY
    v: int = VERSION


_CHECKPOINT: Final = TypeAdapter(Checkpoint)


def write(checkpoint: Checkpoint) -> bytes:
    return _CHECKPOINT.dump_json(checkpoint)


def read(value: bytes, partitions: int, recomputes: bool) -> Checkpoint:
    """Raises NoCheckpoint."""
    try:
        checkpoint = _CHECKPOINT.validate_json(value)
    except ValidationError as error:
        raise NoCheckpoint(f"it is not what berth verify writes: {error.error_count()} fields are wrong") from None
    if (checkpoint.v, checkpoint.policy) != (VERSION, POLICY):
        raise NoCheckpoint("another version of Berth wrote it")
    if checkpoint.partitions != partitions:
        raise NoCheckpoint(f"it is of {checkpoint.partitions} partitions, BERTH_PARTITIONS is {partitions}")
    if checkpoint.recomputes != recomputes:
        raise NoCheckpoint(f"it was {'with' if checkpoint.recomputes else 'without'} deciding every command again")
    return checkpoint
