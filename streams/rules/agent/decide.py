"""What an agent's decider does with each command: one function per command, then one match.

A decision is a sequence of events, each applied as it is emitted (``evolve``): what follows sees it. After every
command the agent is pumped: places are given, then slots, the oldest first, until there is no room or nobody who may
start. One step makes at most ``STEP_CHANGES_MAX`` changes; what is left is noted and done by Continue steps, which come
before anything else.

A refusal is a value with a code. An exception here is a bug: the partition stops at the record (G4).
"""

from collections.abc import Iterable
from typing import Any, Literal, assert_never

from streams.rules import dispatches, events, limits, verdicts
from streams.rules.agent.accept import accept
from streams.rules.agent.answers import resolved, site_answer, unwatched, watched
from streams.rules.agent.controls import control, stop, stop_all, stop_waiting
from streams.rules.agent.evolve import seen, settle
from streams.rules.agent.pump import pump
from streams.rules.agent.rows import RowRef, TriggerRow
from streams.rules.agent.state import Agent
from streams.rules.agent.step import (
    Step,
    Via,
    end_claim,
    execution_id_of,
    execution_prefix,
    fail_without_payload,
    refuse,
    refuse_later,
)
from streams.rules.backoff import backoff_microseconds
from streams.rules.commands import AgentCommand
from streams.rules.messages import (
    Approve,
    Archive,
    Configure,
    Continue,
    Invalid,
    LosePayload,
    Park,
    Pause,
    Reschedule,
    Resume,
    ResumeTrigger,
    Status,
    Stop,
    Timer,
    Trigger,
)
from streams.rules.order import SECOND
from streams.rules.site_messages import Degraded, Denied, Granted, Recall, Resolved, Unwatch, Waiting, Watch


def decide(  # noqa: C901, PLR0912 - one case a command
    agent: Agent, command: AgentCommand, at: int, via: Via, defaults: limits.Defaults
) -> Step:
    """Handle one command at instant ``at``; the agent's state is changed by the events of the step that is returned."""
    step = Step(agent, at, command, agent.row.seq + 1)
    match command:
        case Trigger():
            accept(step, command, via, defaults)
        case Status():
            _status(step, command)
        case Timer():
            _timer(step, command)
        case Continue():
            _continue(step)
        case Stop():
            stop(step, command)
        case Configure() | Pause() | Resume() | Archive() | Approve() | Reschedule() | ResumeTrigger():
            control(step, command, defaults)
        case Granted() | Waiting() | Denied() | Recall() | Degraded():
            site_answer(step, command)
        case Watch():
            watched(step, command)
        case Unwatch():
            unwatched(step, command)
        case Resolved():
            resolved(step, command)
        case Invalid():
            step.refusal = refuse(agent, "invalid_record", reason=command.reason)
        case Park():
            step.emit(events.Parked(error=command.error))
        case LosePayload():
            _lose_payload(step, agent.triggers[command.trigger_id])
        case _:
            assert_never(command)
    if (step.emitted or isinstance(command, (Continue, Timer))) and not isinstance(command, Park | LosePayload):
        pump(step)  # not for Park: the pump may be what fails
    if step.has_decision:
        settle(agent, command, step.seq, at, step.refusal, step.ignored)
    _note_todo(step)
    return step


def _note_todo(step: Step) -> None:
    row = step.agent.row
    if step.more:
        row.todo = row.todo or "pump"
        row.todo_since = row.todo_since or step.seq
    elif isinstance(step.command, Continue):
        row.todo = row.todo_conversation_id = row.todo_since = None
        step.agent.changed[RowRef("agent")] = None  # also when nothing was left to do, and nothing is decided


def _lose_payload(step: Step, row: TriggerRow) -> None:
    """Nobody starts meanwhile: who comes next may have lost its own. The queue is looked at when all are told."""
    if row.state == "running":
        step.emit(events.PayloadLost(trigger_id=row.trigger_id))
    else:
        fail_without_payload(step, row)
    step.more = True


