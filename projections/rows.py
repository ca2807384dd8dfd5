"""What a decision changes in the rows that readers see: pure, one decision after the other.

    named = Named()                 # which rows the decisions of a batch read or change,
    named.add(decision)             # for each of them; those that are stored are put into
    rows = Rows()                   # rows.agents and the other kinds; then, in order,
    rows.apply(topic, partition, offset, decision, value)
                                    # and what is named is to be written, whole.

Instants are microseconds. A decision is applied once, in order: the caller moves its position in the same transaction.
An event that doesn't fit the rows (an attempt that ends twice, a final trigger that runs again, a number left out) is
corruption or a bug, and raises CannotApply: a projection that guessed would be wrong for ever after, and nobody would
see it.

Counts are kept on the agent's row, so that a reader of 1,000 agents counts nothing.
"""

from dataclasses import dataclass, field
from typing import Any, Final, assert_never

from projections.row_types import (
    AgentRow,
    AttemptKey,
    AttemptOutcome,
    AttemptRow,
    CannotApply,
    ConversationKey,
    ConversationRow,
    DecisionIdRow,
    DecisionRow,
    TriggerKey,
    TriggerRow,
    TriggerState,
)
from projections.texts import clean_json, clean_text
from streams.rules import events
from streams.rules.agent.state import OUTCOME_OF
from streams.rules.messages import (
    Approve,
    Configure,
    Reschedule,
    ResumeTrigger,
    Stop,
    Timer,
    Trigger,
)


class _DoesNotFit(Exception):  # noqa: N818 - it reads as what it is
    """An event that doesn't fit the rows."""


@dataclass(slots=True)
class Named:
    """The rows that some decisions read or change; of triggers that end in them, the conversations are named too."""

    agents: set[str] = field(default_factory=set)
    conversations: set[ConversationKey] = field(default_factory=set)
    triggers: set[TriggerKey] = field(default_factory=set)
    attempts: set[AttemptKey] = field(default_factory=set)
    ending: set[TriggerKey] = field(default_factory=set)
    """Triggers that may end: whoever has their rows names their conversations."""

    def add(self, decision: events.Decision) -> None:
        agent_id = decision.agent_id
        self.agents.add(agent_id)
        for event in decision.events:
            trigger_id = getattr(event, "trigger_id", None)
            if trigger_id is not None:
                self.triggers.add((agent_id, trigger_id))
                execution_id = getattr(event, "execution_id", None)
                if execution_id is not None:
                    self.attempts.add((agent_id, trigger_id, execution_id))
                if isinstance(event, _ENDING):
                    self.ending.add((agent_id, trigger_id))
            if isinstance(event, events.Accepted) and isinstance(decision.command, Trigger):
                self.conversations.add((agent_id, decision.command.conversation_id))
            elif isinstance(event, events.Forgotten):
                self.conversations.update((agent_id, id) for id in event.conversations)


_ENDING: Final = (
    events.Finished,
    events.AttemptFailed,
    events.LeaseExpired,
    events.Replied,
    events.Stopped,
    events.Expired,
)


