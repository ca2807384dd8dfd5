"""A seeded cluster in memory: partitions over a log with transactions, owners that crash, runners that fail.

Real ``Partition`` objects read input records in order and commit what ``take_changes`` gives, all or nothing. A crash
throws the object away before or after its commit; the next owner restores it from its rows. An owner that lost its
partition and doesn't know it works on, and the log refuses what it writes. Partitions interleave in any order. Runners
read dispatches at their own pace, and report, fail, pause, or die.
"""

import json
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from streams import CONTROLS, DISPATCHES, INPUT_TOPICS, SITE_CONTROLS, STATUSES, TRIGGERS, codec
from streams.codec import Headers, Output, Record, partition_of
from streams.partition import Partition, dead_letter
from streams.rules.limits import Defaults
from streams.rules.order import SECOND, format_instant

START = 1_772_359_200 * SECOND
TOPIC_NAMES = tuple(topic.name for topic in INPUT_TOPICS)


@dataclass
class Faults:
    """What may go wrong, and how likely each time, drawn per seed: with few kinds a run goes deeper into each."""

    crash_before_commit: float = 0.0
    crash_after_commit: float = 0.0
    ownership_moved: float = 0.0
    """The partition gets a new owner, while the old one works on."""
    clock_behind: float = 0.0
    """A new owner's clock is behind the last one's."""
    duplicate_input: float = 0.0
    """A producer writes a record twice."""
    redelivered: float = 0.0
    """A record that was handled is delivered again."""
    timers_late: float = 0.0
    runner_dies: float = 0.0
    runner_fails: float = 0.0
    runner_pauses: float = 0.0
    late_words: float = 0.0


