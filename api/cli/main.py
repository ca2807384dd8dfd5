"""``berth``: one command with a module for each subcommand; this file only lists them and prints failures.

A subcommand is a function with typer's annotations; add its name below. It raises ``CommandFailed`` (or lets
``SettingsRefused`` and Kafka's outages pass), and never prints a traceback for what a user can meet.

Only the module of the command that is run is imported: ``berth run`` starts five of them, and importing all of the
others would cost each a second of a core.
"""

import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

import typer
from aiokafka.errors import KafkaError
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from api.cli.command_failed import CommandFailed
from api.cli.failures import failure_of
from streams.settings import SettingsRefused


class Berth(typer.Typer):
    """The application, with our way of saying that a command failed."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command line; on a failure say it and leave with its exit code."""
        logging.getLogger("aiokafka").addHandler(logging.NullHandler())  # what it says is said here, in words
        try:
            return super().__call__(*args, **kwargs)
        except (CommandFailed, SettingsRefused, KafkaError) as error:
            failed = failure_of(error)
            if failed is None:
                raise
            say_failure(failed)
        sys.exit(failed.exit_code)


def say_failure(failed: CommandFailed) -> None:
    """Print the three parts of a failure to standard error."""
    text = Text.assemble(failed.happened, ("\n\nKept: ", "bold"), failed.kept, ("\nTo do: ", "bold"), failed.advice)
    Console(stderr=True).print(Panel(text, title="berth could not go on", border_style="red", title_align="left"))


COMMANDS: Final = (
    "run",
    "up",
    "worker",
    "projector",
    "api",
    "token",
    "agents",
    "queue",
    "trigger",
    "conversation",
    "site",
    "pause",
    "resume",
    "stop",
    "limit",
    "approve",
    "dead-letters",
    "runner",
    "demo",
    "topics",
    "projections",
    "doctor",
    "bench",
    "verify",
    "as-of",
    "explain",
    "waiting",
    "what-if",
    "audit",
    "skip",
    "recover",
)
"""In the order of ``--help``. Each is a module here, with a function of its name or an ``app`` of subcommands."""
_MODULES: Final = {
    **dict.fromkeys(("agents", "queue", "trigger", "conversation", "site"), "showing"),
    **dict.fromkeys(("pause", "resume", "stop", "limit", "approve"), "changing"),
}
"""Of those that share one."""


def _application(words: Sequence[str]) -> Berth:
    """``berth`` with the command that these words begin with, or with all of them."""
    application = Berth(name="berth", no_args_is_help=True, pretty_exceptions_show_locals=False, rich_markup_mode=None)
    application.callback()(_berth)
    for name in words[:1] if words and words[0] in COMMANDS else COMMANDS:
        function_name = name.replace("-", "_")
        module = import_module(f"api.cli.{_MODULES.get(name, function_name)}")
        if hasattr(module, "app"):
            application.add_typer(module.app, name=name)
        else:
            application.command(name)(getattr(module, function_name))
    return application


def _berth() -> None:
    """Berth decides which AI-agent runs may start: limits per agent with a durable queue, on Kafka.

    Begin with: berth run
    """


app = _application(sys.argv[1:])
