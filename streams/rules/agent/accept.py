"""A trigger comes: accept it, or refuse it with the first reason that stands in its way (A4-A6, B1-B5, C1, D2, F8)."""

from typing import Literal

from streams.rules import events, limits, verdicts
from streams.rules.agent.rows import DEFAULT_SITE
from streams.rules.agent.state import Agent
from streams.rules.agent.step import ON_BUSY, Step, Via, is_answered, refuse
from streams.rules.folders import FolderInvalid, segments
from streams.rules.messages import Trigger
from streams.rules.order import OrderKey, first_availability, order_key
from streams.rules.site_messages import Sender, Watch


def accept(step: Step, command: Trigger, via: Via, defaults: limits.Defaults) -> None:
    agent = step.agent
    assert command.content_sha256 is not None
    if command.on_busy not in ON_BUSY:
        step.refusal = refuse(agent, "agent_on_busy_invalid", reason=f"on_busy {command.on_busy!r}")
    elif is_answered(step, "trigger", command.id, command.content_sha256, command.decide_before):
        pass
    elif not agent.row.created and via == "http":
        step.refusal = refuse(agent, "agent_not_found")
    elif agent.row.archived:
        step.refusal = refuse(agent, "agent_archived")
    else:
        _judge(step, command, defaults)


def _judge(step: Step, command: Trigger, defaults: limits.Defaults) -> None:
    """Accept the trigger, or refuse it with the first reason that stands in its way (B3)."""
    agent, at = step.agent, step.at
    urgent = command.effective_on_busy in ("ask", "force")
    try:
        environment_id, folder = _where(agent, command)
    except FolderInvalid as invalid:
        step.refusal = refuse(agent, "invalid_record", reason=f"invalid_field: folder: {invalid}")
        return
    created_at, available_at = first_availability(command.created_at, command.available_at, at)
    is_over = command.expires_at is not None and command.expires_at <= at
    is_reply = command.is_interactive and available_at <= at and not is_over
    paused = agent.paused_in(command.conversation_id) if is_reply else None
    uses_site = command.needs_site or environment_id is not None
    is_early = available_at > at
    if urgent:  # it starts now or never, and takes its place in the order now (C1)
        available_at = at
    key = order_key(available_at, created_at, command.id)
    reason = _why_wait(step, command, key, is_early, paused is not None, defaults)
    if urgent and (refusal := _why_not_now(step, command, uses_site, reason)) is not None:
        step.refusal = refusal
        return
    if (reason is not None or uses_site) and not urgent:  # it waits, if only for its site's answer (A5)
        size = command.payload.bytes if command.payload else 0
        full = len(agent.waiting) >= _backlog_depth(agent)
        if full or agent.payload_bytes + size > limits.BACKLOG_BYTES_MAX:
            bound = "max_backlog_depth" if full else "backlog_bytes_max"
            step.refusal = refuse(agent, "agent_backlog_full", reason=bound, key=(available_at, created_at, command.id))
            return
    if not agent.row.created:
        step.emit(
            events.AgentCreated(
                parallelism_limit=defaults.parallelism_limit, max_backlog_depth=limits.BACKLOG_DEPTH_DEFAULT
            )
        )
    if paused is not None and not (urgent and uses_site):  # its site may still refuse it: then it was no reply
        step.emit(events.Replied(trigger_id=paused.trigger_id, by=command.id))
    accepted = events.Accepted(
        trigger_id=command.id,
        created_at=created_at,
        available_at=available_at,
        timeout_seconds=command.timeout_seconds or agent.row.default_timeout_seconds or limits.TIMEOUT_SECONDS_DEFAULT,
        max_attempts=command.max_attempts or limits.ATTEMPTS_DEFAULT,
        position=0 if (reason is None or urgent) and not uses_site else agent.position(key),
        reason=None if urgent else reason,
        environment_id=environment_id,
        folder=folder,
        execution_class=_inherited_class(agent, command),
    )
    step.emit(accepted)
    _watch(step, command)
    if is_over:
        step.emit(events.Expired(trigger_id=command.id))


def _where(agent: Agent, command: Trigger) -> tuple[str | None, str | None]:
    """(environment, folder as sent) of the trigger, the agent's own where it names none; FolderInvalid."""
    environment_id = command.environment_id or agent.row.default_environment_id
    if environment_id is None:
        if command.folder is not None:
            raise FolderInvalid("needs environment_id")
        return None, None
    is_default = command.environment_id is None and command.folder is None
    folder = agent.row.default_folder if is_default else command.folder
    if folder is not None:
        segments(folder)
    return environment_id, folder


