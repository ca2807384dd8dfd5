"""Agents as they were, read from the tables: the newest snapshot before, and the decisions since (at most 1,000).

Reads only, in one transaction. What the projector has not applied yet is not there; ``at`` says how far an agent went.
"""

from typing import Final, NamedTuple

from projections import snapshots
from projections.schema import Connection
from streams.rules.agent.state import Agent
from streams.rules.order import parse_instant

SEQ_MAX: Final = 2**53
INSTANT_MAX: Final = 253_402_300_799_000_000
"""The last second of the year 9999."""

_SNAPSHOT: Final = """
    SELECT seq, state::text FROM agent_snapshots
     WHERE agent_id = %(agent_id)s AND seq <= %(seq)s
       AND decided_at <= 'epoch'::timestamptz + %(at)s * interval '1 microsecond'
     ORDER BY seq DESC LIMIT 1
"""
_DECISIONS: Final = """
    SELECT record::text, record->>'at' FROM decisions
     WHERE agent_id = %(agent_id)s AND seq > %(after)s AND seq <= %(seq)s
       AND decided_at <= 'epoch'::timestamptz + %(at)s * interval '1 microsecond'
     ORDER BY seq
"""


class AgentPast(NamedTuple):
    """``at``: the instant of the newest decision folded since the snapshot, microseconds; None: there is none since."""

    agent: Agent
    at: int | None
    decisions: int


def agent_past(connection: Connection, agent_id: str, seq: int = SEQ_MAX, at: int = INSTANT_MAX) -> AgentPast:
    """The agent after its decision ``seq``, or after the last one up to instant ``at``; row.seq 0: it had none yet.

    Raises psycopg.Error. AssertionError or KeyError: the tables hold decisions that don't fit one another.
    """
    with connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        about = {"agent_id": agent_id, "seq": min(seq, SEQ_MAX), "at": min(at, INSTANT_MAX)}
        found = connection.execute(_SNAPSHOT, about).fetchone()
        after, state = found if found is not None else (0, None)
        since = connection.execute(_DECISIONS, {**about, "after": after}).fetchall()
    agent = snapshots.fold(snapshots.read(agent_id, state), [record for record, _ in since])
    return AgentPast(agent, parse_instant(since[-1][1]) if since else None, agent.row.seq)
