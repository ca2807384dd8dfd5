"""``berth verify``: read every decision from the beginning and check that the rules held and the log is whole."""

import asyncio
import json
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import typer
from aiokafka import ConsumerRecord, TopicPartition
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from streams import CHANGELOG, DECISIONS, SITE_DECISIONS, codec
from streams.audit.agreement import Agreement
from streams.audit.verify import Head, Verifier, Violation
from streams.audit.verify_sites import SiteVerifier
from streams.kafka.clients import reading
from streams.kafka.history import history
from streams.settings import Settings, load_settings
from streams.sites import read_site

VIOLATION_EXIT_CODE = 1


class Found(NamedTuple):
    """A violation, and where it is."""

    topic: str
    partition: int
    violation: Violation


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the log of all partitions looks like; ``violations``: the first of each partition that has one."""

    decisions: int
    forced: int
    violations: list[Found]


def verify(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Check the whole log of decisions; exit code 1 when something is wrong with it. Changes nothing.

    Reads berth.decisions and berth.site-decisions from their beginning: that limits, pools, budgets and gates held at
    every dispatch and grant, that no two folders overlapped, that each attempt was dispatched and ended once, in the
    right order, that what a site gave out is what agents ran on, and that no decision was changed, removed or added
    since (hash chain, and its stored heads). Each violation names topic, partition and offset. It may run beside live
    workers: it checks what was written when it began.
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
    """Verify both logs of every partition, one after the other. Raises KafkaError."""
    bootstrap = settings.kafka_addresses()
    ends = await _ends(bootstrap, settings.partitions)
    task = None
    if progress is not None:
        task = progress.add_task("decisions", total=sum(ends.values()))
    decisions = forced = 0
    agreement = Agreement()
    violations = []
    for number in range(settings.partitions):
        agent_heads, site_heads = await _heads(bootstrap, number)
        agents, sites = Verifier(agent_heads, agreement), SiteVerifier(site_heads, agreement)
        agreement.partition = number
        for topic, verifier in ((DECISIONS, agents), (SITE_DECISIONS, sites)):
            violation = None
            async for records in history(bootstrap, topic.name, number):
                violation = _first_violation(verifier, records)
                if progress is not None and task is not None:
                    progress.advance(task, len(records))
                if violation is not None:
                    break
            violation = violation or verifier.finish()
            if violation is not None:
                violations.append(Found(topic.name, number, violation))
        decisions += agents.decisions + sites.decisions
        forced += agents.forced
    disagreement = None if violations else agreement.finish(ends)  # what isn't read may hold what is missed
    if disagreement is not None:
        where, detail = disagreement
        violation = Violation(where.offset, where.decider, where.seq, "agreement", detail)
        violations.append(Found(where.topic, where.partition, violation))
    if progress is not None and task is not None:
        progress.update(task, total=decisions, completed=decisions)
    return Verdict(decisions, forced, violations)


def _first_violation(verifier: Verifier | SiteVerifier, records: list[ConsumerRecord]) -> Violation | None:
    for record in records:
        violation = verifier.check(record.value or b"", record.offset)
        if violation is not None:
            return violation
    return None


async def _heads(bootstrap: str, number: int) -> tuple[dict[str, Head], dict[str, Head]]:
    """The ends of the agents' and sites' chains, as their rows have them; read before the logs, not to be ahead."""
    agents: dict[str, Head] = {}
    sites: dict[str, Head] = {}
    async for records in history(bootstrap, CHANGELOG.name, number):
        for record in records:
            if record.key is None or record.value is None:
                continue
            kind, *rest = codec.read_key(record.key)
            if kind == "agent":
                row = codec.read_agent(record.value)
                agents[rest[0]] = Head(row.seq, row.prev)
            elif kind == "site":
                site = read_site(record.value)
                sites[rest[0]] = Head(site.seq, site.prev)
    return agents, sites


async def _ends(bootstrap: str, partitions: int) -> dict[tuple[str, int], int]:
    """Where the logs end now; about how many decisions there are, since markers of transactions count as well."""
    async with reading(bootstrap, "read_committed") as consumer:
        topics = (DECISIONS.name, SITE_DECISIONS.name)
        numbers = [TopicPartition(topic, number) for topic in topics for number in range(partitions)]
        ends = await consumer.end_offsets(numbers)
        return {(number.topic, number.partition): int(end) for number, end in ends.items()}


def _print(verdict: Verdict) -> None:
    summary = f"{verdict.decisions:,} decisions, {len(verdict.violations)} violations"
    if verdict.forced:
        summary += f" ({verdict.forced:,} forced dispatches, counted apart)"
    typer.echo(summary)
    for topic, number, violation in verdict.violations:
        where = "at its end" if violation.offset is None else f"offset {violation.offset}"
        typer.echo(
            f"{topic} partition {number}, {where}: {violation.kind}, {violation.decider!r}, "
            f"decision {violation.seq}: {violation.detail}"
        )


def _as_json(verdict: Verdict) -> dict[str, object]:
    return {
        "decisions": verdict.decisions,
        "forced": verdict.forced,
        "violations": [
            {"topic": topic, "partition": number, **violation._asdict()}
            for topic, number, violation in verdict.violations
        ],
    }
