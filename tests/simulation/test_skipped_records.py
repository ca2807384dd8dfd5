"""What ``berth skip`` leaves behind when it gives up a word between deciders, and what then helps (docs/operate.md).

Nothing may fail for it, and nothing may wait for ever that the described remedy doesn't free. Each word is skipped
once, where it comes first, in a small cluster on which agent and site have different partitions.
"""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from streams import CLAIMS, DEAD_LETTERS, DECISIONS, SIGNALS, SITE_DECISIONS
from streams.audit.agreement import Agreement
from streams.audit.verify import Verifier
from streams.audit.verify_sites import SiteVerifier
from streams.rules.agent.rows import TriggerRow
from streams.rules.agent.state import Agent
from streams.rules.limits import CLAIM_RESERVED_SECONDS, Defaults
from streams.rules.order import SECOND
from streams.rules.site.rows import ClaimId
from streams.rules.site.state import Site
from tests.simulation.cluster import Cluster

PARTITIONS = 3
AGENTS = MINE, OTHER, THIRD = "A2", "A3", "A1"
"""On partitions 0, 1 and 0; the site default is on partition 1, far on 2."""
POOL = {"worker": True}
FOLDER = {"environment_id": "e1", "folder": "/a"}
ASK = {"interactive": True, "kind": "chat", "on_busy": "ask"}


class Office:
    """A cluster without faults; ``skips``: the type of the word that is given up the first time it is next."""

    def __init__(self, skips: str | None = None) -> None:
        self.cluster = Cluster(random.Random(1), partitions=PARTITIONS, defaults=Defaults(1, pool_capacity=1))
        self.skips = skips
        self.away: int | None = None
        """A partition that nobody owns for a while."""
        for number in range(PARTITIONS):
            self.cluster.work(number, 0)

    def settle(self) -> None:
        """Everything is handled that can be without more time."""
        while True:
            moved = False
            for number in range(self.cluster.partitions):
                if number == self.away:
                    continue
                while self._is_busy(number):
                    if not self._skip(number):
                        self.cluster.work(number, 1)
                    moved = True
                self.cluster.take_dispatches(number)
            if not moved:
                return

    def _is_busy(self, number: int) -> bool:
        owner = self.cluster.owner(number)
        deadline = owner.partition.next_deadline_us()
        return bool(self.cluster.backlog(number, owner)) or (deadline is not None and deadline <= self.cluster.now)

    def _skip(self, number: int) -> bool:
        for topic in (CLAIMS.name, SIGNALS.name):
            offset = self.cluster.positions[number].get(topic, 0)
            records = self.cluster.log[topic, number][offset:]
            if records and json.loads(records[0].value or b"")["type"] == self.skips:
                self.cluster.skip(number, topic)
                self.skips = None
                return True
        return False

    def advance(self, seconds: int) -> None:
        for _ in range(seconds):
            self.cluster.now += SECOND
            self.settle()

    # What people do

    def trigger(self, agent_id: str, **fields: Any) -> str:
        id = self.cluster.trigger(agent_id, **fields)
        self.settle()
        return id

    def control(self, agent_id: str, kind: str, **fields: Any) -> None:
        self.cluster.control(agent_id, kind, **fields)
        self.settle()

    def site_control(self, kind: str, **fields: Any) -> None:
        self.cluster.site_control("default", kind, **fields)
        self.settle()

    def stop(self, agent_id: str, trigger_id: str) -> None:
        self.cluster.stop(agent_id, trigger_id=trigger_id)
        self.settle()

    def report(self, trigger_id: str, status: str) -> None:
        [execution] = [id for id, one in self.cluster.attempts.items() if one.dispatch["trigger_id"] == trigger_id]
        self.cluster.report(execution, status)
        self.settle()

    # What came of it

    def agent(self, agent_id: str) -> Agent:
        found = [self.cluster.owner(number).partition.agents.get(agent_id) for number in range(PARTITIONS)]
        return next(agent for agent in found if agent is not None)

    def row(self, agent_id: str, trigger_id: str) -> TriggerRow:
        return self.agent(agent_id).triggers[trigger_id]

    def site(self) -> Site:
        found = [self.cluster.owner(number).partition.sites.get("default") for number in range(PARTITIONS)]
        return next(site for site in found if site is not None)

    def running(self) -> list[str]:
        return sorted(attempt.dispatch["trigger_id"] for attempt in self.cluster.attempts.values())

    def check(self) -> None:
        """The word was skipped, the log is as the rules would have it, and the rows are the fold of it."""
        assert self.skips is None, "nothing was skipped"
        skipped = [record for number in range(PARTITIONS) for record in self.cluster.log[DEAD_LETTERS.name, number]]
        assert [dict(record.headers)["reason"] for record in skipped] == [b"skipped"]
        agreement = Agreement()
        for number in range(PARTITIONS):
            agreement.partition = number
            verifiers: dict[str, Verifier | SiteVerifier] = {
                DECISIONS.name: Verifier(agreement=agreement),
                SITE_DECISIONS.name: SiteVerifier(agreement=agreement),
            }
            for topic, verifier in verifiers.items():
                for record in self.cluster.log[topic, number]:
                    violation = verifier.check(record.value or b"", record.offset)
                    assert violation is None, violation
        assert agreement.finish() is None

    def ends(self) -> None:
        """Everything that is left runs to its end, one after the other, and leaves nothing at the site."""
        for _ in range(10):
            for id in self.running():
                self.report(id, "finished")
            self.advance(1)
        for agent_id in AGENTS:
            if any(agent_id in self.cluster.owner(number).partition.agents for number in range(PARTITIONS)):
                assert not self.agent(agent_id).triggers
                assert not self.agent(agent_id).mute
                assert not self.agent(agent_id).watches
        assert not self.site().claims
        self.check()


