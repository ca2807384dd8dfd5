"""The workloads, the log of a run and what it must show; the same parameters and meanings for every system measured.

A run is (agent, number, t_start, t_done), in nanoseconds of CLOCK_MONOTONIC, one clock for all processes: t_start when
the runner's code for the item begins, t_done just before the completion is handed to the system. Freed -> next is the
next t_start minus t_done on the same agent, so it is measured where the limit is 1.

w1   64 agents, limit 2, 20,000 items: enqueued first (16 clients, each waiting for its acknowledgement), then the
     runner is switched on: items started and completed per second of that drain. Runs last no time.
w1c  the same shape, 2,560 items of 20 ms: the limit of 2 is reached and never passed.
w2   16 agents, limit 1, 40 items of 50 ms each. All agents start together, so completions come in bursts of 16.
w3   one agent, 120 items of 50 ms, while 100 agents each have one item that never ends and 1,000 older waiting ones.
w3e  the same agent alone: compare with w3 for the cost of a backlog.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

CAP_SECONDS: Final = 20.0
"""A drain that takes longer is cut off and reports the rate that it had."""
CLIENTS: Final = 16
ENDLESS: Final = "endless-"
"""Agents whose items never end."""

Item = tuple[str, int]
"""Agent and number of the item in its agent."""


@dataclass(frozen=True, slots=True)
class Workload:
    """``backlog`` is enqueued before the measured ``items``."""

    name: str
    items: list[Item]
    limit: int
    run_seconds: float = 0.0
    backlog: tuple[Item, ...] = ()

    @property
    def agents(self) -> list[str]:
        return sorted({agent for agent, _ in (*self.items, *self.backlog)})


class Run(NamedTuple):
    agent: str
    number: int
    started_ns: int
    done_ns: int


def workload(name: str) -> Workload:
    match name:
        case "w1":
            return Workload("w1", _spread(64, 20_000), limit=2)
        case "w1c":
            return Workload("w1c", _spread(64, 2_560), limit=2, run_seconds=0.02)
        case "w2":
            return Workload("w2", _spread(16, 640), limit=1, run_seconds=0.05)
        case "w3":
            backlog = tuple((f"{ENDLESS}{index % 100}", index // 100) for index in range(100_100))
            return Workload("w3", _spread(1, 120), limit=1, run_seconds=0.05, backlog=backlog)
        case "w3e":
            return Workload("w3e", _spread(1, 120), limit=1, run_seconds=0.05)
        case _:
            raise ValueError(name)


def _spread(agents: int, items: int) -> list[Item]:
    return [(f"agent-{index % agents}", index // agents) for index in range(items)]


def lanes(items: list[Item]) -> list[list[Item]]:
    """One list per client; an agent's items go through one client, so that their order is well defined."""
    agents = {agent: index for index, agent in enumerate(dict.fromkeys(agent for agent, _ in items))}
    divided: list[list[Item]] = [[] for _ in range(CLIENTS)]
    for agent, number in items:
        divided[agents[agent] % CLIENTS].append((agent, number))
    return [lane for lane in divided if lane]


def item_id(item: Item) -> str:
    """Sorts as the numbers do."""
    return f"{item[0]}/{item[1]:06d}"


def item_of(id: str) -> Item:
    agent, _, number = id.rpartition("/")
    return agent, int(number)


def percentile(ordered: list[float], share: float) -> float | None:
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3) if ordered else None


def account(runs: list[Run], planned: Workload, *, capped: bool) -> dict[str, Any]:
    """What a run showed: nothing twice, nothing missing, the limit never passed; and freed -> next in milliseconds."""
    ids = [(run.agent, run.number) for run in runs]
    by_agent: dict[str, list[Run]] = {}
    for run in runs:
        by_agent.setdefault(run.agent, []).append(run)
    running_max = inversions = 0
    latencies: list[float] = []
    for its in by_agent.values():
        # At a tie the end comes first.
        steps = sorted([(run.started_ns, 1) for run in its] + [(run.done_ns, -1) for run in its])
        running = 0
        for _, step in steps:
            running += step
            running_max = max(running_max, running)
        its.sort(key=lambda run: run.started_ns)
        inversions += sum(later.number < earlier.number for earlier, later in pairwise(its))
        if planned.limit == 1:
            latencies += [(later.started_ns - earlier.done_ns) / 1e6 for earlier, later in pairwise(its)]
    latencies.sort()
    return {
        "done": len(runs),
        "twice": len(ids) - len(set(ids)),
        "missing": len(set(planned.items) - set(ids)),
        "foreign": len(set(ids) - set(planned.items)),
        "capped": capped,
        "limit": planned.limit,
        "running_max": running_max,
        "order_inversions": inversions,
        "p50_ms": percentile(latencies, 0.5),
        "p95_ms": percentile(latencies, 0.95),
        "p99_ms": percentile(latencies, 0.99),
        "max_ms": percentile(latencies, 1.0),
    }


def faults(found: dict[str, Any]) -> list[str]:
    """What must never be, in any run."""
    wrong = [f"{name} {found[name]}" for name in ("twice", "foreign") if found[name]]
    if found["missing"] and not found["capped"]:
        wrong.append(f"missing {found['missing']}")
    if found["running_max"] > found["limit"]:
        wrong.append(f"limit {found['limit']} passed: {found['running_max']} at once")
    return wrong
