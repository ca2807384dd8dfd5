"""How long each cause held work up: added up cleverly, it equals looking at everything after every decision."""

from collections import Counter

import pytest

from streams.audit.causes import first_cause
from streams.audit.past import Past
from streams.audit.waiting import Counted, WaitingTimes
from streams.rules.order import SECOND
from tests.audits import log_of
from tests.driving import T0, Driven, at_seconds
from tests.offices import Office


def times_of(driven: Driven, since: int = 0, until: int | None = None) -> WaitingTimes:
    times = WaitingTimes(since, until)
    for logged in log_of(driven):
        times.take(logged)
    times.finish()
    return times


def plainly(driven: Driven) -> Counter[Counted]:
    """Every waiting trigger's first cause after every decision, until the next one or until its own time comes."""
    past, times = Past(), Counter[Counted]()

    def count(begin: int, end: int) -> None:
        for agent in past.agents.values():
            for key in agent.waiting:
                row = agent.triggers[key.id.decode()]
                own_time = min(max(row.available_at, begin), end)
                for start, stop in ((begin, own_time), (own_time, end)):
                    cause = first_cause(past.facts(agent), row, start)
                    if cause is not None and stop > start:
                        counted = Counted(agent.agent_id, row.organization_id, row.site_id, cause.reason)
                        times[counted] += stop - start

    for logged in log_of(driven):
        count(past.at, logged.decision.at)
        past.fold(logged)
    return +times


@pytest.mark.parametrize("number", range(3))
def test_it_equals_looking_at_everything_after_every_decision(number: int, seed: int) -> None:
    """The first day is the same in every run: it has every cause."""
    driven = Office(seed * 10 + number if number else 0).work(150, 500).driven
    expected = plainly(driven)
    assert +times_of(driven).times == expected
    if not number:
        assert {counted.reason for counted in expected} == {
            "agent_paused", "conversation_busy", "not_yet_available", "agent_parallelism_limit_reached",
            "organization_disabled", "agent_environment_folder_busy", "site_workers_busy",
        }  # fmt: skip


def test_shares_are_of_what_others_held_up() -> None:
    driven = Driven(default_limit=1, pool=1)
    driven.trigger("a", organization_id="o")
    driven.trigger("b", organization_id="o")
    driven.trigger("later", available_at=at_seconds(1000))
    driven.trigger("x", "X", worker=True)
    driven.trigger("y", "Y", worker=True, organization_id="o")
    driven.advance(30)
    driven.finish("a")
    driven.advance(10)
    driven.finish("x", "X")
    times = times_of(driven)
    total = times.total()
    assert total.seconds == 70
    assert [(share.reason, share.seconds, share.share) for share in total.shares] == [
        ("site_workers_busy", 40, pytest.approx(4 / 7)),
        ("agent_parallelism_limit_reached", 30, pytest.approx(3 / 7)),
        ("not_yet_available", 40, None),
    ]
    assert [(one.name, one.seconds) for one in times.by("agent")] == [("Y", 40), ("A", 30)]
    assert [(one.name, one.seconds) for one in times.by("site")] == [("default", 40)]
    assert [(one.name, one.seconds) for one in times.by("organization")] == [("o", 70)]


def test_who_comes_next_in_a_conversation_waits_for_room_from_then_on() -> None:
    """Also when a timer ended the one before, so that no command names the conversation."""
    driven = Driven(default_limit=1)
    driven.trigger("first", conversation_id="c", timeout_seconds=100, max_attempts=1)
    driven.trigger("next", conversation_id="c")
    driven.trigger("other", created_at=at_seconds(-1))
    driven.advance(420)
    driven.advance(30)
    driven.finish("other")
    times = times_of(driven)
    assert +times.times == plainly(driven)
    assert {counted.reason: time // SECOND for counted, time in times.times.items()} == {
        "conversation_busy": 400, "agent_parallelism_limit_reached": 450,
    }  # fmt: skip


def test_who_waits_for_a_retry_waits_for_room_once_its_time_has_come() -> None:
    """Though nobody decides anything then."""
    driven = Driven(default_limit=1)
    driven.trigger("fails")
    driven.trigger("long")
    driven.fail("fails")
    driven.advance(100)
    driven.finish("long")
    times = times_of(driven)
    assert +times.times == plainly(driven)
    seconds = {counted.reason: time / SECOND for counted, time in times.times.items()}
    assert 4.5 <= seconds["not_yet_available"] <= 5
    assert seconds["agent_parallelism_limit_reached"] == 100 - seconds["not_yet_available"]


def test_only_the_stretch_asked_for_is_counted() -> None:
    driven = Driven(default_limit=1)
    driven.trigger("a")
    driven.trigger("b")
    driven.advance(100)
    driven.finish("a")
    times = times_of(driven, T0 + 20 * SECOND, T0 + 50 * SECOND)
    assert times.total().seconds == 30
