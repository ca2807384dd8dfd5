"""One decision in the making, and what every command's function needs: refusals, repeats, the pump."""

import base64
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, islice
from typing import Final, Literal

from streams.rules import dispatches, events, limits, verdicts
from streams.rules.agent.evolve import Origin, evolve
from streams.rules.agent.rows import RememberedKind, TriggerRow
from streams.rules.agent.state import DIGEST_DIGITS, Agent
from streams.rules.commands import AgentCommand
from streams.rules.order import SECOND, order_key
from streams.rules.site_messages import Claim, Release, Resolved, Sender, Unwatch, Watch

ON_BUSY: Final = frozenset({None, "", "ask", "queue", "force", "interrupt"})
RunnerOutput = dispatches.Dispatch | dispatches.StopRequest | dispatches.Revocation
DeciderOutput = Claim | Release | Watch | Unwatch | Resolved
_ENDS_WAITING: Final = frozenset(
    {events.Dispatched, events.RefusedLater, events.Stopped, events.Expired, events.PayloadLost}
)
_ENDS: Final = frozenset({*events.ENDS_ALWAYS, events.AttemptFailed, events.LeaseExpired, events.PayloadLost})
"""Its trigger may have ended with it. Sets, since isinstance of so many models would cost microseconds."""


Via = Literal["kafka", "http", "internal", "timer"]


@lru_cache(maxsize=65536)
def execution_prefix(agent_id: str) -> str:
    return base64.b32encode(hashlib.sha256(agent_id.encode()).digest()).decode()[:8].lower()


@dataclass(slots=True)
class Step:
    """One decision in the making: what it saw, what it has emitted, and how much more it may change."""

    agent: Agent
    at: int
    command: AgentCommand
    seq: int
    emitted: list[events.Event] = field(default_factory=list)
    outputs: list[RunnerOutput] = field(default_factory=list)
    messages: list[DeciderOutput] = field(default_factory=list)
    """To sites and other agents."""
    settles: list[str] = field(default_factory=list)
    """Asks and forces of earlier commands that this step answers."""
    refusal: verdicts.Refusal | None = None
    ignored: verdicts.Ignored | None = None
    sign_of_life: bool = False
    repeats: int | None = None
    """The decision that answered the command's id before."""
    origin: Origin = field(init=False)
    more: bool = False
    """Something is left that this step may not do any more."""
    changes_left: int = limits.STEP_CHANGES_MAX

    def __post_init__(self) -> None:
        self.origin = Origin(self.seq, self.at, self.command)

    def emit(self, event: events.Event) -> None:
        row: TriggerRow | None = None
        if type(event) in _ENDS_WAITING or type(event) in _ENDS:
            row = self.agent.triggers[event.trigger_id]  # type: ignore[union-attr]
            if row.is_urgent and row.state == "waiting" and type(event) in _ENDS_WAITING:
                self.settles.append(row.trigger_id)
        sender = self.sender() if row is not None and row.depends_on else None
        self.emitted.append(event)
        evolve(self.agent, event, self.origin)
        if row is not None and sender is not None and row.trigger_id not in self.agent.triggers:
            self._unwatch(row, sender)

    def _unwatch(self, row: TriggerRow, sender: Sender) -> None:
        """It has ended: nobody need tell it any more how what it depends on ends (E2).

        Each word counts as a change, so that a step that stops many says no more than one trigger's beyond M.
        """
        for agent_id, conversation_id in row.unfinished_dependencies:
            self.changes_left = max(0, self.changes_left - 1)
            self.messages.append(
                Unwatch(
                    at=self.at,
                    sender=sender,
                    agent_id=agent_id,
                    trigger_id=row.trigger_id,
                    conversation_id=conversation_id,
                    watcher_agent_id=self.agent.agent_id,
                )
            )

    def sender(self) -> Sender:
        """Of a message that the event to be emitted next causes."""
        return Sender(decider=self.agent.agent_id, seq=self.seq, index=len(self.emitted))

    def may_change(self) -> bool:
        if self.changes_left == 0:
            self.more = True
            return False
        self.changes_left -= 1
        return True

    @property
    def has_decision(self) -> bool:
        """A timer, continuation or sign of life that changed nothing leaves no trace in the log."""
        return bool(self.emitted) or self.refusal is not None or self.ignored is not None


def refuse(
    agent: Agent,
    code: str,
    reason: str | None = None,
    key: tuple[int, int, str] | None = None,
    force: bool = False,
    conversation_id: str | None = None,
) -> verdicts.Refusal:
    """A refusal with what this decider knows.

    ``key``: (available_at, created_at, id) of a trigger that asked; ``conversation_id``: the conversation it is of.
    An agent that doesn't exist has no limit yet; the deployment's default may be another when it is created.
    """
    limit: int | Literal["unlimited"] | None = None
    if agent.row.created:
        limit = "unlimited" if agent.limit is None else agent.limit
    holders, holders_count = _in_the_way(agent, code, None if key is None else key[2], conversation_id)
    return verdicts.Refusal(
        code=code,
        reason=reason,
        running=agent.running,
        limit=limit,
        waiting=len(agent.waiting),
        force_allowed=force,
        position_if_queued=None if key is None else agent.position(order_key(*key)),
        holders=tuple(islice(holders, limits.HOLDERS_MAX)),
        holders_count=holders_count,
    )


