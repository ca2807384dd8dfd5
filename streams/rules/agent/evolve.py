"""``evolve``: the one way in which an agent's state changes.

It is the same for live traffic, recovery and audits: a decider emits events and each is applied at once, a replay
applies the events that it reads. It asserts what it relies on: an event that doesn't fit is corruption.
"""

from typing import Final, Literal, NamedTuple, assert_never

from streams.rules import events, limits, verdicts
from streams.rules.agent.rows import AgentRow, RememberedKind, RememberedRow, RowRef, TriggerRow, Watcher
from streams.rules.agent.state import DIGEST_DIGITS, Agent
from streams.rules.messages import Control, Stop, Trigger, content_sha256
from streams.rules.order import SECOND


class Origin(NamedTuple):
    """The decision that an event belongs to, as far as the state needs it."""

    seq: int
    at: int
    command: object


def evolve(agent: Agent, event: events.Event, origin: Origin) -> None:  # noqa: C901, PLR0912, PLR0915 - one case an event
    """Apply one event. AssertionError or KeyError: the event doesn't fit the state, the log is corrupt."""
    match event:
        case events.Dispatched():
            _dispatched(agent, event, origin)
        case events.Finished():
            agent.end(agent.triggers[event.trigger_id], "finished", origin.at)
        case events.Accepted():
            _accepted(agent, event, origin)
        case events.Placed():
            _placed(agent, agent.triggers[event.trigger_id], event.place, origin)
        case events.AttemptFailed():
            _attempt_ended(agent, event, "failed" if event.final else None, origin)
        case events.LeaseExpired():
            _attempt_ended(agent, event, event.final, origin)
        case events.TriggerPaused():
            _paused(agent, agent.triggers[event.trigger_id], origin)
        case events.TriggerResumed():
            _resumed(agent, event, origin)
        case events.Replied():
            agent.end(agent.triggers[event.trigger_id], "finished", origin.at)
        case events.StopRequested():
            row = agent.triggers[event.trigger_id]
            assert row.state == "running" and row.grace_until is None
            row.grace_until = event.grace_until
            agent.touch(row, origin.at)
        case events.Stopped():
            agent.end(agent.triggers[event.trigger_id], "stopped", origin.at)
        case events.Expired():
            agent.end(agent.triggers[event.trigger_id], "expired", origin.at)
        case events.Rescheduled():
            row = agent.triggers[event.trigger_id]
            agent.leave_queue(row)
            row.available_at = event.available_at
            agent.enter_queue(row)
            agent.touch(row, origin.at)
        case events.Forgotten():
            _forgotten(agent, event)
        case (
            events.AgentCreated()
            | events.Configured()
            | events.AgentPaused()
            | events.AgentResumed()
            | events.Archived()
            | events.Revived()
            | events.Parked()
            | events.Unparked()
            | events.StopNoted()
        ):
            _header(agent.row, event)
        case events.Claimed() | events.ClaimGranted() | events.ClaimWaiting() | events.Returned():
            _claim(agent, event, origin)
        case events.TriggerDegraded():
            _degraded(agent, agent.triggers[event.trigger_id], origin)
        case events.PayloadLost():
            _payload_lost(agent, agent.triggers[event.trigger_id], event.final, origin)
        case events.Approved() | events.DependencyResolved():
            _unblocked(agent, event, origin)
        case events.RefusedLater():
            row = agent.triggers[event.trigger_id]
            row.accepted_seq = origin.seq  # the answer that a repeat is told of
            agent.end(row, "refused", origin.at)
        case events.Watched():
            agent.watch(event.conversation_id, Watcher(event.watcher_agent_id, event.trigger_id))
        case events.Unwatched():
            agent.unwatch(event.conversation_id, Watcher(event.watcher_agent_id, event.trigger_id))
        case events.Told():
            agent.told(event.conversation_id, Watcher(event.watcher_agent_id, event.trigger_id), event.outcome)
        case _:
            assert_never(event)


def _header(
    row: AgentRow,
    event: events.AgentCreated
    | events.Configured
    | events.AgentPaused
    | events.AgentResumed
    | events.Archived
    | events.Revived
    | events.Parked
    | events.Unparked
    | events.StopNoted,
) -> None:
    match event:
        case events.AgentCreated():
            assert not row.created
            row.created = True
            row.parallelism_limit = event.parallelism_limit
            row.max_backlog_depth = event.max_backlog_depth
        case events.Configured():
            for name in sorted(event.model_fields_set - {"type", "v"}):
                setattr(row, name, getattr(event, name))
        case events.AgentPaused():
            row.paused = True
        case events.AgentResumed():
            row.paused = False
        case events.Archived():
            row.archived = True
        case events.Revived():
            row.archived = False
        case events.Parked():
            row.parked = event.error  # what it had still to do is done when it is configured
        case events.Unparked():
            row.parked = None
        case events.StopNoted():
            if row.todo != "archive":  # which stops everything
                row.todo = "archive" if event.conversation_id is None else "stop_conversation"
                row.todo_conversation_id = event.conversation_id


