"""The versions of the tables, and the plans by which PostgreSQL answers the queries on them."""

import re
import threading
from collections.abc import Iterator
from importlib import resources
from typing import Any

import psycopg
import pytest

from api.cli.embedded_postgres import EmbeddedPostgres
from projections import schema
from projections.store import Store
from tests.golden.record_projections import recorded_log, tables_file
from tests.histories import History
from tests.integration.projectors import content, fresh, project

# Migrations


def test_from_scratch_every_migration_is_applied_once_and_recorded(database: str) -> None:
    with schema.connect(database) as connection:
        known = schema.migrations()
        assert schema.applied_migrations(connection, "berth") == 0
        assert schema.migrate(connection, "berth") == known
        assert schema.applied_migrations(connection, "berth") == len(known)
        recorded = connection.execute("SELECT number, name, sha256 FROM berth.migrations ORDER BY number").fetchall()
        assert recorded == [(migration.number, migration.name, migration.sha256) for migration in known]
        assert schema.migrate(connection, "berth") == []


def test_two_starters_take_turns(database: str) -> None:
    applied: list[int] = []

    def start() -> None:
        with schema.connect(database) as connection:
            applied.append(len(schema.migrate(connection, "berth")))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(applied) == [0, 0, 0, len(schema.migrations())]


def test_schemas_are_made_by_one_at_a_time(database: str) -> None:
    """A rebuild makes the live schema too, while the first projector does."""
    failed: list[BaseException] = []

    def make() -> None:
        try:
            with schema.connect(database) as connection:
                for number in range(20):
                    schema.make_schema(connection, f"made_{number}")
        except psycopg.Error as error:
            failed.append(error)

    threads = [threading.Thread(target=make) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


@pytest.mark.parametrize("version", range(1, len(schema.migrations()) + 1))
def test_every_earlier_version_is_upgraded_with_its_data(database: str, version: int) -> None:
    """The tables of a version, with the rows that it made of its recorded log, end as those made anew."""
    with schema.connect(database) as connection:
        schema.migrate(connection, "berth", schema.migrations()[:version])
        connection.execute(tables_file(version).read_bytes())
        before = connection.execute("SELECT count(*) FROM decisions").fetchone()
    upgraded, anew = fresh(database, "berth"), fresh(database, "anew")
    assert upgraded.connection.execute("SELECT count(*) FROM decisions").fetchone() == before != (0,)
    project(anew, recorded_log(version))
    assert content(upgraded) == content(anew)
    for opened in (upgraded, anew):
        opened.close()


def test_since_when_and_how_much_is_left_is_made_up_from_what_the_first_version_kept(database: str) -> None:
    """Pauses, archives and parked agents say since when, and budgets that it stored are spent by its dispatches."""
    history = History(1, partitions=1, agents=("budget", "spent", "paused", "archived", "parked", "plain"))
    driven = history._of("budget")
    driven.configure("budget", run_budget=7)
    driven.configure("budget", run_budget=5, parallelism_limit=9)
    driven.configure("spent", run_budget=1)
    for agent_id in history.agents:
        driven.skip(1)
        for number in range(2):
            driven.trigger(f"t{number}", agent_id, timeout_seconds=60)
    driven.control("pause", "paused")
    driven.control("pause", "paused")
    driven.skip(1)
    driven.control("archive", "archived")
    driven.partition.park("parked", "a bug", driven.now)
    driven.commit()
    with schema.connect(database, "first") as connection:
        schema.migrate(connection, "first", schema.migrations()[:1])
        now = fresh(database, "berth")
        project(now, history.records())
        for table in ("agents", "conversations", "triggers", "attempts", "decisions", "decision_ids", "checkpoints"):
            names = ", ".join(row[0] for row in connection.execute(FIRST_COLUMNS, (table,)))
            connection.execute(f"INSERT INTO {table} ({names}) SELECT {names} FROM berth.{table}".encode())
        connection.execute("UPDATE agents SET run_budget = CASE agent_id WHEN 'budget' THEN 5 WHEN 'spent' THEN 1 END")
        kept = b"SELECT to_jsonb(agents) FROM agents ORDER BY agent_id"
        schema.migrate(connection, "first")
        found = connection.execute(kept).fetchall()
    assert found == now.connection.execute(kept).fetchall()
    left = {row["agent_id"]: row["run_budget"] for (row,) in found if row["run_budget_at"] is not None}
    assert left == {"budget": 3, "spent": 0}
    assert sum(row["paused_at"] is not None for (row,) in found) == 1
    now.close()


FIRST_COLUMNS = """SELECT attname FROM pg_attribute WHERE attrelid = ('first.' || %s)::regclass AND attnum > 0"""


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda known: [schema.Migration(1, known[0].name, known[0].statements + "\n"), *known[1:]], "another text"),
        (lambda known: known[:-1], "newer Berth"),
    ],
)
def test_tables_of_another_version_are_refused_and_left_alone(database: str, change: Any, told: str) -> None:
    with schema.connect(database) as connection:
        known = schema.migrations()
        schema.migrate(connection, "berth")
        with pytest.raises(schema.SchemaRefused, match=told):
            schema.migrate(connection, "berth", change(known))
        assert schema.migrate(connection, "berth") == []


