"""Check the log of decisions: that the limits held, and that nobody changed it since.

``Verifier`` takes the decisions of one partition in order and says at each step what is wrong with it:

- the chain: per agent ``seq`` counts from 1 without gaps, ``prev`` is the digest of the decision before;
- I1: a dispatch that is not forced happens only while running < limit, forced attempts included; B4: a forced one only
  beyond the limit, never of a serial agent, and at most as many as the limit;
- I4: every event fits the state of its trigger, so that each trigger is in exactly one state and final ones stay;
- I5: each attempt is dispatched once, under the id that its decision gives it, and ends once;
- I6: who is dispatched is the oldest of those that may start, and takes no slot that an older claim has reserved (C6);
- I7: after a decision nobody who may start waits beside room;
- what a dispatch needs beside room: the agent not paused (E1), the head of its conversation (B6), available (I6), in
  time (B5, E5), a budget (E4), and its claim granted (D3). Nobody is at the head who lacks an approval or waits for a
  dependency (E2, E3): placing it doesn't fit its state (I4).

With ``recheck``, each command decided again gives the decision that is there (recompute.py). Each older trigger that a
start overtook is counted under what allowed that (overtakings.py): together with I6 the certificate of the order.

Running attempts, limits and budgets are counted here from the events alone. Whether an event fits, and who is the
oldest, is asked of the same ``evolve`` that the deciders use. With ``heads``, the chain's stored ends, a cut tail is
missed. With ``agreement``, agents and sites must say the same of each other's claims (agreement.py).
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from pydantic import ValidationError

from streams.audit.agreement import Agreement
from streams.audit.overtakings import overtaken
from streams.audit.past import FoldedAgent
from streams.audit.recompute import Recheck
from streams.rules import events, limits
from streams.rules.agent.evolve import Origin, evolve, settle
from streams.rules.agent.rows import TriggerRow
from streams.rules.agent.state import Agent
from streams.rules.agent.step import execution_prefix
from streams.rules.messages import LosePayload, Park
from streams.rules.site_messages import Granted


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

    __slots__ = ("agent", "budget", "forced", "limit", "offset", "running", "sha256")

    def __init__(self, agent: Agent) -> None:
        """``agent``: a new one, or as an earlier reading has left it."""
        row = agent.row
        self.agent = agent
        self.limit: int | None = None if row.parallelism_limit == "unlimited" else row.parallelism_limit
        self.budget: int | None = row.run_budget
        self.running: dict[str, str] = dict(agent.executions)
        self.forced: set[str] = {id for id, trigger_id in agent.executions.items() if agent.triggers[trigger_id].forced}
        self.sha256: str | None = row.prev
        self.offset: int | None = None
        """Of the newest decision; None: none was read yet, or in an earlier reading."""


def changed(decider: str, seq: int, prev: str | None, offset: int, offset_before: int | None) -> Violation:
    """A decision names another digest than the one before it has: that one was changed since, where it is known."""
    what = f"decision {seq}, at offset {offset}, was written after one with the digest {prev}"
    if offset_before is None:
        return Violation(offset, decider, seq, "chain", f"{what}; none or another is there")
    return Violation(offset_before, decider, seq - 1, "chain", f"it was changed: {what}")


def unreadable(error: ValidationError, offset: int) -> Violation:
    """A record that is no decision of a known schema."""
    first = error.errors(include_url=False, include_input=False)[0]
    return Violation(offset, "", 0, "unreadable", f"{first['loc']}: {first['msg']}")


class Heads:
    """The ends of the chains of one kind of decider, as their stored rows say."""

    def __init__(self, heads: Mapping[str, Head] | None) -> None:
        self._heads = dict(heads or {})

    def wrong(self, decider: str, seq: int, sha256: str) -> tuple[str, str] | None:
        """Whether a decision is at the end of its chain and isn't the one that is stored there."""
        head = self._heads.get(decider)
        if head is not None and head.seq == seq and head.sha256 != sha256:
            return "head", f"its digest is {sha256}, the stored head says {head.sha256}"
        return None

    def cut_tail(self, seq_of: Callable[[str], int]) -> Violation | None:
        """Whether decisions are missing at the end that the stored heads know of."""
        for decider, head in sorted(self._heads.items()):
            seq = seq_of(decider)
            if seq < head.seq:
                detail = f"the stored head is decision {head.seq}, the log ends at {seq}"
                return Violation(None, decider, seq, "tail", detail)
        return None


