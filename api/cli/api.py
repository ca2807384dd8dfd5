"""``berth api``: the HTTP API and the page, on this machine only."""

import asyncio
import signal
import socket
from types import FrameType
from typing import Annotated, Final

import structlog
import typer
import uvicorn

from api.cli.command_failed import CommandFailed
from api.cli.endpoints import published
from api.cli.worker import log_as_json
from api.http.app import create_app
from streams.settings import load_settings

HOST: Final = "127.0.0.1"
USUAL_PORT: Final = 8080
STOP_SECONDS_MAX: Final = 6
"""Requests under way when asked to stop are answered: the longest wait is 5 s."""

log = structlog.get_logger()


def api(
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65_535, help="Port on 127.0.0.1, 0: a free one. Default: 8080, or a free one."),
    ] = None,
    host: Annotated[str, typer.Option(help="127.0.0.1; others are refused, as nobody is asked who they are.")] = HOST,
) -> None:
    """Answer HTTP until Ctrl-C or SIGTERM: the page at /, the API under /api, its description at /docs.

    Start as many as you like. It starts also while Kafka or PostgreSQL is away: /readyz says what is missing. The log
    is one JSON object a line on standard output.
    """
    if host != HOST:
        raise CommandFailed(
            f"The API can't be served on {host}: this version asks nobody who they are, so it only serves "
            f"{HOST}, the programs of this machine.",
            kept="everything; nothing was started.",
            advice="leave --host out; from another machine, use a tunnel such as ssh -L 8080:127.0.0.1:8080.",
        )
    settings = load_settings()
    log_as_json()
    listener = _listen(port)
    address = f"http://{HOST}:{listener.getsockname()[1]}"
    app = create_app(settings.kafka_addresses(), settings.partitions, settings.database_address())
    config = uvicorn.Config(
        app,
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=STOP_SECONDS_MAX,
        lifespan="on",
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _already_asked)
    with published(settings, api=address):
        log.info("api_listens", page=f"{address}/", readyz=f"{address}/readyz")
        asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))
    log.info("api_stopped")


def _already_asked(_number: int, _frame: FrameType | None) -> None:
    """uvicorn sends itself the signal again when it has ended in order: nothing is left to do."""


def _listen(port: int | None) -> socket.socket:
    """A socket on the port; without a wish on the usual one, or a free one when that is taken."""
    for wanted in (USUAL_PORT, 0) if port is None else (port,):
        # With the protocol named, asyncio turns Nagle's algorithm off, which holds parts of an answer back for 40 ms.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, wanted))
            listener.listen(1024)
        except OSError as error:
            listener.close()
            failure = error
        else:
            return listener
    raise CommandFailed(
        f"Port {port} of {HOST} can't be used: {failure.strerror}.",
        kept="everything; nothing was started.",
        advice="end what listens there, or leave --port out: then a free one is taken.",
    )
