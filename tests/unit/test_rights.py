"""The table of rights: every address is in it, the document shows it, and each right means what the contract says."""

import re
from itertools import product
from pathlib import Path

import pytest
from fastapi.routing import APIRoute, iter_route_contexts

from api.http.app import create_app
from api.http.auth import ROLES, Caller, Role
from api.http.rights import (
    ADMIN,
    AUDIT,
    MAKE,
    OPERATE,
    OWN,
    PERSON,
    RIGHTS,
    RUN,
    SEE_ALL,
    SIGNED_IN,
    SYSTEM,
    USE,
    Right,
    Standing,
    judge,
    table,
)
from tests.tokens import AUTHENTICATION, bearer
from tests.unit.test_http_requests import client

DOCUMENT = Path(__file__).parents[2] / "docs" / "rights.md"
PEOPLE = ("person", "admin")
PROGRAMS = ("agent", "runner", "upstream", "system")


def declared() -> set[tuple[str, str]]:
    app = create_app("127.0.0.1:1", 8, "postgresql://nobody@127.0.0.1:1/nothing", AUTHENTICATION)
    return {
        (method, str(context.path))
        for context in iter_route_contexts(app.routes)
        if isinstance(context.route, APIRoute)
        for method in context.route.methods or ()
    }


def test_every_address_has_a_right_and_every_right_an_address() -> None:
    addresses = declared()
    assert len(addresses) > 20
    assert addresses == set(RIGHTS)


def test_only_what_holds_nothing_of_anybody_is_open() -> None:
    opened = {path for (_, path), right in RIGHTS.items() if right.is_open}
    assert opened <= {"/", "/dashboard/{name}", "/healthz", "/readyz", "/metrics", "/api/public/chat/{token}"}


async def test_an_address_without_a_right_is_refused_to_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {address: right for address, right in RIGHTS.items() if address != ("GET", "/api/agents")}
    monkeypatch.setattr("api.http.rights.RIGHTS", others)
    async with client() as http:
        answer = await http.get("/api/agents", headers=bearer("admin"))
    assert (answer.status_code, answer.json()["code"]) == (403, "role_required")


def test_the_document_shows_the_table_as_it_is() -> None:
    """Make it again: python -m api.http.rights"""
    shown = "\n".join(re.findall(r"^\|.*$", DOCUMENT.read_text(), re.MULTILINE))
    assert shown.strip() == table().strip()


def code(right: Right, role: Role, *, access: bool, standing: Standing = Standing.OTHER) -> str | None:
    caller = Caller("ann", role, frozenset("a") if access else frozenset("b"), 0.0)
    problem = judge(right, caller, "a", standing)
    return None if problem is None else problem.code


@pytest.mark.parametrize(("access", "standing"), list(product([True, False], Standing)))
@pytest.mark.parametrize("role", PROGRAMS)
def test_a_program_changes_no_settings_whatever_agent_it_names(role: Role, access: bool, standing: Standing) -> None:
    for right in (OWN, PERSON, MAKE):
        assert code(right, role, access=access, standing=standing) == "person_required"


@pytest.mark.parametrize(
    ("role", "access", "standing", "expected"),
    [
        ("person", True, Standing.MISSING, "agent_not_found"),
        ("person", False, Standing.MISSING, "agent_not_found"),
        ("person", False, Standing.OTHER, "access_denied"),
        ("person", False, Standing.OWNER, "access_denied"),
        ("person", True, Standing.OTHER, "owner_required"),
        ("person", True, Standing.OWNER, None),
        ("person", True, Standing.UNKNOWN, "owner_unknown"),
        ("person", False, Standing.UNKNOWN, "owner_unknown"),
        ("admin", True, Standing.MISSING, "agent_not_found"),
        ("admin", False, Standing.MISSING, "agent_not_found"),
        ("admin", False, Standing.OTHER, "access_denied"),
        ("admin", True, Standing.OTHER, None),
        ("admin", True, Standing.OWNER, None),
        ("admin", True, Standing.UNKNOWN, None),
        ("admin", False, Standing.UNKNOWN, "owner_unknown"),
    ],
)
def test_settings_are_changed_by_the_owner_or_an_admin(
    role: Role, access: bool, standing: Standing, expected: str | None
) -> None:
    assert code(OWN, role, access=access, standing=standing) == expected


