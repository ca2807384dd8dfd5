"""``berth worker``: one stream worker in the foreground."""

import gc
from typing import Annotated, Final, Literal

import typer

from api.cli.service import log_as_json, run_service
from streams.kafka.worker import run_worker
from streams.settings import load_settings

GARBAGE_THRESHOLDS: Final = (100_000, 50, 100)
"""Python looks for garbage in cycles every 700 new objects by default. Rules and rows make no cycles, and a worker
keeps hundreds of thousands of objects: looking at them took an eighth of a decision's time."""


def worker(
    start_from: Annotated[
        Literal["earliest", "latest"] | None,
        typer.Option(
            "--from",
            help="Where to begin reading when nothing is stored at all; no effect later. Default: BERTH_START_FROM.",
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65_535,
            help="Port of /readyz and /metrics on 127.0.0.1, 0: a free one. Default: BERTH_WORKER_PORT.",
        ),
    ] = None,
) -> None:
    """Decide: read triggers, statuses and controls, write dispatches and decisions, until Ctrl-C or SIGTERM.

    Start as many as you like, on as many machines: they share the partitions, and take over from one that dies. The log
    is one JSON object a line on standard output.

    Exit codes for a supervisor: 0 was asked to end; 69 Kafka away, 70 an error, 75 another worker took over: start it
    again; 78 the setup doesn't fit, the log says what to do.
    """
    given = {"start_from": start_from, "worker_port": port}
    settings = load_settings().model_copy(update={name: value for name, value in given.items() if value is not None})
    log_as_json()
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    run_service(lambda ending: run_worker(settings, ending))
