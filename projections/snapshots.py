"""The folded state of an agent after every 1,000th of its decisions: the past can be read without its beginning.

Pure. A snapshot is made of the one before and the decisions since, all of which the projections hold; so it may be made
any time after its decision was applied, and is the same whenever that is.

It holds the agent's settings and its live triggers, as the rules keep them: what a slot, a queue and a limit of the
past are read from. Left out are the ids that the rules remember for days and the outcomes of conversations, which
would make every snapshot of a busy agent as large as a week of its work, and the hash of the decision, which only the
exact bytes give. Leases are those of the dispatch: signs of life are no decisions.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from pydantic import TypeAdapter

from streams.rules import events
from streams.rules.agent.evolve import Origin, evolve
from streams.rules.agent.rows import AgentRow, TriggerRow
from streams.rules.agent.state import Agent

SNAPSHOT_DECISIONS: Final = 1_000


@dataclass(frozen=True, slots=True)
class Stored:
    """What a snapshot's JSON holds."""

    agent: AgentRow
    triggers: list[TriggerRow]


_STORED: Final = TypeAdapter(Stored)


def newest_due(seq: int) -> int:
    """The newest decision up to ``seq`` after which there is a snapshot; 0: none."""
    return seq - seq % SNAPSHOT_DECISIONS


def read(agent_id: str, state: str | bytes | None) -> Agent:
    """The agent as a snapshot holds it; None: as it was before its first decision."""
    agent = Agent(agent_id)
    if state is not None:
        stored = _STORED.validate_json(state)
        agent.row = stored.agent
        for row in stored.triggers:
            agent.load_trigger(row)
    agent.loaded(0)
    return agent


def write(agent: Agent) -> str:
    """The JSON of the agent's settings and live triggers, these in the order of their acceptance."""
    triggers = sorted(agent.triggers.values(), key=lambda row: (row.accepted_seq, row.trigger_id))
    header = replace(agent.row, prev=None, todo=None, todo_conversation_id=None, todo_since=None)
    return _STORED.dump_json(Stored(header, triggers), exclude_defaults=True).decode()


def fold(agent: Agent, decisions: Iterable[bytes | str]) -> Agent:
    """Apply decisions in order, each the JSON of one, to the agent, and return it.

    AssertionError or KeyError: a decision doesn't fit, the log is corrupt.
    """
    for value in decisions:
        decision = events.read_decision(value.encode() if isinstance(value, str) else value)
        assert decision.seq == agent.row.seq + 1, f"decision {decision.seq} follows {agent.row.seq}"
        origin = Origin(decision.seq, decision.at, decision.command)
        for event in decision.events:
            if not isinstance(event, events.Forgotten):
                evolve(agent, event, origin)
        agent.row.seq = decision.seq
        agent.remembered.clear()
        agent.conversations.clear()
        agent.changed.clear()
        agent.deadlines.clear()
        agent.ended.clear()
    return agent
