"""``berth verify``: read every decision from the beginning and check that the rules held and the log is whole."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated

import typer
from aiokafka import TopicPartition
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from streams import CHANGELOG, DECISIONS, codec
from streams.audit.verify import Head, Verifier, Violation
from streams.kafka.clients import reading
from streams.kafka.history import history
from streams.settings import Settings, load_settings

VIOLATION_EXIT_CODE = 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the log of all partitions looks like; ``violations``: the first of each partition that has one."""

    decisions: int
    forced: int
    violations: list[tuple[int, Violation]]


def verify(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Check the whole log of decisions; exit code 1 when something is wrong with it. Changes nothing.

    Reads berth.decisions from its beginning: that limits held at every dispatch, that each attempt was dispatched and
    ended once, in the right order, and that no decision was changed, removed or added since (hash chain, and its stored
    heads). It may run beside live workers: it checks what was written when it began.
    """
    settings = load_settings()
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
    ) as progress:
        verdict = asyncio.run(verify_log(settings, progress))
    if as_json:
        typer.echo(json.dumps(_as_json(verdict)))
    else:
        _print(verdict)
    if verdict.violations:
        raise typer.Exit(VIOLATION_EXIT_CODE)


async def verify_log(settings: Settings, progress: Progress | None = None) -> Verdict:
    """Verify every partition, one after the other. Raises KafkaError."""
    bootstrap = settings.kafka_addresses()
    decisions = forced = 0
    violations = []
    task = (
        None if progress is None else progress.add_task("decisions", total=await _count(bootstrap, settings.partitions))
    )
    for number in range(settings.partitions):
        heads = await _heads(bootstrap, number)
        verifier = Verifier(heads)
        violation = None
        async for values in _decisions(bootstrap, number):
            for offset, value in values:
                violation = verifier.check(value, offset)
                if violation is not None:
                    break
            if progress is not None and task is not None:
                progress.advance(task, len(values))
            if violation is not None:
                break
        violation = violation or verifier.finish()
        if violation is not None:
            violations.append((number, violation))
        decisions += verifier.decisions
        forced += verifier.forced
    if progress is not None and task is not None:
        progress.update(task, total=decisions, completed=decisions)
    return Verdict(decisions, forced, violations)


async def _decisions(bootstrap: str, number: int) -> AsyncIterator[list[tuple[int, bytes]]]:
    async for records in history(bootstrap, DECISIONS.name, number):
        yield [(record.offset, record.value or b"") for record in records]


async def _heads(bootstrap: str, number: int) -> dict[str, Head]:
    """The ends of the chains as the agents' rows have them; read before the log, so that it can't be ahead of it."""
    heads: dict[str, Head] = {}
    async for records in history(bootstrap, CHANGELOG.name, number):
        for record in records:
            if record.key is None or record.value is None:
                continue
            key = codec.read_key(record.key)
            if key[0] == "agent":
                row = codec.read_agent(record.value)
                heads[key[1]] = Head(row.seq, row.prev)
    return heads


async def _count(bootstrap: str, partitions: int) -> int:
    """About how many decisions there are: markers of transactions count as well."""
    async with reading(bootstrap, "read_committed") as consumer:
        numbers = [TopicPartition(DECISIONS.name, number) for number in range(partitions)]
        ends = await consumer.end_offsets(numbers)
        return sum(int(end) for end in ends.values())


def _print(verdict: Verdict) -> None:
    summary = f"{verdict.decisions:,} decisions, {len(verdict.violations)} violations"
    if verdict.forced:
        summary += f" ({verdict.forced:,} forced dispatches, counted apart)"
    typer.echo(summary)
    for number, violation in verdict.violations:
        where = "at its end" if violation.offset is None else f"offset {violation.offset}"
        typer.echo(
            f"{DECISIONS.name} partition {number}, {where}: {violation.kind}, agent {violation.agent_id!r}, "
            f"decision {violation.seq}: {violation.detail}"
        )


def _as_json(verdict: Verdict) -> dict[str, object]:
    return {
        "decisions": verdict.decisions,
        "forced": verdict.forced,
        "violations": [
            {"topic": DECISIONS.name, "partition": number, **violation._asdict()}
            for number, violation in verdict.violations
        ],
    }
