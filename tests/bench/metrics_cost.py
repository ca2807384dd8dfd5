"""What metrics cost a worker: the same records decided with and without counting them, in turn, in one process.

The share is of deciding alone, without Kafka: of everything that a worker does it is less.

    python -m tests.bench.metrics_cost [--records 1024] [--rounds 60]
"""

import argparse
import json
import statistics
import sys
import time
from typing import Any, Final

from streams import STATUSES, TRIGGERS
from streams.codec import Record
from streams.kafka.metrics import OfPartition
from streams.partition import Partition
from streams.rules.agent.step import Step
from streams.rules.limits import Defaults
from streams.tally import Tally

AGENTS: Final = 64
GROUP_RECORDS: Final = 16
"""Small groups, so that what is counted once a transaction weighs."""


class _Uncounted(Tally):
    def count(self, step: Step) -> None:
        """Nothing."""


def cost(records: int, rounds: int) -> dict[str, Any]:
    """Microseconds of a decision with and without counting, and the share: medians of rounds that take turns.

    Each round is compared with its neighbour, as the machine is never the same for long.
    """
    metrics = OfPartition(0)
    taken: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * rounds):
        is_counted = number % 2 == 0
        seconds = _decide(records, metrics if is_counted else None)
        taken[is_counted].append(seconds / (2 * records) * 1e6)
    counted, uncounted = (statistics.median(taken[is_counted]) for is_counted in (True, False))
    return {
        "decision_us": round(uncounted, 2),
        "counted_decision_us": round(counted, 2),
        "share": round(statistics.median(a / b for a, b in zip(taken[True], taken[False], strict=True)) - 1, 4),
    }


def _decide(records: int, metrics: OfPartition | None) -> float:
    """CPU seconds for so many triggers and as many statuses, each of which frees a slot."""
    partition = Partition(0, 1, Defaults(1))
    partition.loaded(0, False)
    for topic in (TRIGGERS.name, STATUSES.name):
        partition.start_at(topic, 0)
    if metrics is None:
        partition.tally = _Uncounted()
    now = 1_700_000_000_000_000
    began = time.process_time()
    for offset in range(records):
        agent_id = f"agent-{offset % AGENTS}"
        id = f"t-{offset}"
        value = {"type": "trigger", "v": 1, "id": id, "agent_id": agent_id, "conversation_id": id, "message": "go on"}
        _handle(partition, TRIGGERS.name, offset, agent_id, value, now + offset, metrics)
    for offset in range(records):
        agent_id = f"agent-{offset % AGENTS}"
        execution_id = next(iter(partition.agents[agent_id].executions))
        about = {"agent_id": agent_id, "conversation_id": f"t-{offset}", "execution_id": execution_id}
        value = {"type": "status", "v": 1, **about, "status": "finished"}
        _handle(partition, STATUSES.name, offset, agent_id, value, now + records + offset, metrics)
    seconds = time.process_time() - began
    assert not any(agent.triggers for agent in partition.agents.values()), "something was not decided"
    return seconds


def _handle(
    partition: Partition,
    topic: str,
    offset: int,
    agent_id: str,
    value: dict[str, Any],
    now: int,
    metrics: OfPartition | None,
) -> None:
    record = Record(topic, 0, offset, agent_id.encode(), json.dumps(value).encode(), (), now // 1000)
    partition.handle(record, now)
    if offset % GROUP_RECORDS == GROUP_RECORDS - 1:
        changes = partition.take_changes()
        assert changes is not None
        if metrics is not None:
            metrics.committed(changes.outputs, GROUP_RECORDS, partition.take_tally(), 0.01)
        else:
            partition.tally.freed_at_ms.clear()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--records", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=60)
    given = parser.parse_args()
    sys.stdout.write(json.dumps(cost(given.records, given.rounds)) + "\n")
