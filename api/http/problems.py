"""Everything that goes wrong, as ``application/problem+json`` (RFC 9457).

A problem has ``type``, ``title``, ``status``, ``detail`` (what happened and what to do) and ``code``, which is stable
and which programs may rely on; further members belong to the code. Refusals keep the code of the rules. Nothing about
the inside of the service is told: an unexpected error carries an ``incident`` to look for in the service's log.
"""

import secrets
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import psycopg
import psycopg_pool
import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from api.http.decisions import LogUnavailable
from streams.rules.messages import NO_CONTROL_CHARACTERS
from streams.rules.verdicts import Refusal

log = structlog.get_logger()

RETRY_AFTER_SECONDS: Final = 1

REFUSAL_STATUS: Final[Mapping[str, int]] = {
    "invalid_record": 400,
    "agent_on_busy_invalid": 400,
    "agent_parallelism_limit_unsupported": 400,
    "agent_not_found": 404,
    "trigger_unknown": 404,
    "request_expired": 503,
    "site_not_answering": 503,
}
"""HTTP status by the rules' code; every other refusal is 409: the request was fine, the state of things was not."""

REFUSAL_ADVICE: Final[Mapping[str, str]] = {
    "invalid_record": "Nothing was changed. Correct what `reason` names and send it again.",
    "agent_on_busy_invalid": "Nothing was changed. Use ask, queue, force or interrupt.",
    "request_expired": "It was handled too late and had no effect. Send it again.",
    "trigger_id_conflict": "This id or Idempotency-Key belongs to another request; use a new one.",
    "agent_not_found": "No such agent. Create it with PUT /api/agents/{agent_id}.",
    "agent_archived": "The agent is archived; configuring it brings it back.",
    "agent_parallelism_limit_unsupported": "A serial agent runs one at a time; its limit can't be changed.",
    "trigger_unknown": "No such trigger or conversation lives or is remembered.",
    "agent_paused": "The agent is paused. Queue the trigger, or resume the agent.",
    "conversation_busy": "The conversation has an earlier turn. Queue behind it, interrupt it, or stop it.",
    "approval_required": "A person has to approve it before it may start. Queue it, and have it approved.",
    "dependency_unfinished": "What it depends on has not finished. Queue it: it starts when that has.",
    "not_yet_available": "Its available_at lies in the future. Queue it, or ask again then.",
    "run_budget_used_up": "The run budget has nothing left. Queue the trigger, or raise the budget.",
    "agent_parallelism_limit_reached": "All slots of the agent are taken. Queue the trigger.",
    "force_limit_reached": "As many forced ones run as the agent has slots. Queue the trigger.",
    "agent_backlog_full": "As much waits as the agent may have waiting. Try later.",
    "site_unknown": "Nobody has configured this site. Set its capacity with PUT /api/sites/{site}/capacity.",
    "site_paused": "The site is paused. Queue the trigger, or resume the site.",
    "organization_disabled": "The organization is disabled at this site. Queue the trigger, or enable it.",
    "department_disabled": "The department is disabled at this site. Queue the trigger, or enable it.",
    "agent_environment_folder_busy": "Others (`holders`) work in an overlapping folder. Queue the trigger.",
    "site_workers_busy": "Every worker of the site's pool is taken. Queue the trigger, or enlarge the pool.",
    "site_not_answering": "The site didn't answer in time, so nothing was started. Send it again, with a new key.",
}

_MORE_ADVICE: Final[Mapping[tuple[str, str | None], str]] = {
    ("agent_backlog_full", "max_backlog_depth"): "Or raise its max_backlog_depth.",
    ("agent_backlog_full", "backlog_bytes_max"): "Or send smaller payloads: theirs are at the most that may wait.",
}
"""By code and reason, where the reason is the name of a bound."""


