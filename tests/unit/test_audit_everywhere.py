"""What the audits say is the same in every process: under any hash seed, in any time zone, in any year."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACES = (("0", "UTC", 0), ("1", "Asia/Kathmandu", 13), ("4242", "America/St_Johns", -20))
EVERY_AUDIT = """
import json, sys, time
shift = int(sys.argv[1])
now, now_ns = time.time, time.time_ns
time.time, time.time_ns = lambda: now() + shift, lambda: now_ns() + shift * 10**9
from streams.audit.agreement import Agreement
from streams.audit.as_of import as_json, everything
from streams.audit.estimate import History
from streams.audit.explain import explain
from streams.audit.recompute import Recheck
from streams.audit.simulate import Change
from streams.audit.traffic import recorded
from streams.audit.verify import Verifier
from streams.audit.verify_sites import SiteVerifier
from streams.audit.waiting import WaitingTimes
from streams.audit.what_if import what_if
from tests.audits import log_of
from tests.offices import Office
from tests.planted import OF_AGENTS, OF_SITES, of_agent, of_site

log = list(log_of(Office(7).work(60, 200).driven))
half, times = History(), WaitingTimes()
for place, logged in enumerate(log):
    times.take(logged)
    if place < len(log) // 2:
        half.take(logged)
times.finish()
asked = [one for one in log if one.decision.command.type == "trigger"]
agreement, recheck = Agreement(), Recheck()
agents, sites = Verifier(None, agreement, recheck), SiteVerifier(None, agreement, recheck)
violations = [
    (agents if one.decider.kind == "agent" else sites).check(one.value, one.offset) for one in log
]
planted = []
for plant, verifier in [
    *((of_agent(kind), Verifier) for kind in OF_AGENTS), *((of_site(kind), SiteVerifier) for kind in OF_SITES)
]:
    reading = verifier(plant.heads, None, Recheck())
    found = [one for at, value in enumerate(plant.values) if (one := reading.check(value, at)) is not None]
    planted.append(found[0] if found else reading.finish())
print(json.dumps(as_json({
    "as_of": everything(half.past, half.past.at),
    "estimates": half.estimates(half.past.at),
    "waited": [times.total(), times.by("agent"), times.by("organization"), times.by("site")],
    "explained": [explain(log, one.decider.id, one.decision.command.id) for one in asked[::12]],
    "what_if": what_if(recorded(log, 0, log[-1].decision.at), Change({"*": 3}, {"default": 5})),
    "verified": [violations, agents.overtakings, sites.overtakings, recheck.decisions, planted],
})))
"""


def test_every_audit_says_the_same_under_any_hash_seed_time_zone_and_year() -> None:
    said = []
    for hash_seed, zone, years in PLACES:
        done = subprocess.run(
            [sys.executable, "-c", EVERY_AUDIT, str(years * 31_557_600)],
            cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": hash_seed, "TZ": zone},
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        said.append(done.stdout)
    assert len(said[0]) > 10_000
    assert said[1:] == said[:1] * 2
