"""A partition that counts records per key: the smallest real one, for the tests of the Kafka shell.

Every output names the input record that caused it, so a test can account for every input offset. Values:

``count ...``       counted
``fail``            the rules fail on it, each time
``fail together``   the rules fail on it, but not when it is the only one of its transaction
``timer AT_US``     a decision with ``"timer": key`` when AT_US is reached
``bad timer AT_US`` the rules fail in that timer until its agent (the key) is parked
``bad site``        leaves something over of the site (the key): the rules fail on it unless COUNTING_IS_MENDED is set
``at AT_US``        counted, and the partition's last ``at`` becomes AT_US
"""

import json
import os
from collections.abc import Mapping
from typing import Any

from streams import DECISIONS, codec
from streams.codec import Output, Record
from streams.partition import Changes, RowsMissing, RuleFailure
from streams.tally import Tally

POSITION_KEY = codec.write_key(codec.PARTITION_KEY)


class CountingPartition:
    def __init__(self, number: int) -> None:
        self.number = number
        self.rows: dict[bytes, bytes] = {}
        self.positions: dict[str, int] = {}
        self.at_us = 0
        self.timers: dict[str, tuple[int, bool]] = {}
        self.sites: dict[str, None] = {}
        self.agents: dict[str, None] = {}
        self.changed: dict[bytes, bytes | None] = {}
        self.outputs: list[Output] = []
        self.position_changed = False

    @property
    def is_empty(self) -> bool:
        return not self.rows

    @property
    def known_decisions(self) -> dict[str, int]:
        return {}

    def load(self, key: bytes, value: bytes | None) -> None:
        if value is None:
            self.rows.pop(key, None)
        else:
            self.rows[key] = value

    def loaded(self, now_us: int, decisions_exist: bool) -> None:
        if decisions_exist and not self.rows:
            raise RowsMissing(self.number)
        for key, value in self.rows.items():
            if key == POSITION_KEY:
                row = codec.read_partition(value)
                self.at_us, self.positions = row.at, dict(row.positions)
                continue
            kind, *name = json.loads(key)
            if kind == "site":
                self.sites[name[0]] = None
            if kind == "timer":
                at_us, is_bad = json.loads(value)
                self.timers[name[0]] = (at_us, is_bad)

    def start_at(self, topic: str, offset: int) -> None:
        assert topic not in self.positions
        self.positions[topic] = offset
        self.position_changed = True

    def passed(self, positions: Mapping[str, int], write: bool) -> None:
        for topic, offset in positions.items():
            if offset > self.positions[topic]:
                self.positions[topic] = offset
                self.position_changed |= write

    def handle(self, record: Record, now_us: int) -> None:
        if record.offset < self.positions[record.topic]:
            return
        self.work_off()
        words = (record.value or b"").decode().split()
        if words == ["fail"] or (words == ["fail", "together"] and self.outputs):
            raise RuleFailure(record, None, ZeroDivisionError("the test says so"))
        self.at_us = max(self.at_us, now_us)
        key = (record.key or b"").decode()
        if words[0] == "timer":
            self.set_timer(key, int(words[1]), is_bad=False)
        elif words[:2] == ["bad", "timer"]:
            self.set_timer(key, int(words[2]), is_bad=True)
        elif words == ["bad", "site"]:
            self.sites[key] = None
            self.put(json.dumps(["site", key]).encode(), b"1")
        elif words[0] == "at":
            self.at_us = int(words[1])
        row = json.dumps(["count", key]).encode()
        count = int(self.rows.get(row, b"0")) + 1
        self.put(row, b"%d" % count)
        self.decide(key, count=count, topic=record.topic, partition=record.partition, offset=record.offset)
        self.positions[record.topic] = record.offset + 1
        self.position_changed = True

    def work_off(self) -> None:
        for site in list(self.sites):
            if "COUNTING_IS_MENDED" not in os.environ:
                raise RuleFailure(None, None, ZeroDivisionError("the test says so"), site)
            del self.sites[site]
            self.put(json.dumps(["site", site]).encode(), None)
            self.decide(site, site=site)

    def next_deadline_us(self) -> int | None:
        if self.sites:
            return 0
        return min((at_us for at_us, _ in self.timers.values()), default=None)

    def fire_timers(self, now_us: int, limit: int) -> int:
        self.work_off()
        due = sorted((at_us, key) for key, (at_us, _) in self.timers.items() if at_us <= now_us)[:limit]
        for at_us, key in due:
            if self.timers[key][1]:
                raise RuleFailure(None, key, ZeroDivisionError("the test says so"))
            del self.timers[key]
            self.put(json.dumps(["timer", key]).encode(), None)
            self.decide(key, timer=key, deadline_us=at_us, at_us=now_us)
        return len(due)

    def park(self, agent_id: str, error: str, now_us: int) -> None:
        del self.timers[agent_id]
        self.put(json.dumps(["timer", agent_id]).encode(), None)
        self.decide(agent_id, parked=agent_id, error=error)

    def clock_behind_us(self, now_us: int) -> int:
        return max(0, self.at_us - now_us)

    def take_tally(self) -> Tally:
        return Tally()

    def take_changes(self) -> Changes | None:
        if not (self.changed or self.outputs or self.position_changed):
            return None
        self.put(POSITION_KEY, codec.write_partition(codec.PartitionRow(self.at_us, self.positions, 0)))
        changes = Changes(self.outputs, self.changed)
        self.changed, self.outputs, self.position_changed = {}, [], False
        return changes

    def set_timer(self, key: str, at_us: int, *, is_bad: bool) -> None:
        self.timers[key] = (at_us, is_bad)
        self.put(json.dumps(["timer", key]).encode(), json.dumps([at_us, is_bad]).encode())

    def put(self, key: bytes, value: bytes | None) -> None:
        self.load(key, value)
        self.changed[key] = value

    def decide(self, key: str, **facts: Any) -> None:
        self.outputs.append(Output(DECISIONS.name, key.encode(), json.dumps(facts).encode()))
