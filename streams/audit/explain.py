"""One trigger's life over all of its attempts: what happened to it, who acted, and what it waited for, held by whom.

A fold of its agent's decisions and of the sites'. After each decision the trigger's causes are looked at anew: a wait
goes on while its cause holds, whatever changes beside, and its holders come and go within it. When a slot or a worker
passes from one to the next its cause often lets go for less than a millisecond, or another one holds for so long: such
stretches of one cause are told together, and only the time in which it held is counted.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from streams.audit.causes import Cause, Holder, Reason, causes
from streams.audit.logged import Logged
from streams.audit.past import Past
from streams.rules import events
from streams.rules.messages import Control, LosePayload, Park, Status, Stop, Timer, Trigger
from streams.rules.order import SECOND
from streams.rules.site_messages import Internal

RUNNER: Final = "runner"
SHORT: Final = SECOND
"""Stretches of one cause that are shorter, or less apart, are told together."""


@dataclass(frozen=True, slots=True)
class Happened:
    """A decision did this to the trigger. ``facts``: the event's fields, or the refusal's; instants in microseconds."""

    at: int
    seq: int
    what: str
    """The event's type, or ``refused``, ``repeated``, ``ignored``."""
    by: str
    """Who acted: a person or upstream, ``runner``, a timer, a site, another agent."""
    facts: dict[str, Any]


@dataclass(slots=True)
class Held:
    """``holder``: as it was last while it held. ``to_at`` None: still."""

    holder: Holder
    from_at: int
    to_at: int | None = None


@dataclass(slots=True)
class Waited:
    """One cause, for as long as it held without a break but short ones, and without an attempt.

    At most 20 holders at a time; ``to_at`` None: still. ``site``, ``scope`` and ``name``: of whose, where it is a
    site's or a gate's. ``stretches``: how many there are, ``between_seconds``: in which it did not hold.
    """

    reason: Reason
    from_at: int
    to_at: int | None = None
    holders: list[Held] = field(default_factory=list)
    site: str | None = None
    scope: str | None = None
    name: str | None = None
    stretches: int = 1
    between_seconds: float = 0.0

    @property
    def of_what(self) -> "_Key":
        return self.reason, self.site, self.scope, self.name

    def seconds(self, now: int) -> float:
        """For how long the cause held."""
        return ((now if self.to_at is None else self.to_at) - self.from_at) / SECOND - self.between_seconds


@dataclass(frozen=True, slots=True)
class InAll:
    """For how long a cause held over all attempts, until the last decision in the log."""

    reason: Reason
    seconds: float
    site: str | None
    scope: str | None
    name: str | None


@dataclass(frozen=True, slots=True)
class Explained:
    """``at``: how far the log goes; ``state``: the trigger's then. Waits overlap where several causes held at once.

    ``in_all``: the longest first.
    """

    agent_id: str
    trigger_id: str
    conversation_id: str | None
    state: str
    at: int
    timeline: tuple[Happened | Waited, ...]
    in_all: tuple[InAll, ...]


_Key = tuple[Reason, str | None, str | None, str | None]
"""A cause, and the site, scope and name that it is of."""


