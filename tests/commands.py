"""The command line of ``berth`` as a thing that can be asked, for tests of what is written about it."""

import shlex
from typing import Any

import typer

from api.cli.main import app


def explain(words: list[str]) -> str | None:
    """Why ``berth`` would not accept these words (those after ``berth``), or None when it would.

    Nothing is run. A group without a subcommand is accepted, as the name of several commands.
    """
    command: Any = typer.main.get_command(app)
    rest = list(words)
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        name = rest.pop(0)
        if name not in command.commands:
            return f"there is no command {name!r} in {shlex.join(['berth', *words])!r}"
        command = command.commands[name]
    if "--help" in rest:
        return None
    try:
        with command.make_context("berth", rest, resilient_parsing=hasattr(command, "commands")):
            return None
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        return f"{error.format_message()} in {shlex.join(['berth', *words])!r}"