@pytest.mark.parametrize("role", ROLES)
def test_whoever_has_access_sees_and_uses(role: Role) -> None:
    for standing in Standing:
        assert code(USE, role, access=True, standing=standing) is None
        assert code(USE, role, access=False, standing=standing) == "access_denied"
    assert code(SIGNED_IN, role, access=False) is None
    assert code(SEE_ALL, role, access=True) == "access_denied"
    assert judge(SEE_ALL, Caller("ann", role, None, 0.0), None, Standing.UNKNOWN) is None


@pytest.mark.parametrize("role", PEOPLE)
def test_a_person_with_access_approves(role: Role) -> None:
    assert code(PERSON, role, access=True) is None
    assert code(PERSON, role, access=False) == "access_denied"


def test_only_an_admin_with_access_makes_agents() -> None:
    assert code(MAKE, "admin", access=True) is None
    assert code(MAKE, "admin", access=False) == "access_denied"
    assert code(MAKE, "person", access=True, standing=Standing.OWNER) == "role_required"
    assert code(MAKE, "person", access=False) == "access_denied"


@pytest.mark.parametrize("role", ROLES)
def test_the_log_as_a_whole_is_for_admins_of_all_agents(role: Role) -> None:
    for address in (("GET", "/api/audit/verify"), ("POST", "/api/audit/what-if")):
        assert RIGHTS[address] is AUDIT
    of_all = judge(AUDIT, Caller("ann", role, None, 0.0), None, Standing.UNKNOWN)
    assert (None if of_all is None else of_all.code) == (None if role == "admin" else "role_required")
    assert code(AUDIT, role, access=True) == ("access_denied" if role == "admin" else "role_required")


@pytest.mark.parametrize(
    ("right", "allowed"),
    [(ADMIN, {"admin"}), (OPERATE, {"admin", "system"}), (SYSTEM, {"system"}), (RUN, {"runner", "system", "admin"})],
)
def test_some_addresses_are_for_some_roles(right: Right, allowed: set[str]) -> None:
    for role in ROLES:
        assert code(right, role, access=False) == (None if role in allowed else "role_required")


# Without a database nobody knows who owns an agent.

SETTINGS = [("PUT", "/capacity"), ("PATCH", ""), ("POST", "/pause"), ("POST", "/resume"), ("POST", "/archive")]


@pytest.mark.parametrize(("method", "end"), SETTINGS)
async def test_without_a_database_a_person_is_told_that_nobody_knows_and_nothing_is_written(
    method: str, end: str
) -> None:
    async with client() as http:
        answer = await http.request(method, f"/api/agents/a{end}", headers=bearer("person", "ann"))
    assert (answer.status_code, answer.json()["code"]) == (503, "owner_unknown")
    assert answer.headers["retry-after"]


async def test_without_a_database_an_admin_goes_on() -> None:
    async with client() as http:
        answer = await http.put("/api/agents/a/capacity", json={})
    assert (answer.status_code, answer.json()["detail"]) == (400, "max_parallel_tasks is required")


@pytest.mark.parametrize("path", ["/api/agents/%ff", "/api/agents/%00", f"/api/agents/{'x' * 201}"])
@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH"])
async def test_an_agent_that_cannot_be_is_a_wrong_field_for_everybody(path: str, method: str) -> None:
    async with client() as http:
        for headers in (bearer("admin"), bearer("person", agents=())):
            answer = await http.request(method, path, headers=headers, json={} if method != "GET" else None)
            assert (answer.status_code, answer.json()["code"]) in ((400, "invalid_field"), (403, "access_denied"))
            assert answer.json()["code"] == "invalid_field", answer.text
            assert answer.json()["field"] == "agent_id"
