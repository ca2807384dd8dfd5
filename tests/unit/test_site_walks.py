"""F1, E1: what holds up thousands of claims is worked off in bounded steps, through crashes, and binds at once."""

import json
from collections import Counter
from typing import Any

import pytest

from streams import CONTROLS, SIGNALS, codec
from streams.rules import limits, verdicts
from streams.rules.site.state import Site
from streams.rules.site_events import SiteCommand
from streams.rules.site_messages import Claim, ClaimKey, ConfigureSite, DeleteFolder, Gate, Release, Sender
from streams.sites import Sites
from tests.driving import T0, Driven

CLAIMS = 10_000
CAPACITY = 130
"""So many are granted: more than one step recalls."""
CAUSE = verdicts.RecordCause(topic="berth.claims", partition=0, offset=0)
CONTROL: dict[str, Any] = {"site": "default", "requested_by": "operator"}
CLOSED = Gate(id="k1", scope="organization", name="o1", enabled=False, **CONTROL)
OPENED = Gate(id="k2", scope="organization", name="o1", enabled=True, **CONTROL)
STEPS_MAX = CLAIMS // limits.STEP_PARKED_MAX + CAPACITY // limits.STEP_CHANGES_MAX + 2


NEW_OWNER_EVERY = 15
"""Steps. Loading ten thousand claims takes half a second."""


class Walked:
    """Sites over stored rows, as their partition drives them: any step may be the last before a crash."""

    def __init__(self, claims: int = CLAIMS, environment_id: str | None = None) -> None:
        self.rows: dict[bytes, bytes] = {}
        self.said: list[tuple[str, str]] = []
        """(kind, trigger) of every signal since the claims were made."""
        self.sites = self.restored()
        self.do(ConfigureSite(id="k0", capacity=CAPACITY, **CONTROL))
        for number in range(claims):
            self.sites.handle("default", claim(number, environment_id), CAUSE, "internal", T0)
        self.take()
        granted = [id for kind, id in self.said if kind == "granted"]
        assert granted == [f"t{number:05}" for number in range(CAPACITY)]
        self.said.clear()

    @property
    def site(self) -> Site:
        return self.sites.sites["default"]

    def restored(self) -> Sites:
        sites = Sites(limits.Defaults(1), partitions=1)
        for key, value in self.rows.items():
            sites.load_row(codec.read_key(key), value)
        sites.loaded()
        return sites

    def do(self, command: SiteCommand) -> int:
        """Handle it; how many signals that gave. What is left over stays so."""
        self.sites.handle("default", command, CAUSE, "internal", T0)
        return self.take()

    def take(self) -> int:
        outputs, rows = self.sites.take()
        for key, value in rows.items():
            if value is None:
                del self.rows[key]
            else:
                self.rows[key] = value
        signals = [json.loads(output.value or b"") for output in outputs if output.topic == SIGNALS.name]
        self.said += [(signal["type"], signal["trigger_id"]) for signal in signals]
        return len(signals)

    def work_off(self, steps_max: int = STEPS_MAX + 1, crashes: bool = False) -> int:
        """Up to so many steps of what is left over, with a new owner now and then; how many there were."""
        steps = 0
        while self.sites.has_work and steps < steps_max:
            if crashes and steps % NEW_OWNER_EVERY == 1:
                self.sites = self.restored()
            self.sites.work_off(T0)
            assert self.take() <= limits.STEP_CHANGES_MAX
            steps += 1
        return steps


def claim(number: int, environment_id: str | None) -> Claim:
    return Claim(
        at=T0,
        sender=Sender(decider="A", seq=1, index=0),
        site="default",
        agent_id="A",
        trigger_id=f"t{number:05}",
        n=number + 1,
        key=ClaimKey(available_at=T0, created_at=T0 + number, id=f"t{number:05}"),
        accepted_at=T0,
        worker=True,
        environment_id=environment_id,
        path=None if environment_id is None else f"/a/{number}",
        organization_id="o1",
    )


def release(number: int) -> Release:
    return Release(
        at=T0,
        sender=Sender(decider="A", seq=2, index=0),
        site="default",
        agent_id="A",
        trigger_id=f"t{number:05}",
        n=number + 1,
        started=False,
    )


