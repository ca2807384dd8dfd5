"""What decisions of agents brought about, in numbers: for whoever measures, and no part of any decision. Pure."""

from collections import Counter
from dataclasses import dataclass, field

from streams.rules import events
from streams.rules.agent.step import Step
from streams.rules.messages import Status, Timer


@dataclass(slots=True)
class Tally:
    """Numbers since the tally began."""

    refusals: Counter[str] = field(default_factory=Counter)
    """By code, when they came or later."""
    ignored_statuses: Counter[str] = field(default_factory=Counter)
    """By reason."""
    forgotten: int = 0
    """Remembered ids that were forgotten."""
    freed_at_ms: list[int] = field(default_factory=list)
    """When the statuses were written that freed a slot which was given on at once."""

    def count(self, step: Step) -> None:
        """Most steps have nothing to count, and this is asked for each."""
        if step.settles:
            later = (event for event in step.emitted if isinstance(event, events.RefusedLater))
            self.refusals.update(event.code for event in later)
        if step.refusal is not None:
            self.refusals[step.refusal.code] += 1
        elif step.ignored is not None:
            if isinstance(step.command, Status):
                self.ignored_statuses[step.ignored.reason] += 1
        elif isinstance(step.command, Timer):
            self.forgotten += sum(len(event.ids) for event in step.emitted if isinstance(event, events.Forgotten))
