"""The tables on a real PostgreSQL: what is written, by whatever batches, is the fold of the log, once."""

import json
import random
import re
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from psycopg import sql

from projections import snapshots
from projections.row_types import CannotApply
from projections.snapshots import SNAPSHOT_DECISIONS
from projections.store import Applied, LogRecord, Moved, Store
from streams import DECISIONS, SITE_DECISIONS, TEXTS, Topic
from streams.rules.events import read_decision, write_decision
from tests.driving import T0
from tests.histories import History, batch_of
from tests.integration.projectors import check_rows, content, fresh, positions, project, snapshot_all

# What is in the tables


@pytest.mark.parametrize("fixed", [True, False])
def test_the_rows_are_what_the_rules_hold(store: Store, seed: int, fixed: bool) -> None:
    """The fixed history is known to have something in every table."""
    history = History(0 if fixed else seed).live(600)
    project(store, history.records())
    check_rows(store, history)
    tables = ("triggers WHERE state = 'finished'", "site_claims", "site_gates", "site_deletions", "site_decisions")
    for table in tables if fixed else ():
        assert store.connection.execute(f"SELECT count(*) FROM {table}".encode()).fetchone() != (0,)


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
    """Whole, one by one, and cut in two at every record, with the first half delivered a second time.

    Case 118: the only cursor is the offset of each partition in Kafka.
    """
    records = History(seed).live(40).records()
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


def decisions_of(records: Sequence[LogRecord], topic: Topic = DECISIONS) -> list[LogRecord]:
    return [record for record in records if record.topic == topic.name]


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
    check_rows(store, history)


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


def test_a_snapshot_every_so_many_decisions_is_the_agent_as_the_rules_held_it(store: Store) -> None:
    history = History(5, partitions=1, agents=("A",))
    driven = history._of("A")
    driven.configure(parallelism_limit=3)
    expected = {}
    while driven.agent().row.seq < 2 * SNAPSHOT_DECISIONS + 50:
        history.happen("A")
        if driven.agent().row.archived:
            driven.configure(parallelism_limit=3)
        seq = driven.agent().row.seq
        if seq % SNAPSHOT_DECISIONS == 0:
            expected[seq] = snapshots.write(driven.agent())
    records = history.records()
    project(store, records[:700])
    snapshot_all(store)
    project(store, records[700:])
    snapshot_all(store)
    found: dict[Any, Any] = dict(store.connection.execute("SELECT seq, state::text FROM agent_snapshots").fetchall())
    assert set(found) == {SNAPSHOT_DECISIONS, 2 * SNAPSHOT_DECISIONS} and set(expected) <= set(found)
    for seq, state in expected.items():
        assert without_leases(found[seq]) == without_leases(state)
    assert store.without_snapshot() == []
    # A read of the past: the newest snapshot before it, and the decisions since.
    newest = 2 * SNAPSHOT_DECISIONS
    decisions = [record.value or b"" for record in decisions_of(records)]
    past = snapshots.fold(snapshots.read("A", found[newest]), decisions[newest : newest + 42])
    assert json.loads(snapshots.write(past)) == json.loads(
        snapshots.write(snapshots.fold(snapshots.read("A", None), decisions[: newest + 42]))
    )


def test_a_snapshot_of_a_site_every_so_many_decisions_is_the_site_as_the_rules_held_it(store: Store) -> None:
    history = History(7, partitions=1, agents=("A", "B", "a", "b"))
    expected = {}
    while (site := history.site("default")) is None or site.row.seq < 2 * SNAPSHOT_DECISIONS + 50:
        history.live(2).send_to_site("default")
        for agent_id in history.agents:
            history._of(agent_id).configure(agent_id, run_budget=None)  # also brings it back from the archive
        site = history.site("default")
        assert site is not None
        if site.row.seq % SNAPSHOT_DECISIONS == 0:
            expected[site.row.seq] = snapshots.write_site(site)
    records = history.records()
    project(store, records[:700])
    snapshot_all(store)
    project(store, records[700:])
    snapshot_all(store)
    rows = store.connection.execute("SELECT seq, state::text FROM site_snapshots WHERE site = 'default'").fetchall()
    found: dict[Any, Any] = dict(rows)
    assert set(found) == {SNAPSHOT_DECISIONS, 2 * SNAPSHOT_DECISIONS} and set(expected) <= set(found) and expected
    for seq, state in expected.items():
        assert json.loads(found[seq]) == json.loads(state)
    for name in ("gates", "deletions", "claims"):
        assert any(json.loads(state)[name] for state in found.values()), f"there were {name}"
    assert store.without_snapshot() == []
    newest = 2 * SNAPSHOT_DECISIONS
    decisions = [record.value or b"" for record in decisions_of(records, SITE_DECISIONS) if record.key == b"default"]
    past = snapshots.fold_site(snapshots.read_site("default", found[newest]), decisions[newest : newest + 42])
    assert json.loads(snapshots.write_site(past)) == json.loads(
        snapshots.write_site(snapshots.fold_site(snapshots.read_site("default", None), decisions[: newest + 42]))
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
