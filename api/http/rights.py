"""Who may ask what: one table with the right of every address, and the one place where a request is judged by it.

A right is judged in this order, and the first that isn't met is the answer:

1. a token (401), unless the address is open to everybody;
2. the role: 403 ``person_required`` where only people may (person and admin count), else 403 ``role_required``;
3. for changes of an agent's capacity and settings: the agent exists (404 ``agent_not_found``);
4. access: the token's ``agents`` name the agent, or all of them (403 ``access_denied``);
5. for those changes: the agent is the caller's own by the log, or the caller is an admin (403 ``owner_required``).

The owner is what the log says, read from the projection when that has caught up with everything this process has seen
of the log. When it can't be read, a change that depends on it is refused with 503 ``owner_unknown`` rather than on a
guess; an admin with access needs no owner, so for them it goes on, and the log refuses what doesn't exist.

An address that isn't in the table is refused to everybody, and a test fails.
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Final, Literal

import psycopg
from fastapi import Depends, Request
from psycopg_pool import PoolTimeout
from pydantic import TypeAdapter, ValidationError

from api.http.auth import ROLES, Caller, Role, Unauthenticated
from api.http.database import ProjectionBehind
from api.http.intake import decoded
from api.http.problems import Problem, of_validation, unavailable, unknown_agent
from streams.rules.messages import Id

PEOPLE: Final[tuple[Role, ...]] = ("person", "admin")


@dataclass(frozen=True, slots=True)
class Right:
    """What is asked of a caller. ``access``: to the agent that the address names, or to all agents."""

    is_open: bool = False
    roles: tuple[Role, ...] = ROLES
    access: Literal["agent", "all"] | None = None
    owner: bool = False
    """Only the agent's owner, or an admin; the agent must exist."""
    then_roles: tuple[Role, ...] = ROLES
    """Looked at last."""


class Standing(Enum):
    """What a caller is to the agent that the address names, by the log."""

    MISSING = "there is no such agent"
    UNKNOWN = "nobody knows now"
    OTHER = "the agent is somebody else's"
    OWNER = "the agent is the caller's own"


OPEN: Final = Right(is_open=True)
"""Everybody: nothing of agents or people is in it, or the address itself holds a signed link."""
SIGNED_IN: Final = Right()
"""Every token; the answer holds, and the request touches, only agents to which the token gives access."""
USE: Final = Right(access="agent")
"""See and use an agent."""
PERSON: Final = Right(roles=PEOPLE, access="agent")
"""What a person must decide."""
OWN: Final = Right(roles=PEOPLE, access="agent", owner=True)
"""Change an agent's capacity or settings."""
MAKE: Final = Right(roles=PEOPLE, access="agent", then_roles=("admin",))
"""Make an agent, and say whose it is."""
SEE_ALL: Final = Right(access="all")
"""What shows something of every agent."""
ADMIN: Final = Right(roles=("admin",))
SEE_RAW: Final = Right(roles=("admin",), access="all")
"""See records as they came, of whatever agents."""
AUDIT: Final = Right(roles=("admin",), access="all")
"""What is said of the log of all agents together."""
OPERATE: Final = Right(roles=("admin", "system"))
SYSTEM: Final = Right(roles=("system",))
"""The scheduler's door; only for agents to which the token gives access."""
RUN: Final = Right(roles=("runner", "system", "admin"))
"""Take dispatches and report statuses, of agents to which the token gives access."""

