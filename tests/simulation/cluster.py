"""A seeded cluster in memory: partitions over a log with transactions, owners that crash, runners that fail.

Real ``Partition`` objects read input records in order and commit what ``take_changes`` gives, all or nothing. A crash
throws the object away before or after its commit; the next owner restores it from its rows. Partitions interleave in
any order. Runners read dispatches at their own pace, at least once, and report, fail, pause, or die.
"""

import json
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from streams import CONTROLS, DISPATCHES, INPUT_TOPICS, SITE_CONTROLS, STATUSES, TRIGGERS
from streams.codec import Output, Record, partition_of
from streams.partition import Partition
from streams.rules.limits import Defaults
from streams.rules.order import SECOND, format_instant

START = 1_772_359_200 * SECOND


@dataclass
class Faults:
    """What may go wrong in a run, each drawn per seed: a run with few kinds of faults goes deeper into each."""

    crash_before_commit: float = 0.0
    crash_after_commit: float = 0.0
    duplicate_input: float = 0.0
    runner_dies: float = 0.0
    runner_fails: float = 0.0
    runner_pauses: float = 0.0
    late_words: float = 0.0


@dataclass
class Attempt:
    """What a runner works on."""

    dispatch: dict[str, Any]
    ends_at: int
    is_dead: bool = False