class Explainer:
    """Feed it the decisions of the trigger's agent and of all sites, in causal order."""

    def __init__(self, agent_id: str, trigger_id: str) -> None:
        self.agent_id, self.trigger_id = agent_id, trigger_id
        self._past = Past()
        self._happened: list[Happened] = []
        self._waited: list[Waited] = []
        self._open: dict[_Key, Waited] = {}
        self._conversation_id: str | None = None
        self._state = "unknown"
        self._dispatched_at: int | None = None
        self._until: int | None = None
        """When a cause that holds now ends by itself."""

    def take(self, logged: Logged) -> None:
        """The next decision. Raises DoesNotFit."""
        decision = logged.decision
        if self._until is not None and self._until <= decision.at:
            self._look(self._until)  # its own time came, and nobody had to decide anything
        self._past.fold(logged)
        if isinstance(decision, events.Decision) and decision.agent_id == self.agent_id:
            self._note(decision)
        self._look(decision.at)

    def explained(self) -> Explained | None:
        """What is known at the end of the log; None: no decision names the trigger."""
        if not self._happened:
            return None
        begun = [one.at for one in self._happened if one.what == "dispatched"]
        waited = _together([one for one in self._waited if one.to_at != one.from_at], begun)
        timeline: list[tuple[int, int, Happened | Waited]] = [(one.at, 0, one) for one in self._happened]
        timeline += [(one.from_at, 1, one) for one in waited]
        return Explained(
            self.agent_id,
            self.trigger_id,
            self._conversation_id,
            self._state,
            self._past.at,
            tuple(one for _, _, one in sorted(timeline, key=lambda item: item[:2])),
            _in_all(waited, self._past.at),
        )

    # What happened

    def _note(self, decision: events.Decision) -> None:
        command = decision.command
        by = who(decision)
        if isinstance(command, Trigger) and command.id == self.trigger_id:
            self._conversation_id = self._conversation_id or command.conversation_id
        about = self._is_about(command)
        if about and decision.refusal is not None:
            what = "refused" if isinstance(command, Trigger) else f"{command.type}_refused"
            facts = decision.refusal.model_dump(exclude_unset=True, exclude={"type", "v"})
            self._add(decision, what, by, facts)
            if isinstance(command, Trigger) and not self._is_known():
                self._state = "refused"
        elif about and decision.ignored is not None:
            what = "repeated" if isinstance(command, Trigger) else f"{command.type}_ignored"
            self._add(decision, what, by, decision.ignored.model_dump(exclude_unset=True, exclude={"type", "v"}))
        for event in decision.events:
            if getattr(event, "trigger_id", None) == self.trigger_id and not _is_of_others(event):
                self._add(decision, event.type, by, self._facts(event, decision))

    def _is_about(self, command: object) -> bool:
        if isinstance(command, Trigger):
            return command.id == self.trigger_id
        return isinstance(command, Stop | Control) and getattr(command, "trigger_id", None) == self.trigger_id

    def _is_known(self) -> bool:
        agent = self._past.agent(self.agent_id)
        return self.trigger_id in agent.triggers or any(one.what == "accepted" for one in self._happened)

    def _facts(self, event: events.Event, decision: events.Decision) -> dict[str, Any]:
        facts = event.model_dump(exclude_unset=True, exclude={"type", "v", "trigger_id"})
        if isinstance(event, events.Accepted) and isinstance(decision.command, Trigger):
            names = ("kind", "on_busy", "worker", "site", "organization_id", "department_id", "parent", "restarts")
            sent = decision.command.model_dump(include=set(names) & decision.command.model_fields_set)
            facts |= sent | {"via": decision.via}
        elif isinstance(event, events.Dispatched):
            self._dispatched_at = decision.at
        elif getattr(event, "execution_id", None) is not None and event.type != "stop_requested":
            if self._dispatched_at is not None:
                facts["ran_seconds"] = (decision.at - self._dispatched_at) / SECOND
            self._dispatched_at = None
        self._state = _STATES.get(event.type, self._state)
        if isinstance(event, events.AttemptFailed | events.LeaseExpired) and event.retry_at is None:
            self._state = "failed" if isinstance(event, events.AttemptFailed) else event.final or "failed"
        elif isinstance(event, events.PayloadLost) and event.final:
            self._state = "failed"
        return facts

    def _add(self, decision: events.Decision, what: str, by: str, facts: dict[str, Any]) -> None:
        self._happened.append(Happened(decision.at, decision.seq, what, by, facts))

    # What it waited for

    def _look(self, at: int) -> None:
        agent = self._past.agents.get(self.agent_id)
        row = agent.triggers.get(self.trigger_id) if agent is not None else None
        found: dict[_Key, Cause] = {}
        if agent is not None and row is not None and row.state == "waiting":
            found = {
                (cause.reason, cause.site, cause.scope, cause.name): cause
                for cause in causes(self._past.facts(agent), row, at)
            }
        untils = (cause.until for cause in found.values() if cause.reason == "not_yet_available")
        self._until = next(untils, None)
        for key in [key for key in self._open if key not in found]:
            self._close(self._open.pop(key), at)
        for key, cause in found.items():
            waited = self._open.get(key)
            if waited is None:
                reason, site, scope, name = key
                waited = self._open[key] = Waited(reason, at, None, [], site, scope, name)
                self._waited.append(waited)
            self._hold(waited, cause, at)

    @staticmethod
    def _hold(waited: Waited, cause: Cause, at: int) -> None:
        holding = {held.holder.who: held for held in waited.holders if held.to_at is None}
        now = {holder.who: holder for holder in cause.holders}
        for who_holds, held in holding.items():
            if who_holds in now:
                held.holder = now[who_holds]
            else:
                held.to_at = at
        waited.holders.extend(Held(holder, at) for who_holds, holder in now.items() if who_holds not in holding)

    @staticmethod
    def _close(waited: Waited, at: int) -> None:
        waited.to_at = at
        for held in waited.holders:
            if held.to_at is None:
                held.to_at = at
        waited.holders = [held for held in waited.holders if held.to_at != held.from_at]


