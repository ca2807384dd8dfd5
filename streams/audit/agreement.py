"""Whether deciders say the same of each other: what one has received, the other has sent.

A claim is known by its site, its agent and its number, which no other claim of the agent has. What crosses: behind a
claim that a site has handled lies the agent's ``claimed``, behind a release its ``returned``, with the same word
whether an attempt had run; behind what an agent was told lies the site's ``claim_granted`` or ``claim_degraded``. So
the folders and workers that sites gave out are those of the attempts that ran. What was ignored had no effect.

Between agents (E2): behind a conversation that an agent was asked to watch lies the acceptance of a trigger that
depends on it, behind one that it need not watch any more the end of that trigger, behind what a trigger was told of a
conversation the ``told`` of the other agent. These are known by the event that their cause names.

Partitions may be read in any order: what was sent waits here for what was received and the other way round, and both
are forgotten once they have met. What is under way at the end, or came too late, was sent only, which is no fault.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from streams import DECISIONS, SITE_DECISIONS
from streams.rules import events, site_events, verdicts
from streams.rules.messages import Trigger
from streams.rules.site_messages import Claim, Degraded, Denied, Granted, Release, Resolved, Unwatch, Watch


class Said(NamedTuple):
    """One thing that crosses between an agent and a site."""

    what: Literal["claim", "release", "release after an attempt", "granted", "degraded"]
    site: str
    agent_id: str
    n: int


class Word(NamedTuple):
    """One thing that crosses between two agents: event ``event`` of the sender's decision ``seq`` sent it."""

    word: Literal["watch", "unwatch", "resolved"]
    sender: str
    seq: int
    event: int
    agent_id: str
    """Whom it was sent to."""
    trigger_id: str
    conversation_id: str
    outcome: str = ""


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
    words_sent: list[Word] = field(default_factory=list)
    words_received: list[tuple[Word, Received]] = field(default_factory=list)
    depends_on: list[tuple[str, str, list[tuple[str, str]]]] = field(default_factory=list)


