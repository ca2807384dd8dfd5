"""How long each cause held work up, over a stretch of history: per agent, organization and site.

At every instant a waiting trigger is counted under one cause, the first by the precedence of refusals (B3), for as long
as that is the first. After a decision only those are looked at again whom it may concern: what its events name, the new
heads of their conversations, everything of an agent whose pause, budget or mute sites changed, its claims and what
waits for a mute site when it becomes full or isn't any more, and at a site what waits in an environment in which a
folder was taken or freed, behind a gate that moved, or for a worker when the pool becomes full or isn't any more.

Thousands of one conversation can wait without a place in it (for an approval, for their time) while others of it come
and go, and each of these has all of them wait for itself instead. They aren't looked at for that: what counts is what
each would wait for if the conversation were idle, and how long it was busy meanwhile is taken off when that ends.
"""

import heapq
from collections import Counter
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from streams.audit.causes import Reason, Trigger, TriggerId, first_cause
from streams.audit.folded_facts import FoldedFacts
from streams.audit.logged import Logged
from streams.audit.past import Past
from streams.rules import events, site_events
from streams.rules.agent.state import Agent
from streams.rules.order import SECOND, OrderKey
from streams.rules.site.rows import ClaimId
from streams.rules.site.state import Site

OWN_TIME: Final = "not_yet_available"
"""What waits for its own time is held up by nobody: listed, and not part of the shares."""

Dimension = Literal["agent", "organization", "site"]


class Counted(NamedTuple):
    """Under what a time is added up."""

    agent_id: str
    organization_id: str | None
    site_id: str | None
    reason: Reason


@dataclass(frozen=True, slots=True)
class Share:
    """``seconds``: of all triggers together. ``share``: of what was waited for others; None: for its own time."""

    reason: Reason
    seconds: float
    share: float | None


@dataclass(frozen=True, slots=True)
class WaitingOf:
    """An agent, organization or site, or ``all``; the cause that took longest comes first, its own time at the end."""

    name: str
    seconds: float
    shares: tuple[Share, ...]


class _Idle(FoldedFacts):
    """The facts as if the conversation of the trigger asked about had no head."""

    __slots__ = ()

    def before(self, trigger: Trigger) -> None:
        """Nobody."""


@dataclass(slots=True, eq=False)
class _Busy:
    """How long a conversation has had a head, since something of it waits without a place. Microseconds."""

    time: int = 0
    """Up to the last change."""
    from_at: int | None = None
    """None: it has no head now."""

    def changed(self, has_head: bool, at: int) -> None:
        if has_head != (self.from_at is not None):
            self.time, self.from_at = self.time_at(at), at if has_head else None

    def time_at(self, at: int) -> int:
        return self.time if self.from_at is None else self.time + max(0, at - self.from_at)


@dataclass(slots=True)
class _Waiting:
    counted: Counted | None
    """None: it was about to start."""
    from_at: int
    until: int | None
    behind: Counted | None = None
    """Under what the time counts in which its conversation is busy, if it has no place there."""
    busy: _Busy | None = None
    busy_before: int = 0
    """The conversation's time when this began."""