def test_a_migration_that_fails_leaves_nothing_behind(database: str) -> None:
    known = schema.migrations()
    broken = schema.Migration(len(known) + 1, "broken", "CREATE TABLE half (); SELECT no_such_function();")
    with schema.connect(database) as connection:
        with pytest.raises(psycopg.errors.UndefinedFunction):
            schema.migrate(connection, "berth", [*known, broken])
        assert connection.execute("SELECT to_regclass('berth.half')").fetchone() == (None,)
        assert len(connection.execute("SELECT number FROM berth.migrations").fetchall()) == len(known)


# Queries


def queries() -> dict[str, str]:
    text = (resources.files("projections") / "queries.sql").read_text()
    blocks = re.split(r"^-- name: (\w+)\n", text, flags=re.MULTILINE)[1:]
    return dict(zip(blocks[::2], blocks[1::2], strict=True))


PARAMETERS: dict[str, Any] = {
    "agent_id": "agent-7",
    "agent_ids": ["agent-7", "agent-8"],
    "visible": None,
    "conversation_id": "conversation-7",
    "trigger_id": "t-7",
    "id": "t-7",
    "partition": 1,
    "seq": 5,
    "after_seq": 3,
    "after_offset": 3,
    "after_agent_id": "agent-3",
    "after_trigger_id": "",
    "before_agent_id": "agent-5",
    "before_trigger_id": "",
    "before_partition": 1,
    "before_offset": 5,
    "organization_id": "organization-3",
    "kind": "kind-3",
    "state": "failed",
    "max_rows": 50,
    "since": "2025-01-01T00:00:00Z",
    "before_accepted_at": "2027-01-01T00:00:00Z",
    "trigger_ids": ["t-7", "t-8"],
    "site": "site-7",
    "sites": ["site-7", "site-8"],
    "scope": "organization",
    "scopes": ["organization", "department"],
    "gate_name": "organization-7",
    "names": ["organization-7", "department-7"],
    "environment_ids": ["e-7", "e-8"],
    "paths": ["/a/7", "/"],
    "after_site": "site-3",
    "after_scope": "",
    "after_name": "",
}
FILTERS = {"triggers_in_state_page": {"kind": None}, "triggers_of_organization_page": {"kind": None, "state": None}}
SMALL = {"positions"}
"""One row a partition of a topic: read whole."""


def explain(store: Store, name: str, **changed: Any) -> str:
    statement = queries()[name]
    known = {**PARAMETERS, **(changed or FILTERS.get(name, {}))}
    parameters = {
        parameter: known.get(parameter, "2026-01-01T12:00:00Z") for parameter in re.findall(r"%\((\w+)\)s", statement)
    }
    plan = store.connection.execute(("EXPLAIN " + statement).encode(), parameters).fetchall()
    return "\n".join(line for (line,) in plan)


@pytest.fixture(scope="module")
def full(postgres: EmbeddedPostgres) -> Iterator[Store]:
    """Enough rows that a scan would cost, with statistics, and without the projector's own settings."""
    store = Store(postgres.url)
    store.open()
    connection = store.connection
    connection.execute("RESET enable_seqscan; RESET enable_hashjoin; RESET enable_mergejoin")
    for statement in FILL:
        connection.execute(statement)
    connection.execute("ANALYZE")
    yield store
    connection.execute("DROP SCHEMA berth CASCADE")
    store.close()


