"""``berth topics``: make, compare and describe Berth's topics in Kafka."""

import asyncio
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from api.cli.command_failed import CommandFailed
from streams import TOPICS
from streams.kafka import topics
from streams.settings import Settings, load_settings

app = typer.Typer(
    help="Make, compare and describe Berth's topics in Kafka. The number of partitions is BERTH_PARTITIONS and is "
    "fixed for the life of a deployment.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
_UserOption = Annotated[str, typer.Option(help="Kafka user name of that kind of program.")]


@app.command("create")
def create() -> None:
    """Make the topics that are missing. What exists is left as it is; run it as often as you like."""
    settings = load_settings()
    bootstrap = settings.kafka_addresses()
    names = asyncio.run(topics.create(bootstrap, settings.partitions))
    console = Console()
    for name in names:
        console.print(f"created {name} with {settings.partitions} partitions", highlight=False)
    console.print(f"{len(names)} created, {len(TOPICS) - len(names)} were there already", highlight=False)
    require_fit(settings, bootstrap)


@app.command("check")
def check() -> None:
    """Compare the topics with what Berth needs; exit code 1 when something differs. Changes nothing."""
    settings = load_settings()
    bootstrap = settings.kafka_addresses()
    require_fit(settings, bootstrap)
    Console().print(f"{bootstrap}: all {len(TOPICS)} topics and transactions are as Berth needs them", highlight=False)


@app.command("list")
def list_topics() -> None:
    """Show every topic: what is in it by which key, who writes it, how long it is kept, and whether it exists."""
    settings = load_settings()
    found = asyncio.run(topics.describe(settings.kafka_addresses()))
    table = Table(Column("topic", no_wrap=True), "key", "written by", "kept", "partitions", "copies", box=None)
    for one in found:
        kept = f"{one.topic.retention_days} days" if one.topic.retention_days else one.topic.cleanup
        partitions, copies = (str(one.partitions), str(one.replicas)) if one.partitions else ("missing", "")
        table.add_row(one.topic.name, one.topic.key, ", ".join(one.topic.writers), kept, partitions, copies)
    Console().print(table)


@app.command("acl")
def acl(
    upstream: _UserOption = "berth-upstream",
    runner: _UserOption = "berth-runner",
    api: _UserOption = "berth-api",
    processor: _UserOption = "berth-processor",
) -> None:
    """Print the kafka-acls.sh lines that give each kind of program the access it needs. Changes nothing."""
    users: dict[topics.Principal, str] = {"upstream": upstream, "runner": runner, "api": api, "processor": processor}
    settings = load_settings()
    for line in topics.acl_commands(settings.kafka or "127.0.0.1:9092", users):
        typer.echo(line)


def require_fit(settings: Settings, bootstrap: str) -> None:
    """Raise CommandFailed with every problem of this Kafka, if there is one."""
    problems = asyncio.run(topics.check(bootstrap, settings.partitions))
    if problems:
        raise CommandFailed(
            "This Kafka can't be used as it is:\n" + "\n".join(f"- {problem}" for problem in problems),
            kept="everything; Berth changes no topic that exists.",
            advice="the steps named above, then run: berth topics check",
        )
