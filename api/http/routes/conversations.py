"""Conversations: begin one, go on with it, read it, stop it."""

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from api.http import views
from api.http.problems import Problem, unknown_agent
from api.http.requests import ConversationRequest, MessageRequest, TurnRequest
from api.http.routes.parameters import (
    PAGE_ROWS_DEFAULT,
    AgentId,
    ArrivalOf,
    ConversationId,
    Cursor,
    MinPosition,
    Rows,
    ServiceOf,
    answer,
    answer_write,
)

router = APIRouter(prefix="/api/agents/{agent_id}/conversations", tags=["conversations"])

_LAST_CHARACTER = chr(0x10FFFF)


@router.post("", status_code=201)
async def begin_conversation(
    service: ServiceOf, agent_id: AgentId, request: ConversationRequest, arrival: ArrivalOf
) -> JSONResponse:
    """Begin a conversation with a message: 201 it runs, 202 it waits."""
    return answer_write(await service.writes.trigger(agent_id, _chat(request), arrival))


@router.post("/{conversation_id}", status_code=201)
@router.post("/{conversation_id}/messages", status_code=201)
async def send_message(
    service: ServiceOf,
    agent_id: AgentId,
    conversation_id: ConversationId,
    request: MessageRequest,
    arrival: ArrivalOf,
) -> JSONResponse:
    """A further turn: a message, or the reply that a paused trigger waits for."""
    given = {**_chat(request), "conversation_id": conversation_id}
    return answer_write(await service.writes.trigger(agent_id, given, arrival))


@router.get("/{conversation_id}")
async def read_conversation(
    service: ServiceOf,
    agent_id: AgentId,
    conversation_id: ConversationId,
    min_position: MinPosition,
    rows: Rows = PAGE_ROWS_DEFAULT,
    cursor: Cursor = None,
) -> JSONResponse:
    """A conversation and its triggers, the newest first."""
    accepted_at, trigger_id = views.read_cursor(cursor, 2) if cursor is not None else ("infinity", _LAST_CHARACTER)
    before = "infinity" if cursor is None else views.read_instant_of_cursor(accepted_at)
    async with service.database.reading(min_position) as reading:
        row = await reading.row("conversation", agent_id=agent_id, conversation_id=conversation_id)
        if row is None:
            if await reading.row("agent", agent_id=agent_id) is None:
                raise unknown_agent(agent_id)
            raise Problem(404, "conversation_unknown", f"Agent {agent_id!r} has no conversation {conversation_id!r}.")
        found = await reading.rows(
            "triggers_of_conversation_page",
            agent_id=agent_id,
            conversation_id=conversation_id,
            before_accepted_at=before,
            before_trigger_id=trigger_id,
            max_rows=rows,
        )
    following = None
    if len(found) == rows:
        following = views.cursor(found[-1]["accepted_at"], found[-1]["trigger_id"])
    return answer({**views.conversation(row, found), "next_cursor": following})


@router.post("/{conversation_id}/stop")
async def stop_conversation(
    service: ServiceOf, agent_id: AgentId, conversation_id: ConversationId, arrival: ArrivalOf
) -> JSONResponse:
    """Stop what it has running and waiting: 200 it has ended, 202 its runner was told."""
    return answer_write(await service.writes.stop_conversation(agent_id, conversation_id, arrival))


def _chat(request: TurnRequest) -> dict[str, object]:
    """In a conversation a turn is of kind chat, and a person waits for the answer, unless it says otherwise."""
    return {"kind": "chat", "interactive": True, **request.given()}
