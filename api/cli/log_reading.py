"""Reading the log of decisions for the audits of the command line: with progress, and with words for what can be wrong.

The log is only read, without a consumer group: nothing is sent, and live groups and tables are not touched.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Final

import typer
from aiokafka import ConsumerRecord
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from api.cli.command_failed import LOG_UNREADABLE_EXIT_CODE, CommandFailed
from streams import DECISIONS, SITE_DECISIONS, Topic
from streams.audit.logged import Decider, Logged, Unreadable, merged, read
from streams.audit.past import DoesNotFit
from streams.codec import partition_of
from streams.kafka.decision_log import DecisionLog
from streams.rules.order import SECOND, parse_instant
from streams.settings import Settings

KEPT: Final = "everything; the log was only read."


@contextmanager
def decisions(
    settings: Settings, agent_ids: Sequence[str] = (), until: int | None = None
) -> Iterator[Iterator[Logged]]:
    """Every decision up to an instant in causal order, while the block runs; or those of some agents, and all sites'.

    Raises CommandFailed for a log that can't be read or folded.
    """
    numbers = range(settings.partitions)
    own = sorted({partition_of(agent_id, settings.partitions) for agent_id in agent_ids}) if agent_ids else numbers
    wanted: list[tuple[Topic, int]] = [(DECISIONS, number) for number in own]
    wanted += [(SITE_DECISIONS, number) for number in numbers]
    with _failures(), DecisionLog(settings.kafka_addresses(), wanted) as log, _progress(log):
        sources = [_read(records, agent_ids) for records in log.sources()]
        yield merged(sources, until, lambda decider: _is_read(decider, agent_ids))


@contextmanager
def decisions_of(settings: Settings, agent_id: str) -> Iterator[Iterator[Logged]]:
    """The decisions of one agent alone, in order."""
    wanted: Sequence[tuple[Topic, int]] = [(DECISIONS, partition_of(agent_id, settings.partitions))]
    with _failures(), DecisionLog(settings.kafka_addresses(), wanted) as log, _progress(log):
        (records,) = log.sources()
        yield _read(records, (agent_id,))


def _read(records: Iterator[ConsumerRecord], agent_ids: Sequence[str]) -> Iterator[Logged]:
    keys = {agent_id.encode() for agent_id in agent_ids}
    for record in records:
        if not keys or record.key in keys or record.topic == SITE_DECISIONS.name:
            yield read(record.topic, record.partition, record.offset, record.value)


def _is_read(decider: Decider, agent_ids: Sequence[str]) -> bool:
    return not agent_ids or decider.kind == "site" or decider.id in agent_ids


@contextmanager
def _progress(log: DecisionLog) -> Iterator[None]:
    """A bar on standard error, gone when all is read."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("decisions", total=log.records)
        log.on_read = lambda count: shown.advance(task, count)
        yield


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except Unreadable as failed:
        raise CommandFailed(
            f"The log holds a record that this version can't read: {failed}.",
            kept=KEPT,
            advice="if a newer Berth wrote it, use that one; else berth verify says what is wrong with the log.",
            exit_code=LOG_UNREADABLE_EXIT_CODE,
        ) from failed
    except DoesNotFit as failed:
        raise CommandFailed(
            f"The log can't be folded any further: {failed}.",
            kept=KEPT,
            advice="berth verify says which record was changed, removed or moved.",
            exit_code=LOG_UNREADABLE_EXIT_CODE,
        ) from failed


_AGO: Final = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def instant(text: str) -> int:
    """Microseconds of a time that a person wrote: RFC 3339 with a zone, ``now``, or an age such as ``90m``, ``2h``."""
    now = round(datetime.now(UTC).timestamp() * SECOND)
    if text == "now":
        return now
    ago = _AGO.fullmatch(text)
    if ago:
        return now - round(float(ago[1]) * _UNITS[ago[2]] * SECOND)
    try:
        return parse_instant(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} {error}, or now, or an age such as 90m, 2h or 3d") from None
