"""``berth api``: the HTTP API and the page."""

import asyncio
import gc
import ipaddress
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Final

import structlog
import typer
import uvicorn

from api.cli import local_secret
from api.cli.command_failed import CommandFailed
from api.cli.endpoints import published
from api.cli.service import EXIT_ERROR, log_as_json, run_service
from api.http.app import create_app
from api.http.auth import Authentication
from api.http.readiness import Bounds
from api.http.routes.parameters import Service
from streams.ending import EXIT_ASKED, Ending
from streams.settings import Settings, load_settings

LOCAL: Final = "127.0.0.1"
USUAL_PORT: Final = 8080
STOP_SECONDS_MAX: Final = 6
"""Requests under way when asked to stop are answered: the longest wait is 5 s."""
CLOSE_SECONDS_MAX: Final = STOP_SECONDS_MAX + 2
"""That, and giving back the connections to Kafka and PostgreSQL."""

UNREAD_MILLISECONDS_MAX: Final = 30_000
CONNECTIONS_MAX: Final = 10_000

log = structlog.get_logger()


def api(
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65_535, help="Port, 0: a free one. Default: 8080, or a free one."),
    ] = None,
    host: Annotated[
        str,
        typer.Option(help="Address of this machine on which to listen: an IP, 0.0.0.0 or :: for all of them."),
    ] = LOCAL,
) -> None:
    """Answer HTTP until Ctrl-C or SIGTERM: the page at /, the API under /api, its description at /docs.

    Who asks needs a token (berth token). Start as many as you like. It starts also while Kafka or PostgreSQL is away:
    /readyz says what is missing. The log is one JSON object a line on standard output.

    Beyond this machine, put a server before it that speaks TLS, and name the hosts that it answers to: BERTH_API_HOSTS.
    """
    settings = load_settings()
    authentication = Authentication.of(settings, local_secret.find(settings))
    log_as_json()
    _allow_connections()
    listener = _listen(host, port)
    address = _address(host, listener.getsockname()[1])
    app = create_app(
        settings.kafka_addresses(),
        settings.partitions,
        settings.database_address(),
        authentication,
        hosts=settings.names("api_hosts"),
        origins=settings.names("cors_origins"),
        bounds=Bounds(settings.session_timeout_seconds, settings.projection_lag_seconds_max),
    )
    config = uvicorn.Config(
        app,
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=STOP_SECONDS_MAX,
        lifespan="on",
    )
    server = _Server(config, app.state.service)
    # What libraries have made by now stays: looking through it for garbage kept everybody waiting for up to 200 ms.
    gc.collect()
    gc.freeze()
    run_service(lambda ending: _serve(server, listener, address, settings, ending))


class _Server(uvicorn.Server):
    """Ends what waits for events before it waits for requests under way: some of them never end by themselves."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Called by uvicorn: they are heard by ``streams.ending``."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn when it was asked to stop."""
        self._service.end()
        await super().shutdown(sockets)


async def _serve(server: _Server, listener: socket.socket, address: str, settings: Settings, ending: Ending) -> int:
    """Answer until asked to stop. Nobody is sent here any more from that moment on."""
    asked = ending.in_order()
    with published(settings, api=address):
        log.info("api_listens", page=f"{address}/", readyz=f"{address}/readyz")
        serving = asyncio.create_task(server.serve(sockets=[listener]), name="uvicorn")
        asking = asyncio.create_task(asked.wait(), name="asked")
        await asyncio.wait({serving, asking}, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    await asyncio.wait({serving}, timeout=CLOSE_SECONDS_MAX)
    if serving.done():
        serving.result()
    else:
        log.warning("connections_not_closed", kept="every request was answered or broken off")
    exit_code = EXIT_ASKED if asked.is_set() else EXIT_ERROR
    log.info("api_stopped", exit_code=exit_code)
    return exit_code


def _allow_connections() -> None:
    """Enough for the live clients: many systems begin with 1,024 or fewer, and let a program ask for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS_MAX if hard == resource.RLIM_INFINITY else min(hard, CONNECTIONS_MAX)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def _address(host: str, port: int) -> str:
    """Where programs of this machine find it."""
    ip = ipaddress.ip_address(host)
    reached = (LOCAL if ip.version == 4 else "::1") if ip.is_unspecified else host
    return f"http://{reached}:{port}" if ip.version == 4 else f"http://[{reached}]:{port}"


def _listen(host: str, port: int | None) -> socket.socket:
    """A socket on the port; without a wish on the usual one, or a free one when that is taken."""
    nothing = "everything; nothing was started."
    try:
        family = socket.AF_INET if ipaddress.ip_address(host).version == 4 else socket.AF_INET6
    except ValueError as error:
        raise CommandFailed(
            f"The API can't be served on {host}: that is no IP address.",
            kept=nothing,
            advice="leave --host out for 127.0.0.1, or give an address of this machine, such as 0.0.0.0 for all.",
        ) from error
    for wanted in (USUAL_PORT, 0) if port is None else (port,):
        # With the protocol named, asyncio turns Nagle's algorithm off, which holds parts of an answer back for 40 ms.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # A client that takes nothing of its answer for so long is cut off, whatever it says meanwhile.
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MILLISECONDS_MAX)
        try:
            listener.bind((host, wanted))
            listener.listen(1024)
        except OSError as error:
            listener.close()
            failure = error
        else:
            return listener
    raise CommandFailed(
        f"Port {port} of {host} can't be used: {failure.strerror}.",
        kept=nothing,
        advice="end what listens there, or leave --port out: then a free one is taken.",
    )
