"""What the log holds of a stretch of time as traffic: who asked for what and when, and how long attempts took.

Decisions are taken apart into what came from outside (arrivals: they come again in a replay), what runners did (an
attempt's outcome and duration: it is repeated for the attempt of the same number, whenever that starts), and what the
deciders made of it (thrown away: they decide anew). Some arrivals answered what had just happened: a reply or a resume
to a question, a trigger that a running attempt created. They belong to that attempt and come as long after its start.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from pydantic import BaseModel

from streams import CLAIMS, CONTROLS, SIGNALS, SITE_CONTROLS, TRIGGERS
from streams.audit.logged import Decider, Logged
from streams.audit.past import Past
from streams.audit.recompute import KNOWN_POLICIES
from streams.rules import events, limits
from streams.rules.messages import Control, ResumeTrigger, Stop, Trigger
from streams.rules.site_messages import Claim, Internal, Release, SiteControl

_NEVER_REPEATED: Final = frozenset({"invalid_record", "request_expired", "trigger_id_conflict"})
"""Refusals of records that would be refused whatever the policy is."""


class AttemptId(NamedTuple):
    agent_id: str
    trigger_id: str
    attempt: int


class Arrival(NamedTuple):
    """A command that came from outside. ``default_limit``: the deployment's at that time, where it was used."""

    at: int
    topic: str
    command: Trigger | Stop | Control | SiteControl | Internal
    is_http: bool
    default_limit: int | Literal["unlimited"] | None


Outcome = Literal["finished", "failed", "paused", "stopped", "open"]


@dataclass(slots=True)
class Attempt:
    """How an attempt went. ``stopped_after``: from the request to stop it to its end; None: nobody asked.

    ``open``: it had not ended when the log did; it lasted at least ``duration`` (microseconds), as did one that was
    asked to stop.
    """

    outcome: Outcome
    duration: int
    retryable: bool = True
    stopped_after: int | None = None
    reactions: list[tuple[int, Arrival]] = field(default_factory=list)
    """(time after the dispatch, what came then)."""


class _Running(NamedTuple):
    id: AttemptId
    dispatched_at: int


@dataclass(slots=True)
class Wait:
    """From when a trigger could have started to when it did first, microseconds; None: not yet."""

    from_at: int
    organization_id: str | None
    started_at: int | None = None


