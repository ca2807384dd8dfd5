"""Check the log of decisions: that the limits held, and that nobody changed it since.

``Verifier`` takes the decisions of one partition in order and says at each step what is wrong with it:

- the chain: per agent ``seq`` counts from 1 without gaps, ``prev`` is the digest of the decision before;
- I1: a dispatch that is not forced happens only while running < limit, forced attempts included;
- I4: every event fits the state of its trigger, so that each trigger is in exactly one state and final ones stay;
- I5: each attempt is dispatched once, under the id that its decision gives it, and ends once;
- I6: who is dispatched is the oldest of those that may start.

Running attempts and limits are counted here from the events alone. Whether an event fits and who is the oldest is
asked of the same ``evolve`` that the deciders use. With ``heads``, the chain's stored ends, a cut tail shows as well.
"""

import hashlib
from collections.abc import Mapping
from typing import Final, NamedTuple

from pydantic import ValidationError

from streams.rules import events
from streams.rules.agent.evolve import Origin, evolve, settle
from streams.rules.agent.state import Agent
from streams.rules.agent.step import execution_prefix
from streams.rules.order import order_key


class Head(NamedTuple):
    """The end of an agent's chain, as its stored row says."""

    seq: int
    sha256: str | None


class Violation(NamedTuple):
    """The first thing wrong with a partition's log. ``offset`` None: at its end."""

    offset: int | None
    decider: str
    """The agent, or the site."""
    seq: int
    kind: str
    detail: str


class _Ledger:
    """What the invariants of one agent are counted with, apart from its folded state."""

    __slots__ = ("agent", "limit", "running", "sha256")

    def __init__(self, agent_id: str) -> None:
        self.agent = Agent(agent_id)
        self.limit: int | None = 1
        self.running: dict[str, str] = {}
        self.sha256: str | None = None


ENDS: Final = (
    events.Finished,
    events.AttemptFailed,
    events.LeaseExpired,
    events.TriggerPaused,
    events.Stopped,
)


class Verifier:
    """Feed one partition's decisions in order to ``check``; then ask ``finish``."""

    def __init__(self, heads: Mapping[str, Head] | None = None) -> None:
        self.decisions = 0
        self.forced = 0
        """Dispatches that were allowed to exceed the limit; counted apart."""
        self._ledgers: dict[str, _Ledger] = {}
        self._heads = dict(heads or {})

    def check(self, value: bytes, offset: int) -> Violation | None:
        """The violation that this decision is, or None. After one, the fold can't go on."""
        try:
            decision = events.read_decision(value)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            return Violation(offset, "", 0, "unreadable", f"{first['loc']}: {first['msg']}")
        ledger = self._ledgers.get(decision.agent_id)
        if ledger is None:
            ledger = self._ledgers[decision.agent_id] = _Ledger(decision.agent_id)
        wrong = self._chain(ledger, decision) or self._fold(ledger, decision)
        sha256 = hashlib.sha256(value).hexdigest()
        if wrong is None:
            wrong = self._head(decision, sha256)
        if wrong is not None:
            return Violation(offset, decision.agent_id, decision.seq, *wrong)
        ledger.sha256 = sha256
        self.decisions += 1
        return None

    def finish(self) -> Violation | None:
        """Whether decisions are missing at the end that the stored heads know of."""
        for agent_id, head in sorted(self._heads.items()):
            ledger = self._ledgers.get(agent_id)
            seq = ledger.agent.row.seq if ledger else 0
            if seq < head.seq:
                return Violation(
                    None, agent_id, seq, "tail", f"the stored head is decision {head.seq}, the log ends at {seq}"
                )
        return None

    @staticmethod
    def _chain(ledger: _Ledger, decision: events.Decision) -> tuple[str, str] | None:
        expected = ledger.agent.row.seq + 1
        if decision.seq != expected:
            return "seq", f"decision {expected} was expected, {decision.seq} was found"
        if decision.prev != ledger.sha256:
            return "chain", f"prev is {decision.prev}, the decision before has the digest {ledger.sha256}"
        return None

    def _head(self, decision: events.Decision, sha256: str) -> tuple[str, str] | None:
        head = self._heads.get(decision.agent_id)
        if head is not None and head.seq == decision.seq and head.sha256 != sha256:
            return "head", f"its digest is {sha256}, the stored head says {head.sha256}"
        return None

    def _fold(self, ledger: _Ledger, decision: events.Decision) -> tuple[str, str] | None:
        origin = Origin(decision.seq, decision.at, decision.command)
        for index, event in enumerate(decision.events):
            if isinstance(event, events.Dispatched):
                wrong = self._dispatched(ledger, decision, index, event)
            elif isinstance(event, ENDS) and event.execution_id is not None:
                ended = ledger.running.pop(event.execution_id, None)
                wrong = None if ended else ("I5", f"attempt {event.execution_id} ended, but it was not running")
            elif isinstance(event, events.AgentCreated | events.Configured):
                wrong = None
                if event.parallelism_limit is not None:
                    ledger.limit = None if event.parallelism_limit == "unlimited" else event.parallelism_limit
            else:
                wrong = None
            if wrong is not None:
                return wrong
            try:
                evolve(ledger.agent, event, origin)
            except (AssertionError, KeyError, ValueError) as error:
                return "I4", f"event {index} ({event.type}) doesn't fit the state: {error!r}"
        settle(ledger.agent, decision.command, decision.seq, decision.at, decision.refusal, decision.ignored)
        ledger.agent.changed.clear()
        ledger.agent.deadlines.clear()
        ledger.agent.ended.clear()
        return None

    def _dispatched(
        self, ledger: _Ledger, decision: events.Decision, index: int, event: events.Dispatched
    ) -> tuple[str, str] | None:
        expected = f"{execution_prefix(decision.agent_id)}-{decision.seq}-{index}"
        if event.execution_id != expected:
            return "I5", f"attempt {event.execution_id} should be named {expected}"
        if event.forced:
            self.forced += 1
        elif ledger.limit is not None and len(ledger.running) >= ledger.limit:
            return "I1", f"{len(ledger.running)} were running, the limit is {ledger.limit}"
        if ledger.agent.held_back:
            return "E1", f"trigger {event.trigger_id} was dispatched although its agent is held back"
        row = ledger.agent.triggers.get(event.trigger_id)
        if row is None:
            return "I4", f"trigger {event.trigger_id} was dispatched, but it doesn't live"
        idle = ledger.agent.ready.get(None) if ledger.agent.budget_left else None  # a claim may have reserved the rest
        older = [keys[0] for keys in (idle, ledger.agent.held) if keys]
        key = order_key(row.available_at, row.created_at, row.trigger_id)
        if row.on_busy != "force" and older and min(older) < key:
            return "I6", f"trigger {event.trigger_id} was dispatched before {min(older).id.decode()}, which is older"
        if row.available_at > decision.at:
            return "I6", f"trigger {event.trigger_id} was dispatched before it was available"
        ledger.running[event.execution_id] = event.trigger_id
        return None
