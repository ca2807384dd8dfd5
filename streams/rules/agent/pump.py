"""The pump: after every command, do what has become possible, the oldest first (C2, C3, site protocol PUMP).

Room only shrinks along the waiters: who is oldest is looked at first, and once there is no room for it nobody but an
ask or force can still act: those are never left waiting.
"""

from streams.rules import dispatches, events, limits
from streams.rules.agent.rows import TriggerRow
from streams.rules.agent.state import Agent
from streams.rules.agent.step import (
    Step,
    end_claim,
    execution_prefix,
    fail_without_payload,
    refuse_later,
    request_stop,
)
from streams.rules.messages import Continue
from streams.rules.order import SECOND, OrderKey
from streams.rules.site_messages import Claim, ClaimKey, Resolved


def pump(step: Step) -> None:
    """Tell watchers, give places, then slots and claims, as far as one step goes."""
    agent = step.agent
    if not (agent.waiting or agent.untold):
        return  # most often: what ended was the last, and nobody depends on it
    if agent.row.todo in ("stop_conversation", "archive") and (step.more or not isinstance(step.command, Continue)):
        return  # nobody starts who is about to be stopped
    if (
        (agent.untold and not _tell(step))
        or (agent.unplaced and not _place(step))
        or (agent.urgent and not _refuse_hopeless(step))
    ):
        return
    if agent.held_back:
        _withdraw(step)
    elif _start(step):
        _give_back(step)
    if agent.untold:  # of what has ended here: expired while it waited, or refused
        _tell(step)


def _tell(step: Step) -> bool:
    """Tell those that depend on a conversation how it stands now (E2)."""
    agent = step.agent
    while agent.untold:
        if not step.may_change():
            return False
        conversation_id, watcher = agent.untold[0]
        outcome = agent.standing_of(conversation_id)
        step.messages.append(
            Resolved(
                at=step.at,
                sender=step.sender(),
                agent_id=watcher.agent_id,
                trigger_id=watcher.trigger_id,
                dependency_agent_id=agent.agent_id,
                conversation_id=conversation_id,
                outcome=outcome,
            )
        )
        step.emit(
            events.Told(
                conversation_id=conversation_id,
                watcher_agent_id=watcher.agent_id,
                trigger_id=watcher.trigger_id,
                outcome=outcome,
            )
        )
    return True


def _place(step: Step) -> bool:
    """Who has become available takes a place in its conversation (B6), before all others who must come next there.

    That is an interrupt, which stops the running attempt (B2), and an ask or force that replies to a paused trigger:
    the paused one is there again if its site refuses the reply (F4).
    """
    agent = step.agent
    while agent.unplaced and (key := agent.unplaced[0]).available_at <= step.at:
        if not step.may_change():
            return False
        row = agent.triggers[key.id.decode()]
        head = agent.head(row.conversation_id)
        comes_next = False
        if head is not None and row.on_busy == "interrupt":
            comes_next = head.state == "running" and not row.is_over(step.at)
            if comes_next and head.grace_until is None:
                request_stop(step, head, row.requested_by, "interrupted")
                continue
        elif head is not None and row.is_urgent:
            comes_next = head.state == "paused"
        step.emit(events.Placed(trigger_id=row.trigger_id, place=(0 if comes_next else 1, agent.row.places + 1)))
    return True


def _refuse_hopeless(step: Step) -> bool:
    """Asks and forces whose time is over (B5: also when the grant comes before the timer), or that can't even ask."""
    agent = step.agent
    for key in list(agent.urgent):
        row = agent.triggers[key.id.decode()]
        code = None
        if row.answer_until is not None and row.answer_until <= step.at:
            code = "site_not_answering"
        elif row.claim_state is None:
            if agent.held_back:
                code = "agent_paused"
            elif agent.lines[row.conversation_id].head != row.trigger_id:
                code = "conversation_busy"
            elif row.available_at > step.at:  # moved in time while it asked
                code = "not_yet_available"
            elif row.site_id in agent.mute:
                code = "site_not_answering"
        if code is not None:
            if not step.may_change():
                return False
            end_claim(step, row, code)
            refuse_later(step, row, code)
    return True


def _withdraw(step: Step) -> None:
    """A paused agent keeps no claim from others."""
    agent = step.agent
    while agent.claimed:
        if not step.may_change():
            return
        row = agent.triggers[agent.claimed[0][1]]
        end_claim(step, row, "agent_paused")
        if row.is_urgent:
            refuse_later(step, row, "agent_paused")


