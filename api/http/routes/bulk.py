"""Many triggers at once, of any agents: list them, ask for them, stop them.

A request for many is answered with 200 and one result for each, in its order: ``http_status`` and ``answer`` or
``problem`` are what the request for it alone would have got. What the token gives no access to is among the problems.
"""

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Query
from fastapi.responses import JSONResponse
from psycopg.rows import DictRow

from api.http import views
from api.http.auth import Caller
from api.http.database import Reading
from api.http.decisions import LogUnavailable
from api.http.problems import Problem, of_log
from api.http.requests import (
    BULK_MAX,
    BulkItem,
    BulkRequest,
    BulkStopRequest,
    InstantText,
    TriggerRef,
    TriggersFilter,
    without,
)
from api.http.rights import CallerOf, require_access
from api.http.routes.parameters import (
    PAGE_ROWS_DEFAULT,
    ArrivalOf,
    Cursor,
    MinPosition,
    Rows,
    Service,
    ServiceOf,
    answer,
)
from api.http.writes import Arrival, Reply
from streams.rules.messages import Id, Kind

router = APIRouter(prefix="/api", tags=["triggers"])

_LAST_CHARACTER: Final = chr(0x10FFFF)
State = Literal["waiting", "running", "paused", "finished", "failed", "stopped", "expired"]


@dataclass(frozen=True, slots=True)
class Filters:
    """Which triggers a list shows: those to which all that is given applies."""

    state: State | None
    agents: list[str] | None
    organization_id: str | None
    kind: str | None
    since: str


async def _filters(
    state: Annotated[State | None, Query()] = None,
    agent: Annotated[list[Id] | None, Query(max_length=100, description="may be given more than once")] = None,
    organization: Annotated[Id | None, Query()] = None,
    kind: Annotated[Kind | None, Query()] = None,
    since: Annotated[InstantText | None, Query(description="accepted then or later")] = None,
) -> Filters:
    return Filters(state, agent, organization, kind, "-infinity" if since is None else since)


@router.get("/triggers")
async def list_triggers(
    service: ServiceOf,
    caller: CallerOf,
    filters: Annotated[Filters, Depends(_filters)],
    min_position: MinPosition,
    rows: Rows = PAGE_ROWS_DEFAULT,
    cursor: Cursor = None,
) -> JSONResponse:
    """Triggers that were ever accepted, the newest first."""
    page: dict[str, Any] = {
        "since": filters.since,
        "before_accepted_at": "infinity",
        "before_agent_id": _LAST_CHARACTER,
        "before_trigger_id": _LAST_CHARACTER,
        "max_rows": rows,
    }
    if cursor is not None:
        accepted_at, agent_id, trigger_id = views.read_cursor(cursor, 3)
        page |= {
            "before_accepted_at": views.read_instant_of_cursor(accepted_at),
            "before_agent_id": agent_id,
            "before_trigger_id": trigger_id,
        }
    if filters.agents is not None:
        require_access(caller, filters.agents)
    agent_ids = caller.visible if filters.agents is None else filters.agents
    async with service.database.reading(min_position) as reading:
        found = await _page(reading, agent_ids, filters, page)
    following = None
    if len(found) == rows:
        following = views.cursor(*(found[-1][name] for name in ("accepted_at", "agent_id", "trigger_id")))
    return answer({"triggers": [views.listed(row) for row in found], "next_cursor": following})


async def _page(
    reading: Reading, agent_ids: list[str] | None, filters: Filters, page: Mapping[str, Any]
) -> list[DictRow]:
    """By the query whose order its index has: of some agents, or of the most selective filter."""
    by_kind = {"kind": filters.kind}
    by_state = {"state": filters.state, **by_kind}
    by_organization = {"organization_id": filters.organization_id, **by_state}
    if agent_ids is not None:
        return await reading.rows(
            "triggers_of_agents_page", agent_ids=sorted(set(agent_ids)), **by_organization, **page
        )
    if filters.organization_id is not None:
        return await reading.rows("triggers_of_organization_page", **by_organization, **page)
    if filters.state is not None:
        return await reading.rows("triggers_in_state_page", **by_state, **page)
    if filters.kind is not None:
        return await reading.rows("triggers_of_kind_page", **by_kind, **page)
    return await reading.rows("triggers_page", **page)


@router.post("/triggers:bulk")
async def request_triggers(service: ServiceOf, request: BulkRequest, arrival: ArrivalOf) -> JSONResponse:
    """Up to 1,000 triggers of any agents, each with a result of its own. A key makes one for each, by its place."""
    results = await asyncio.gather(
        *(
            _result(_ask(service, item, _numbered(arrival, number)), agent_id=item.agent_id)
            for number, item in enumerate(request.triggers)
        )
    )
    return answer({"results": results})


async def _ask(service: Service, item: BulkItem, arrival: Arrival) -> Reply:
    given = without(item.given(), "agent_id")
    if "id" in given:  # its own id makes it repeatable, so it needs no key
        arrival = Arrival(arrival.seconds, arrival.caller, None)
    return await service.writes.trigger(item.agent_id, given, arrival)


@router.post("/triggers:stop")
async def stop_triggers(
    service: ServiceOf, caller: CallerOf, request: BulkStopRequest, arrival: ArrivalOf
) -> JSONResponse:
    """Stop up to 1,000 triggers, named or by what they have in common; ``more``: there are more of them."""
    wanted, more = request.triggers or [], False
    if request.filter is not None:
        wanted, more = await _matching(service, caller, request.filter)
    results = await asyncio.gather(
        *(_result(_stop(service, ref, arrival), agent_id=ref.agent_id, trigger_id=ref.trigger_id) for ref in wanted)
    )
    return answer({"results": results, "more": more})


async def _stop(service: Service, ref: TriggerRef, arrival: Arrival) -> Reply:
    require_access(arrival.caller, (ref.agent_id,))
    if arrival.idempotency_key is not None:
        key = f"{arrival.idempotency_key}/{ref.trigger_id}"
        arrival = Arrival(arrival.seconds, arrival.caller, key)
    return await service.writes.stop_trigger(ref.agent_id, ref.trigger_id, arrival)


async def _matching(service: Service, caller: Caller, wanted: TriggersFilter) -> tuple[list[TriggerRef], bool]:
    """The oldest live triggers that match, and whether there are more. Those that the caller may not see don't."""
    if wanted.agents is not None:
        require_access(caller, wanted.agents)
    async with service.database.reading() as reading:
        found = await reading.rows(
            "live_triggers",
            visible=caller.visible if wanted.agents is None else wanted.agents,
            state=wanted.state,
            kind=wanted.kind,
            organization_id=wanted.organization_id,
            since="-infinity" if wanted.since is None else wanted.since,
            max_rows=BULK_MAX + 1,
        )
    refs = [TriggerRef(agent_id=row["agent_id"], trigger_id=row["trigger_id"]) for row in found[:BULK_MAX]]
    return refs, len(found) > BULK_MAX


def _numbered(arrival: Arrival, number: int) -> Arrival:
    key = arrival.idempotency_key
    return Arrival(arrival.seconds, arrival.caller, None if key is None else f"{key}/{number}")


async def _result(work: Coroutine[Any, Any, Reply], **about: str) -> dict[str, Any]:
    try:
        reply = await work
    except Problem as error:
        problem = error
    except LogUnavailable as error:
        problem = of_log(error)
    else:
        return {**about, "http_status": reply.status, "answer": reply.content}
    return {**about, "http_status": problem.status, "problem": problem.content()}
