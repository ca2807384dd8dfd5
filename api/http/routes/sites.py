"""Sites: the pool of workers, folders and who has them, gates of organizations and departments."""

from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse

from api.http import views
from api.http.problems import Problem
from api.http.requests import GateRequest, SiteCapacityRequest
from api.http.routes.parameters import (
    PAGE_ROWS_DEFAULT,
    ArrivalOf,
    Cursor,
    EnvironmentId,
    GateName,
    MinPosition,
    Rows,
    Service,
    ServiceOf,
    SiteId,
    answer,
)
from api.http.writes import Arrival
from streams.rules import site_events
from streams.rules.messages import FolderPath

router = APIRouter(prefix="/api/sites", tags=["sites"])

GRANTED_ROWS_MAX: Final = 1_000
Scope = Literal["organization", "department"]


@router.get("")
async def list_sites(
    service: ServiceOf, min_position: MinPosition, rows: Rows = PAGE_ROWS_DEFAULT, cursor: Cursor = None
) -> JSONResponse:
    """Sites by id, with what runs and waits at them now."""
    (after,) = views.read_cursor(cursor, 1) if cursor is not None else ("",)
    async with service.database.reading(min_position) as reading:
        found = await reading.rows("sites_page", after_site=after, visible=None, max_rows=rows)
    following = views.cursor(found[-1]["site"]) if len(found) == rows else None
    return answer({"sites": [views.site(row) for row in found], "next_cursor": following})


@router.get("/{site}")
async def read_site(
    service: ServiceOf,
    site: SiteId,
    min_position: MinPosition,
    rows: Rows = PAGE_ROWS_DEFAULT,
    cursor: Cursor = None,
) -> JSONResponse:
    """A site: its pool, what waits in start order (in pages), what is granted to whom, its gates."""
    names = ("available_at", "created_at", "trigger_id", "agent_id")
    before: dict[str, Any] = dict(zip(names, ("-infinity", "-infinity", "", ""), strict=True))
    if cursor is not None:
        before = dict(zip(names, views.read_cursor(cursor, 4), strict=True))
        for name in ("available_at", "created_at"):
            before[name] = views.read_instant_of_cursor(before[name])
    first_granted = {"after_granted_at": "-infinity", "after_agent_id": "", "after_trigger_id": ""}
    async with service.database.reading(min_position) as reading:
        found = await reading.together(
            site={"site": site},
            site_waiting_page={"site": site, "max_rows": rows, **{f"after_{n}": v for n, v in before.items()}},
            site_granted_page={"site": site, "max_rows": GRANTED_ROWS_MAX, **first_granted},
            site_gates_page={"site": site, "after_scope": "", "after_name": "", "max_rows": GRANTED_ROWS_MAX},
        )
    if not found["site"]:
        raise _unknown(site)
    waiting = found["site_waiting_page"]
    following = views.cursor(*(waiting[-1][name] for name in names)) if len(waiting) == rows else None
    return answer(
        {
            **views.site(found["site"][0]),
            "queue": [views.site_waiting(row) for row in waiting],
            "held": [views.site_granted(row) for row in found["site_granted_page"]],
            "gates": [views.gate(row) for row in found["site_gates_page"]],
            "next_cursor": following,
        }
    )


@router.put("/{site}/capacity")
async def put_site_capacity(
    service: ServiceOf, site: SiteId, request: SiteCapacityRequest, arrival: ArrivalOf
) -> JSONResponse:
    """Make a site, or change how many workers its pool has; a lower number stops nobody."""
    given = request.model_dump()
    decision, about = await service.writes.site_control(site, "configure_site", given, arrival)
    for event in decision.events:
        if isinstance(event, site_events.SiteConfigured):
            given["capacity"] = event.capacity
    return answer({**about, **given})


@router.post("/{site}/pause")
async def pause_site(service: ServiceOf, site: SiteId, arrival: ArrivalOf) -> JSONResponse:
    """Grant nothing more; what runs goes on."""
    return await _control(service, site, "pause_site", {}, arrival)