@dataclass
class Cluster:
    """``partitions`` owners and their log. ``fired`` counts which faults happened."""

    random: random.Random
    partitions: int = 3
    defaults: Defaults = field(default_factory=lambda: Defaults(1, pool_capacity=2))
    faults: Faults = field(default_factory=Faults)
    now: int = START
    log: dict[tuple[str, int], list[Record]] = field(default_factory=lambda: defaultdict(list))
    rows: list[dict[bytes, bytes]] = field(default_factory=list)
    owners: list[Partition | None] = field(default_factory=list)
    attempts: dict[str, Attempt] = field(default_factory=dict)
    ended: list[dict[str, Any]] = field(default_factory=list)
    read_dispatches: list[int] = field(default_factory=list)
    fired: Counter[str] = field(default_factory=Counter)
    sent: int = 0

    def __post_init__(self) -> None:
        self.rows = [{} for _ in range(self.partitions)]
        self.owners = [None] * self.partitions
        self.read_dispatches = [0] * self.partitions

    # Sending

    def send(self, topic: str, key: str, value: dict[str, Any]) -> None:
        copies = 2 if self.random.random() < self.faults.duplicate_input else 1
        self.fired["duplicate_input"] += copies - 1
        for _ in range(copies):
            self._append(
                Output(topic, key.encode(), json.dumps(value).encode(), (), partition_of(key, self.partitions))
            )

    def _append(self, output: Output, own: int = 0) -> None:
        number = own if output.partition is None else output.partition
        records = self.log[output.topic, number]
        records.append(Record(output.topic, number, len(records), output.key, output.value, output.headers))

    def trigger(self, agent_id: str, **fields: Any) -> str:
        self.sent += 1
        id = f"t{self.sent}"
        value = {"type": "trigger", "v": 1, "id": id, "agent_id": agent_id, "conversation_id": f"c-{id}", **fields}
        self.send(TRIGGERS.name, agent_id, value)
        return id

    def stop(self, agent_id: str, **fields: Any) -> None:
        self.sent += 1
        value = {"type": "stop", "v": 1, "id": f"s{self.sent}", "agent_id": agent_id, **fields}
        self.send(TRIGGERS.name, agent_id, value)

    def control(self, agent_id: str, kind: str, **fields: Any) -> None:
        self.sent += 1
        about = {"id": f"k{self.sent}", "agent_id": agent_id, "requested_by": "someone"}
        self.send(CONTROLS.name, agent_id, {"type": kind, "v": 1, **about, **fields})

    def site_control(self, site: str, kind: str, **fields: Any) -> None:
        self.sent += 1
        about = {"id": f"z{self.sent}", "site": site, "requested_by": "someone"}
        self.send(SITE_CONTROLS.name, site, {"type": kind, "v": 1, **about, **fields})

    # Owning

    def owner(self, number: int) -> Partition:
        owner = self.owners[number]
        if owner is None:
            owner = Partition(number, self.partitions, self.defaults)
            for key, value in self.rows[number].items():
                owner.load(key, value)
            owner.loaded(self.now, decisions_exist=bool(self.rows[number]))
            for topic in INPUT_TOPICS:
                if topic.name not in owner.positions:
                    owner.start_at(topic.name, 0)
            self.owners[number] = owner
        return owner

    def commit(self, number: int) -> bool:
        """Write what the owner has, unless it crashes first; whether it lived on."""
        owner = self.owner(number)
        if self.random.random() < self.faults.crash_before_commit:
            self.fired["crash_before_commit"] += 1
            self.owners[number] = None
            return False
        changes = owner.take_changes()
        if changes is not None:
            for output in changes.outputs:
                self._append(output, number)
            for key, value in changes.rows.items():
                if value is None:
                    self.rows[number].pop(key, None)
                else:
                    self.rows[number][key] = value
        if self.random.random() < self.faults.crash_after_commit:
            self.fired["crash_after_commit"] += 1
            self.owners[number] = None
            return False
        return True

    def backlog(self, number: int) -> list[str]:
        owner = self.owner(number)
        return [
            topic.name
            for topic in INPUT_TOPICS
            if len(self.log[topic.name, number]) > owner.positions.get(topic.name, 0)
        ]

    def work(self, number: int, records_max: int) -> int:
        """Handle up to so many records of random topics and commit; how many were handled."""
        owner = self.owner(number)
        handled = 0
        while handled < records_max and (topics := self.backlog(number)):
            topic = self.random.choice(topics)
            owner.handle(self.log[topic, number][owner.positions.get(topic, 0)], self.now)
            handled += 1
        if not self.backlog(number):
            owner.fire_timers(self.now, 100)
        self.commit(number)
        return handled

    def idle(self) -> bool:
        """Nothing to read, and no timer due."""
        for number in range(self.partitions):
            deadline = self.owner(number).next_deadline_us()
            if self.backlog(number) or (deadline is not None and deadline <= self.now):
                return False
        return True

    def next_deadline(self) -> int | None:
        deadlines = [self.owner(number).next_deadline_us() for number in range(self.partitions)]
        ends = [attempt.ends_at for attempt in self.attempts.values() if not attempt.is_dead]
        return min([one for one in (*deadlines, *ends) if one is not None], default=None)

    # Running

    def take_dispatches(self, number: int) -> None:
        records = self.log[DISPATCHES.name, number]
        for record in records[self.read_dispatches[number] :]:
            message = json.loads(record.value or b"")
            execution_id = message["execution_id"]
            if message["type"] == "dispatch":
                assert execution_id not in self.attempts, "an attempt was dispatched twice"
                is_dead = self.random.random() < self.faults.runner_dies
                self.fired["runner_dies"] += is_dead
                ends_at = self.now + self.random.randrange(1, 30) * SECOND
                self.attempts[execution_id] = Attempt(message, ends_at, is_dead)
            elif execution_id in self.attempts:
                if message["type"] == "stop_requested" and not self.attempts[execution_id].is_dead:
                    self.report(execution_id, "stopped")
                elif message["type"] == "revoked":
                    attempt = self.attempts.pop(execution_id)
                    if self.random.random() < self.faults.late_words:
                        self.fired["late_words"] += 1
                        self._say(attempt.dispatch, self.random.choice(["finished", "failed", "heartbeat"]))
        self.read_dispatches[number] = len(records)

    def finish_due(self) -> None:
        for execution_id, attempt in list(self.attempts.items()):
            if attempt.ends_at <= self.now and not attempt.is_dead:
                draw = self.random.random()
                if draw < self.faults.runner_fails:
                    self.fired["runner_fails"] += 1
                    self.report(execution_id, "failed")
                elif draw < self.faults.runner_fails + self.faults.runner_pauses:
                    self.fired["runner_pauses"] += 1
                    self.report(execution_id, "paused")
                else:
                    self.report(execution_id, "finished")

    def report(self, execution_id: str, status: str) -> None:
        attempt = self.attempts.pop(execution_id)
        self._say(attempt.dispatch, status)

    def _say(self, dispatch: dict[str, Any], status: str) -> None:
        about = {name: dispatch[name] for name in ("agent_id", "conversation_id", "execution_id")}
        self.send(STATUSES.name, dispatch["agent_id"], {"type": "status", "v": 1, "status": status, **about})

    def at(self, seconds: float) -> str:
        return format_instant(self.now + round(seconds * SECOND))
