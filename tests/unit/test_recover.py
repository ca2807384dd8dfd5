"""Rows rebuilt from the log of decisions are those that were lost (berth recover)."""

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from streams import CLAIMS, SIGNALS, STATUSES, TRIGGERS, codec
from streams.audit import recompute
from streams.audit.logged import read
from streams.audit.recover import POSITION_KEY, LogDamaged, Rebuilt, ahead, changes
from streams.rules import events, limits
from streams.rules.messages import Text
from tests.driving import Driven
from tests.histories import History
from tests.offices import Office
from tests.recoveries import LOGS, Records, check_same, differing, ends_of, rebuilt_from, records_of


def check(driven: Driven) -> Rebuilt:
    records = records_of(driven)
    rebuilt = rebuilt_from(driven.number, driven.partitions, records)
    check_same(driven.rows, rebuilt, records)
    assert rebuilt.lost() == []
    return rebuilt


def without(records: Records, topic: str, before: int) -> Records:
    """As when a topic has kept only what came later."""
    return {**records, topic: [record for record in records.get(topic, ()) if record.offset >= before]}


@pytest.mark.parametrize("number", range(3))
def test_the_rows_of_an_office_come_back_at_any_time(number: int, seed: int) -> None:
    office = Office(seed + number, verified=False)
    for _ in range(4):
        office.work(60, 200)
        check(office.driven)


@pytest.mark.parametrize("number", range(4))
def test_the_rows_of_odd_histories_come_back_at_any_time(number: int, seed: int) -> None:
    """Ids of every spelling, texts that are no UTF-8, statuses late and twice, bad and misplaced records, sites."""
    history = History(seed + number)
    for _ in range(6):
        history.live(80)
        for driven in history.driven.values():
            driven.commit()
            check(driven)


def test_the_rows_are_the_same_bytes_where_no_runner_gave_a_sign_of_life(seed: int) -> None:
    driven = Office(seed, verified=False).work(100, 300).driven
    records = records_of(driven)
    rebuilt = rebuilt_from(0, 1, records)
    assert differing(driven.rows, rebuilt.rows()) <= {("partition",)}
    stored = codec.read_partition(driven.rows[POSITION_KEY])
    assert (rebuilt.at, rebuilt.positions) == (stored.at, {t: o for t, o in stored.positions.items() if o})


def test_a_partition_goes_on_from_rebuilt_rows_as_it_would_have(seed: int) -> None:
    """Two partitions decide the same, of which one was lost and rebuilt at every tenth record."""
    kept, lost = Driven(pool=2, verified=False), Driven(pool=2, verified=False)
    chance = random.Random(seed)
    for number in range(120):
        about: dict[str, Any] = {"conversation_id": f"c{number % 7}", "payload": {"n": number}}
        if chance.random() < 0.4:
            about["worker"] = True
        ends = chance.random() < 0.7
        for driven in (kept, lost):
            driven.trigger(f"t{number}", f"A{number % 3}", **about)
            if ends and (running := driven.running(f"A{number % 3}")):
                driven.finish(running[0], f"A{number % 3}")
        if number % 10 == 9:
            rebuilt = check(lost)
            lost.rows = rebuilt.rows()
            lost.partition = lost.restored()
    assert lost.values == kept.values
    assert differing(lost.rows, kept.rows) <= {("partition",)}, "whose positions are written in no order"
    assert codec.read_partition(lost.rows[POSITION_KEY]) == codec.read_partition(kept.rows[POSITION_KEY])


# What the log doesn't have


def test_signs_of_life_come_back_from_the_statuses() -> None:
    driven = Driven()
    driven.trigger("t1", timeout_seconds=60, heartbeat_seconds=1000)
    for _ in range(4):
        driven.advance(300)
        driven.status("t1", "heartbeat")
    driven.trigger("t2", "B")
    driven.finish("t2", "B")
    row = driven.agent().triggers["t1"]
    assert (row.last_seen_at, row.lease_until) == (driven.now, driven.now + 1000 * 1_000_000)
    rebuilt = check(driven)
    again = rebuilt.agents["A"].triggers["t1"]
    assert (again.last_seen_at, again.lease_until) == (row.last_seen_at, row.lease_until)


