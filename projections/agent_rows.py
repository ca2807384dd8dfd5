"""What an agent's decision changes in the rows that readers see: pure, one event after the other.

Counts are kept on the agent's row, so that a reader of 1,000 agents counts nothing.
"""

from typing import Final, assert_never

from projections.claim_rows import TriggerClaims
from projections.row_sets import RowSets
from projections.row_types import (
    AgentRow,
    AttemptOutcome,
    AttemptRow,
    ConversationRow,
    DependencyRow,
    DoesNotFit,
    TriggerRow,
    TriggerState,
)
from projections.texts import clean_text
from streams.rules import events, verdicts
from streams.rules.agent.state import OUTCOME_OF
from streams.rules.messages import Approve, Configure, Trigger


class AgentStep:
    """One decision of an agent being applied: its events in order, by ``apply``."""

    def __init__(self, rows: RowSets, agent: AgentRow, decision: events.Decision) -> None:
        self.rows = rows
        self.agent = agent
        self.decision = decision
        self.at = decision.at
        self.claims = TriggerClaims(rows, agent, decision.at)

    def apply(self, event: events.Event) -> None:  # noqa: C901, PLR0912, PLR0915 - one case an event
        match event:
            case events.Accepted():
                self._accepted(event)
            case events.Placed():
                trigger = self._trigger(event.trigger_id, "waiting")
                trigger.place_rank, trigger.place_number = event.place
            case events.Dispatched():
                self._dispatched(event)
            case events.Finished():
                trigger = self._attempt_ended(event.trigger_id, event.execution_id, "finished")
                self._end(trigger, "finished")
            case events.AttemptFailed():
                self._failed(event, "failed", "failed" if event.final else None).phase = event.phase
            case events.LeaseExpired():
                self._failed(event, "lease_expired", event.final).last_seen_at = event.last_seen_at
            case events.TriggerPaused():
                self._move(self._attempt_ended(event.trigger_id, event.execution_id, "paused"), "paused")
            case events.TriggerResumed():
                trigger = self._trigger(event.trigger_id, "paused")
                trigger.available_at = event.available_at
                self._wait_again(trigger, force=bool(event.force))
            case events.Replied():
                trigger = self._trigger(event.trigger_id, "paused")
                trigger.replied_by = event.by
                self._end(trigger, "finished", "replied")
            case events.StopRequested():
                trigger = self._trigger(event.trigger_id, "running")
                trigger.stop_requested_by = event.requested_by
                trigger.stop_requested_at = self.at
                trigger.grace_until = event.grace_until
            case events.Stopped():
                trigger = self._trigger(event.trigger_id, "waiting", "running", "paused")
                if trigger.state == "running":
                    self._attempt_ended(trigger.trigger_id, event.execution_id, "stopped")
                self._end(trigger, "stopped", event.reason)
            case events.Expired():
                self._end(self._trigger(event.trigger_id, "waiting"), "expired")
            case events.Rescheduled():
                self._trigger(event.trigger_id, "waiting").available_at = event.available_at
            case events.Forgotten():
                for conversation_id in event.conversations:
                    self._conversation(conversation_id).forgotten = True
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
                self._settings(event)
            case events.Claimed() | events.ClaimGranted() | events.ClaimWaiting() | events.Returned():
                self.claims.apply(self._trigger(event.trigger_id, "waiting", "running"), event)
            case events.TriggerDegraded() | events.PayloadLost():
                self._lacking(self._trigger(event.trigger_id, "waiting", "running", "paused"), event)
            case events.Approved():
                self._approved(self._trigger(event.trigger_id, "waiting"))
            case events.DependencyResolved():
                self._resolved(event)
            case events.RefusedLater():
                self._refused(self._trigger(event.trigger_id, "waiting"))
            case events.Watched() | events.Unwatched() | events.Told():
                pass  # what the other agent was told is a fact of the trigger that depends on it
            case _:
                assert_never(event)

    # Rows

    def _trigger(self, trigger_id: str, *states: TriggerState) -> TriggerRow:
        trigger = self.rows.triggers.get((self.agent.agent_id, trigger_id))
        if trigger is None:
            raise DoesNotFit(f"trigger {trigger_id!r} of agent {self.agent.agent_id!r} was never accepted")
        if trigger.state not in states:
            raise DoesNotFit(
                f"trigger {trigger_id!r} of agent {self.agent.agent_id!r} is {trigger.state}, not {' or '.join(states)}"
            )
        return trigger

    def _conversation(self, conversation_id: str) -> ConversationRow:
        conversation = self.rows.conversations.get((self.agent.agent_id, conversation_id))
        if conversation is None:
            raise DoesNotFit(f"conversation {conversation_id!r} of agent {self.agent.agent_id!r} never began")
        return conversation

    # Settings

    def _settings(  # noqa: C901 - one case an event
        self,
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
        agent = self.agent
        match event:
            case events.AgentCreated():
                if agent.created:
                    raise DoesNotFit(f"agent {agent.agent_id!r} was created before")
                agent.created = True
                agent.created_at = self.at
                agent.parallelism_limit = _limit(event.parallelism_limit)
                agent.max_backlog_depth = event.max_backlog_depth
            case events.Configured():
                for name in event.model_fields_set & _SETTINGS:
                    value = getattr(event, name)
                    setattr(agent, name, _limit(value) if name == "parallelism_limit" else value)
                if "run_budget" in event.model_fields_set:
                    agent.run_budget_at = None if agent.run_budget is None else self.at
            case events.AgentPaused():
                agent.paused, agent.paused_at = True, self.at
            case events.AgentResumed():
                agent.paused, agent.paused_at = False, None
            case events.Archived():
                agent.archived, agent.archived_at = True, self.at
            case events.Revived():
                agent.archived, agent.archived_at = False, None
            case events.Parked():
                agent.parked, agent.parked_at = clean_text(event.error), self.at
            case events.Unparked():
                agent.parked = agent.parked_at = None
            case events.StopNoted():
                pass  # work that is left over; what it does are events of its own

    # The life of a trigger

    def _accepted(self, event: events.Accepted) -> None:
        command = self.decision.command
        if not isinstance(command, Trigger) or command.id != event.trigger_id or command.content_sha256 is None:
            raise DoesNotFit(f"trigger {event.trigger_id!r} is accepted by a command that isn't it")
        key = self.agent.agent_id, event.trigger_id
        known = self.rows.triggers.get(key)
        if known is not None and known.ended_at is None:
            raise DoesNotFit(f"trigger {event.trigger_id!r} of agent {key[0]!r} is accepted while it lives")
        self.rows.triggers[key] = _accepted_row(self.agent.agent_id, command, event, self.decision)
        for position, dependency in enumerate(dict.fromkeys(command.depends_on or ())):
            self.rows.dependencies[*key, position] = DependencyRow(
                *key, position, dependency.agent_id, dependency.conversation_id
            )
        self.agent.accepted += 1
        self.agent.waiting += 1
        conversation_key = self.agent.agent_id, command.conversation_id
        conversation = self.rows.conversations.get(conversation_key)
        if conversation is None:
            conversation = ConversationRow(*conversation_key, created_at=self.at)
            self.rows.conversations[conversation_key] = conversation
        conversation.triggers += 1
        conversation.live += 1

    def _dispatched(self, event: events.Dispatched) -> None:
        trigger = self._trigger(event.trigger_id, "waiting")
        if event.attempt != trigger.attempt + 1:
            raise DoesNotFit(f"attempt {event.attempt} of trigger {trigger.trigger_id!r} follows {trigger.attempt}")
        key = trigger.agent_id, trigger.trigger_id, event.execution_id
        if key in self.rows.attempts:
            raise DoesNotFit(f"attempt {event.execution_id} is dispatched a second time")
        self.rows.attempts[key] = AttemptRow(
            agent_id=trigger.agent_id,
            trigger_id=trigger.trigger_id,
            execution_id=event.execution_id,
            conversation_id=trigger.conversation_id,
            attempt=event.attempt,
            slot_number=event.slot_number,
            forced=event.forced,
            dispatched_at=self.at,
            dispatched_seq=self.decision.seq,
            lease_until=event.lease_until,
        )
        trigger.attempt = event.attempt
        trigger.execution_id = event.execution_id
        self._move(trigger, "running")
        self.claims.started(trigger)
        if self.agent.run_budget is not None:
            if self.agent.run_budget == 0:
                raise DoesNotFit(f"attempt {event.execution_id} is dispatched beyond the agent's run budget")
            self.agent.run_budget -= 1
            self.agent.run_budget_at = self.at
        self.agent.attempts += 1
        self.agent.forced += event.forced

    def _attempt_ended(self, trigger_id: str, execution_id: str | None, outcome: AttemptOutcome) -> TriggerRow:
        """The running attempt of the trigger gives its slot back; the trigger itself is still to be moved."""
        trigger = self._trigger(trigger_id, "running")
        attempt = self.rows.attempts.get((trigger.agent_id, trigger_id, execution_id or ""))
        if attempt is None or execution_id != trigger.execution_id or attempt.ended_at is not None:
            raise DoesNotFit(f"attempt {execution_id} of trigger {trigger_id!r} ends, and {trigger.execution_id} runs")
        attempt.ended_at = self.at
        attempt.ended_seq = self.decision.seq
        attempt.outcome = outcome
        self.agent.forced -= attempt.forced
        return trigger

    def _failed(
        self,
        event: events.AttemptFailed | events.LeaseExpired,
        outcome: AttemptOutcome,
        final: verdicts.FinalState | None,
    ) -> AttemptRow:
        trigger = self._attempt_ended(event.trigger_id, event.execution_id, outcome)
        trigger.failures = event.failures
        trigger.absences = event.absences
        attempt = self.rows.attempts[trigger.agent_id, trigger.trigger_id, event.execution_id]
        if final is not None:
            self._end(trigger, final, outcome)
        elif event.retry_at is not None:
            attempt.retry_at = trigger.available_at = event.retry_at
            self._wait_again(trigger)
        else:
            raise DoesNotFit(f"attempt {event.execution_id} ends with neither a retry nor an end")
        return attempt

    def _wait_again(self, trigger: TriggerRow, force: bool = False) -> None:
        """Back in the queue, where a retry or resume is an ordinary one, but for one resumed by force (B4)."""
        if force:
            trigger.on_busy = "force"
        elif trigger.on_busy is not None:
            trigger.on_busy = "queue"
        self.claims.waits_again(trigger)
        self._move(trigger, "waiting")

    def _move(self, trigger: TriggerRow, state: TriggerState) -> None:
        self._count(trigger.state, -1)
        self._count(state, 1)
        if trigger.state == "running":
            trigger.stop_requested_by = trigger.stop_requested_at = trigger.grace_until = None
        trigger.state = state
        trigger.state_since = self.at

    def _count(self, state: TriggerState, by: int) -> None:
        agent = self.agent
        match state:
            case "waiting":
                agent.waiting += by
            case "running":
                agent.running += by
            case "paused":
                agent.on_hold += by
            case "finished":
                agent.finished += by
            case "failed":
                agent.failed += by
            case "stopped":
                agent.stopped += by
            case "expired":
                agent.expired += by
            case _:
                assert_never(state)

    def _end(self, trigger: TriggerRow, state: verdicts.FinalState, reason: str | None = None) -> None:
        self._move(trigger, state)
        trigger.ended_at = self.at
        trigger.end_reason = reason
        conversation = self._conversation(trigger.conversation_id)
        conversation.live -= 1
        conversation.last_outcome = OUTCOME_OF[state]
        conversation.last_outcome_at = self.at
        conversation.forgotten = False
        self._forget_needs(trigger)

    def _lacking(self, trigger: TriggerRow, event: events.TriggerDegraded | events.PayloadLost) -> None:
        """Its folder was deleted, or what its runner would be sent is gone; a running attempt goes on."""
        if isinstance(event, events.TriggerDegraded):
            trigger.degraded = True
        elif event.final:
            self._end(trigger, "failed", "payload_lost")

    def _forget_needs(self, trigger: TriggerRow) -> None:
        """What it waited for goes with its end."""
        key = trigger.agent_id, trigger.trigger_id
        for position in range(trigger.dependencies):
            del self.rows.dependencies[*key, position]
        self.rows.trigger_claims.pop(key, None)

    # What else it waits for

    def _approved(self, trigger: TriggerRow) -> None:
        outcomes = (
            self.rows.dependencies[trigger.agent_id, trigger.trigger_id, position].outcome
            for position in range(trigger.dependencies)
        )
        trigger.failures_approved = any(outcome in _FAILURES for outcome in outcomes)
        trigger.approved_at = self.at
        command = self.decision.command
        trigger.approved_by = command.requested_by if isinstance(command, Approve) else None

    def _resolved(self, event: events.DependencyResolved) -> None:
        trigger = self._trigger(event.trigger_id, "waiting", "running", "paused")
        for position in range(trigger.dependencies):
            row = self.rows.dependencies[trigger.agent_id, trigger.trigger_id, position]
            if (row.dependency_agent_id, row.dependency_conversation_id) == (event.agent_id, event.conversation_id):
                row.outcome, row.told_at = event.outcome, self.at
                trigger.failures_approved = trigger.failures_approved and event.outcome not in _FAILURES
                return
        raise DoesNotFit(f"trigger {event.trigger_id!r} does not depend on {event.conversation_id!r}")

    def _refused(self, trigger: TriggerRow) -> None:
        """A site or its agent said no to who does not wait: nothing is left of it but decisions (B3).

        One that ran before, and was resumed by force in vain, has attempts that stay: it ends, as stopped.
        """
        self.agent.refused += 1
        conversation = self._conversation(trigger.conversation_id)
        conversation.live -= 1
        if trigger.attempt:
            self._move(trigger, "stopped")
            trigger.ended_at, trigger.end_reason = self.at, "refused"
        else:
            self._count("waiting", -1)
            self.agent.accepted -= 1
            conversation.triggers -= 1
            del self.rows.triggers[trigger.agent_id, trigger.trigger_id]
            if not conversation.triggers:
                del self.rows.conversations[conversation.agent_id, conversation.conversation_id]
        self._forget_needs(trigger)


_FAILURES: Final = ("failed", "stopped")
_SETTINGS: Final = frozenset(Configure.model_fields) & frozenset(AgentRow.__dataclass_fields__) - {"agent_id"}


def _limit(limit: object) -> int | None:
    return limit if isinstance(limit, int) else None


def _accepted_row(agent_id: str, command: Trigger, event: events.Accepted, decision: events.Decision) -> TriggerRow:
    assert command.content_sha256 is not None
    return TriggerRow(
        agent_id=agent_id,
        trigger_id=command.id,
        conversation_id=command.conversation_id,
        state="waiting",
        state_since=decision.at,
        kind=command.kind,
        interactive=command.is_interactive,
        on_busy=command.on_busy,
        requested_by=command.requested_by,
        created_at=event.created_at,
        available_at=event.available_at,
        expires_at=command.expires_at,
        accepted_at=decision.at,
        accepted_seq=decision.seq,
        content_sha256=command.content_sha256,
        site=command.site,
        worker=bool(command.worker),
        environment_id=event.environment_id,
        folder=event.folder,
        organization_id=command.organization_id,
        department_id=command.department_id,
        execution_class=event.execution_class or command.execution_class or "standard",
        parent_agent_id=command.parent.agent_id if command.parent else None,
        parent_trigger_id=command.parent.trigger_id if command.parent else None,
        restarts=command.restarts,
        priority=command.priority,
        timeout_seconds=event.timeout_seconds,
        heartbeat_seconds=command.heartbeat_seconds,
        max_attempts=event.max_attempts,
        payload_bytes=command.payload.bytes if command.payload else 0,
        approval_required=bool(command.approval_required),
        dependencies=len(set(command.depends_on or ())),
    )