def _in_the_way(
    agent: Agent, code: str, trigger_id: str | None, conversation_id: str | None
) -> tuple[Iterator[str], int]:
    """Who has what is lacking, the oldest first, and how many they are; the trigger itself, if it lives, aside."""
    row = agent.triggers.get(trigger_id) if trigger_id is not None else None
    line = agent.lines.get(conversation_id) if conversation_id is not None else None
    if code == "conversation_busy" and line is not None:
        in_line = (id for _, id in line.placed if id != trigger_id)
        return in_line, len(line.placed) - (row is not None and row.place is not None)
    # Slots: those that are used, and those that are kept for who has asked a site.
    reserved = (id for key in agent.asking if (id := key.id.decode()) != trigger_id)
    count = agent.running + len(agent.asking) - (row is not None and row.key in agent.asking)
    return chain(agent.executions.values(), reserved), count


def refuse_later(
    step: Step, row: TriggerRow, code: str, holders: tuple[str, ...] | None = None, holders_count: int = 0
) -> None:
    """Refuse an ask or force that waited for its site. ``holders``: those at the site; None: those in the agent."""
    agent = step.agent
    may_force = code == "agent_parallelism_limit_reached" and agent.may_force
    key = (row.available_at, row.created_at, row.trigger_id)
    refusal = refuse(agent, code, key=key, force=may_force, conversation_id=row.conversation_id)
    step.emit(
        events.RefusedLater(
            trigger_id=row.trigger_id,
            code=code,
            holders=refusal.holders if holders is None else holders,
            holders_count=refusal.holders_count if holders is None else holders_count,
            running=refusal.running,
            limit=refusal.limit,
            waiting=refusal.waiting - 1,  # it has not left the queue yet
            position_if_queued=refusal.position_if_queued,
            force_allowed=may_force,
        )
    )


def execution_id_of(row: TriggerRow) -> str:
    assert row.execution_id is not None
    return row.execution_id


def is_answered(step: Step, kind: RememberedKind, id: str, sha256: str, decide_before: int | None) -> bool:
    """Whether the command gets no further: answered before, come too late, or in conflict with one answered (F8, B5).

    A repeat of what was answered in time gets that answer, however late it comes itself.
    """
    agent, digest = step.agent, sha256[:DIGEST_DIGITS]
    live = agent.triggers.get(id) if kind == "trigger" else None
    remembered = agent.remembered.get((kind, id))
    known_digest: str | None = None
    state: verdicts.KnownState | None = None
    if live is not None:
        known_digest, step.repeats, state = live.digest, live.accepted_seq, live.state
    elif remembered is not None:
        known_digest, step.repeats = remembered.digest, remembered.seq
        state = None if remembered.state == "done" else remembered.state
    if known_digest == digest:
        step.ignored = verdicts.Ignored(reason="duplicate", first_seq=step.repeats, state=state)
    elif decide_before is not None and step.at >= decide_before:
        step.refusal = refuse(agent, "request_expired")
    elif known_digest is not None:
        step.refusal = refuse(agent, "trigger_id_conflict", reason=f"answered before by decision {step.repeats}")
    else:
        return False
    return True


def request_stop(step: Step, row: TriggerRow, requested_by: str | None, reason: str) -> None:
    """Tell the runner to end the attempt; its slot is kept until it answers, or the grace is over (F7)."""
    step.emit(
        events.StopRequested(
            trigger_id=row.trigger_id,
            execution_id=execution_id_of(row),
            grace_until=step.at + limits.STOP_GRACE_SECONDS * SECOND,
            requested_by=requested_by,
        )
    )
    step.outputs.append(
        dispatches.StopRequest(
            execution_id=execution_id_of(row), agent_id=step.agent.agent_id, trigger_id=row.trigger_id, reason=reason
        )
    )


def end_claim(step: Step, row: TriggerRow, reason: str) -> None:
    """Give back what the trigger has at its site, or withdraw what it asked for; nothing if it has no claim."""
    if row.claim_n is None or row.site_id is None:
        return
    started = row.claim_state == "granted"
    step.messages.append(
        Release(
            at=step.at,
            sender=step.sender(),
            site=row.site_id,
            agent_id=step.agent.agent_id,
            trigger_id=row.trigger_id,
            n=row.claim_n,
            started=started,
        )
    )
    step.emit(events.Returned(trigger_id=row.trigger_id, n=row.claim_n, started=started, reason=reason))


def fail_without_payload(step: Step, row: TriggerRow) -> None:
    """End what waits or is paused and has nothing that a runner could be sent."""
    end_claim(step, row, "payload_lost")
    step.emit(events.PayloadLost(trigger_id=row.trigger_id, final=True))
