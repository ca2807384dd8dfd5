"""The outermost layer: hosts, addresses, sizes and forms of bodies."""

import json
from collections.abc import AsyncIterator

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.http.intake import BODY_BYTES_MAX, JSON_DEPTH_MAX, check_json, decoded
from api.http.problems import Problem
from tests.unit.test_http_requests import client

TRIGGERS = "/api/agents/a/triggers"
AS_JSON = {"Content-Type": "application/json"}


def nested(depth: int, opening: str = "[", closing: str = "]") -> bytes:
    return f'{{"payload": {opening * (depth - 1)}{closing * (depth - 1)}}}'.encode()


def refused_as(body: bytes) -> str | None:
    try:
        check_json(body)
    except Problem as problem:
        return problem.code if problem.status == 400 else f"status {problem.status}"
    return None


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (nested(JSON_DEPTH_MAX), None),
        (nested(JSON_DEPTH_MAX + 1), "json_too_deep"),
        (b'{"payload":' * 32 + b"1" + b"}" * 32, None),
        (b'{"payload":' * 33 + b"1" + b"}" * 33, "json_too_deep"),
        (b"[" * 500_000, "json_too_deep"),
        (b'{"a":' * 150_000, "json_too_deep"),
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"{} {}", "invalid_json"),
        (b'{"a": NaN}', "invalid_json"),
        (b'{"a": Infinity}', "invalid_json"),
        (b'{"a": "\xff"}', "invalid_json"),
        (b'{"a": "\\ud800"}', "invalid_json"),
        (b'{"a": "\x00"}', "invalid_json"),
        (b'{"a": "x\\u0000y"}', "invalid_field"),
        (b'{"a\\u0000": 1}', "invalid_field"),
        (b'{"a": [[{"b": ["\\u0000"]}]]}', "invalid_field"),
        (b'{"a": "\\\\u0000"}', None),
        (b'{"a": "\\ud83d\\ude00"}', None),
    ],
    ids=lambda part: str(part)[:40],
)
def test_a_body_is_json_that_everything_behind_can_hold(body: bytes, code: str | None) -> None:
    assert refused_as(body) == code


@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: json.dumps(text).encode()))
def test_any_bytes_are_taken_or_refused(body: bytes) -> None:
    assert refused_as(body) in (None, "invalid_json", "json_too_deep", "invalid_field")


async def chunks(count: int, size: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b" " * size


async def test_a_body_over_the_limit_is_refused_while_it_comes_in() -> None:
    async with client() as http:
        answers = [
            await http.post(TRIGGERS, content=b" " * (BODY_BYTES_MAX + 1), headers=AS_JSON),
            await http.post(TRIGGERS, content=chunks(1000, 64 * 1024), headers=AS_JSON),
        ]
    assert [(answer.status_code, answer.json()["code"]) for answer in answers] == [(413, "body_too_large")] * 2


async def test_a_body_at_the_limit_is_read() -> None:
    body = b'{"on_buzy": 1}'.ljust(BODY_BYTES_MAX)
    async with client() as http:
        answer = await http.post(TRIGGERS, content=body, headers=AS_JSON)
    assert answer.json()["code"] == "unknown_field"


async def test_a_number_that_no_double_holds_is_refused() -> None:
    async with client() as http:
        answer = await http.post(TRIGGERS, content=b'{"payload": [1e999]}', headers=AS_JSON)
    assert (answer.status_code, answer.json()["code"], answer.json()["field"]) == (400, "invalid_field", "payload")


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
async def test_a_body_that_another_site_could_send_is_refused(content_type: str) -> None:
    async with client() as http:
        answer = await http.post(TRIGGERS, content=b"{}", headers={"Content-Type": content_type})
    assert (answer.status_code, answer.json()["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("host", ["example.org", "example.org:8080", "127.0.0.1.example.org", "10.0.0.1", ""])
async def test_another_name_for_this_machine_is_refused(host: str) -> None:
    async with client() as http:
        answer = await http.get("/healthz", headers={"Host": host})
    assert (answer.status_code, answer.json()["code"]) == (421, "host_not_served")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8080", "localhost:1", "LOCALHOST", "[::1]", "[::1]:8080"])
async def test_this_machine_is_served(host: str) -> None:
    async with client() as http:
        answer = await http.get("/nothing", headers={"Host": host})
    assert answer.json()["code"] == "not_found"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/api/agents/", 404, "not_found"),
        ("POST", "/api/agents/a", 405, "method_not_allowed"),
        ("DELETE", "/api/agents/slots", 405, "method_not_allowed"),
        ("PUT", "/readyz", 405, "method_not_allowed"),
        ("POST", TRIGGERS, 400, "missing_field"),
        ("GET", "/api/agents?limit=0", 400, "invalid_field"),
        ("GET", "/api/agents?limit=x", 400, "invalid_field"),
        ("GET", "/api/agents?cursor=x", 400, "invalid_field"),
        ("GET", "/api/agents?min_position=x", 400, "invalid_field"),
        ("GET", "/api/agents/%00", 400, "invalid_field"),
        ("GET", "/api/agents/%ff", 400, "invalid_field"),
        ("GET", f"/api/agents/{'x' * 201}", 400, "invalid_field"),
        ("GET", "/api/agents/a/queue?cursor=WyIxIl0", 400, "invalid_field"),
        ("GET", "/api/agents/a/queue?cursor=WyJ4IiwieSIsInoiXQ", 400, "invalid_field"),
        ("GET", "/dashboard/..%2Fapp.py", 404, "not_found"),
        ("GET", "/dashboard/__init__.py", 404, "not_found"),
    ],
)
async def test_what_goes_wrong_is_a_problem(method: str, path: str, status: int, code: str) -> None:
    async with client() as http:
        answer = await http.request(method, path)
    problem = answer.json()
    assert (answer.status_code, problem["code"], problem["status"]) == (status, code, status)
    assert answer.headers["content-type"] == "application/problem+json"
    assert {"type", "title", "detail"} <= set(problem)
    assert (status == 405) == ("allow" in answer.headers)


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=50))
def test_a_part_of_a_path_is_the_id_that_was_encoded(id: str) -> None:
    assert decoded(httpx.URL("http://h/", params={"x": id}).query.decode()[2:].replace("+", "%20")) == id