@router.post("/{site}/resume")
async def resume_site(service: ServiceOf, site: SiteId, arrival: ArrivalOf) -> JSONResponse:
    """End the pause."""
    return await _control(service, site, "resume_site", {}, arrival)


@router.get("/{site}/organizations/{name}")
async def read_organization(
    service: ServiceOf, site: SiteId, name: GateName, min_position: MinPosition
) -> JSONResponse:
    """Whether the organization may start at the site, its budget, and whether what it had there is drained."""
    return await _read_gate(service, site, "organization", name, min_position)


@router.put("/{site}/organizations/{name}")
async def put_organization(
    service: ServiceOf, site: SiteId, name: GateName, request: GateRequest, arrival: ArrivalOf
) -> JSONResponse:
    """Enable or disable the organization at the site, or set its budget."""
    return await _put_gate(service, site, "organization", name, request, arrival)


@router.get("/{site}/departments/{name}")
async def read_department(service: ServiceOf, site: SiteId, name: GateName, min_position: MinPosition) -> JSONResponse:
    """The same for a department."""
    return await _read_gate(service, site, "department", name, min_position)


@router.put("/{site}/departments/{name}")
async def put_department(
    service: ServiceOf, site: SiteId, name: GateName, request: GateRequest, arrival: ArrivalOf
) -> JSONResponse:
    """The same for a department."""
    return await _put_gate(service, site, "department", name, request, arrival)


@router.delete("/{site}/environments/{environment_id}")
async def delete_environment(
    service: ServiceOf, site: SiteId, environment_id: EnvironmentId, arrival: ArrivalOf
) -> JSONResponse:
    """Say that an environment is gone: what waits for it goes on without, what runs in it goes on."""
    return await _control(service, site, "delete_environment", {"environment_id": environment_id}, arrival)


@router.delete("/{site}/environments/{environment_id}/folders")
async def delete_folder(
    service: ServiceOf,
    site: SiteId,
    environment_id: EnvironmentId,
    path: Annotated[FolderPath, Query()],
    arrival: ArrivalOf,
) -> JSONResponse:
    """Say that a folder is gone, with all that is below it."""
    given = {"environment_id": environment_id, "path": path}
    return await _control(service, site, "delete_folder", given, arrival)


async def _control(service: Service, site: str, kind: str, given: dict[str, Any], arrival: Arrival) -> JSONResponse:
    _, about = await service.writes.site_control(site, kind, given, arrival)
    return answer({**about, **given})


async def _put_gate(
    service: Service, site: str, scope: Scope, name: str, request: GateRequest, arrival: Arrival
) -> JSONResponse:
    given = {"scope": scope, "name": name, **request.model_dump(exclude_unset=True)}
    decision, about = await service.writes.site_control(site, "gate", given, arrival)
    for event in decision.events:
        if isinstance(event, site_events.GateChanged):
            given |= {"enabled": event.enabled, "run_budget": event.run_budget}
    return answer({**about, **given})


async def _read_gate(service: Service, site: str, scope: Scope, name: str, min_position: MinPosition) -> JSONResponse:
    about = {"site": site, "scope": scope, "gate_name": name}
    async with service.database.reading(min_position) as reading:
        found = await reading.together(site={"site": site}, site_gate=about, gate_granted=about)
    if not found["site"]:
        raise _unknown(site)
    granted = found["gate_granted"][0]["granted"]
    usual = {"enabled": True, "disabled_at": None, "run_budget": None, "run_budget_at": None, "drained": False}
    changed = found["site_gate"][0] if found["site_gate"] else {}
    return answer({"site": site, **views.gate({"scope": scope, "name": name, "granted": granted, **usual, **changed})})


def _unknown(site: str) -> Problem:
    return Problem(404, "site_unknown", f"There is no site {site!r}. Make it with PUT /api/sites/{{site}}/capacity.")
