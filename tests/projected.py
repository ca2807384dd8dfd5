"""Rows of the projections against the state that the rules hold (I8), whoever has made the rows."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, Final

from projections.row_sets import RowSets
from projections.rows import Named, Rows
from projections.store import LogRecord
from projections.tables import FOLDED, TABLES
from streams import DECISIONS, SITE_DECISIONS
from streams.rules import limits
from streams.rules.agent.rows import TriggerRow
from streams.rules.agent.state import Agent
from streams.rules.events import Decision, read_decision
from streams.rules.site.state import Site
from streams.rules.site_events import SiteDecision, read_site_decision

READERS: Final[dict[str, Callable[[bytes], Decision | SiteDecision]]] = {
    DECISIONS.name: read_decision,
    SITE_DECISIONS.name: read_site_decision,
}
SETTINGS = (
    *("seq", "created", "serial", "max_backlog_depth", "default_timeout_seconds", "agent_type", "display_name"),
    *("default_environment_id", "default_folder", "run_budget", "owner", "paused", "archived", "parked"),
)
OF_TRIGGER = (
    *("state", "conversation_id", "kind", "created_at", "available_at", "accepted_at", "accepted_seq", "interactive"),
    *("timeout_seconds", "max_attempts", "requested_by", "expires_at", "heartbeat_seconds", "execution_class"),
    *("restarts", "priority", "site", "worker", "environment_id", "folder", "organization_id", "department_id"),
    *("approval_required", "failures_approved", "degraded", "payload_bytes", "attempt", "failures", "absences"),
    *("execution_id", "grace_until"),
)
OF_CLAIM = (
    *("n", "available_at", "created_at", "accepted_at", "worker", "environment_id", "path"),
    *("organization_id", "department_id", "granted_seq", "passed"),
)


class Shelf:
    """Rows kept and changed as the store does it, in memory: what isn't named is neither read nor written."""

    def __init__(self) -> None:
        self.rows = Rows()

    def apply(self, records: Iterable[LogRecord]) -> None:
        """A batch. Everything is read anew, as after a start."""
        decisions = [(record, READERS[record.topic](record.value or b"")) for record in records]
        named, rows, stored = Named(), Rows(), self.rows.by_table()
        for _, decision in decisions:
            named.add(decision)
        for _ in range(2):
            for name, kept in rows.by_table().items():
                kept.update({key: stored[name][key] for key in getattr(named, name) & stored[name].keys()})
            named.follow(rows)
        for record, decision in decisions:
            assert record.value is not None
            rows.apply(record.topic, record.partition, record.offset, decision, record.value)
        for name, kept in rows.by_table().items():
            assert kept.keys() <= getattr(named, name), f"a row of {name} was made that is not named"
            for key in getattr(named, name):
                stored[name].pop(key, None)
            stored[name].update(kept)
        for name in ("decisions", "decision_ids", "site_decisions"):
            getattr(self.rows, name).extend(getattr(rows, name))

    def apply_in_batches(self, records: Sequence[LogRecord], chance: random.Random) -> None:
        rest = [record for record in records if record.topic in READERS]
        while rest:
            size = chance.choice([1, 1, 2, 7, 100])
            self.apply(rest[:size])
            rest = rest[size:]


def as_dicts(rows: RowSets) -> dict[str, list[Any]]:
    """All rows, in comparable form."""
    found: dict[str, list[Any]] = {
        name: sorted((asdict(row) for row in kept.values()), key=repr) for name, kept in rows.by_table().items()
    }
    return found | {name: sorted(getattr(rows, name)) for name in ("decisions", "decision_ids", "site_decisions")}


assert {table.name for table in TABLES if table in FOLDED} == set(RowSets().by_table())


# Agents


def check_agent_rows(rows: RowSets, agent: Agent | None, agent_id: str) -> None:
    """The rows of one agent against the state that its decider holds."""
    row = rows.agents.get(agent_id)
    if agent is None or agent.row.seq == 0:
        assert row is None
        return
    assert row is not None
    triggers = agent.triggers.values()
    states = [trigger.state for trigger in triggers]
    assert {name: getattr(row, name) for name in SETTINGS} == {name: getattr(agent.row, name) for name in SETTINGS}
    limit = agent.row.parallelism_limit
    assert row.parallelism_limit == (None if limit == "unlimited" else limit)
    assert [row.paused_at is not None, row.archived_at is not None, row.parked_at is not None] == [
        *(row.paused, row.archived, row.parked is not None)
    ]
    assert (row.running, row.waiting, row.on_hold, row.forced) == (
        *(states.count("running"), states.count("waiting"), states.count("paused")),
        agent.forced_running,
    )
    standing = sum(trigger.claim_state == "standing" for trigger in triggers)
    assert (row.asking, row.standing, row.held) == (len(agent.asking), standing, len(agent.held))
    live = {key[1]: one for key, one in rows.triggers.items() if key[0] == agent_id and one.ended_at is None}
    assert live.keys() == agent.triggers.keys()
    for trigger in triggers:
        _check_trigger(rows, agent_id, trigger)
    claimed = {trigger.trigger_id for trigger in triggers if trigger.claim_state or trigger.late}
    kept = {key[1] for key in rows.trigger_claims if key[0] == agent_id}
    assert claimed <= kept <= agent.triggers.keys(), "claims of ended triggers are gone"
    dependent = {trigger.trigger_id for trigger in triggers if trigger.depends_on}
    assert {key[1] for key in rows.dependencies if key[0] == agent_id} == dependent
    _check_conversations(rows, agent)


