"""Tables and stored rows that no longer say what the log says are noticed, a few agents and sites at a time."""

from collections.abc import AsyncIterator

import psycopg
import pytest

from api.cli.embedded_kafka import EmbeddedKafka
from projections import drift as drift_module
from projections import metrics
from projections.drift import Drift, Drifted
from projections.rebuild import compare
from projections.tables import TABLES
from streams import CHANGELOG, codec
from tests.histories import History
from tests.integration.projectors import Publisher, projector, publisher
from tests.integration.workers import PARTITIONS, sending

pytestmark = pytest.mark.kafka

ROUNDS_MAX = 60


@pytest.fixture
async def published(topics: EmbeddedKafka, seed: int) -> AsyncIterator[Publisher]:
    async with publisher(topics.bootstrap, seed) as opened:
        yield opened


def counted(metric: object) -> float:
    return sum(metric.labels(decider=kind)._value.get() for kind in drift_module.KINDS)  # type: ignore[attr-defined]


async def all_around(bootstrap: str, database: str) -> list[Drifted]:
    """Rounds, until every agent and site and every partition of the changelog has had its turn."""
    found: list[Drifted] = []
    async with Drift(bootstrap, database, PARTITIONS) as drift:
        seen: set[int] = set()
        turns = {"agents": 0, "sites": 0}
        for _ in range(ROUNDS_MAX):
            found += await drift.round()
            seen.add(drift._partition)
            for kind in drift_module.KINDS:
                turns[kind] += not drift._after[kind]
            if len(seen) == PARTITIONS and drift._partition == 0 and all(turns.values()):
                return found
    raise AssertionError(f"in {ROUNDS_MAX} rounds only {seen} {turns}")


async def store_heads(bootstrap: str, history: History, changed: str | None = None) -> int:
    """Header rows as workers store them; that of ``changed`` is of another log."""
    count = 0
    async with sending(bootstrap) as producer:
        for number, driven in history.driven.items():
            for key, value in driven.rows.items():
                name = codec.read_key(key)
                stored = value
                if name == ("agent", changed):
                    row = codec.read_agent(value)
                    row.prev = "0" * 64
                    stored = codec.write_agent(row)
                count += name[0] in ("agent", "site")
                await producer.send(CHANGELOG.name, stored, key, number)
        await producer.flush()
    return count


async def test_what_is_as_the_log_says_is_compared_and_not_reported(
    topics: EmbeddedKafka, published: Publisher, database: str, seed: int
) -> None:
    history = History(seed, PARTITIONS).live(400).settle()
    await published.publish(history.transactions())
    heads = await store_heads(topics.bootstrap, history)
    before = counted(metrics.DRIFT_CHECKS), counted(metrics.HEAD_CHECKS)
    async with projector(topics.bootstrap, database, PARTITIONS):
        await published.projected(database)
        assert await all_around(topics.bootstrap, database) == []
    with psycopg.connect(database) as connection:
        (rows,) = connection.execute(
            "SELECT (SELECT count(*) FROM berth.agents) + (SELECT count(*) FROM berth.sites)"
        ).fetchone() or (0,)
    assert counted(metrics.DRIFT_CHECKS) - before[0] >= rows > 0
    assert heads > 0
    assert counted(metrics.HEAD_CHECKS) - before[1] > 0


OF_A, OF_DEFAULT = "WHERE agent_id = 'A'", "WHERE site = 'default'"
CHANGES = (
    (f"UPDATE berth.agents SET running = running + %s {OF_A}", "agents", "running is"),
    (f"UPDATE berth.agents SET max_backlog_depth = max_backlog_depth + %s {OF_A}", "agents", "max_backlog_depth is"),
    (f"UPDATE berth.sites SET capacity = capacity + %s {OF_DEFAULT}", "sites", "capacity is"),
    (f"UPDATE berth.site_claims SET passed = passed + %s {OF_DEFAULT}", "sites", "claim "),
    (f"DELETE FROM berth.triggers {OF_A} AND ended_at IS NULL", "agents", "trigger "),
    (f"DELETE FROM berth.decisions {OF_A} AND seq = 2", "agents", "can't be folded"),
)
"""Those with a number are taken back with its opposite."""


