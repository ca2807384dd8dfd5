"""Checks the committed log of a simulated cluster: what ``berth verify`` checks, and what the site protocol asserts.

I1 to I11 of the site protocol are counted from decisions and messages alone (``agent_book``, ``site_book``); only
"nobody waits beside room" (I4) looks at the indexes, which are then compared with the fold of the log (I8).
"""

import json
from collections import Counter, defaultdict
from typing import Any, NamedTuple

from streams import CLAIMS, DECISIONS, SIGNALS, SITE_DECISIONS
from streams.audit.agreement import Agreement
from streams.audit.verify import Verifier
from streams.audit.verify_sites import SiteVerifier
from streams.rules.limits import STEP_CHANGES_MAX
from tests.simulation.agent_book import NOT_OF_OWN_TRIGGERS, AgentBook
from tests.simulation.cluster import Cluster
from tests.simulation.site_book import SiteBook
from tests.states import check_room, content, without_leases

MESSAGES_PER_CHANGE = 4
"""claim, waiting, granted, release"""
BETWEEN_AGENTS = ("watch", "unwatch", "resolved")
TriggerId = tuple[str, str]


class UnderWay(NamedTuple):
    """A message between an agent and a site, until its reader has committed that it read it."""

    kind: str
    n: int
    topic: str
    partition: int
    offset: int


