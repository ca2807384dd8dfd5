"""docs/http-api.md names every address, and none that isn't there."""

import re
from pathlib import Path

from api.http.app import create_app
from tests.tokens import AUTHENTICATION

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "http-api.md").read_text()


def addresses() -> set[tuple[str, str]]:
    paths = create_app("127.0.0.1:1", 8, "postgresql://nobody@127.0.0.1:1/nothing", AUTHENTICATION).openapi()["paths"]
    return {(method.upper(), path) for path, methods in paths.items() for method in methods}


def test_every_address_is_described() -> None:
    described = {
        (method, path.partition("?")[0])
        for method, path in re.findall(r"`(GET|POST|PUT|PATCH|DELETE) (/[^`]*)`", DOCUMENT)
    }
    ends = {("POST", f"/api/agents/{{agent_id}}/{word}") for word in ("pause", "resume", "archive")}
    short = {("POST", "/api/agents/{agent_id}/conversations/{conversation_id}")}  # "also without /messages"
    assert described | ends | short == addresses()
