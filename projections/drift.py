"""Whether tables and stored rows still say what the log says: a few agents and sites at a time, again and again.

``berth projections diff`` and ``berth verify`` compare everything, and take as long as that takes. This runs beside the
projector, with a connection and a consumer of its own, reads a bounded amount each round, holds no lock, and writes
nothing. A round compares

- the rows of the next few agents and sites with the fold of their decisions in the tables, from the newest snapshot on:
  both in one view of the database, so that they are of the same decision;
- the heads in the next few rows of the changelog (number and digest of the newest decision) with the decision of that
  number in the log, where the tables are as far.

What differs is counted and logged once a round, with what to do.
"""

import asyncio
import hashlib
import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Self

import psycopg
import structlog
from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError
from psycopg.rows import TupleRow

from projections import metrics, schema, snapshots
from projections.schema import Connection
from streams import CHANGELOG, DECISIONS, SITE_DECISIONS
from streams.rules.agent.state import Agent
from streams.rules.site.state import Site

ROUND_SECONDS: Final = 5.0
DECIDERS_MAX: Final = 3
"""Of agents, and of sites, whose rows are compared in a round."""
DECISIONS_MAX: Final = 2 * snapshots.SNAPSHOT_DECISIONS
"""Of one of them since its newest snapshot; with more it is left out until that is made."""
HEADS_MAX: Final = 5
CHANGELOG_RECORDS_MAX: Final = 500
FETCH_MILLISECONDS: Final = 500

Kind = Literal["agents", "sites"]
KINDS: Final[tuple[Kind, Kind]] = ("agents", "sites")
log = structlog.get_logger()


class Drifted(NamedTuple):
    """``is_row``: a stored row of the decider's worker; else a table. ``why``: what it says, and what it should."""

    kind: Kind
    id: str
    is_row: bool
    why: str


class Drift:
    """Use: ``async with Drift(...) as drift``, then ``round``, again and again. Raises psycopg.Error or KafkaError."""

    def __init__(self, bootstrap: str, url: str, partitions: int) -> None:
        self._partitions = partitions
        self._url = url
        self._after: dict[Kind, str] = {"agents": "", "sites": ""}
        self._partition = 0
        self._position: int | None = None
        self._connection: Connection | None = None
        self._consumer = AIOKafkaConsumer(
            bootstrap_servers=bootstrap,
            isolation_level="read_committed",
            enable_auto_commit=False,
            auto_offset_reset="none",
            max_partition_fetch_bytes=256 * 1024,
        )

    async def __aenter__(self) -> Self:
        self._connection = await asyncio.to_thread(schema.connect, self._url)
        await self._consumer.start()
        topics = (CHANGELOG.name, DECISIONS.name, SITE_DECISIONS.name)
        places = [TopicPartition(topic, number) for topic in topics for number in range(self._partitions)]
        self._consumer.assign(places)
        self._consumer.pause(*places)  # one is read at a time, from where it is told to
        for place, beginning in (await self._consumer.beginning_offsets(places)).items():
            self._consumer.seek(place, beginning)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._connection is not None:
            self._connection.close()
        await self._consumer.stop()

    async def round(self) -> list[Drifted]:
        """What differs among the next few; counted in the metrics."""
        found: list[Drifted] = []
        for kind in KINDS:
            found += await asyncio.to_thread(self._compare_rows, kind)
        for head in await self._next_heads():
            drifted = await self._compare_head(head)
            if drifted is not None:
                found.append(drifted)
        return found

    # Tables

    def _compare_rows(self, kind: Kind) -> list[Drifted]:
        assert self._connection is not None
        found = []
        with self._connection.transaction():
            self._connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            ids = [id for (id,) in self._connection.execute(_NEXT[kind], (self._after[kind], DECIDERS_MAX))]
            self._after[kind] = ids[-1] if len(ids) == DECIDERS_MAX else ""
            for id in ids:
                why = _difference(self._connection, kind, id)
                metrics.DRIFT_CHECKS.labels(decider=kind).inc()
                if why is not None:
                    metrics.DRIFTS.labels(decider=kind).inc()
                    found.append(Drifted(kind, id, False, why))
        return found

    # Heads of stored rows

    async def _next_heads(self) -> list["_Head"]:
        """Those in the next piece of the changelog, the newest of each decider."""
        place = TopicPartition(CHANGELOG.name, self._partition)
        if self._position is None:
            self._position = (await self._consumer.beginning_offsets([place]))[place]
        records = await self._read(place, self._position, CHANGELOG_RECORDS_MAX)
        self._position = await self._consumer.position(place)
        if not records:  # its end: on with the next
            self._partition = (self._partition + 1) % self._partitions
            self._position = None
        heads = {(head.kind, head.id): head for record in records if (head := _head(record)) is not None}
        return list(heads.values())[-HEADS_MAX:]

    async def _compare_head(self, head: "_Head") -> Drifted | None:
        assert self._connection is not None
        cursor = await asyncio.to_thread(
            self._connection.execute, _DECISION[head.kind], (head.id, head.seq, head.id, head.seq + 1, head.id)
        )
        offset, partition, prev_of_next, known_seq = cursor.fetchone() or (None, None, None, None)
        if known_seq is None or known_seq < head.seq:
            return None  # the tables are not there yet
        metrics.HEAD_CHECKS.labels(decider=head.kind).inc()
        if offset is None:
            found = "no decision of that number"
        elif prev_of_next is not None:
            found = prev_of_next
        else:
            topic = DECISIONS if head.kind == "agents" else SITE_DECISIONS
            records = await self._read(TopicPartition(topic.name, partition), offset, 1)
            if not records or records[0].offset != offset:
                return None
            found = hashlib.sha256(records[0].value or b"").hexdigest()
        if found == head.sha256:
            return None
        metrics.HEAD_DRIFTS.labels(decider=head.kind).inc()
        return Drifted(
            head.kind, head.id, True, f"decision {head.seq} is {head.sha256} in its row, the log has {found}"
        )

    async def _read(self, place: TopicPartition, offset: int, count: int) -> list[ConsumerRecord]:
        """Up to so many records from an offset on."""
        self._consumer.seek(place, offset)
        self._consumer.resume(place)
        try:
            fetched = await self._consumer.getmany(place, timeout_ms=FETCH_MILLISECONDS, max_records=count)
        finally:
            self._consumer.pause(place)
        return list(fetched.get(place, ()))