class Owner(NamedTuple):
    """``epoch``: the log takes nothing from an owner of an earlier one."""

    partition: Partition
    epoch: int
    clock_behind: int


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
    positions: list[dict[str, int]] = field(default_factory=list)
    """Next offsets by topic, as committed."""
    owners: list[Owner | None] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    zombies: dict[int, Owner] = field(default_factory=dict)
    attempts: dict[str, Attempt] = field(default_factory=dict)
    read_dispatches: list[int] = field(default_factory=list)
    fired: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    trigger_ids: list[str] = field(default_factory=list)
    _worked: int | None = None

    def __post_init__(self) -> None:
        self.rows = [{} for _ in range(self.partitions)]
        self.positions = [{} for _ in range(self.partitions)]
        self.owners = [None] * self.partitions
        self.epochs = [0] * self.partitions
        self.read_dispatches = [0] * self.partitions

    def happens(self, fault: str) -> bool:
        likelihood: float = getattr(self.faults, fault)
        happens = likelihood > 0 and self.random.random() < likelihood
        self.fired[fault] += happens
        return happens

    # Sending

    def send(self, topic: str, key: str, value: dict[str, Any], headers: Headers = ()) -> None:
        for _ in range(2 if self.happens("duplicate_input") else 1):
            number = partition_of(key, self.partitions)
            self._append(Output(topic, key.encode(), json.dumps(value).encode(), tuple(headers), number))

    def _append(self, output: Output, own: int = 0) -> None:
        number = own if output.partition is None else output.partition
        records = self.log[output.topic, number]
        records.append(Record(output.topic, number, len(records), output.key, output.value, output.headers))

    def trigger(self, agent_id: str, via: str = "kafka", **fields: Any) -> str:
        self.sent += 1
        id = f"t{self.sent}"
        self.trigger_ids.append(id)
        value = {"type": "trigger", "v": 1, "id": id, "agent_id": agent_id, "conversation_id": f"c-{id}", **fields}
        self.send(TRIGGERS.name, agent_id, value, (("via", b"http"),) if via == "http" else ())
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

    def owner(self, number: int) -> Owner:
        owner = self.owners[number]
        if owner is None:
            behind = self.random.randrange(1, 4) * SECOND if self.happens("clock_behind") else 0
            self.epochs[number] += 1
            owner = self.owners[number] = Owner(self.restored(number, self.now - behind), self.epochs[number], behind)
        return owner

    def restored(self, number: int, now: int) -> Partition:
        """A partition loaded from what is committed."""
        partition = Partition(number, self.partitions, self.defaults)
        for key, value in self.rows[number].items():
            partition.load(key, value)
        partition.loaded(now, decisions_exist=bool(self.rows[number]))
        for topic in TOPIC_NAMES:
            if topic not in partition.positions:
                partition.start_at(topic, 0)
        return partition

    def commit(self, number: int, owner: Owner) -> bool:
        """Write what the owner has, in one transaction; False if it owns the partition no more."""
        changes = owner.partition.take_changes()
        if owner.epoch != self.epochs[number]:
            return False
        if changes is None:
            return True
        for output in changes.outputs:
            self._append(output, number)
        for key, value in changes.rows.items():
            if value is None:
                self.rows[number].pop(key, None)
            else:
                self.rows[number][key] = value
        self.positions[number] = dict(owner.partition.positions)
        return True

    def skip(self, number: int, topic: str) -> None:
        """What ``berth skip`` does: the owner is fenced, the next record becomes a dead letter, its position moves."""
        self.owners[number] = None
        row = codec.read_partition(self.rows[number][codec.write_key(codec.PARTITION_KEY)])
        record = self.log[topic, number][row.positions[topic]]
        self._append(dead_letter(record, "skipped", self.now), number)
        row = row._replace(positions={**row.positions, topic: record.offset + 1})
        self.rows[number][codec.write_key(codec.PARTITION_KEY)] = codec.write_partition(row)
        self.positions[number] = dict(row.positions)

    def backlog(self, number: int, owner: Owner) -> list[str]:
        """Topics with records that the owner has not handled."""
        positions = owner.partition.positions
        return [topic for topic in TOPIC_NAMES if len(self.log[topic, number]) > positions[topic]]

    def work(self, number: int, records_max: int) -> None:
        """Handle up to so many records of random topics and commit, unless something goes wrong."""
        last, self._worked = self._worked, number
        if last not in (None, number) and self.owners[last] is not None and self.backlog(last, self.owner(last)):
            self.fired["interleaved"] += 1
        if self.happens("ownership_moved") and (old := self.owners[number]) is not None:
            self.zombies[number], self.owners[number] = old, None
        owner = self.owner(number)
        if number in self.zombies and self.random.random() < 0.5:
            self._outlived(number, self.zombies.pop(number))
        self._handle(number, owner, records_max)
        if self.happens("crash_before_commit"):
            self.owners[number] = None
            return
        written = self.commit(number, owner)
        assert written, "the owner of the newest epoch writes"
        if self.happens("crash_after_commit"):
            self.owners[number] = None

    def _handle(self, number: int, owner: Owner, records_max: int) -> None:
        now = self.now - owner.clock_behind
        partition = owner.partition
        for _ in range(records_max):
            topics = self.backlog(number, owner)
            if not topics:
                break
            topic = self.random.choice(topics)
            partition.handle(self.log[topic, number][partition.positions[topic]], now)
        topic = self.random.choice(TOPIC_NAMES)
        if partition.positions[topic] and self.happens("redelivered"):
            partition.handle(self.log[topic, number][self.random.randrange(partition.positions[topic])], now)
        if not self.backlog(number, owner):
            deadline = partition.next_deadline_us()
            if deadline is not None and deadline <= now and not self.happens("timers_late"):
                partition.fire_timers(now, 100)

    def _outlived(self, number: int, zombie: Owner) -> None:
        """An owner that doesn't know that it lost the partition works on; nothing of it is written."""
        self._handle(number, zombie, 5)
        before = len(self.rows[number])
        written = self.commit(number, zombie)
        assert not written and len(self.rows[number]) == before
        self.fired["zombie_refused"] += 1

    def is_idle(self) -> bool:
        """Nothing to read, and no timer due."""
        for number in range(self.partitions):
            owner = self.owner(number)
            deadline = owner.partition.next_deadline_us()
            if (deadline is not None and deadline <= self.now - owner.clock_behind) or self.backlog(number, owner):
                return False
        return True

    def next_deadline(self) -> int | None:
        owners = [self.owner(number) for number in range(self.partitions)]
        deadlines = [
            deadline + owner.clock_behind
            for owner in owners
            if (deadline := owner.partition.next_deadline_us()) is not None
        ]
        ends = [attempt.ends_at for attempt in self.attempts.values() if not attempt.is_dead]
        return min(deadlines + ends, default=None)

    # Running

    def take_dispatches(self, number: int) -> None:
        records = self.log[DISPATCHES.name, number]
        for record in records[self.read_dispatches[number] :]:
            message = json.loads(record.value or b"")
            execution_id = message["execution_id"]
            if message["type"] == "dispatch":
                assert execution_id not in self.attempts, "an attempt was dispatched twice"
                is_dead = self.happens("runner_dies")
                ends_at = self.now + self.random.randrange(1, 30) * SECOND
                self.attempts[execution_id] = Attempt(message, ends_at, is_dead)
                if self.random.random() < 0.2:
                    self._say(message, "running")
            elif execution_id in self.attempts:
                self._told(message["type"], execution_id)
        self.read_dispatches[number] = len(records)

    def _told(self, what: str, execution_id: str) -> None:
        if what == "stop_requested" and not self.attempts[execution_id].is_dead:
            self.report(execution_id, "stopped")
        elif what == "revoked":
            attempt = self.attempts.pop(execution_id)
            if self.happens("late_words"):
                self._say(attempt.dispatch, self.random.choice(["finished", "failed", "heartbeat"]))

    def finish_due(self) -> None:
        for execution_id, attempt in list(self.attempts.items()):
            if attempt.ends_at > self.now or attempt.is_dead:
                continue
            if self.happens("runner_fails"):
                self.report(execution_id, "failed")
            elif self.happens("runner_pauses"):
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
