"""Agents: who there is, their slots and settings, pause and resume."""

from typing import Any, Final

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from api.http import past, views
from api.http.problems import Problem, unknown_agent
from api.http.requests import CapacityRequest, SettingsRequest
from api.http.rights import CallerOf
from api.http.routes.parameters import (
    PAGE_ROWS_DEFAULT,
    AgentId,
    ArrivalOf,
    AsOf,
    Cursor,
    MinPosition,
    Rows,
    ServiceOf,
    answer,
    answer_write,
)
from api.http.waiting_facts import read_facts
from streams.rules.limits import PARALLELISM_LIMIT_MAX, PARALLELISM_LIMIT_MIN

router = APIRouter(prefix="/api/agents", tags=["agents"])

_CAPACITY_REQUIRED: Final = "max_parallel_tasks is required"
_CAPACITY_RANGE: Final = (
    f"max_parallel_tasks must be an integer between {PARALLELISM_LIMIT_MIN} and {PARALLELISM_LIMIT_MAX}"
)


@router.get("")
async def list_agents(
    service: ServiceOf,
    caller: CallerOf,
    min_position: MinPosition,
    rows: Rows = PAGE_ROWS_DEFAULT,
    cursor: Cursor = None,
) -> JSONResponse:
    """The agents that the caller may see by id, with what runs and waits now."""
    (after,) = views.read_cursor(cursor, 1) if cursor is not None else ("",)
    async with service.database.reading(min_position) as reading:
        found = await reading.rows("agents_page", after_agent_id=after, visible=caller.visible, max_rows=rows)
    following = views.cursor(found[-1]["agent_id"]) if len(found) == rows else None
    return answer({"agents": [views.agent_summary(row) for row in found], "next_cursor": following})


@router.get("/slots")
async def slots_of_agents(service: ServiceOf, caller: CallerOf, min_position: MinPosition) -> Response:
    """How many slots every agent that the caller may see may use (null: unlimited) and uses."""
    agents = await service.database.slots(caller.visible, min_position)
    content = f'{{"agents":{agents},"timestamp":"{views.instant(views.now())}"}}'
    return Response(content, media_type="application/json")


@router.get("/{agent_id}")
async def read_agent(service: ServiceOf, agent_id: AgentId, min_position: MinPosition) -> JSONResponse:
    """One agent: settings, what runs and waits, totals."""
    async with service.database.reading(min_position) as reading:
        row = await reading.row("agent", agent_id=agent_id)
    if row is None:
        raise unknown_agent(agent_id)
    return answer(views.agent(row))


@router.put("/{agent_id}")
async def put_agent(
    service: ServiceOf, agent_id: AgentId, settings: SettingsRequest, arrival: ArrivalOf
) -> JSONResponse:
    """Create an agent, bring it back from the archive, or change settings of it; an absent one stays as it is."""
    given = settings.model_dump(exclude_unset=True)
    return answer_write(await service.writes.control(agent_id, "configure", given, arrival))


@router.patch("/{agent_id}")
async def change_agent(
    service: ServiceOf, agent_id: AgentId, settings: SettingsRequest, arrival: ArrivalOf
) -> JSONResponse:
    """Change settings of an agent: absent is unchanged, null is back to the default."""
    given = settings.model_dump(exclude_unset=True)
    return answer_write(await service.writes.control(agent_id, "configure", given, arrival))


@router.post("/{agent_id}/pause")
async def pause_agent(service: ServiceOf, agent_id: AgentId, arrival: ArrivalOf) -> JSONResponse:
    """Start nothing more; what runs goes on."""
    return answer_write(await service.writes.control(agent_id, "pause", {}, arrival))


@router.post("/{agent_id}/resume")
async def resume_agent(service: ServiceOf, agent_id: AgentId, arrival: ArrivalOf) -> JSONResponse:
    """End the pause."""
    return answer_write(await service.writes.control(agent_id, "resume", {}, arrival))


