"""Looking back: decisions as they are in the log, the last verification of it, and another policy tried on it.

Decisions are an agent's: their order is that of ``seq``, and between agents there is none to page by. What is written
there stays as it is, so a page is the same whenever it is asked for, and new decisions come after the last.
"""

import json
from datetime import datetime
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from psycopg.rows import DictRow

from api.http import views
from api.http.database import Reading
from api.http.problems import Problem, invalid, unknown_agent, unknown_trigger
from api.http.requests import WhatIfRequest
from api.http.rights import CallerOf, require_access
from api.http.routes.parameters import PAGE_ROWS_DEFAULT, MinPosition, Rows, ServiceOf, answer
from api.http.what_if import ClientLeft
from streams.rules.messages import Id

router = APIRouter(prefix="/api/audit", tags=["audit"])

PAGE_CHARACTERS_MAX: Final = 2 * 1024 * 1024
"""A page ends after the decision with which it has as much."""
_READ_ROWS: Final = 50
"""As many are read at a time, so that no answer of the database is much larger than a page."""
_SEQ_MAX: Final = 2**53
CLIENT_LEFT_STATUS: Final = 499
"""Nobody receives it: it is for the access log."""


@router.get("/decisions")
async def list_decisions(
    service: ServiceOf,
    caller: CallerOf,
    min_position: MinPosition,
    agent: Annotated[Id | None, Query(description="required: whose decisions")] = None,
    trigger: Annotated[
        Id | None, Query(description="only those that name this id: of a trigger of the agent, or of a command")
    ] = None,
    after: Annotated[
        int, Query(ge=0, le=_SEQ_MAX, description="next_cursor of the page before: the seq of its last decision")
    ] = 0,
    rows: Rows = PAGE_ROWS_DEFAULT,
) -> Response:
    """The decisions of an agent, or those about one of its triggers, as they are in the log, oldest first."""
    if agent is None:
        what = "" if trigger is None else " Ids of triggers are an agent's own, so trigger needs it too."
        detail = f"agent is required: decisions are an agent's.{what} GET /api/events has those of all agents."
        raise invalid("missing_field", "agent", detail)
    require_access(caller, (agent,))
    async with service.database.reading(min_position) as reading:
        found, more = await _page(reading, agent, trigger, after, rows)
        if not found:
            await _require_any(reading, agent, trigger)
    about = {"agent_id": agent, "trigger_id": trigger, "next_cursor": found[-1]["seq"] if more else None}
    decisions = ",".join(
        f'{{"partition":{row["log_partition"]},"offset":{row["log_offset"]},"decision":{row["record"]}}}'
        for row in found
    )
    content = f'{json.dumps(about)[:-1]}, "decisions":[{decisions}]}}'  # records are text already
    return Response(content, media_type="application/json")


async def _page(reading: Reading, agent_id: str, id: str | None, after: int, rows: int) -> tuple[list[DictRow], bool]:
    """The next decisions, and whether there may be more."""
    about = {"agent_id": agent_id} if id is None else {"agent_id": agent_id, "id": id}
    query = "decision_texts_of_agent_page" if id is None else "decision_texts_of_id_page"
    found: list[DictRow] = []
    size = 0
    while len(found) < rows:
        wanted = min(_READ_ROWS, rows - len(found))
        part = await reading.rows(query, **about, after_seq=found[-1]["seq"] if found else after, max_rows=wanted)
        for row in part:
            found.append(row)
            size += len(row["record"])
            if size >= PAGE_CHARACTERS_MAX:
                return found, True
        if len(part) < wanted:
            return found, False
    return found, True


async def _require_any(reading: Reading, agent_id: str, id: str | None) -> None:
    """Raise Problem when there is nothing to page through; not at its end."""
    if not await reading.rows("decision_texts_of_agent_page", agent_id=agent_id, after_seq=0, max_rows=1):
        raise unknown_agent(agent_id)
    if id is not None and not await reading.rows(
        "decision_texts_of_id_page", agent_id=agent_id, id=id, after_seq=0, max_rows=1
    ):
        raise unknown_trigger(agent_id, id)


@router.get("/verify")
async def read_verification(service: ServiceOf) -> JSONResponse:
    """What ``berth verify`` found when it last read the whole log."""
    async with service.database.reading() as reading:
        row = await reading.row("last_verification")
    if row is None:
        raise Problem(
            404,
            "never_verified",
            "Nobody has verified the log yet. Run berth verify where it reaches Kafka and this database; it takes "
            "about a minute for a million decisions, may run beside the live service, and is best repeated every day.",
        )
    return answer({"verified_at": views.instant(row["verified_at"]), **row["result"]})


@router.post("/what-if")
async def what_if(service: ServiceOf, change: WhatIfRequest, request: Request) -> Response:
    """Replay recorded traffic with other limits, pools or gates: who would have waited less, who longer."""
    if change.since is not None and change.until is None and datetime.fromisoformat(change.since) >= views.now():
        raise invalid("invalid_field", "since", "since: is still to come, and until is now where it isn't given.")

    async def client_leaves() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    try:
        content = await service.what_ifs.answer(change, client_leaves())
    except ClientLeft:
        return Response(status_code=CLIENT_LEFT_STATUS)
    return Response(content, media_type="application/json")
