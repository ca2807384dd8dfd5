"""The tables on a real PostgreSQL: what is written, by whatever batches, is the fold of the log, once."""

import json
import random
import re
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from api.cli.embedded_postgres import EmbeddedPostgres
from projections import schema, snapshots
from projections.rows import CannotApply
from projections.store import Applied, LogRecord, Moved, Store
from projections.tables import TABLES
from streams import DECISIONS, TEXTS
from streams.rules.agent.state import Agent
from streams.rules.events import read_decision, write_decision
from tests.driving import T0
from tests.histories import History, batch_of


@pytest.fixture
def store(database: str) -> Iterator[Store]:
    opened = Store(database)
    opened.open()
    yield opened
    opened.close()


def positions(store: Store, records: Sequence[LogRecord]) -> dict[tuple[str, int], int]:
    """Where the checkpoints are; the store begins anew only where there are none, and so keeps what it knows."""
    wanted = {(record.topic, record.partition) for record in records}
    rows = store.connection.execute("SELECT topic, partition, next_offset FROM checkpoints")
    found = {(topic, partition): offset for topic, partition, offset in rows}
    return found if wanted <= found.keys() else store.positions(wanted)


def project(store: Store, records: Sequence[LogRecord]) -> None:
    """Apply the records as one batch, from where the checkpoints are."""
    assert isinstance(store.apply(batch_of(records, positions(store, records))), Applied)


def snapshot_all(store: Store) -> None:
    for agent_id in store.agents_without_snapshot():
        while store.make_snapshot(agent_id):
            pass


def content(store: Store) -> dict[str, list[str]]:
    """Everything in the tables, in comparable form."""
    found = {}
    for name in [*(table.name for table in TABLES), "agent_snapshots", "checkpoints"]:
        rows = store.connection.execute(
            sql.SQL("SELECT to_jsonb(rows) FROM {} AS rows").format(sql.Identifier(name))
        ).fetchall()
        found[name] = sorted(json.dumps(row, sort_keys=True) for (row,) in rows)
    return found


def fresh(database: str, name: str) -> Store:
    other = Store(database, name)
    other.open()
    return other


# What is in the tables


def test_the_rows_are_what_the_rules_hold(store: Store, seed: int) -> None:
    history = History(seed).live(600)
    project(store, history.records())
    for agent_id in history.agents:
        check_agent(store, history.agent(agent_id), agent_id)
    assert store.connection.execute("SELECT count(*) FROM triggers WHERE state = 'finished'").fetchone() != (0,)


def check_agent(store: Store, agent: Agent | None, agent_id: str) -> None:
    """The rows of one agent against the state that its decider holds."""
    read = partial(store.connection.execute, binary=True)  # instants as microseconds
    row = read(
        "SELECT seq, created, paused, archived, parallelism_limit, owner, running, waiting, on_hold FROM agents"
        " WHERE agent_id = %s",
        (agent_id,),
    ).fetchone()
    if agent is None or agent.row.seq == 0:
        assert row is None
        return
    limit = None if agent.row.parallelism_limit == "unlimited" else agent.row.parallelism_limit
    states = [trigger.state for trigger in agent.triggers.values()]
    assert row == (
        *(agent.row.seq, agent.row.created, agent.row.paused, agent.row.archived, limit, agent.row.owner),
        *(states.count("running"), states.count("waiting"), states.count("paused")),
    )
    live = read(
        "SELECT trigger_id, state, conversation_id, available_at, created_at, attempt, failures, place_rank,"
        " place_number, grace_until FROM triggers WHERE agent_id = %s AND ended_at IS NULL",
        (agent_id,),
    ).fetchall()
    assert {trigger_id: tuple(rest) for trigger_id, *rest in live} == {
        trigger.trigger_id: (
            *(trigger.state, trigger.conversation_id, trigger.available_at, trigger.created_at, trigger.attempt),
            *(trigger.failures, *(trigger.place or (None, None)), trigger.grace_until),
        )
        for trigger in agent.triggers.values()
    }
    queue = read(
        "SELECT trigger_id FROM triggers WHERE agent_id = %s AND state = 'waiting'"
        " ORDER BY available_at, created_at, trigger_id",
        (agent_id,),
    ).fetchall()
    assert [trigger_id for (trigger_id,) in queue] == [key.id.decode() for key in agent.waiting]
    slots = read("SELECT slot_number, execution_id, trigger_id FROM slots WHERE agent_id = %s", (agent_id,)).fetchall()
    assert sorted(slots) == sorted(
        (trigger.slot_number, trigger.execution_id, trigger.trigger_id)
        for trigger in agent.triggers.values()
        if trigger.state == "running"
    )
    outcomes = read(
        "SELECT conversation_id, last_outcome, last_outcome_at FROM conversations"
        " WHERE agent_id = %s AND last_outcome IS NOT NULL AND NOT forgotten",
        (agent_id,),
    ).fetchall()
    assert {id: (outcome, at) for id, outcome, at in outcomes} == {
        id: (row.outcome, row.at) for id, row in agent.conversations.items()
    }
    lives = read("SELECT conversation_id, live FROM conversations WHERE agent_id = %s AND live > 0", (agent_id,))
    conversations = [trigger.conversation_id for trigger in agent.triggers.values()]
    assert dict(lives.fetchall()) == {id: conversations.count(id) for id in conversations}


