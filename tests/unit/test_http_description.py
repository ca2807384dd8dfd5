"""/openapi.json: every address with every status, each with an example that has what its schema asks for."""

from typing import Any

import pytest

from api.http.app import create_app
from api.http.description import problems_of
from api.http.examples import EXAMPLES, PROBLEMS
from api.http.rights import RIGHTS
from tests.tokens import AUTHENTICATION

SCHEMA: dict[str, Any] = create_app(
    "127.0.0.1:1", 8, "postgresql://nobody@127.0.0.1:1/nothing", AUTHENTICATION
).openapi()
OPERATIONS = [(method.upper(), path) for path, methods in SCHEMA["paths"].items() for method in methods]
OTHERS = {
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/metrics"),
    ("GET", "/api/events"),
    ("POST", "/api/public/chat/{token}"),
    ("POST", "/api/agents/{agent_id}/public-links"),
}
"""Addresses whose routes say themselves what they answer."""


def test_it_is_openapi_3_1_and_names_every_address_once() -> None:
    assert SCHEMA["openapi"].startswith("3.1")
    assert set(EXAMPLES) == set(OPERATIONS) - OTHERS
    ids = [operation["operationId"] for methods in SCHEMA["paths"].values() for operation in methods.values()]
    assert len(ids) == len(set(ids))
    assert "ValidationError" not in str(SCHEMA)


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_every_status_has_an_example_that_its_schema_takes(method: str, path: str) -> None:
    operation = SCHEMA["paths"][path][method.lower()]
    responses = operation["responses"]
    assert any(int(status) < 300 for status in responses)
    is_open = RIGHTS[method, path].is_open
    assert operation["security"] == ([] if is_open else [{"token": []}])
    assert set(problems_of(method, path, is_open)) <= set(responses)
    for status, response in responses.items():
        assert response["description"]
        if (method, path) in OTHERS and status not in problems_of(method, path, is_open):
            continue
        [media] = response["content"].values()
        required = SCHEMA["components"]["schemas"]["Problem"] if int(status) >= 400 else media["schema"]
        assert set(required["required"]) <= set(media["example"])


def test_problems_are_shown_with_their_own_status() -> None:
    for status, (code, detail, members) in PROBLEMS.items():
        assert 400 <= status < 600
        assert code.replace("_", "").isalpha()
        assert detail
        assert "status" not in members
