"""A trigger of the naive model, and how it reads what its sender said."""

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

SECOND = 1_000_000
Json = dict[str, Any]
NOT_CONTENT = ("v", "decide_before", "content_sha256", "default_limit", "repeats")


def instant(text: str | None) -> int | None:
    if text is None:
        return None
    moment = datetime.fromisoformat(text)
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * SECOND + since.microseconds


@dataclass
class Work:
    """A trigger."""

    id: str
    conversation: str
    created: int
    available: int
    interactive: bool
    timeout: int
    heartbeat: int | None
    tries: int
    expires: int | None
    content: str
    on_busy: str = "queue"
    needs_approval: bool = False
    uses_site: str | None = None
    """The site where it must have a claim before it runs."""
    resources: Json = field(default_factory=dict)
    """What it says of the site, as it was sent."""
    decide_before: int | None = None
    outcomes: dict[tuple[str, str], str | None] = field(default_factory=dict)
    """By conversation that it depends on: as it was told last."""
    failures_approved: bool = False
    accepted: int = 0
    degraded: bool = False
    n: int | None = None
    claim: str | None = None
    """asking, standing, held, or granted while it runs."""
    asked: int = 0
    mute: bool = False
    late: int = 0
    forced: bool = False
    state: str = "waiting"
    place: tuple[int, int] | None = None
    attempt: int = 0
    failures: int = 0
    absences: int = 0
    execution: str | None = None
    slot: int | None = None
    dispatched: int | None = None
    lease: int | None = None
    seen: int | None = None
    grace: int | None = None

    @property
    def is_urgent(self) -> bool:
        """Its sender waits for the answer."""
        return self.on_busy in ("ask", "force") and self.state == "waiting"

    @property
    def is_blocked(self) -> bool:
        """By a missing approval, or by what it depends on."""
        allowed = ("finished", "failed", "stopped") if self.failures_approved else ("finished",)
        return self.needs_approval or any(outcome not in allowed for outcome in self.outcomes.values())

    def is_over(self, at: int) -> bool:
        return self.expires is not None and self.expires <= at

    @property
    def key(self) -> tuple[int, int, bytes]:
        return self.available, self.created, self.id.encode("utf-8")


def content(command: Json) -> str:
    """What the client asked for; null and absent are the same in a trigger, not in a control."""
    is_trigger = command["type"] == "trigger"
    kept = {
        name: value for name, value in command.items() if name not in NOT_CONTENT and not (is_trigger and value is None)
    }
    return json.dumps(kept, sort_keys=True)
