"""Faults that users of comparable systems reported, kinds 1 to 5: as far as rules can fail without Kafka.

Each docstring begins with the number of the case in the list of cases; the scenario is its own.
"""

import random
from itertools import permutations
from typing import Any

import pytest

from streams import CONTROLS, STATUSES, TRIGGERS
from streams.rules import events
from streams.rules.agent.timers import TIMER_RANK, Deadline
from streams.rules.order import SECOND
from tests.driving import T0, Driven, Json, at_seconds

PERSON: Json = {"interactive": True, "on_busy": "queue", "kind": "chat"}


def triggers(driven: Driven, first: int, last: int, **fields: Any) -> None:
    for number in range(first, last + 1):
        driven.trigger(f"c{number}", **fields)


def used(driven: Driven, agent_id: str = "A") -> int:
    """Slots in use, counted from the log alone."""
    running: set[str] = set()
    for decision in driven.decisions:
        for event in decision.events if decision.agent_id == agent_id else ():
            if isinstance(event, events.Dispatched):
                running.add(event.execution_id)
            elif (ended := getattr(event, "execution_id", None)) is not None and event.type != "stop_requested":
                running.discard(ended)
    assert len(running) == driven.agent(agent_id).running
    return len(running)


# 1 The limit is exceeded


@pytest.mark.parametrize("callers", [2, 20])
def test_of_many_that_ask_at_the_same_instant_as_many_start_as_there_are_places(callers: int, seed: int) -> None:
    """Case 1: a single decider per agent; the order of arrival is chance, the number isn't."""
    order = random.Random(seed)
    for _ in range(20):
        driven = Driven(default_limit=1)
        ids = [f"c{number}" for number in range(callers)]
        order.shuffle(ids)
        with driven.held():
            for id in ids:
                driven.trigger(id, **PERSON)
        assert len(driven.dispatched()) == 1
        assert len(driven.waiting()) == callers - 1
        assert {*driven.dispatched(), *driven.waiting()} == set(ids)


def test_every_way_to_ask_is_counted_by_the_same_count() -> None:
    """Case 4: interactive, queued, scheduled, public, a retry, a resume and a reply."""
    driven = Driven(default_limit=2)
    driven.trigger("retry")
    driven.fail("retry")
    driven.trigger("resume", conversation_id="c-resume", **PERSON)
    driven.status("resume", "paused")
    driven.trigger("replied", conversation_id="c-reply", **PERSON)
    driven.status("replied", "paused")
    driven.trigger("c1", **PERSON)
    driven.trigger("c2", kind="task_assigned")
    for kind in ("schedule", "public", "task", "anything"):
        driven.trigger(f"c-{kind}", kind=kind)
    driven.control("resume_trigger", trigger_id="resume")
    driven.trigger("reply", conversation_id="c-reply", **PERSON)
    driven.advance(10)
    assert driven.running() == ["c1", "c2"]
    assert len(driven.waiting()) == 7
    driven.check()


def test_restarted_work_goes_through_admission() -> None:
    """Case 5: one restart, then ten at once."""
    driven = Driven(default_limit=1)
    driven.trigger("c0", max_attempts=1)
    driven.fail("c0")
    driven.trigger("c1")
    for number in range(11):
        driven.trigger(f"again{number}", restarts="c0")
    assert driven.running() == ["c1"]
    assert len(driven.waiting()) == 11


# 2 Slots that leak


def test_a_transaction_that_fails_changes_no_count() -> None:
    """Case 8: what was decided but not written is decided again, and slots are what the log says."""
    driven = Driven(default_limit=2)
    triggers(driven, 1, 2)
    status = {"type": "status", "v": 1, "agent_id": "A", "conversation_id": "c-c1", "status": "finished",
              "execution_id": driven.dispatch("c1")["execution_id"]}  # fmt: skip
    with pytest.raises(ZeroDivisionError), driven.held():  # noqa: PT012 - the write fails in the middle of a batch
        driven.send(STATUSES.name, status)
        driven.trigger("c3")
        raise ZeroDivisionError
    assert used_after_crash(driven) == 2
    driven.trigger("c4")
    assert (driven.running(), driven.waiting()) == (["c2", "c3"], ["c4"])
    driven.check()


def used_after_crash(driven: Driven) -> int:
    driven.crash()
    return used(driven)


def test_requests_that_turn_out_to_be_invalid_take_no_slot() -> None:
    """Case 10: ten that fail late, then a good one."""
    driven = Driven(default_limit=3)
    bad: list[Json] = [
        {"message": 5}, {"folder": ""}, {"payload": "x" * 300_000}, {"on_busy": "later"}, {"worker": 1},
        {"folder": "/without/environment"}, {"expires_at": "soon"}, {"max_attempts": 0},
        {"environment_id": "e", "folder": "/a/../b"}, {"decide_before": at_seconds(-1)},
    ]  # fmt: skip
    for number, fields in enumerate(bad):
        assert driven.trigger(f"bad{number}", **fields).refusal is not None
    driven.send(TRIGGERS.name, b'{"type":"trigger","v":1,"id":"broken off', key=b"A")
    assert used(driven) == 0
    driven.trigger("good")
    assert driven.running() == ["good"]
    driven.check()


