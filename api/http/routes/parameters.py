"""What the routes share: ids in paths, pages, positions, keys, and the service behind them."""

from dataclasses import dataclass
from typing import Annotated, Any, Final

from fastapi import Depends, Header, Path, Query, Request
from fastapi.responses import JSONResponse
from pydantic import BeforeValidator

from api.http.auth import Authentication
from api.http.database import Database
from api.http.decisions import Log
from api.http.dispatches import Dispatches
from api.http.intake import decoded
from api.http.live import Live
from api.http.past import Moment, read_moment
from api.http.positions import LogPosition, read_position
from api.http.problems import invalid
from api.http.readiness import Readiness
from api.http.rights import CallerOf
from api.http.tasks import Outcomes
from api.http.what_if import WhatIfs
from api.http.writes import KEY_CHARACTERS_MAX, Arrival, Reply, Writes
from streams.rules.messages import Id

PAGE_ROWS_DEFAULT: Final = 100
PAGE_ROWS_MAX: Final = 1_000


@dataclass(frozen=True, slots=True)
class Service:
    """What the routes work with."""

    database: Database
    log: Log
    live: Live
    dispatches: Dispatches
    outcomes: Outcomes
    writes: Writes
    readiness: Readiness
    authentication: Authentication
    what_ifs: WhatIfs

    def end(self) -> None:
        """Let nobody wait any longer: the service is being stopped."""
        for part in (self.live, self.dispatches, self.outcomes, self.what_ifs):
            part.end()


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def refuse_unknown_parameters(request: Request) -> None:
    """Raise Problem for a parameter that the address doesn't have: a misspelt one would count for nothing."""
    path = request.scope["route"].path
    if not request.query_params or not path.startswith("/api"):
        return
    address = request.app.openapi()["paths"][path][request.method.lower()]
    known = [one["name"] for one in address.get("parameters", ()) if one["in"] == "query"]
    for name in request.query_params:
        if name not in known:
            detail = f"has {', '.join(known)}" if known else "has none"
            raise invalid(
                "unknown_field", name[:200], f"{name[:200]!r} is no parameter of this address, which {detail}."
            )


async def _min_position(
    min_position: Annotated[
        str | None, Query(description="log_position of a write's answer: wait up to 2 s until that is visible")
    ] = None,
) -> LogPosition | None:
    if min_position is None:
        return None
    try:
        return read_position(min_position)
    except ValueError as error:
        raise invalid("invalid_field", "min_position", f"min_position {error}.") from None


async def _as_of(
    as_of: Annotated[
        str | None,
        Query(
            description="a moment of the past: a time, or the number (seq) of a decision of the agent",
            examples=["2026-03-01T10:00:00Z", "12"],
        ),
    ] = None,
) -> Moment | None:
    return None if as_of is None else read_moment(as_of)


IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        description="the same key gives the same answer, whenever it is sent",
        json_schema_extra={"minLength": 1, "maxLength": KEY_CHARACTERS_MAX, "pattern": "^[ -~]+$"},
    ),
]


async def _arrival(caller: CallerOf, key: IdempotencyKey = None) -> Arrival:
    return Arrival.now(caller, key)


ServiceOf = Annotated[Service, Depends(_service)]
AgentId = Annotated[Id, BeforeValidator(decoded), Path()]
TriggerId = Annotated[Id, BeforeValidator(decoded), Path()]
SiteId = Annotated[Id, BeforeValidator(decoded), Path()]
GateName = Annotated[Id, BeforeValidator(decoded), Path()]
EnvironmentId = Annotated[Id, BeforeValidator(decoded), Path()]
ConversationId = Annotated[Id, BeforeValidator(decoded), Path()]
MinPosition = Annotated[LogPosition | None, Depends(_min_position)]
AsOf = Annotated[Moment | None, Depends(_as_of)]
ArrivalOf = Annotated[Arrival, Depends(_arrival)]
Rows = Annotated[int, Query(alias="limit", ge=1, le=PAGE_ROWS_MAX, description="rows of a page")]
Cursor = Annotated[str | None, Query(description="next_cursor of the page before")]


def answer(content: dict[str, Any]) -> JSONResponse:
    return JSONResponse(content)


def answer_write(reply: Reply) -> JSONResponse:
    return JSONResponse(reply.content, status_code=reply.status, headers=reply.headers)