class WaitingTimes:
    """Feed it all decisions in causal order, then ask ``by``. Only what lies between the two instants is counted."""

    def __init__(self, since: int = 0, until: int | None = None) -> None:
        self.times: Counter[Counted] = Counter()
        """Microseconds."""
        self._since, self._until = since, until
        self._past = Past()
        self._waiting: dict[TriggerId, _Waiting] = {}
        self._unsettled: dict[TriggerId, None] = {}
        """Those whose cause can end without a word in the log."""
        self._timed: list[tuple[int, TriggerId]] = []
        self._flags: dict[str, object] = {}
        self._full_from: dict[str, OrderKey | None] = {}
        """By agent: what is younger finds it full."""
        self._pool_is_full: dict[str, bool] = {}
        self._places: dict[tuple[str, str], dict[ClaimId, None]] = {}
        """(site, environment) -> claims that wait there for a folder."""
        self._busy: dict[tuple[str, str], _Busy] = {}
        """(agent, conversation) -> those of which something waits without a place."""

    def take(self, logged: Logged) -> None:
        """The next decision. Raises DoesNotFit."""
        decision = logged.decision
        self._own_time_came(decision.at)
        if isinstance(decision, events.Decision):
            agent = self._past.agent(decision.agent_id)
            conversations = _conversations(agent, decision)
            self._past.fold(logged)
            concerned = self._concerned(agent, decision, conversations)
        else:
            environments = self._environments(decision)
            self._past.fold(logged)
            concerned = self._concerned_at_site(self._past.sites[decision.site], decision, environments)
        for one in (*concerned, *self._unsettled):
            self._look(one, decision.at)

    def _own_time_came(self, at: int) -> None:
        """What waited for its own time waits for something else from then on; nobody had to decide anything."""
        while self._timed and self._timed[0][0] <= at:
            until, one = heapq.heappop(self._timed)
            waiting = self._waiting.get(one)
            if waiting is not None and waiting.until == until:
                self._look(one, until)

    def finish(self) -> None:
        """The log is at its end: what waits has waited up to it."""
        for one in list(self._waiting):
            self._settle(one, self._past.at)

    def by(self, dimension: Dimension) -> list[WaitingOf]:
        """Per agent, organization or site, those that waited longest first; without those that have none."""
        found: dict[str, Counter[Reason]] = {}
        for counted, time in self.times.items():
            names = {"agent": counted.agent_id, "organization": counted.organization_id, "site": counted.site_id}
            name = names[dimension]
            if name is not None:
                found.setdefault(name, Counter())[counted.reason] += time
        return sorted((_shares(name, times) for name, times in found.items()), key=lambda one: (-one.seconds, one.name))

    def total(self) -> WaitingOf:
        """Of everything."""
        times: Counter[Reason] = Counter()
        for counted, time in self.times.items():
            times[counted.reason] += time
        return _shares("all", times)

    # Whom a decision may concern

    def _concerned(self, agent: Agent, decision: events.Decision, conversations: set[str]) -> list[TriggerId]:
        row = agent.row
        named: dict[str, None] = {}
        budget = agent.budget_left, row.run_budget == 0
        flags = row.archived, row.paused, row.parked is not None, budget, tuple(agent.mute)
        if self._flags.get(agent.agent_id) != flags:
            self._flags[agent.agent_id] = flags
            named = {key.id.decode(): None for key in agent.waiting}
        full = _full_from(agent)
        if self._full_from.get(agent.agent_id) != full:
            self._full_from[agent.agent_id] = full
            named |= dict.fromkeys(trigger_id for _, trigger_id in agent.claimed)
            for site in agent.mute:  # nothing more is claimed there
                named |= {key.id.decode(): None for key in agent.ready.get(site, ())}
        for trigger_id in _named(decision):
            named[trigger_id] = None
            live = agent.triggers.get(trigger_id)
            if live is not None:
                conversations.add(live.conversation_id)
        for conversation_id in sorted(conversations):
            head = agent.head(conversation_id)
            if head is not None:
                named[head.trigger_id] = None
            self._follow(agent, conversation_id, head is not None, decision.at)
        return [TriggerId(agent.agent_id, trigger_id) for trigger_id in named]

    def _follow(self, agent: Agent, conversation_id: str, has_head: bool, at: int) -> None:
        """Note whether a conversation is busy, for those that wait without a place in it."""
        key, line = (agent.agent_id, conversation_id), agent.lines.get(conversation_id)
        if line is not None and line.unplaced:
            self._busy.setdefault(key, _Busy()).changed(has_head, self._inside(at))
        elif (gone := self._busy.pop(key, None)) is not None:
            gone.changed(False, self._inside(at))

    def _environments(self, decision: site_events.SiteDecision) -> set[str]:
        """Of claims that this decision grants or ends, before it is folded."""
        site = self._past.site(decision.site)
        found = set()
        for event in decision.events:
            if isinstance(event, site_events.ClaimGranted | site_events.ClaimClosed | site_events.ClaimDenied):
                claim = site.claims.get(ClaimId(event.agent_id, event.trigger_id))
                environment_id = claim.environment_id if claim is not None else None
                if environment_id is not None:
                    found.add(environment_id)
                    waiting = self._places.get((decision.site, environment_id), {})
                    waiting.pop(ClaimId(event.agent_id, event.trigger_id), None)
        return found

    def _concerned_at_site(
        self, site: Site, decision: site_events.SiteDecision, environments: set[str]
    ) -> list[TriggerId]:
        found: dict[ClaimId, None] = {}
        pool_is_full = site.pool_used >= site.row.capacity
        if self._pool_is_full.get(site.site_id) != pool_is_full:
            self._pool_is_full[site.site_id] = pool_is_full
            found |= dict.fromkeys(id for id, claim in site.claims.items() if claim.worker)
        for event in decision.events:
            if isinstance(event, site_events.WalkNoted):
                walked = list(site.walk(event.walk, ("", ""), len(site.claims)))
                found |= dict.fromkeys(claim.id for claim in walked)
                environments |= {claim.environment_id for claim in walked if claim.environment_id is not None}
            elif isinstance(event, site_events.SiteConfigured):
                found |= dict.fromkeys(site.claims)
            elif not isinstance(event, _OF_SITE):
                id = ClaimId(event.agent_id, event.trigger_id)
                found[id] = None
                claim = site.claims.get(id)
                if claim is not None and claim.environment_id is not None:
                    environments.add(claim.environment_id)
                    if not claim.granted:
                        self._places.setdefault((site.site_id, claim.environment_id), {})[id] = None
        for environment_id in sorted(environments):
            found |= self._places.get((site.site_id, environment_id), {})
        return [TriggerId(*id) for id in found]

    # Adding up

    def _look(self, one: TriggerId, at: int) -> None:
        agent = self._past.agents.get(one.agent_id)
        row = agent.triggers.get(one.trigger_id) if agent is not None else None
        if agent is None or row is None or row.state != "waiting":
            self._settle(one, at)
            return
        facts, behind, busy = self._past.facts(agent), None, None
        if row.place is None and not agent.held_back:
            facts = _Idle(agent, self._past.sites, self._past.agents)
            behind = Counted(one.agent_id, row.organization_id, row.site_id, "conversation_busy")
            busy = self._busy[one.agent_id, row.conversation_id]
        cause = first_cause(facts, row, at)
        counted = None if cause is None else Counted(one.agent_id, row.organization_id, row.site_id, cause.reason)
        until = None if cause is None else cause.until
        before = self._waiting.get(one)
        if before is not None and (before.counted, before.until) == (counted, until) and before.busy is busy:
            return
        self._settle(one, at)
        busy_before = busy.time_at(self._inside(at)) if busy is not None else 0
        self._waiting[one] = _Waiting(counted, at, until, behind, busy, busy_before)
        if cause is None or (cause.site is not None and row.claim_state != "standing"):
            self._unsettled[one] = None
        if until is not None:
            heapq.heappush(self._timed, (until, one))

    def _settle(self, one: TriggerId, at: int) -> None:
        waiting = self._waiting.pop(one, None)
        self._unsettled.pop(one, None)
        if waiting is None:
            return
        time = max(0, self._inside(at) - self._inside(waiting.from_at))
        if waiting.behind is not None and waiting.busy is not None:
            busy_time = min(time, max(0, waiting.busy.time_at(self._inside(at)) - waiting.busy_before))
            time -= busy_time
            self._add(waiting.behind, busy_time)
        if waiting.counted is not None:
            self._add(waiting.counted, time)

    def _add(self, counted: Counted, time: int) -> None:
        if time > 0:
            self.times[counted] += time

    def _inside(self, at: int) -> int:
        """The instant of the stretch that is nearest."""
        return max(self._since, at if self._until is None else min(at, self._until))