def _claim(
    agent: Agent, event: events.Claimed | events.ClaimGranted | events.ClaimWaiting | events.Returned, origin: Origin
) -> None:
    """The trigger's claim at its site changes; while it runs, only ``returned`` can."""
    row = agent.triggers[event.trigger_id]
    key = row.key if row.state == "waiting" else None
    if key is not None:
        agent.leave_pump(row, key)
    agent.set_mute(row, False)
    match event:
        case events.Claimed():
            assert row.state == "waiting" and row.claim_state is None and event.n == agent.row.claims + 1
            agent.row.claims = row.claim_n = event.n
            row.claim_state = "asking"
            row.asked_at = origin.at
        case events.ClaimGranted():
            assert row.claim_n == event.n and row.claim_state in ("asking", "standing")
            row.claim_state = "held"
        case events.ClaimWaiting():
            assert row.claim_n == event.n and row.claim_state in ("asking", "standing")
            row.claim_state = "standing"
            agent.set_mute(row, event.reason == "site_not_answering")
        case events.Returned():
            assert row.claim_n == event.n and row.claim_state is not None
            row.late += event.reason == "agent_parallelism_limit_reached"
            row.claim_n = row.claim_state = row.asked_at = None
    if key is not None:
        agent.enter_pump(row, key)
    agent.touch(row, origin.at)


def _unblocked(agent: Agent, event: events.Approved | events.DependencyResolved, origin: Origin) -> None:
    row = agent.triggers[event.trigger_id]
    if row.state == "waiting":
        agent.leave_queue(row)
    if isinstance(event, events.Approved):
        row.approved = True
        row.failures_approved = any(outcome in ("failed", "stopped") for outcome in row.outcomes)
    else:
        at = row.depends_on.index((event.agent_id, event.conversation_id))
        row.outcomes = (*row.outcomes[:at], event.outcome, *row.outcomes[at + 1 :])
        row.failures_approved = row.failures_approved and event.outcome not in ("failed", "stopped")
    if row.state == "waiting":
        agent.enter_queue(row)
    agent.touch(row, origin.at)


def _resumed(agent: Agent, event: events.TriggerResumed, origin: Origin) -> None:
    row = agent.triggers[event.trigger_id]
    agent.wait_again(row, event.available_at, "force" if event.force else "queue", origin.at)


def _accepted(agent: Agent, event: events.Accepted, origin: Origin) -> None:
    command = origin.command
    assert isinstance(command, Trigger) and event.trigger_id not in agent.triggers
    assert command.content_sha256 is not None
    depends_on: tuple[tuple[str, str], ...] = ()
    if command.depends_on:
        depends_on = tuple(dict.fromkeys((one.agent_id, one.conversation_id) for one in command.depends_on))
    row = TriggerRow(
        trigger_id=command.id,
        conversation_id=command.conversation_id,
        kind=command.kind,
        created_at=event.created_at,
        available_at=event.available_at,
        accepted_at=origin.at,
        accepted_seq=origin.seq,
        digest=command.content_sha256[:DIGEST_DIGITS],
        timeout_seconds=event.timeout_seconds,
        max_attempts=event.max_attempts,
        interactive=command.is_interactive,
        on_busy=command.effective_on_busy,
        requested_by=command.requested_by,
        expires_at=command.expires_at,
        heartbeat_seconds=command.heartbeat_seconds,
        execution_class=event.execution_class or command.execution_class or "standard",
        parent=(command.parent.agent_id, command.parent.trigger_id) if command.parent else None,
        restarts=command.restarts,
        priority=command.priority,
        site=command.site,
        worker=bool(command.worker),
        environment_id=event.environment_id,
        folder=event.folder,
        organization_id=command.organization_id,
        department_id=command.department_id,
        decide_before=command.decide_before,
        depends_on=depends_on,
        outcomes=(None,) * len(depends_on),
        approval_required=bool(command.approval_required),
        payload_bytes=command.payload.bytes if command.payload else 0,
    )
    agent.triggers[row.trigger_id] = row
    agent.enter_line(row)
    agent.enter_queue(row)
    agent.touch(row, origin.at)