class Agreement:
    """Of all partitions; give it to each partition's verifiers, and set ``partition`` before."""

    def __init__(self, stored: StoredAgreement | None = None) -> None:
        stored = stored or StoredAgreement()
        self.partition = 0
        self._sent: set[Said | Word] = {*stored.sent, *stored.words_sent}
        self._received: dict[Said | Word, Received] = dict([*stored.received, *stored.words_received])
        self._sites: dict[tuple[str, int], str] = {(agent_id, n): site for agent_id, n, site in stored.sites}
        """Where the agents' claims are that have not ended, by agent and number."""
        self._depends_on: dict[tuple[str, str], dict[tuple[str, str], None]] = {
            (agent_id, trigger_id): dict.fromkeys(found) for agent_id, trigger_id, found in stored.depends_on
        }
        """By live trigger that depends on any: the conversations that are not known to have finished."""

    def stored(self) -> StoredAgreement:
        """What has not met yet."""
        sites = [(agent_id, n, site) for (agent_id, n), site in self._sites.items()]
        received = self._received.items()
        return StoredAgreement(
            sorted(said for said in self._sent if isinstance(said, Said)),
            [(said, where) for said, where in received if isinstance(said, Said)],
            sites,
            sorted(word for word in self._sent if isinstance(word, Word)),
            [(word, where) for word, where in received if isinstance(word, Word)],
            [(*id, list(found)) for id, found in self._depends_on.items()],
        )

    def take_agent(self, decision: events.Decision, offset: int) -> None:
        """What an agent's decision has sent and received."""
        agent_id, command, cause = decision.agent_id, decision.command, decision.cause
        if isinstance(command, _WORDS_OF_SITES) and decision.ignored is None:
            assert isinstance(cause, verdicts.SenderCause)
            where = Received(DECISIONS.name, self.partition, offset, agent_id, decision.seq)
            self._receive(Said(command.type, cause.decider, agent_id, command.n), where)
        elif isinstance(command, _WORDS_OF_AGENTS) and decision.ignored is None:
            self._take_word(decision, command, Received(DECISIONS.name, self.partition, offset, agent_id, decision.seq))
        for index, event in enumerate(decision.events):
            if isinstance(event, events.Claimed):
                self._sites[agent_id, event.n] = event.site
                self._send(Said("claim", event.site, agent_id, event.n))
            elif isinstance(event, events.Returned):
                site = self._sites.pop((agent_id, event.n))
                if not isinstance(command, Denied):  # then the site has ended it
                    self._send(Said(_release(event.started), site, agent_id, event.n))
            else:
                self._send_words(decision, index, event)

    def _take_word(self, decision: events.Decision, command: Watch | Unwatch | Resolved, where: Received) -> None:
        cause, agent_id = decision.cause, decision.agent_id
        assert isinstance(cause, verdicts.SenderCause)
        about = cause.decider, cause.seq, cause.index, agent_id, command.trigger_id, command.conversation_id
        if not isinstance(command, Resolved):
            self._receive(Word(command.type, *about), where)
            return
        self._receive(Word("resolved", *about, command.outcome or ""), where)
        if command.outcome == "finished":  # nobody watches it any more
            self._depends_on.get((agent_id, command.trigger_id), {}).pop((cause.decider, command.conversation_id), None)

    def _send_words(self, decision: events.Decision, index: int, event: events.Event) -> None:
        agent_id, command, by = decision.agent_id, decision.command, (decision.agent_id, decision.seq, index)
        if isinstance(event, events.Told):
            to = event.watcher_agent_id, event.trigger_id, event.conversation_id
            self._send(Word("resolved", *by, *to, event.outcome or ""))
        elif isinstance(event, events.Accepted) and isinstance(command, Trigger) and command.depends_on:
            found = dict.fromkeys((one.agent_id, one.conversation_id) for one in command.depends_on)
            self._depends_on[agent_id, command.id] = found
            for on_agent, conversation_id in found:
                self._send(Word("watch", *by, on_agent, command.id, conversation_id))
        elif self._depends_on and events.is_end(event):
            id: str = event.trigger_id  # type: ignore[union-attr]
            for on_agent, conversation_id in self._depends_on.pop((agent_id, id), ()):
                self._send(Word("unwatch", *by, on_agent, id, conversation_id))

    def take_site(self, decision: site_events.SiteDecision, offset: int) -> None:
        """What a site's decision has sent and received."""
        command = decision.command
        if decision.ignored is None and isinstance(command, _FROM_AGENTS):
            about = decision.site, command.agent_id, command.n
            said = Said("claim" if isinstance(command, Claim) else _release(command.started), *about)
            where = Received(SITE_DECISIONS.name, self.partition, offset, decision.site, decision.seq)
            self._receive(said, where)
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
                return where, _never_sent(said)
        return None

    def _send(self, said: Said | Word) -> None:
        if self._received.pop(said, None) is None:
            self._sent.add(said)

    def _receive(self, said: Said | Word, where: Received) -> None:
        if said in self._sent:
            self._sent.remove(said)
        else:
            self._received[said] = where


_WORDS_OF_SITES: Final = (Granted, Degraded)
_WORDS_OF_AGENTS: Final = (Watch, Unwatch, Resolved)
_FROM_AGENTS: Final = (Claim, Release)
_RELEASES: Final = ("release", "release after an attempt")


def _never_sent(said: Said | Word) -> str:
    if isinstance(said, Word):
        what = f"{said.word} of trigger {said.trigger_id!r} and conversation {said.conversation_id!r}"
        return f"{what}: event {said.event} of decision {said.seq} of agent {said.sender!r} sent none"
    sender = f"agent {said.agent_id!r}" if said.what in ("claim", *_RELEASES) else f"site {said.site!r}"
    return f"{said.what} {said.n} of agent {said.agent_id!r} at site {said.site!r}: {sender} sent none"


def _release(started: bool) -> Literal["release", "release after an attempt"]:
    return "release after an attempt" if started else "release"
