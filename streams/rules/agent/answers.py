"""What sites, and the agents that others depend on, answer (site protocol A2; E2)."""

from typing import Final

from pydantic import TypeAdapter

from streams.rules import events, verdicts
from streams.rules.agent.rows import Watcher
from streams.rules.agent.step import Step, end_claim, refuse_later
from streams.rules.commands import SiteAnswer
from streams.rules.site_messages import Degraded, Denied, Granted, Recall, Resolved, Unwatch, Waiting, Watch

WAIT_REASON: Final[TypeAdapter[verdicts.WaitReason]] = TypeAdapter(verdicts.WaitReason)


def site_answer(step: Step, answer: SiteAnswer) -> None:
    """An answer to another claim than the present one is of a claim that ended before: nothing is sent (A2)."""
    row = step.agent.triggers.get(answer.trigger_id)
    open_claim = row is not None and row.claim_n == answer.n and row.claim_state in ("asking", "standing")
    match answer:
        case Granted() if open_claim:
            step.emit(events.ClaimGranted(trigger_id=answer.trigger_id, n=answer.n))
        case Waiting() if open_claim:
            reason = WAIT_REASON.validate_python(answer.reason)
            step.emit(events.ClaimWaiting(trigger_id=answer.trigger_id, n=answer.n, reason=reason))
        case Denied() if open_claim:
            step.emit(events.Returned(trigger_id=answer.trigger_id, n=answer.n, started=False, reason=answer.reason))
            assert row is not None
            refuse_later(step, row, answer.reason, answer.holders, answer.holders_count)
        case Recall() if row is not None and row.claim_n == answer.n and row.claim_state == "held":
            end_claim(step, row, "recalled")
        case Degraded() if row is not None and row.claim_n == answer.n:
            step.emit(events.TriggerDegraded(trigger_id=answer.trigger_id))
        case _:
            step.ignored = verdicts.Ignored(reason="stale")


def watched(step: Step, command: Watch) -> None:
    step.emit(
        events.Watched(
            conversation_id=command.conversation_id,
            watcher_agent_id=command.watcher_agent_id,
            trigger_id=command.trigger_id,
        )
    )


def unwatched(step: Step, command: Unwatch) -> None:
    """Nothing to forget: it was told that the conversation finished, while the word of its own end was under way."""
    watcher = Watcher(command.watcher_agent_id, command.trigger_id)
    if watcher not in step.agent.watches.get(command.conversation_id, {}):
        step.ignored = verdicts.Ignored(reason="stale")
        return
    step.emit(
        events.Unwatched(
            conversation_id=command.conversation_id,
            watcher_agent_id=command.watcher_agent_id,
            trigger_id=command.trigger_id,
        )
    )


def resolved(step: Step, command: Resolved) -> None:
    row = step.agent.triggers.get(command.trigger_id)
    dependency = (command.dependency_agent_id, command.conversation_id)
    if row is None or dependency not in row.depends_on:
        step.ignored = verdicts.Ignored(reason="stale")
    elif row.place is not None or row.outcomes[row.depends_on.index(dependency)] == command.outcome:
        step.ignored = verdicts.Ignored(reason="unchanged")
    else:
        step.emit(
            events.DependencyResolved(
                trigger_id=command.trigger_id,
                agent_id=command.dependency_agent_id,
                conversation_id=command.conversation_id,
                outcome=command.outcome,
            )
        )
