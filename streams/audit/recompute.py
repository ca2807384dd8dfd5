"""Decide logged commands again, on the fold of what came before, and give the bytes that would be written today.

The log alone is enough: a command carries every input that the fold doesn't give. What a deployment decided stands in
the events that used it (the limit of a new agent, the pool of a new site) and is taken from there. A decision of
another policy than this version's is folded, not decided: nobody can say here what other rules would have done.
"""

import hashlib
from collections import Counter
from typing import Final

from pydantic_core import from_json

from streams.audit.past import fold_agent, fold_site
from streams.partition import decision_of
from streams.rules import events, limits, site_events
from streams.rules.agent.decide import decide as decide_agent
from streams.rules.agent.state import Agent
from streams.rules.messages import Continue, LosePayload, Park
from streams.rules.site.decide import decide as decide_site
from streams.rules.site.state import Site
from streams.rules.site_messages import ContinueSite
from streams.sites import site_decision_of

KNOWN_POLICIES: Final = frozenset({limits.POLICY})


class Recomputer:
    """Feed it the decisions of any deciders, each decider's in order from its first.

    ``agents``, ``sites``: as they are after those decisions.
    """

    def __init__(self) -> None:
        self.agents: dict[str, Agent] = {}
        self.sites: dict[str, Site] = {}

    def again(
        self, logged: events.Decision | site_events.SiteDecision, value: bytes, folded: Agent | None = None
    ) -> bytes | None:
        """What the decision would be today; None: its policy is unknown, it was only folded.

        ``value``: its bytes in the log, which the next one's ``prev`` is the digest of. ``folded``: the same agent as
        somebody else keeps it, after this decision. AssertionError, KeyError or ValueError: the rules fail on the
        command, since the log before it is damaged.
        """
        if isinstance(logged, events.Decision):
            agent = self.agents.get(logged.agent_id)
            if agent is None:
                agent = self.agents[logged.agent_id] = Agent(logged.agent_id)
            written = _agent_again(agent, logged, folded)
            agent.row.prev = hashlib.sha256(value).hexdigest()
        else:
            site = self.sites.get(logged.site)
            if site is None:
                site = self.sites[logged.site] = Site(logged.site)
            written = _site_again(site, logged)
            site.row.prev = hashlib.sha256(value).hexdigest()
        return written


def _agent_again(agent: Agent, logged: events.Decision, folded: Agent | None) -> bytes | None:
    if logged.policy not in KNOWN_POLICIES:
        fold_agent(agent, logged)
        return None
    if agent.has_work and not isinstance(logged.command, Continue | Park | LosePayload):
        agent.row.todo = agent.row.todo_conversation_id = agent.row.todo_since = None  # in the end nothing was left
    limit = getattr(logged.command, "default_limit", None)
    step = decide_agent(agent, logged.command, logged.at, logged.via, limits.Defaults(1 if limit is None else limit))
    written = events.write_decision(decision_of(agent, step, logged.cause, logged.via))
    if folded is not None:
        _share(agent, folded)
    agent.changed.clear()
    agent.deadlines.clear()
    agent.ended.clear()
    return written


def _share(agent: Agent, folded: Agent) -> None:
    """Keep once what both have remembered in this decision, and each has found by itself: it is never changed, only
    replaced, and stays for days when all else has long ended.
    """
    for ref in agent.changed:
        if ref.kind == "remembered" and ref.remembered is not None:
            id = ref.remembered, ref.id
            remembered = folded.remembered.get(id)
            if remembered is not None and remembered == agent.remembered.get(id):
                agent.remembered[id] = remembered
        elif ref.kind == "conversation":
            conversation = folded.conversations.get(ref.id)
            if conversation is not None and conversation == agent.conversations.get(ref.id):
                agent.conversations[ref.id] = conversation


def _site_again(site: Site, logged: site_events.SiteDecision) -> bytes | None:
    if logged.policy not in KNOWN_POLICIES:
        fold_site(site, logged)
        return None
    stamped = (event.capacity for event in logged.events if isinstance(event, site_events.SiteConfigured))
    # Who asks for the default and changes nothing has it already.
    defaults = limits.Defaults(pool_capacity=next(stamped, site.row.capacity))
    if not isinstance(logged.command, ContinueSite):
        work_off_silently(site, logged.at)
    step = decide_site(site, logged.command, logged.at, defaults)
    while not step.has_decision and (site.row.todo or site.row.todo_grant):
        step = decide_site(site, logged.command, logged.at, defaults)  # a step of a walk that changed nothing
    written = site_events.write_site_decision(site_decision_of(site, step, logged.cause, logged.via))
    site.changed.clear()
    return written


def work_off_silently(site: Site, at: int) -> None:
    """Walk on over claims to which a gate does nothing, as the site did without a decision before its next command."""
    while site.row.todo or site.row.todo_grant:
        assert not decide_site(site, ContinueSite(), at, _NO_DEFAULTS).has_decision, "left-over work came first"


_NO_DEFAULTS: Final = limits.Defaults(pool_capacity=0)


class Recheck:
    """Whether decisions come out again as they are; for verifiers, which say the first thing that is wrong."""

    def __init__(self, recomputer: Recomputer | None = None) -> None:
        self.recomputer = recomputer or Recomputer()
        self.decisions = 0
        self.unknown: Counter[str] = Counter()
        """Decisions by policies whose rules aren't known here: they were folded only."""

    def wrong(
        self, logged: events.Decision | site_events.SiteDecision, value: bytes, folded: Agent | None = None
    ) -> tuple[str, str] | None:
        """("recomputed", what differs), or None. ``folded``: the agent after it, as the verifier keeps it."""
        try:
            again = self.recomputer.again(logged, value, folded)
        except (AssertionError, KeyError, ValueError) as error:
            return "recomputed", f"the rules fail on its command: {error!r}"
        if again is None:
            self.unknown[logged.policy] += 1
        elif again != value:
            return "recomputed", _difference(from_json(value), from_json(again))
        else:
            self.decisions += 1
        return None


_SHOWN_MAX: Final = 300


def _difference(logged: dict[str, object], again: dict[str, object]) -> str:
    """The first field that differs, as it is and as it would be."""
    for name in [*logged, *again]:
        if logged.get(name) != again.get(name):
            was, would = (str(one.get(name, "absent"))[:_SHOWN_MAX] for one in (logged, again))
            return f"{name} is {was}, deciding its command again gives {would}"
    return "its fields are the same, but not its bytes"