def test_signs_of_life_after_the_last_decision_are_read_again() -> None:
    driven = Driven()
    driven.trigger("t1", heartbeat_seconds=1000)
    driven.status("t1", "running")
    driven.advance(500)
    driven.status("t1", "heartbeat")
    rebuilt = check(driven)
    assert STATUSES.name not in rebuilt.positions
    assert rebuilt.agents["A"].triggers["t1"].last_seen_at is None
    driven.rows = rebuilt.rows()
    driven.partition = driven.restored()
    driven.partition.start_at(STATUSES.name, 0)
    driven.crash()
    assert driven.agent().triggers["t1"].last_seen_at == driven.now


def test_a_stored_row_that_knows_of_later_signs_of_life_stays() -> None:
    driven = Driven()
    driven.trigger("t1", timeout_seconds=60)
    driven.advance(100)
    driven.status("t1", "running")
    driven.trigger("t2")
    records = {**records_of(driven), STATUSES.name: []}
    rebuilt = rebuilt_from(0, 1, records)
    assert changes(driven.rows, rebuilt.rows(), ends_of(records_of(driven))) == {}
    key = codec.write_key(("trigger", "A", "t1"))
    early = replace(codec.read_trigger(driven.rows[key]), last_seen_at=None, lease_until=1)
    damaged = {**driven.rows, key: codec.write_trigger(early)}
    assert set(changes(damaged, rebuilt.rows(), ends_of(records_of(driven)))) == {key}


def test_dead_letters_and_skipped_records_are_not_handled_again() -> None:
    driven = Driven()
    driven.trigger("t1")
    driven.send(TRIGGERS.name, b"no json", key=b"A")
    rebuilt = check(driven)
    assert rebuilt.positions[TRIGGERS.name] == 2


def test_messages_between_deciders_are_found_by_what_they_say() -> None:
    driven = Driven(default_limit="unlimited", pool=1, delivers=False)
    for number in range(4):
        driven.trigger(f"t{number}", worker=True)
    driven.deliver(3)
    driven.deliver(1)
    rebuilt = check(driven)
    stored = codec.read_partition(driven.rows[POSITION_KEY])
    assert {t: rebuilt.positions.get(t) for t in (CLAIMS.name, SIGNALS.name)} == {
        t: stored.positions.get(t) for t in (CLAIMS.name, SIGNALS.name)
    }


# Texts


def test_texts_come_from_whoever_has_them_and_only_the_right_ones() -> None:
    driven = Driven()
    driven.trigger("busy")
    driven.trigger("t1", message="hello", payload={"b": 1, "a": [1.5, None, "é"]})
    driven.trigger("t2", message="only a message")
    driven.trigger("t3")
    gone = without(records_of(driven), TRIGGERS.name, 10)
    nothing = rebuilt_from(0, 1, gone)
    assert [(lost.trigger_id, lost.state) for lost in nothing.lost()] == [("t1", "waiting"), ("t2", "waiting")]
    assert nothing.missing_texts() == {("A", "t1"): 1, ("A", "t2"): 2}
    stored = rebuilt_from(0, 1, gone, driven.rows)
    assert stored.lost() == []
    assert stored.rows() == driven.rows
    wrong = rebuilt_from(0, 1, gone)
    wrong.offer_value("A", "t1", {"message": "hello", "payload": {"b": 2}})
    wrong.offer_value("A", "t2", {"message": None})
    wrong.offer("B", "t2", "message", Text.of("only a message"))
    assert [lost.trigger_id for lost in wrong.lost()] == ["t1", "t2"]
    wrong.offer_value("A", "t1", {"payload": {"a": [1.5, None, "é"], "b": 1}})
    wrong.offer_value("A", "t2", {"message": "only a message"})
    assert wrong.lost() == []


