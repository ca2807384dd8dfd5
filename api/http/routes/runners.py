"""Runners without Kafka: dispatches by long poll, statuses by POST."""

import asyncio
import json
from datetime import timedelta
from typing import Annotated, Any, Final

from fastapi import APIRouter, Body, Query
from fastapi.responses import JSONResponse
from pydantic import Discriminator, Field, Tag

from api.http import views
from api.http.auth import Caller
from api.http.positions import read_runner_position, write_runner_position
from api.http.problems import invalid
from api.http.requests import BULK_MAX, StatusReport
from api.http.rights import CallerOf, access_denied, require_access
from api.http.routes.parameters import ArrivalOf, Service, ServiceOf
from streams import STATUSES
from streams.rules.limits import SCHEMA_VERSION
from streams.rules.messages import Id

router = APIRouter(prefix="/api", tags=["runners"])

WAIT_SECONDS_DEFAULT: Final = 20
WAIT_SECONDS_MAX: Final = 60
DISPATCHES_MAX: Final = 100
TABLES_BEHIND_SECONDS: Final = 60
"""What was dispatched since may not be in the tables yet."""
AGENTS_MAX: Final = 500


class _Escaped(JSONResponse):
    """JSON in ASCII: lone surrogates of people's texts have no UTF-8, but an escape, and are handed on as they came."""

    def render(self, content: Any) -> bytes:
        """As the base class says."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


@router.get("/runners/dispatches")
async def poll_dispatches(
    service: ServiceOf,
    caller: CallerOf,
    agents: Annotated[list[Id], Query(max_length=AGENTS_MAX, description='may be given more than once; "*": all')],
    after: Annotated[str | None, Query(description="position of the answer whose dispatches are worked off")] = None,
    wait_seconds: Annotated[int, Query(ge=0, le=WAIT_SECONDS_MAX)] = WAIT_SECONDS_DEFAULT,
    limit: Annotated[int, Query(ge=1, le=DISPATCHES_MAX)] = DISPATCHES_MAX,
) -> JSONResponse:
    """Wait for dispatches, stop requests and revocations of these agents; an empty list when none came in time."""
    wanted = _wanted(caller, agents)
    try:
        offsets = {} if after is None else read_runner_position(after)
    except ValueError as error:
        raise invalid("invalid_field", "after", f"after {error}.") from None
    until_seconds = asyncio.get_running_loop().time() + wait_seconds
    since = None
    if after is None:
        async with service.database.reading() as reading:
            oldest = await reading.value("oldest_running_attempt", agent_ids=wanted)
        recent = views.now() - timedelta(seconds=TABLES_BEHIND_SECONDS)
        since = recent if oldest is None else min(oldest, recent)
    while True:
        read = await service.dispatches.read(wanted, offsets, since, until_seconds, limit)
        records = read.records if after is not None else await _not_ended(service, read.records)
        if records or read.is_last or asyncio.get_running_loop().time() >= until_seconds:
            return _Escaped({"dispatches": records, "position": write_runner_position(read.next_offsets)})
        offsets = read.next_offsets


def _wanted(caller: Caller, agents: list[str]) -> list[str] | None:
    """The agents asked for, None: all. "*" is every agent to which the token gives access."""
    if "*" in agents:
        return caller.visible
    require_access(caller, agents)
    return agents


async def _not_ended(service: Service, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a runner that is new here has to do with: attempts that haven't ended."""
    if not records:
        return []
    named = [(record["agent_id"], record["trigger_id"], record["execution_id"]) for record in records]
    agent_ids, trigger_ids, execution_ids = (list(column) for column in zip(*named, strict=True))
    async with service.database.reading() as reading:
        rows = await reading.rows(
            "ended_attempts", agent_ids=agent_ids, trigger_ids=trigger_ids, execution_ids=execution_ids
        )
    ended = {row["execution_id"] for row in rows}
    return [record for record in records if record["execution_id"] not in ended]


def _form(content: Any) -> str:
    return "(list)" if isinstance(content, list) else "(one)"


Reports = Annotated[
    Annotated[StatusReport, Tag("(one)")]
    | Annotated[list[StatusReport], Field(min_length=1, max_length=BULK_MAX), Tag("(list)")],
    Discriminator(_form),
]


@router.post("/statuses", status_code=202)
async def report_statuses(
    service: ServiceOf, caller: CallerOf, reports: Annotated[Reports, Body()], arrival: ArrivalOf
) -> JSONResponse:
    """Say how attempts go: one status, or a list of up to 1,000, in order. 202: Kafka has them.

    Of a list those are left out, and listed in ``results``, to whose agents the token gives no access.
    """
    if isinstance(reports, StatusReport):
        require_access(caller, (reports.agent_id,))
        await service.log.publish(STATUSES, [_record(reports)], arrival.seconds)
        return JSONResponse({"status": "accepted"}, status_code=202)
    taken = [report for report in reports if caller.may_use(report.agent_id)]
    if taken:
        await service.log.publish(STATUSES, [_record(report) for report in taken], arrival.seconds)
    results = [
        {"status": "accepted"}
        if caller.may_use(report.agent_id)
        else {"status": "refused", "problem": access_denied(report.agent_id).content()}
        for report in reports
    ]
    return JSONResponse({"results": results}, status_code=202)


def _record(report: StatusReport) -> tuple[str, bytes]:
    fields = {"type": "status", "v": SCHEMA_VERSION, **report.model_dump(exclude_unset=True, exclude_none=True)}
    return report.agent_id, json.dumps(fields, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
