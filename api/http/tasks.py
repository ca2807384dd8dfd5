"""Turns whose caller waits for the result: what becomes of them is read from the log as it is written.

``Outcomes`` listens to the one reader of the log that the process has. While somebody waits for an agent's trigger it
decodes the decisions of that agent; the end of the trigger is in one of them, its result in the texts.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Literal

from aiokafka import ConsumerRecord

from api.http.decisions import Log
from api.http.positions import LogPosition
from streams import DECISIONS
from streams.rules import events
from streams.rules.messages import Status

OutcomeState = Literal["finished", "failed", "stopped", "expired", "paused"]

TEXT_SECONDS_MAX: Final = 2.0
"""How long a result may be behind the decision that says it is there."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a trigger ended, or that it waits for a person.

    ``has_text``: its runner gave a result or an error with it; None: the decision has to be looked up.
    """

    state: OutcomeState
    position: LogPosition
    has_text: bool | None


@dataclass(slots=True, eq=False)
class Watch:
    """What has become of an agent's triggers since the watch began."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    is_ending: bool = False
    """The service is being stopped: whoever waits is to be told at once."""

    async def outcome(self, trigger_id: str, until_seconds: float) -> Outcome | None:
        """How the trigger ended; None if it hasn't by the event loop's time ``until_seconds``."""
        loop = asyncio.get_running_loop()
        while trigger_id not in self.outcomes:
            if self.is_ending:
                return None
            self.changed.clear()
            try:
                async with asyncio.timeout_at(max(until_seconds, loop.time())):
                    await self.changed.wait()
            except TimeoutError:
                return None
        return self.outcomes[trigger_id]


class Outcomes:
    """Everybody in this process who waits for a trigger's end."""

    def __init__(self, log: Log) -> None:
        self._watches: defaultdict[bytes, set[Watch]] = defaultdict(set)
        self._is_ending = False
        log.listen(self._take)

    def end(self) -> None:
        """Let nobody wait any longer: the service is being stopped."""
        self._is_ending = True
        for watches in self._watches.values():
            for watch in watches:
                watch.is_ending = True
                watch.changed.set()

    @contextmanager
    def watching(self, agent_id: str) -> Iterator[Watch]:
        """Note what becomes of the agent's triggers while the block lasts."""
        watch, key = Watch(is_ending=self._is_ending), agent_id.encode()
        self._watches[key].add(watch)
        try:
            yield watch
        finally:
            self._watches[key].discard(watch)
            if not self._watches[key]:
                del self._watches[key]

    def _take(self, record: ConsumerRecord) -> None:
        watches = self._watches.get(record.key) if record.topic == DECISIONS.name else None
        if not watches:
            return
        decision = events.read_decision(record.value)
        position = LogPosition({record.partition: record.offset + 1})
        for event in decision.events:
            state = outcome_of(event)
            if state is not None:
                outcome = Outcome(state, position, has_text(decision, event))
                for watch in watches:
                    watch.outcomes[event.trigger_id] = outcome  # type: ignore[union-attr]
                    watch.changed.set()


def has_text(decision: events.Decision, event: events.Event) -> bool:
    """Whether the runner gave a result or an error with the word that led to the event of the decision.

    The same decision may tell of others, whose time was over: with them nobody gave anything.
    """
    command, execution_id = decision.command, getattr(event, "execution_id", None)
    if not isinstance(command, Status) or execution_id is None:
        return False
    is_its_own = command.execution_id in (None, execution_id)
    return is_its_own and (command.result is not None or command.error is not None)


def end_has_text(decision: events.Decision, trigger_id: str) -> bool:
    """The same of the trigger's end, which is in the decision."""
    return any(
        event.trigger_id == trigger_id and has_text(decision, event)  # type: ignore[union-attr]
        for event in decision.events
        if outcome_of(event) is not None
    )


def outcome_of(event: events.Event) -> OutcomeState | None:
    """The state into which an event brings its trigger, if that lasts without a runner."""
    match event:
        case events.Finished() | events.Replied():
            return "finished"
        case events.AttemptFailed():
            return "failed" if event.final else None
        case events.LeaseExpired():
            return event.final
        case events.PayloadLost():
            return "failed" if event.final else None
        case events.Stopped():
            return "stopped"
        case events.Expired():
            return "expired"
        case events.TriggerPaused():
            return "paused"
        case _:
            return None