def _together(stretches: list[Waited], begun: list[int]) -> list[Waited]:
    """Of each cause those that are short, or little apart, as one; ``begun``: attempts, which part what they are in."""
    found: list[Waited] = []
    newest: dict[_Key, Waited] = {}
    for one in stretches:
        before = newest.get(one.of_what)
        end = None if before is None else before.to_at
        is_short = one.to_at is not None and one.to_at - one.from_at < SHORT
        if before is None or end is None or any(end <= at <= one.from_at for at in begun):
            is_apart = True
        else:
            is_apart = one.from_at - end >= SHORT and not is_short
        if before is None or end is None or is_apart:
            before = newest[one.of_what] = replace(one, holders=[])
            found.append(before)
        else:
            before.to_at = one.to_at
            before.stretches += one.from_at > end
            before.between_seconds += (one.from_at - end) / SECOND
        for held in one.holders:
            _hold_on(before.holders, held)
    return found


def _hold_on(holders: list[Held], held: Held) -> None:
    """A holder of the next stretch, which may be one of the last that has let go for a short time only."""
    last = next((one for one in reversed(holders) if one.holder.who == held.holder.who), None)
    if last is not None and last.to_at is not None and held.from_at - last.to_at < SHORT:
        last.holder, last.to_at = held.holder, held.to_at
    else:
        holders.append(replace(held))


def _in_all(waited: list[Waited], now: int) -> tuple[InAll, ...]:
    seconds: dict[_Key, float] = {}
    for one in waited:
        seconds[one.of_what] = seconds.get(one.of_what, 0.0) + one.seconds(now)
    found = [InAll(reason, time, *of_whom) for (reason, *of_whom), time in seconds.items()]
    return tuple(sorted(found, key=lambda one: -one.seconds))


_STATES: Final = {
    "accepted": "waiting",
    "dispatched": "running",
    "paused": "paused",
    "resumed": "waiting",
    "replied": "finished",
    "finished": "finished",
    "attempt_failed": "waiting",
    "lease_expired": "waiting",
    "stopped": "stopped",
    "expired": "expired",
    "refused": "refused",
}


def _is_of_others(event: events.Event) -> bool:
    """Watchers are triggers of other agents, which may have the same id."""
    return isinstance(event, events.OF_OTHERS)


def who(decision: events.Decision) -> str:
    """Who acted in a decision."""
    command = decision.command
    if isinstance(command, Trigger | Stop | Control):
        return command.requested_by or ("a client over HTTP" if decision.via == "http" else "an upstream")
    if isinstance(command, Status):
        return RUNNER
    if isinstance(command, Timer):
        return f"timer ({command.kind})"
    if isinstance(command, Internal):
        kind = "agent" if command.type in ("watch", "unwatch", "resolved") else "site"
        return f"{kind} {command.sender.decider}"
    return "operator of Berth" if isinstance(command, Park | LosePayload) else "Berth, going on with a long step"


def explain(log: Iterable[Logged], agent_id: str, trigger_id: str) -> Explained | None:
    """The trigger's life in a log; None: no decision names it. Raises DoesNotFit."""
    explainer = Explainer(agent_id, trigger_id)
    for logged in log:
        explainer.take(logged)
    return explainer.explained()