# Statuses


def _status(step: Step, command: Status) -> None:
    row = _current_attempt(step, command)
    if row is None:
        return
    match command.status:
        case "running" | "heartbeat":
            seen(step.agent, row, step.at)
            step.sign_of_life = True
        case "finished":
            end_claim(step, row, "finished")
            step.emit(events.Finished(trigger_id=row.trigger_id, execution_id=execution_id_of(row)))
        case "paused" | "failed" | "stopped" if row.grace_until is not None:
            reason: Literal["failed", "paused", "runner"] = "runner" if command.status == "stopped" else command.status
            _stopped(step, row, reason)
        case "stopped":
            _stopped(step, row, "runner")
        case "paused":
            end_claim(step, row, "paused")
            step.emit(events.TriggerPaused(trigger_id=row.trigger_id, execution_id=execution_id_of(row)))
        case "failed":
            _attempt_failed(step, row, command)
        case _:
            assert_never(command.status)


def _stopped(step: Step, row: TriggerRow, reason: Literal["failed", "paused", "runner", "grace", "lease"]) -> None:
    end_claim(step, row, "stopped")
    step.emit(events.Stopped(trigger_id=row.trigger_id, execution_id=execution_id_of(row), reason=reason))


def _current_attempt(step: Step, command: Status) -> TriggerRow | None:
    """The running attempt that the status means, or None with the reason why it means none (F3)."""
    agent = step.agent
    if command.execution_id is not None:
        trigger_id = agent.executions.get(command.execution_id)
        if trigger_id is not None:
            return agent.triggers[trigger_id]
        step.ignored = _no_attempt(agent, command, command.execution_id)
        return None
    head = agent.head(command.conversation_id)
    assert command.at is not None
    if head is None:
        known = command.conversation_id in agent.conversations
        step.ignored = verdicts.Ignored(reason="after_final" if known else "unknown")
    elif head.state != "running" or head.dispatched_at is None or head.dispatched_at >= command.at:
        step.ignored = verdicts.Ignored(reason="stale", state=head.state)
    else:
        return head
    return None


def _no_attempt(agent: Agent, command: Status, execution_id: str) -> verdicts.Ignored:
    prefix, _, rest = execution_id.partition("-")
    number, _, index = rest.partition("-")
    if (
        prefix != execution_prefix(agent.agent_id)
        or not (number.isascii() and number.isdecimal() and index.isascii() and index.isdecimal())
        or int(number[:20]) > agent.row.seq
    ):
        return verdicts.Ignored(reason="unknown")
    head = agent.head(command.conversation_id)
    if head is None:
        return verdicts.Ignored(reason="after_final")
    if head.state == "paused" and head.execution_id == execution_id and command.status == "paused":
        return verdicts.Ignored(reason="duplicate", state="paused")
    return verdicts.Ignored(reason="stale", state=head.state)


def _attempt_failed(step: Step, row: TriggerRow, command: Status) -> None:
    failures = row.failures + 1
    final = command.retryable is False or failures >= row.max_attempts or row.payload_lost
    end_claim(step, row, "failed")
    step.emit(
        events.AttemptFailed(
            trigger_id=row.trigger_id,
            execution_id=execution_id_of(row),
            failures=failures,
            absences=row.absences,
            retry_at=None if final else step.at + backoff_microseconds(row.trigger_id, row.attempt, failures),
            final=final,
            phase=command.phase,
        )
    )


# Timers and continuations