async def watch(bootstrap: str, url: str, partitions: int) -> None:
    """Compare for ever. What is away is tried again in the next round."""
    while True:
        await asyncio.sleep(ROUND_SECONDS)
        try:
            async with Drift(bootstrap, url, partitions) as drift:
                while True:
                    for one in await drift.round():
                        log.error(
                            "row_drifted" if one.is_row else "tables_drifted",
                            decider=one.kind,
                            id=one.id,
                            error=one.why,
                            advice="berth verify; then stop the workers, and: berth recover"
                            if one.is_row
                            else "berth projections diff, and then: berth projections rebuild",
                        )
                    await asyncio.sleep(ROUND_SECONDS)
        except (KafkaError, psycopg.Error) as error:
            log.debug("drift_not_compared", error=repr(error))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            log.debug("drift_not_compared", error="the connection to Kafka broke")  # aiokafka's own futures


class _Head(NamedTuple):
    kind: Kind
    id: str
    seq: int
    sha256: str | None


def _head(record: ConsumerRecord) -> _Head | None:
    """Of a header row; None for every other, and for one that can't be read: its worker stops at that."""
    if record.key is None or record.value is None or not record.key.startswith((b'["agent",', b'["site",')):
        return None
    try:
        name, row = json.loads(record.key), json.loads(record.value)
        return _Head("agents" if name[0] == "agent" else "sites", name[1], row["seq"], row.get("prev"))
    except (ValueError, KeyError, IndexError, TypeError):
        return None


# Rows and the fold


def _difference(connection: Connection, kind: Kind, id: str) -> str | None:
    """What the rows of a decider say otherwise than its decisions; None: nothing."""
    (seq,) = _one(connection, _SEQ[kind], id)
    snapshot = connection.execute(_SNAPSHOT[kind], (id,)).fetchone()
    after, state = snapshot if snapshot is not None else (0, None)
    if seq - after > DECISIONS_MAX:
        return None
    decisions = [record for (record,) in connection.execute(_SINCE[kind], (id, after)).fetchall()]
    try:
        if kind == "agents":
            folded = _agent_facts(snapshots.fold(snapshots.read(id, state), decisions))
            stored = _stored_agent(connection, id)
        else:
            folded = _site_facts(snapshots.fold_site(snapshots.read_site(id, state), decisions))
            stored = _stored_site(connection, id)
    except (AssertionError, KeyError, ValueError) as error:
        return f"its decisions can't be folded: {error!r}"
    return _first_difference(stored, folded)


def _first_difference(stored: Mapping[str, Any], folded: Mapping[str, Any]) -> str | None:
    for name in sorted(stored.keys() | folded.keys()):
        if stored.get(name) != folded.get(name):
            return f"{name} is {stored.get(name)} in the tables, the decisions give {folded.get(name)}"
    return None


def _agent_facts(agent: Agent) -> dict[str, Any]:
    row, triggers = agent.row, agent.triggers.values()
    states = [trigger.state for trigger in triggers]
    facts: dict[str, Any] = {name: getattr(row, name) for name in _SETTINGS}
    facts["parallelism_limit"] = None if row.parallelism_limit == "unlimited" else row.parallelism_limit
    facts |= {"running": states.count("running"), "waiting": states.count("waiting")}
    facts |= {"on_hold": states.count("paused"), "forced": agent.forced_running}
    for trigger in triggers:
        facts[f"trigger {trigger.trigger_id!r}"] = (
            *(trigger.state, trigger.attempt, trigger.failures, trigger.execution_id),
            *(trigger.claim_n, trigger.claim_state),
        )
    return facts


