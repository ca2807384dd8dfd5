"""docs/http-api.md names every address and every code, and nothing that isn't there."""

import re
from pathlib import Path

from api.http.app import create_app
from streams.rules.events import REFUSAL_CODES
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


def test_every_code_in_the_source_is_described_and_the_other_way_round() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "api" / "http").rglob("*.py"))
    quoted = set(re.findall(r'"([a-z]+(?:_[a-z]+)+)"', source))
    table = DOCUMENT.partition("| status | code |")[2]
    described = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", "".join(re.findall(r"\| \d{3} \| (.*?) \|", table))))
    raised = set(re.findall(r'Problem\(\s*\d{3}, "(\w+)"|(?:invalid|unavailable)\(\s*"(\w+)"', source))
    codes = {code for pair in raised for code in pair if code}
    assert codes <= described
    assert described <= quoted | set(REFUSAL_CODES)
