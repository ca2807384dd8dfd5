"""How many run and wait in a partition now, and why they wait: counts for whoever watches, from the indexes alone.

Pure. It looks at every agent that has live triggers and, where something waits that is neither due nor at a site, at
the agent's conversations; never at single triggers, so that it may be asked every few seconds whatever waits. The
reasons are those of ``api/http/waiting.py``, seen from the agent; what a site keeps waiting is ``site`` here and told
apart by the claims of the site.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from streams.rules.agent.state import Agent
from streams.rules.order import OrderKey
from streams.rules.site.state import Site

WaitingFor = Literal[
    "agent_paused",
    "agent_parked",
    "not_yet_available",
    "approval_or_dependency",
    "conversation_busy",
    "agent_parallelism_limit_reached",
    "site",
]
WAITING_FOR: Final[tuple[WaitingFor, ...]] = get_args(WaitingFor)
Claimed = Literal["granted", "waiting", "behind_gate"]
CLAIMED: Final[tuple[Claimed, ...]] = get_args(Claimed)
"""Claims at sites: with what they need, waiting for a place in the pool or a folder, behind a closed gate."""


@dataclass(slots=True)
class Census:
    """Numbers of one instant. ``forced``: attempts above their agent's limit; ``paused``: triggers without a slot."""

    running: int = 0
    forced: int = 0
    paused: int = 0
    waiting: Counter[WaitingFor] = field(default_factory=Counter)
    claims: Counter[Claimed] = field(default_factory=Counter)
    remembered: int = 0

    def add(self, agent: Agent, at: int) -> None:
        """Count one agent at this instant (microseconds)."""
        self.remembered += len(agent.remembered)
        if not agent.triggers:
            return
        waiting = len(agent.waiting)
        self.running += len(agent.executions)
        self.forced += agent.forced_running
        self.paused += len(agent.triggers) - len(agent.executions) - waiting
        if waiting:
            self._add_waiting(agent, waiting, at)

    def _add_waiting(self, agent: Agent, waiting: int, at: int) -> None:
        if agent.held_back:
            self.waiting["agent_paused" if agent.row.parked is None else "agent_parked"] += waiting
            return
        heads = sum(len(keys) for keys in agent.ready.values())
        present = OrderKey(at + 1, 0, b"")
        later = heads - sum(keys.bisect_left(present) for keys in agent.ready.values())
        claimed = len(agent.claimed)
        rest = waiting - heads - claimed - len(agent.unplaced)
        blocked = 0
        if rest:
            blocked = sum(len(line.unplaced or ()) for line in agent.lines.values()) - len(agent.unplaced)
        self.waiting["not_yet_available"] += len(agent.unplaced) + later
        self.waiting["agent_parallelism_limit_reached"] += heads - later
        self.waiting["site"] += claimed
        self.waiting["approval_or_dependency"] += blocked
        self.waiting["conversation_busy"] += rest - blocked

    def add_site(self, site: Site) -> None:
        granted, shown = len(site.granted), len(site.shown)
        self.claims["granted"] += granted
        self.claims["waiting"] += shown
        self.claims["behind_gate"] += len(site.claims) - granted - shown


def census(agents: Iterable[Agent], sites: Iterable[Site], at: int) -> Census:
    """Count these agents and sites at this instant (microseconds)."""
    counted = Census()
    for agent in agents:
        counted.add(agent, at)
    for site in sites:
        counted.add_site(site)
    return counted