@pytest.mark.parametrize("how", ["stop", "stop conversation"])
def test_removing_running_and_waiting_work_leaves_no_phantom_holders(how: str) -> None:
    """Case 12: eighteen of twenty are removed; the two left start."""
    driven = Driven(default_limit=3)
    triggers(driven, 1, 20)
    for number in range(18, 0, -1):
        if how == "stop":
            driven.stop(f"c{number}")
        else:
            driven.stop(conversation_id=f"c-c{number}")
    for number in range(1, 4):
        driven.status(f"c{number}", "stopped")
    assert driven.running() == ["c19", "c20"]
    assert driven.waiting() == []
    driven.check()


def test_an_archived_and_revived_agent_starts_without_used_slots() -> None:
    """Case 12: archive takes the place of deletion."""
    driven = Driven(default_limit=3)
    triggers(driven, 1, 20)
    driven.control("archive")
    driven.advance(60)
    driven.configure()
    assert used(driven) == 0
    triggers(driven, 21, 24)
    assert driven.running() == ["c21", "c22", "c23"]
    driven.check()


def test_a_dead_workers_slot_is_free_when_its_lease_ends() -> None:
    """Case 14: the lease is timeout_seconds + 300 s, of the attempt itself."""
    driven = Driven(default_limit=1)
    driven.trigger("c1", timeout_seconds=60)
    driven.trigger("c2")
    driven.advance(359.999999)
    assert driven.running() == ["c1"]
    driven.advance(0.000001)
    assert driven.running() == ["c2"]
    assert driven.last.at == T0 + 360 * SECOND


# 3 Double release and double dispatch


def test_a_late_finish_frees_nobody_elses_slot() -> None:
    """Case 16."""
    driven = Driven(default_limit=1)
    driven.trigger("c1", timeout_seconds=60)
    driven.trigger("c2")
    driven.trigger("c3")
    driven.advance(360)
    assert driven.running() == ["c2"]
    [decision] = driven.finish("c1")
    assert decision.ignored is not None
    assert decision.ignored.reason == "stale"
    assert (driven.running(), driven.waiting()) == (["c2"], ["c3", "c1"])
    driven.check()


def test_a_second_reclaim_with_an_old_list_does_nothing() -> None:
    """Case 18: a timer that was read before the restart no longer holds."""
    driven = Driven(default_limit=1)
    driven.trigger("c1", timeout_seconds=60)
    old = driven.restored()
    driven.advance(380)
    assert driven.dispatch("c1")["attempt"] == 2
    assert old.fire_timers(driven.now, 10) == 1, "the old owner would have decided it, but is fenced"
    lease = Deadline(T0 + 360 * SECOND, TIMER_RANK["lease"], "c1", "lease")
    driven.partition._timers.put_back([(driven.agent(), lease)])
    decisions = len(driven.decisions)
    driven.fire()
    assert len(driven.decisions) == decisions
    assert driven.dispatch("c1")["attempt"] == 2
    driven.check()


@pytest.mark.parametrize("timeout", [18_000, None])
def test_long_work_is_dispatched_once_however_often_leases_are_looked_at(timeout: int | None) -> None:
    """Case 20: four hours, looked at every few minutes; with the default lease, because heartbeats come."""
    driven = Driven(default_limit=3)
    driven.trigger("c1", timeout_seconds=timeout)
    for _ in range(72):
        driven.advance(200)
        if timeout is None:
            driven.status("c1", "heartbeat")
        driven.partition.fire_timers(driven.now, 100)
    driven.finish("c1")
    assert driven.dispatched() == ["c1"]
    assert driven.final("c1") == "finished"


def test_a_refusal_gives_back_nothing() -> None:
    """Case 22: three in a row."""
    driven = Driven(default_limit=2)
    driven.configure(max_backlog_depth=0)
    triggers(driven, 1, 2)
    for number in range(3, 6):
        refusal = driven.trigger(f"c{number}").refusal
        assert refusal is not None
        assert (refusal.code, refusal.running) == ("agent_backlog_full", 2)
    assert used(driven) == 2


# 4 Stalls


@pytest.mark.parametrize("batched", [False, True])
def test_no_wake_up_is_lost_between_a_new_one_and_a_release(batched: bool) -> None:
    """Case 23: done and enqueue in every order, in one transaction or in two."""
    for order in permutations(["done", "c2", "c3"]):
        driven = Driven(default_limit=1)
        driven.trigger("c1")
        done = {"type": "status", "v": 1, "agent_id": "A", "conversation_id": "c-c1", "status": "finished",
                "execution_id": driven.dispatch("c1")["execution_id"]}  # fmt: skip

        def step(what: str, driven: Driven = driven, done: Json = done) -> None:
            driven.send(STATUSES.name, done) if what == "done" else driven.trigger(what)

        if batched:
            with driven.held():
                for what in order:
                    step(what)
        else:
            for what in order:
                step(what)
        assert len(driven.running()) == 1
        assert driven.running()[0] != "c1"
        assert len(driven.waiting()) == 1
        driven.check()


