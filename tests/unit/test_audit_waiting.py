"""How long each cause held work up: added up cleverly, it equals looking at everything after every decision."""

import random
import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest

from streams.audit.causes import first_cause
from streams.audit.past import Past
from streams.audit.waiting import Counted, WaitingTimes
from streams.rules.order import SECOND, format_instant
from tests.audits import log_of
from tests.driving import T0, Driven, at_seconds
from tests.histories import History
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


class Queues:
    """Few conversations, in which most wait for an approval, their time or another one, and others come and go."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.driven = Driven(default_limit=1, pool=1)

    def live(self, steps: int) -> Driven:
        for number in range(steps):
            agent_id = self.random.choice("AB")
            agent = self.driven.partition.agents.get(agent_id)
            ids = sorted(agent.triggers) if agent is not None else []
            what = self.random.choices(["trigger", "end", "release", "agent", "time"], [30, 30, 15, 3, 20])[0]
            if what == "time":
                pass_time = self.random.choices([self.driven.advance, self.driven.skip], [8, 1])[0]
                pass_time(self.random.choice([1, 7, 40]))
            elif what == "trigger" or not ids:
                self._trigger(f"t{number}", agent_id)
            elif what == "agent":
                self.driven.control(self.random.choice(["pause", "resume", "resume"]), agent_id)
            elif what == "end" and (running := self.driven.running(agent_id)):
                self.driven.status(self.random.choice(running), self.random.choice(["finished", "failed"]), agent_id)
            elif what == "release":
                self._release(self.random.choice(ids), agent_id)
        return self.driven

    def _trigger(self, id: str, agent_id: str) -> None:
        fields: dict[str, Any] = {"conversation_id": self.random.choice("cd"), "max_attempts": 2}
        if self.random.random() < 0.3:
            fields["approval_required"] = True
        if self.random.random() < 0.3:
            fields["available_at"] = self._soon()
        if self.random.random() < 0.3:
            fields["depends_on"] = [{"agent_id": self.random.choice("AB"), "conversation_id": "d"}]
        if self.random.random() < 0.3:
            fields |= {"worker": True, "organization_id": self.random.choice("op")}
        self.driven.trigger(id, agent_id, **fields)

    def _release(self, id: str, agent_id: str) -> None:
        match self.random.choice(["approve", "approve", "reschedule", "stop"]):
            case "stop":
                self.driven.stop(id, agent_id, requested_by="ann")
            case "reschedule":
                self.driven.control("reschedule", agent_id, trigger_id=id, available_at=self._soon())
            case _:
                self.driven.control("approve", agent_id, trigger_id=id)

    def _soon(self) -> str:
        return format_instant(self.driven.now + self.random.choice([5, 50]) * SECOND)


@pytest.mark.parametrize("number", range(8))
def test_who_has_no_place_in_its_conversation_waits_for_it_only_while_it_is_busy(number: int, seed: int) -> None:
    """The first are the same in every run: they have every cause that comes before or after a conversation's."""
    driven = Queues(seed * 10 + number if number else 0).live(300)
    expected = plainly(driven)
    assert +times_of(driven).times == expected
    if not number:
        assert {counted.reason for counted in expected} >= {
            "agent_paused", "conversation_busy", "approval_required", "dependency_unfinished", "dependency_failed",
            "not_yet_available", "agent_parallelism_limit_reached", "site_workers_busy",
        }  # fmt: skip


@pytest.mark.parametrize("number", range(3))
def test_odd_histories_equal_looking_at_everything_too(number: int, seed: int) -> None:
    history = History(seed * 10 + number, partitions=1, agents=("A", "B"))
    for _ in range(5):
        history.live(50).driven[0].skip(history.random.choice([3, 30, 400]))
    driven = history.settle().driven[0]
    assert +times_of(driven).times == plainly(driven)


def test_an_approval_is_waited_for_once_the_conversation_is_idle() -> None:
    driven = Driven(default_limit=1)
    driven.trigger("first", conversation_id="c")
    driven.trigger("held", conversation_id="c", approval_required=True)
    driven.advance(10)
    driven.finish("first")
    driven.advance(100)
    driven.trigger("next", conversation_id="c")
    driven.advance(30)
    driven.finish("next")
    driven.advance(5)
    driven.control("approve", trigger_id="held")
    assert {counted.reason: time / SECOND for counted, time in times_of(driven).times.items()} == {
        "conversation_busy": 40, "approval_required": 105,
    }  # fmt: skip
    stretch = times_of(driven, T0 + 5 * SECOND, T0 + 120 * SECOND)
    assert {counted.reason: time / SECOND for counted, time in stretch.times.items()} == {
        "conversation_busy": 15, "approval_required": 100,
    }  # fmt: skip


@pytest.mark.parametrize(
    "held", [{"approval_required": True}, {"available_at": at_seconds(100_000)}], ids=["approval", "time"]
)
def test_many_without_a_place_are_not_looked_at_whenever_another_comes_and_goes(held: dict[str, Any]) -> None:
    driven = Driven()
    for number in range(150):
        driven.trigger(f"held{number}", conversation_id="c", **held)
    for number in range(150):
        driven.advance(2)
        driven.trigger(f"t{number}", conversation_id="c")
        driven.advance(1)
        driven.finish(f"t{number}")
    looks = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal looks
        looks += event == "call" and frame.f_code is WaitingTimes._look.__code__

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        times = times_of(driven)
    finally:
        sys.setprofile(before)
    own = "approval_required" if "approval_required" in held else "not_yet_available"
    seconds = {counted.reason: time / SECOND for counted, time in times.times.items()}
    assert seconds == {"conversation_busy": 150 * 150, own: 150 * 300}
    assert 150 < looks <= 3 * len(driven.decisions)


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


def test_who_waits_for_a_mute_site_waits_for_room_only_while_there_is_none() -> None:
    driven = Driven(default_limit=1, delivers=False)
    driven.trigger("claims", worker=True)
    driven.advance(1000)
    driven.trigger("idle", worker=True)
    driven.advance(10)
    driven.trigger("runs")
    driven.advance(20)
    driven.finish("runs")
    driven.advance(30)
    driven.stop("idle")
    times = times_of(driven, driven.now - 60 * SECOND)
    assert +times_of(driven).times == plainly(driven)
    assert {counted.reason: time / SECOND for counted, time in times.times.items()} == {
        "site_not_answering": 2 * 40, "agent_parallelism_limit_reached": 2 * 20,
    }  # fmt: skip


def test_only_the_stretch_asked_for_is_counted() -> None:
    driven = Driven(default_limit=1)
    driven.trigger("a")
    driven.trigger("b")
    driven.advance(100)
    driven.finish("a")
    times = times_of(driven, T0 + 20 * SECOND, T0 + 50 * SECOND)
    assert times.total().seconds == 30
