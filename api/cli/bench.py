"""``berth bench``: measure Berth against its targets, beside a Kafka floor and plain Faust, on this machine.

The benchmark itself is in tests/bench of the repository, because it measures with the tests' tools and is no part of
what is installed; so this command works from a clone only.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from api.cli.command_failed import CommandFailed

ROOT: Final = Path(__file__).parents[2]
PERFORMANCE_PAGE: Final = ROOT / "docs" / "performance.md"
NOT_MET_EXIT_CODE: Final = 1


def bench(
    measures: Annotated[
        list[str] | None,
        typer.Argument(
            help="Which: W1 W1C W2 W3 W3E drain latency sites restore memory takeover projection start. None: all.",
            show_default=False,
        ),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each; the median counts.")] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every run into this file.")] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help=f"Write the tables into {PERFORMANCE_PAGE.relative_to(ROOT)}.")
    ] = False,
) -> None:
    """Measure, and compare with the targets; exit code 1 when one is not met. Takes about five minutes a repetition.

    It starts a Kafka of its own and touches no data of yours. Let nothing else run meanwhile: "other CPU" shows how
    many cores other programs used, and should stay below 0.1. docs/performance.md says what each number covers.
    """
    harness, report = _load("harness"), _load("report")
    names = [name.lower() for name in measures or harness.NAMES]
    unknown = sorted(set(names) - set(harness.NAMES))
    if unknown:
        raise CommandFailed(
            f"there is no measure {', '.join(unknown)}.",
            kept="everything; nothing was measured.",
            advice=f"choose from: {' '.join(harness.NAMES)}",
        )
    console = Console()
    if not console.is_terminal:
        console.width = 180
    runs = harness.run(names, repeat, console)
    about = report.machine()
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": about, "runs": runs}, indent=1), encoding="utf-8")
    if markdown:
        report.write_into(PERFORMANCE_PAGE, report.markdown(runs, about))
    console.print(_table("Workloads", report.HEADER_OF_WORKLOADS, report.rows_of_workloads(runs)))
    console.print(_table("Other measures", report.HEADER_OF_OTHERS, report.rows_of_others(runs)))
    console.print(_table("Targets", report.HEADER_OF_TARGETS, report.rows_of_targets(runs)))
    if not all(verdict.is_met for verdict in report.verdicts(runs)):
        raise typer.Exit(NOT_MET_EXIT_CODE)


def _load(name: str) -> Any:
    """A module of tests/bench, which is beside ``api`` in a clone."""
    if not (ROOT / "tests" / "bench").is_dir():
        raise CommandFailed(
            "the benchmark isn't part of what is installed.",
            kept="everything; nothing was measured.",
            advice="clone Berth's repository and run: make bench",
        )
    sys.path.insert(0, str(ROOT))
    return importlib.import_module(f"tests.bench.{name}")


def _table(title: str, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    table = Table(*header, title=title, title_justify="left", box=None)
    for row in rows:
        table.add_row(*(cell.replace("**", "") for cell in row))
    return table
