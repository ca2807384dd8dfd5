"""Triggers: ask for a turn, see why it waits and what became of it, stop it."""

import asyncio
from datetime import timedelta
from typing import Any, Final

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from psycopg.rows import DictRow

from api.http import views
from api.http.database import Database, Reading
from api.http.problems import Problem, unknown_agent, unknown_trigger
from api.http.requests import RescheduleRequest, RestartRequest, ResumeRequest, TriggerRequest
from api.http.routes.parameters import (
    AgentId,
    ArrivalOf,
    MinPosition,
    ServiceOf,
    TriggerId,
    answer,
    answer_write,
)
from api.http.tasks import TEXT_SECONDS_MAX
from api.http.waiting import causes
from api.http.waiting_facts import read_facts

router = APIRouter(prefix="/api/agents/{agent_id}/triggers", tags=["triggers"])

TIMELINE_DECISIONS_MAX: Final = 1_000
TEXTS_KEPT_MIN: Final = timedelta(days=1)
"""The least that BERTH_TEXT_DAYS can be: a younger text that isn't in the tables is still to come."""
_RESUME_DEFAULT: Final = ResumeRequest()
_RESTART_DEFAULT: Final = RestartRequest()


@router.post("", status_code=201)
async def request_trigger(
    service: ServiceOf, agent_id: AgentId, request: TriggerRequest, arrival: ArrivalOf
) -> JSONResponse:
    """Any trigger: 201 it runs, 202 it waits."""
    return answer_write(await service.writes.trigger(agent_id, request.given(), arrival))


@router.get("/{trigger_id}")
async def read_trigger(
    service: ServiceOf, agent_id: AgentId, trigger_id: TriggerId, min_position: MinPosition
) -> JSONResponse:
    """State, attempts, why it waits, position and timeline of a trigger."""
    about = {"agent_id": agent_id, "trigger_id": trigger_id}
    async with service.database.reading(min_position) as reading:
        found = await reading.together(
            agent={"agent_id": agent_id},
            trigger=about,
            attempts_of_trigger=about,
            texts_of_trigger=about,
            dependencies_of_trigger=about,
            decisions_of_id_page={
                "agent_id": agent_id,
                "id": trigger_id,
                "after_seq": 0,
                "max_rows": TIMELINE_DECISIONS_MAX,
            },
        )
        decisions = found["decisions_of_id_page"]
        agent = found["agent"][0] if found["agent"] else None
        if not found["trigger"]:
            return answer(_refused(agent_id, trigger_id, agent, decisions))
        (row,) = found["trigger"]
        assert agent is not None
        waiting = await _waiting(reading, agent, row) if row["state"] == "waiting" else _NOT_WAITING
    parts = (found[name] for name in ("attempts_of_trigger", "texts_of_trigger", "dependencies_of_trigger"))
    return answer({**views.trigger(row, *parts), **waiting, "timeline": views.timeline(trigger_id, decisions)})


@router.delete("/{trigger_id}")
async def stop_trigger(
    service: ServiceOf, agent_id: AgentId, trigger_id: TriggerId, arrival: ArrivalOf
) -> JSONResponse:
    """Stop a trigger: 200 it has ended, 202 its runner was told."""
    return answer_write(await service.writes.stop_trigger(agent_id, trigger_id, arrival))


@router.post("/{trigger_id}/approve")
async def approve_trigger(
    service: ServiceOf, agent_id: AgentId, trigger_id: TriggerId, arrival: ArrivalOf
) -> JSONResponse:
    """Let a trigger start that waits for approval, or for what failed or was stopped before it."""
    return answer_write(await service.writes.control_trigger(agent_id, trigger_id, "approve", {}, arrival))


@router.post("/{trigger_id}/reschedule")
async def reschedule_trigger(
    service: ServiceOf, agent_id: AgentId, trigger_id: TriggerId, request: RescheduleRequest, arrival: ArrivalOf
) -> JSONResponse:
    """Change from when on a waiting trigger may start, and with it its place in the order."""
    given = request.model_dump()
    return answer_write(await service.writes.control_trigger(agent_id, trigger_id, "reschedule", given, arrival))


@router.post("/{trigger_id}/resume")
async def resume_trigger(
    service: ServiceOf,
    agent_id: AgentId,
    trigger_id: TriggerId,
    arrival: ArrivalOf,
    request: ResumeRequest = _RESUME_DEFAULT,
) -> JSONResponse:
    """Queue a paused trigger again, with a new attempt: 200 it runs, 202 it waits."""
    given = request.model_dump(exclude_none=True)
    return answer_write(await service.writes.control_trigger(agent_id, trigger_id, "resume_trigger", given, arrival))


