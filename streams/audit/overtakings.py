"""The order certificate: for each start, which older triggers it overtook, and what allowed that.

The rules have the oldest start first (C2). Whoever is older and still waits when a younger one starts must have had a
cause of its own not to start then (C3), or the younger one was forced (B4). Without either, the order is broken.
"""

from collections.abc import Iterator
from itertools import chain, islice
from typing import Final, Literal

from streams.audit.causes import Reason, of_agent, of_answer
from streams.audit.folded_facts import FoldedFacts
from streams.rules.agent.rows import TriggerRow
from streams.rules.agent.state import Agent

OVERTAKEN_MAX: Final = 200
"""Of one start that are looked at, the oldest first: a long queue that is blocked as a whole says nothing new."""

Allowed = Reason | Literal["forced", "waits_at_site"]
"""``waits_at_site``: it has a claim there; the sites' own order is checked with their decisions."""


def overtaken(agent: Agent, row: TriggerRow, forced: bool, at: int) -> Iterator[tuple[str, Allowed | None]]:
    """(id, what let the start by) of each older trigger that waits just before it; None: nothing did.

    ``forced``: it asked to start at once, whether or not it exceeded the limit.
    """
    if not agent.waiting or not agent.waiting[0] < row.key:
        return
    facts = FoldedFacts(agent, {}, knows_all=False)
    older = agent.waiting.irange(maximum=row.key, inclusive=(True, False))
    for key in islice(older, OVERTAKEN_MAX):
        other = agent.triggers[key.id.decode()]
        yield other.trigger_id, _allowed(agent, facts, other, forced, at)


def _allowed(agent: Agent, facts: FoldedFacts, other: TriggerRow, forced: bool, at: int) -> Allowed | None:
    if other.claim_state == "standing":
        return "waits_at_site"
    head = agent.head(other.conversation_id)
    if head is not None and head is not other and not agent.held_back:
        return "conversation_busy"  # as causes.py has it, without saying who that is: most wait for this
    for cause in chain(of_agent(facts, other, at), of_answer(facts, other)):
        if cause.reason != "agent_parallelism_limit_reached":
            return cause.reason
    return "forced" if forced else None
