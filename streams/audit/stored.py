"""A fold as JSON: all that an agent or a site is made of, so that a long reading of the log can go on another day.

The same rows as in the changelog, with the ids that are remembered; indexes are built again from them.
"""

from dataclasses import dataclass

from streams.rules.agent.rows import (
    AgentRow,
    ConversationRow,
    RememberedKind,
    RememberedRow,
    TriggerRow,
    Watcher,
    WatchRow,
)
from streams.rules.agent.state import Agent
from streams.rules.site.rows import ClaimRow, DeletionRow, GateRow, GateScope, SiteRow
from streams.rules.site.state import Site, key_of


@dataclass(frozen=True, slots=True)
class StoredAgent:
    """What is kept of an agent."""

    row: AgentRow
    triggers: list[TriggerRow]
    conversations: list[tuple[str, ConversationRow]]
    remembered: list[tuple[RememberedKind, str, RememberedRow]]
    watches: list[tuple[str, str, str, WatchRow]]
    """(conversation, agent and trigger that watch it, what they were told)."""

    @classmethod
    def of(cls, agent: Agent) -> "StoredAgent":
        return cls(
            agent.row,
            list(agent.triggers.values()),
            list(agent.conversations.items()),
            [(kind, id, row) for (kind, id), row in agent.remembered.items()],
            [(id, *watcher, row) for id, watchers in agent.watches.items() for watcher, row in watchers.items()],
        )

    def agent(self, agent_id: str) -> Agent:
        """The agent, with its indexes."""
        agent = Agent(agent_id)
        agent.row = self.row
        for row in self.triggers:
            agent.load_trigger(row)
        agent.conversations = dict(self.conversations)
        agent.remembered = {(kind, id): row for kind, id, row in self.remembered}
        for conversation_id, watcher_agent_id, trigger_id, watch in self.watches:
            agent.watches.setdefault(conversation_id, {})[Watcher(watcher_agent_id, trigger_id)] = watch
        agent.loaded(0)
        return agent


@dataclass(frozen=True, slots=True)
class StoredSite:
    """What is kept of a site."""

    row: SiteRow
    gates: list[tuple[GateScope, str, GateRow]]
    deletions: list[tuple[str, str, DeletionRow]]
    claims: list[ClaimRow]
    remembered: list[tuple[str, RememberedRow]]

    @classmethod
    def of(cls, site: Site) -> "StoredSite":
        return cls(
            site.row,
            [(*gate, row) for gate, row in site.gates.items()],
            [(*place, row) for place, row in site.deletions.items()],
            sorted(site.claims.values(), key=key_of),
            list(site.remembered.items()),
        )

    def site(self, site_id: str) -> Site:
        """The site, with its indexes."""
        site = Site(site_id)
        site.row = self.row
        site.gates = {(scope, name): row for scope, name, row in self.gates}
        site.deletions = {(environment_id, path): row for environment_id, path, row in self.deletions}
        for claim in self.claims:
            site.enter(claim)
        site.remembered = dict(self.remembered)
        site.changed.clear()
        return site