async def test_tables_that_somebody_has_changed_are_noticed(
    topics: EmbeddedKafka, published: Publisher, database: str, seed: int
) -> None:
    history = History(seed, PARTITIONS, agents=("A", "B", "C", "D", "E")).live(150)
    driven = history._of("A")
    # Whatever it lived through: it takes all that is asked of it now, and so has triggers that wait, and claims.
    driven.configure(
        "A",
        parallelism_limit="unlimited",
        serial=False,
        agent_type=None,
        default_environment_id=None,
        max_backlog_depth=None,
        run_budget=None,
    )
    driven.control("resume", "A")
    for number in range(3):
        driven.trigger(f"kept-{number}", "A", conversation_id=f"kept-{number}", available_at="2099-01-01T00:00:00Z")
    at_default = history._of("default")
    for number in range(12):  # more than any pool has, so that some wait
        driven.trigger(f"w{number}", "A", worker=True, conversation_id=f"w{number}")
    history.settle()
    assert at_default.site().claims
    await published.publish(history.transactions())
    async with projector(topics.bootstrap, database, PARTITIONS):
        await published.projected(database)
    for change, kind, what in CHANGES:
        before = counted(metrics.DRIFTS)
        with psycopg.connect(database, autocommit=True) as connection:
            numbers = (1,) if "%s" in change else ()
            assert connection.execute(change.encode(), numbers).rowcount > 0, change
            found = await all_around(topics.bootstrap, database)
            if numbers:
                connection.execute(change.encode(), (-1,))
        assert {(one.kind, one.id) for one in found} == {(kind, "A" if kind == "agents" else "default")}, change
        assert all(what in one.why for one in found), (change, found)
        assert counted(metrics.DRIFTS) > before


async def test_a_stored_row_of_another_log_is_noticed(
    topics: EmbeddedKafka, published: Publisher, database: str, seed: int
) -> None:
    history = History(seed, PARTITIONS, agents=("A", "B", "C")).live(60)
    history._of("A").trigger("t-last", "A")
    history.settle()
    await published.publish(history.transactions())
    async with projector(topics.bootstrap, database, PARTITIONS):
        await published.projected(database)
    await store_heads(topics.bootstrap, history, changed="A")
    found = await all_around(topics.bootstrap, database)
    assert {(one.kind, one.id, one.is_row) for one in found} == {("agents", "A", True)}
    assert "the log has" in found[0].why


async def test_the_projector_compares_by_itself_and_says_what_to_do(
    topics: EmbeddedKafka, published: Publisher, database: str, seed: int
) -> None:
    history = History(seed, PARTITIONS, agents=("A", "B")).live(40)
    await published.publish(history.transactions())
    async with projector(topics.bootstrap, database, PARTITIONS) as process:
        await published.projected(database)
        with psycopg.connect(database, autocommit=True) as connection:
            connection.execute("UPDATE berth.agents SET waiting = waiting + 1 WHERE agent_id = 'A'")
        told = await process.logged("tables_drifted")
        assert (told["decider"], told["id"]) == ("agents", "A")
        assert "berth projections rebuild" in told["advice"]
        await process.readiness_is(ready=True)


NOT_OF_THE_LOG = {"checkpoints", "last_verification", "schema_migrations", "migrations"}
LATE = {"agent_snapshots", "site_snapshots"}
"""Made after so many decisions of one agent or site."""


async def test_diff_compares_every_table_that_is_made_of_the_log(
    topics: EmbeddedKafka, published: Publisher, database: str, seed: int
) -> None:
    """One row is taken out of each table in turn: diff names that table, and every table has its turn."""
    history = History(seed, PARTITIONS).live(600)
    # What not every history leaves behind: a gate, and a claim.
    history._of("default").site_control("gate", scope="organization", name="closed", enabled=False)
    history._of("claims").trigger("claimed", "claims", worker=True)
    history.settle()
    await published.publish(history.transactions())
    async with projector(topics.bootstrap, database, PARTITIONS):
        await published.projected(database)
    compared, differences = await compare(topics.bootstrap, database, PARTITIONS, 36_500, lambda *_: None)
    assert differences == []
    with psycopg.connect(database, autocommit=True) as connection:
        found = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'berth'").fetchall()
        names = {name for (name,) in found} - NOT_OF_THE_LOG
        assert names == compared.keys() >= {table.name for table in TABLES}
        filled = [name for name in sorted(names) if compared[name]]
        assert names - set(filled) <= LATE, compared
        for name in filled:
            connection.execute(
                f"DELETE FROM berth.{name} WHERE ctid = (SELECT ctid FROM berth.{name} LIMIT 1)".encode()
            )
    _, differences = await compare(topics.bootstrap, database, PARTITIONS, 36_500, lambda *_: None)
    assert {difference.table for difference in differences} == set(filled)
    assert all(difference.only_rebuilt for difference in differences)
