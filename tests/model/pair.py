"""The real partition and the naive models side by side: the same input to both, and a comparison after every step.

Agents are compared with ``NaiveAgent``, sites with ``PlainSite``. What they tell each other lies there until it is
delivered, in any order that keeps that of each pair; both sides must have said the same.
"""

import json
from collections import Counter
from typing import Any

from pydantic import TypeAdapter

from streams import CLAIMS, SIGNALS, SITE_CONTROLS
from streams.codec import Headers, Output
from streams.rules import events
from streams.rules.agent.rows import TriggerRow
from streams.rules.agent.state import Agent
from streams.rules.agent.timers import lease_deadline
from streams.rules.messages import LOGGED
from streams.rules.site_messages import Claim, ClaimRecord, SiteControlRecord
from tests.driving import T0, Driven, Json
from tests.model.naive import NaiveAgent
from tests.model.plain_site import Answer, PlainSite
from tests.model.turns import Sent, Verdict
from tests.model.work import SECOND

NO_STATUS_REASONS = {"stale", "after_final", "duplicate"}
CLAIM_RECORD: TypeAdapter[ClaimRecord] = TypeAdapter(ClaimRecord)
SITE_CONTROL: TypeAdapter[SiteControlRecord] = TypeAdapter(SiteControlRecord)