def _named(decision: events.Decision) -> list[str]:
    """The agent's own triggers that the events are about: watchers are those of others."""
    found = (getattr(event, "trigger_id", None) for event in decision.events if not isinstance(event, events.OF_OTHERS))
    return [trigger_id for trigger_id in found if trigger_id is not None]


def _conversations(agent: Agent, decision: events.Decision) -> set[str]:
    """Of the triggers that are named, before the decision ends some of them: another one may become their head."""
    rows = (agent.triggers.get(trigger_id) for trigger_id in _named(decision))
    return {row.conversation_id for row in rows if row is not None}


_OF_SITE: Final = (
    site_events.SitePaused,
    site_events.SiteResumed,
    site_events.GateChanged,
    site_events.FolderDeleted,
)


def _full_from(agent: Agent) -> OrderKey | None:
    """The claim whose slot fills the agent: younger triggers find it full; None: none does."""
    if agent.limit is None:
        return None
    left = agent.limit - agent.running
    if left <= 0:
        return _OLDEST
    return agent.asking[left - 1] if len(agent.asking) >= left else None


_OLDEST: Final = OrderKey(0, 0, b"")
"""Before all."""


def _shares(name: str, times: Counter[Reason]) -> WaitingOf:
    total = sum(time for reason, time in times.items() if reason != OWN_TIME)
    return WaitingOf(
        name,
        total / SECOND,
        tuple(
            Share(reason, time / SECOND, None if reason == OWN_TIME else time / total if total else 0.0)
            for reason, time in sorted(times.items(), key=lambda item: (item[0] == OWN_TIME, -item[1], item[0]))
        ),
    )
