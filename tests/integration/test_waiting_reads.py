"""Why triggers wait, and what sites hold, read from a real PostgreSQL by the queries of the API."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest
from psycopg import AsyncConnection, AsyncCursor
from psycopg.rows import DictRow, dict_row

from api.http import views
from api.http.database import Reading
from api.http.waiting import causes
from api.http.waiting_facts import read_facts
from projections.store import LogRecord, Store
from streams.audit import causes as computed
from streams.audit.causes import Cause
from streams.audit.logged import read
from streams.audit.past import Past
from streams.rules import limits
from streams.rules.agent.rows import TriggerRow
from streams.rules.agent.state import Agent
from streams.rules.order import SECOND
from streams.rules.site.rows import ClaimId
from tests.driving import T0, Driven
from tests.histories import History
from tests.integration.projectors import project
from tests.projected import READERS

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
FIRST: Final[dict[str, Any]] = {
    "after_available_at": "-infinity",
    "after_created_at": "-infinity",
    "after_trigger_id": "",
    "after_agent_id": "",
}
OF_SITES: Final = {
    *("site_unknown", "site_paused", "organization_disabled", "department_disabled"),
    *("agent_environment_folder_busy", "site_workers_busy"),
}


def moment(instant: int) -> datetime:
    return EPOCH + timedelta(microseconds=instant)


class Counting(AsyncCursor[DictRow]):
    """A cursor that counts statements."""

    statements = 0

    async def execute(self, *arguments: Any, **options: Any) -> Any:
        Counting.statements += 1
        return await super().execute(*arguments, **options)


@asynccontextmanager
async def reading(url: str) -> AsyncIterator[Reading]:
    """The API's queries, on a connection of our own."""
    options = "-c search_path=berth -c timezone=UTC"
    async with await AsyncConnection.connect(
        url, autocommit=True, row_factory=dict_row, options=options, cursor_factory=Counting
    ) as connection:
        yield Reading(connection)


async def queue(source: Reading, agent_id: str, now: int, max_rows: int = 1000) -> dict[str, list[Cause]]:
    """The causes of every trigger in the agent's queue, in its order."""
    agent = await source.row("agent", agent_id=agent_id)
    if agent is None:
        return {}
    rows = await source.rows("queue_page", agent_id=agent_id, max_rows=max_rows, **FIRST)
    facts = await read_facts(source, agent, rows)
    found = {}
    for position, row in enumerate(rows, start=1):
        found[row["trigger_id"]] = causes(facts, row, moment(now))
        listed = views.queued(facts, row, position, moment(now))
        assert listed["reasons"] == [cause.reason for cause in found[row["trigger_id"]]]
    return found


def projected(store: Store, driven: Driven) -> None:
    """Apply what it has written since the last time."""
    rows = store.connection.execute("SELECT topic, next_offset FROM checkpoints").fetchall()
    offsets: dict[str, int] = dict(rows)
    records = [
        LogRecord(output.topic, 0, offset, output.key, output.value, (), T0)
        for offset, output in enumerate(driven.outputs)
        if output.topic in READERS and offset >= offsets.get(output.topic, 0)
    ]
    project(store, records)


# Random histories


@pytest.mark.parametrize("number", range(3))
async def test_whoever_waits_when_all_is_told_has_a_cause_and_it_is_that_of_the_rules(
    store: Store, database: str, seed: int, number: int
) -> None:
    """The first history is the same in every run: it has many causes."""
    history = History(seed * 3 + number if number else 0, partitions=2)
    seen: set[str] = set()
    async with reading(database) as source:
        for _ in range(6):
            history.live(50).settle()
            project(store, history.records())
            for agent_id in history.agents:
                agent = history.agent(agent_id)
                now = history._of(agent_id).now
                found = await queue(source, agent_id, now)
                assert list(found) == [key.id.decode() for key in (agent or Agent(agent_id)).waiting]
                for trigger_id, waits_for in found.items():
                    assert agent is not None
                    check(history, agent, agent.triggers[trigger_id], waits_for, now)
                    seen |= {cause.reason for cause in waits_for}
    if not number:
        assert len(seen) >= 6, seen


