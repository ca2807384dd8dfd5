"""Stops and controls: what people ask of an agent, a conversation or one trigger (A1, A6, E1, F4, F7)."""

from itertools import islice
from typing import Final

from streams.rules import events, limits, verdicts
from streams.rules.agent.accept import conversations_starting_before
from streams.rules.agent.rows import AgentRow, TriggerRow, is_serial
from streams.rules.agent.step import ON_BUSY, Step, end_claim, is_answered, refuse, request_stop
from streams.rules.messages import (
    Approve,
    Archive,
    Configure,
    Pause,
    Reschedule,
    Resume,
    ResumeTrigger,
    Stop,
    content_sha256,
)
from streams.rules.order import SECOND, order_key


def stop(step: Step, command: Stop) -> None:
    agent = step.agent
    if is_answered(step, "stop", command.id, content_sha256(command), command.decide_before):
        return
    if agent.row.archived:
        step.refusal = refuse(agent, "agent_archived")
    elif command.trigger_id is not None:
        _stop_trigger(step, command.trigger_id, command.requested_by)
    else:
        assert command.conversation_id is not None
        _stop_conversation(step, command.conversation_id, command.requested_by)


def _stop_trigger(step: Step, trigger_id: str, requested_by: str | None) -> None:
    agent = step.agent
    row = agent.triggers.get(trigger_id)
    if row is not None and row.grace_until is not None:
        step.ignored = verdicts.Ignored(reason="already_stopping", state="running")
    elif row is not None and row.state == "running":
        request_stop(step, row, requested_by, "stopped by request")
    elif row is not None:
        end_claim(step, row, "stop")
        step.emit(events.Stopped(trigger_id=trigger_id, reason="stop"))
    else:
        _not_live(step, trigger_id)


def _not_live(step: Step, trigger_id: str) -> None:
    remembered = step.agent.remembered.get(("trigger", trigger_id))
    if remembered is None or remembered.final_state is None:
        step.refusal = refuse(step.agent, "trigger_unknown")
    else:
        step.ignored = verdicts.Ignored(reason="already_final", first_seq=remembered.seq, state=remembered.final_state)


def _stop_conversation(step: Step, conversation_id: str, requested_by: str | None) -> None:
    """Its running attempt is told; its waiting and paused triggers go, a bounded number in each step (F7, F1)."""
    agent = step.agent
    if conversation_id not in agent.lines:
        known = conversation_id in agent.conversations
        if known:
            step.ignored = verdicts.Ignored(reason="already_final")
        else:
            step.refusal = refuse(agent, "trigger_unknown")
        return
    head = agent.head(conversation_id)
    if head is not None and head.state == "running":
        if head.grace_until is None and step.may_change():
            request_stop(step, head, requested_by, "conversation stopped by request")
        elif len(agent.lines[conversation_id]) == 1:
            step.ignored = verdicts.Ignored(reason="already_stopping", state="running")
            return
    stop_waiting(step, conversation_id)
    if step.more:
        step.emit(events.StopNoted(conversation_id=conversation_id))


def stop_waiting(step: Step, conversation_id: str) -> None:
    """Stop the conversation's waiting and paused triggers, as many as the step still may."""
    agent = step.agent
    ids = list(islice(agent.live_triggers(conversation_id), limits.STEP_CHANGES_MAX + 2))
    for trigger_id in ids:
        if agent.triggers[trigger_id].state == "running":
            continue
        if not step.may_change():
            return
        end_claim(step, agent.triggers[trigger_id], "conversation_stop")
        step.emit(events.Stopped(trigger_id=trigger_id, reason="conversation_stop"))


def stop_all(step: Step) -> None:
    """Work off an archiving: the waiting ones go, then the paused ones; the running ones are told."""
    agent = step.agent
    for key in list(islice(agent.waiting, limits.STEP_CHANGES_MAX + 1)):
        if not step.may_change():
            return
        end_claim(step, agent.triggers[key.id.decode()], "archive")
        step.emit(events.Stopped(trigger_id=key.id.decode(), reason="archive"))
    rest = [row for row in agent.triggers.values() if row.grace_until is None]
    for row in rest[: limits.STEP_CHANGES_MAX + 1]:
        if not step.may_change():
            return
        if row.state == "running":
            request_stop(step, row, None, "agent archived")
        else:
            step.emit(events.Stopped(trigger_id=row.trigger_id, reason="archive"))


def control(
    step: Step,
    command: Configure | Pause | Resume | Archive | Approve | Reschedule | ResumeTrigger,
    defaults: limits.Defaults,
) -> None:
    agent, row = step.agent, step.agent.row
    if is_answered(step, "control", command.id, content_sha256(command), command.decide_before):
        return
    if isinstance(command, Configure):
        _configure(step, command, defaults)
    elif not row.created:
        step.refusal = refuse(agent, "agent_not_found")
    elif row.archived:
        step.refusal = refuse(agent, "agent_archived")
    elif isinstance(command, Pause):
        _flip(step, events.AgentPaused(), row.paused)
    elif isinstance(command, Resume):
        _flip(step, events.AgentResumed(), not row.paused)
    elif isinstance(command, Archive):
        step.emit(events.Archived())
        stop_all(step)
        if step.more:
            step.emit(events.StopNoted())
    else:
        _control_trigger(step, command)