def test_what_has_ended_needs_no_texts() -> None:
    driven = Driven()
    driven.trigger("t1", payload="p")
    driven.finish("t1")
    driven.trigger("t2", payload="p", interactive=True, on_busy="ask", conversation_id="c")
    driven.status("t2", "paused")
    driven.trigger("t3", interactive=True, on_busy="queue", conversation_id="c", payload="q")
    rebuilt = rebuilt_from(0, 1, without(records_of(driven), TRIGGERS.name, 10))
    assert [lost.trigger_id for lost in rebuilt.lost()] == ["t3"]


def test_what_was_lost_and_runs_is_not_lost_a_second_time() -> None:
    driven = Driven()
    driven.trigger("t1", payload="p")
    driven.partition.lose_payload("A", "t1", driven.now)
    driven.partition._texts.clear()
    driven.commit()
    rebuilt = rebuilt_from(0, 1, without(records_of(driven), TRIGGERS.name, 10))
    assert rebuilt.lost() == []
    assert rebuilt.agents["A"].triggers["t1"].payload_lost


# A log that isn't whole


def damaged(driven: Driven, change: str) -> Records:
    records = {topic: list(some) for topic, some in records_of(driven).items()}
    log = records[LOGS[0]]
    if change == "removed":
        del log[3]
    elif change == "first removed":
        del log[0]
    elif change == "edited":
        log[3] = log[3]._replace(value=(log[3].value or b"").replace(b'"via":"', b'"via" :"'))
    else:
        log[3], log[4] = log[4], log[3]
    return records


@pytest.mark.parametrize("change", ["removed", "first removed", "edited", "reordered"])
def test_a_damaged_log_is_refused(change: str) -> None:
    driven = Driven()
    for number in range(6):
        driven.trigger(f"t{number}")
    with pytest.raises(LogDamaged, match=r"decision \d of agent 'A'"):
        rebuilt_from(0, 1, damaged(driven, change))


def test_rows_that_know_more_than_the_log_are_named() -> None:
    driven = Driven()
    driven.trigger("t1", worker=True)
    driven.trigger("t2")
    records = records_of(driven)
    cut = {**records, LOGS[0]: records[LOGS[0]][:-1], LOGS[1]: []}
    rebuilt = rebuilt_from(0, 1, cut)
    found = ahead(driven.rows, rebuilt)
    agent = driven.agent().row.seq
    assert [(one.decider.kind, one.decider.id, one.stored_seq, one.log_seq) for one in found] == [
        ("agent", "A", agent, agent - 1),
        ("site", "default", 1, 0),
    ]
    assert ahead(driven.rows, rebuilt_from(0, 1, records)) == []


# What is stored


def test_only_what_is_wrong_is_written() -> None:
    driven = Driven()
    for number in range(3):
        driven.trigger(f"t{number}", payload=number, worker=True)
    records = records_of(driven)
    rows = rebuilt_from(0, 1, records).rows()
    ends = ends_of(records)
    stored = dict(driven.rows)
    missing, unreadable, extra = (codec.write_key(("trigger", "A", id)) for id in ("t0", "t1", "t9"))
    del stored[missing]
    stored[unreadable] = b"{"
    stored[extra] = b"{}"
    stored[b"no key"] = b"no row"
    assert changes(stored, rows, ends) == {
        missing: rows[missing],
        unreadable: rows[unreadable],
        extra: None,
        b"no key": None,
    }


@pytest.mark.parametrize(
    ("topic", "moved", "is_kept"),
    [(STATUSES.name, 1, True), (STATUSES.name, -1, False), (CLAIMS.name, 1, False), (TRIGGERS.name, 100, False)],
)
def test_a_stored_position_stays_where_it_may_be_right(topic: str, moved: int, is_kept: bool) -> None:
    driven = Driven()
    for number in range(4):
        driven.trigger(f"t{number}", worker=True)
        driven.fail(f"t{number}")
        driven.status(f"t{number}", "running")
    records = {name: [*some, *some[:2]] for name, some in records_of(driven).items()}
    later = records[CLAIMS.name][0]._replace(offset=len(records[CLAIMS.name]) - 2, value=b"{}")
    rebuilt = rebuilt_from(0, 1, {**records_of(driven), CLAIMS.name: [*records_of(driven)[CLAIMS.name], later]})
    stored = codec.read_partition(driven.rows[POSITION_KEY])
    row = stored._replace(positions={**stored.positions, topic: stored.positions[topic] + moved})
    moved_row = {**driven.rows, POSITION_KEY: codec.write_partition(row)}
    changed = changes(moved_row, rebuilt.rows(), ends_of(records, rebuilt))
    assert (POSITION_KEY not in changed) == is_kept


