"""What a site's decider does with each command (site protocol, Z1 to Z4 and GRANT).

After every command what can be granted is granted, the oldest first. One step makes at most ``STEP_CHANGES_MAX``
changes that write rows; what is left is noted and done by Continue steps, which come before anything else. Nothing is
granted while a walk over claims behind a gate, or in a deleted folder, is not at its end.
"""

from dataclasses import dataclass, field
from typing import assert_never

from streams.rules import limits, site_events
from streams.rules.agent.rows import DEFAULT_SITE
from streams.rules.agent.state import DIGEST_DIGITS
from streams.rules.folders import path_of, segments
from streams.rules.messages import content_sha256
from streams.rules.site.evolve import SiteOrigin, evolve, settle
from streams.rules.site.rows import ClaimId, ClaimRow
from streams.rules.site.state import GateId, Site, key_of, place_of
from streams.rules.site_messages import (
    Claim,
    ConfigureSite,
    ContinueSite,
    Degraded,
    DeleteEnvironment,
    DeleteFolder,
    Denied,
    Gate,
    Granted,
    InvalidSite,
    PauseSite,
    Recall,
    Release,
    ResumeSite,
    Sender,
    Waiting,
)
from streams.rules.verdicts import Ignored, Refusal

SignalOutput = Granted | Waiting | Denied | Recall | Degraded


@dataclass(slots=True)
class SiteStep:
    """One decision in the making."""

    site: Site
    at: int
    command: site_events.SiteCommand
    seq: int
    emitted: list[site_events.SiteEvent] = field(default_factory=list)
    outputs: list[SignalOutput] = field(default_factory=list)
    refusal: Refusal | None = None
    ignored: Ignored | None = None
    repeats: int | None = None
    more: bool = False
    changes_left: int = limits.STEP_CHANGES_MAX
    parked_left: int = limits.STEP_PARKED_MAX

    def emit(self, event: site_events.SiteEvent) -> None:
        self.emitted.append(event)
        evolve(self.site, event, SiteOrigin(self.at, self.command))

    def sender(self) -> Sender:
        """Of a message that the event to be emitted next causes."""
        return Sender(decider=self.site.site_id, seq=self.seq, index=len(self.emitted))

    @property
    def has_decision(self) -> bool:
        return bool(self.emitted) or self.refusal is not None or self.ignored is not None


def decide(site: Site, command: site_events.SiteCommand, at: int, defaults: limits.Defaults) -> SiteStep:
    """Handle one command at instant ``at``; the site's state is changed by the events of the step that is returned."""
    step = SiteStep(site, at, command, site.row.seq + 1)
    if not site.row.created and site.site_id == DEFAULT_SITE:
        step.emit(site_events.SiteConfigured(capacity=defaults.pool_capacity))
    match command:
        case Claim():
            _claim(step, command)
        case Release():
            _release(step, command)
        case ContinueSite():
            pass
        case InvalidSite():
            step.refusal = Refusal(code="invalid_record", reason=command.reason)
        case ConfigureSite() | PauseSite() | ResumeSite() | Gate() | DeleteFolder() | DeleteEnvironment():
            _control(step, command, defaults)
        case _:
            assert_never(command)
    _give_out(step)
    if isinstance(command, Claim) and step.ignored is None:
        _answer(step, command)
    site.row.todo_grant = step.more and not site.row.todo
    if step.has_decision:
        settle(site, command, step.seq, at, step.refusal, step.ignored)
    if step.more:
        site.row.todo_since = site.row.todo_since or step.seq
    else:
        site.row.todo_since = None
    return step


# Claims


def _claim(step: SiteStep, command: Claim) -> None:
    known = step.site.claims.get(ClaimId(command.agent_id, command.trigger_id))
    if known is not None:
        if command.n <= known.n:
            step.ignored = Ignored(reason="duplicate" if command.n == known.n else "stale")
            return
        _supersede(step, known)
    step.emit(
        site_events.ClaimOpened(
            agent_id=command.agent_id, trigger_id=command.trigger_id, n=command.n, path=_compared_path(command)
        )
    )
    claim = step.site.claims[ClaimId(command.agent_id, command.trigger_id)]
    if step.site.is_deleted(claim):
        _degrade(step, claim)