class Traffic:
    """Feed it all decisions in causal order; ``until`` is the end of the stretch, the log should go on after it."""

    def __init__(self, since: int, until: int) -> None:
        self.since, self.until = since, until
        self.past = Past()
        """As it was at ``since``."""
        self.arrivals: list[Arrival] = []
        self.under_way: list[Arrival] = []
        """What deciders had told each other before ``since`` and had not handled."""
        self.attempts: dict[AttemptId, Attempt] = {}
        self.running_at_start: dict[str, int] = {}
        """Execution id -> how long it had been running at ``since``."""
        self.waits: dict[tuple[str, str], Wait] = {}
        """As they were recorded, of triggers that started or waited in the stretch."""
        self.pool_default = 4
        self.sites: set[str] = set()
        """That decided anything, before or in the stretch."""
        self.decisions = 0
        self.begins_at = until
        """Of the first decision in it, or ``since`` when there were some before."""
        self.last_at = 0
        self.policies: Counter[str] = Counter()
        """Decisions of the stretch by policies that this version doesn't know."""
        self._running: dict[str, _Running] = {}
        self._stop_asked: dict[str, int] = {}
        self._last_of: dict[tuple[str, str], _Running] = {}
        """Newest attempt of a live trigger."""
        self._seqs: dict[Decider, int] = {}
        self._is_open = False

    def take(self, logged: Logged) -> None:
        """The next decision. Raises DoesNotFit."""
        decision = logged.decision
        self.last_at = max(self.last_at, decision.at)
        if decision.at <= self.since:
            self.past.fold(logged)
            self._seqs[logged.decider] = decision.seq
        elif not self._is_open:
            self._open()
        if logged.decider.kind == "site" and decision.at <= self.until:
            self.sites.add(logged.decider.id)
        if decision.at > self.since and decision.at <= self.until:
            self._take_in(logged)
        if isinstance(decision, events.Decision):
            self._follow(decision)

    def finish(self) -> None:
        """The log is at its end: attempts that run are open."""
        if not self._is_open:
            self._open()
        for running in self._running.values():
            self._note(running, "open", self.last_at, True, None)

    def _open(self) -> None:
        self._is_open = True
        self.begins_at = self.since if self.past.decisions else min(self.last_at, self.until)
        self.running_at_start = {id: self.since - one.dispatched_at for id, one in self._running.items()}
        for agent in self.past.agents.values():
            for row in agent.triggers.values():
                if row.state == "waiting" and row.attempt == 0:
                    key = agent.agent_id, row.trigger_id
                    self.waits[key] = Wait(max(row.accepted_at, row.available_at), row.organization_id)

    def _take_in(self, logged: Logged) -> None:
        decision, command = logged.decision, logged.decision.command
        self.decisions += 1
        if decision.policy not in KNOWN_POLICIES:
            self.policies[decision.policy] += 1
        cause = logged.cause
        if cause is not None:
            if cause[1] <= self._seqs.get(cause[0], 0):
                assert isinstance(command, Internal)
                topic = CLAIMS.name if isinstance(command, Claim | Release) else SIGNALS.name
                self.under_way.append(Arrival(self.since, topic, command, False, None))
        elif isinstance(command, Trigger | Stop | Control | SiteControl):
            repeats = decision.ignored is not None and decision.ignored.reason == "duplicate"
            refused = decision.refusal is not None and decision.refusal.code in _NEVER_REPEATED
            if not repeats and not refused:
                self._arrived(decision.at, command, decision)
        if not isinstance(decision, events.Decision):
            for event in decision.events:
                if event.type == "site_configured" and decision.seq == 1:
                    self.pool_default = event.capacity

    def _arrived(self, at: int, command: Trigger | Stop | Control | SiteControl, decision: BaseModel) -> None:
        topic = (
            TRIGGERS.name
            if isinstance(command, Trigger | Stop)
            else SITE_CONTROLS.name
            if isinstance(command, SiteControl)
            else CONTROLS.name
        )
        is_http = getattr(decision, "via", None) == "http"
        arrival = Arrival(at, topic, command, is_http, getattr(command, "default_limit", None))
        caused_by = self._caused_by(command, decision)
        if caused_by is None or caused_by.dispatched_at <= self.since:
            self.arrivals.append(arrival)
        else:
            attempt = self.attempts.setdefault(caused_by.id, Attempt("open", 0))
            attempt.reactions.append((at - caused_by.dispatched_at, arrival))

    def _caused_by(self, command: object, decision: BaseModel) -> _Running | None:
        """The attempt that the command reacted to, as far as the log shows it."""
        if isinstance(command, Trigger) and isinstance(decision, events.Decision):
            replied = next((event for event in decision.events if isinstance(event, events.Replied)), None)
            if replied is not None:
                return self._last_of.get((decision.agent_id, replied.trigger_id))
            if command.parent is not None:
                return self._last_of.get((command.parent.agent_id, command.parent.trigger_id))
        if isinstance(command, ResumeTrigger):
            return self._last_of.get((command.agent_id, command.trigger_id))
        return None

    # Attempts and waits, before, in and after the stretch

    def _follow(self, decision: events.Decision) -> None:
        agent_id, at, command = decision.agent_id, decision.at, decision.command
        for event in decision.events:
            if isinstance(event, events.Accepted) and self.since < at <= self.until and isinstance(command, Trigger):
                wait = Wait(max(at, event.available_at), command.organization_id)
                self.waits[agent_id, event.trigger_id] = wait
            elif isinstance(event, events.Dispatched):
                self._started(agent_id, event, at)
            elif isinstance(event, events.StopRequested):
                self._stop_asked[event.execution_id] = at
            elif isinstance(event, events.RefusedLater):
                self.waits.pop((agent_id, event.trigger_id), None)
            elif (ending := _ending(event)) is not None:
                self._ended(ending.execution_id, ending.outcome, at, ending.retryable)
                self._never_started((agent_id, ending.trigger_id), at)
                if ending.is_final:
                    self._last_of.pop((agent_id, ending.trigger_id), None)

    def _never_started(self, key: tuple[str, str], at: int) -> None:
        """A trigger that was stopped or expired before it could start waits for nothing that could be compared."""
        wait = self.waits.get(key)
        if wait is not None and wait.started_at is None and at <= self.until:
            del self.waits[key]

    def _started(self, agent_id: str, event: events.Dispatched, at: int) -> None:
        started = _Running(AttemptId(agent_id, event.trigger_id, event.attempt), at)
        self._running[event.execution_id] = self._last_of[agent_id, event.trigger_id] = started
        wait = self.waits.get((agent_id, event.trigger_id))
        if event.attempt == 1 and at <= self.until and wait is not None:
            wait.started_at = at

    def _ended(self, execution_id: str | None, outcome: Outcome, at: int, retryable: bool) -> None:
        running = self._running.pop(execution_id, None) if execution_id is not None else None
        if execution_id is not None and running is not None:
            self._note(running, outcome, at, retryable, self._stop_asked.pop(execution_id, None))

    def _note(self, running: _Running, outcome: Outcome, at: int, retryable: bool, stop_asked: int | None) -> None:
        if at <= self.since:
            return
        attempt = self.attempts.setdefault(running.id, Attempt("open", 0))
        attempt.outcome, attempt.duration, attempt.retryable = outcome, at - running.dispatched_at, retryable
        attempt.stopped_after = None if stop_asked is None else at - stop_asked


