"""What metrics count from indexes and on the way, against a look at every row and at the log."""

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from streams import STATUSES
from streams.census import Census, WaitingFor, census
from streams.codec import Record
from streams.rules import events
from streams.rules.agent.rows import TriggerRow
from streams.rules.agent.state import Agent
from streams.rules.messages import Status
from streams.rules.site.state import Site
from tests.driving import Driven, at_seconds
from tests.histories import History


def row_by_row(agents: Iterable[Agent], sites: Iterable[Site], at: int) -> Census:
    counted = Census()
    for agent in agents:
        counted.remembered += len(agent.remembered)
        for row in agent.triggers.values():
            match row.state:
                case "running":
                    counted.running += 1
                    counted.forced += row.forced
                case "paused":
                    counted.paused += 1
                case "waiting":
                    counted.waiting[_why(agent, row, at)] += 1
    for site in sites:
        for claim_id, claim in site.claims.items():
            counted.claims["granted" if claim.granted else "waiting" if claim_id in site.shown else "behind_gate"] += 1
    return counted


def _why(agent: Agent, row: TriggerRow, at: int) -> WaitingFor:
    if agent.row.parked is not None:
        return "agent_parked"
    if agent.held_back:
        return "agent_paused"
    if row.claim_state is not None:
        return "site"
    if row.place is None:
        return "approval_or_dependency" if row.is_blocked else "not_yet_available"
    if agent.lines[row.conversation_id].head != row.trigger_id:
        return "conversation_busy"
    return "not_yet_available" if row.available_at > at else "agent_parallelism_limit_reached"


@pytest.mark.parametrize("number", range(20))
def test_a_census_is_what_a_look_at_every_row_finds(seed: int, number: int) -> None:
    history = History(seed + number)
    for _ in range(6):
        history.live(50)
        for driven in history.driven.values():
            partition = driven.partition
            everything = list(partition.agents.values()), list(partition.sites.values())
            counted, expected = (count(*everything, driven.now) for count in (census, row_by_row))
            assert +counted.waiting == +expected.waiting
            assert +counted.claims == +expected.claims
            names = ("running", "forced", "paused", "remembered")
            assert [getattr(counted, name) for name in names] == [getattr(expected, name) for name in names]


def test_histories_reach_every_reason(seed: int) -> None:
    reached: Counter[str] = Counter()
    for number in range(20):
        history = History(seed + number)
        for _ in range(6):
            history.live(50)
            for driven in history.driven.values():
                found = row_by_row(driven.partition.agents.values(), driven.partition.sites.values(), driven.now)
                reached += found.waiting + found.claims  # type: ignore[operator]
    assert set(reached) >= {
        "agent_paused", "not_yet_available", "approval_or_dependency", "conversation_busy",
        "agent_parallelism_limit_reached", "site", "granted", "waiting", "behind_gate",
    }, reached  # fmt: skip


def test_a_tally_is_what_the_log_says(seed: int) -> None:
    history = History(seed).live(1_500)
    for driven in history.driven.values():
        tally, log = driven.partition.take_tally(), driven.decisions
        refusals = Counter(decision.refusal.code for decision in log if decision.refusal)
        ignored = Counter(
            decision.ignored.reason for decision in log if decision.ignored and isinstance(decision.command, Status)
        )
        told = [event for decision in log for event in decision.events]
        refusals.update(event.code for event in told if isinstance(event, events.RefusedLater))
        assert refusals and tally.refusals == refusals
        assert ignored and tally.ignored_statuses == ignored
        assert tally.forgotten == sum(len(event.ids) for event in told if isinstance(event, events.Forgotten))
        freed = [
            decision
            for decision in log
            if isinstance(decision.command, Status)
            and any(isinstance(event, events.Dispatched) for event in decision.events)
        ]
        assert freed and len(tally.freed_at_ms) == len(freed)
        assert driven.partition.take_tally() == type(tally)()


def test_a_refusal_on_the_word_of_a_site_is_counted_too() -> None:
    """Also at the end of the time for an answer, and for as many as one decision refuses."""
    driven = Driven(default_limit=2, pool=1)
    driven.trigger("holds", "B", worker=True)
    ask: dict[str, Any] = {"worker": True, "interactive": True, "on_busy": "ask", "decide_before": at_seconds(4)}
    driven.trigger("told", **ask)
    assert driven.partition.take_tally().refusals == {"site_workers_busy": 1}
    driven.delivers = False
    driven.trigger("t1", **ask)
    driven.trigger("t2", **ask)
    assert not driven.partition.take_tally().refusals
    driven.advance(5)
    assert driven.partition.take_tally().refusals == {"site_not_answering": 2}


def test_freed_is_when_the_status_was_written() -> None:
    driven = Driven()
    driven.trigger("t1")
    driven.trigger("t2")
    execution_id = driven.dispatch("t1")["execution_id"]
    about = {"agent_id": "A", "conversation_id": "t1", "execution_id": execution_id}
    for offset, (status, written_at_ms) in enumerate((("heartbeat", 1_000), ("finished", 2_000), ("finished", 3_000))):
        value = json.dumps({"type": "status", "status": status, **about}).encode()
        driven.partition.handle(Record(STATUSES.name, 0, offset, b"A", value, (), written_at_ms), driven.now)
    assert driven.running() == ["t2"]
    assert driven.partition.take_tally().freed_at_ms == [2_000]
