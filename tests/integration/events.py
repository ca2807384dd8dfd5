"""A client of /api/events for tests: it remembers its last id and comes back with it."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.brokers import WAIT_SECONDS

Json = dict[str, Any]


@dataclass
class Listener:
    """``told`` holds every decision that came, over all connections; ``ended_with`` how the last one was ended."""

    params: dict[str, Any] = field(default_factory=dict)
    told: list[Json] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    comments: int = 0
    ended_with: str | None = None
    connected: asyncio.Event = field(default_factory=asyncio.Event)

    async def listen(
        self, http: httpx.AsyncClient, is_enough: Callable[["Listener"], bool], timeout_seconds: float = WAIT_SECONDS
    ) -> None:
        """Connect, and read until it is enough or the service ends the stream. Then the connection is cut."""
        self.ended_with = None
        headers = {"Last-Event-ID": self.ids[-1]} if self.ids else {}
        async with (
            asyncio.timeout(timeout_seconds),
            http.stream("GET", "/api/events", params=self.params, headers=headers, timeout=None) as answer,
        ):
            assert answer.status_code == 200, await answer.aread()
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines: dict[str, str] = {}
            async for line in answer.aiter_lines():
                if line:
                    name, _, value = line.partition(":")
                    lines[name] = value.removeprefix(" ")
                    continue
                self._take(lines)
                lines = {}
                self.connected.set()
                if is_enough(self):
                    return

    def _take(self, lines: dict[str, str]) -> None:
        if lines.get("event") == "end":
            self.ended_with = json.loads(lines["data"])["code"]
            return
        self.comments += "" in lines
        if "data" in lines:
            self.told.append(json.loads(lines["data"]))
            self.names.append(lines["event"])
        self.ids.append(lines["id"])


def decisions_by_key(told: list[Json]) -> dict[tuple[str, str], list[int]]:
    """Sequence numbers in the order in which they came, by agent and by site."""
    found: dict[tuple[str, str], list[int]] = {}
    for decision in told:
        kind = "agent_id" if "agent_id" in decision else "site"
        found.setdefault((kind, decision[kind]), []).append(decision["seq"])
    return found