def check(history: History, agent: Agent, row: TriggerRow, found: list[Cause], now: int) -> None:
    """The causes against the state of the deciders."""
    reasons = [cause.reason for cause in found]
    assert reasons, f"{row} waits, and nothing is said of why"
    assert all(cause.since is not None and cause.released_by for cause in found)
    head = agent.head(row.conversation_id)
    assert ("conversation_busy" in reasons) == (head is not None and head is not row)
    assert ("agent_paused" in reasons) == agent.row.paused
    assert ("not_yet_available" in reasons) == (row.available_at > now)
    if row.place is None:
        assert ("approval_required" in reasons) == (row.approval_required and not row.approved)
        assert any(reason.startswith("dependency_") for reason in reasons) == any(
            outcome != "finished" and not (row.failures_approved and outcome in ("failed", "stopped"))
            for outcome in row.outcomes
        )
    if row.claim_state is None:
        assert ("agent_parallelism_limit_reached" in reasons) == (not agent.room_for(row.key))
        spent = [cause for cause in found if cause.reason == "run_budget_used_up" and cause.site is None]
        assert bool(spent) == (not agent.budget_left)
    if row.claim_state == "standing" and not row.mute:
        site = history.site(row.site_id or "")
        assert site is not None
        claim = site.claims[ClaimId(agent.agent_id, row.trigger_id)]
        of_site = [cause for cause in found if cause.reason in OF_SITES or cause.scope is not None]
        assert of_site[0].reason == site.why_waiting(claim)
        holders, count = site.holders(claim, site.why_waiting(claim))
        told = [str(holder.trigger_id) for holder in of_site[0].holders if holder.state != "waiting"]
        assert sorted(told) == sorted(holders) and of_site[0].holders_count >= count


def told(cause: Cause) -> dict[str, Any]:
    """What both faces know of a cause. A fold keeps few instants, forgets who has ended, and looks for no cycles."""
    content = asdict(cause)
    del content["since"]
    if cause.reason == "dependency_unfinished":
        del content["released_by"]
    return content | {"holders": [(holder.who, holder.state, holder.execution_id) for holder in cause.holders]}


def check_known(of_fold: Cause, of_rows: Cause) -> int:
    """Where the fold knows since when, and the conversation, the rows say the same; how many instants it knows."""
    pairs = list(zip(of_fold.holders, of_rows.holders, strict=True))
    instants = [(of_fold.since, of_rows.since), *((one.since, other.since) for one, other in pairs)]
    assert all(folded in (None, stored) for folded, stored in instants), (of_fold, of_rows)
    assert all(one.conversation_id in (None, other.conversation_id) for one, other in pairs), (of_fold, of_rows)
    return sum(folded is not None for folded, _ in instants)


@pytest.mark.parametrize("number", range(2))
async def test_a_fold_of_the_decisions_tells_the_same_causes_and_holders_as_the_rows(
    store: Store, database: str, seed: int, number: int
) -> None:
    """After everything that happens, also while agents and sites have not heard of each other yet."""
    history, past = History(seed * 2 + number, partitions=2), Past()
    reasons, instants = Counter[str](), 0
    async with reading(database) as source:
        for _ in range(150):
            history.happen(history.random.choice(history.agents))
            records = history.records()
            if records:
                project(store, records)
            for record in records:
                if record.topic in READERS:
                    past.fold(read(record.topic, record.partition, record.offset, record.value))
            now = max(driven.now for driven in history.driven.values())
            for agent in past.agents.values():
                if not agent.waiting:
                    continue
                stored, facts = await queue(source, agent.agent_id, now), past.facts(agent)
                assert list(stored) == [key.id.decode() for key in agent.waiting]
                for trigger_id, of_rows in stored.items():
                    of_fold = computed.causes(facts, agent.triggers[trigger_id], now)
                    assert list(map(told, of_fold)) == list(map(told, of_rows)), (agent.agent_id, trigger_id)
                    instants += sum(map(check_known, of_fold, of_rows))
                    reasons.update(cause.reason for cause in of_rows)
    assert len(reasons) >= 6 and instants > 0, reasons


async def test_a_page_of_any_length_takes_the_same_number_of_queries(store: Store, database: str) -> None:
    driven = Driven(default_limit=1, pool=1)
    driven.trigger("holder", "B", worker=True, environment_id="e", folder="/")
    for number in range(40):
        driven.trigger(
            f"t{number:02}", worker=True, environment_id="e", folder=f"/a/{number}", organization_id=f"o{number}",
            depends_on=[{"agent_id": "C", "conversation_id": f"c{number}"}] if number % 2 else [],
        )  # fmt: skip
    projected(store, driven)
    taken = []
    async with reading(database) as source:
        for max_rows in (2, 40):
            Counting.statements = 0
            found = await queue(source, "A", driven.now, max_rows)
            assert len(found) == max_rows
            taken.append(Counting.statements)
    assert taken[0] == taken[1] <= 14


