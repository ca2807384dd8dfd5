"""A trigger of the naive model, and how it reads what its sender said."""

import json
from dataclasses import dataclass
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
    def key(self) -> tuple[int, int, bytes]:
        return self.available, self.created, self.id.encode("utf-8")


def content(command: Json) -> str:
    """What the client asked for; null and absent are the same in a trigger, not in a control."""
    is_trigger = command["type"] == "trigger"
    kept = {
        name: value for name, value in command.items() if name not in NOT_CONTENT and not (is_trigger and value is None)
    }
    return json.dumps(kept, sort_keys=True)
