"""The past read from the tables is the past folded from the log: by number, by time, for one and for all."""

import random
from typing import Any

import pytest
from psycopg import Cursor
from psycopg.rows import TupleRow

from projections.past import (
    SEQ_MAX,
    Concluded,
    PastThen,
    Questions,
    Rows,
    advance,
    agent_past,
    everything_past,
    questions_of_agent,
)
from projections.schema import Connection
from projections.store import LogRecord, Store
from streams import SITE_DECISIONS
from streams.audit.as_of import agent_then, everything
from streams.audit.logged import Logged, merged
from streams.audit.past import Past
from streams.rules.order import SECOND
from tests.audits import log_of, sources
from tests.driving import T0
from tests.integration.projectors import project, snapshot_all
from tests.offices import Office


def records(log: list[Logged]) -> list[LogRecord]:
    return [
        LogRecord(one.topic, one.partition, one.offset, one.decider.id.encode(), one.value, (), one.decision.at)
        for one in log
    ]


def folded(log: list[Logged]) -> Past:
    past = Past()
    for logged in log:
        past.fold(logged)
    return past


@pytest.fixture
def office(store: Store, seed: int, monkeypatch: pytest.MonkeyPatch) -> Office:
    """A day in the tables, with a snapshot after every 20th decision."""
    monkeypatch.setattr("projections.snapshots.SNAPSHOT_DECISIONS", 20)
    lived = Office(seed + 3).work(120, 400)
    for source in sources(lived.driven):
        project(store, records(source))
    snapshot_all(store)
    return lived


def test_all_agents_and_sites_at_any_time(office: Office, store: Store, seed: int) -> None:
    chance = random.Random(seed)
    log = list(log_of(office.driven))
    for _ in range(8):
        at = T0 + round(chance.random() * 500 * SECOND)
        past, newest, left_out = everything_past(store.connection, at)
        expected = folded(list(merged([log], at)))
        assert left_out == 0
        assert newest == expected.at
        assert everything(past, at) == everything(expected, at)
    assert everything_past(store.connection, T0 - SECOND).past.agents == {}


def test_one_agent_after_any_of_its_decisions(office: Office, store: Store, seed: int) -> None:
    chance = random.Random(seed)
    for agent_id in sorted(office.driven.partition.agents):
        last = office.driven.agent(agent_id).row.seq
        for seq in {0, 1, 20, 40, last, *(chance.randrange(1, last) for _ in range(3))} & set(range(last + 1)):
            past, at, _ = agent_past(store.connection, agent_id, seq)
            log = list(merged([list(log_of(office.driven))], at))
            own = [one for one in log if one.decider == ("agent", agent_id) and one.decision.seq <= seq]
            if seq == 0:
                assert agent_id not in past.agents
                continue
            expected = folded([*own, *(one for one in log if one.decider.kind == "site")])
            assert past.agents[agent_id].row.seq == seq
            assert agent_then(past.agents[agent_id], at, past.sites) == agent_then(
                expected.agents[agent_id], at, expected.sites
            )
    assert agent_past(store.connection, "nobody").past.agents == {}


def test_an_agent_by_time_is_that_of_its_last_decision_then(office: Office, store: Store) -> None:
    at = T0 + 200 * SECOND
    log = list(merged([list(log_of(office.driven))], at))
    expected = folded(log)
    for agent_id in expected.agents:
        past = agent_past(store.connection, agent_id, at=at).past
        assert agent_then(past.agents[agent_id], at, past.sites) == agent_then(
            expected.agents[agent_id], at, expected.sites
        )


def test_what_the_projector_has_not_applied_yet_takes_its_effects_with_it(store: Store, seed: int) -> None:
    """The agents' partitions are further than the sites': grants without their cause are not shown."""
    office = Office(seed + 4).work(60, 200)
    for source in sources(office.driven):
        if source[0].topic == SITE_DECISIONS.name:
            project(store, records(source[: len(source) // 2]))
        else:
            project(store, records(source))
    past, _, left_out = everything_past(store.connection)
    assert left_out > 0
    site = past.sites["default"]
    running = {
        (agent.agent_id, row.trigger_id)
        for agent in past.agents.values()
        for row in agent.triggers.values()
        if row.claim_state in ("held", "granted")
    }
    assert running <= {tuple(claim.id) for claim in site.claims.values() if claim.granted}


# What it asks


def asked(connection: Connection, questions: Questions[PastThen]) -> tuple[PastThen, list[dict[str, Any]]]:
    """The past, and the parameters of every question that was asked for it."""
    parameters: list[dict[str, Any]] = []
    rows: Rows | None = None
    while not isinstance(step := advance(questions, rows), Concluded):
        parameters.append(step.parameters)
        rows = connection.execute(*step).fetchall()
    return step.result, parameters


def test_no_more_is_read_of_anybody_than_between_two_snapshots(office: Office, store: Store, seed: int) -> None:
    """However long ago the moment is, by number or by time."""
    chance = random.Random(seed)
    for agent_id in sorted(office.driven.partition.agents):
        last = office.driven.agent(agent_id).row.seq
        instants = [one.at for one in office.driven.decisions if one.agent_id == agent_id]
        for seq in (1, 19, 20, 21, last, chance.randrange(1, last)):
            for questions in (questions_of_agent(agent_id, seq), questions_of_agent(agent_id, at=instants[seq - 1])):
                then, parameters = asked(store.connection, questions)
                assert then.past.agents[agent_id].row.seq >= seq
                ranges = [
                    until - after
                    for one in parameters
                    if "until" in one
                    for after, until in zip(one["after"], one["until"], strict=True)
                    if until < SEQ_MAX
                ]
                assert all(length <= 20 for length in ranges)
                assert len(parameters) <= 4


def test_everything_takes_few_queries_however_many_there_are(office: Office, store: Store) -> None:
    statements: list[object] = []

    class Counting(Cursor[TupleRow]):
        def execute(self, query: Any, *arguments: Any, **options: Any) -> Any:
            statements.append(query)
            return super().execute(query, *arguments, **options)

    store.connection.cursor_factory = Counting
    try:
        past = everything_past(store.connection).past
    finally:
        store.connection.cursor_factory = Cursor
    assert len(past.agents) == 5 and past.sites
    assert len(statements) == 5, statements