def _supersede(step: SiteStep, known: ClaimRow) -> None:
    """An agent releases a claim before it makes another for the same trigger: this one's release was given up.

    Whether an attempt had run on it is not known any more; one that was granted counts as used.
    """
    step.emit(
        site_events.ClaimClosed(agent_id=known.agent_id, trigger_id=known.trigger_id, n=known.n, started=known.granted)
    )


def _compared_path(command: Claim) -> str | None:
    """Without a folder a claim for an environment is for all of it."""
    if command.environment_id is None:
        return None
    return path_of(segments(command.path or "/"))


def _degrade(step: SiteStep, claim: ClaimRow) -> None:
    step.outputs.append(
        Degraded(at=step.at, sender=step.sender(), agent_id=claim.agent_id, trigger_id=claim.trigger_id, n=claim.n)
    )
    step.emit(site_events.ClaimDegraded(agent_id=claim.agent_id, trigger_id=claim.trigger_id, n=claim.n))


def _answer(step: SiteStep, command: Claim) -> None:
    """Tell the agent of a claim that was not granted in the step that brought it."""
    claim = step.site.claims[ClaimId(command.agent_id, command.trigger_id)]
    if claim.granted:
        return
    reason = step.site.why_waiting(claim)
    if not command.ask:
        step.outputs.append(
            Waiting(
                at=step.at,
                sender=step.sender(),
                agent_id=claim.agent_id,
                trigger_id=claim.trigger_id,
                n=claim.n,
                reason=reason,
            )
        )
        return
    holders, count = step.site.holders(claim, reason)
    step.outputs.append(
        Denied(
            at=step.at,
            sender=step.sender(),
            agent_id=claim.agent_id,
            trigger_id=claim.trigger_id,
            n=claim.n,
            reason=reason,
            holders=tuple(holders),
            holders_count=count,
        )
    )
    step.emit(site_events.ClaimDenied(agent_id=claim.agent_id, trigger_id=claim.trigger_id, n=claim.n, reason=reason))


def _release(step: SiteStep, command: Release) -> None:
    """The claim ends, whatever its state; a release of another number is of one that ended before."""
    claim = step.site.claims.get(ClaimId(command.agent_id, command.trigger_id))
    if claim is None or claim.n != command.n:
        step.ignored = Ignored(reason="stale")
        return
    opened = [gate for gate in claim.gates if not step.site.gate(gate).is_open]
    step.emit(
        site_events.ClaimClosed(
            agent_id=claim.agent_id, trigger_id=claim.trigger_id, n=claim.n, started=bool(command.started)
        )
    )
    for gate in opened:
        if step.site.gate(gate).is_open:  # a budget that was given back
            step.emit(site_events.WalkNoted(walk=("gate", *gate)))


# Controls

SiteControls = ConfigureSite | PauseSite | ResumeSite | Gate | DeleteFolder | DeleteEnvironment


def _control(step: SiteStep, command: SiteControls, defaults: limits.Defaults) -> None:
    site = step.site
    remembered = site.remembered.get(command.id)
    if remembered is not None:
        step.repeats = remembered.seq
    if remembered is not None and remembered.digest == content_sha256(command)[:DIGEST_DIGITS]:
        step.ignored = Ignored(reason="duplicate", first_seq=remembered.seq)
    elif command.decide_before is not None and step.at >= command.decide_before:
        step.refusal = Refusal(code="request_expired")
    elif remembered is not None:
        step.refusal = Refusal(code="trigger_id_conflict", reason=f"answered before by decision {remembered.seq}")
    elif isinstance(command, ConfigureSite):
        _configure(step, command, defaults)
    elif not site.row.created:
        step.refusal = Refusal(code="site_unknown")
    elif isinstance(command, PauseSite | ResumeSite):
        _pause(step, isinstance(command, PauseSite))
    elif isinstance(command, Gate):
        _gate(step, command)
    elif isinstance(command, DeleteFolder):
        _delete(step, command.environment_id, path_of(segments(command.path)))
    else:
        _delete(step, command.environment_id, "")


def _configure(step: SiteStep, command: ConfigureSite, defaults: limits.Defaults) -> None:
    row = step.site.row
    capacity = command.capacity
    if capacity is None:
        stays = row.created and "capacity" not in command.model_fields_set
        capacity = row.capacity if stays else defaults.pool_capacity
    if row.created and row.capacity == capacity:
        step.ignored = Ignored(reason="unchanged")
        return
    was_created = row.created
    step.emit(site_events.SiteConfigured(capacity=capacity))
    if not was_created:
        step.emit(site_events.WalkNoted(walk=("site",)))