def _check_trigger(rows: RowSets, agent_id: str, trigger: TriggerRow) -> None:
    row = rows.triggers[agent_id, trigger.trigger_id]
    assert {name: getattr(row, name) for name in OF_TRIGGER} == {name: getattr(trigger, name) for name in OF_TRIGGER}
    place = None if row.place_rank is None else (row.place_rank, row.place_number)
    assert (place, row.approved_at is not None) == (trigger.place, trigger.approved)
    outcomes = [
        (one.dependency_agent_id, one.dependency_conversation_id, one.outcome)
        for position in range(row.dependencies)
        for one in (rows.dependencies[agent_id, trigger.trigger_id, position],)
    ]
    assert outcomes == [(*on, told) for on, told in zip(trigger.depends_on, trigger.outcomes, strict=True)]
    claim = rows.trigger_claims.get((agent_id, trigger.trigger_id))
    if claim is None:
        assert (trigger.claim_n, trigger.late) == (None, 0)
    else:
        assert (claim.n, claim.state, claim.asked_at, claim.late, claim.site) == (
            *(trigger.claim_n, trigger.claim_state, trigger.asked_at, trigger.late),
            trigger.site_id,
        )
        assert (claim.reason == "site_not_answering") == trigger.mute
    running = [
        (one.execution_id, one.slot_number, one.forced, one.dispatched_at)
        for key, one in rows.attempts.items()
        if key[:2] == (agent_id, trigger.trigger_id) and one.ended_at is None
    ]
    current = (trigger.execution_id, trigger.slot_number, trigger.forced, trigger.dispatched_at)
    assert running == ([current] if trigger.state == "running" else [])


def _check_conversations(rows: RowSets, agent: Agent) -> None:
    kept = [one for key, one in rows.conversations.items() if key[0] == agent.agent_id]
    assert {
        one.conversation_id: (one.last_outcome, one.last_outcome_at)
        for one in kept
        if one.last_outcome is not None and not one.forgotten
    } == {id: (row.outcome, row.at) for id, row in agent.conversations.items()}
    conversations = [trigger.conversation_id for trigger in agent.triggers.values()]
    assert {one.conversation_id: one.live for one in kept if one.live} == {
        id: conversations.count(id) for id in conversations
    }
    accepted = [one.conversation_id for key, one in rows.triggers.items() if key[0] == agent.agent_id]
    assert {one.conversation_id for one in kept} >= set(accepted)
    assert all(one.triggers > 0 for one in kept), "who was refused later leaves no conversation"


# Sites


def check_site_rows(rows: RowSets, site: Site | None, site_id: str) -> None:
    """The rows of one site against the state that its decider holds."""
    row = rows.sites.get(site_id)
    if site is None or site.row.seq == 0:
        assert row is None
        return
    assert row is not None
    granted = [claim for claim in site.claims.values() if claim.granted]
    assert (row.seq, row.created, row.capacity, row.paused, row.paused_at is not None) == (
        *(site.row.seq, site.row.created, site.row.capacity, site.row.paused),
        site.row.paused,
    )
    assert (row.waiting, row.granted, row.workers) == (
        *(len(site.claims) - len(granted), len(granted)),
        site.pool_used,
    )
    gates = [one for key, one in rows.site_gates.items() if key[0] == site_id]
    assert {(one.scope, one.name): (one.enabled, one.run_budget, one.budget_seq) for one in gates} == {
        id: (gate.enabled, gate.run_budget, gate.budget_seq) for id, gate in site.gates.items()
    }
    assert all(
        (one.disabled_at is None, one.run_budget_at is None) == (one.enabled, one.run_budget is None) for one in gates
    )
    deletions = [one for key, one in rows.site_deletions.items() if key[0] == site_id]
    assert {(one.environment_id, one.path): one.deleted_at for one in deletions} == {
        id: deletion.deleted_at for id, deletion in site.deletions.items()
    }
    kept = {(one.agent_id, one.trigger_id): one for key, one in rows.site_claims.items() if key[0] == site_id}
    assert kept.keys() == site.claims.keys()
    for id, claim in site.claims.items():
        one = kept[id]
        assert {name: getattr(one, name) for name in OF_CLAIM} == {name: getattr(claim, name) for name in OF_CLAIM}
        assert (one.granted_at is not None, one.blocks_since is not None) == (
            *(claim.granted, claim.passed >= limits.CLAIM_PASSES_MAX),
        )
