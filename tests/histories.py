"""Seeded lives of agents and sites, decided by real partitions, as the records that a projector reads.

What is decided is real; what is asked is odd on purpose: ids that differ only in case, look like joined ids or like
patterns of SQL, texts that PostgreSQL can't hold, statuses that come late, twice, for nobody, and bad records.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from projections.store import Batch, LogRecord, Position
from streams import DEAD_LETTERS, DECISIONS, SITE_DECISIONS, TEXTS, TRIGGERS
from streams.codec import Record, partition_of
from streams.rules.agent.state import Agent
from streams.rules.order import SECOND, format_instant
from streams.rules.site.state import Site
from tests.driving import T0, Driven

AGENTS: Final = ("A", "a", "a:b", "a:", "b", "%", "_", "100%_\\", "é", "e\u0301", "\U0001f600", "Ω'\"", "z" * 200)
TRIGGERS_OF_ONE: Final = ("t", "T", "t:1", "%", "_", "t'", '"t"', "\U0001f600")
TEXTS_OF_PEOPLE: Final = (
    "plain",
    "",
    "a\x00b",
    "lone \ud800 high",
    "low \udfff",
    "pair \U0001f600",
    "\\u0000 spelled",
    "%_'\"\\",
    "x" * 300,
)
PROJECTED: Final = (DECISIONS.name, SITE_DECISIONS.name, TEXTS.name, DEAD_LETTERS.name)
SITES: Final = ("default", "s", "S%'")
FOLDERS: Final = ("/", "/a", "/a/b", "//a/bc/", "/a/b/c%_'", None)


class History:
    """Several partitions' worth of decisions, and the rules' own state of the agents to compare with."""

    def __init__(self, seed: int, partitions: int = 2, agents: Sequence[str] = AGENTS) -> None:
        self.random = random.Random(seed)
        self.agents = tuple(agents)
        self.partitions = partitions
        self.driven = {
            number: Driven(self.random.choice([1, 2, 3]), partitions, number, verified=False, delivers=False, pool=2)
            for number in range(partitions)
        }
        self._count = 0
        self._taken: dict[int, int] = {}
        self._next_offsets: dict[Position, int] = {}

    def agent(self, agent_id: str) -> Agent | None:
        """The agent as its decider holds it, if it was ever named."""
        return self._of(agent_id).partition.agents.get(agent_id)

    def site(self, site_id: str) -> Site | None:
        """The site as its decider holds it, if it was ever named."""
        return self._of(site_id).partition._sites.sites.get(site_id)

    def live(self, steps: int) -> "History":
        """So many things happen, to any agent."""
        for _ in range(steps):
            self.happen(self.random.choice(self.agents))
        return self

    def happen(self, agent_id: str) -> None:
        """Something happens to this agent or to a site; what deciders then tell each other arrives now or later."""
        if self.random.random() < 0.06:
            self._site_control(self.random.choice(SITES))
        else:
            self._happen(agent_id)
        while self.random.random() < 0.9 and self._deliver():
            pass

    def send_to_site(self, site: str) -> None:
        """A control arrives at this site."""
        self._site_control(site)

    def settle(self) -> "History":
        """Everything that deciders have told each other arrives, and every timer that is due has fired."""
        while any(driven.undelivered for driven in self.driven.values()):
            while self._deliver():
                pass
            for driven in self.driven.values():
                driven.fire()
        return self

    def _deliver(self) -> bool:
        """The oldest message of some partition arrives at its own; False if there is none."""
        senders = [driven for driven in self.driven.values() if driven.undelivered]
        if not senders:
            return False
        output = self.random.choice(senders).undelivered.pop(0)
        assert output.partition is not None
        to = self.driven[output.partition]
        to._take_in(Record(output.topic, to.number, to.offset(output.topic), output.key, output.value, output.headers))
        return True

    def _happen(self, agent_id: str) -> None:
        chance, driven = self.random, self._of(agent_id)
        agent = driven.partition.agents.get(agent_id)
        live = list(agent.triggers) if agent else []
        running = [row for row in agent.triggers.values() if row.state == "running"] if agent else []
        kind = chance.choices(
            ["trigger", "status", "stop", "control", "time", "odd"],
            [30, 35, 8, 8, 6, 8] if running else [60, 5, 5, 8, 6, 8],
        )[0]
        if kind == "trigger":
            self._trigger(driven, agent_id)
        elif kind == "status" and running:
            row = chance.choice(running)
            status = chance.choices(["finished", "failed", "paused", "stopped", "running"], [50, 15, 10, 5, 5])[0]
            self._status(driven, agent_id, row.trigger_id, status, row.execution_id)
        elif kind == "status" and driven.dispatches:
            dispatch = chance.choice([entry for entry in driven.dispatches if entry["type"] == "dispatch"])
            status = chance.choice(["finished", "failed", "running", "heartbeat"])  # late, twice, or in time
            self._status(driven, dispatch["agent_id"], dispatch["trigger_id"], status, dispatch["execution_id"])
        elif kind == "stop" and live:
            if chance.random() < 0.7:
                driven.stop(chance.choice(live), agent_id, requested_by="someone")
            else:
                conversation_id = (
                    chance.choice([row.conversation_id for row in agent.triggers.values()]) if agent else "c"
                )
                driven.stop(None, agent_id, conversation_id=conversation_id)
        elif kind == "control":
            self._control(driven, agent_id, live)
        elif kind == "time":
            driven.advance(chance.choice([0.5, 2, 5, 20, 60, 3000]))
        else:
            self._odd(driven, agent_id)

    def _trigger(self, driven: Driven, agent_id: str) -> None:
        chance = self.random
        self._count += 1
        id = chance.choice(TRIGGERS_OF_ONE) if chance.random() < 0.2 else f"t-{self._count}"
        fields: dict[str, Any] = {"conversation_id": f"c{chance.choice('abAB:%')}"}
        options: dict[str, Any] = {
            "message": chance.choice(TEXTS_OF_PEOPLE),
            "payload": {"text": chance.choice(TEXTS_OF_PEOPLE), "n": [1, 2.5, None, 10**30]},
            "kind": chance.choice(["chat", "task_assigned", "a\\'%"]),
            "interactive": True,
            "on_busy": "queue",
            "requested_by": "p:1",
            "organization_id": chance.choice(["o", "O"]),
            "department_id": "d",
            "priority": -3,
            "execution_class": "background",
            "max_attempts": chance.choice([1, 2, 5]),
            "timeout_seconds": chance.choice([60, 1800]),
            "heartbeat_seconds": chance.choice([10, 600]),
            "parent": {"agent_id": "a:b", "trigger_id": "t"},
            "restarts": "t",
        }
        fields.update({name: value for name, value in options.items() if chance.random() < 0.4})
        if chance.random() < 0.15:
            fields["available_at"] = _at(driven, chance.choice([-500, 3, 500]))
        if chance.random() < 0.1:
            fields["expires_at"] = _at(driven, chance.choice([-1, 2, 200]))
        if fields.get("interactive") and "on_busy" not in fields:
            fields["on_busy"] = chance.choice(["queue", "later", "force", "ask", "interrupt"])
        if chance.random() < 0.35:
            fields |= self._resources()
        if chance.random() < 0.08:
            fields["approval_required"] = True
        if chance.random() < 0.1:
            fields["depends_on"] = [
                {"agent_id": chance.choice(self.agents), "conversation_id": f"c{chance.choice('abAB:%')}"}
                for _ in range(chance.choice([1, 2, 3]))
            ]
        if chance.random() < 0.1:
            fields["decide_before"] = _at(driven, 4)
        driven.trigger(id, agent_id, **fields)

    def _resources(self) -> dict[str, Any]:
        """A worker, a folder of an environment, or both."""
        chance = self.random
        fields: dict[str, Any] = {"site": chance.choice(SITES)}
        if chance.random() < 0.7:
            fields["worker"] = True
        if chance.random() < 0.7 or "worker" not in fields:
            fields |= {"environment_id": chance.choice(["e", "E"]), "folder": chance.choice(FOLDERS)}
        return fields

    def _site_control(self, site: str) -> None:
        chance, driven = self.random, self._of(site)
        kind = chance.choices(
            ["configure_site", "pause_site", "resume_site", "gate", "delete_folder", "delete_environment"],
            [30, 8, 30, 30, 10, 3],
        )[0]
        fields: dict[str, Any] = {}
        match kind:
            case "configure_site":
                fields["capacity"] = chance.choice([0, 1, 2, 5])
            case "gate":
                fields |= {"scope": "organization", "name": chance.choice(["o", "O"])}
                if chance.random() < 0.2:
                    fields |= {"scope": "department", "name": "d"}
                if chance.random() < 0.5:
                    fields["enabled"] = chance.random() < 0.6
                if chance.random() < 0.5:
                    fields["run_budget"] = chance.choice([0, 1, 3, None, None])
            case "delete_folder" | "delete_environment":
                fields["environment_id"] = chance.choice(["e", "E"])
                if kind == "delete_folder":
                    fields["path"] = chance.choice(FOLDERS[:-1])
        driven.site_control(kind, site, **fields)

    def _status(self, driven: Driven, agent_id: str, trigger_id: str, status: str, execution_id: str | None) -> None:
        chance = self.random
        fields: dict[str, Any] = {"execution_id": execution_id}
        if chance.random() < 0.5:
            fields["error" if status == "failed" else "result"] = chance.choice(
                [*TEXTS_OF_PEOPLE, {"k\x00": ["\udc00", 1e300, True]}, 7, [], "y" * 20_000]
            )
        if status == "failed":
            fields |= {"retryable": chance.random() < 0.8, "phase": chance.choice(["preparation", "execution"])}
        driven.status(trigger_id, status, agent_id, **fields)

    def _control(self, driven: Driven, agent_id: str, live: Sequence[str]) -> None:
        chance = self.random
        trigger_id = chance.choice(live) if live else "nobody"
        kind = chance.choices(
            ["configure", "pause", "resume", "archive", "reschedule", "resume_trigger", "approve"],
            [30, 8, 30, 4, 15, 20, 20],
        )[0]
        match kind:
            case "configure":
                settings: dict[str, Any] = {
                    "parallelism_limit": chance.choice([1, 3, 10, "unlimited", None]),
                    "max_backlog_depth": chance.choice([0, 3, 50, None]),
                    "owner": chance.choice(["owner", None]),
                    "display_name": chance.choice(["Name %", None]),
                    "agent_type": chance.choice(["x", None]),
                    "default_timeout_seconds": chance.choice([100, None]),
                    "run_budget": chance.choice([0, 2, 9, None, None]),
                    "default_environment_id": chance.choice(["e", None, None, None]),
                }
                driven.configure(agent_id, **{name: v for name, v in settings.items() if chance.random() < 0.4})
            case "reschedule":
                driven.control(kind, agent_id, trigger_id=trigger_id, available_at=_at(driven, chance.choice([-9, 60])))
            case "resume_trigger":
                on_busy = chance.choice([None, "queue", "ask", "force"])
                driven.control(kind, agent_id, trigger_id=trigger_id, **({"on_busy": on_busy} if on_busy else {}))
            case "approve":
                driven.control(kind, agent_id, trigger_id=trigger_id)
            case _:
                driven.control(kind, agent_id)

    def _odd(self, driven: Driven, agent_id: str) -> None:
        chance = self.random
        trigger = {"type": "trigger", "v": 1, "id": f"bad-{self._count}", "agent_id": agent_id, "conversation_id": "c"}
        bad = chance.choice(
            [
                b"\xff\xfe",
                b"not json \x00",
                b'{"type":"trigger"}',
                json.dumps({**trigger, "max_attempts": True}).encode(),
                json.dumps({**trigger, "created_at": "2026-03-01T10:00:00"}).encode(),
                json.dumps({**trigger, "v": 2}).encode(),
            ]
        )
        driven.send(TRIGGERS.name, bad, key=agent_id.encode())

    def _of(self, agent_id: str) -> Driven:
        return self.driven[partition_of(agent_id, self.partitions)]

    # What it wrote

    def transactions(self) -> Iterator[tuple[int, list[LogRecord]]]:
        """(partition, records) of what is new since the last time, as a worker commits it; offsets as Kafka gives them.

        Every transaction leaves a marker in each topic that it wrote to, and some were aborted: both are holes.
        """
        rest = {number: driven.outputs[self._taken.get(number, 0) :] for number, driven in self.driven.items()}
        self._taken = {number: len(driven.outputs) for number, driven in self.driven.items()}
        while any(rest.values()):
            number = self.random.choice([number for number, outputs in rest.items() if outputs])
            size = self.random.choice([1, 1, 2, 5, 40])
            outputs, rest[number] = rest[number][:size], rest[number][size:]
            records = []
            for output in outputs:
                if output.topic in PROJECTED:
                    position = output.topic, number
                    offset = self._next_offsets.get(position, 0)
                    self._next_offsets[position] = offset + 1
                    records.append(
                        LogRecord(
                            output.topic, number, offset, output.key, output.value, output.headers, T0 + 1000 * offset
                        )
                    )
            for topic in sorted({record.topic for record in records}):
                self._next_offsets[topic, number] += 1 + (self.random.random() < 0.1)
            if records:
                yield number, records

    def records(self) -> list[LogRecord]:
        """Everything new, in the order of its transactions."""
        return [record for _, records in self.transactions() for record in records]


def batch_of(records: Sequence[LogRecord], begins: Mapping[Position, int]) -> Batch:
    """A batch of these records, from where ``begins`` says (0 where it doesn't)."""
    ends = {(record.topic, record.partition): record.offset + 1 for record in records}
    return Batch(records, {position: begins.get(position, 0) for position in ends}, ends)


def _at(driven: Driven, seconds: float) -> str:
    return format_instant(driven.now + round(seconds * SECOND))
