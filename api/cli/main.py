"""``berth``: one command with a module for each subcommand; this file only lists them and prints failures.

A subcommand is a function with typer's annotations; add it with one line below. It raises ``CommandFailed`` (or lets
``SettingsRefused`` and Kafka's connection errors pass), and never prints a traceback for what a user can meet.
"""

import sys
from typing import Any, Final

import typer
from aiokafka.errors import KafkaConnectionError
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from api.cli import api, bench, demo, doctor, projections, projector, run, runner, topics, up, verify, worker
from api.cli.command_failed import CommandFailed
from streams.settings import SettingsRefused

FAILED_EXIT_CODE: Final = 1


class Berth(typer.Typer):
    """The application, with our way of saying that a command failed."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command line; on a failure say it and leave with exit code 1."""
        try:
            return super().__call__(*args, **kwargs)
        except CommandFailed as failed:
            say_failure(failed)
        except SettingsRefused as refused:
            say_failure(CommandFailed(refused.happened, kept="everything; nothing was started.", advice=refused.advice))
        except KafkaConnectionError as error:
            say_failure(
                CommandFailed(
                    f"Kafka can't be reached: {error}.",
                    kept="everything; this command has changed nothing.",
                    advice="start it (berth up), or give the address of yours: BERTH_KAFKA=host:9092. "
                    "berth doctor looks at the whole installation.",
                )
            )
        sys.exit(FAILED_EXIT_CODE)


def say_failure(failed: CommandFailed) -> None:
    """Print the three parts of a failure to standard error."""
    text = Text.assemble(failed.happened, ("\n\nKept: ", "bold"), failed.kept, ("\nTo do: ", "bold"), failed.advice)
    Console(stderr=True).print(Panel(text, title="berth could not go on", border_style="red", title_align="left"))


app = Berth(
    name="berth",
    help="Berth decides which AI-agent runs may start: limits per agent with a durable queue, on Kafka.\n\n"
    "Begin with: berth run",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode=None,
)
app.command("run")(run.run)
app.command("up")(up.up)
app.command("worker")(worker.worker)
app.command("projector")(projector.projector)
app.command("api")(api.api)
app.command("runner")(runner.runner)
app.command("demo")(demo.demo)
app.add_typer(topics.app, name="topics")
app.add_typer(projections.app, name="projections")
app.command("doctor")(doctor.doctor)
app.command("bench")(bench.bench)
app.command("verify")(verify.verify)