def _stored_agent(connection: Connection, id: str) -> dict[str, Any]:
    facts: dict[str, Any] = dict(zip(_OF_AGENT, _one(connection, _AGENT, id), strict=True))
    for trigger_id, *about in connection.execute(_TRIGGERS, (id,)):
        facts[f"trigger {trigger_id!r}"] = tuple(about)
    return facts


def _site_facts(site: Site) -> dict[str, Any]:
    granted = [claim for claim in site.claims.values() if claim.granted]
    facts: dict[str, Any] = {"seq": site.row.seq, "created": site.row.created}
    facts |= {"capacity": site.row.capacity, "paused": site.row.paused}
    facts |= {"granted": len(granted), "waiting": len(site.claims) - len(granted)}
    facts["workers"] = sum(claim.worker for claim in granted)
    for claim in site.claims.values():
        facts[f"claim {claim.agent_id!r} {claim.trigger_id!r}"] = (claim.n, claim.granted_seq, claim.passed, claim.path)
    for (scope, name), gate in site.gates.items():
        facts[f"{scope} {name!r}"] = (gate.enabled, gate.run_budget)
    return facts


def _stored_site(connection: Connection, id: str) -> dict[str, Any]:
    facts: dict[str, Any] = dict(zip(_OF_SITE, _one(connection, _SITE, id), strict=True))
    for agent_id, trigger_id, *about in connection.execute(_CLAIMS, (id,)):
        facts[f"claim {agent_id!r} {trigger_id!r}"] = tuple(about)
    for scope, name, *about in connection.execute(_GATES, (id,)):
        facts[f"{scope} {name!r}"] = tuple(about)
    return facts


def _one(connection: Connection, statement: bytes, id: str) -> TupleRow:
    found = connection.execute(statement, (id,)).fetchone()
    assert found is not None, "it was there in this very view"
    return found


_SETTINGS: Final = ("seq", "created", "paused", "archived", "serial", "run_budget", "max_backlog_depth")
_OF_AGENT: Final = (*_SETTINGS, "parallelism_limit", "running", "waiting", "on_hold", "forced")
_OF_SITE: Final = ("seq", "created", "capacity", "paused", "granted", "waiting", "workers")
_AGENT: Final = f"SELECT {', '.join(_OF_AGENT)} FROM agents WHERE agent_id = %s".encode()  # noqa: S608 - constants only
_SITE: Final = f"SELECT {', '.join(_OF_SITE)} FROM sites WHERE site = %s".encode()  # noqa: S608
_SEQ: Final[dict[Kind, bytes]] = {
    "agents": b"SELECT seq FROM agents WHERE agent_id = %s",
    "sites": b"SELECT seq FROM sites WHERE site = %s",
}
_NEXT: Final[dict[Kind, bytes]] = {
    "agents": b"SELECT agent_id FROM agents WHERE agent_id > %s ORDER BY agent_id LIMIT %s",
    "sites": b"SELECT site FROM sites WHERE site > %s ORDER BY site LIMIT %s",
}
_SNAPSHOT: Final[dict[Kind, bytes]] = {
    "agents": b"SELECT seq, state::text FROM agent_snapshots WHERE agent_id = %s ORDER BY seq DESC LIMIT 1",
    "sites": b"SELECT seq, state::text FROM site_snapshots WHERE site = %s ORDER BY seq DESC LIMIT 1",
}
_SINCE: Final[dict[Kind, bytes]] = {
    "agents": b"SELECT record::text FROM decisions WHERE agent_id = %s AND seq > %s ORDER BY seq",
    "sites": b"SELECT record::text FROM site_decisions WHERE site = %s AND seq > %s ORDER BY seq",
}
_DECISION: Final[dict[Kind, bytes]] = {
    "agents": b"SELECT own.log_offset, own.log_partition, next.record->>'prev', agents.seq FROM agents"
    b" LEFT JOIN decisions AS own ON own.agent_id = %s AND own.seq = %s"
    b" LEFT JOIN decisions AS next ON next.agent_id = %s AND next.seq = %s WHERE agents.agent_id = %s",
    "sites": b"SELECT own.log_offset, own.log_partition, next.record->>'prev', sites.seq FROM sites"
    b" LEFT JOIN site_decisions AS own ON own.site = %s AND own.seq = %s"
    b" LEFT JOIN site_decisions AS next ON next.site = %s AND next.seq = %s WHERE sites.site = %s",
}
_TRIGGERS: Final = (
    b"SELECT triggers.trigger_id, triggers.state, attempt, failures, execution_id, n, trigger_claims.state"
    b" FROM triggers LEFT JOIN trigger_claims USING (agent_id, trigger_id)"
    b" WHERE agent_id = %s AND ended_at IS NULL"
)
_CLAIMS: Final = b"SELECT agent_id, trigger_id, n, granted_seq, passed, path FROM site_claims WHERE site = %s"
_GATES: Final = b"SELECT scope, name, enabled, run_budget FROM site_gates WHERE site = %s"
