"""What agents and sites looked like at a moment of the past: capacity, slots, queue, workers and folders.

Read from a fold (past.py, or a snapshot of the projections and the decisions since). The moment is that of the newest
decision folded, or a later one at which nothing had been decided since: only what waits for its time depends on it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

from streams.audit.causes import Cause, Holder, causes
from streams.audit.folded_facts import FoldedFacts, holders_at_site
from streams.audit.past import Past
from streams.rules.agent.rows import TriggerRow
from streams.rules.agent.state import Agent
from streams.rules.order import format_instant
from streams.rules.site.rows import ClaimRow, GateScope
from streams.rules.site.state import Site


@dataclass(frozen=True, slots=True)
class SlotThen:
    """One of the agent's places in use. ``since``: the dispatch of its attempt."""

    slot_number: int
    trigger_id: str
    conversation_id: str
    execution_id: str
    attempt: int
    forced: bool
    since: int
    stopping: bool
    site: str | None
    worker: bool
    environment_id: str | None
    folder: str | None


@dataclass(frozen=True, slots=True)
class WaitingThen:
    """A waiting trigger; ``position`` from 1 in start order. No cause: it was about to start."""

    position: int
    trigger_id: str
    conversation_id: str
    available_at: int
    created_at: int
    accepted_at: int
    attempt: int
    causes: tuple[Cause, ...]


@dataclass(frozen=True, slots=True)
class AgentThen:
    """``limit``: what held, 1 for a serial agent. ``available`` None: unlimited. ``paused_triggers`` await a person."""

    agent_id: str
    seq: int
    limit: int | Literal["unlimited"]
    serial: bool
    running: int
    forced: int
    available: int | None
    paused: bool
    archived: bool
    parked: str | None
    run_budget: int | None
    slots: tuple[SlotThen, ...]
    queue: tuple[WaitingThen, ...]
    paused_triggers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GateThen:
    scope: GateScope
    name: str
    enabled: bool
    run_budget: int | None


@dataclass(frozen=True, slots=True)
class ClaimThen:
    """A claim on workers or a folder (compared form). ``reason``: why it waited; None: it was granted."""

    agent_id: str
    trigger_id: str
    worker: bool
    environment_id: str | None
    folder: str | None
    organization_id: str | None
    department_id: str | None
    passed: int
    reason: str | None
    holders: tuple[Holder, ...] = ()


@dataclass(frozen=True, slots=True)
class SiteThen:
    """``granted``: who holds workers and folders, the oldest first; ``waiting``: claims in start order."""

    site: str
    seq: int
    capacity: int
    workers_in_use: int
    paused: bool
    gates: tuple[GateThen, ...]
    granted: tuple[ClaimThen, ...]
    waiting: tuple[ClaimThen, ...]


@dataclass(frozen=True, slots=True)
class AsOf:
    """Everything at instant ``at``, by id. ``decisions``: how many were folded."""

    at: int
    decisions: int
    agents: tuple[AgentThen, ...]
    sites: tuple[SiteThen, ...]


def everything(past: Past, at: int) -> AsOf:
    """All agents that have any decision and all sites, at an instant not before the newest decision folded."""
    agents = sorted(past.agents.values(), key=lambda agent: agent.agent_id.encode())
    sites = sorted(past.sites.values(), key=lambda site: site.site_id.encode())
    return AsOf(
        at,
        past.decisions,
        tuple(_agent_then(agent, at, past.facts(agent)) for agent in agents),
        tuple(site_then(site) for site in sites),
    )


def agent_then(agent: Agent, at: int, sites: Mapping[str, Site]) -> AgentThen:
    """One agent. ``sites``: those that are known; a claim at another is shown as it stood in the agent's log."""
    return _agent_then(agent, at, FoldedFacts(agent, sites, {agent.agent_id: agent}, knows_all=False))


def _agent_then(agent: Agent, at: int, facts: FoldedFacts) -> AgentThen:
    limit = agent.limit
    return AgentThen(
        agent_id=agent.agent_id,
        seq=agent.row.seq,
        limit="unlimited" if limit is None else limit,
        serial=agent.is_serial,
        running=agent.running,
        forced=agent.forced_running,
        available=None if limit is None else max(0, limit - agent.running),
        paused=agent.row.paused,
        archived=agent.row.archived,
        parked=agent.row.parked,
        run_budget=agent.row.run_budget,
        slots=tuple(
            sorted(
                (_slot(agent.triggers[trigger_id]) for trigger_id in agent.executions.values()),
                key=lambda slot: slot.slot_number,
            )
        ),
        queue=tuple(
            _waiting(position, agent.triggers[key.id.decode()], at, facts)
            for position, key in enumerate(agent.waiting, start=1)
        ),
        paused_triggers=tuple(row.trigger_id for row in agent.triggers.values() if row.state == "paused"),
    )


def _slot(row: TriggerRow) -> SlotThen:
    assert row.slot_number is not None and row.execution_id is not None and row.dispatched_at is not None
    return SlotThen(
        row.slot_number,
        row.trigger_id,
        row.conversation_id,
        row.execution_id,
        row.attempt,
        row.forced,
        row.dispatched_at,
        row.grace_until is not None,
        row.site_id,
        row.worker,
        row.environment_id,
        row.folder,
    )


def _waiting(position: int, row: TriggerRow, at: int, facts: FoldedFacts) -> WaitingThen:
    return WaitingThen(
        position,
        row.trigger_id,
        row.conversation_id,
        row.available_at,
        row.created_at,
        row.accepted_at,
        row.attempt,
        tuple(causes(facts, row, at)),
    )


def site_then(site: Site) -> SiteThen:
    """One site."""
    waiting = [site.claims[id] for key, id in sorted(site.by_key.items()) if not site.claims[id].granted]
    return SiteThen(
        site=site.site_id,
        seq=site.row.seq,
        capacity=site.row.capacity,
        workers_in_use=site.pool_used,
        paused=site.row.paused,
        gates=tuple(
            GateThen(scope, name, gate.enabled, gate.run_budget) for (scope, name), gate in sorted(site.gates.items())
        ),
        granted=tuple(_claim(site.claims[site.by_key[key]], None, ()) for key in site.granted),
        waiting=tuple(_waiting_claim(site, claim) for claim in waiting),
    )


def _waiting_claim(site: Site, claim: ClaimRow) -> ClaimThen:
    reason = site.why_waiting(claim)
    return _claim(claim, reason, tuple(holders_at_site(site, claim, reason)))


def _claim(claim: ClaimRow, reason: str | None, holders: tuple[Holder, ...]) -> ClaimThen:
    return ClaimThen(
        claim.agent_id,
        claim.trigger_id,
        claim.worker,
        claim.environment_id,
        claim.path,
        claim.organization_id,
        claim.department_id,
        claim.passed,
        reason,
        holders,
    )


def is_instant(name: str) -> bool:
    """Whether a field of this name is a point in time, in microseconds: everywhere in the audits and in events."""
    return name in ("at", "since", "until") or name.endswith(("_at", "_until"))


def as_json(value: Any) -> Any:
    """Plain JSON of what the audits give: dataclasses and named tuples as objects, instants as RFC 3339."""
    if is_dataclass(value) and not isinstance(value, type):
        return as_json({field.name: getattr(value, field.name) for field in fields(value)})
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return as_json(value._asdict())
    if isinstance(value, dict):
        return {
            name: format_instant(one) if is_instant(name) and isinstance(one, int) else as_json(one)
            for name, one in value.items()
        }
    if isinstance(value, tuple | list):
        return [as_json(one) for one in value]
    return value