def _placed(agent: Agent, row: TriggerRow, place: tuple[int, int], origin: Origin) -> None:
    assert row.place is None and row.state == "waiting" and not row.is_blocked
    agent.row.places = max(agent.row.places, place[1])
    agent.enter_place(row, place)
    agent.touch(row, origin.at)


def _dispatched(agent: Agent, event: events.Dispatched, origin: Origin) -> None:
    row = agent.triggers[event.trigger_id]
    assert row.state == "waiting" and event.attempt == row.attempt + 1
    agent.leave_queue(row)
    row.state = "running"
    if row.claim_state is not None:
        assert row.claim_state == "held"
        row.claim_state = "granted"
    if agent.row.run_budget is not None:
        assert agent.row.run_budget > 0
        agent.row.run_budget -= 1
    row.attempt = event.attempt
    row.execution_id = event.execution_id
    row.slot_number = event.slot_number
    row.forced = event.forced
    row.dispatched_at = origin.at
    row.lease_until = event.lease_until
    agent.take_slot(event.slot_number)
    agent.enter_slot(row)
    agent.touch(row, origin.at)


def _paused(agent: Agent, row: TriggerRow, origin: Origin) -> None:
    assert row.state == "running"
    agent.leave_slot(row)
    row.state = "paused"
    agent.clear_attempt(row)
    agent.touch(row, origin.at)


def _attempt_ended(
    agent: Agent, event: events.AttemptFailed | events.LeaseExpired, final: verdicts.FinalState | None, origin: Origin
) -> None:
    row = agent.triggers[event.trigger_id]
    assert row.state == "running" and row.execution_id == event.execution_id
    row.failures = event.failures
    row.absences = event.absences
    if final is not None:
        agent.end(row, final, origin.at)
    else:
        assert event.retry_at is not None
        agent.wait_again(row, event.retry_at, "queue", origin.at)


def _degraded(agent: Agent, row: TriggerRow, origin: Origin) -> None:
    row.degraded = True
    agent.touch(row, origin.at)


def _payload_lost(agent: Agent, row: TriggerRow, is_final: bool, origin: Origin) -> None:
    """What its runner would be sent is gone: what doesn't run ends."""
    assert is_final == (row.state != "running")
    row.payload_lost = True
    if is_final:
        agent.end(row, "failed", origin.at)
    else:
        agent.touch(row, origin.at)


def _forgotten(agent: Agent, event: events.Forgotten) -> None:
    for forgotten in event.ids:
        del agent.remembered[forgotten.kind, forgotten.id]
        agent.changed[RowRef("remembered", forgotten.id, forgotten.kind)] = None
    for conversation_id in event.conversations:
        del agent.conversations[conversation_id]
        agent.changed[RowRef("conversation", conversation_id)] = None
        agent.conversation_changed(conversation_id)


def seen(agent: Agent, row: TriggerRow, at: int) -> None:
    """A sign of life of the current attempt (F6): it moves the lease, and is no event."""
    assert row.lease_until is not None
    row.last_seen_at = at
    row.lease_until = max(row.lease_until, at + (row.heartbeat_seconds or limits.HEARTBEAT_SECONDS_UNSET) * SECOND)
    agent.touch(row, at)


def settle(
    agent: Agent, command: object, seq: int, at: int, refusal: verdicts.Refusal | None, ignored: verdicts.Ignored | None
) -> None:
    """The end of every decision: its number, and the command's id if a repeat is to find it (F8)."""
    agent.row.seq = seq
    agent.changed[RowRef("agent")] = None
    if ignored is not None and ignored.reason == "duplicate":
        return
    if refusal is not None and refusal.code in NEVER_REMEMBERED:
        return
    if isinstance(command, Trigger):
        known = command.id in agent.triggers or ("trigger", command.id) in agent.remembered
        if refusal is not None and not known:  # agent_on_busy_invalid is said before the id is looked up
            assert command.content_sha256 is not None
            digest = command.content_sha256[:DIGEST_DIGITS]
            agent.remember("trigger", command.id, RememberedRow(digest, seq, "refused", at))
    elif isinstance(command, _REMEMBERED):
        kind: RememberedKind = "stop" if isinstance(command, Stop) else "control"
        digest = content_sha256(command)[:DIGEST_DIGITS]
        state: Literal["refused", "done"] = "refused" if refusal is not None else "done"
        agent.remember(kind, command.id, RememberedRow(digest, seq, state, at))


_REMEMBERED: Final = (Stop, Control)
NEVER_REMEMBERED: Final = frozenset({"request_expired", "invalid_record", "trigger_id_conflict"})
"""Asking again may get another answer; a conflict must not replace the answer that it conflicts with."""