@router.post("/{trigger_id}/restart", status_code=201)
async def restart_trigger(
    service: ServiceOf,
    agent_id: AgentId,
    trigger_id: TriggerId,
    arrival: ArrivalOf,
    request: RestartRequest = _RESTART_DEFAULT,
) -> JSONResponse:
    """Ask again for what a trigger that has ended was: a new trigger in its conversation. 201 it runs, 202 it waits."""
    async with service.database.reading(service.log.position_of(agent_id)) as reading:
        about = {"agent_id": agent_id, "trigger_id": trigger_id}
        found = await reading.together(agent={"agent_id": agent_id}, trigger=about, texts_of_trigger=about)
        if not found["agent"]:
            raise unknown_agent(agent_id)
        if not found["trigger"]:
            raise unknown_trigger(agent_id, trigger_id)
        (row,) = found["trigger"]
        asked = await _asked(reading, row)
    if row["ended_at"] is None:
        raise Problem(
            409,
            "trigger_not_final",
            f"Trigger {trigger_id!r} is {row['state']}. Only one that has ended can be restarted; stop it first.",
        )
    given = request.given()
    if row["payload_bytes"] and "payload" not in given:
        raise Problem(
            400,
            "missing_field",
            "payload is required: that of a trigger isn't kept after its end, so send it again. Nothing was changed.",
            members={"field": "payload"},
        )
    kept = views.to_restart(row, found["texts_of_trigger"])
    if asked.get("depends_on"):
        kept["depends_on"] = asked["depends_on"]
    content = {**kept, **given, "restarts": trigger_id}
    if asked.get("message") is not None and "message" not in content:
        content["message"] = await _late_message(service.database, row)
    return answer_write(await service.writes.trigger(agent_id, content, arrival))


async def _asked(reading: Reading, row: DictRow) -> dict[str, Any]:
    """The command that asked for a trigger, as the log has it for ever: what its row has forgotten at its end."""
    accepted = {"agent_id": row["agent_id"], "after_seq": row["accepted_seq"] - 1, "max_rows": 1}
    (decision,) = await reading.rows("decisions_of_agent_page", **accepted)
    command: dict[str, Any] = decision["record"]["command"]
    return command


async def _late_message(database: Database, row: DictRow) -> str:
    """The message that a trigger had and that isn't in the tables. Raises Problem when it doesn't come there.

    Its text is in the log with the decision that accepted it, and comes into the tables by itself, a moment apart.
    """
    until_seconds = asyncio.get_running_loop().time() + TEXT_SECONDS_MAX
    while True:
        async with database.reading() as reading:
            about = {"agent_id": row["agent_id"], "trigger_id": row["trigger_id"]}
            message = views.message_of(await reading.rows("texts_of_trigger", **about))
        if message is not None:
            return message
        if views.now() - row["accepted_at"] >= TEXTS_KEPT_MIN:
            raise Problem(
                400,
                "missing_field",
                "message is required: that of the trigger isn't kept any more, so send it again. Nothing was changed.",
                members={"field": "message"},
            )
        left_seconds = until_seconds - asyncio.get_running_loop().time()
        if left_seconds <= 0:
            raise Problem(
                504,
                "projection_behind",
                "The trigger's message isn't in the tables yet. Nothing was changed; send it again, or with a message.",
            )
        await database.moved(left_seconds)


_NOT_WAITING: Final[dict[str, Any]] = {"position": None, "reason": None, "waits_for": []}


async def _waiting(reading: Reading, agent: DictRow, row: DictRow) -> dict[str, Any]:
    """Position, reason and every cause of waiting."""
    agent_id = agent["agent_id"]
    key = {name: row[name] for name in ("available_at", "created_at", "trigger_id")}
    before = await reading.value("position_in_queue", agent_id=agent_id, **key)
    found = causes(await read_facts(reading, agent, [row]), row, views.now())
    return {
        "position": before + 1,
        "reason": found[0].reason if found else None,
        "waits_for": [views.cause(cause) for cause in found],
    }


def _refused(agent_id: str, trigger_id: str, agent: DictRow | None, decisions: list[DictRow]) -> dict[str, Any]:
    """A trigger that was refused leaves nothing but decisions. Raises Problem if there are none."""
    asked = [(row, code) for row in decisions if (code := _refusal_of(row, trigger_id)) is not None]
    if not asked:
        if agent is None:
            raise unknown_agent(agent_id)
        raise unknown_trigger(agent_id, trigger_id)
    refused, code = asked[-1]
    named = (row["record"]["command"] for row in decisions if row["command_id"] == trigger_id)
    conversations = (command.get("conversation_id") for command in named if command["type"] in _REQUESTS)
    return {
        "agent_id": agent_id,
        "trigger_id": trigger_id,
        "conversation_id": next(conversations, None),
        "state": "refused",
        "state_since": views.instant(refused["decided_at"]),
        "code": code,
        "attempts": [],
        **_NOT_WAITING,
        "timeline": views.timeline(trigger_id, decisions),
    }


_REQUESTS: Final = ("trigger", "invalid")


def _refusal_of(decision: DictRow, trigger_id: str) -> str | None:
    """The code with which a decision refuses the trigger, at once or after its site's answer; None: it doesn't."""
    is_its_own = decision["command_id"] == trigger_id and decision["command_type"] in _REQUESTS
    if is_its_own and decision["refusal_code"] is not None:
        return str(decision["refusal_code"])
    for event in decision["record"].get("events", ()):
        if event["type"] == "refused" and event["trigger_id"] == trigger_id:
            return str(event["code"])
    return None