def following(seq: int, found: int) -> tuple[str, str] | None:
    return None if found == seq + 1 else ("seq", f"decision {seq + 1} was expected, {found} was found")


ENDS: Final = (
    events.Finished,
    events.AttemptFailed,
    events.LeaseExpired,
    events.TriggerPaused,
    events.Stopped,
)


_MAY_END: Final = (*events.ENDS_ALWAYS, events.AttemptFailed, events.LeaseExpired, events.PayloadLost)
_SETTINGS: Final = (events.AgentCreated, events.Configured)


class Verifier:
    """Feed one partition's decisions in order to ``check``; then ask ``finish``."""

    def __init__(
        self,
        heads: Mapping[str, Head] | None = None,
        agreement: Agreement | None = None,
        recheck: Recheck | None = None,
        known: Iterable[Agent] = (),
    ) -> None:
        """``known``: agents as an earlier reading has left them, row.prev the digest of their last decision."""
        self.decisions = 0
        self.forced = 0
        """Dispatches that were allowed to exceed the limit; counted apart."""
        self.overtakings: Counter[str] = Counter()
        """Older triggers that a start overtook, by what allowed it."""
        self._ledgers: dict[str, _Ledger] = {agent.agent_id: _Ledger(agent) for agent in known}
        self._heads = Heads(heads)
        self._agreement = agreement
        self._words = 0
        """What the decision being checked sent to agents whose conversations need not be watched any more."""
        self._recheck = recheck

    def agents(self) -> list[Agent]:
        """As they are after the decisions so far, row.prev the digest of the last one."""
        for ledger in self._ledgers.values():
            ledger.agent.row.prev = ledger.sha256
        return [ledger.agent for ledger in self._ledgers.values()]

    def check(self, value: bytes, offset: int) -> Violation | None:
        """The violation that this decision is, or None. After one, the fold can't go on."""
        try:
            decision = events.read_decision(value)
        except ValidationError as error:
            return unreadable(error, offset)
        ledger = self._ledgers.get(decision.agent_id)
        if ledger is None:
            ledger = self._ledgers[decision.agent_id] = _Ledger(FoldedAgent(decision.agent_id))
        if decision.seq == ledger.agent.row.seq + 1 and decision.prev != ledger.sha256:
            return changed(decision.agent_id, decision.seq, decision.prev, offset, ledger.offset)
        wrong = following(ledger.agent.row.seq, decision.seq) or self._fold(ledger, decision)
        sha256 = hashlib.sha256(value).hexdigest()
        if wrong is None:
            wrong = _stalls(ledger.agent, decision, self._words) or self._heads.wrong(
                decision.agent_id, decision.seq, sha256
            )
        if wrong is None and self._recheck is not None:
            wrong = self._recheck.wrong(decision, value, ledger.agent)
        if wrong is None and self._agreement is not None:
            self._agreement.take_agent(decision, offset)
        if wrong is not None:
            return Violation(offset, decision.agent_id, decision.seq, *wrong)
        ledger.sha256, ledger.offset = sha256, offset
        self.decisions += 1
        return None

    def finish(self) -> Violation | None:
        """Whether decisions are missing at the end that the stored heads know of."""
        return self._heads.cut_tail(lambda id: self._ledgers[id].agent.row.seq if id in self._ledgers else 0)

    def _fold(self, ledger: _Ledger, decision: events.Decision) -> tuple[str, str] | None:
        origin = Origin(decision.seq, decision.at, decision.command)
        self._words = 0
        for index, event in enumerate(decision.events):
            if isinstance(event, events.Dispatched):
                wrong = self._dispatched(ledger, decision, index, event)
            elif isinstance(event, ENDS) and event.execution_id is not None:
                ended = ledger.running.pop(event.execution_id, None)
                ledger.forced.discard(event.execution_id)
                wrong = None if ended else ("I5", f"attempt {event.execution_id} ended, but it was not running")
            elif isinstance(event, _SETTINGS):
                wrong = None
                if event.parallelism_limit is not None:
                    ledger.limit = None if event.parallelism_limit == "unlimited" else event.parallelism_limit
                if isinstance(event, events.Configured) and "run_budget" in event.model_fields_set:
                    ledger.budget = event.run_budget
            elif isinstance(event, events.ClaimGranted):
                told = isinstance(decision.command, Granted) and decision.command.n == event.n
                wrong = None if told else ("D3", f"claim {event.n} of {event.trigger_id} was granted by no site")
            else:
                wrong = None
            if wrong is not None:
                return wrong
            if isinstance(event, _MAY_END) and (row := ledger.agent.triggers.get(event.trigger_id)) is not None:
                self._words += len(row.unfinished_dependencies) if row.depends_on and events.is_end(event) else 0
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
        row = ledger.agent.triggers.get(event.trigger_id)
        if row is None:
            return "I4", f"trigger {event.trigger_id} was dispatched, but it doesn't live"
        wrong = _room(ledger, row, event.forced) or _order(ledger.agent, row, decision.at)
        wrong = (
            wrong
            or _gates(ledger, row, decision.at)
            or self._overtakes(ledger.agent, row, row.on_busy == "force", decision.at)
        )
        if wrong is not None:
            return wrong[0], f"trigger {event.trigger_id} was dispatched {wrong[1]}"
        ledger.running[event.execution_id] = event.trigger_id
        if ledger.budget is not None:
            ledger.budget -= 1
        if event.forced:
            self.forced += 1
            ledger.forced.add(event.execution_id)
        return None

    def _overtakes(self, agent: Agent, row: TriggerRow, forced: bool, at: int) -> tuple[str, str] | None:
        for trigger_id, allowed in overtaken(agent, row, forced, at):
            if allowed is None:
                return "I6", f"before {trigger_id}, which is older and waited for nothing else"
            self.overtakings[allowed] += 1
        return None


