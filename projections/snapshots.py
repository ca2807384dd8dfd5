"""The folded state of an agent or site after every 250th of its decisions: the past can be read from there.

Pure. A snapshot is made of the one before and the decisions since, all of which the projections hold; so it may be made
any time after its decision was applied, and is the same whenever that is.

It holds what slots, queues, limits, folders and pools of the past are read from: an agent's settings and its live
triggers, a site's settings, gates, deletions and claims, as the rules keep them. Left out are the ids that the rules
remember for days, the outcomes of conversations and who watches them, which would make every snapshot of a busy agent
as large as a week of its work; work that a step left over, which is no event; and the hash of the decision, which only
the exact bytes give. Leases are those of the dispatch: signs of life are no decisions.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from pydantic import TypeAdapter

from streams.rules import events
from streams.rules.agent.evolve import Origin, evolve
from streams.rules.agent.rows import AgentRow, TriggerRow
from streams.rules.agent.state import Agent
from streams.rules.site import evolve as site_evolve
from streams.rules.site.rows import ClaimRow, DeletionRow, GateRow, GateScope, SiteRow
from streams.rules.site.state import Site, key_of
from streams.rules.site_events import WalkNoted, read_site_decision

SNAPSHOT_DECISIONS: Final = 250
"""So many are folded at most to see any moment: some 10 ms of a core."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What an agent's snapshot holds as JSON."""

    agent: AgentRow
    triggers: list[TriggerRow]


class StoredGate(NamedTuple):
    scope: GateScope
    name: str
    gate: GateRow


class StoredDeletion(NamedTuple):
    environment_id: str
    path: str
    deletion: DeletionRow


@dataclass(frozen=True, slots=True)
class StoredSite:
    """What a site's snapshot holds as JSON."""

    site: SiteRow
    gates: list[StoredGate]
    deletions: list[StoredDeletion]
    claims: list[ClaimRow]


_STORED: Final = TypeAdapter(Stored)
_STORED_SITE: Final = TypeAdapter(StoredSite)


def newest_due(seq: int) -> int:
    """The newest decision up to ``seq`` after which there is a snapshot; 0: none."""
    return seq - seq % SNAPSHOT_DECISIONS


# Agents


def read(agent_id: str, state: str | bytes | None) -> Agent:
    """The agent as a snapshot holds it; None: as it was before its first decision."""
    agent = Agent(agent_id)
    if state is not None:
        stored = _STORED.validate_json(state)
        agent.row = stored.agent
        for row in stored.triggers:
            agent.load_trigger(row)
    agent.loaded(0)
    return agent


def write(agent: Agent) -> str:
    """The JSON of the agent's settings and live triggers, these in the order of their acceptance."""
    triggers = sorted(agent.triggers.values(), key=lambda row: (row.accepted_seq, row.trigger_id))
    header = replace(agent.row, prev=None, todo=None, todo_conversation_id=None, todo_since=None)
    return _STORED.dump_json(Stored(header, triggers), exclude_defaults=True).decode()


_NOT_FOLDED: Final = (events.Forgotten, *events.OF_OTHERS)
"""They change only what a snapshot leaves out."""


def fold(agent: Agent, decisions: Iterable[bytes | str]) -> Agent:
    """Apply decisions in order, each the JSON of one, to the agent, and return it.

    AssertionError or KeyError: a decision doesn't fit, the log is corrupt.
    """
    for value in decisions:
        decision = events.read_decision(_octets(value))
        assert decision.seq == agent.row.seq + 1, f"decision {decision.seq} follows {agent.row.seq}"
        origin = Origin(decision.seq, decision.at, decision.command)
        for event in decision.events:
            if not isinstance(event, _NOT_FOLDED):
                evolve(agent, event, origin)
        agent.row.seq = decision.seq
        agent.remembered.clear()
        agent.conversations.clear()
        agent.changed.clear()
        agent.deadlines.clear()
        agent.ended.clear()
    return agent


# Sites


def read_site(site_id: str, state: str | bytes | None) -> Site:
    """The site as a snapshot holds it; None: as it was before its first decision."""
    site = Site(site_id)
    if state is not None:
        stored = _STORED_SITE.validate_json(state)
        site.row = stored.site
        site.gates = {(scope, name): gate for scope, name, gate in stored.gates}
        site.deletions = {(environment_id, path): row for environment_id, path, row in stored.deletions}
        for claim in stored.claims:
            site.enter(claim)
    return site


def write_site(site: Site) -> str:
    """The JSON of the site's settings, gates, deletions and claims, these in start order."""
    header = replace(site.row, prev=None, todo=[], todo_cursor=("", ""), todo_grant=False, todo_since=None)
    stored = StoredSite(
        header,
        [StoredGate(scope, name, gate) for (scope, name), gate in sorted(site.gates.items())],
        [StoredDeletion(*key, row) for key, row in sorted(site.deletions.items())],
        sorted(site.claims.values(), key=key_of),
    )
    return _STORED_SITE.dump_json(stored, exclude_defaults=True).decode()


def fold_site(site: Site, decisions: Iterable[bytes | str]) -> Site:
    """Apply decisions in order, each the JSON of one, to the site, and return it. Raises as ``fold``."""
    for value in decisions:
        decision = read_site_decision(_octets(value))
        assert decision.seq == site.row.seq + 1, f"decision {decision.seq} follows {site.row.seq}"
        origin = site_evolve.SiteOrigin(decision.at, decision.command)
        for event in decision.events:
            if not isinstance(event, WalkNoted):
                site_evolve.evolve(site, event, origin)
        site.row.seq = decision.seq
        site.changed.clear()
    return site


def _octets(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else value