class Pair:
    """``driven`` is the real one; ``naive`` the models of its agents, ``sites`` those of its sites."""

    def __init__(self, default_limit: int | str, twice: bool = False, pool: int = 2) -> None:
        self.driven = Driven(default_limit, delivers=False, pool=pool)
        self.default_limit = default_limit
        self.twice = twice
        self.naive: dict[str, NaiveAgent] = {}
        self.sites = {"default": PlainSite(pool), "elsewhere": PlainSite(0, is_known=False)}
        self.loses_the_next = False
        """The next record is handled, and its owner crashes before it writes."""
        self._retries: dict[tuple[str, str, int], int] = {}
        self._seen = 0
        self._named = 0
        self._said = 0
        self._crashes_under_way = 0
        self._silence_from = T0

    @property
    def seconds(self) -> float:
        """Since T0."""
        return (self.driven.now - T0) / SECOND

    def model(self, agent_id: str) -> NaiveAgent:
        if agent_id not in self.naive:
            self.naive[agent_id] = NaiveAgent(self.default_limit, lambda id, n: self._retries[agent_id, id, n])
            self.naive[agent_id].silence_from = self._silence_from
        return self.naive[agent_id]

    def executions(self, agent_id: str) -> list[str]:
        return list(self.model(agent_id).executions) if agent_id in self.naive else []

    # Both

    def send(self, topic: str, value: Json, via: str = "kafka") -> None:
        for _ in range(2 if self.twice else 1):
            headers: Headers = (("via", b"http"),) if via == "http" else ()
            decisions = self._sent(topic, value, headers)
            self._learn()
            verdict = self.model(value["agent_id"]).handle(value, self.driven.now, via)
            self._name()
            self._judge(decisions, verdict)
            self._compare_messages()

    def _sent(self, topic: str, value: Json, headers: Headers) -> list[events.Decision]:
        if not self.loses_the_next:
            return self.driven.send(topic, value, headers=headers)
        before = len(self.driven.decisions)
        with self.driven.held():
            self.driven.send(topic, value, headers=headers)
            self._crashed()
        self.loses_the_next = False
        return self.driven.decisions[before:]

    def site_control(self, kind: str, site: str = "default", /, **fields: Any) -> None:
        value = {"type": kind, "v": 1, "id": self.driven.new_id("z"), "site": site, "requested_by": "u", **fields}
        self.driven.send(SITE_CONTROLS.name, value, key=site.encode())
        model = self.sites[site]
        if model.is_known or kind == "configure_site":
            model.control(SITE_CONTROL.validate_json(json.dumps(value)), self.driven.now)
        self._compare_messages()

    def deliver(self, which: int) -> None:
        """One of what deciders told each other; of each pair the oldest."""
        oldest: dict[tuple[str, str, str], int] = {}
        for index, output in enumerate(self.driven.undelivered):
            oldest.setdefault(_route(output), index)
        if oldest:
            self._deliver(sorted(oldest.values())[which % len(oldest)])

    def deliver_all(self) -> None:
        while self.driven.undelivered:
            self._deliver(0)

    def _deliver(self, index: int) -> None:
        output = self.driven.undelivered.pop(index)
        self.driven.undelivered.insert(0, output)
        self.driven.deliver()
        self._learn()
        value = json.loads(output.value or b"")
        if output.topic == CLAIMS.name:
            message = CLAIM_RECORD.validate_json(output.value or b"", context=LOGGED)
            model = self.sites[message.site]
            model.claim(message) if isinstance(message, Claim) else model.release(message)
        else:
            self.model(value["agent_id"]).answer(value, self.driven.now)
        self._name()
        self._compare_messages()

    def _compare_messages(self) -> None:
        """Agents and sites said the same in this step as their models."""
        new = [(output.topic, json.loads(output.value or b"")) for output in self.driven.messages[self._said :]]
        self._said = len(self.driven.messages)
        by_agents: list[tuple[str, Sent]] = []
        by_sites: list[Answer] = []
        for topic, value in new:
            if topic == SIGNALS.name and value["type"] not in ("watch", "unwatch", "resolved"):
                by_sites.append((value["type"], value["agent_id"], value["trigger_id"], value["n"]))
            else:
                by_agents.append((value["sender"]["decider"], _sent_by_agent(value)))
        expected = [(agent_id, sent) for agent_id, model in self.naive.items() for sent in model.sent]
        answers = [answer for model in self.sites.values() for answer in model.answers]
        for agent in self.naive.values():
            agent.sent.clear()
        for site in self.sites.values():
            site.answers.clear()
        assert sorted(by_agents, key=repr) == sorted(expected, key=repr)
        assert by_sites == answers

    def advance(self, seconds: float) -> None:
        until = self.driven.now + round(seconds * SECOND)
        now = self.driven.now
        self.driven.advance_to(until)
        self._learn()
        agents = list(self.naive.values())
        self._fire(now)
        while True:
            times = [time for agent in agents if (time := agent.next_time(now)) is not None and time <= until]
            if not times:
                break
            now = max(now, min(times))
            self._fire(now)
        self._name()
        self._compare_messages()

    def fire(self) -> None:
        self.driven.fire()
        self._learn()
        self._fire(self.driven.now)
        self._name()
        self._compare_messages()

    def _fire(self, now: int) -> None:
        for agent in self.naive.values():
            agent.fire(now)

    def skip(self, seconds: float) -> None:
        self.driven.skip(seconds)

    def crash(self) -> None:
        self._crashed()

    def _crashed(self) -> None:
        self._crashes_under_way += bool(self.driven.undelivered)
        self.driven.crash()
        self._silence_from = self.driven.now
        for agent in self.naive.values():
            agent.silence_from = self.driven.now

    # What the model can't know

    def _learn(self) -> None:
        """Retry times, which must lie within the bounds of F5."""
        for decision in self.driven.decisions[self._seen :]:
            for event in decision.events:
                if isinstance(event, events.AttemptFailed | events.LeaseExpired) and event.retry_at is not None:
                    row = self.driven.agent(decision.agent_id)
                    attempt = self._attempt_of(event.execution_id)
                    times = (
                        max(event.failures + event.absences, 1)
                        if isinstance(event, events.LeaseExpired)
                        else (event.failures)
                    )
                    full = min(5 * 2 ** (times - 1), 900) * SECOND
                    assert 0.9 * full <= event.retry_at - decision.at <= full, event
                    self._retries[decision.agent_id, event.trigger_id, attempt] = event.retry_at
                    assert row is not None
        self._seen = len(self.driven.decisions)

    def _attempt_of(self, execution_id: str) -> int:
        return int(next(d["attempt"] for d in self.driven.dispatches if d.get("execution_id") == execution_id))

    def _name(self) -> None:
        new = self.driven.dispatches[self._named :]
        self._named = len(self.driven.dispatches)
        for agent_id, agent in self.naive.items():
            own = [d for d in new if d["type"] == "dispatch" and d["agent_id"] == agent_id]
            assert [(d["trigger_id"], d["attempt"], d["slot_number"], d["forced"]) for d in own] == (
                agent.dispatches
            ), f"dispatches of {agent_id}"
            agent.dispatches.clear()
            agent.name([d["execution_id"] for d in own])

    def _judge(self, decisions: list[events.Decision], verdict: Verdict) -> None:
        if verdict[0] == "nothing":
            assert not decisions, decisions
            return
        decision = decisions[0]
        if verdict[0] == "refused":
            assert decision.refusal is not None
            assert (decision.refusal.code, decision.events) == (verdict[1], ())
        elif verdict[0] == "ignored":
            assert decision.ignored is not None, decision
            assert decision.events == ()
            if verdict[1] == "stale/after_final/duplicate":
                assert decision.ignored.reason in NO_STATUS_REASONS
            else:
                assert decision.ignored.reason == verdict[1]
        else:
            assert decision.refusal is None, decision.refusal
            assert decision.ignored is None, decision.ignored
            for event in decision.events:
                if isinstance(event, events.Accepted) and event.position == 0:
                    ended = any(isinstance(other, events.Expired) for other in decision.events)
                    assert ended or any(isinstance(other, events.Dispatched) for other in decision.events)

    def happened(self) -> Counter[str]:
        """Events by type, and refusals as "refused <code>"."""
        found: Counter[str] = Counter({"crashed with messages under way": self._crashes_under_way})
        decided = [(one.events, one.refusal) for one in self.driven.decisions]
        decided += [(one.events, one.refusal) for one in self.driven.site_decisions]  # type: ignore[misc]
        for emitted, refusal in decided:
            found.update(event.type for event in emitted)
            if refusal is not None:
                found[f"refused {refusal.code}"] += 1
        found.update(f"refused {event.code}" for event in self.driven.events_of(events.RefusedLater))
        found.update("forced" for event in self.driven.events_of(events.Dispatched) if event.forced)
        return found

    # After every step

    def compare(self) -> None:
        self.driven.check()
        for agent_id, model in self.naive.items():
            if agent_id not in self.driven.partition.agents:
                assert not (model.exists or model.known), "nothing was ever sent to it"
                continue
            assert real_state(self.driven, agent_id) == naive_state(model), agent_id
        for site in self.driven.partition._sites:
            self.sites[site.site_id].same_as(site)