FILL = (
    """INSERT INTO agents SELECT 'agent-' || n, n % 2, 20, now(), true, now(), 1, false, 1000, null, null, null, null,
       null, null, null, false, false, null, 1, 0, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0 FROM generate_series(1, 5000) n""",
    """INSERT INTO conversations SELECT 'agent-' || n % 5000, 'conversation-' || n, now(), 1, 0, null, null, false
       FROM generate_series(1, 20000) n""",
    """INSERT INTO triggers (agent_id, trigger_id, conversation_id, state, state_since, kind, interactive, created_at,
       available_at, accepted_at, accepted_seq, content_sha256, worker, organization_id, execution_class,
       timeout_seconds, max_attempts, payload_bytes, attempt, failures, absences, ended_at)
       SELECT 'agent-' || n % 5000, 't-' || n, 'conversation-' || n,
       (array['waiting', 'failed', 'finished', 'finished', 'finished'])[1 + n % 5], now(), 'kind-' || n % 50, false,
       time, time, time, n, '', false, 'organization-' || n % 50, 'standard', 1800, 3, 0, 1, 0, 0,
       CASE WHEN n % 5 > 0 THEN now() END
       FROM generate_series(1, 50000) n,
       LATERAL (SELECT '2026-01-01'::timestamptz + n * interval '1 second') AS at (time)""",
    """INSERT INTO attempts SELECT agent_id, trigger_id, 'x-' || accepted_seq, conversation_id, 1, 1, false, now(), 1,
       now(), CASE WHEN accepted_seq % 10 > 0 THEN now() END FROM triggers""",
    """INSERT INTO decisions SELECT agent_id, accepted_seq, accepted_at, accepted_seq % 2, accepted_seq, 'trigger',
       trigger_id, array[trigger_id], null, null, '{}' FROM triggers""",
    "INSERT INTO decision_ids SELECT agent_id, trigger_id, accepted_seq FROM triggers",
    "INSERT INTO agent_snapshots SELECT agent_id, accepted_seq, accepted_at, '{}' FROM triggers",
    """INSERT INTO texts SELECT agent_id, trigger_id, '', 'message', '"hello"', false, accepted_at, 1, accepted_seq
       FROM triggers""",
    """INSERT INTO dependencies SELECT agent_id, trigger_id, 0, 'agent-' || accepted_seq % 100, conversation_id
       FROM triggers""",
    """INSERT INTO trigger_claims SELECT agent_id, trigger_id, 'site-' || accepted_seq % 300, accepted_seq,
       (array['asking', 'standing', 'held', 'granted'])[1 + accepted_seq % 4], now(), now(), true,
       CASE WHEN accepted_seq % 400 = 1 THEN 'site_not_answering' END, 0 FROM triggers""",
    """INSERT INTO sites SELECT 'site-' || n, 1, 9, now(), true, now(), 4, now(), false, null, 1, 1, 1, 0
       FROM generate_series(1, 3000) n""",
    """INSERT INTO site_gates SELECT 'site-' || n % 300, (array['organization', 'department'])[1 + n % 2],
       'organization-' || n, n % 7 > 0, null, null, null, 0 FROM generate_series(1, 20000) n""",
    """INSERT INTO site_claims SELECT 'site-' || accepted_seq % 300, agent_id, trigger_id, accepted_seq, now(),
       available_at, created_at, accepted_at, accepted_seq % 2 > 0, 'e-' || accepted_seq % 10,
       '/a/' || accepted_seq % 1000,
       'organization-' || accepted_seq % 500, 'department-' || accepted_seq % 500,
       CASE WHEN accepted_seq % 5 > 0 THEN now() END, 1, 0, CASE WHEN accepted_seq % 50 = 0 THEN now() END, null, false
       FROM triggers""",
    """INSERT INTO site_deletions SELECT 'site-' || n % 300, 'e-' || n % 10, '/a/' || n, now()
       FROM generate_series(1, 20000) n""",
    """INSERT INTO site_decisions SELECT 'site-' || n % 300, n, '2026-01-01', n % 2, n, 'claim', null, '{}', null, null,
       '{}' FROM generate_series(1, 20000) n""",
    "INSERT INTO site_snapshots SELECT site, seq, decided_at, '{}' FROM site_decisions",
    "INSERT INTO dead_letters SELECT 1, n, '2026-01-01', 'r' FROM generate_series(1, 20000) n",
)


@pytest.mark.parametrize("name", sorted(set(queries()) - SMALL))
def test_every_query_is_served_by_an_index(full: Store, name: str) -> None:
    plan = explain(full, name)
    assert "Index" in plan, plan
    assert "Seq Scan" not in plan, plan
    if name.startswith("triggers_") and name != "triggers_of_agents_page":
        assert "Sort" not in plan, f"a page is read in order, not sorted:\n{plan}"


@pytest.mark.parametrize("name", ["agents_page", "slots_of_agents_page"])
def test_a_list_of_the_visible_agents_only_is_served_by_an_index_too(full: Store, name: str) -> None:
    plan = explain(full, name, visible=["agent-7", "agent-8"])
    assert "Seq Scan" not in plan, plan
