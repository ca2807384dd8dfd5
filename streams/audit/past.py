"""Agents and sites as they were after the decisions folded so far: events alone, through the deciders' own ``evolve``.

What the log doesn't hold is not known: signs of life between decisions (a lease is that of the dispatch), and how far
left-over work had come inside of a step. A gate that opens or closes shows or hides all of its claims at once here,
which the decider does in bounded steps; nothing is granted in between, so nobody can tell.
"""

from streams.audit.folded_facts import FoldedFacts
from streams.audit.logged import Logged
from streams.rules import events, site_events
from streams.rules.agent import evolve as agent_evolve
from streams.rules.agent.rows import TriggerRow
from streams.rules.agent.state import Agent
from streams.rules.messages import Continue
from streams.rules.site import evolve as site_evolve
from streams.rules.site.rows import ClaimRow
from streams.rules.site.state import Site
from streams.rules.site_messages import ContinueSite


class FoldedAgent(Agent):
    """Only folded: nobody writes its rows or keeps its timers, so it isn't noted which of them changed."""

    __slots__ = ()

    def touch(self, row: TriggerRow, at: int) -> None:
        """Nothing."""


class FoldedSite(Site):
    """The same of a site."""

    __slots__ = ()

    def touch(self, claim: ClaimRow) -> None:
        """Nothing."""


class DoesNotFit(ValueError):  # noqa: N818 - it reads as what it is
    """A decision contradicts those before it: the log is damaged, and what follows can't be known."""

    def __init__(self, logged: Logged, why: str) -> None:
        super().__init__(
            f"{logged.topic} partition {logged.partition}, offset {logged.offset}: decision {logged.decision.seq} of "
            f"{logged.decider.id!r} doesn't fit those before it: {why}"
        )
        self.logged = logged


class Past:
    """The state of every decider whose decisions were folded. ``at``: the latest instant of them, 0: none."""

    def __init__(self) -> None:
        self.agents: dict[str, Agent] = {}
        self.sites: dict[str, Site] = {}
        self.at = 0
        self.decisions = 0

    def fold(self, logged: Logged) -> None:
        """Apply one decision. Raises DoesNotFit; then the fold can't go on."""
        decision = logged.decision
        try:
            if isinstance(decision, events.Decision):
                fold_agent(self.agent(decision.agent_id), decision)
            else:
                fold_site(self.site(decision.site), decision)
        except (AssertionError, KeyError, ValueError) as error:
            raise DoesNotFit(logged, f"{type(error).__name__} {error}") from error
        self.at = max(self.at, decision.at)
        self.decisions += 1

    def agent(self, agent_id: str) -> Agent:
        agent = self.agents.get(agent_id)
        if agent is None:
            agent = self.agents[agent_id] = Agent(agent_id)
        return agent

    def facts(self, agent: Agent) -> FoldedFacts:
        """Why the agent's triggers wait; the decisions of all sites must be among those folded."""
        return FoldedFacts(agent, self.sites, self.agents)

    def site(self, site_id: str) -> Site:
        site = self.sites.get(site_id)
        if site is None:
            site = self.sites[site_id] = Site(site_id)
        return site


def fold_agent(agent: Agent, decision: events.Decision) -> None:
    """Apply a decision's events. AssertionError, KeyError or ValueError: it doesn't fit."""
    assert decision.seq == agent.row.seq + 1, f"decision {agent.row.seq + 1} is missing"
    if not isinstance(decision.command, Continue):
        agent.row.todo = agent.row.todo_conversation_id = None
    origin = agent_evolve.Origin(decision.seq, decision.at, decision.command)
    for event in decision.events:
        agent_evolve.evolve(agent, event, origin)
    agent_evolve.settle(agent, decision.command, decision.seq, decision.at, decision.refusal, decision.ignored)
    agent.changed.clear()
    agent.deadlines.clear()
    agent.ended.clear()


def fold_site(site: Site, decision: site_events.SiteDecision) -> None:
    """Apply a decision's events. AssertionError, KeyError or ValueError: it doesn't fit."""
    assert decision.seq == site.row.seq + 1, f"decision {site.row.seq + 1} is missing"
    if not isinstance(decision.command, ContinueSite):
        site.row.todo.clear()
    origin = site_evolve.SiteOrigin(decision.at, decision.command)
    for event in decision.events:
        site_evolve.evolve(site, event, origin)
        if isinstance(event, site_events.WalkNoted):
            walk_through(site, event.walk)
    site_evolve.settle(site, decision.command, decision.seq, decision.at, decision.refusal, decision.ignored)
    site.changed.clear()


def walk_through(site: Site, walk: tuple[str, ...]) -> None:
    """Show the claims whose gates are open now, hide the others."""
    for claim in list(site.walk(walk, ("", ""), len(site.claims))):
        if not claim.granted:
            (site.show if site.is_open(claim) else site.hide)(claim)