class Checker:
    """Follows the log as it is committed. Whoever changes the cluster calls ``check`` after each commit."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.agreement = Agreement()
        self.verifiers = [Verifier(agreement=self.agreement) for _ in range(cluster.partitions)]
        self.site_verifiers = [SiteVerifier(agreement=self.agreement) for _ in range(cluster.partitions)]
        self.agents: defaultdict[str, AgentBook] = defaultdict(AgentBook)
        self.sites: defaultdict[str, SiteBook] = defaultdict(SiteBook)
        self.running: dict[str, TriggerId] = {}
        self.counts: Counter[str] = Counter()
        """Events by type, refusals as "refused <code>", messages as "sent <type>"."""
        self._read: Counter[tuple[str, int]] = Counter()
        self._under_way: defaultdict[TriggerId, list[UnderWay]] = defaultdict(list)
        self._messages: Counter[TriggerId] = Counter()
        self._asked_again: Counter[TriggerId] = Counter()
        """Recalls and lost folders: what a site says of its own accord."""
        self._said: set[tuple[TriggerId, int, str]] = set()

    def check(self, number: int) -> None:
        """The owner of partition ``number`` has committed, or crashed."""
        touched: dict[TriggerId, None] = {}
        agents: dict[str, None] = {}
        sites: dict[str, None] = {}
        self.agreement.partition = number
        for value, offset in self._new(DECISIONS.name, number):
            violation = self.verifiers[number].check(value, offset)
            assert violation is None, violation
            decision = json.loads(value)
            agents[decision["agent_id"]] = None
            touched.update(dict.fromkeys(self._decision(decision)))
        for value, offset in self._new(SITE_DECISIONS.name, number):
            violation = self.site_verifiers[number].check(value, offset)
            assert violation is None, violation
            decision = json.loads(value)
            sites[decision["site"]] = None
            self._count(decision)
            self.sites[decision["site"]].read(decision)
            touched.update(dict.fromkeys(_triggers_of(decision)))
        for topic in (CLAIMS.name, SIGNALS.name):
            for other in range(self.cluster.partitions):
                for value, offset in self._new(topic, other):
                    self._message(json.loads(value), topic, other, offset)
        for id in touched:
            self._check_agreement(id)
        self._check_idle(number, agents, sites)

    def _new(self, topic: str, number: int) -> list[tuple[bytes, int]]:
        records = self.cluster.log[topic, number]
        read = self._read[topic, number]
        self._read[topic, number] = len(records)
        return [(record.value or b"", record.offset) for record in records[read:]]

    # Reading

    def _count(self, decision: dict[str, Any]) -> None:
        for event in decision.get("events", ()):
            self.counts[event["type"]] += 1
            if event["type"] == "refused":
                self.counts[f"refused {event['code']}"] += 1
        if "refusal" in decision:
            self.counts[f"refused {decision['refusal']['code']}"] += 1
        if decision["command"]["type"] == "continue":
            self.counts["continued"] += 1

    def _decision(self, decision: dict[str, Any]) -> list[TriggerId]:
        agent_id = decision["agent_id"]
        self._count(decision)
        assert len(decision.get("events", ())) <= 3 * (STEP_CHANGES_MAX + 2)
        book = self.agents[agent_id]
        book.read(decision)
        for event in decision.get("events", ()):
            if event["type"] == "dispatched":
                self._starts((agent_id, event["trigger_id"]), event["execution_id"])
            elif "execution_id" in event and event["type"] != "stop_requested":
                assert self.running.pop(event["execution_id"]) == (agent_id, event["trigger_id"]), "I5: it ends once"
        return _triggers_of(decision)

    def _starts(self, id: TriggerId, execution_id: str) -> None:
        mine = self.agents[id[0]].lives[id[1]]
        for other_id in self.running.values():
            other = self.agents[other_id[0]].lives[other_id[1]]
            assert not mine.overlaps(other), f"I2: {id} and {other_id} run in overlapping folders"
        self.running[execution_id] = id

    def _message(self, message: dict[str, Any], topic: str, partition: int, offset: int) -> None:
        kind, id = message["type"], (message["agent_id"], message["trigger_id"])
        self.counts[f"sent {kind}"] += 1
        if kind in BETWEEN_AGENTS:
            return
        n = message["n"]
        self._under_way[id].append(UnderWay(kind, n, topic, partition, offset))
        self._messages[id] += 1
        if kind in ("recall", "degraded"):
            self._asked_again[id] += 1
        else:
            assert (id, n, kind) not in self._said, f"I10: {kind} of claim {n} of {id} was sent twice"
            self._said.add((id, n, kind))

    # Checking

    def _check_agreement(self, id: TriggerId) -> None:
        """I3: what the agent and the site believe of a claim is the same, or the news of it is under way. I10."""
        positions = self.cluster.positions
        under_way = [one for one in self._under_way[id] if one.offset >= positions[one.partition].get(one.topic, 0)]
        self._under_way[id] = under_way
        book = self.agents[id[0]]
        life = book.lives.get(id[1])
        found = [site.claims[id] for site in self.sites.values() if id in site.claims]
        assert len(found) <= 1
        claim = found[0] if found else None
        n = life.n if life is not None else None
        coming = {one.kind for one in under_way if one.n == n}
        at_site = claim is not None and claim.n == n
        if life is not None and life.claim_state in ("asking", "standing"):
            assert at_site or coming & {"claim", "denied"}, f"I3: {id} waits for an answer that nobody will give"
            assert not (at_site and claim and claim.granted) or "granted" in coming, f"I3: a grant of {id} was not sent"
            assert not (at_site and life.claim_state == "asking") or coming & {"granted", "waiting"}, f"I3: {id} asks"
            answers = {"claim", "granted", "waiting", "denied"}
            assert not life.is_mute or coming & answers, f"I3: the answer to the mute {id} is not under way"
        elif life is not None and life.claim_state is not None:
            assert at_site and claim is not None and claim.granted, f"I3: {id} has no grant any more"
        if claim is not None and claim.n != n:
            released = any(one.kind == "release" and one.n == claim.n for one in under_way)
            assert released, f"I3: claim {claim.n} of {id} is left at the site"
        changes = book.changes.get(id[1], 0) + self._asked_again[id]
        assert self._messages[id] <= MESSAGES_PER_CHANGE * (1 + changes), (
            f"I10: {self._messages[id]} messages for {id} after {changes} changes"
        )

    def _check_idle(self, number: int, agents: dict[str, None], sites: dict[str, None]) -> None:
        """I4, I5: who can go on does; what is left over is noted, and comes next (I7)."""
        owner = self.cluster.owners[number]
        if owner is None:
            return
        partition = owner.partition
        now = max(self.cluster.now - owner.clock_behind, partition.at)
        for agent_id in agents:
            agent = partition.agents[agent_id]
            check_room(agent, now, partition.next_deadline_us())
            self.agents[agent_id].must_continue = agent.row.todo is not None
        for site_id in sites:
            row = partition._sites.sites[site_id].row
            self.sites[site_id].must_continue = bool(row.todo or row.todo_grant)
            if not self.sites[site_id].must_continue:
                self.sites[site_id].check_given_out()

    def check_end(self) -> None:
        """Every grant and claim that was booked was sent, and the rows are the fold of the log (I2, I8).

        What was received was sent, and nobody is watched for who has ended (E2): nothing is under way any more.
        """
        assert self.agreement.finish() is None, self.agreement.finish()
        for booked, sent in (("claim_granted", "granted"), ("claimed", "claim"), ("claim_recalled", "recall")):
            assert self.counts[booked] == self.counts[f"sent {sent}"], f"{booked} and {sent}"
        for number in range(self.cluster.partitions):
            partition = self.cluster.restored(number, self.cluster.now)
            for agent_id, agent in partition.agents.items():
                ledger = self.verifiers[number]._ledgers[agent_id]
                ledger.agent.row.prev = ledger.sha256
                assert content(without_leases(ledger.agent)) == content(without_leases(agent)), agent_id
                for conversation_id, watchers in agent.watches.items():
                    for watcher in watchers:
                        lives = watcher.trigger_id in self.agents[watcher.agent_id].lives
                        assert lives, f"E2: {agent_id} still watches {conversation_id} for {watcher}"

    def unfinished(self) -> list[tuple[TriggerId, str]]:
        """Live triggers and their states."""
        return [((agent, id), life.state) for agent, book in self.agents.items() for id, life in book.lives.items()]


def _triggers_of(decision: dict[str, Any]) -> list[TriggerId]:
    """Triggers that a decision of an agent or a site is about."""
    agent_id, command = decision.get("agent_id"), decision["command"]
    found = [
        (event.get("agent_id", agent_id), event["trigger_id"])
        for event in decision.get("events", ())
        if "trigger_id" in event and event["type"] not in NOT_OF_OWN_TRIGGERS
    ]
    if "trigger_id" in command and command["type"] not in BETWEEN_AGENTS:
        found.append((command.get("agent_id", agent_id), command["trigger_id"]))
    return found