def _pause(step: SiteStep, pause: bool) -> None:
    if step.site.row.paused == pause:
        step.ignored = Ignored(reason="unchanged")
        return
    step.emit(site_events.SitePaused() if pause else site_events.SiteResumed())
    step.emit(site_events.WalkNoted(walk=("site",)))


def _gate(step: SiteStep, command: Gate) -> None:
    gate_id: GateId = (command.scope, command.name)
    gate = step.site.gate(gate_id)
    was_open, was_enabled = gate.is_open, gate.enabled
    enabled = gate.enabled if command.enabled is None else command.enabled
    run_budget = command.run_budget if "run_budget" in command.model_fields_set else gate.run_budget
    if (enabled, run_budget) == (gate.enabled, gate.run_budget):
        step.ignored = Ignored(reason="unchanged")
        return
    step.emit(site_events.GateChanged(scope=command.scope, name=command.name, enabled=enabled, run_budget=run_budget))
    if step.site.gate(gate_id).is_open != was_open or enabled != was_enabled:  # also one whose budget was used up
        step.emit(site_events.WalkNoted(walk=("gate", *gate_id)))


def _delete(step: SiteStep, environment_id: str, path: str) -> None:
    step.emit(site_events.FolderDeleted(environment_id=environment_id, path=path))
    step.emit(site_events.WalkNoted(walk=("deletion", environment_id, path)))


# Giving out


def _give_out(step: SiteStep) -> None:
    """Walk what is to be walked, then grant the oldest that can be granted, as far as one step goes."""
    site = step.site
    while _walk(step) and (claim := site.next_grantable()) is not None:
        if step.changes_left == 0:
            step.more = True
            return
        step.changes_left -= 1
        _grant(step, claim)


def _walk(step: SiteStep) -> bool:
    """Whether no walk is left over."""
    row = step.site.row
    while row.todo:
        walk = row.todo[0]
        seen = list(step.site.walk(walk, row.todo_cursor, step.parked_left))
        for claim in seen:
            if not _visit(step, walk, claim):
                step.more = True
                return False
            step.parked_left -= 1
            row.todo_cursor = (claim.agent_id, claim.trigger_id)
        if step.parked_left == 0:
            step.more = True
            return False
        row.todo.pop(0)
        row.todo_cursor = ("", "")
    return True


def _visit(step: SiteStep, walk: tuple[str, ...], claim: ClaimRow) -> bool:
    """Do what a walk does to one claim; False if that is more than this step may."""
    site = step.site
    if walk[0] == "deletion":
        if claim.granted or not site.is_deleted(claim):
            return True
        if step.changes_left == 0:
            return False
        step.changes_left -= 1
        _degrade(step, claim)
    elif not claim.granted:
        if site.is_open(claim):
            site.show(claim)
        else:
            site.hide(claim)
    elif site.recalls(walk):
        if step.changes_left == 0:
            return False
        step.changes_left -= 1
        step.outputs.append(
            Recall(at=step.at, sender=step.sender(), agent_id=claim.agent_id, trigger_id=claim.trigger_id, n=claim.n)
        )
        step.emit(site_events.ClaimRecalled(agent_id=claim.agent_id, trigger_id=claim.trigger_id, n=claim.n))
    return True


def _grant(step: SiteStep, claim: ClaimRow) -> None:
    site = step.site
    place = place_of(claim)
    oldest = site.forest.oldest_waiting(place) if place is not None else None
    passed = site.by_key[oldest] if oldest is not None and oldest < key_of(claim) else None
    step.outputs.append(
        Granted(at=step.at, sender=step.sender(), agent_id=claim.agent_id, trigger_id=claim.trigger_id, n=claim.n)
    )
    step.emit(
        site_events.ClaimGranted(
            agent_id=claim.agent_id,
            trigger_id=claim.trigger_id,
            n=claim.n,
            passed_agent_id=passed.agent_id if passed else None,
            passed_trigger_id=passed.trigger_id if passed else None,
        )
    )
    for gate in claim.gates:
        if not site.gate(gate).is_open:  # that was the last of its budget
            step.emit(site_events.WalkNoted(walk=("gate", *gate)))
