"""The states of agents and sites in comparable form, and what must hold of them after every step."""

from dataclasses import asdict, replace
from typing import Any

from streams.rules.agent.state import Agent
from streams.rules.site.state import Site

Json = dict[str, Any]


def content(agent: Agent) -> Json:
    """Everything that an agent's state is made of, in comparable form."""
    return {
        "row": asdict(agent.row),
        "triggers": [asdict(row) for row in agent.triggers.values()],
        "remembered": {key: asdict(row) for key, row in agent.remembered.items()},
        "remembered in order": [row.at for row in agent.remembered.values()],
        "conversations": {id: asdict(row) for id, row in agent.conversations.items()},
        "conversations in order": [row.at for row in agent.conversations.values()],
        "lines": {
            id: (list(line.placed), sorted(line.unplaced or ()), line.running) for id, line in agent.lines.items()
        },
        "waiting": list(agent.waiting),
        "unplaced": list(agent.unplaced),
        "ready": {site: list(keys) for site, keys in agent.ready.items() if keys},
        "asking": list(agent.asking),
        "held": list(agent.held),
        "urgent": list(agent.urgent),
        "claimed": list(agent.claimed),
        "mute": agent.mute,
        "watches": {
            conversation_id: {watcher: asdict(row) for watcher, row in watchers.items()}
            for conversation_id, watchers in agent.watches.items()
        },
        "untold": list(agent.untold),
        "executions": list(agent.executions.items()),
        "payload_bytes": agent.payload_bytes,
        "forced_running": agent.forced_running,
        "next slot": agent.free_slot(),
    }


def site_content(site: Site, without_head: bool = False) -> Json:
    """Everything that a site's state is made of, in comparable form."""
    keys = sorted(site.by_key)
    return {
        "row": asdict(replace(site.row, seq=0, prev=None) if without_head else site.row),
        "gates": {id: asdict(row) for id, row in site.gates.items()},
        "deletions": {id: asdict(row) for id, row in site.deletions.items()},
        "remembered": [(id, asdict(row)) for id, row in site.remembered.items()],
        "claims": {id: asdict(row) for id, row in site.claims.items()},
        "by key": [(key, site.by_key[key]) for key in keys],
        "all": list(site.all_claims),
        "at gate": {id: list(ids) for id, ids in site.at_gate.items()},
        "shown": sorted(site.shown),
        "granted": list(site.granted),
        "folderless": [list(some) for some in site.folderless],
        "best": (site.forest.best(False), site.forest.best(True)),
        "pool used": site.pool_used,
    }


def without_leases(agent: Agent) -> Agent:
    """The same state as the log of decisions gives it: signs of life and left-over work of a step are not in it."""
    copy = Agent(agent.agent_id)
    copy.row = replace(agent.row, todo=None, todo_conversation_id=None, todo_since=None)
    for name in ("remembered", "conversations"):
        setattr(copy, name, dict(getattr(agent, name)))
    copy.watches = {id: dict(watchers) for id, watchers in agent.watches.items()}
    for row in agent.triggers.values():
        copy.load_trigger(replace(row, lease_until=row.lease_until and 0, last_seen_at=None))
    copy.loaded(0)
    return copy


def check_room(agent: Agent, now: int, next_deadline: int | None) -> None:
    """I4, I6, I7: what a pump leaves behind, unless something is left over or overdue."""
    slots = [row.slot_number for row in agent.triggers.values() if row.state == "running"]
    assert len(set(slots)) == len(slots)
    assert agent.free_slot() == min(set(range(1, len(slots) + 2)) - set(slots)), "the lowest free number is next"
    if agent.row.todo is None and agent.row.parked is None:
        assert not agent.untold, "E2: whoever depends on a conversation knows how it stands"
    if (next_deadline is not None and next_deadline <= now) or agent.row.todo is not None:
        return
    heads = {line.head for line in agent.lines.values()}
    for row in agent.triggers.values():
        if row.state != "waiting":
            continue
        assert row.place is not None or row.is_blocked or row.available_at > now
        assert row.trigger_id in heads or row.claim_n is None, "I6: only the head has a claim"
        assert not row.is_urgent or row.claim_state in ("asking", "standing"), "I4: an ask or force never waits"
        is_ready = row.claim_state == "held" or (
            row.claim_state is None and row.site_id not in agent.mute and agent.budget_left
        )
        if row.trigger_id in heads and row.available_at <= now and is_ready and not agent.held_back:
            assert agent.row.run_budget == 0 or not agent.room_for(row.key), "I7: nobody waits beside room"
    assert agent.has_room or len(agent.held) <= 1, "at most one grant is kept while the agent is full"
    assert not (agent.held_back and agent.claimed), "a paused agent keeps no claim"
