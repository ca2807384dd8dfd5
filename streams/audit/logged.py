"""One decision of the log, and the decisions of all partitions in one order in which a cause comes before its effects.

Within a partition the log is in order. Across partitions the instants of decisions help: none is before what caused it
(F9), but they may be the same, and partitions that are read one after the other end at different moments. So the merge
goes by instants, and lets a partition wait whose next decision was caused by one that has not come yet. What still
waits when everything is read was caused by something that was not: it is left out, and every cut is causal.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Literal, NamedTuple

from pydantic import ValidationError

from streams import SITE_DECISIONS
from streams.rules import events, site_events, verdicts
from streams.rules.site_messages import (
    Claim,
    Degraded,
    Denied,
    Granted,
    Recall,
    Release,
    Resolved,
    Unwatch,
    Waiting,
    Watch,
)

_FROM_AGENTS: Final = (Claim, Release, Watch, Unwatch, Resolved)
_FROM_SITES: Final = (Granted, Waiting, Denied, Recall, Degraded)


class Decider(NamedTuple):
    """An agent and a site may have the same id."""

    kind: Literal["agent", "site"]
    id: str


class Logged(NamedTuple):
    """A decision, where it stands, and the bytes that it was read from."""

    topic: str
    partition: int
    offset: int
    decision: events.Decision | site_events.SiteDecision
    value: bytes

    @property
    def decider(self) -> Decider:
        if isinstance(self.decision, events.Decision):
            return Decider("agent", self.decision.agent_id)
        return Decider("site", self.decision.site)

    @property
    def cause(self) -> tuple[Decider, int] | None:
        """The decision that sent the message which this one is about; None: it came from outside, or from a timer."""
        cause = self.decision.cause
        if not isinstance(cause, verdicts.SenderCause):
            return None
        kind: Literal["agent", "site"] = "site" if isinstance(self.decision.command, _FROM_SITES) else "agent"
        assert kind == "site" or isinstance(self.decision.command, _FROM_AGENTS)
        return Decider(kind, cause.decider), cause.seq


class Unreadable(ValueError):  # noqa: N818 - it reads as what it is
    """A record is no decision of a form that this version knows: nothing is guessed from it."""

    def __init__(self, topic: str, partition: int, offset: int, why: str) -> None:
        super().__init__(f"{topic} partition {partition}, offset {offset}: {why}")
        self.topic, self.partition, self.offset, self.why = topic, partition, offset, why


def read(topic: str, partition: int, offset: int, value: bytes | None) -> Logged:
    """The decision of one record. Raises Unreadable."""
    value = value or b""
    try:
        decision = (
            site_events.read_site_decision(value) if topic == SITE_DECISIONS.name else events.read_decision(value)
        )
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise Unreadable(topic, partition, offset, f"{first['loc']}: {first['msg']}") from None
    return Logged(topic, partition, offset, decision, value)


def merged(
    sources: Iterable[Iterable[Logged]], until: int | None = None, is_read: Callable[[Decider], bool] = lambda _: True
) -> Iterator[Logged]:
    """Decisions of several partitions, each partition in its order, and none before what caused it.

    ``until``: only those up to this instant. ``is_read``: whose decisions are among the sources; of others nothing is
    waited for.
    """
    heads: list[tuple[int, int, Logged]] = []
    rest = [iter(source) for source in sources]
    passed: dict[Decider, int] = {}
    waiting: dict[Decider, list[tuple[int, int, Logged]]] = {}

    def advance(number: int) -> None:
        logged = next(rest[number], None)
        if logged is not None and (until is None or logged.decision.at <= until):
            heapq.heappush(heads, (logged.decision.at, number, logged))

    for number in range(len(rest)):
        advance(number)
    while heads:
        _, number, logged = heapq.heappop(heads)
        cause = logged.cause
        if cause is not None and is_read(cause[0]) and passed.get(cause[0], 0) < cause[1]:
            waiting.setdefault(cause[0], []).append((cause[1], number, logged))
            continue
        yield logged
        decider = logged.decider
        seq = passed[decider] = logged.decision.seq
        if decider in waiting:
            for needed, waiter, held in waiting.pop(decider):
                if needed <= seq:
                    heapq.heappush(heads, (held.decision.at, waiter, held))
                else:
                    waiting.setdefault(decider, []).append((needed, waiter, held))
        advance(number)