class _Broken:
    """Stands where the service is: whatever is asked of it fails."""

    def __getattr__(self, name: str) -> None:
        raise RuntimeError(f"the secret of the inside: {name}")


async def test_an_unexpected_error_tells_nothing_of_the_inside() -> None:
    app = client()._transport.app  # type: ignore[attr-defined]
    app.state.service = _Broken()
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        answer = await http.get("/api/agents")
    assert answer.status_code == 500
    assert answer.json()["code"] == "internal_error" and answer.json()["incident"]
    assert "secret" not in answer.text


async def test_the_page_and_its_parts_are_served_and_nothing_from_elsewhere_may_run_in_it() -> None:
    async with client() as http:
        page = await http.get("/")
        parts = [await http.get(f"/dashboard/{name}") for name in ("dashboard.css", "dashboard.js")]
    assert page.status_code == 200 and "<title>Berth</title>" in page.text
    assert [part.status_code for part in parts] == [200, 200]
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    for inline in ("<script>", "style=", "onclick="):
        assert inline not in page.text


async def test_a_name_that_the_service_is_known_by_is_answered_and_no_other() -> None:
    for hosts, host, expected in (
        ((), "berth.example.org", "host_not_served"),
        (("berth.example.org",), "Berth.Example.org:443", "not_found"),
        (("berth.example.org",), "localhost", "not_found"),
        (("berth.example.org",), "berth.example.org.evil.example", "host_not_served"),
        (("*",), "anything.example", "not_found"),
    ):
        async with client(hosts=hosts) as http:
            answer = await http.get("/nothing", headers={"Host": host})
        assert answer.json()["code"] == expected, (hosts, host)


async def test_pages_of_other_origins_may_ask_only_when_they_are_named() -> None:
    ask = {"Origin": "https://app.example.org", "Access-Control-Request-Method": "PUT"}
    async with client() as http:
        assert (await http.options("/api/agents/a", headers=ask)).status_code == 405
        answer = await http.get("/nothing", headers=ask)
        assert not [name for name in answer.headers if name.startswith("access-control")]
    async with client(origins=("https://app.example.org",)) as http:
        allowed = await http.options(
            "/api/agents/a", headers={**ask, "Access-Control-Request-Headers": "authorization,idempotency-key"}
        )
        other = await http.options("/api/agents/a", headers={**ask, "Origin": "https://evil.example.org"})
        asked = await http.get("/api/agents?limit=0", headers=ask)
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://app.example.org")
    assert "access-control-allow-credentials" not in allowed.headers
    assert other.status_code == 400 and "access-control-allow-origin" not in other.headers
    assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (400, "https://app.example.org")


@pytest.mark.parametrize("path", ["/", "/dashboard/dashboard.js", "/docs", "/api/agents/a", "/nothing"])
async def test_every_answer_tells_browsers_what_not_to_do(path: str) -> None:
    async with client() as http:
        answer = await http.get(path)
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["cache-control"] == ("no-cache" if path in ("/", "/dashboard/dashboard.js") else "no-store")