def test_where_nothing_was_decided_yet_only_what_can_not_be_read_goes() -> None:
    row = codec.write_partition(codec.PartitionRow(0, {TRIGGERS.name: 7}, 0))
    ends = dict.fromkeys(ends_of({}), (0, 9))
    assert changes({POSITION_KEY: row, b"[]": b"x"}, Rebuilt(0, 1).rows(), ends) == {b"[]": None}
    assert changes({POSITION_KEY: b"{"}, Rebuilt(0, 1).rows(), ends) == {POSITION_KEY: None}
    for outside in ((8, 9), (0, 6)):
        assert changes({POSITION_KEY: row}, {}, {**ends, TRIGGERS.name: outside}) == {POSITION_KEY: None}


# Rules that are others now


def test_an_older_policy_is_folded_and_everything_looked_at_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Driven(default_limit=2)
    for number in range(6):
        driven.trigger(f"t{number}", worker=number % 2 == 0, payload=number)
    driven.finish("t0")
    monkeypatch.setattr(recompute, "KNOWN_POLICIES", frozenset())
    records = records_of(driven)
    rebuilt = rebuilt_from(0, 1, records)
    assert [decider.id for decider in rebuilt.looked_at_anew] == ["A", "default"]
    check_same(driven.rows, rebuilt, records)
    before = driven.running()
    driven.rows = rebuilt.rows()
    driven.partition = driven.restored()
    driven.crash()
    assert driven.running() == before
    driven.finish("t1")
    driven.check()


def test_a_decision_that_does_not_come_out_again_is_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug of the rules was mended without a new policy: the log says what was decided."""
    driven = Driven(default_limit=2)
    for number in range(5):
        driven.trigger(f"t{number}", payload=number, worker=True)
    driven.trigger("t1", "B", worker=True)
    monkeypatch.setattr(limits, "TIMEOUT_SECONDS_DEFAULT", limits.TIMEOUT_SECONDS_DEFAULT + 1)
    records = records_of(driven)
    rebuilt = rebuilt_from(0, 1, records)
    assert rebuilt.is_incomplete
    assert [decider.id for decider in rebuilt.looked_at_anew] == ["A", "B"]
    check_same(driven.rows, rebuilt, records)


def test_left_over_work_comes_back() -> None:
    """A conversation of hundreds is being stopped when the rows are lost: the rest is stopped all the same (F1)."""
    driven = Driven(verified=False)
    for number in range(200):
        driven.trigger(f"t{number}", conversation_id="c")
    value = {"type": "stop", "v": 1, "id": "s", "agent_id": "A", "conversation_id": "c"}
    record = codec.Record(TRIGGERS.name, 0, driven.offset(TRIGGERS.name), b"A", json.dumps(value).encode())
    driven.input.append(record)
    driven.partition.handle(record, driven.now)
    driven.commit()
    assert driven.agent().row.todo == "stop_conversation"
    rebuilt = check(driven)
    assert rebuilt.agents["A"].row == driven.agent().row
    driven.rows = rebuilt.rows()
    driven.crash()
    driven.fire()
    assert len(driven.agent().triggers) == 1


def test_unreadable_decisions_are_no_rows() -> None:
    driven = Driven()
    driven.trigger("t1")
    with pytest.raises(ValueError, match="offset 0"):
        read(LOGS[0], 0, 0, (driven.values[0]).replace(b'"seq":', b'"sequence":'))
    assert driven.events_of(events.Accepted)
