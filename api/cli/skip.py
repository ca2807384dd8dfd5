"""``berth skip``: move a partition past the record on which the rules fail."""

import asyncio
from typing import Annotated

import typer
from rich.console import Console

from api.cli.command_failed import CommandFailed
from streams.kafka.ownership import SkipRefused, skip_record
from streams.settings import load_settings


def skip(
    topic: Annotated[str, typer.Argument(help="The input topic, as in stopped_at: berth.triggers for example.")],
    partition: Annotated[int, typer.Argument(min=0, help="Its partition.")],
    offset: Annotated[int, typer.Argument(min=0, help="The offset at which the partition stands.")],
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False,
) -> None:
    """Give up one record: for a partition that stands still because the rules fail on it.

    The worker's /readyz shows topic, partition and offset in stopped_at, and why. The record goes to berth.dead-letters
    and is never handled; the partition goes on with the next one, without a restart. Only the very record at which the
    partition stands can be skipped. Better, when there is time: start workers with the bug mended, which handle it.

    Records of berth.claims and berth.signals are words between agents and sites. After a skipped claim or granted,
    reschedule the trigger, pause and resume its agent, or stop it: the claim is made anew. After a skipped release,
    worker and folder stay taken until the same trigger asks again; if it has ended, make the pool larger by one, and
    use another environment_id for the folder. After a skipped degraded, watch or resolved, stop the trigger and send
    it again with restarts. After a skipped waiting, denied, recall or unwatch there is nothing to do.
    docs/operate.md says more.
    """
    settings = load_settings()
    if not yes:
        typer.confirm(f"Give up the record at offset {offset} of {topic}/{partition}?", abort=True)
    try:
        asyncio.run(skip_record(settings, topic, partition, offset))
    except SkipRefused as refused:
        raise CommandFailed(
            refused.happened, kept="everything; nothing was skipped.", advice=refused.advice
        ) from refused
    Console().print(
        f"skipped {topic}/{partition} offset {offset}; it is in berth.dead-letters now, and the partition goes on",
        highlight=False,
    )
