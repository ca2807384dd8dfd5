"""/openapi.json: what FastAPI makes of the routes, with every status that an address may answer and an example of each.

The examples are what ``examples.py`` says; their fields are also the schema of the answers, so that whoever tests the
service by its description finds a field that is missing.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI

from api.http.examples import EXAMPLES, PROBLEMS, Example
from api.http.rights import RIGHTS

_WITH_BODY: Final = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_PROBLEM: Final[Mapping[str, Any]] = {
    "type": "object",
    "required": ["type", "title", "status", "detail", "code"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "what happened, what was kept, and what to do"},
        "code": {"type": "string", "description": "stable; docs/errors.md lists them"},
        "field": {"type": "string", "description": "what is wrong, when it is one field"},
    },
}


def install(app: FastAPI) -> None:
    """Describe every address of ``app``. Call it when all routes are there."""
    as_made = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _complete(as_made())
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(schema: dict[str, Any]) -> dict[str, Any]:
    components = schema.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["Problem"] = dict(_PROBLEM)
    components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer", "bearerFormat": "JWT"}}
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            _describe(method.upper(), path, operation)
    return schema


def _describe(method: str, path: str, operation: dict[str, Any]) -> None:
    right = RIGHTS.get((method, path))
    is_open = right is not None and right.is_open
    operation["security"] = [] if is_open else [{"token": []}]
    made = operation["responses"]
    made.pop("422", None)
    shown = EXAMPLES.get((method, path))
    if shown is not None:
        for status in [status for status in made if int(status) < 300]:
            del made[status]
        made |= {str(status): _success(status, example) for status, example in shown.items()}
    if path == "/metrics":
        made["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    problems = {status: _problem(status) for status in problems_of(method, path, is_open)}
    operation["responses"] = dict(sorted((made | problems).items()))


def problems_of(method: str, path: str, is_open: bool) -> list[str]:
    """The statuses with which an address may refuse."""
    found = {421, 500}
    if path.startswith("/api"):
        found |= {400, 404, 503, 504}
        if not is_open:
            found |= {401, 403}
        if method in _WITH_BODY:
            found |= {409, 413, 415}
    if path.endswith(("/task", "/what-if")) or path.startswith(("/api/internal", "/api/public")):
        found |= {429}
    if "public" in path:
        found |= {401, 501}
    return [str(status) for status in sorted(found)]


def _success(status: int, example: Example) -> dict[str, Any]:
    content = example.content
    schema = {"type": "object", "required": [name for name in content if name not in example.optional]}
    media = {"application/json": {"schema": schema, "example": content}}
    return {"description": example.words or HTTPStatus(status).phrase, "content": media}


def _problem(status: str) -> dict[str, Any]:
    code, detail, members = PROBLEMS[int(status)]
    title = HTTPStatus(int(status)).phrase
    example = {
        "type": f"urn:berth:problem:{code}",
        "title": title,
        "status": int(status),
        "detail": detail,
        "code": code,
        **members,
    }
    schema = {"$ref": "#/components/schemas/Problem"}
    return {"description": title, "content": {"application/problem+json": {"schema": schema, "example": example}}}
