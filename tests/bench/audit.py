"""How fast the log is verified, and replayed under another policy, on one core.

    python -m tests.bench.audit

Two logs that the real deciders write first: agents with nothing but a limit, and an office with a site, folders, people
and gates. Rates are decisions per second of the processor's time, the best of five rounds, so that what else the
machine does counts less. A what-if makes two runs: its rate is that of the decisions in both.
"""

import sys
import time
from collections.abc import Callable

from streams import DECISIONS
from streams.audit.agreement import Agreement
from streams.audit.logged import Logged
from streams.audit.recompute import Recheck
from streams.audit.simulate import Change
from streams.audit.traffic import recorded
from streams.audit.verify import Verifier
from streams.audit.verify_sites import SiteVerifier
from streams.audit.what_if import what_if
from tests.audits import log_of
from tests.offices import Office

ROUNDS = 5


def verified(log: list[Logged], recheck: Recheck | None) -> int:
    agreement = Agreement()
    agents, sites = Verifier(None, agreement, recheck), SiteVerifier(None, agreement, recheck)
    for logged in log:
        verifier = agents if logged.topic == DECISIONS.name else sites
        violation = verifier.check(logged.value, logged.offset)
        assert violation is None, violation
    return len(log)


def replayed(log: list[Logged]) -> int:
    return what_if(recorded(log, 0, log[-1].decision.at), Change({"*": 3})).decisions


def rate(work: Callable[[], int]) -> float:
    """Decisions per second of processor time."""
    best = 0.0
    for _ in range(ROUNDS):
        begun = time.process_time()
        done = work()
        best = max(best, done / (time.process_time() - begun))
    return best


def main() -> None:
    for name, simple in (("limits only", True), ("office", False)):
        log = list(log_of(Office(1, simple, verified=False).work(1_500, 6_000).driven))
        rates = {
            "verify": rate(lambda log=log: verified(log, None)),  # type: ignore[misc]
            "verify, deciding again": rate(lambda log=log: verified(log, Recheck())),  # type: ignore[misc]
            "what-if": rate(lambda log=log: replayed(log)),  # type: ignore[misc]
        }
        shown = ", ".join(f"{what} {number:,.0f}/s" for what, number in rates.items())
        sys.stdout.write(f"{name} ({len(log):,} decisions): {shown}\n")


if __name__ == "__main__":
    main()