def _timer(step: Step, timer: Timer) -> None:
    agent = step.agent
    row = agent.triggers.get(timer.id)
    match timer.kind:
        case "lease":
            assert row is not None and row.execution_id == timer.execution_id
            _lease_expired(step, row, timer)
        case "grace":
            assert row is not None and row.grace_until is not None
            _revoke(step, row, "stop_grace is over")
            _stopped(step, row, "grace")
        case "expiry":
            assert row is not None and row.state == "waiting"
            end_claim(step, row, "expired")
            step.emit(events.Expired(trigger_id=row.trigger_id))
        case "answer":
            assert row is not None and row.is_urgent
            _not_answered(step, row)
        case "reservation":
            assert row is not None and row.claim_state == "asking" and row.claim_n is not None
            if row.is_urgent:
                _not_answered(step, row)
            else:  # the claim stands, the slot does not wait for it any more
                step.emit(events.ClaimWaiting(trigger_id=row.trigger_id, n=row.claim_n, reason="site_not_answering"))
        case "forget":
            _forget(step, timer.deadline)
        case "retry" | "available":
            pass  # the pump sees who has become available
        case _:
            assert_never(timer.kind)


def _not_answered(step: Step, row: TriggerRow) -> None:
    end_claim(step, row, "site_not_answering")
    refuse_later(step, row, "site_not_answering")


def _revoke(step: Step, row: TriggerRow, reason: str) -> None:
    step.outputs.append(
        dispatches.Revocation(
            execution_id=execution_id_of(row), agent_id=step.agent.agent_id, trigger_id=row.trigger_id, reason=reason
        )
    )


def _lease_expired(step: Step, row: TriggerRow, timer: Timer) -> None:
    absent = timer.last_seen_at is None and row.heartbeat_seconds is not None and row.absences < limits.ABSENCES_MAX
    failures = row.failures + (0 if absent else 1)
    absences = row.absences + (1 if absent else 0)
    final: verdicts.FinalState | None = None
    retry_at = None
    if row.grace_until is not None:
        final = "stopped"
    elif failures >= row.max_attempts or row.payload_lost:
        final = "failed"
    else:
        retry_at = step.at + backoff_microseconds(row.trigger_id, row.attempt, failures + absences)
    _revoke(step, row, "lease expired")
    end_claim(step, row, "lease_expired")
    step.emit(
        events.LeaseExpired(
            trigger_id=row.trigger_id,
            execution_id=execution_id_of(row),
            last_seen_at=timer.last_seen_at,
            failures=failures,
            absences=absences,
            retry_at=retry_at,
            final=final,
        )
    )


def _forget(step: Step, deadline: int) -> None:
    """Forget what is as old as the timer says; its deadline lies in the future when there is too much to remember."""
    agent = step.agent
    early = deadline > step.at
    ids_before = max(deadline, step.at) - limits.REMEMBERED_SECONDS * SECOND
    ids = [
        events.RememberedId(kind=kind, id=id)
        for _, _, (kind, id) in _oldest(
            ((row.at, row.seq, key) for key, row in agent.remembered.items()), ids_before, limits.STEP_CHANGES_MAX
        )
    ]
    conversations_before = step.at - limits.CONVERSATION_SECONDS * SECOND
    conversations = [
        id
        for _, id in _oldest(
            ((row.at, id) for id, row in agent.conversations.items()),
            conversations_before,
            limits.STEP_CHANGES_MAX - len(ids),
        )
    ]
    if ids or conversations:
        step.emit(events.Forgotten(ids=tuple(ids), conversations=tuple(conversations), early=early))


def _oldest(items: Iterable[tuple[int, *tuple[Any, ...]]], before: int, count: int) -> list[Any]:
    """The ``count`` oldest of what is in order of time, its first element, and not after ``before``.

    What has the same time is compared as a whole: its order in memory differs from that after a restore.
    """
    found: list[tuple[int, *tuple[Any, ...]]] = []
    for item in items if count else ():
        if item[0] > before or (len(found) >= count and item[0] > found[count - 1][0]):
            break
        found.append(item)
    return sorted(found)[:count]


def _continue(step: Step) -> None:
    row = step.agent.row
    if row.todo == "stop_conversation":
        assert row.todo_conversation_id is not None
        stop_waiting(step, row.todo_conversation_id)
    elif row.todo == "archive":
        stop_all(step)