def _oldest_waiter(agent: Agent, at: int) -> OrderKey | None:
    """The oldest that could start or ask now, if there is room for it."""
    idle = agent.oldest_idle(at) if agent.budget_left else None
    if not agent.held or agent.row.run_budget == 0:
        return idle
    held = agent.held[0]
    return held if idle is None or held < idle else idle


def _start(step: Step) -> bool:
    """Slots, to the oldest; whether the step had room for all of it."""
    agent = step.agent
    while agent.waiting:
        key = _oldest_waiter(agent, step.at) if agent.has_room else None
        if key is not None and agent.room_for(key):
            if not step.may_change():
                return False
            row = agent.triggers[key.id.decode()]
            _go(step, row)
            continue
        if not agent.urgent:
            return True
        if not step.may_change():
            return False
        row = agent.triggers[agent.urgent[0].id.decode()]
        forces = row.on_busy == "force" and not agent.is_serial
        if forces and agent.may_force and agent.row.run_budget != 0:
            _go(step, row)
        else:
            code = "force_limit_reached" if forces else "agent_parallelism_limit_reached"
            if agent.row.run_budget == 0:
                code = "run_budget_used_up"
            end_claim(step, row, code)
            refuse_later(step, row, code)
    return True


def _go(step: Step, row: TriggerRow) -> None:
    """Start it, or ask its site first; what lost its payload while it ran, and was resumed, has nothing to run."""
    if row.is_over(step.at):  # its timer has not come yet (E5)
        end_claim(step, row, "expired")
        step.emit(events.Expired(trigger_id=row.trigger_id))
    elif row.payload_lost:
        fail_without_payload(step, row)
    elif row.site_id is None or row.claim_state == "held":
        _dispatch(step, row)
    else:
        _claim(step, row, row.site_id)


def _claim(step: Step, row: TriggerRow, site_id: str) -> None:
    agent = step.agent
    n = agent.row.claims + 1
    step.messages.append(
        Claim(
            at=step.at,
            sender=step.sender(),
            site=site_id,
            agent_id=agent.agent_id,
            trigger_id=row.trigger_id,
            n=n,
            key=ClaimKey(available_at=row.available_at, created_at=row.created_at, id=row.trigger_id),
            accepted_at=row.accepted_at,
            worker=row.worker,
            environment_id=row.environment_id,
            path=row.folder,
            organization_id=row.organization_id,
            department_id=row.department_id,
            ask=row.is_urgent,
        )
    )
    step.emit(events.Claimed(trigger_id=row.trigger_id, n=n, site=site_id))


def _give_back(step: Step) -> None:
    """Grants that came too late go back, so that others can use them; after K times the oldest keeps its own."""
    agent = step.agent
    if not agent.held:
        return
    oldest = _oldest_waiter(agent, step.at)
    for key in list(agent.held):
        if agent.has_room and agent.row.run_budget != 0:
            return
        row = agent.triggers[key.id.decode()]
        if key == oldest and row.late >= limits.LATE_GRANTS_MAX and agent.row.run_budget != 0:
            continue
        if not step.may_change():
            return
        end_claim(step, row, "run_budget_used_up" if agent.row.run_budget == 0 else "agent_parallelism_limit_reached")


def _dispatch(step: Step, row: TriggerRow) -> None:
    agent = step.agent
    paused = agent.paused_in(row.conversation_id) if row.is_urgent else None
    if paused is not None:
        step.emit(events.Replied(trigger_id=paused.trigger_id, by=row.trigger_id))
    execution_id = f"{execution_prefix(agent.agent_id)}-{step.seq}-{len(step.emitted)}"
    slot_number = agent.free_slot()
    forced = not agent.has_room
    lease_until = step.at + (row.timeout_seconds + limits.LEASE_GRACE_SECONDS) * SECOND
    step.emit(
        events.Dispatched(
            trigger_id=row.trigger_id,
            execution_id=execution_id,
            attempt=row.attempt + 1,
            slot_number=slot_number,
            forced=forced,
            lease_until=lease_until,
        )
    )
    step.outputs.append(
        dispatches.Dispatch(
            execution_id=execution_id,
            trigger_id=row.trigger_id,
            agent_id=agent.agent_id,
            conversation_id=row.conversation_id,
            attempt=row.attempt,
            max_attempts=row.max_attempts,
            slot_number=slot_number,
            forced=forced,
            kind=row.kind,
            site=row.site_id,
            environment_id=row.environment_id,
            folder=row.folder,
            degraded=row.degraded,
            execution_class=row.execution_class,
            timeout_seconds=row.timeout_seconds,
            heartbeat_seconds=row.heartbeat_seconds,
            lease_until=lease_until,
            dispatched_at=step.at,
        )
    )