@pytest.mark.parametrize("crashes", [False, True], ids=["one owner", "new owners"])
def test_a_gate_before_ten_thousand_claims_is_worked_off_in_bounded_steps(crashes: bool) -> None:
    """F1: nobody is forgotten and nobody told twice, whoever goes on with it."""
    walked = Walked()
    assert walked.do(CLOSED) <= limits.STEP_CHANGES_MAX
    assert walked.sites.has_work
    steps = walked.work_off(crashes=crashes)
    assert CLAIMS // limits.STEP_PARKED_MAX - 1 <= steps <= STEPS_MAX
    assert sorted(walked.said) == [("recall", f"t{number:05}") for number in range(CAPACITY)], (
        "each that was granted is recalled once"
    )
    assert not walked.site.shown
    for number in range(CAPACITY):
        walked.do(release(number))
    assert Counter(kind for kind, _ in walked.said) == {"recall": CAPACITY}, "nothing is granted behind the gate"
    walked.said.clear()
    walked.do(OPENED)
    assert walked.work_off(crashes=crashes) <= STEPS_MAX
    assert walked.said == [("granted", f"t{number:05}") for number in range(CAPACITY, 2 * CAPACITY)]
    assert len(walked.site.shown) == CLAIMS - 2 * CAPACITY
    assert not walked.site.row.todo


@pytest.mark.parametrize("steps", [0, 20])
def test_a_closed_gate_binds_at_once_while_its_claims_are_still_worked_through(steps: int) -> None:
    """E1: what is given back in the meantime goes to nobody behind it."""
    walked = Walked()
    walked.do(CLOSED)
    walked.work_off(steps)
    assert walked.sites.has_work and walked.site.shown, "most of it is still to be parked"
    walked.said.clear()
    for number in range(10):
        walked.do(release(number))
        assert walked.site.pool_used == CAPACITY - number - 1
    assert {kind for kind, _ in walked.said} <= {"recall"}
    walked.work_off()
    assert "granted" not in {kind for kind, _ in walked.said}


def test_a_gate_that_changes_in_the_middle_of_its_walk_is_walked_anew() -> None:
    """F1: what was seen before the change is seen again, what was not is not left as it was."""
    walked = Walked()
    walked.do(CLOSED)
    walked.work_off(20)
    walked.do(OPENED)
    assert walked.work_off() <= STEPS_MAX
    assert len(walked.site.shown) == CLAIMS - CAPACITY
    walked.do(CLOSED.model_copy(update={"id": "k3"}))
    walked.work_off()
    assert not walked.site.shown


def test_a_deleted_folder_of_thousands_of_claims_is_worked_off_in_bounded_steps() -> None:
    """D5, F1: each that waits loses it once, each that was granted keeps it."""
    walked = Walked(2000, "e")
    walked.do(DeleteFolder(id="k1", environment_id="e", path="/a", **CONTROL))
    assert walked.work_off(2000, crashes=True) <= 2000 // limits.STEP_CHANGES_MAX + 1
    assert sorted(walked.said) == [("degraded", f"t{number:05}") for number in range(CAPACITY, 2000)]


@pytest.mark.parametrize("crashes", [False, True])
def test_the_pause_of_an_agent_takes_back_all_its_claims_in_bounded_steps(crashes: bool) -> None:
    """E1, F1: nobody is forgotten, and nobody asks again before it is over."""
    count = 2 * limits.STEP_CHANGES_MAX + 30
    driven = Driven("unlimited", pool=0)
    for number in range(count):
        driven.trigger(f"t{number}", worker=True)
    assert len(driven.site().claims) == count
    before = len(driven.decisions)
    pause = {"type": "pause", "v": 1, "id": "p", "agent_id": "A", "requested_by": "operator"}
    with driven.held():
        driven.send(CONTROLS.name, pause)
        driven.commit()
        assert driven.agent().row.todo is not None, "the first step can't do all of it"
        if crashes:
            driven.partition = driven.restored()
    driven.fire()
    steps = [[event.type for event in decision.events] for decision in driven.decisions[before:]]
    assert all(kinds.count("returned") <= limits.STEP_CHANGES_MAX for kinds in steps)
    assert Counter(kind for kinds in steps for kind in kinds) == {"agent_paused": 1, "returned": count}
    assert not driven.site().claims and len(driven.waiting()) == count
    driven.check()
    driven.control("resume")
    assert len(driven.site().claims) == count, "all of them ask again"