# By hand


async def test_holders_of_folders_and_workers_are_told_by_id_with_their_times(store: Store, database: str) -> None:
    driven = Driven(default_limit=5, pool=1)
    driven.trigger("f", "B", conversation_id="b", worker=True, environment_id="e", folder="/a/b")
    driven.skip(3)
    driven.trigger("t", environment_id="e", folder="/a/b/c", worker=True)
    driven.trigger("apart", environment_id="e", folder="/a/bc")
    driven.skip(4)
    driven.site_control("gate", scope="organization", name="o", enabled=False)
    driven.trigger("gated", worker=True, organization_id="o")
    projected(store, driven)
    async with reading(database) as source:
        found = await queue(source, "A", driven.now)
        assert list(found) == ["t", "gated"]
        folder, workers = found["t"]
        assert (folder.reason, workers.reason) == ("agent_environment_folder_busy", "site_workers_busy")
        for cause in (folder, workers):
            (holder,) = cause.holders
            assert (holder.agent_id, holder.trigger_id, holder.conversation_id) == ("B", "f", "b")
            assert holder.execution_id == driven.dispatch("f", "B")["execution_id"]
            assert (holder.state, holder.since) == ("running", (T0))
            assert (cause.since, cause.holders_count) == ((T0 + 3 * SECOND), 1)
        gated, full = found["gated"]
        assert (gated.reason, gated.scope, gated.name, gated.since) == (
            *("organization_disabled", "organization", "o"),
            T0 + 7 * SECOND,
        )
        assert full.reason == "site_workers_busy"
        site = await source.row("site", site="default")
        assert site is not None
        assert (site["capacity"], site["waiting"], site["granted"], site["workers"]) == (1, 2, 2, 1)
        waiting = await source.rows("site_waiting_page", site="default", max_rows=10, **FIRST)
        assert [(row["trigger_id"], row["path"], row["worker"]) for row in waiting] == [
            ("t", "/a/b/c", True),
            ("gated", None, True),
        ]
        after = {name: waiting[0][name.removeprefix("after_")] for name in FIRST}
        (second,) = await source.rows("site_waiting_page", site="default", max_rows=10, **after)
        assert second["trigger_id"] == "gated"
        begin = {"after_granted_at": "-infinity", "after_agent_id": "", "after_trigger_id": ""}
        granted = await source.rows("site_granted_page", site="default", max_rows=10, **begin)
        assert [(row["agent_id"], row["trigger_id"], row["path"], row["worker"]) for row in granted] == [
            ("B", "f", "/a/b", True),
            ("A", "apart", "/a/bc", False),
        ]


async def test_a_site_and_its_gates_are_drained_when_nothing_that_is_closed_is_left(
    store: Store, database: str
) -> None:
    driven = Driven(default_limit=5)
    driven.trigger("t", worker=True, organization_id="o", department_id="d")
    for scope, name in (("organization", "o"), ("department", "d"), ("department", "other")):
        driven.site_control("gate", scope=scope, name=name, enabled=False)
    driven.site_control("pause_site")

    async def drained() -> dict[str, bool]:
        projected(store, driven)
        async with reading(database) as source:
            gates = await source.rows("site_gates_page", site="default", after_scope="", after_name="", max_rows=9)
            one = await source.row("site_gate", site="default", scope="organization", gate_name="o")
            (site,) = await source.rows("sites_page", after_site="", visible=None, max_rows=9)
            assert one == next(row for row in gates if row["name"] == "o")
            return {row["name"]: row["drained"] for row in gates} | {"default": site["drained"]}

    assert await drained() == {"o": False, "d": False, "other": True, "default": False}
    driven.finish("t")
    assert await drained() == {"o": True, "d": True, "other": True, "default": True}
    driven.site_control("resume_site")
    driven.site_control("gate", scope="organization", name="o", enabled=True)
    assert await drained() == {"o": False, "d": True, "other": True, "default": False}


