"""Agents and sites as they were, read from the tables: the newest snapshot before, and the decisions since.

Reads only, and all of a question in one transaction. A cut by time is causal: a decision is never before what caused it
(F9), and where the tables hold one partition's decisions further than another's, those are left out whose cause is not
there yet.

What is asked of the tables is a generator of questions, so that who has a connection that waits (the command line) and
who has one that doesn't (the API) read the same past.
"""

from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

from psycopg.rows import TupleRow

from projections import snapshots
from projections.schema import Connection
from streams import DECISIONS, SITE_DECISIONS
from streams.audit.logged import Decider, read
from streams.audit.past import Past, walk_through
from streams.rules.agent.state import Agent
from streams.rules.site.state import Site

SEQ_MAX: Final = 2**53
INSTANT_MAX: Final = 253_402_300_799_000_000
"""The last second of the year 9999."""

_AT: Final = "'epoch'::timestamptz + %(at)s * interval '1 microsecond'"
_US: Final = "(extract(epoch FROM {}.decided_at) * 1000000)::bigint"


def _snapshots_of(table: str, snapshots: str, id: str) -> bytes:
    """(id, the newest snapshot up to the cut, where the one after it is) of some deciders, or of all."""
    return f"""
        SELECT deciders.{id}, found.seq, found.state::text, {_US.format("found")}, following.seq
          FROM {table} AS deciders
          LEFT JOIN LATERAL (
               SELECT seq, state, decided_at FROM {snapshots}
                WHERE {snapshots}.{id} = deciders.{id} AND seq <= %(seq)s AND decided_at <= {_AT}
                ORDER BY seq DESC LIMIT 1) AS found ON true
          LEFT JOIN LATERAL (
               SELECT seq FROM {snapshots}
                WHERE {snapshots}.{id} = deciders.{id} AND {snapshots}.seq > coalesce(found.seq, 0)
                ORDER BY seq LIMIT 1) AS following ON true
         WHERE %(ids)s::text[] IS NULL OR deciders.{id} = ANY(%(ids)s::text[])
         ORDER BY deciders.{id}
    """.encode()  # noqa: S608 - names of ours only


def _decisions_of(table: str, id: str) -> bytes:
    """(id, decision, instant) of some deciders between two numbers each, up to the cut, in order."""
    return f"""
        SELECT decisions.{id}, decisions.record::text, {_US.format("decisions")}
          FROM unnest(%(ids)s::text[], %(after)s::bigint[], %(until)s::bigint[]) AS wanted (id, after, until)
         CROSS JOIN LATERAL (
               SELECT {id}, seq, record, decided_at FROM {table}
                WHERE {table}.{id} = wanted.id COLLATE "C" AND seq > wanted.after AND seq <= wanted.until
                  AND decided_at <= {_AT}
                ORDER BY seq) AS decisions
         ORDER BY decisions.{id}, decisions.seq
    """.encode()  # noqa: S608


_SNAPSHOTS: Final = {
    "agent": _snapshots_of("agents", "agent_snapshots", "agent_id"),
    "site": _snapshots_of("sites", "site_snapshots", "site"),
}
_DECISIONS: Final = {"agent": _decisions_of("decisions", "agent_id"), "site": _decisions_of("site_decisions", "site")}
Kind = Literal["agent", "site"]


Result = TypeVar("Result")
Rows = list[TupleRow]


class Question(NamedTuple):
    """A query whose rows, as tuples, are to be sent back. All of one reading are asked in one transaction."""

    statement: bytes
    parameters: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Concluded(Generic[Result]):
    """There is nothing more to ask."""

    result: Result


Questions = Generator[Question, Rows, Result]


def advance(questions: Questions[Result], rows: Rows | None) -> Question | Concluded[Result]:
    """Hand over the rows of the question before, None at the beginning; what is to be asked next, or the result."""
    try:
        return next(questions) if rows is None else questions.send(rows)
    except StopIteration as ended:
        return Concluded(ended.value)


class PastThen(NamedTuple):
    """``at``: of the newest decision in it, microseconds, 0: none. ``left_out``: decisions without their causes."""

    past: Past
    at: int
    left_out: int


class _Stored(NamedTuple):
    """What the tables hold of one decider up to the cut."""

    state: str | None
    seq: int
    """Of the snapshot."""
    snapshot_at: int
    decisions: list[str]
    instants: list[int]

    @property
    def at(self) -> int:
        return self.instants[-1] if self.instants else self.snapshot_at


def agent_past(connection: Connection, agent_id: str, seq: int = SEQ_MAX, at: int = INSTANT_MAX) -> PastThen:
    """``questions_of_agent``, answered. Raises psycopg.Error besides."""
    with connection.transaction():
        _read_only(connection)
        return _answered(connection, questions_of_agent(agent_id, seq, at))


