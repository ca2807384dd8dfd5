"""The rows that a batch of decisions reads and changes, by table and key, and which these are: pure.

``Named`` grows with each decision of the batch; then the rows that are stored are put into ``RowSets``, then
``follow`` names what those lead to (the conversation of a trigger that ends), and that is put there too. What is named
and no longer there after the batch is to be deleted.
"""

from dataclasses import dataclass, field
from typing import Any, Final

from projections.row_types import (
    AgentRow,
    AttemptKey,
    AttemptRow,
    ConversationKey,
    ConversationRow,
    DecisionIdRow,
    DecisionRow,
    DeletionKey,
    DependencyKey,
    DependencyRow,
    GateKey,
    SiteClaimKey,
    SiteClaimRow,
    SiteDecisionRow,
    SiteDeletionRow,
    SiteGateRow,
    SiteRow,
    TriggerClaimRow,
    TriggerKey,
    TriggerRow,
)
from streams.rules import events, site_events
from streams.rules.messages import Trigger
from streams.rules.site_messages import Claim

_ENDING: Final = (
    events.Finished,
    events.AttemptFailed,
    events.LeaseExpired,
    events.Replied,
    events.Stopped,
    events.Expired,
    events.PayloadLost,
    events.RefusedLater,
)


class RowSets:
    """Rows by table and key; and those that are only ever added."""

    def __init__(self) -> None:
        self.agents: dict[str, AgentRow] = {}
        self.conversations: dict[ConversationKey, ConversationRow] = {}
        self.triggers: dict[TriggerKey, TriggerRow] = {}
        self.attempts: dict[AttemptKey, AttemptRow] = {}
        self.dependencies: dict[DependencyKey, DependencyRow] = {}
        self.trigger_claims: dict[TriggerKey, TriggerClaimRow] = {}
        self.sites: dict[str, SiteRow] = {}
        self.site_gates: dict[GateKey, SiteGateRow] = {}
        self.site_claims: dict[SiteClaimKey, SiteClaimRow] = {}
        self.site_deletions: dict[DeletionKey, SiteDeletionRow] = {}
        self.decisions: list[DecisionRow] = []
        self.decision_ids: list[DecisionIdRow] = []
        self.site_decisions: list[SiteDecisionRow] = []

    def __len__(self) -> int:
        return sum(len(rows) for rows in self.by_table().values())

    def by_table(self) -> dict[str, dict[Any, Any]]:
        """The rows that change, by the name of their table; a key is a string if it has one part, else a tuple."""
        return {
            "agents": self.agents,
            "conversations": self.conversations,
            "triggers": self.triggers,
            "attempts": self.attempts,
            "dependencies": self.dependencies,
            "trigger_claims": self.trigger_claims,
            "sites": self.sites,
            "site_gates": self.site_gates,
            "site_claims": self.site_claims,
            "site_deletions": self.site_deletions,
        }

    def keep_living(self, named: "Named") -> None:
        """What is named is written: drop what of it has ended, and what was added."""
        for conversation_key in named.conversations & self.conversations.keys():
            if not self.conversations[conversation_key].live:
                del self.conversations[conversation_key]
        for trigger_key in named.triggers & self.triggers.keys():
            if self.triggers[trigger_key].ended_at is not None:
                del self.triggers[trigger_key]
        for attempt_key in named.attempts & self.attempts.keys():
            if self.attempts[attempt_key].ended_at is not None:
                del self.attempts[attempt_key]
        self.site_deletions.clear()
        self.decisions = []
        self.decision_ids = []
        self.site_decisions = []


@dataclass(slots=True)
class Named:
    """The keys of the rows that some decisions read or change, by table."""

    agents: set[str] = field(default_factory=set)
    conversations: set[ConversationKey] = field(default_factory=set)
    triggers: set[TriggerKey] = field(default_factory=set)
    attempts: set[AttemptKey] = field(default_factory=set)
    dependencies: set[DependencyKey] = field(default_factory=set)
    trigger_claims: set[TriggerKey] = field(default_factory=set)
    sites: set[str] = field(default_factory=set)
    site_gates: set[GateKey] = field(default_factory=set)
    site_claims: set[SiteClaimKey] = field(default_factory=set)
    site_deletions: set[DeletionKey] = field(default_factory=set)
    _ending: set[TriggerKey] = field(default_factory=set)
    """Triggers that may end."""

    def add(self, decision: events.Decision | site_events.SiteDecision) -> None:
        if isinstance(decision, events.Decision):
            self._add(decision)
        else:
            self._add_of_site(decision)

    def _add(self, decision: events.Decision) -> None:
        agent_id = decision.agent_id
        self.agents.add(agent_id)
        for event in decision.events:
            trigger_id = getattr(event, "trigger_id", None)
            if trigger_id is not None and not isinstance(event, events.OF_OTHERS):
                self.triggers.add((agent_id, trigger_id))
                execution_id = getattr(event, "execution_id", None)
                if execution_id is not None:
                    self.attempts.add((agent_id, trigger_id, execution_id))
                if isinstance(event, _ENDING):
                    self._ending.add((agent_id, trigger_id))
            if isinstance(event, events.Accepted) and isinstance(decision.command, Trigger):
                self.conversations.add((agent_id, decision.command.conversation_id))
                self._add_dependencies((agent_id, decision.command.id), len(set(decision.command.depends_on or ())))
            elif isinstance(event, events.Claimed):
                self.trigger_claims.add((agent_id, event.trigger_id))
            elif isinstance(event, events.Forgotten):
                self.conversations.update((agent_id, id) for id in event.conversations)

    def _add_dependencies(self, key: TriggerKey, count: int) -> None:
        self.dependencies.update((*key, position) for position in range(count))

    def _add_of_site(self, decision: site_events.SiteDecision) -> None:
        site, command = decision.site, decision.command
        self.sites.add(site)
        for event in decision.events:
            agent_id, trigger_id = getattr(event, "agent_id", None), getattr(event, "trigger_id", None)
            if agent_id is not None and trigger_id is not None:
                self.site_claims.add((site, agent_id, trigger_id))
            match event:
                case site_events.ClaimOpened() if isinstance(command, Claim):
                    if command.organization_id is not None:
                        self.site_gates.add((site, "organization", command.organization_id))
                    if command.department_id is not None:
                        self.site_gates.add((site, "department", command.department_id))
                case site_events.ClaimGranted(passed_agent_id=str(passed_agent), passed_trigger_id=str(passed)):
                    self.site_claims.add((site, passed_agent, passed))
                case site_events.GateChanged():
                    self.site_gates.add((site, event.scope, event.name))
                case site_events.FolderDeleted():
                    self.site_deletions.add((site, event.environment_id, event.path))
                case _:
                    pass

    def follow(self, rows: RowSets) -> None:
        """Name what the rows lead to that are named so far and known."""
        for key in self.triggers & rows.triggers.keys():
            trigger = rows.triggers[key]
            if key in self._ending:
                self.conversations.add((key[0], trigger.conversation_id))
            if trigger.needs_site:
                self.trigger_claims.add(key)
            if trigger.dependencies:
                self._add_dependencies(key, trigger.dependencies)
        for claim_key in self.site_claims & rows.site_claims.keys():
            self.site_gates.update(rows.site_claims[claim_key].gates)
