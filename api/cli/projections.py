"""``berth projections``: make the tables for readers anew from the log, or compare them with it."""

import asyncio
import json
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import psycopg
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from api.cli.command_failed import (
    AWAY_EXIT_CODE,
    DOES_NOT_FIT_EXIT_CODE,
    LOG_UNREADABLE_EXIT_CODE,
    CommandFailed,
)
from projections.log import ADVICE as LOG_ADVICE
from projections.log import LogDoesNotFit
from projections.rebuild import CannotBegin, Difference, Report, compare, rebuild
from projections.row_types import CannotApply
from projections.schema import SchemaRefused
from streams.settings import load_settings

DIFFERENT_EXIT_CODE: Final = 1
KEPT: Final = "the tables, as they were; what was made beside them is removed at the next try."
Result = TypeVar("Result")

app = typer.Typer(
    help="The tables that readers see are a copy of the log of decisions: made anew, or compared with it.",
    no_args_is_help=True,
)


@app.command("rebuild")
def rebuild_command() -> None:
    """Make the tables anew from the log, beside those in use, and put them in their place at once.

    Readers and the projector go on meanwhile. Nothing is dispatched or decided again: the log is only read. Texts that
    are older than what Kafka holds are taken over.
    """
    settings = load_settings()
    url = settings.database_address()
    console = Console()
    with _progress(console) as report:
        rows = _run(rebuild(settings.kafka_addresses(), url, settings.partitions, report))
    table = Table("table", "rows", title="in place", title_justify="left")
    for name, count in rows.items():
        table.add_row(name, f"{count:,}")
    console.print(table)


@app.command("diff")
def diff_command() -> None:
    """Compare the tables with the log: build them beside, up to the same decision, and say what differs.

    Exit code 0: the same; 1: something differs, and is listed; 69: Kafka or PostgreSQL is away; 78: the tables don't
    fit the log, as when they are ahead of it, or this version.
    """
    settings = load_settings()
    url = settings.database_address()
    console = Console()
    with _progress(console) as report:
        compared, differences = _run(
            compare(settings.kafka_addresses(), url, settings.partitions, settings.text_days, report)
        )
    for difference in differences:
        _show(console, difference)
    if differences:
        console.print("The tables differ from the log. berth projections rebuild makes them anew.", style="red")
        raise typer.Exit(DIFFERENT_EXIT_CODE)
    console.print(f"The same: {sum(compared.values()):,} rows in {len(compared)} tables.")


def _show(console: Console, difference: Difference) -> None:
    console.print(
        f"{difference.table}: {difference.only_live:,} rows only in use, {difference.only_rebuilt:,} only in the log",
        style="red",
        highlight=False,
    )
    for example in difference.examples:
        console.print(f"  {json.dumps(json.loads(example), ensure_ascii=False)}", highlight=False, markup=False)


@contextmanager
def _progress(console: Console) -> Iterator[Report]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task("starting", total=None)

        def report(what: str, done: int, total: int) -> None:
            shown.update(task, description=what, completed=done, total=total)

        yield report


def _run(work: Coroutine[Any, Any, Result]) -> Result:
    try:
        return asyncio.run(work)
    except CannotBegin as failed:
        raise CommandFailed(failed.happened, kept="everything; nothing was changed.", advice=failed.advice) from failed
    except SchemaRefused as failed:
        raise CommandFailed(
            failed.happened, kept=KEPT, advice=failed.advice, exit_code=DOES_NOT_FIT_EXIT_CODE
        ) from failed
    except CannotApply as failed:
        raise CommandFailed(
            f"A record of the log can't be applied: {failed}",
            kept=KEPT,
            advice="it is a bug of Berth, or no worker wrote it: berth verify says which decisions are right.",
            exit_code=LOG_UNREADABLE_EXIT_CODE,
        ) from failed
    except LogDoesNotFit as failed:
        raise CommandFailed(str(failed), kept=KEPT, advice=LOG_ADVICE, exit_code=DOES_NOT_FIT_EXIT_CODE) from failed
    except psycopg.OperationalError as failed:
        raise CommandFailed(
            f"PostgreSQL did not answer: {str(failed).strip()}.",
            kept=KEPT,
            advice="start it (berth up), or check BERTH_DATABASE_URL; then try again.",
            exit_code=AWAY_EXIT_CODE,
        ) from failed