class _Ending(NamedTuple):
    """An attempt, a trigger, or both end. ``execution_id`` None: no attempt ran."""

    trigger_id: str
    execution_id: str | None
    outcome: Outcome
    retryable: bool = True
    is_final: bool = True


def _ending(event: events.Event) -> _Ending | None:
    match event:
        case events.Finished():
            return _Ending(event.trigger_id, event.execution_id, "finished")
        case events.AttemptFailed():
            return _Ending(event.trigger_id, event.execution_id, "failed", not event.final, event.final)
        case events.LeaseExpired():
            is_final = event.final is not None
            return _Ending(event.trigger_id, event.execution_id, "failed", not is_final, is_final)
        case events.TriggerPaused():
            return _Ending(event.trigger_id, event.execution_id, "paused", is_final=False)
        case events.Stopped():
            return _Ending(event.trigger_id, event.execution_id, "stopped")
        case events.PayloadLost() if event.final:
            return _Ending(event.trigger_id, None, "failed", retryable=False)
        case events.Expired() | events.Replied():
            return _Ending(event.trigger_id, None, "stopped")
        case _:
            return None


def recorded(log: Iterable[Logged], since: int, until: int) -> Traffic:
    """The traffic of a stretch of time in a log that is read to its end. Raises DoesNotFit."""
    traffic = Traffic(since, until)
    for logged in log:
        traffic.take(logged)
    traffic.finish()
    return traffic


def value_of(command: BaseModel) -> bytes:
    """A command as its sender would write it, without texts and without what a decider or a runner promised.

    Leases are taken away: how often a runner gave signs of life is not in the log. An attempt that was lost is repeated
    as one that failed at the same time.
    """
    if isinstance(command, Trigger):
        command = command.model_copy(update={"timeout_seconds": limits.TIMEOUT_SECONDS_MAX})
    left_out = {"message", "payload", "default_limit", "repeats", "heartbeat_seconds"}
    written: bytes = command.__pydantic_serializer__.to_json(command, exclude_unset=True, exclude=left_out)
    return written
