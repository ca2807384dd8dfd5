"""What happens, as it happens: the log of decisions as server-sent events."""

from typing import Annotated

from fastapi import APIRouter, Header, Query

from api.http.live import LiveResponse
from api.http.live_log import Wanted
from api.http.rights import CallerOf, require_access
from api.http.routes.parameters import ServiceOf
from streams.rules.messages import Id

router = APIRouter(prefix="/api/events", tags=["live"])


@router.get("", status_code=200, response_class=LiveResponse, responses={409: {}, 503: {}})
async def follow_decisions(
    service: ServiceOf,
    caller: CallerOf,
    agents: Annotated[
        list[Id] | None,
        Query(description="only the decisions of these agents (agents=a&agents=b); else of all that may be seen"),
    ] = None,
    last_event_id: Annotated[
        str | None, Header(description="id of the last event that came: everything after it comes first")
    ] = None,
) -> LiveResponse:
    """Every decision that may be seen, from now on or after an event, until the token ends."""
    if agents is None:
        wanted = Wanted(caller.agents)
    else:
        require_access(caller, agents)
        wanted = Wanted(frozenset(agents))
    return await service.live.open(wanted, last_event_id, caller.expires_at_seconds)
