"""The indexed site decider against a plain one that scans every claim at each step: every answer, every state."""

import os
import random
from typing import Literal

import pytest

from streams.rules import limits
from streams.rules.order import SECOND
from streams.rules.site.decide import SiteControls, decide
from streams.rules.site.state import Site
from streams.rules.site_events import SiteCommand
from streams.rules.site_messages import (
    Claim,
    ClaimKey,
    ConfigureSite,
    ContinueSite,
    DeleteEnvironment,
    DeleteFolder,
    Gate,
    PauseSite,
    Release,
    ResumeSite,
    Sender,
)
from tests.driving import T0, Json
from tests.model.plain_site import PlainSite

PATHS = ("/", "/a", "/a/b", "/a/b/c", "/a/bc", "/d", "/d/e", "/d/e/f", None)
WIDE_AND_CHILDREN = ("/a", *(f"/a/{number}" for number in range(12)))
GATES: tuple[tuple[Literal["organization", "department"], str], ...] = (
    ("organization", "o1"), ("organization", "o2"), ("department", "d1"),
)  # fmt: skip
SENDER = Sender(decider="A", seq=1, index=0)


class BothSites:
    """One seed: what is asked of both at random, and the comparison after every command."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        capacity = self.chance.choice([0, 1, 2, 5])
        self.real = Site("default")
        self.defaults = limits.Defaults(1, capacity)
        self.plain = PlainSite(capacity)
        self.now = T0
        self.paths = self.chance.choice([PATHS, WIDE_AND_CHILDREN])
        self.count = 0
        self.passes = 0

    def send(self, command: SiteCommand) -> None:
        """To the real one, then all that it left over; both gave the same answers."""
        answers = []
        step = decide(self.real, command, self.now, self.defaults)
        answers += step.outputs
        while self.real.row.todo or self.real.row.todo_grant:
            step = decide(self.real, ContinueSite(), self.now, self.defaults)
            assert len(step.outputs) <= limits.STEP_CHANGES_MAX + 1
            answers += step.outputs
        expected, self.plain.answers = self.plain.answers, []
        assert [(one.type, one.agent_id, one.trigger_id, one.n) for one in answers] == expected, command
        self.compare()

    def compare(self) -> None:
        self.plain.same_as(self.real)
        self.passes = max([self.passes, *(claim.passed for claim in self.plain.claims)])

    def step(self) -> None:
        self.now += self.chance.choice([0, 1, SECOND])
        draw = self.chance.random()
        if draw < 0.5:
            self.claim()
        elif draw < 0.8:
            self.release()
        else:
            self.control()

    def claim(self) -> None:
        chance = self.chance
        self.count += 1
        time = self.now - chance.choice([0, 0, 1, 5, 100]) * SECOND
        environment = chance.choice(["e", "e", "e", "f", None])
        command = Claim(
            at=self.now,
            sender=SENDER,
            site="default",
            agent_id=chance.choice("ABC"),
            trigger_id=f"t{self.count}",
            n=self.count,
            key=ClaimKey(available_at=time, created_at=time, id=f"t{self.count}"),
            accepted_at=self.now - chance.choice([0, 10]) * SECOND,
            worker=environment is None or (self.paths is PATHS and chance.random() < 0.5),
            environment_id=environment,
            path=chance.choice(self.paths) if environment else None,
            organization_id=chance.choice(["o1", "o2", None]),
            department_id=chance.choice(["d1", None, None]),
            ask=chance.random() < 0.15,
        )
        self.plain.claim(command)
        self.send(command)

    def release(self) -> None:
        if not self.plain.claims:
            return
        granted = [claim for claim in self.plain.claims if claim.granted]
        claim = self.chance.choice(granted if granted and self.chance.random() < 0.8 else self.plain.claims)
        stale = self.chance.random() < 0.05
        command = Release(
            at=self.now,
            sender=SENDER,
            site="default",
            agent_id=claim.agent,
            trigger_id=claim.trigger,
            n=claim.n - stale,
            started=claim.granted and self.chance.random() < 0.7,
        )
        self.plain.release(command)
        self.send(command)

    def control(self) -> None:
        chance = self.chance
        self.count += 1
        about: Json = {"id": f"k{self.count}", "site": "default", "requested_by": "u"}
        match chance.choice(
            ["gate", "gate", "budget", "pause", "resume", "resume", "capacity", "folder", "environment"]
        ):
            case "gate":
                scope, name = chance.choice(GATES)
                self.told(Gate(**about, scope=scope, name=name, enabled=chance.random() < 0.7))
            case "budget":
                scope, name = chance.choice(GATES)
                self.told(Gate(**about, scope=scope, name=name, run_budget=chance.choice([0, 1, 4, None, None])))
            case "pause":
                self.told(PauseSite(**about))
            case "resume":
                self.told(ResumeSite(**about))
            case "capacity":
                self.told(ConfigureSite(**about, capacity=chance.choice([0, 1, 2, 5])))
            case "folder":
                self.told(DeleteFolder(**about, environment_id="e", path=chance.choice(["/a", "/a/b", "/d/e"])))
            case "environment":
                self.told(DeleteEnvironment(**about, environment_id=chance.choice(["e", "f"])))

    def told(self, control: SiteControls) -> None:
        self.plain.control(control, self.now)
        self.send(control)


@pytest.mark.parametrize("run", range(int(os.environ.get("BERTH_SITE_RUNS", "60"))))
def test_the_site_answers_as_a_plain_scan_of_its_claims_would(run: int, seed: int) -> None:
    """D1-D5, Z1-Z4, GRANT; BERTH_SITE_RUNS chooses how many."""
    number = seed * 100_000 + run
    print(f"run {number}")  # noqa: T201 - shown when it fails
    sites = BothSites(number)
    for _ in range(150):
        sites.step()


def test_claims_are_passed_as_often_as_they_may_in_some_run() -> None:
    """Otherwise the comparison would say nothing of it."""
    passes = 0
    for number in range(40):
        sites = BothSites(number)
        for _ in range(150):
            sites.step()
        passes = max(passes, sites.passes)
    assert passes == limits.CLAIM_PASSES_MAX