@pytest.mark.parametrize("waiting", [10, 64, 100, 500])
def test_blocked_items_starve_no_other_agent(waiting: int) -> None:
    """Case 25."""
    driven = Driven(verified=False)
    driven.configure("A1", parallelism_limit=1)
    driven.configure("A2", parallelism_limit=5)
    for number in range(waiting):
        driven.trigger(f"old{number}", "A1", created_at=at_seconds(-200))
    for number in range(3):
        driven.trigger(f"young{number}", "A2")
    assert driven.running("A2") == ["young0", "young1", "young2"]


def test_one_that_is_not_due_blocks_nobody() -> None:
    """Case 27: it starts when it is due, or when the slot is next free after that."""
    driven = Driven(default_limit=1)
    driven.trigger("c1", created_at=at_seconds(0), available_at=at_seconds(3600))
    driven.advance(2)
    driven.trigger("c2", created_at=at_seconds(1), available_at=at_seconds(1))
    assert driven.running() == ["c2"]
    driven.advance(1000)
    driven.finish("c2")
    driven.advance_to(T0 + 3600 * SECOND - 1)
    assert driven.running() == []
    driven.advance_to(T0 + 3600 * SECOND)
    assert driven.running() == ["c1"]


@pytest.mark.parametrize("restart", [False, True])
def test_a_future_trigger_starts_in_time_without_other_traffic(restart: bool) -> None:
    """Case 29: no notification is needed, also after a restart in between."""
    driven = Driven()
    driven.trigger("c1", available_at=at_seconds(30))
    if restart:
        driven.skip(20)
        driven.crash()
    assert driven.partition.next_deadline_us() == T0 + 30 * SECOND
    driven.advance_to(T0 + 30 * SECOND)
    assert driven.running() == ["c1"]


def test_an_idle_backlog_writes_nothing() -> None:
    """Case 31: no growth, no rising attempt numbers; a completion is one dispatch."""
    driven = Driven(default_limit=1)
    triggers(driven, 100, 600)
    before = (len(driven.outputs), driven.transactions)
    driven.advance(60)
    assert (len(driven.outputs), driven.transactions) == before
    [decision] = driven.finish("c100")
    assert [event.type for event in decision.events] == ["finished", "dispatched"]
    assert {row.attempt for row in driven.agent().triggers.values() if row.state == "waiting"} == {0}


# 5 Limits


def test_raising_a_limit_starts_the_waiting_at_once() -> None:
    """Case 32: a limit of 0 is refused, so from 1 to 3."""
    driven = Driven(default_limit=1)
    triggers(driven, 1, 4)
    driven.configure(parallelism_limit=3)
    assert (driven.running(), driven.waiting()) == (["c1", "c2", "c3"], ["c4"])


def test_lowering_a_limit_below_what_runs_takes_effect_as_they_end() -> None:
    """Case 34."""
    driven = Driven(default_limit=4)
    triggers(driven, 1, 6)
    driven.configure(parallelism_limit=2)
    for ended in ("c1", "c2"):
        driven.finish(ended)
        assert driven.waiting() == ["c5", "c6"]
    assert used(driven) == 2
    driven.finish("c3")
    assert (driven.running(), driven.waiting()) == (["c4", "c5"], ["c6"])


def test_zero_is_neither_unlimited_nor_closed() -> None:
    """Case 36: refused, and the old limit stays; a pause is the way to stop."""
    driven = Driven(default_limit=1)
    triggers(driven, 1, 2)
    assert driven.configure(parallelism_limit=0).refusal is not None
    assert (driven.running(), driven.waiting()) == (["c1"], ["c2"])
    driven.finish("c1")
    assert driven.running() == ["c2"]


@pytest.mark.parametrize(
    "limit", ["-1", "-2147483649", "2147483648", "9223372036854775808", "1e400", "NaN", '""', '"3"', "[]"]
)
def test_odd_limits_leave_the_old_one(limit: str) -> None:
    """Case 38: as a record on the topic; the next record is handled."""
    driven = Driven(default_limit=1)
    driven.configure(parallelism_limit=2)
    driven.send(CONTROLS.name, f'{{"type":"configure","v":1,"id":"k","agent_id":"A","requested_by":"u",'
                               f'"parallelism_limit":{limit}}}'.encode(), key=b"A")  # fmt: skip
    assert driven.agent().row.parallelism_limit == 2
    assert len(driven.dead_letters) == (limit == "NaN")
    triggers(driven, 1, 3)
    assert len(driven.running()) == 2


@pytest.mark.parametrize("settings", [None, {}, {"parallelism_limit": None}])
def test_an_agent_without_a_limit_gets_the_documented_default(settings: Json | None) -> None:
    """Case 41."""
    driven = Driven(default_limit=1)
    if settings is not None:
        driven.configure(owner="u", **settings)
    triggers(driven, 1, 2)
    assert driven.running() == ["c1"]
    assert driven.agent().row.parallelism_limit == 1