class Problem(Exception):  # noqa: N818 - the word of RFC 9457
    """An answer that says why the request was not fulfilled; raised where that is found out."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        members: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(f"{code}: {detail}")
        self.status = status
        self.code = code
        self.detail = detail
        self.members = dict(members or {})
        self.headers = dict(headers or {})

    def content(self) -> dict[str, Any]:
        return {
            "type": f"urn:berth:problem:{self.code}",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": self.detail,
            "code": self.code,
            **self.members,
        }

    def response(self) -> JSONResponse:
        return JSONResponse(
            self.content(), status_code=self.status, headers=self.headers, media_type="application/problem+json"
        )


def invalid(code: str, field: str, detail: str) -> Problem:
    """400 about one field."""
    return Problem(400, code, detail, members={"field": field})


def unknown_agent(agent_id: str) -> Problem:
    return Problem(404, "agent_not_found", f"There is no agent {agent_id!r}. {REFUSAL_ADVICE['agent_not_found'][15:]}")


def unknown_trigger(agent_id: str, trigger_id: str) -> Problem:
    return Problem(404, "trigger_unknown", f"Agent {agent_id!r} has no trigger {trigger_id!r}.")


def unavailable(code: str, detail: str) -> Problem:
    return Problem(503, code, detail, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})


def database_unavailable() -> Problem:
    return unavailable(
        "database_unavailable",
        "The database of the read side can't be reached, so nothing can be read now. Writes go on. Try again soon.",
    )


def of_refusal(refusal: Refusal, members: Mapping[str, Any], status: int | None = None) -> Problem:
    """What the rules refused, with everything that they know of the way out. ``status`` None: that of the code."""
    status = REFUSAL_STATUS.get(refusal.code, 409) if status is None else status
    detail = REFUSAL_ADVICE.get(refusal.code, "Nothing was changed.")
    if (more := _MORE_ADVICE.get((refusal.code, refusal.reason))) is not None:
        detail = f"{detail} {more}"
    elif refusal.reason:
        detail = f"{refusal.reason}. {detail}"
    if refusal.force_allowed:
        detail = f"{detail} Or force it: then it runs beyond the limit."
    known = {
        "running": refusal.running,
        "limit": None if refusal.limit == "unlimited" else refusal.limit,
        "waiting": refusal.waiting,
        "position_if_queued": refusal.position_if_queued,
        "force_allowed": refusal.force_allowed,
        "holders": list(refusal.holders),
        "holders_count": refusal.holders_count,
    }
    reason = {} if refusal.reason is None else {"reason": refusal.reason}
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if status == 503 else {}
    has_counts = refusal.code == "site_not_answering" or (status == 409 and refusal.code != "trigger_id_conflict")
    return Problem(
        status,
        refusal.code,
        detail,
        members={**reason, **(known if has_counts else {}), **members},
        headers=headers,
    )


def of_log(error: LogUnavailable) -> Problem:
    """What a write is told that Kafka has not acknowledged, or nobody has decided in time."""
    if error.acknowledged:
        detail = (
            "Kafka has the request, but it was not decided in time: it will not take effect. Send it again; with the "
            "Idempotency-Key of this request that is safe in every case."
        )
    else:
        detail = (
            "Kafka has not acknowledged the request. Send it again with the same Idempotency-Key (or the same id): "
            "then it counts once, whatever became of this one."
        )
    return unavailable("log_unavailable", detail)


_TYPES: Final[Mapping[str, tuple[str, str]]] = {
    "extra_forbidden": ("unknown_field", "is not a field of this request"),
    "missing": ("missing_field", "is required"),
}


def of_validation(errors: Sequence[Any]) -> Problem:
    """The first thing that is wrong with a request; an invalid on_busy comes before everything else (B2)."""
    errors = sorted(errors, key=lambda error: error["loc"][-1:] != ("on_busy",))
    error = errors[0]
    where, *path = error["loc"]
    path = [part for part in path if not str(part).startswith("(")]  # the form of the body is no field
    field = ".".join(str(part) for part in path) or str(where)
    if error["type"] == "missing" and not path:
        return invalid("missing_field", "body", "The request needs a JSON body (Content-Type: application/json).")
    if field == "on_busy":
        return invalid("agent_on_busy_invalid", field, "on_busy must be one of: ask, queue, force, interrupt.")
    code, words = _TYPES.get(error["type"], ("invalid_field", ""))
    if error["type"] == "value_error":
        words = str(error["ctx"]["error"])
    if error["type"] == "string_pattern_mismatch" and error["ctx"]["pattern"] == NO_CONTROL_CHARACTERS:
        words = "must have no control characters"
    return invalid(code, field, f"{field}: {words or error['msg']}. Nothing was changed.")


async def _answer_problem(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Problem)
    return error.response()


async def _answer_log(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, LogUnavailable)
    return of_log(error).response()


async def _answer_validation(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return of_validation(error.errors()).response()


async def _answer_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    detail = {
        404: "There is nothing at this address; /docs lists what there is.",
        405: f"This address doesn't take {request.method}; the Allow header says what it takes.",
    }.get(error.status_code, str(error.detail))
    return Problem(error.status_code, code, detail, headers=error.headers).response()


async def _answer_database(_request: Request, error: Exception) -> JSONResponse:
    log.warning("database_not_reached", error=repr(error))
    return database_unavailable().response()


async def _answer_unexpected(request: Request, error: Exception) -> JSONResponse:
    incident = secrets.token_hex(8)
    log.error("request_failed", incident=incident, method=request.method, error=type(error).__name__, exc_info=error)
    detail = "Something unexpected happened in the service. It is in its log under `incident`."
    return Problem(500, "internal_error", detail, members={"incident": incident}).response()


def install(app: FastAPI) -> None:
    """Answer every error of ``app`` as a problem."""
    app.add_exception_handler(Problem, _answer_problem)
    app.add_exception_handler(LogUnavailable, _answer_log)
    app.add_exception_handler(RequestValidationError, _answer_validation)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(psycopg.OperationalError, _answer_database)
    app.add_exception_handler(psycopg_pool.PoolTimeout, _answer_database)
    app.add_exception_handler(psycopg_pool.TooManyRequests, _answer_database)
    app.add_exception_handler(psycopg.errors.UndefinedTable, _answer_database)  # no projector has run yet
    app.add_exception_handler(Exception, _answer_unexpected)
