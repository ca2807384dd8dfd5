"""The timers of a partition's agents: a heap in which nothing is ever taken back.

A deadline is pushed when it comes up and looked at when it comes: by then its trigger may have moved on. The heap is
built anew when too much in it no longer holds.
"""

import heapq
import sys
from collections.abc import Iterable, Mapping
from typing import Final

from streams.rules.agent.state import Agent
from streams.rules.agent.timers import TIMER_RANK, Deadline
from streams.rules.messages import TimerKind

_STALE_MAX: Final = 20_000
"""How many timers that no longer hold may lie in the heap beside as many as hold."""


class Timers:
    """``agents``: those of the partition, by id; read, never changed."""

    def __init__(self, agents: Mapping[str, Agent]) -> None:
        self._agents = agents
        self._heap: list[tuple[int, int, str, str, TimerKind]] = []
        self._size_max = _STALE_MAX
        self._forget_at: dict[str, int] = {}
        self._parked: dict[str, list[Deadline]] = {}

    @property
    def first_at(self) -> int | None:
        """When the next one comes, whether or not it still holds."""
        return self._heap[0][0] if self._heap else None

    def schedule(self, agent: Agent, at: int) -> None:
        """Take the deadlines that came up with the agent's last change, at instant ``at``."""
        for deadline in agent.deadlines:
            self._push(agent.agent_id, deadline)
        agent.deadlines.clear()
        if agent.row.parked is None and agent.agent_id in self._parked:
            for deadline in self._parked.pop(agent.agent_id):
                self._push(agent.agent_id, deadline)
        forget_at = agent.next_forget_at()
        if forget_at is not None and self._forget_at.get(agent.agent_id) != forget_at:
            self._forget_at[agent.agent_id] = forget_at
            self._push(agent.agent_id, Deadline(forget_at, TIMER_RANK["forget"], "", "forget"))
        if len(self._heap) > self._size_max:
            self.rebuild(at)

    def take_due(self, now: int) -> list[tuple[Agent, Deadline]]:
        """Everything whose time has come: leases, grace, retries, the rest, each by deadline and id (F9)."""
        due: list[tuple[Agent, Deadline]] = []
        while self._heap and self._heap[0][0] <= now:
            at, rank, trigger_id, agent_id, kind = heapq.heappop(self._heap)
            due.append((self._agents[agent_id], Deadline(at, rank, trigger_id, kind)))
        due.sort(key=lambda item: (item[1].rank, item[1].at, item[1].trigger_id.encode(), item[0].agent_id.encode()))
        return due

    def put_back(self, due: Iterable[tuple[Agent, Deadline]]) -> None:
        for agent, deadline in due:
            self._push(agent.agent_id, deadline)

    def still_holds(self, agent: Agent, deadline: Deadline, at: int) -> bool:
        """Whether a deadline that has come is to be decided on. A parked agent's are kept until it is configured."""
        if deadline.kind == "forget":
            if self._forget_at.get(agent.agent_id) != deadline.at:
                return False
            del self._forget_at[agent.agent_id]
        if not agent.is_due(deadline):
            self.schedule(agent, at)
            return False
        if agent.row.parked is not None:
            self._parked.setdefault(agent.agent_id, []).append(deadline)
            return False
        return True

    def rebuild(self, at: int) -> None:
        """Drop what no longer holds."""
        self._heap.clear()
        self._forget_at.clear()
        self._parked.clear()
        self._size_max = sys.maxsize
        for agent in self._agents.values():
            agent.schedule_all(at)
            self.schedule(agent, at)
        self._size_max = 2 * len(self._heap) + _STALE_MAX

    def _push(self, agent_id: str, deadline: Deadline) -> None:
        heapq.heappush(self._heap, (deadline.at, deadline.rank, deadline.trigger_id, agent_id, deadline.kind))