def _inherited_class(agent: Agent, command: Trigger) -> Literal["standard", "background"] | None:
    """The class of the parent, if that is a live trigger of the same agent and the trigger names none itself (C2).

    What other agents' triggers are is not known here; whoever asks for their children says the class.
    """
    if command.execution_class is not None or command.parent is None or command.parent.agent_id != agent.agent_id:
        return None
    parent = agent.triggers.get(command.parent.trigger_id)
    return parent.execution_class if parent is not None and parent.execution_class != "standard" else None


def _why_not_now(
    step: Step, command: Trigger, uses_site: bool, reason: verdicts.WaitReason | None
) -> verdicts.Refusal | None:
    """Why an ask or force can't start now, or not ask its site; None: it can."""
    agent = step.agent
    force = command.effective_on_busy == "force"
    code: str | None = reason
    if reason == "agent_parked":
        code = "agent_paused"
    elif reason == "agent_parallelism_limit_reached" and force and not agent.is_serial:
        code = None if agent.may_force else "force_limit_reached"
    elif reason is None and uses_site:
        code = "site_not_answering" if (command.site or DEFAULT_SITE) in agent.mute else None
    if code is None:
        return None
    may_force = code == "agent_parallelism_limit_reached" and agent.may_force
    key = (step.at, command.created_at if command.created_at is not None else step.at, command.id)
    return refuse(agent, code, key=key, force=may_force, conversation_id=command.conversation_id)


def _watch(step: Step, command: Trigger) -> None:
    """Ask the agents whose conversations it depends on how these stand (E2)."""
    for dependency in dict.fromkeys(command.depends_on or ()):
        step.messages.append(
            Watch(
                at=step.at,
                sender=Sender(decider=step.agent.agent_id, seq=step.seq, index=len(step.emitted) - 1),
                agent_id=dependency.agent_id,
                trigger_id=command.id,
                conversation_id=dependency.conversation_id,
                watcher_agent_id=step.agent.agent_id,
            )
        )


def _backlog_depth(agent: Agent) -> int:
    return agent.row.max_backlog_depth if agent.row.created else limits.BACKLOG_DEPTH_DEFAULT


def _why_wait(
    step: Step, command: Trigger, key: OrderKey, is_early: bool, answers: bool, defaults: limits.Defaults
) -> verdicts.WaitReason | None:
    """Why the trigger can't start, or ask its site, in the very step that accepts it; None: it can."""
    agent = step.agent
    line = agent.lines.get(command.conversation_id)
    behind = len(line.placed) - answers if line else 0
    if agent.row.paused:
        return "agent_paused"
    if agent.row.parked is not None:
        return "agent_parked"
    if behind:
        return "conversation_busy"
    if command.approval_required:
        return "approval_required"
    if command.depends_on:
        return "dependency_unfinished"
    if is_early:
        return "not_yet_available"
    if not agent.budget_left:
        return "run_budget_used_up"
    limit = agent.limit if agent.row.created else _as_count(defaults.parallelism_limit)
    taken = agent.running + int(agent.asking.bisect_left(key))
    if limit is not None and taken >= limit:
        return "agent_parallelism_limit_reached"
    starting = conversations_starting_before(agent, key, step.at, command.conversation_id if answers else None)
    if command.conversation_id in starting:
        return "conversation_busy"
    if limit is not None and taken + len(starting) >= limit:
        return "agent_parallelism_limit_reached"
    return None if agent.has_budget(len(starting)) else "run_budget_used_up"


def conversations_starting_before(agent: Agent, key: OrderKey, at: int, replied: str | None) -> set[str]:
    """Conversations of older triggers that have become available and that no pump has seen since: they come first.

    There are some only while a timer is late, above all while a backlog of input is handled. ``replied``: the
    conversation whose paused head is about to end.
    """
    starting: set[str] = set()
    if not agent.waiting:
        return starting
    ready = [keys for site, keys in agent.ready.items() if site not in agent.mute]
    for keys in (*ready, agent.unplaced):
        for older in keys.irange(maximum=key):
            row = agent.triggers[older.id.decode()]
            is_first = row.place is not None or row.conversation_id == replied
            if not row.is_over(at) and (is_first or agent.head(row.conversation_id) is None):
                starting.add(row.conversation_id)
    return starting


def _as_count(limit: int | Literal["unlimited"]) -> int | None:
    return None if limit == "unlimited" else limit