class Rows:
    """The rows that a batch of decisions reads and changes, by key; and those that it adds."""

    def __init__(self) -> None:
        self.agents: dict[str, AgentRow] = {}
        self.conversations: dict[ConversationKey, ConversationRow] = {}
        self.triggers: dict[TriggerKey, TriggerRow] = {}
        self.attempts: dict[AttemptKey, AttemptRow] = {}
        self.decisions: list[DecisionRow] = []
        self.decision_ids: list[DecisionIdRow] = []

    def __len__(self) -> int:
        return len(self.agents) + len(self.conversations) + len(self.triggers) + len(self.attempts)

    def of(self, named: Named) -> tuple[tuple[dict[Any, Any], set[Any]], ...]:
        """The rows by kind, each with the keys that are named of it: agents, conversations, triggers, attempts."""
        return (
            (self.agents, named.agents),
            (self.conversations, named.conversations),
            (self.triggers, named.triggers),
            (self.attempts, named.attempts),
        )

    def keep_living(self, named: Named) -> None:
        """What is named is written: drop what of it has ended, and what was added."""
        for conversation_key in named.conversations & self.conversations.keys():
            if not self.conversations[conversation_key].live:
                del self.conversations[conversation_key]
        for trigger_key in named.triggers & self.triggers.keys():
            if self.triggers[trigger_key].ended_at is not None:
                del self.triggers[trigger_key]
        for attempt_key in named.attempts & self.attempts.keys():
            if self.attempts[attempt_key].ended_at is not None:
                del self.attempts[attempt_key]
        self.decisions = []
        self.decision_ids = []

    def apply(self, topic: str, partition: int, offset: int, decision: events.Decision, value: bytes) -> None:
        """Apply the decision that a record of the log holds, after those before it. CannotApply if it doesn't fit."""
        try:
            agent = self._agent(decision, partition)
            for event in decision.events:
                _Step(self, agent, decision).apply(event)
        except _DoesNotFit as why:
            raise CannotApply(topic, partition, offset, str(why)) from why
        agent.seq = decision.seq
        agent.decided_at = decision.at
        if decision.refusal is not None:
            agent.refused += 1
        if decision.ignored is not None:
            agent.ignored += 1
        self.decisions.append(_decision_row(decision, partition, offset, value))
        ids = _ids_of(decision)
        self.decision_ids.extend(DecisionIdRow(decision.agent_id, id, decision.seq) for id in ids)

    def _agent(self, decision: events.Decision, partition: int) -> AgentRow:
        agent = self.agents.get(decision.agent_id)
        if agent is None:
            agent = self.agents[decision.agent_id] = AgentRow(decision.agent_id, partition, 0, decision.at)
        if agent.log_partition != partition:
            raise _DoesNotFit(
                f"agent {agent.agent_id!r} has decisions in partition {agent.log_partition}: the number of partitions "
                "was changed, or the record was written by something else than a worker"
            )
        if decision.seq != agent.seq + 1:
            raise _DoesNotFit(f"agent {agent.agent_id!r} is at decision {agent.seq}, and this is {decision.seq}")
        return agent


