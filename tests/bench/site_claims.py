"""``python -m tests.bench.site_claims``: what a release costs a site at which 10,000 claims wait (CPU, one core).

The decider alone, without Kafka: a claim's end, the next grant, both answers. Bound: 1 ms at the 99th percentile.
"""

import sys
import time

from streams.rules import limits
from streams.rules.order import SECOND
from streams.rules.site.decide import decide
from streams.rules.site.state import Site
from streams.rules.site_messages import Claim, ClaimKey, Release, Sender

WAITING = 10_000
RELEASES = 2_000
MILLISECONDS_MAX = 1.0
START = 1_772_359_200 * SECOND
SENDER = Sender(decider="A", seq=1, index=0)


def crowded(folders: int) -> Site:
    """One site of ten workers with so many claims in so many folders, three segments deep."""
    site = Site("default")
    for number in range(WAITING + 10):
        at = START + number
        path = f"/home/{number % 97}/{number % folders}"
        claim = Claim(
            at=at,
            sender=SENDER,
            site="default",
            agent_id=f"A{number % 100}",
            trigger_id=f"t{number}",
            n=1,
            key=ClaimKey(available_at=at, created_at=at, id=f"t{number}"),
            accepted_at=at,
            worker=True,
            environment_id="e",
            path=path,
        )
        decide(site, claim, at, limits.Defaults(1, 10))
    return site


def measure(folders: int) -> list[float]:
    """Milliseconds of CPU of each release, sorted."""
    site = crowded(folders)
    taken = []
    for _ in range(RELEASES):
        claim = site.claims[site.by_key[site.granted[0]]]
        release = Release(
            at=START,
            sender=SENDER,
            site="default",
            agent_id=claim.agent_id,
            trigger_id=claim.trigger_id,
            n=claim.n,
            started=True,
        )
        before = time.process_time_ns()
        step = decide(site, release, START + SECOND, limits.Defaults(1, 10))
        taken.append((time.process_time_ns() - before) / 1e6)
        assert step.has_decision
    return sorted(taken)


def main() -> int:
    slowest = 0.0
    for folders in (5, 500, 5_000):
        taken = measure(folders)
        p99 = taken[int(len(taken) * 0.99)]
        slowest = max(slowest, p99)
        sys.stdout.write(
            f"{WAITING} waiting in {folders} folders: p50 {taken[len(taken) // 2]:.3f} ms, p99 {p99:.3f} ms\n"
        )
    return 0 if slowest <= MILLISECONDS_MAX else 1


if __name__ == "__main__":
    sys.exit(main())
