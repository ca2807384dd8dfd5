"""What a request must be before anything looks at it: its address, its host, the size and form of its body.

This is the outermost layer. It refuses bodies over 1 MiB while they come in, JSON that is nested deeper than 32, that
isn't UTF-8, or that holds U+0000 or a lone surrogate anywhere, and addresses that aren't UTF-8.

Ids may hold a slash, so a path is matched as it was sent, percent-encoded: ``%2F`` is a character of an id, ``/`` is
not. ``decoded`` turns a part of it into the id.

Only the names that the service is known by are answered: this machine's own, and those of ``BERTH_API_HOSTS``. A name
that somebody else lets point here isn't one. A body needs ``Content-Type: application/json``, which no browser sends to
another site without asking first.
"""

from collections.abc import Collection, Iterator
from typing import Any, Final
from urllib.parse import unquote

from pydantic_core import from_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.problems import Problem, invalid

BODY_BYTES_MAX: Final = 1024 * 1024
JSON_DEPTH_MAX: Final = 32
LOCAL_HOSTS: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})
ANY_HOST: Final = "*"
_WITH_BODY: Final = frozenset({"POST", "PUT", "PATCH", "DELETE"})


def decoded(part: str) -> str:
    """A part of a path as it was meant. ValueError if it isn't UTF-8."""
    try:
        return unquote(part, errors="strict")
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None


class Intake:
    """ASGI middleware, see above. ``hosts``: names that are answered besides this machine's own; ``*``: all."""

    def __init__(self, app: ASGIApp, hosts: Collection[str] = ()) -> None:
        self._app = app
        self._hosts = None if ANY_HOST in hosts else LOCAL_HOSTS | frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or hand it on with its body read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            scope, receive = await _checked(scope, receive, self._hosts)
        except Problem as problem:
            await problem.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)


async def _checked(scope: Scope, receive: Receive, hosts: Collection[str] | None) -> tuple[Scope, Receive]:
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    host = headers.get("host", "")
    name = (host if host.endswith("]") else host.rpartition(":")[0] or host).lower()
    if hosts is not None and name not in hosts:
        raise Problem(
            421,
            "host_not_served",
            "This service doesn't answer to this name. Ask by one that it knows, or let BERTH_API_HOSTS name this one.",
        )
    scope = {**scope, "path": scope["raw_path"].decode("ascii", "replace")}
    if scope["method"] not in _WITH_BODY:
        return scope, receive
    body = await _read(headers, receive)
    if body:
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Problem(415, "unsupported_media_type", "Send the body as JSON, with Content-Type: application/json.")
        check_json(body)
    return scope, _replaying(body, receive)


async def _read(headers: dict[str, str], receive: Receive) -> bytes:
    length = headers.get("content-length", "0")
    body = bytearray()
    too_large = length.isdecimal() and int(length) > BODY_BYTES_MAX
    more = not too_large
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Problem(400, "body_incomplete", "The request ended before its body did.")
        body += message.get("body", b"")
        more = message.get("more_body", False)
        too_large = len(body) > BODY_BYTES_MAX
        if too_large:
            break
    if too_large:
        raise Problem(
            413,
            "body_too_large",
            f"A body has at most {BODY_BYTES_MAX} bytes. Nothing was changed.",
            headers={"Connection": "close"},
        )
    return bytes(body)


def _replaying(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def replay() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def check_json(body: bytes) -> None:
    """Raise Problem if the body isn't JSON that we take."""
    try:
        content = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        if "recursion" in str(error):
            raise _too_deep() from None
        raise Problem(400, "invalid_json", f"The body is not JSON: {error}. Nothing was changed.") from None
    may_hold_nul = b"\\u0000" in body
    level = [content]
    for depth in range(JSON_DEPTH_MAX + 1):
        if may_hold_nul and any("\x00" in text for text in _texts(level)):
            raise invalid("invalid_field", "body", "The body holds the character U+0000, which is not allowed.")
        if depth == JSON_DEPTH_MAX and any(isinstance(value, dict | list) for value in level):
            raise _too_deep()
        level = [part for value in level for part in _parts(value)]


def _too_deep() -> Problem:
    return Problem(400, "json_too_deep", f"The body is nested deeper than {JSON_DEPTH_MAX}. Nothing was changed.")


def _texts(level: list[Any]) -> Iterator[str]:
    for value in level:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            yield from value


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value
