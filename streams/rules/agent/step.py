"""One decision in the making, and what every command's function needs: refusals, repeats, the pump."""

import base64
import hashlib
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Final, Literal

from streams.rules import events, limits
from streams.rules.agent.evolve import Origin, evolve
from streams.rules.agent.rows import RememberedKind, TriggerRow
from streams.rules.agent.state import DIGEST_DIGITS, Agent
from streams.rules.messages import AgentCommand
from streams.rules.order import SECOND, order_key

ON_BUSY: Final = frozenset({None, "", "ask", "queue", "force", "interrupt"})
RunnerOutput = events.Dispatch | events.StopRequest | events.Revocation


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
    refusal: events.Refusal | None = None
    ignored: events.Ignored | None = None
    sign_of_life: bool = False
    repeats: int | None = None
    """The decision that answered the command's id before."""
    more: bool = False
    """Something is left that this step may not do any more."""
    changes_left: int = limits.STEP_CHANGES_MAX

    def emit(self, event: events.Event) -> None:
        self.emitted.append(event)
        evolve(self.agent, event, Origin(self.seq, self.at, self.command))

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
    agent: Agent, code: str, reason: str | None = None, key: tuple[int, int, str] | None = None
) -> events.Refusal:
    """A refusal with what this decider knows. ``key``: (available_at, created_at, id) of a trigger that asked.

    An agent that doesn't exist has no limit yet; the deployment's default may be another when it is created.
    """
    limit: int | Literal["unlimited"] | None = None
    if agent.row.created:
        limit = "unlimited" if agent.limit is None else agent.limit
    return events.Refusal(
        code=code,
        reason=reason,
        running=agent.running,
        limit=limit,
        waiting=len(agent.waiting),
        position_if_queued=None if key is None else agent.position(order_key(*key)),
        holders=tuple(islice(agent.executions.values(), limits.HOLDERS_MAX)),
        holders_count=agent.running,
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
    state: events.KnownState | None = None
    if live is not None:
        known_digest, step.repeats, state = live.digest, live.accepted_seq, live.state
    elif remembered is not None:
        known_digest, step.repeats = remembered.digest, remembered.seq
        state = None if remembered.state == "done" else remembered.state
    if known_digest == digest:
        step.ignored = events.Ignored(reason="duplicate", first_seq=step.repeats, state=state)
    elif decide_before is not None and step.at >= decide_before:
        step.refusal = refuse(agent, "request_expired")
    elif known_digest is not None:
        step.refusal = refuse(agent, "trigger_id_conflict", reason=f"answered before by decision {step.repeats}")
    else:
        return False
    return True


def pump(step: Step) -> None:
    """Give places to who has become available, then slots to the oldest, while there is room (C2, C3)."""
    agent, at = step.agent, step.at
    if agent.row.todo in ("stop_conversation", "archive") and step.more:
        return  # nobody starts who is about to be stopped
    while agent.unplaced and agent.unplaced[0].available_at <= at:
        if not step.may_change():
            return
        trigger_id = agent.unplaced[0].id.decode()
        step.emit(events.Placed(trigger_id=trigger_id, place=(1, agent.row.places + 1)))
    while not agent.held_back and agent.ready and agent.has_room and agent.ready[0].available_at <= at:
        if not step.may_change():
            return
        row = agent.triggers[agent.ready[0].id.decode()]
        if row.expires_at is not None and row.expires_at <= at:  # its timer has not come yet (E5)
            step.emit(events.Expired(trigger_id=row.trigger_id))
        else:
            _dispatch(step, row)


def _dispatch(step: Step, row: TriggerRow) -> None:
    agent = step.agent
    execution_id = f"{execution_prefix(agent.agent_id)}-{step.seq}-{len(step.emitted)}"
    slot_number = agent.free_slot()
    lease_until = step.at + (row.timeout_seconds + limits.LEASE_GRACE_SECONDS) * SECOND
    step.emit(
        events.Dispatched(
            trigger_id=row.trigger_id,
            execution_id=execution_id,
            attempt=row.attempt + 1,
            slot_number=slot_number,
            forced=False,
            lease_until=lease_until,
        )
    )
    step.outputs.append(
        events.Dispatch(
            execution_id=execution_id,
            trigger_id=row.trigger_id,
            agent_id=agent.agent_id,
            conversation_id=row.conversation_id,
            attempt=row.attempt,
            max_attempts=row.max_attempts,
            slot_number=slot_number,
            forced=row.forced,
            kind=row.kind,
            execution_class=row.execution_class,
            timeout_seconds=row.timeout_seconds,
            heartbeat_seconds=row.heartbeat_seconds,
            lease_until=lease_until,
            dispatched_at=step.at,
        )
    )