RIGHTS: Final[Mapping[tuple[str, str], Right]] = {
    ("GET", "/"): OPEN,
    ("GET", "/dashboard/{name}"): OPEN,
    ("GET", "/healthz"): OPEN,
    ("GET", "/readyz"): OPEN,
    ("GET", "/metrics"): OPEN,
    ("GET", "/api/events"): SIGNED_IN,
    ("POST", "/api/public/chat/{token}"): OPEN,
    ("GET", "/api/agents"): SIGNED_IN,
    ("GET", "/api/agents/slots"): SIGNED_IN,
    ("GET", "/api/agents/{agent_id}"): USE,
    ("PUT", "/api/agents/{agent_id}"): MAKE,
    ("PATCH", "/api/agents/{agent_id}"): OWN,
    ("POST", "/api/agents/{agent_id}/pause"): OWN,
    ("POST", "/api/agents/{agent_id}/resume"): OWN,
    ("POST", "/api/agents/{agent_id}/archive"): OWN,
    ("GET", "/api/agents/{agent_id}/capacity"): USE,
    ("PUT", "/api/agents/{agent_id}/capacity"): OWN,
    ("POST", "/api/agents/{agent_id}/public-links"): OWN,
    ("GET", "/api/agents/{agent_id}/queue"): USE,
    ("POST", "/api/agents/{agent_id}/task"): USE,
    ("POST", "/api/agents/{agent_id}/triggers"): USE,
    ("GET", "/api/agents/{agent_id}/triggers/{trigger_id}"): USE,
    ("DELETE", "/api/agents/{agent_id}/triggers/{trigger_id}"): USE,
    ("POST", "/api/agents/{agent_id}/triggers/{trigger_id}/approve"): PERSON,
    ("POST", "/api/agents/{agent_id}/triggers/{trigger_id}/reschedule"): USE,
    ("POST", "/api/agents/{agent_id}/triggers/{trigger_id}/resume"): USE,
    ("POST", "/api/agents/{agent_id}/triggers/{trigger_id}/restart"): USE,
    ("POST", "/api/agents/{agent_id}/conversations"): USE,
    ("GET", "/api/agents/{agent_id}/conversations/{conversation_id}"): USE,
    ("POST", "/api/agents/{agent_id}/conversations/{conversation_id}"): USE,
    ("POST", "/api/agents/{agent_id}/conversations/{conversation_id}/messages"): USE,
    ("POST", "/api/agents/{agent_id}/conversations/{conversation_id}/stop"): USE,
    ("GET", "/api/triggers"): SIGNED_IN,
    ("POST", "/api/triggers:bulk"): SIGNED_IN,
    ("POST", "/api/triggers:stop"): SIGNED_IN,
    ("POST", "/api/internal/execute-task"): SYSTEM,
    ("GET", "/api/sites"): SEE_ALL,
    ("GET", "/api/sites/{site}"): SEE_ALL,
    ("PUT", "/api/sites/{site}/capacity"): ADMIN,
    ("POST", "/api/sites/{site}/pause"): OPERATE,
    ("POST", "/api/sites/{site}/resume"): OPERATE,
    ("GET", "/api/sites/{site}/organizations/{name}"): SEE_ALL,
    ("PUT", "/api/sites/{site}/organizations/{name}"): OPERATE,
    ("GET", "/api/sites/{site}/departments/{name}"): SEE_ALL,
    ("PUT", "/api/sites/{site}/departments/{name}"): OPERATE,
    ("DELETE", "/api/sites/{site}/environments/{environment_id}"): OPERATE,
    ("DELETE", "/api/sites/{site}/environments/{environment_id}/folders"): OPERATE,
    ("GET", "/api/dead-letters"): SEE_RAW,
    ("GET", "/api/dead-letters/{partition}/{offset}"): SEE_RAW,
    ("POST", "/api/dead-letters/{partition}/{offset}/replay"): SEE_RAW,
    ("GET", "/api/audit/decisions"): SIGNED_IN,
    ("GET", "/api/audit/verify"): AUDIT,
    ("POST", "/api/audit/what-if"): AUDIT,
    ("GET", "/api/runners/dispatches"): RUN,
    ("POST", "/api/statuses"): RUN,
}


def judge(right: Right, caller: Caller, agent_id: str | None, standing: Standing) -> Problem | None:
    """Why this caller may not, or None. ``standing`` counts only where ``right.owner``."""
    if caller.role not in right.roles:
        return _role_required(right.roles)
    has_access = right.access is None or (
        caller.agents is None if right.access == "all" else agent_id is not None and caller.may_use(agent_id)
    )
    if right.owner:
        assert agent_id is not None
        if standing is Standing.MISSING:
            return unknown_agent(agent_id)
        if standing is Standing.UNKNOWN and not (has_access and caller.role == "admin"):
            return unavailable(
                "owner_unknown",
                f"Whose agent {agent_id!r} is can't be read now: the database is away, or behind the log. Nothing was "
                "changed. Try again soon.",
            )
    if not has_access:
        return access_denied(agent_id) if right.access == "agent" and agent_id is not None else _access_to_all()
    if right.owner and caller.role != "admin" and standing is not Standing.OWNER:
        return Problem(
            403,
            "owner_required",
            f"Only the owner of agent {agent_id!r}, or an admin, can change its settings. Nothing was changed.",
        )
    return None if caller.role in right.then_roles else _role_required(right.then_roles)


def require_access(caller: Caller, agent_ids: Iterable[str]) -> None:
    """Raise Problem unless the caller may see and use all of these."""
    for agent_id in agent_ids:
        if not caller.may_use(agent_id):
            raise access_denied(agent_id)