def test_ids_that_differ_only_in_case_or_look_joined_or_like_patterns_are_different(store: Store) -> None:
    history = History(1, agents=("A", "a", "a:b", "%", "_", "a%", "ab"))
    for agent_id in history.agents:
        history._of(agent_id).trigger("t", agent_id, conversation_id="b:c")
        history._of(agent_id).trigger("T", agent_id, conversation_id="b:C")
    project(store, history.records())
    read = store.connection.execute
    ordered = [id for (id,) in read("SELECT agent_id FROM agents ORDER BY agent_id").fetchall()]
    assert ordered == sorted(history.agents, key=str.encode)
    for agent_id in history.agents:
        found = read("SELECT trigger_id FROM triggers WHERE agent_id = %s ORDER BY trigger_id", (agent_id,)).fetchall()
        assert found == [("T",), ("t",)]


def test_what_postgresql_cannot_hold_is_replaced_in_the_copy_only(store: Store) -> None:
    history = History(1, agents=("A",))
    driven = history._of("A")
    driven.trigger("t", message="a\x00b\ud800c", payload={"x": "\x00"})
    driven.status("t", "finished", result={"k\x00": ["\udfff", "\\u0000", "\U0001f600"]})
    project(store, history.records())
    rows = store.connection.execute("SELECT kind, content FROM texts WHERE agent_id = 'A'").fetchall()
    found: dict[Any, Any] = dict(rows)
    assert found == {"message": "a\ufffdb\ufffdc", "result": {"k\ufffd": ["\ufffd", "\\u0000", "\U0001f600"]}}


# Batches


def test_a_batch_applied_again_changes_nothing(store: Store, seed: int) -> None:
    history = History(seed).live(200)
    batch = batch_of(history.records(), {})
    store.positions(batch.ends)
    assert isinstance(store.apply(batch), Applied)
    before = content(store)
    assert store.apply(batch) == Moved(dict(batch.ends))
    assert content(store) == before


def test_how_the_log_is_cut_into_batches_makes_no_difference(store: Store, database: str, seed: int) -> None:
    """Whole, one by one, and cut in two at every record, with the first half delivered a second time."""
    records = History(seed).live(60).records()
    project(store, records)
    whole = content(store)
    single = fresh(database, "single")
    for record in records:
        project(single, [record])
    assert content(single) == whole
    halves = fresh(database, "halves")
    tables = sql.SQL(", ").join(sql.Identifier(name) for name in whole)
    for cut in range(1, len(records)):
        halves.connection.execute(sql.SQL("TRUNCATE {}").format(tables))
        project(halves, records[:cut])
        first = batch_of(records[:cut], {})
        assert isinstance(halves.apply(first), Moved)
        project(halves, records[cut:])
        assert content(halves) == whole, f"cut before record {cut}"
    halves.close()
    single.close()


def test_partitions_may_come_in_any_order_beside_each_other(store: Store, database: str, seed: int) -> None:
    """Equal offsets on different partitions are different, and topics don't wait for one another."""
    history = History(seed, partitions=3).live(200)
    records = history.records()
    project(store, records)
    chance = random.Random(seed)
    other = fresh(database, "other")
    lanes: dict[tuple[str, int], list[LogRecord]] = {}
    for record in records:
        lanes.setdefault((record.topic, record.partition), []).append(record)
    assert len({offset for lane in lanes.values() for offset in (lane[0].offset,)}) == 1, "offsets are equal"
    while lanes:
        lane = chance.choice(list(lanes))
        size = chance.randint(1, 7)
        project(other, lanes[lane][:size])
        lanes[lane] = lanes[lane][size:]
        if not lanes[lane]:
            del lanes[lane]
    assert content(other) == content(store)
    other.close()