@router.post("/{agent_id}/archive")
async def archive_agent(service: ServiceOf, agent_id: AgentId, arrival: ArrivalOf) -> JSONResponse:
    """Stop everything of the agent and refuse what comes; configuring it brings it back."""
    return answer_write(await service.writes.control(agent_id, "archive", {}, arrival))


@router.get("/{agent_id}/capacity")
async def read_capacity(service: ServiceOf, agent_id: AgentId, min_position: MinPosition, as_of: AsOf) -> JSONResponse:
    """The agent's slots and what runs in them, now or as of a moment of the past."""
    if as_of is not None:
        return answer(await past.capacity(service.database, agent_id, as_of, min_position))
    async with service.database.reading(min_position) as reading:
        found = await reading.together(agent={"agent_id": agent_id}, slots_of_agent={"agent_id": agent_id})
    if not found["agent"]:
        raise unknown_agent(agent_id)
    return answer(views.capacity(found["agent"][0], found["slots_of_agent"], views.now()))


@router.put("/{agent_id}/capacity")
async def put_capacity(
    service: ServiceOf, agent_id: AgentId, capacity: CapacityRequest, arrival: ArrivalOf
) -> JSONResponse:
    """Change how many of the agent's turns run at once."""
    limit: Any = capacity.max_parallel_tasks
    if limit is None:
        raise Problem(400, "missing_field", _CAPACITY_REQUIRED, members={"field": "max_parallel_tasks"})
    if type(limit) is not int or not PARALLELISM_LIMIT_MIN <= limit <= PARALLELISM_LIMIT_MAX:
        raise Problem(400, "invalid_field", _CAPACITY_RANGE, members={"field": "max_parallel_tasks"})
    reply = await service.writes.control(agent_id, "configure", {"parallelism_limit": limit}, arrival)
    content = {"message": "Capacity updated", "agent_name": agent_id, "max_parallel_tasks": limit, **reply.content}
    return JSONResponse(content, status_code=200)


@router.get("/{agent_id}/queue")
async def read_queue(
    service: ServiceOf,
    agent_id: AgentId,
    min_position: MinPosition,
    as_of: AsOf,
    rows: Rows = PAGE_ROWS_DEFAULT,
    cursor: Cursor = None,
) -> JSONResponse:
    """The agent's waiting triggers in start order, now or as of a moment, each with its position and why it waits."""
    if as_of is not None:
        return answer(await past.queue(service.database, agent_id, as_of, min_position, rows, cursor))
    before: dict[str, Any] = {"available_at": "-infinity", "created_at": "-infinity", "trigger_id": ""}
    if cursor is not None:
        available_at, created_at, trigger_id = views.read_cursor(cursor, 3)
        before = {
            "available_at": views.read_instant_of_cursor(available_at),
            "created_at": views.read_instant_of_cursor(created_at),
            "trigger_id": trigger_id,
        }
    async with service.database.reading(min_position) as reading:
        after = {f"after_{name}": value for name, value in before.items()}
        both = await reading.together(
            agent={"agent_id": agent_id}, queue_page={"agent_id": agent_id, "max_rows": rows, **after}
        )
        if not both["agent"]:
            raise unknown_agent(agent_id)
        (agent,), found = both["agent"], both["queue_page"]
        first = found[0] if found else None
        passed = 0
        if first is not None and cursor is not None:
            key = {name: first[name] for name in before}
            passed = await reading.value("position_in_queue", agent_id=agent_id, **key)
        facts = await read_facts(reading, agent, found)
    at = views.now()
    following = None
    if len(found) == rows:
        following = views.cursor(*(found[-1][name] for name in before))
    queue = [views.queued(facts, row, passed + index, at) for index, row in enumerate(found, start=1)]
    return answer({"agent_id": agent_id, "waiting": agent["waiting"], "queue": queue, "next_cursor": following})