def access_denied(agent_id: str) -> Problem:
    return Problem(
        403,
        "access_denied",
        f"This token gives no access to agent {agent_id!r}. Nothing was changed. Use a token whose `agents` name it.",
        members={"agent_id": agent_id},
    )


def unauthenticated(error: Unauthenticated) -> Problem:
    """401, with the challenge of RFC 6750."""
    challenge = "" if error.code == "token_required" else ', error="invalid_token"'
    return Problem(401, error.code, error.detail, headers={"WWW-Authenticate": f'Bearer realm="berth"{challenge}'})


def _role_required(roles: tuple[Role, ...]) -> Problem:
    if roles == PEOPLE:
        return Problem(
            403,
            "person_required",
            "Only a person can do this (role person or admin), not a program. Nothing was changed.",
        )
    return Problem(
        403,
        "role_required",
        f"This needs a token of role {' or '.join(roles)}. Nothing was changed.",
        members={"roles": list(roles)},
    )


def _access_to_all() -> Problem:
    return Problem(
        403,
        "access_denied",
        'This shows something of every agent, and the token doesn\'t give access to all. Use one with `agents` ["*"].',
    )


# -- judging a request ------------------------------------------------------------------------------------------------

_AGENT_ID: Final[TypeAdapter[str]] = TypeAdapter(Id)


async def require_right(request: Request) -> None:
    """Raise Problem unless who asks may ask this. Every address of the application depends on it."""
    route: str = request.scope["route"].path
    request.state.route = route
    right = RIGHTS.get((request.method, route))
    if right is not None and right.is_open:
        return
    service = request.app.state.service
    try:
        caller: Caller = service.authentication.caller(request.headers.getlist("authorization"))
    except Unauthenticated as error:
        raise unauthenticated(error) from None
    request.state.caller = caller
    if right is None:
        raise _role_required(())
    agent_id = _agent_id(request)
    standing = Standing.UNKNOWN
    if right.owner and caller.role in right.roles:
        assert agent_id is not None
        standing = await _standing(service, caller, agent_id)
    problem = judge(right, caller, agent_id, standing)
    if problem is not None:
        raise problem


def _agent_id(request: Request) -> str | None:
    """The agent that the address names, if it names one. Raises Problem if that is no id."""
    given: str | None = request.path_params.get("agent_id")
    if given is None:
        return None
    try:
        return _AGENT_ID.validate_python(decoded(given))
    except ValidationError as error:
        raise of_validation([{**one, "loc": ("path", "agent_id")} for one in error.errors()]) from None
    except ValueError as error:
        raise Problem(400, "invalid_field", f"agent_id: {error}.", members={"field": "agent_id"}) from None


async def _standing(service: Any, caller: Caller, agent_id: str) -> Standing:
    try:
        async with service.database.reading(service.log.position_of(agent_id)) as reading:
            row = await reading.row("agent", agent_id=agent_id)
    except (psycopg.OperationalError, psycopg.errors.UndefinedTable, PoolTimeout, ProjectionBehind):
        return Standing.UNKNOWN
    if row is None:
        return Standing.MISSING
    return Standing.OWNER if row["owner"] == caller.subject else Standing.OTHER


async def _caller(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


CallerOf = Annotated[Caller, Depends(_caller)]
"""Who asks, at an address that isn't open."""


# -- telling ----------------------------------------------------------------------------------------------------------

RELATIONS: Final[Mapping[str, tuple[bool, Standing]]] = {
    "no access": (False, Standing.OTHER),
    "access": (True, Standing.OTHER),
    "owner": (True, Standing.OWNER),
}
"""Relations of a caller to an agent, from the least on: whether the token gives access, and whose the agent is."""

_WORDS: Final = {"no access": "yes", "access": "access", "owner": "owner"}


def cell(right: Right, role: Role) -> str:
    """What a caller of this role needs: yes (a token is enough), access, owner; or the code of the refusal."""
    code = ""
    for relation, (has_access, standing) in RELATIONS.items():
        caller = Caller("somebody", role, None if has_access else frozenset(), 0.0)
        problem = judge(right, caller, "agent", standing)
        if problem is None:
            return _WORDS[relation] if right.access != "all" else "all agents"
        code = problem.code
    return f"`{code}`"


def table() -> str:
    """The table of docs/rights.md."""
    rows = [f"| address | no token | {' | '.join(ROLES)} |", "|---" * (len(ROLES) + 2) + "|"]
    for (method, path), right in RIGHTS.items():
        cells = ["yes"] * (len(ROLES) + 1) if right.is_open else ["401", *(cell(right, role) for role in ROLES)]
        rows.append(f"| `{method} {path}` | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())
