"""Tasks: one turn, and its result in the answer (sync), or a place in the queue (async)."""

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import psycopg
from fastapi import APIRouter
from fastapi.responses import JSONResponse
from psycopg_pool import PoolTimeout

from api.http.database import ProjectionBehind
from api.http.positions import LogPosition, read_position
from api.http.problems import Problem, invalid
from api.http.requests import SystemTaskRequest, TaskRequest
from api.http.rights import CallerOf, require_access
from api.http.routes.parameters import AgentId, ArrivalOf, Service, ServiceOf, answer_write
from api.http.tasks import TEXT_SECONDS_MAX, Outcome, end_has_text
from api.http.writes import Arrival, Reply
from streams.rules.events import read_decision
from streams.rules.messages import NEVER_INTERACTIVE

router = APIRouter(prefix="/api", tags=["tasks"])

RETRY_AFTER_SECONDS: Final = 30
_NO_SLOT: Final = frozenset({"agent_parallelism_limit_reached", "force_limit_reached"})
_FULL: Final = _NO_SLOT | {"site_workers_busy", "agent_environment_folder_busy", "agent_backlog_full"}
_FINAL: Final = frozenset({"finished", "failed", "stopped", "expired"})


@router.post("/agents/{agent_id}/task", status_code=200)
async def run_task(service: ServiceOf, agent_id: AgentId, request: TaskRequest, arrival: ArrivalOf) -> JSONResponse:
    """Sync: 200 with how it ended, 202 it still runs. Async: 202 with its place. 429 there is no room."""
    return answer_write(await _run(service, agent_id, request, arrival))


@router.post("/internal/execute-task", status_code=200)
async def run_task_of_system(
    service: ServiceOf, caller: CallerOf, request: SystemTaskRequest, arrival: ArrivalOf
) -> JSONResponse:
    """The same for a scheduler, which names the agent and an id, with which the request may be repeated."""
    require_access(caller, (request.agent_id,))
    return answer_write(await _run(service, request.agent_id, request, arrival))


async def _run(service: Service, agent_id: str, request: TaskRequest, arrival: Arrival) -> Reply:
    given = {"kind": "task", **request.given()}
    given["interactive"] = not request.async_mode
    if request.async_mode:
        return await _asked(service, agent_id, given, arrival)
    if given.get("on_busy") not in (None, "", "ask", "force"):
        raise invalid(
            "invalid_field", "on_busy", "on_busy must be ask or force, or the task async_mode: it can't wait."
        )
    if given["kind"] in NEVER_INTERACTIVE:
        detail = f"A task of kind {given['kind']} always queues: use async_mode. Nothing was changed."
        raise invalid("invalid_field", "kind", detail)
    return await run_turn(service, agent_id, given, arrival, request.wait_seconds)


async def run_turn(
    service: Service, agent_id: str, given: Mapping[str, Any], arrival: Arrival, wait_seconds: int
) -> Reply:
    """Ask for a turn and wait for its end: 200 with its result, 202 it hasn't ended. Raises Problem: 429 no room."""
    with service.outcomes.watching(agent_id) as watch:
        reply = await _asked(service, agent_id, given, arrival)
        content = reply.content
        if content.get("state") in _FINAL or content["status"] in _FINAL:  # asked again after its end
            state = content["status"] if content.get("state") is None else content["state"]
            return await _ended(service, content, Outcome(state, read_position(content["log_position"]), None))
        if content.get("state") == "paused":  # it goes on when a person says so, and not sooner
            return Reply(202, {**content, "status": "paused"}, reply.headers)
        outcome = await watch.outcome(content["trigger_id"], arrival.seconds + wait_seconds)
    if outcome is None or outcome.state == "paused":
        status = content["status"] if outcome is None else outcome.state
        return Reply(202, {**content, "status": status}, reply.headers)
    return await _ended(service, content, outcome)


async def _asked(service: Service, agent_id: str, given: Mapping[str, Any], arrival: Arrival) -> Reply:
    try:
        reply = await service.writes.trigger(agent_id, given, arrival)
    except Problem as problem:
        if problem.code in _FULL:
            raise _at_capacity(agent_id, problem) from None
        raise
    content = reply.content
    if content["status"] == "running":
        content = {**content, "position": 0}
    return Reply(202, content, reply.headers)


def _at_capacity(agent_id: str, problem: Problem) -> Problem:
    detail = problem.detail
    if problem.code in _NO_SLOT:
        detail = f"Agent '{agent_id}' is at capacity ({problem.members['limit']} parallel tasks). Try again later."
    headers = {**problem.headers, "Retry-After": str(RETRY_AFTER_SECONDS)}
    return Problem(429, problem.code, detail, members=problem.members, headers=headers)


async def _ended(service: Service, content: Mapping[str, Any], outcome: Outcome) -> Reply:
    texts = await _texts(service, content["agent_id"], content["trigger_id"], outcome)
    ended = {**content, **texts, "status": outcome.state, "log_position": str(outcome.position)}
    return Reply(200, {name: value for name, value in ended.items() if name not in ("position", "reason")})


async def _texts(service: Service, agent_id: str, trigger_id: str, outcome: Outcome) -> dict[str, Any]:
    """``result`` and ``error`` of the last attempt; ``result_available`` false when they can't be read now."""
    until_seconds = asyncio.get_running_loop().time() + TEXT_SECONDS_MAX
    position: LogPosition | None = outcome.position
    has_text = outcome.has_text
    about = {"agent_id": agent_id, "trigger_id": trigger_id}
    try:
        while True:
            async with service.database.reading(position) as reading:
                found = await reading.together(trigger=about, texts_of_trigger=about)
                if has_text is None:
                    ends = await reading.rows("end_of_trigger", **about)
                    has_text = any(end_has_text(read_decision(end["record"].encode()), trigger_id) for end in ends)
            position = None
            last = found["trigger"][0]["execution_id"] if found["trigger"] else None
            texts = {
                text["kind"]: text["content"] for text in found["texts_of_trigger"] if text["execution_id"] == last
            }
            left = until_seconds - asyncio.get_running_loop().time()
            if texts or not has_text or left <= 0:
                break
            await service.database.moved(left)
    except (psycopg.OperationalError, psycopg.errors.UndefinedTable, PoolTimeout, ProjectionBehind):
        return {"result": None, "error": None, "result_available": False}
    available = bool(texts) or not has_text
    return {"result": texts.get("result"), "error": texts.get("error"), "result_available": available}
