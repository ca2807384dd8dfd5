"""Public links: people without a token talk to one agent, in conversations of their own, until the link ends.

A visitor is admitted like everybody, in the same slots. They may ask or queue, never force or interrupt; they see
nothing of the agent but what becomes of what they ask, and reach no conversation that wasn't begun through their link.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from pydantic import Field, StrictInt

from api.http import views
from api.http.auth import LINK_HOURS_MAX, Caller, Link, LinksOff, Unauthenticated
from api.http.problems import Problem, invalid
from api.http.requests import (
    MessageField,
    OnBusy,
    RequestBody,
    id_from_key,
    new_id,
    without,
)
from api.http.rights import CallerOf, unauthenticated
from api.http.routes.parameters import AgentId, IdempotencyKey, ServiceOf
from api.http.routes.tasks import run_turn
from api.http.writes import Arrival
from streams.rules.messages import Id

router = APIRouter(tags=["public links"])

LINK_HOURS_DEFAULT: Final = 24
WAIT_SECONDS_MAX: Final = 60
"""A visitor's connection costs something, and anybody may be a visitor."""
_SHOWN: Final = (
    "trigger_id", "conversation_id", "status", "result", "result_available", "position", "available_at", "repeated"
)  # fmt: skip
"""What a visitor is told of an answer."""


class LinkRequest(RequestBody):
    """How long the link lives."""

    lifetime_hours: Annotated[StrictInt, Field(ge=1, le=LINK_HOURS_MAX)] = LINK_HOURS_DEFAULT


_LINK_DEFAULT: Final = LinkRequest()


class VisitorRequest(RequestBody):
    """A visitor's message; with ``conversation_id`` in a conversation that was begun through the same link."""

    message: MessageField
    conversation_id: Id | None = None
    on_busy: OnBusy | None = None
    wait_seconds: Annotated[StrictInt, Field(ge=0, le=WAIT_SECONDS_MAX)] = WAIT_SECONDS_MAX


@router.post("/api/agents/{agent_id}/public-links", status_code=201)
async def make_link(
    service: ServiceOf, caller: CallerOf, agent_id: AgentId, request: LinkRequest = _LINK_DEFAULT
) -> JSONResponse:
    """Make a link to the agent. It isn't stored, so its token is told only now."""
    try:
        link, token, ends = service.authentication.issue_link(agent_id, caller.subject, request.lifetime_hours)
    except LinksOff:
        raise _off() from None
    content = {
        "agent_id": agent_id,
        "link_id": link.id,
        "token": token,
        "path": f"/api/public/chat/{token}",
        "expires_at": views.instant(datetime.fromtimestamp(ends, UTC)),
    }
    return JSONResponse(content, status_code=201)


async def _link(request: Request, service: ServiceOf, token: str) -> Link:
    try:
        link = service.authentication.link(token)
    except Unauthenticated as error:
        raise unauthenticated(error) from None
    except LinksOff:
        raise _off() from None
    request.state.caller = _visitor(link)
    return link


@router.post("/api/public/chat/{token}", status_code=200)
async def chat(
    service: ServiceOf, link: Annotated[Link, Depends(_link)], request: VisitorRequest, key: IdempotencyKey = None
) -> JSONResponse:
    """Say something to the agent: 200 with its answer, 202 there is none yet, 429 every slot is taken.

    Asking again with the same Idempotency-Key waits on, and gets the answer when it is there.
    """
    if request.on_busy not in (None, "", "ask", "queue"):
        raise invalid("agent_on_busy_invalid", "on_busy", "A visitor may ask or queue; nothing was changed.")
    visitor = _visitor(link)
    arrival = Arrival.now(visitor, key)
    trigger_id = new_id() if key is None else id_from_key(link.agent_id, key, visitor.subject)
    theirs = f"public-{link.id}-"
    conversation_id = request.conversation_id or theirs + trigger_id
    if not conversation_id.startswith(theirs):
        raise Problem(404, "conversation_unknown", "No conversation of this id was begun through this link.")
    given: dict[str, Any] = {
        "kind": "public",
        "interactive": True,
        **without(request.model_dump(exclude_unset=True, exclude_none=True), "wait_seconds"),
        "id": trigger_id,
        "conversation_id": conversation_id,
    }
    try:
        arrival = Arrival(arrival.seconds, visitor, None)
        reply = await run_turn(service, link.agent_id, given, arrival, request.wait_seconds)
    except Problem as problem:
        members = _picked(problem.members)
        raise Problem(problem.status, problem.code, problem.detail, members=members, headers=problem.headers) from None
    return JSONResponse(_picked(reply.content), status_code=reply.status)


def _visitor(link: Link) -> Caller:
    """A visitor as the log knows them: by the link; no person whom anybody knows."""
    return Caller(f"public-link:{link.id}", "upstream", frozenset({link.agent_id}), 0.0)


def _picked(content: Mapping[str, Any]) -> dict[str, Any]:
    return {name: content[name] for name in _SHOWN if name in content}


def _off() -> Problem:
    return Problem(
        501,
        "public_links_off",
        "This service has no key for public links: BERTH_LINK_SECRET names none. Nothing was made.",
    )