def _room(ledger: _Ledger, row: TriggerRow, forced: bool) -> tuple[str, str] | None:
    running, limit = len(ledger.running), ledger.limit
    if not forced:
        if limit is not None and running >= limit:
            return "I1", f"while {running} were running, the limit is {limit}"
        return None
    if row.on_busy != "force" or ledger.agent.is_serial:
        return "B4", "as forced, which it may not be"
    if limit is None or running < limit:
        return "B4", f"as forced while {running} were running, the limit is {limit or 'unlimited'}"
    if len(ledger.forced) >= limit:
        return "B4", f"as forced while {len(ledger.forced)} others were, the limit is {limit}"
    return None


def _order(agent: Agent, row: TriggerRow, at: int) -> tuple[str, str] | None:
    if row.available_at > at:
        return "I6", "before it was available"
    if agent.head(row.conversation_id) is not row:
        return "B6", "although another of its conversation comes first"
    if row.on_busy == "force":
        return None
    older = [agent.held[0]] if agent.held else []
    if agent.budget_left and (idle := agent.oldest_idle(at)) is not None:  # a claim may have reserved the rest
        older.append(idle)
    if older and min(older) < row.key:
        return "I6", f"before {min(older).id.decode()}, which is older"
    if not agent.room_for(row.key):
        return "I6", "into a slot that an older claim has reserved"
    return None


def _gates(ledger: _Ledger, row: TriggerRow, at: int) -> tuple[str, str] | None:
    if ledger.agent.held_back:
        return "E1", "although its agent is held back"
    if ledger.budget == 0:
        return "E4", "although the agent's budget is used up"
    if row.is_over(at):
        return "E5", "although its time was over"
    if row.answer_until is not None and row.answer_until <= at:
        return "B5", "although nobody waited for it any more"
    if row.site_id is not None and row.claim_state != "held":
        return "D3", f"without what it needs at the site {row.site_id}"
    return None


def _stalls(agent: Agent, decision: events.Decision, words: int) -> tuple[str, str] | None:
    """Whether somebody waits beside room after a decision that left nothing over (I7)."""
    row, happened = agent.row, decision.events
    if not happened or agent.held_back:
        return None  # nobody looked at the queue
    idle = agent.oldest_idle(decision.at) if agent.budget_left else None
    held = agent.held[0] if agent.held and row.run_budget != 0 else None
    oldest = idle if held is None or (idle is not None and idle < held) else held
    if oldest is None or not agent.room_for(oldest):
        return None
    if len(happened) + words >= limits.STEP_CHANGES_MAX or isinstance(decision.command, Park | LosePayload):
        return None  # left-over work comes next
    if any(isinstance(event, events.StopNoted | events.Unparked) for event in happened):
        return None
    return "I7", f"trigger {oldest.id.decode()} waits although there is room for it"