def test_two_projectors_at_once_give_the_rows_of_one(store: Store, database: str, seed: int) -> None:
    records = History(seed).live(150).records()
    project(fresh(database, "alone"), records)
    store.positions({(record.topic, record.partition) for record in records})

    def project_all() -> None:
        mine = Store(database)
        mine.open()
        rest = list(records)
        while rest:
            at = mine.positions({(record.topic, record.partition) for record in records})
            rest = [record for record in records if record.offset >= at[record.topic, record.partition]]
            if rest:
                mine.apply(batch_of(rest[:3], at))
        mine.close()

    threads = [threading.Thread(target=project_all) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = fresh(database, "alone")
    assert content(store) == content(alone)
    alone.close()


# What can't be applied


def decisions_of(records: Sequence[LogRecord]) -> list[LogRecord]:
    return [record for record in records if record.topic == DECISIONS.name]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda value: value[:-1], "no decision"),
        (lambda value: value.replace(b'"v":1', b'"v":2', 1), "no decision"),
        (lambda value: value.replace(b'"type":"finished"', b'"type":"unheard_of"'), "no decision"),
        (lambda value: re.sub(rb'"seq":(\d+)', lambda seq: b'"seq":%d' % (int(seq[1]) + 1), value, count=1), "is at"),
        (lambda value: value.replace(b'"trigger_id":"t1"', b'"trigger_id":"t9"'), "never accepted"),
        (lambda value: value.replace(b"-1-3", b"-1-4"), "ends, and"),
    ],
)
def test_a_decision_that_does_not_fit_names_its_position_and_changes_nothing(
    store: Store, spoil: Any, why: str
) -> None:
    history = History(1, partitions=1, agents=("A",))
    driven = history._of("A")
    driven.trigger("t1")
    driven.finish("t1")
    records = decisions_of(history.records())
    project(store, records[:1])
    before = content(store)
    assert records[1].value is not None
    spoilt = records[1]._replace(value=spoil(records[1].value))
    assert spoilt.value != records[1].value
    with pytest.raises(CannotApply, match=why) as stopped:
        store.apply(batch_of([spoilt], positions(store, records)))
    assert (stopped.value.topic, stopped.value.partition, stopped.value.offset) == (DECISIONS.name, 0, spoilt.offset)
    assert content(store) == before
    project(store, records[1:])


def test_a_final_state_stays_final_even_if_the_log_says_otherwise(store: Store) -> None:
    history = History(1, partitions=1, agents=("A",))
    driven = history._of("A")
    driven.trigger("t1")
    driven.finish("t1")
    records = decisions_of(history.records())
    project(store, records)
    finish = read_decision(records[1].value or b"")
    again = write_decision(finish.model_copy(update={"seq": 3}))
    late = records[1]._replace(value=again, offset=records[1].offset + 2)
    with pytest.raises(CannotApply, match="is finished, not running"):
        store.apply(batch_of([late], positions(store, records)))


def test_the_rest_of_a_batch_can_be_applied_without_the_one_that_cannot(store: Store) -> None:
    history = History(1, partitions=2).live(100)
    records = history.records()
    broken = decisions_of(records)[20]
    batch = batch_of(
        [record._replace(value=b"{}") if record == broken else record for record in records], positions(store, records)
    )
    with pytest.raises(CannotApply) as stopped:
        store.apply(batch)
    rest = batch.before(stopped.value.topic, stopped.value.partition, stopped.value.offset)
    assert isinstance(store.apply(rest), Applied)
    at = store.positions(batch.ends)
    assert at[DECISIONS.name, broken.partition] == broken.offset
    project(store, [record for record in records if record.offset >= at[record.topic, record.partition]])
    for agent_id in history.agents:
        check_agent(store, history.agent(agent_id), agent_id)


def test_an_agent_whose_partition_changed_is_refused(store: Store) -> None:
    history = History(1, partitions=1, agents=("A",))
    history._of("A").trigger("t1")
    history._of("A").trigger("t2")
    first, second = decisions_of(history.records())
    project(store, [first])
    moved = second._replace(partition=1)
    with pytest.raises(CannotApply, match="number of partitions"):
        store.apply(batch_of([moved], positions(store, [moved])))


# Snapshots