def _route(output: Output) -> tuple[str, str, str]:
    """Who sent it to whom."""
    return output.topic, json.loads(output.value or b"")["sender"]["decider"], (output.key or b"").decode()


def _sent_by_agent(value: Json) -> Sent:
    match value["type"]:
        case "claim":
            return "claim", value["site"], value["trigger_id"], value["n"], bool(value.get("ask"))
        case "release":
            return "release", value["site"], value["trigger_id"], value["n"], value["started"]
        case "watch" | "unwatch" as kind:
            return kind, value["agent_id"], value["trigger_id"], value["conversation_id"], None
        case _:
            about = value["agent_id"], value["trigger_id"], value["conversation_id"]
            return "resolved", *about, value.get("outcome")


def live_rows(agent: Agent) -> list[tuple[str, TriggerRow]]:
    return [(id, row) for id, row in agent.triggers.items() if row.state != "paused"]


def real_state(driven: Driven, agent_id: str) -> dict[str, Any]:
    agent = driven.partition.agents[agent_id]
    live = {
        id: (row.state, row.conversation_id, row.available_at, row.created_at, row.attempt, row.failures, row.absences)
        for id, row in agent.triggers.items()
    }
    return {
        "exists": agent.row.created,
        "settings": (agent.row.parallelism_limit, agent.row.serial, agent.row.run_budget)
        if agent.row.created
        else None,
        "ways": {id: (row.on_busy, row.approval_required and not row.approved) for id, row in live_rows(agent)},
        "claims": {id: (row.claim_n, row.claim_state, row.mute, row.late) for id, row in agent.triggers.items()},
        "blocked": {id: (row.is_blocked, row.failures_approved, row.degraded) for id, row in agent.triggers.items()},
        "told": {
            id: list(dict(zip(row.depends_on, row.outcomes, strict=True)).items()) for id, row in agent.triggers.items()
        },
        "watched": {
            id: {tuple(watcher): row.told for watcher, row in watchers.items()}
            for id, watchers in agent.watches.items()
        },
        "forced": {id for id, row in agent.triggers.items() if row.forced and row.state == "running"},
        "flags": (agent.row.paused, agent.row.archived),
        "live": live,
        "slots": {id: row.slot_number for id, row in agent.triggers.items() if row.state == "running"},
        "leases": {
            id: lease_deadline(row, agent.silence_from) for id, row in live_rows(agent) if row.state == "running"
        },
        "grace": {id: row.grace_until for id, row in agent.triggers.items() if row.grace_until},
        "waiting": [key.id.decode() for key in agent.waiting],
        "lines": {id: [trigger for _, trigger in line.placed] for id, line in agent.lines.items() if line.placed},
        "known": {key: (row.at, row.state if key[0] == "trigger" else "done") for key, row in agent.remembered.items()},
        "outcomes": {id: (row.outcome, row.at) for id, row in agent.conversations.items()},
    }


def naive_state(model: NaiveAgent) -> dict[str, Any]:
    running = model.running()
    return {
        "exists": model.exists,
        "settings": (model.set_limit, model.serial, model.budget) if model.exists else None,
        "ways": {work.id: (work.on_busy, work.needs_approval) for work in model.live if work.state != "paused"},
        "claims": {work.id: (work.n, work.claim, work.mute, work.late) for work in model.live},
        "blocked": {work.id: (work.is_blocked, work.failures_approved, work.degraded) for work in model.live},
        "told": {work.id: list(work.outcomes.items()) for work in model.live},
        "watched": {id: dict(watchers) for id, watchers in model.watches.items()},
        "forced": {work.id for work in running if work.forced},
        "flags": (model.paused, model.archived),
        "live": {
            work.id: (
                work.state,
                work.conversation,
                work.available,
                work.created,
                work.attempt,
                work.failures,
                work.absences,
            )
            for work in model.live
        },
        "slots": {work.id: work.slot for work in running},
        "leases": {work.id: model.lease_ends(work) for work in running},
        "grace": {work.id: work.grace for work in running if work.grace},
        "waiting": [work.id for work in model.waiting()],
        "lines": {
            work.conversation: [other.id for other in model.line(work.conversation)]
            for work in model.live
            if work.place is not None
        },
        "known": {
            key: (at, state)
            for key, (_, at, state) in model.known.items()
            if key[0] != "trigger" or model.work(key[1]) is None
        },
        "outcomes": dict(model.outcomes),
    }
