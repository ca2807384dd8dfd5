"""How much memory verifying a long log takes, and whether it grows with anything but what is alive.

    python -m tests.bench.audit_memory [DECISIONS] [--recompute]

A process of its own decides (real deciders, simulated time: a trigger every ten seconds, for months), so that nothing
but the verifying is measured. Agents keep a limit and a queue, and every second trigger needs a worker or a folder of a
site; ids are forgotten after their seven days, so that what is alive stays as much as it is.
"""

import resource
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import IO, Any, Final

from streams import DECISIONS, SITE_DECISIONS, STATUSES
from streams.audit.agreement import Agreement
from streams.audit.recompute import Recheck
from streams.audit.verify import Verifier
from streams.audit.verify_sites import SiteVerifier
from streams.codec import Output
from tests.driving import Driven

AGENTS: Final = 8
RUNNING_MAX: Final = 12
STEP_SECONDS: Final = 10
LATER: Final = "2099-01-01T00:00:00Z"
SHOWN_EVERY: Final = 100_000


class Deciding(Driven):
    """A partition whose decisions are not looked at while they are made."""

    def _take_decision(self, output: Output, value: bytes) -> None:
        """Only written."""

    def _take_site_decision(self, output: Output, value: bytes) -> None:
        """Only written."""


def decided(decisions: int, agents: int = AGENTS, waiting: int = 0) -> Iterator[Output]:
    """So many decisions of agents and a site, and a few more; only what is alive is kept.

    ``waiting``: so many triggers of the first agent wait from the beginning to the end.
    """
    driven = Deciding(default_limit=3, pool=6, verified=False)
    for number in range(waiting):
        driven.trigger(f"later-{number}", "agent-0", available_at=LATER)
    running: deque[dict[str, Any]] = deque()
    count = written = 0
    while written < decisions:
        driven.trigger(f"t{count}", f"agent-{count % agents}", **_needs(count))
        count += 1
        driven.advance(STEP_SECONDS)
        if len(running) >= RUNNING_MAX:
            done = running.popleft()
            names = ("agent_id", "conversation_id", "execution_id")
            about = {name: done[name] for name in names}
            driven.send(STATUSES.name, {"type": "status", "v": 1, "status": "finished", **about})
        running.extend(one for one in driven.dispatches if one["type"] == "dispatch")
        for output in driven.outputs:
            if output.topic in (DECISIONS.name, SITE_DECISIONS.name):
                written += 1
                yield output
        for kept in (driven.outputs, driven.dispatches, driven.texts, driven.input, driven.journal, driven.messages):
            kept.clear()


def _needs(number: int) -> dict[str, object]:
    match number % 4:
        case 1:
            return {"worker": True}
        case 3:
            return {"environment_id": "e", "folder": f"/f{number % 5}"}
        case _:
            return {}


def write(decisions: int, to: IO[bytes]) -> None:
    """A line for each decision: which log it is of, and its bytes."""
    to.writelines(
        (b"a" if output.topic == DECISIONS.name else b"s") + (output.value or b"") + b"\n"
        for output in decided(decisions)
    )


def verify(log: IO[bytes], recompute: bool) -> None:
    agreement, recheck = Agreement(), Recheck() if recompute else None
    agents, sites = Verifier(None, agreement, recheck), SiteVerifier(None, agreement, recheck)
    for count, line in enumerate(log, start=1):
        verifier = agents if line[:1] == b"a" else sites
        violation = verifier.check(line[1:-1], count)
        assert violation is None, violation
        if count % SHOWN_EVERY == 0:
            ids = sum(len(agent.remembered) for agent in agents.agents())
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            rate = count / time.process_time()
            sys.stdout.write(f"{count:,} decisions: {peak:.0f} MB at most, {ids:,} ids remembered, {rate:,.0f}/s\n")
            sys.stdout.flush()


def main() -> None:
    numbers = [int(argument) for argument in sys.argv[1:] if argument.isdecimal()]
    decisions = numbers[0] if numbers else 1_000_000
    if "--write" in sys.argv:
        write(decisions, sys.stdout.buffer)
        return
    generator = [sys.executable, "-m", "tests.bench.audit_memory", str(decisions), "--write"]
    with subprocess.Popen(generator, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        verify(process.stdout, "--recompute" in sys.argv)


if __name__ == "__main__":
    main()
