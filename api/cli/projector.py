"""``berth projector``: keeps the tables for readers up with the log, in the foreground."""

import os
from typing import Annotated, Final

import typer

from api.cli.service import log_as_json, run_service
from projections.projector import Projector
from projections.store import Store
from streams.settings import load_settings

NICENESS: Final = 5
"""On a machine that is busy decisions come first: what readers see may be late for a moment rather than slow them."""


def projector(
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65_535,
            help="Port of /readyz and /metrics on 127.0.0.1, 0: a free one. Default: BERTH_PROJECTOR_PORT.",
        ),
    ] = None,
) -> None:
    """Project: write what the log of decisions says into PostgreSQL, for readers, until Ctrl-C or SIGTERM.

    It makes its tables itself, in the schema berth of the database that BERTH_DATABASE_URL names, and can be ended and
    started at any time: it goes on where it was. One is enough; a second one takes over when the first is gone. The
    log is one JSON object a line on standard output.

    Exit codes for a supervisor: 0 was asked to end; 65 a record can't be applied, the log says which; 70 an error:
    start it again; 78 the tables or topics don't fit, the log says what to do.
    """
    settings = load_settings()
    url = settings.database_address()
    log_as_json()
    os.nice(NICENESS)
    running = Projector(
        settings.kafka_addresses(),
        Store(url),
        url,
        settings.partitions,
        settings.text_days,
        settings.projector_port if port is None else port,
        lag_seconds_max=settings.projection_lag_seconds_max,
    )
    run_service(running.run)
