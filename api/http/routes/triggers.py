"""Triggers: ask for a turn, see why it waits and what became of it, stop it."""

from typing import Any, Final

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from psycopg.rows import DictRow

from api.http import views
from api.http.database import Reading
from api.http.problems import Problem, unknown_agent
from api.http.requests import TriggerRequest
from api.http.routes.parameters import (
    AgentId,
    ArrivalOf,
    MinPosition,
    ServiceOf,
    TriggerId,
    answer,
    answer_write,
)
from api.http.waiting import causes

router = APIRouter(prefix="/api/agents/{agent_id}/triggers", tags=["triggers"])

TIMELINE_DECISIONS_MAX: Final = 1_000


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
    attempts, texts = found["attempts_of_trigger"], found["texts_of_trigger"]
    return answer({**views.trigger(row, attempts, texts), **waiting, "timeline": views.timeline(trigger_id, decisions)})


@router.delete("/{trigger_id}")
async def stop_trigger(
    service: ServiceOf, agent_id: AgentId, trigger_id: TriggerId, arrival: ArrivalOf
) -> JSONResponse:
    """Stop a trigger: 200 it has ended, 202 its runner was told."""
    return answer_write(await service.writes.stop_trigger(agent_id, trigger_id, arrival))


_NOT_WAITING: Final[dict[str, Any]] = {"position": None, "reason": None, "waits_for": []}


async def _waiting(reading: Reading, agent: DictRow, row: DictRow) -> dict[str, Any]:
    """Position, reason and every cause of waiting."""
    agent_id = agent["agent_id"]
    key = {name: row[name] for name in ("available_at", "created_at", "trigger_id")}
    facts = await reading.together(
        position_in_queue={"agent_id": agent_id, **key}, slots_of_agent={"agent_id": agent_id}
    )
    held_since = None
    if agent["paused"] or agent["parked"] is not None:
        command = "pause" if agent["paused"] else "park"
        held_since = await reading.value("last_effective_decision", agent_id=agent_id, command_type=command)
    found = causes(agent, row, views.now(), facts["slots_of_agent"], held_since)
    return {
        "position": facts["position_in_queue"][0]["before"] + 1,
        "reason": found[0].reason if found else None,
        "waits_for": [views.cause(cause) for cause in found],
    }


def _refused(agent_id: str, trigger_id: str, agent: DictRow | None, decisions: list[DictRow]) -> dict[str, Any]:
    """A trigger that was refused leaves nothing but decisions. Raises Problem if there are none."""
    refusals = [row for row in decisions if row["command_id"] == trigger_id and row["refusal_code"] is not None]
    asked = [row for row in refusals if row["command_type"] in ("trigger", "invalid")]
    if not asked:
        if agent is None:
            raise unknown_agent(agent_id)
        raise Problem(404, "trigger_unknown", f"Agent {agent_id!r} has no trigger {trigger_id!r}.")
    refused = asked[-1]
    return {
        "agent_id": agent_id,
        "trigger_id": trigger_id,
        "conversation_id": refused["record"]["command"].get("conversation_id"),
        "state": "refused",
        "state_since": views.instant(refused["decided_at"]),
        "code": refused["refusal_code"],
        "attempts": [],
        **_NOT_WAITING,
        "timeline": views.timeline(trigger_id, decisions),
    }
