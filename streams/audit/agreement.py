"""Whether agents and sites say the same of each other: what one has received, the other has sent.

A claim is known by its site, its agent and its number, which no other claim of the agent has. What crosses: behind a
claim that a site has handled lies the agent's ``claimed``, behind a release its ``returned``, with the same word
whether an attempt had run; behind what an agent was told lies the site's ``claim_granted`` or ``claim_degraded``. So
the folders and workers that sites gave out are those of the attempts that ran. What was ignored had no effect.

Partitions may be read in any order: what was sent waits here for what was received and the other way round, and both
are forgotten once they have met. What is under way at the end, or came too late, was sent only, which is no fault.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from streams import DECISIONS, SITE_DECISIONS
from streams.rules import events, site_events
from streams.rules.site_messages import Claim, Degraded, Denied, Granted, Release


class Said(NamedTuple):
    """One thing that crosses between an agent and a site."""

    what: Literal["claim", "release", "release after an attempt", "granted", "degraded"]
    site: str
    agent_id: str
    n: int


class Received(NamedTuple):
    """Where the log says that something was received."""

    topic: str
    partition: int
    offset: int
    decider: str
    seq: int


@dataclass(frozen=True, slots=True)
class StoredAgreement:
    """What has not met yet, so that a reading can go on another day."""

    sent: list[Said] = field(default_factory=list)
    received: list[tuple[Said, Received]] = field(default_factory=list)
    sites: list[tuple[str, int, str]] = field(default_factory=list)


class Agreement:
    """Of all partitions; give it to each partition's verifiers, and set ``partition`` before."""

    def __init__(self, stored: StoredAgreement | None = None) -> None:
        stored = stored or StoredAgreement()
        self.partition = 0
        self._sent: set[Said] = set(stored.sent)
        self._received: dict[Said, Received] = dict(stored.received)
        self._sites: dict[tuple[str, int], str] = {(agent_id, n): site for agent_id, n, site in stored.sites}
        """Where the agents' claims are that have not ended, by agent and number."""

    def stored(self) -> StoredAgreement:
        """What has not met yet."""
        sites = [(agent_id, n, site) for (agent_id, n), site in self._sites.items()]
        return StoredAgreement(sorted(self._sent), list(self._received.items()), sites)

    def take_agent(self, decision: events.Decision, offset: int) -> None:
        """What an agent's decision has sent and received."""
        agent_id, command, cause = decision.agent_id, decision.command, decision.cause
        if isinstance(command, Granted | Degraded) and decision.ignored is None:
            assert isinstance(cause, events.SenderCause)
            where = Received(DECISIONS.name, self.partition, offset, agent_id, decision.seq)
            self._receive(Said(command.type, cause.decider, agent_id, command.n), where)
        for event in decision.events:
            if isinstance(event, events.Claimed):
                self._sites[agent_id, event.n] = event.site
                self._send(Said("claim", event.site, agent_id, event.n))
            elif isinstance(event, events.Returned):
                site = self._sites.pop((agent_id, event.n))
                if not isinstance(command, Denied):  # then the site has ended it
                    self._send(Said(_release(event.started), site, agent_id, event.n))

    def take_site(self, decision: site_events.SiteDecision, offset: int) -> None:
        """What a site's decision has sent and received."""
        command = decision.command
        where = Received(SITE_DECISIONS.name, self.partition, offset, decision.site, decision.seq)
        if decision.ignored is not None:
            pass
        elif isinstance(command, Claim):
            self._receive(Said("claim", decision.site, command.agent_id, command.n), where)
        elif isinstance(command, Release):
            self._receive(Said(_release(command.started), decision.site, command.agent_id, command.n), where)
        for event in decision.events:
            if isinstance(event, site_events.ClaimGranted):
                self._send(Said("granted", decision.site, event.agent_id, event.n))
            elif isinstance(event, site_events.ClaimDegraded):
                self._send(Said("degraded", decision.site, event.agent_id, event.n))

    def finish(self, ends: Mapping[tuple[str, int], int] | None = None) -> tuple[Received, str] | None:
        """The first thing that was received and never sent, in the order of reading, and what is wrong with it.

        ``ends``: by topic and partition, where the logs ended before the first of them was read. What was received
        later, beside live workers, may have been sent later than its sender's log was read.
        """
        for said, where in self._received.items():
            if ends is None or where.offset < ends[where.topic, where.partition]:
                sender = f"agent {said.agent_id!r}" if said.what in ("claim", *_RELEASES) else f"site {said.site!r}"
                return (
                    where,
                    f"{said.what} {said.n} of agent {said.agent_id!r} at site {said.site!r}: {sender} sent none",
                )
        return None

    def _send(self, said: Said) -> None:
        if self._received.pop(said, None) is None:
            self._sent.add(said)

    def _receive(self, said: Said, where: Received) -> None:
        if said in self._sent:
            self._sent.remove(said)
        else:
            self._received[said] = where


_RELEASES: Final = ("release", "release after an attempt")


def _release(started: bool) -> Literal["release", "release after an attempt"]:
    return "release after an attempt" if started else "release"