def reschedule(office: Office, id: str) -> None:
    office.control(MINE, "reschedule", trigger_id=id, available_at=office.cluster.at(0))


def pause_and_resume(office: Office, id: str) -> None:
    office.control(MINE, "pause")
    office.control(MINE, "resume")


def stop_and_restart(office: Office, id: str) -> None:
    needs = {"worker": True} if office.row(MINE, id).worker else FOLDER
    office.stop(MINE, id)
    office.trigger(MINE, restarts=id, **needs)


REMEDIES = (reschedule, pause_and_resume, stop_and_restart)
Remedy = Callable[[Office, str], None]


@pytest.mark.parametrize("needs", [POOL, FOLDER], ids=["worker", "folder"])
@pytest.mark.parametrize("word", ["claim", "granted"])
@pytest.mark.parametrize("remedy", REMEDIES)
def test_a_claim_whose_answer_was_given_up_is_made_anew(needs: dict[str, Any], word: str, remedy: Remedy) -> None:
    """Until then its agent asks the site for nothing more, and what needs no site goes on."""
    office = Office(word)
    first = office.trigger(MINE, **needs)
    assert office.row(MINE, first).claim_state == "asking"
    office.advance(CLAIM_RESERVED_SECONDS + 1)
    second = office.trigger(MINE, **needs)
    plain = office.trigger(MINE)
    assert office.running() == [plain]
    office.report(plain, "finished")
    assert office.agent(MINE).mute == {"default": 1}
    remedy(office, first)
    assert len(office.running()) == 1, "the site is asked again, for the oldest of what waits now"
    assert second in office.agent(MINE).triggers
    office.ends()


@pytest.mark.parametrize("helps", [False, True])
def test_a_waiting_that_was_given_up_ends_with_the_grant(helps: bool) -> None:
    """The site keeps the claim in its order; a remedy only lets its agent ask for others before."""
    office = Office("waiting")
    busy = office.trigger(OTHER, **POOL)
    first = office.trigger(MINE, **POOL)
    office.advance(CLAIM_RESERVED_SECONDS + 1)
    assert office.agent(MINE).mute == {"default": 1}
    if helps:
        pause_and_resume(office, first)
        assert office.row(MINE, first).claim_state == "standing"
        assert not office.agent(MINE).mute
    office.report(busy, "finished")
    assert office.running() == [first]
    office.ends()


@pytest.mark.parametrize("word", ["claim", "granted", "denied"])
def test_an_ask_whose_answer_was_given_up_is_refused_in_time_and_leaves_nothing(word: str) -> None:
    """B5: its claim is withdrawn then, whatever became of it."""
    office = Office(word)
    if word == "denied":
        office.trigger(OTHER, **POOL)
    first = office.trigger(MINE, decide_before=office.cluster.at(4), **POOL, **ASK)
    assert office.row(MINE, first).claim_state == "asking"
    office.advance(5)
    assert office.agent(MINE).remembered["trigger", first].state == "refused"
    office.trigger(MINE, **POOL)
    office.ends()


def hold(office: Office, first: str, busy: str) -> str:
    """Its claim is granted while the only slot is kept for an older trigger, whose site says nothing; that trigger."""
    office.away = 2
    older = office.trigger(MINE, site="far", worker=True, created_at=office.cluster.at(-10))
    office.report(busy, "finished")
    assert office.row(MINE, first).claim_state == "held"
    return older