def test_a_snapshot_every_1000_decisions_is_the_agent_as_the_rules_held_it(store: Store) -> None:
    history = History(5, partitions=1, agents=("A",))
    driven = history._of("A")
    driven.configure(parallelism_limit=3)
    expected = {}
    while driven.agent().row.seq < 2050:
        history.happen("A")
        if driven.agent().row.archived:
            driven.configure(parallelism_limit=3)
        seq = driven.agent().row.seq
        if seq % 1000 == 0:
            expected[seq] = snapshots.write(driven.agent())
    records = history.records()
    project(store, records[:700])
    snapshot_all(store)
    project(store, records[700:])
    snapshot_all(store)
    found: dict[Any, Any] = dict(store.connection.execute("SELECT seq, state::text FROM agent_snapshots").fetchall())
    assert set(found) == {1000, 2000} and set(expected) <= set(found)
    for seq, state in expected.items():
        assert without_leases(found[seq]) == without_leases(state)
    assert store.agents_without_snapshot() == []
    # A read of the past: the newest snapshot before it, and the decisions since.
    decisions = [record.value or b"" for record in decisions_of(records)]
    past = snapshots.fold(snapshots.read("A", found[2000]), decisions[2000:2042])
    assert json.loads(snapshots.write(past)) == json.loads(
        snapshots.write(snapshots.fold(snapshots.read("A", None), decisions[:2042]))
    )


def without_leases(state: str) -> Any:
    content = json.loads(state)
    for trigger in content["triggers"]:
        trigger.pop("lease_until", None)
        trigger.pop("last_seen_at", None)
    return content


# Retention


def test_texts_end_with_their_retention_and_decisions_stay(store: Store) -> None:
    history = History(3).live(200)
    records = history.records()
    project(store, records)
    before = content(store)
    texts = [record for record in records if record.topic == TEXTS.name]
    middle = sorted(record.written_at for record in texts)[len(texts) // 2]
    while store.forget_texts(middle, 5):
        pass
    after = content(store)
    assert {name for name in before if before[name] != after[name]} <= {"texts", "dead_letters"}
    left = store.connection.execute("SELECT min(written_at), count(*) FROM texts", binary=True).fetchone()
    assert left is not None and left[0] >= middle and 0 < left[1] < len(before["texts"])
    assert store.forget_texts(T0, 5) == 0


# Migrations


def test_from_scratch_every_migration_is_applied_once_and_recorded(database: str) -> None:
    with schema.connect(database) as connection:
        known = schema.migrations()
        assert schema.migrate(connection, "berth") == known
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


GOLDEN = Path(__file__).parent.parent / "golden"


def golden_log() -> list[LogRecord]:
    """A log as the first version wrote it; later versions must give the same rows of it, and more."""
    lines = (GOLDEN / "projections_log.jsonl").read_text().splitlines()
    return [
        LogRecord(topic, partition, offset, octets(key), octets(value), [(name, octets(h)) for name, h in headers], at)  # type: ignore[misc]
        for topic, partition, offset, key, value, headers, at in map(json.loads, lines)
    ]


def octets(text: str | None) -> bytes | None:
    return None if text is None else text.encode("utf-8", "surrogateescape")


@pytest.mark.parametrize("version", range(1, len(schema.migrations()) + 1))
def test_every_earlier_version_is_upgraded_with_its_data(database: str, version: int) -> None:
    """The tables of an earlier version, with the rows that it made of the golden log, end as those made anew."""
    with schema.connect(database) as connection:
        schema.migrate(connection, "berth", schema.migrations()[:version])
        connection.execute((GOLDEN / f"projections_{version:04d}.sql").read_bytes())
        before = connection.execute("SELECT count(*) FROM decisions").fetchone()
    upgraded, anew = fresh(database, "berth"), fresh(database, "anew")
    assert upgraded.connection.execute("SELECT count(*) FROM decisions").fetchone() == before != (0,)
    project(anew, golden_log())
    assert content(upgraded) == content(anew)
    for opened in (upgraded, anew):
        opened.close()


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
}
FILTERS = {"triggers_in_state_page": {"kind": None}, "triggers_of_organization_page": {"kind": None, "state": None}}
SMALL = {"positions", "position_of_decisions"}
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


def test_counts_by_hand(store: Store) -> None:
    """2 finished, 1 failed at once, 1 stopped while waiting, 1 refused, 2 ignored; 1 runs, 1 waits."""
    history = History(1, partitions=1, agents=("A",))
    driven = history._of("A")
    driven.configure(parallelism_limit=2)
    for id in ("t1", "t2", "t3", "t4", "t5", "t6"):
        driven.trigger(id)
    driven.finish("t1")
    driven.finish("t2")
    driven.fail("t3", retryable=False)
    driven.finish("t1")  # late: ignored
    driven.trigger("t1")  # repeated: ignored
    driven.stop("t6")
    driven.trigger("t7", on_busy="sometime")  # refused
    driven.trigger("t8")
    project(store, history.records())
    found = store.connection.execute(
        "SELECT running, waiting, on_hold, accepted, attempts, finished, failed, stopped, expired, refused, ignored"
        " FROM agents"
    ).fetchone()
    assert found == (2, 1, 0, 7, 5, 2, 1, 1, 0, 1, 2)