class _Step:
    """One decision being applied."""

    def __init__(self, rows: Rows, agent: AgentRow, decision: events.Decision) -> None:
        self.rows = rows
        self.agent = agent
        self.decision = decision
        self.at = decision.at

    def apply(self, event: events.Event) -> None:  # noqa: C901, PLR0912 - one case an event
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
                self._wait_again(trigger)
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
            case (
                events.Claimed()
                | events.ClaimGranted()
                | events.ClaimWaiting()
                | events.Returned()
                | events.TriggerDegraded()
                | events.Approved()
                | events.DependencyResolved()
            ):
                raise _DoesNotFit(f"the event {event.type} belongs to rules that this version doesn't know")
            case _:
                assert_never(event)

    # Rows

    def _trigger(self, trigger_id: str, *states: TriggerState) -> TriggerRow:
        trigger = self.rows.triggers.get((self.agent.agent_id, trigger_id))
        if trigger is None:
            raise _DoesNotFit(f"trigger {trigger_id!r} of agent {self.agent.agent_id!r} was never accepted")
        if trigger.state not in states:
            raise _DoesNotFit(
                f"trigger {trigger_id!r} of agent {self.agent.agent_id!r} is {trigger.state}, not {' or '.join(states)}"
            )
        return trigger

    def _conversation(self, conversation_id: str) -> ConversationRow:
        conversation = self.rows.conversations.get((self.agent.agent_id, conversation_id))
        if conversation is None:
            raise _DoesNotFit(f"conversation {conversation_id!r} of agent {self.agent.agent_id!r} never began")
        return conversation

    # Settings

    def _settings(
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
                    raise _DoesNotFit(f"agent {agent.agent_id!r} was created before")
                agent.created = True
                agent.created_at = self.at
                agent.parallelism_limit = _limit(event.parallelism_limit)
                agent.max_backlog_depth = event.max_backlog_depth
            case events.Configured():
                for name in event.model_fields_set & _SETTINGS:
                    value = getattr(event, name)
                    setattr(agent, name, _limit(value) if name == "parallelism_limit" else value)
            case events.AgentPaused():
                agent.paused = True
            case events.AgentResumed():
                agent.paused = False
            case events.Archived():
                agent.archived = True
            case events.Revived():
                agent.archived = False
            case events.Parked():
                agent.parked = clean_text(event.error)
            case events.Unparked():
                agent.parked = None
            case events.StopNoted():
                pass  # work that is left over; what it does are events of its own

    # The life of a trigger

    def _accepted(self, event: events.Accepted) -> None:
        command = self.decision.command
        if not isinstance(command, Trigger) or command.id != event.trigger_id or command.content_sha256 is None:
            raise _DoesNotFit(f"trigger {event.trigger_id!r} is accepted by a command that isn't it")
        key = self.agent.agent_id, event.trigger_id
        known = self.rows.triggers.get(key)
        if known is not None and known.ended_at is None:
            raise _DoesNotFit(f"trigger {event.trigger_id!r} of agent {key[0]!r} is accepted while it lives")
        self.rows.triggers[key] = _accepted_row(self.agent.agent_id, command, event, self.decision)
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
            raise _DoesNotFit(f"attempt {event.attempt} of trigger {trigger.trigger_id!r} follows {trigger.attempt}")
        key = trigger.agent_id, trigger.trigger_id, event.execution_id
        if key in self.rows.attempts:
            raise _DoesNotFit(f"attempt {event.execution_id} is dispatched a second time")
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
        self.agent.attempts += 1
        self.agent.forced += event.forced

    def _attempt_ended(self, trigger_id: str, execution_id: str | None, outcome: AttemptOutcome) -> TriggerRow:
        """The running attempt of the trigger gives its slot back; the trigger itself is still to be moved."""
        trigger = self._trigger(trigger_id, "running")
        attempt = self.rows.attempts.get((trigger.agent_id, trigger_id, execution_id or ""))
        if attempt is None or execution_id != trigger.execution_id or attempt.ended_at is not None:
            raise _DoesNotFit(f"attempt {execution_id} of trigger {trigger_id!r} ends, and {trigger.execution_id} runs")
        attempt.ended_at = self.at
        attempt.ended_seq = self.decision.seq
        attempt.outcome = outcome
        self.agent.forced -= attempt.forced
        return trigger

    def _failed(
        self,
        event: events.AttemptFailed | events.LeaseExpired,
        outcome: AttemptOutcome,
        final: events.FinalState | None,
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
            raise _DoesNotFit(f"attempt {event.execution_id} ends with neither a retry nor an end")
        return attempt

    def _wait_again(self, trigger: TriggerRow) -> None:
        """Back in the queue, where a retry or resume is an ordinary one (B4)."""
        if trigger.on_busy is not None:
            trigger.on_busy = "queue"
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

    def _end(self, trigger: TriggerRow, state: events.FinalState, reason: str | None = None) -> None:
        self._move(trigger, state)
        trigger.ended_at = self.at
        trigger.end_reason = reason
        conversation = self._conversation(trigger.conversation_id)
        conversation.live -= 1
        conversation.last_outcome = OUTCOME_OF[state]
        conversation.last_outcome_at = self.at
        conversation.forgotten = False


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
        execution_class=command.execution_class or "standard",
        parent_agent_id=command.parent.agent_id if command.parent else None,
        parent_trigger_id=command.parent.trigger_id if command.parent else None,
        restarts=command.restarts,
        priority=command.priority,
        timeout_seconds=event.timeout_seconds,
        heartbeat_seconds=command.heartbeat_seconds,
        max_attempts=event.max_attempts,
        payload_bytes=command.payload.bytes if command.payload else 0,
    )


def _decision_row(decision: events.Decision, partition: int, offset: int, value: bytes) -> DecisionRow:
    return DecisionRow(
        agent_id=decision.agent_id,
        seq=decision.seq,
        decided_at=decision.at,
        log_partition=partition,
        log_offset=offset,
        command_type=decision.command.type,
        command_id=decision.command_id,
        settles=list(decision.settles),
        refusal_code=decision.refusal.code if decision.refusal else None,
        ignored_reason=decision.ignored.reason if decision.ignored else None,
        record=clean_json(value),
    )


def _ids_of(decision: events.Decision) -> set[str]:
    """Ids under which somebody looks for the decision: its commands, and the triggers that it is about."""
    ids = set(decision.settles)
    if decision.command_id is not None:
        ids.add(decision.command_id)
    command = decision.command
    if isinstance(command, Stop | Approve | Reschedule | ResumeTrigger):
        if command.trigger_id is not None:
            ids.add(command.trigger_id)
    elif isinstance(command, Timer) and command.id:
        ids.add(command.id)
    for event in decision.events:
        trigger_id = getattr(event, "trigger_id", None)
        if trigger_id is not None:
            ids.add(trigger_id)
    return ids
