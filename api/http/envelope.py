"""What is around every answer: headers for browsers, and a line in the access log.

The log has the method, the address as it is declared (not as it was sent: ids may be somebody's, and the address of a
public link is its token), the status, how long it took, and who asked. No query, no body, no header.
"""

import time
from collections.abc import Mapping
from typing import Final

import structlog
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.metrics import count_request

HEADERS: Final[Mapping[str, str]] = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""On every answer that doesn't say otherwise."""
_QUIET: Final = frozenset({"/", "/healthz", "/readyz", "/metrics", "/dashboard/{name}"})
"""Asked every few seconds by programs, and nobody's: logged only when they fail."""

log = structlog.get_logger()


class Envelope:
    """ASGI middleware, see above; the outermost one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand the request on; dress and log its answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})  # the same object in every layer; what is found out there is seen here
        began, status = time.perf_counter(), 0

        async def dress(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            await self._app(scope, receive, dress)
        finally:
            route, caller = state.get("route"), state.get("caller")
            count_request(scope["method"], route, status, time.perf_counter() - began)
            if route not in _QUIET or status == 500:
                log.info(
                    "request",
                    method=scope["method"],
                    route=route,
                    status=status,
                    milliseconds=round(1000 * (time.perf_counter() - began), 1),
                    subject=None if caller is None else caller.subject,
                    role=None if caller is None else caller.role,
                )
