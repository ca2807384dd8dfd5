"""Why one trigger started before another: whose place in the order was older, or what let the younger one by."""

from dataclasses import dataclass
from typing import Final, Literal

from streams.audit.causes import Cause, TriggerId, causes
from streams.audit.logged import Logged
from streams.audit.past import Past
from streams.rules import events, site_events
from streams.rules.messages import Trigger
from streams.rules.order import OrderKey

FULL: Final = "agent_parallelism_limit_reached"
Rule = Literal[
    "older_available_at",
    "older_created_at",
    "smaller_id",
    "other_was_not_there",
    "other_had_ended",
    "forced",
    "other_could_not_start",
    "neither_started",
    "not_explained",
]


@dataclass(frozen=True, slots=True)
class Place:
    """A trigger's place in start order: compared from left to right."""

    available_at: int
    created_at: int
    id: str

    @classmethod
    def of(cls, key: OrderKey) -> "Place":
        return cls(key.available_at, key.created_at, key.id.decode())


@dataclass(frozen=True, slots=True)
class Precedence:
    """``first`` started at ``at`` by decision ``seq`` of its agent. ``causes``: why the other could not start then.

    Of two that did not start, ``first`` is the one before in the order. A place is None where there was no trigger.
    """

    rule: Rule
    first: TriggerId
    second: TriggerId
    at: int
    seq: int
    first_place: Place | None
    second_place: Place | None
    causes: tuple[Cause, ...]


class Comparison:
    """Feed it the decisions of both triggers' agents and of all sites, in causal order."""

    def __init__(self, one: TriggerId, other: TriggerId) -> None:
        self._pair = (one, other)
        self.received: set[TriggerId] = set()
        """Those of the two that were ever asked for."""
        self._past = Past()
        self._ended: set[TriggerId] = set()
        self._found: Precedence | None = None
        self._at_grant: dict[TriggerId, list[Cause]] = {}
        """Why the other one waited when this one's claim was granted: between agents, the site's order counts."""

    def take(self, logged: Logged) -> None:
        """The next decision. Raises DoesNotFit."""
        decision = logged.decision
        if isinstance(decision, events.Decision) and isinstance(decision.command, Trigger):
            asked_for = TriggerId(decision.agent_id, decision.command.id)
            if asked_for in self._pair:
                self.received.add(asked_for)
        if not isinstance(decision, events.Decision):
            for change in decision.events:
                if isinstance(change, site_events.ClaimGranted):
                    self._granted(TriggerId(change.agent_id, change.trigger_id), decision.at)
            self._past.fold(logged)
            return
        if self._found is not None:
            self._past.fold(logged)
            return
        started = self._started(decision)
        if started is None:
            self._past.fold(logged)
        else:
            second = next(one for one in self._pair if one != started)
            why = self._at_grant.get(started) or self._causes(second, decision.at)
            was_there = self._place(second) is not None
            self._past.fold(logged)
            self._found = self._judge(started, second, decision, why, was_there)
        for event in decision.events:
            if isinstance(event, events.Stopped | events.Expired | events.RefusedLater | events.Finished):
                self._ended.add(TriggerId(decision.agent_id, event.trigger_id))

    def _granted(self, one: TriggerId, at: int) -> None:
        if one in self._pair:
            self._at_grant[one] = self._causes(next(other for other in self._pair if other != one), at)

    def precedence(self) -> Precedence | None:
        """Why the one that started first did; None: neither started, and not both wait."""
        if self._found is not None:
            return self._found
        places = [(place, one) for one in self._pair if (place := self._place(one)) is not None]
        if len(places) < 2:
            return None
        (first_place, first), (second_place, second) = sorted(
            places, key=lambda item: (item[0].available_at, item[0].created_at, item[0].id.encode())
        )
        why = tuple(self._causes(second, self._past.at))
        at = self._past.at
        return Precedence("neither_started", first, second, at, 0, first_place, second_place, why)

    def _started(self, decision: events.Decision) -> TriggerId | None:
        for event in decision.events:
            if isinstance(event, events.Dispatched):
                started = TriggerId(decision.agent_id, event.trigger_id)
                if started in self._pair:
                    return started
        return None

    def _place(self, one: TriggerId) -> Place | None:
        agent = self._past.agents.get(one.agent_id)
        row = agent.triggers.get(one.trigger_id) if agent is not None else None
        return None if row is None else Place.of(row.key)

    def _causes(self, one: TriggerId, at: int) -> list[Cause]:
        agent = self._past.agents.get(one.agent_id)
        row = agent.triggers.get(one.trigger_id) if agent is not None else None
        if agent is None or row is None or row.state != "waiting":
            return []
        return causes(self._past.facts(agent), row, at)

    def _judge(
        self, first: TriggerId, second: TriggerId, decision: events.Decision, why: list[Cause], was_there: bool
    ) -> Precedence:
        dispatched = next(
            event
            for event in decision.events
            if isinstance(event, events.Dispatched) and event.trigger_id == first.trigger_id
        )
        one, other = self._place(first), self._place(second)
        if first.agent_id == second.agent_id and not dispatched.forced:
            why = [cause for cause in why if cause.reason != FULL]  # the slot that the first one got was free
        rule: Rule
        if second in self._ended:
            rule = "other_had_ended"
        elif other is None or (not was_there and first.agent_id != second.agent_id):
            rule = "other_was_not_there"
        elif one is not None and (older := _older(one, other)) is not None:
            rule = older
        elif dispatched.forced:
            rule = "forced"
        elif why:
            rule = "other_could_not_start"
        else:
            rule = "not_explained"
        return Precedence(rule, first, second, decision.at, decision.seq, one, other, tuple(why))


def _older(one: Place, other: Place) -> Rule | None:
    """What makes the one older than the other; None: it isn't."""
    if one.available_at != other.available_at:
        return "older_available_at" if one.available_at < other.available_at else None
    if one.created_at != other.created_at:
        return "older_created_at" if one.created_at < other.created_at else None
    return "smaller_id" if one.id.encode() < other.id.encode() else None
