"""The application: what it consists of, in which order it begins and ends.

It starts whatever is away: Kafka and Postgres are connected to in the background, ``/readyz`` says what is missing,
and a request that needs it is answered 503. Every address depends on ``rights.py``, which asks who it is (``auth.py``)
and whether they may.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Coroutine
from contextlib import asynccontextmanager
from importlib import resources
from typing import Final

import structlog
from fastapi import Depends, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, Response

from api.http import description, metrics, problems
from api.http.auth import Authentication
from api.http.database import Database, ProjectionBehind
from api.http.decisions import Log
from api.http.dispatches import Dispatches
from api.http.envelope import Envelope
from api.http.intake import Intake
from api.http.live import Live
from api.http.readiness import Bounds, Readiness
from api.http.rights import require_right
from api.http.routes import (
    agents,
    audit,
    bulk,
    conversations,
    dead_letters,
    events,
    public,
    runners,
    sites,
    tasks,
    triggers,
)
from api.http.routes.parameters import Service, ServiceOf, refuse_unknown_parameters
from api.http.tasks import Outcomes
from api.http.what_if import WhatIfs
from api.http.writes import Writes

log = structlog.get_logger()

PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}
PAGE_FILES = {"dashboard.css": "text/css", "dashboard.js": "text/javascript"}


_USUAL: Final = Bounds()


def create_app(
    bootstrap: str,
    partitions: int,
    database_url: str,
    authentication: Authentication,
    *,
    hosts: Collection[str] = (),
    origins: Collection[str] = (),
    bounds: Bounds = _USUAL,
) -> FastAPI:
    """The API on this Kafka and this database.

    ``hosts``: names that it answers to besides this machine's own; ``origins``: sites whose pages may ask it.
    """
    app = FastAPI(
        title="Berth",
        version="1",
        summary="Admission control for AI-agent runs",
        lifespan=_lifespan,
        redirect_slashes=False,
        dependencies=[Depends(require_right), Depends(refuse_unknown_parameters)],
    )
    database = Database(database_url)
    service_log = Log(bootstrap, partitions)
    app.state.service = Service(
        database=database,
        log=service_log,
        live=Live(bootstrap, partitions, service_log),
        dispatches=Dispatches(bootstrap, partitions),
        outcomes=Outcomes(service_log),
        writes=Writes(service_log, database),
        readiness=Readiness(bootstrap, partitions, database, bounds),
        authentication=authentication,
        what_ifs=WhatIfs(bootstrap, partitions),
    )
    app.add_middleware(Intake, hosts=hosts)
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
            allow_headers=["Authorization", "Content-Type", "Idempotency-Key", "Last-Event-ID"],
            expose_headers=["Location", "Retry-After", "WWW-Authenticate"],
        )
    app.add_middleware(Envelope)
    problems.install(app)
    app.add_exception_handler(ProjectionBehind, _answer_behind)
    for module in (agents, triggers, conversations, bulk, tasks, sites, runners, audit, dead_letters, events, public):
        app.include_router(module.router)
    app.add_api_route("/healthz", _health, methods=["GET"], tags=["operation"])
    app.add_api_route("/readyz", _ready, methods=["GET"], tags=["operation"])
    app.add_api_route("/metrics", _metrics, methods=["GET"], tags=["operation"])
    app.add_api_route("/", _page, methods=["GET"], include_in_schema=False)
    app.add_api_route("/dashboard/{name}", _page_file, methods=["GET"], include_in_schema=False)
    description.install(app)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service
    tasks = {
        name: asyncio.create_task(_logged(name, work), name=name)
        for name, work in (
            ("log", service.log.run()),
            ("database", service.database.run()),
            ("readiness", service.readiness.run()),
        )
    }
    app.state.parts = tasks
    yield
    for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)


async def _logged(name: str, work: Coroutine[None, None, None]) -> None:
    """A part that ends by itself has a bug: the service is unhealthy from then on, and its supervisor's affair."""
    try:
        await work
    except BaseException as error:
        log.log(
            logging.INFO if isinstance(error, asyncio.CancelledError) else logging.ERROR,
            "part_ended",
            part=name,
            exc_info=None if isinstance(error, asyncio.CancelledError) else error,
        )
        raise


async def _answer_behind(_request: object, _error: Exception) -> JSONResponse:
    return problems.Problem(
        504, "projection_behind", "The read side hasn't reached min_position within 2 s. The write stands; read again."
    ).response()


async def _health(request: Request) -> JSONResponse:
    failed = sorted(name for name, task in request.app.state.parts.items() if task.done())
    return JSONResponse({"healthy": not failed, "failed": failed}, status_code=503 if failed else 200)


async def _ready(service: ServiceOf) -> JSONResponse:
    report = service.readiness.report()
    return JSONResponse(report, status_code=200 if report["ready"] else 503)


async def _metrics(service: ServiceOf) -> Response:
    return metrics.answer(service.readiness.report())


async def _page() -> HTMLResponse:
    page = resources.files("api.dashboard") / "index.html"
    return HTMLResponse(page.read_text(), headers=PAGE_HEADERS)


async def _page_file(name: str) -> Response:
    if name not in PAGE_FILES:
        raise problems.Problem(404, "not_found", "There is no such file.")
    content = (resources.files("api.dashboard") / name).read_bytes()
    return Response(content, media_type=PAGE_FILES[name], headers=PAGE_HEADERS)
