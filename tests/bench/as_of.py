"""How long it takes to see one agent with 100,000 decisions as it was after any of them, from the tables.

    python -m tests.bench.as_of [DECISIONS]

A PostgreSQL of its own holds the agent's decisions, those of its site, and the snapshots of both; two hundred triggers
wait. Milliseconds of the wall clock and of this process's processor, of thirty reads each: right after a snapshot,
half-way to the next one, and just before it, when the most decisions are to be folded; by number and by time.
"""

import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Final

from api.cli.embedded_postgres import EmbeddedPostgres
from projections.past import PastThen, agent_past, everything_past
from projections.snapshots import SNAPSHOT_DECISIONS
from projections.store import LogRecord, Store
from streams.audit.as_of import agent_then, everything
from streams.codec import Output
from streams.rules.events import read_decision
from tests.bench.audit_memory import decided
from tests.integration.projectors import project, snapshot_all

READS: Final = 30
BATCH: Final = 500
WAITING: Final = 200
AGENT: Final = "agent-0"


def records(outputs: Iterator[Output], instants: list[int]) -> Iterator[LogRecord]:
    """As the projector reads them; the instants of the agent's decisions are noted, by number."""
    offsets: dict[str, int] = {}
    for output in outputs:
        offset = offsets[output.topic] = offsets.get(output.topic, -1) + 1
        if output.key == AGENT.encode():
            instants.append(read_decision(output.value or b"").at)
        yield LogRecord(output.topic, 0, offset, output.key, output.value, (), 0)


def measure(name: str, read: Callable[[int], object], seqs: list[int]) -> None:
    walls, cpus = [], []
    for seq in seqs:
        wall, cpu = time.perf_counter(), time.process_time()
        read(seq)
        walls.append((time.perf_counter() - wall) * 1e3)
        cpus.append((time.process_time() - cpu) * 1e3)
    sys.stdout.write(
        f"{name}: {median(walls):.0f} ms at the median, {max(walls):.0f} ms at most, "
        f"of the processor {median(cpus):.0f} and {max(cpus):.0f} ms\n"
    )
    sys.stdout.flush()


def shown(then: PastThen) -> object:
    return agent_then(then.past.agents[AGENT], then.at, then.past.sites)


def main() -> None:
    decisions = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    chance = random.Random(1)
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        with EmbeddedPostgres(Path(directory) / "postgres", port=None) as postgres:
            store = Store(postgres.url, "berth")
            store.open()
            instants: list[int] = []
            rest = records(decided(decisions, agents=1, waiting=WAITING), instants)
            while batch := list(islice(rest, BATCH)):
                project(store, batch)
            snapshot_all(store)
            whole = len(instants) // SNAPSHOT_DECISIONS
            for folded in (0, SNAPSHOT_DECISIONS // 2, SNAPSHOT_DECISIONS - 1):
                seqs = [chance.randrange(1, whole) * SNAPSHOT_DECISIONS + folded for _ in range(READS)]
                connection = store.connection
                measure(f"{folded} to fold", lambda seq: shown(agent_past(connection, AGENT, seq)), seqs)  # noqa: B023
                measure(
                    f"{folded} to fold, by time",
                    lambda seq: shown(agent_past(connection, AGENT, at=instants[seq - 1])),  # noqa: B023
                    seqs,
                )
            everyone = [chance.randrange(1, len(instants)) for _ in range(10)]
            measure(
                "everything", lambda seq: everything(everything_past(store.connection, instants[seq]).past, 0), everyone
            )


if __name__ == "__main__":
    main()