def questions_of_agent(agent_id: str, seq: int = SEQ_MAX, at: int = INSTANT_MAX) -> Questions[PastThen]:
    """One agent after its decision ``seq``, or after the last one up to an instant, with the sites at which it waits.

    No agent in it: it had no decision by then. AssertionError, KeyError: the tables are damaged.
    """
    stored = (yield from _stored("agent", seq, at, [agent_id])).get(Decider("agent", agent_id))
    past = Past()
    if stored is None or stored.at == 0:
        return PastThen(past, 0, 0)
    agent = past.agents[agent_id] = _agent(agent_id, stored)
    moment = at if seq == SEQ_MAX else stored.at
    rows = (agent.triggers[key.id.decode()] for key in agent.waiting)
    sites = sorted({row.site_id for row in rows if row.site_id is not None})
    at_sites = (yield from _stored("site", SEQ_MAX, moment, sites)) if sites else {}
    for site_id in sites:
        at_site = at_sites.get(Decider("site", site_id))
        past.sites[site_id] = Site(site_id) if at_site is None or not at_site.at else _site(site_id, at_site)
    past.decisions = agent.row.seq
    past.at = stored.at
    return PastThen(past, stored.at, 0)


def everything_past(connection: Connection, at: int = INSTANT_MAX) -> PastThen:
    """All agents and sites after the last decisions up to an instant. Raises as ``agent_past``."""
    with connection.transaction():
        _read_only(connection)
        stored = _answered(connection, _stored("agent", SEQ_MAX, at))
        stored |= _answered(connection, _stored("site", SEQ_MAX, at))
    kept = _causal(stored)
    past = Past()
    newest = 0
    for decider, one in kept.items():
        if decider.kind == "agent" and one.at:
            past.agents[decider.id] = _agent(decider.id, one)
        elif one.at:
            past.sites[decider.id] = _site(decider.id, one)
        past.decisions += one.seq + len(one.decisions)
        newest = max(newest, one.at)
    past.at = newest
    left_out = sum(len(stored[decider].decisions) - len(one.decisions) for decider, one in kept.items())
    return PastThen(past, newest, left_out)


def _read_only(connection: Connection) -> None:
    connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")


def _answered(connection: Connection, questions: Questions[Result]) -> Result:
    rows: Rows | None = None
    while not isinstance(step := advance(questions, rows), Concluded):
        rows = connection.execute(*step).fetchall()
    return step.result


def _stored(kind: Kind, seq: int, at: int, ids: list[str] | None = None) -> Questions[dict[Decider, _Stored]]:
    """What the tables hold of some deciders, or of all, in two questions however many they are."""
    cut = {"seq": min(seq, SEQ_MAX), "at": min(at, INSTANT_MAX)}
    snapshots_then = yield Question(_SNAPSHOTS[kind], {**cut, "ids": ids})
    until = [min(cut["seq"], SEQ_MAX if following is None else following) for *_, following in snapshots_then]
    wanted = {"ids": [row[0] for row in snapshots_then], "after": [row[1] or 0 for row in snapshots_then]}
    decisions = yield Question(_DECISIONS[kind], {**cut, **wanted, "until": until})
    found = {
        Decider(kind, id): _Stored(state, after or 0, newest or 0, [], [])
        for id, after, state, newest, _ in snapshots_then
    }
    for id, record, instant in decisions:
        found[Decider(kind, id)].decisions.append(record)
        found[Decider(kind, id)].instants.append(instant)
    return found


def _agent(agent_id: str, stored: _Stored) -> Agent:
    return snapshots.fold(snapshots.read(agent_id, stored.state), stored.decisions)


def _site(site_id: str, stored: _Stored) -> Site:
    """Which claims stand behind an open gate is seen at the end: nothing was granted that was not free."""
    site = snapshots.fold_site(snapshots.read_site(site_id, stored.state), stored.decisions)
    walk_through(site, ("site",))
    return site


def _causal(stored: dict[Decider, _Stored]) -> dict[Decider, _Stored]:
    """The same without decisions, from each decider's end, whose cause is not in it."""
    causes = {decider: _causes(decider, one) for decider, one in stored.items()}
    last: dict[Decider, int] = defaultdict(int)
    last |= {decider: one.seq + len(one.decisions) for decider, one in stored.items()}
    is_settled = False
    while not is_settled:
        is_settled = True
        for decider, one in stored.items():
            for seq, sender, needed in causes[decider]:
                if seq <= last[decider] and last[sender] < needed:
                    last[decider] = max(one.seq, seq - 1)
                    is_settled = False
                    break
    return {
        decider: one._replace(
            decisions=one.decisions[: last[decider] - one.seq], instants=one.instants[: last[decider] - one.seq]
        )
        for decider, one in stored.items()
    }


def _causes(decider: Decider, stored: _Stored) -> list[tuple[int, Decider, int]]:
    """(seq, who sent what caused it, that decision's seq) of the decisions that a message caused."""
    topic = DECISIONS.name if decider.kind == "agent" else SITE_DECISIONS.name
    found = []
    for record in stored.decisions:
        logged = read(topic, 0, 0, record.encode())
        if logged.cause is not None:
            found.append((logged.decision.seq, *logged.cause))
    return found