def _flip(step: Step, event: events.AgentPaused | events.AgentResumed, already: bool) -> None:
    if already:
        step.ignored = verdicts.Ignored(reason="unchanged")
    else:
        step.emit(event)


def _control_trigger(step: Step, command: Approve | Reschedule | ResumeTrigger) -> None:
    agent = step.agent
    row = agent.triggers.get(command.trigger_id)
    if row is None:
        _not_live(step, command.trigger_id)
    elif isinstance(command, Approve):
        if row.state != "waiting" or not row.lacks_approval:
            step.ignored = verdicts.Ignored(reason="unchanged", state=row.state)
        else:
            step.emit(events.Approved(trigger_id=row.trigger_id))
    elif isinstance(command, Reschedule):
        if row.state != "waiting":
            step.ignored = verdicts.Ignored(reason="not_waiting", state=row.state)
        else:
            end_claim(step, row, "rescheduled")
            bound = step.at - limits.ORDER_WINDOW_SECONDS * SECOND
            step.emit(events.Rescheduled(trigger_id=row.trigger_id, available_at=max(command.available_at, bound)))
    elif command.on_busy not in ON_BUSY:
        step.refusal = refuse(agent, "agent_on_busy_invalid", reason=f"on_busy {command.on_busy!r}")
    elif row.state != "paused":
        step.ignored = verdicts.Ignored(reason="not_paused", state=row.state)
    else:
        _resume(step, row, command.on_busy)


def _resume(step: Step, row: TriggerRow, on_busy: str | None) -> None:
    """Queue it again. An ask or force that finds no place for it in the agent is refused, and it stays paused.

    What uses a site then waits there like a retry: only a trigger's first attempt can be asked for at a site.
    """
    agent = step.agent
    key = (step.at, row.created_at, row.trigger_id)
    code: str | None = None
    force = False
    if on_busy in ("ask", "force"):
        order = order_key(*key)
        starting = len(conversations_starting_before(agent, order, step.at, None))
        has_room = agent.room_for(order, starting)
        force = on_busy == "force" and not has_room and not agent.is_serial and not row.needs_site
        if agent.held_back:
            code = "agent_paused"
        elif agent.head(row.conversation_id) is not row:
            code = "conversation_busy"
        elif not agent.budget_left:
            code = "run_budget_used_up"
        elif not has_room and not force:
            code = "agent_parallelism_limit_reached"
        elif force and not agent.may_force:
            code = "force_limit_reached"
        elif not agent.has_budget(agent.room_taken_by(order, starting)):
            code = "run_budget_used_up"
        elif row.site_id in agent.mute:
            code = "site_not_answering"
    if code is not None:
        may_force = code == "agent_parallelism_limit_reached" and agent.may_force and not row.needs_site
        step.refusal = refuse(agent, code, key=key, force=may_force, conversation_id=row.conversation_id)
        return
    step.emit(events.TriggerResumed(trigger_id=row.trigger_id, available_at=step.at, force=force))


SETTINGS: Final = (
    "parallelism_limit",
    "agent_type",
    "serial",
    "default_environment_id",
    "default_folder",
    "max_backlog_depth",
    "run_budget",
    "default_timeout_seconds",
    "owner",
    "display_name",
)


def _configure(step: Step, command: Configure, defaults: limits.Defaults) -> None:
    agent, row = step.agent, step.agent.row
    changed = _changes(command, row, defaults)
    if changed is None:
        step.refusal = refuse(agent, "agent_parallelism_limit_unsupported")
        return
    was_held_back = row.archived or row.parked is not None
    created = not row.created
    if created:
        step.emit(
            events.AgentCreated(
                parallelism_limit=defaults.parallelism_limit, max_backlog_depth=limits.BACKLOG_DEPTH_DEFAULT
            )
        )
    if changed:
        step.emit(events.Configured(**changed))  # type: ignore[arg-type]
    if row.archived:
        step.emit(events.Revived())
    if row.parked is not None:
        step.emit(events.Unparked())
    if not (changed or created or was_held_back):
        step.ignored = verdicts.Ignored(reason="unchanged")


def _changes(command: Configure, row: AgentRow, defaults: limits.Defaults) -> dict[str, object] | None:
    """The settings that change, with their new values; None if a serial agent was given more than one slot (A4)."""
    back_to = {
        "parallelism_limit": defaults.parallelism_limit,
        "max_backlog_depth": limits.BACKLOG_DEPTH_DEFAULT,
        "serial": False,
    }
    after = {name: getattr(row, name) for name in SETTINGS}
    if not row.created:
        after["parallelism_limit"] = defaults.parallelism_limit
    before = dict(after)
    for name in SETTINGS:
        if name in command.model_fields_set:
            value = getattr(command, name)
            after[name] = back_to.get(name) if value is None else value
    if is_serial(after["serial"], after["agent_type"], after["default_environment_id"]):
        asks = command.parallelism_limit
        if asks is not None and asks != 1:
            return None
        after["parallelism_limit"] = 1
    return {name: value for name, value in after.items() if value != before[name]}
