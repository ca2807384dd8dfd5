"""What tests of the audits read: the decisions that driven partitions wrote, as they would be read from Kafka."""

from collections import defaultdict
from collections.abc import Iterator

from streams import DECISIONS, SITE_DECISIONS
from streams.audit.logged import Logged, merged, read
from tests.driving import Driven

TOPICS = (DECISIONS.name, SITE_DECISIONS.name)


def sources(*partitions: Driven) -> list[list[Logged]]:
    """The decisions of each partition and topic, by offset."""
    found: dict[tuple[str, int], list[Logged]] = defaultdict(list)
    for driven in partitions:
        for output in driven.outputs:
            if output.topic in TOPICS:
                source = found[output.topic, driven.number]
                source.append(read(output.topic, driven.number, len(source), output.value))
    return [found[key] for key in sorted(found)]


def log_of(*partitions: Driven, until: int | None = None) -> Iterator[Logged]:
    """All decisions in causal order."""
    return merged(sources(*partitions), until)


def of_agent(driven: Driven, agent_id: str = "A") -> list[Logged]:
    """One agent's decisions in order."""
    return [
        logged
        for source in sources(driven)
        for logged in source
        if logged.decider.kind == "agent" and logged.decider.id == agent_id
    ]