@pytest.mark.parametrize("needs", [POOL, FOLDER], ids=["worker", "folder"])
@pytest.mark.parametrize("state", ["attempt", "held", "standing"])
def test_the_next_claim_of_a_trigger_ends_the_one_whose_release_was_given_up(needs: dict[str, Any], state: str) -> None:
    """Z1: a higher number. The old one's budget is spent if it was granted: an attempt may have run on it."""
    office = Office("release" if state == "attempt" else None)
    office.site_control("gate", scope="organization", name="o1", run_budget=5)
    busy = office.trigger(OTHER, **needs) if state != "attempt" else ""
    first = office.trigger(MINE, organization_id="o1", max_attempts=2, **needs)
    older = hold(office, first, busy) if state == "held" else ""
    if state == "attempt":
        office.report(first, "failed")
    else:
        office.skips = "release"
        office.control(MINE, "pause")
    id = ClaimId(MINE, first)
    assert office.site().claims[id].granted == (state != "standing"), "nobody has told the site"
    next_one = office.trigger(THIRD, **needs)
    assert next_one not in office.running()
    if state == "attempt":
        office.advance(6)
        assert office.running() == [next_one], "it is older, and was let in when the old claim ended"
        office.report(next_one, "finished")
    else:
        office.away = None
        office.control(MINE, "resume")
    if state == "held":
        office.stop(MINE, older)
    if state == "standing":
        office.report(busy, "finished")
    assert first in office.running()
    assert office.site().claims[id].n > 1
    assert office.site().gates["organization", "o1"].run_budget == (4 if state == "standing" else 3)
    office.ends()


def test_a_worker_whose_release_was_given_up_for_good_is_made_up_for_by_a_larger_pool() -> None:
    """Its trigger has ended and makes no other claim."""
    office = Office("release")
    first = office.trigger(MINE, **POOL)
    office.report(first, "finished")
    other = office.trigger(OTHER, **POOL)
    office.advance(100)
    assert office.running() == []
    office.site_control("configure_site", capacity=2)
    assert office.running() == [other]
    office.report(other, "finished")
    assert list(office.site().claims) == [ClaimId(MINE, first)]
    office.check()


def test_a_folder_whose_release_was_given_up_for_good_is_free_under_another_environment() -> None:
    """Its trigger has ended and makes no other claim; what waits for the folder is stopped, and sent anew."""
    office = Office("release")
    office.report(office.trigger(MINE, **FOLDER), "finished")
    stuck = office.trigger(OTHER, **FOLDER)
    office.stop(OTHER, stuck)
    again = office.trigger(OTHER, restarts=stuck, environment_id="e1-again", folder="/a")
    assert office.running() == [again]
    office.check()


def test_a_recall_that_was_given_up_lets_one_attempt_start_behind_the_gate() -> None:
    """E1: what was granted and not started would have gone back; it ends like any other."""
    office = Office()
    busy = office.trigger(OTHER, **POOL)
    first = office.trigger(MINE, organization_id="o1", **POOL)
    older = hold(office, first, busy)
    office.skips = "recall"
    office.site_control("gate", scope="organization", name="o1", enabled=False)
    office.away = None
    office.settle()
    assert office.running() == [first]
    office.stop(MINE, older)
    office.ends()


def test_a_lost_folder_that_nobody_heard_of_is_run_in_until_it_is_stopped() -> None:
    """D5: the runner is sent to the deleted folder, which the site keeps for nobody any more."""
    office = Office("degraded")
    busy = office.trigger(OTHER, **FOLDER)
    first = office.trigger(MINE, **FOLDER)
    office.site_control("delete_folder", environment_id="e1", path="/a")
    assert office.running() == [first, busy] or office.running() == [busy, first]
    assert not office.row(MINE, first).degraded
    office.stop(MINE, first)
    office.advance(1)
    again = office.trigger(MINE, restarts=first, **FOLDER)
    assert again not in office.running()
    office.report(busy, "finished")
    assert again in office.running()
    office.ends()


@pytest.mark.parametrize("word", ["watch", "resolved"])
def test_a_trigger_that_was_never_told_of_its_dependency_is_stopped_and_restarted(word: str) -> None:
    """E2: approving doesn't help, as nothing failed."""
    office = Office("watch" if word == "watch" else None)
    on = {"depends_on": [{"agent_id": OTHER, "conversation_id": "c"}]}
    before = office.trigger(OTHER, conversation_id="c")
    first = office.trigger(MINE, **on)
    if word == "resolved":
        office.skips = "resolved"
    office.report(before, "finished")
    office.advance(100)
    office.control(MINE, "approve", trigger_id=first)
    assert office.row(MINE, first).outcomes == (None,)
    office.stop(MINE, first)
    again = office.trigger(MINE, restarts=first, **on)
    assert office.running() == [again]
    office.report(again, "finished")
    assert not office.agent(OTHER).watches
    office.check()


def test_an_unwatch_that_was_given_up_leaves_a_row_until_the_conversation_finishes() -> None:
    """E2: its trigger is gone, and what it is told then is ignored."""
    office = Office("unwatch")
    before = office.trigger(OTHER, conversation_id="c")
    first = office.trigger(MINE, depends_on=[{"agent_id": OTHER, "conversation_id": "c"}])
    office.stop(MINE, first)
    assert list(office.agent(OTHER).watches) == ["c"]
    office.report(before, "finished")
    assert not office.agent(OTHER).watches
    office.check()