async def test_a_claim_that_blocks_younger_ones_is_told_to_them(store: Store, database: str) -> None:
    driven = Driven(default_limit="unlimited")
    driven.trigger("child0", "B", environment_id="e", folder="/a/0")
    driven.trigger("wide", environment_id="e", folder="/a", organization_id="o")
    driven.skip(1)
    for number in range(1, 1 + limits.CLAIM_PASSES_MAX):
        driven.trigger(f"child{number}", "B", environment_id="e", folder=f"/a/{number}")
    driven.skip(1)
    driven.trigger("late", "B", environment_id="e", folder="/a/late")
    projected(store, driven)
    async with reading(database) as source:
        (late,) = (await queue(source, "B", driven.now))["late"]
        assert (late.reason, late.holders_count) == ("agent_environment_folder_busy", 1)
        (blocker,) = late.holders
        assert (blocker.agent_id, blocker.trigger_id, blocker.state) == ("A", "wide", "waiting")
        (wide,) = (await queue(source, "A", driven.now))["wide"]
        assert wide.holders_count == len(wide.holders) == 1 + limits.CLAIM_PASSES_MAX
        driven.site_control("gate", scope="organization", name="o", enabled=False)
        driven.trigger("last", "B", environment_id="e", folder="/a/late")
        projected(store, driven)
        (last,) = (await queue(source, "B", driven.now))["last"]
        assert [holder.trigger_id for holder in last.holders] == ["late"], "who is behind a gate blocks nobody"


async def test_a_site_that_owes_an_answer_and_a_slot_reserved_meanwhile_are_told(store: Store, database: str) -> None:
    driven = Driven(delivers=False)
    driven.trigger("asks", worker=True)
    driven.skip(1)
    driven.trigger("behind")
    projected(store, driven)
    async with reading(database) as source:
        found = await queue(source, "A", driven.now)
        (asked,) = found["asks"]
        assert (asked.reason, asked.since) == ("site_asked", (T0))
        assert asked.until == (T0 + limits.CLAIM_RESERVED_SECONDS * SECOND)
        (full,) = found["behind"]
        assert (full.reason, full.since) == ("agent_parallelism_limit_reached", (T0 + SECOND))
        assert [(holder.trigger_id, holder.state) for holder in full.holders] == [("asks", "asking")]
        driven.advance(limits.CLAIM_RESERVED_SECONDS)
        driven.finish("behind")
        driven.trigger("also", worker=True)
        projected(store, driven)
        found = await queue(source, "A", driven.now)
        assert {id: [cause.reason for cause in told] for id, told in found.items()} == {
            "asks": ["site_not_answering"],
            "also": ["site_not_answering"],
        }
        assert [holder.trigger_id for holder in found["also"][0].holders] == ["asks"]


async def test_cycles_of_dependencies_are_told(store: Store, database: str) -> None:
    driven = Driven(default_limit=5)
    for agent_id, other in (("A", "B"), ("B", "C"), ("C", "A")):
        on = [{"agent_id": other, "conversation_id": "c"}]
        driven.trigger("t", agent_id, conversation_id="c", depends_on=on)
    driven.trigger("outside", depends_on=[{"agent_id": "A", "conversation_id": "c"}])
    projected(store, driven)
    async with reading(database) as source:
        for agent_id, trigger_id, is_in_cycle in (("A", "t", True), ("C", "t", True), ("A", "outside", False)):
            agent = await source.row("agent", agent_id=agent_id)
            row = await source.row("trigger", agent_id=agent_id, trigger_id=trigger_id)
            assert agent is not None and row is not None
            (cause,) = causes(await read_facts(source, agent, [row]), row, moment(driven.now))
            assert cause.reason == "dependency_unfinished" and len(cause.holders) == 1
            assert ("one another" in cause.released_by) is is_in_cycle


async def test_the_head_of_a_conversation_is_the_running_one_also_before_an_interrupt(
    store: Store, database: str
) -> None:
    driven = Driven(default_limit=5)
    driven.trigger("runs", conversation_id="c")
    driven.trigger("waits", conversation_id="c")
    driven.trigger("interrupt", conversation_id="c", interactive=True, on_busy="interrupt")
    projected(store, driven)
    async with reading(database) as source:
        found = await queue(source, "A", driven.now)
        assert {id: told[0].holders[0].trigger_id for id, told in found.items()} == {
            "waits": "runs",
            "interrupt": "runs",
        }
