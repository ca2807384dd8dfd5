"""``berth verify``: read every decision from the beginning and check that the rules held and the log is whole.

Partitions are read one after the other, so memory holds the live state of one at a time. A long reading is put down
every so often, and when it is interrupted (``verify.json`` in the data directory): ``--resume`` goes on from there.

The result is put into PostgreSQL as well, for those who ask the API. It is no copy of the log, so it is the one thing
there that isn't the projector's; and a verification is worth what it is without it, so not reaching it fails nothing.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import psycopg
import typer
from aiokafka import ConsumerRecord, TopicPartition
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from api.cli.command_failed import CommandFailed
from projections import schema
from streams import CHANGELOG, DECISIONS, SITE_DECISIONS, codec
from streams.audit import checkpoint
from streams.audit.agreement import Agreement
from streams.audit.checkpoint import Checkpoint, Counts, NoCheckpoint
from streams.audit.recompute import Recheck, Recomputer
from streams.audit.stored import StoredAgent, StoredSite
from streams.audit.verify import Head, Verifier, Violation
from streams.audit.verify_sites import SiteVerifier
from streams.kafka.clients import reading
from streams.kafka.history import history
from streams.settings import Settings, SettingsRefused, load_settings
from streams.sites import read_site

VIOLATION_EXIT_CODE: Final = 1
INTERRUPTED_EXIT_CODE: Final = 130
SAVE_SECONDS: Final = 20
STORE_SECONDS_MAX: Final = 5
_STORE: Final = """
    INSERT INTO last_verification (verified_at, result) VALUES (now(), %s)
    ON CONFLICT (id) DO UPDATE SET verified_at = excluded.verified_at, result = excluded.result
"""
_TOPICS: Final = (DECISIONS.name, SITE_DECISIONS.name)

Save = Callable[[Checkpoint], None]


class Found(NamedTuple):
    """A violation, and where it is; in berth-state-changelog: a stored row that can't be read."""

    topic: str
    partition: int
    violation: Violation


@dataclass(slots=True)
class Verdict:
    """What the log of all partitions looks like; ``violations``: the first of each partition that has one.

    ``ends``: where it ended, by topic and partition, when the reading began.
    """

    ends: dict[tuple[str, int], int] = field(default_factory=dict)
    recomputes: bool = True
    counts: Counts = field(default_factory=Counts)
    violations: list[Found] = field(default_factory=list)

    @property
    def decisions(self) -> int:
        return self.counts.decisions

    @property
    def forced(self) -> int:
        return self.counts.forced


def verify(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    recompute: Annotated[
        bool, typer.Option("--recompute/--no-recompute", help="Decide every command again and compare; or not: faster.")
    ] = True,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted reading was put down.")] = False,
) -> None:
    """Check the whole log of decisions; exit code 1 when something is wrong with it. Changes nothing of it.

    Reads berth.decisions and berth.site-decisions from their beginning: that limits, pools, budgets and gates held at
    every dispatch and grant, that no two folders overlapped, that each attempt was dispatched and ended once, in the
    right order (each older trigger that was overtaken is counted under what allowed that), that what a site gave out is
    what agents ran on, that every command decided again gives the same decision, and that no decision was changed,
    removed or added since (hash chain, and its stored heads, whose rows must be readable). Each violation names topic,
    partition and offset. It may run beside live workers: it checks what was written when it began. The result is kept
    in PostgreSQL, where that can be reached, for GET /api/audit/verify. Exit code 69: Kafka is away.
    """
    settings = load_settings()
    file = settings.data_directory / "verify.json"
    begin = _taken_up(file, settings.partitions, recompute) if resume else None
    console = Console(stderr=True)
    try:
        with Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
        ) as progress:
            verdict = asyncio.run(verify_log(settings, progress, recompute, begin, lambda at: _put_down(file, at)))
    except KeyboardInterrupt:
        console.print(f"Interrupted. What was read is kept in {file}: berth verify --resume goes on from there.")
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from None
    file.unlink(missing_ok=True)
    result = json.dumps(_as_json(verdict))
    not_kept = _keep(settings, result)
    if not_kept is not None:
        console.print(
            f"The result isn't in PostgreSQL, so the API doesn't show it: {not_kept}", style="yellow", highlight=False
        )
    if as_json:
        typer.echo(result)
    else:
        _print(verdict)
    if verdict.violations:
        raise typer.Exit(VIOLATION_EXIT_CODE)


def _keep(settings: Settings, result: str) -> str | None:
    """Put the result where the API reads it; why that couldn't be done, None: it was."""
    try:
        with schema.connect(settings.database_address()) as connection, connection.transaction():
            connection.execute(f"SET LOCAL statement_timeout = '{STORE_SECONDS_MAX}s'")
            connection.execute(schema.LOCK_WRITER)
            connection.execute(_STORE, (result,))
    except SettingsRefused:
        return "no PostgreSQL is known here (BERTH_DATABASE_URL)."
    except psycopg.errors.UndefinedTable:
        return "its tables aren't there, or are of an older Berth: berth projector makes them."
    except psycopg.Error as failed:
        return f"{str(failed).strip()}."
    return None


def _taken_up(file: Path, partitions: int, recompute: bool) -> Checkpoint:
    try:
        return checkpoint.read(file.read_bytes(), partitions, recompute)
    except OSError as failed:
        happened = f"Nothing was put down: {file} can't be read ({failed.strerror})."
    except NoCheckpoint as failed:
        happened = f"{file} can't be gone on from: {failed}."
    raise CommandFailed(happened, kept="everything.", advice="start from the beginning: berth verify.")


def _put_down(file: Path, at: Checkpoint) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_bytes(checkpoint.write(at))
    part.replace(file)


async def verify_log(
    settings: Settings,
    progress: Progress | None = None,
    recompute: bool = True,
    begin: Checkpoint | None = None,
    save: Save | None = None,
) -> Verdict:
    """Verify both logs of every partition, one after the other. Raises KafkaError."""
    bootstrap = settings.kafka_addresses()
    if begin is None:
        ends = await _ends(bootstrap, settings.partitions)
    else:
        ends = {(topic, number): end for topic, number, end in begin.ends}
    run = _Reading(bootstrap, settings.partitions, ends, recompute, begin, save)
    if progress is not None:
        run.watch(progress)
    verdict = await run.all_partitions()
    if progress is not None:
        progress.update(progress.task_ids[0], completed=sum(ends.values()))
    return verdict


class _Reading:
    """One reading of the whole log, from its beginning or from a checkpoint."""

    def __init__(
        self,
        bootstrap: str,
        partitions: int,
        ends: dict[tuple[str, int], int],
        recompute: bool,
        begin: Checkpoint | None,
        save: Save | None,
    ) -> None:
        self._bootstrap, self._partitions, self._ends = bootstrap, partitions, ends
        self._recompute, self._begin, self._save = recompute, begin, save
        self._agreement = Agreement(begin.agreement if begin is not None else None)
        self._verdict = Verdict(ends, recompute)
        if begin is not None:
            self._verdict.counts = begin.counts
            self._verdict.violations = [Found(*found) for found in begin.violations]
        self._read: Callable[[int], None] = lambda _: None
        self._saved_at = time.monotonic()

    def watch(self, progress: Progress) -> None:
        """Show how far it is."""
        task = progress.add_task("decisions", total=sum(self._ends.values()), completed=self._passed())
        self._read = lambda count: progress.advance(task, count)

    def _passed(self) -> int:
        """How many records lie before where it begins."""
        if self._begin is None:
            return 0
        before = [end for (_, number), end in self._ends.items() if number < self._begin.number]
        own = self._ends[DECISIONS.name, self._begin.number] if self._begin.topic == SITE_DECISIONS.name else 0
        return sum(before) + own + self._begin.offset

    async def all_partitions(self) -> Verdict:
        first = self._begin.number if self._begin is not None else 0
        for number in range(first, self._partitions):
            self._agreement.partition = number
            ends_of_chains = await _stored_ends(self._bootstrap, number)
            self._note_unreadable(number, ends_of_chains.unreadable)
            for topic, heads in zip(_TOPICS, (ends_of_chains.agents, ends_of_chains.sites), strict=True):
                begins_here = self._begin is not None and (self._begin.number, self._begin.topic) == (number, topic)
                if self._begin is not None and number == first and not begins_here and topic == DECISIONS.name:
                    continue  # read before it was put down
                await self._partition(number, topic, heads, self._begin if begins_here else None)
        # What isn't read may hold what is missed.
        is_read = all(found.topic not in _TOPICS for found in self._verdict.violations)
        disagreement = self._agreement.finish(self._ends) if is_read else None
        if disagreement is not None:
            where, detail = disagreement
            violation = Violation(where.offset, where.decider, where.seq, "agreement", detail)
            self._verdict.violations.append(Found(where.topic, where.partition, violation))
        return self._verdict

    def _note_unreadable(self, number: int, unreadable: Sequence[Violation]) -> None:
        """The first of the partition's stored rows that can't be read; once, also when a reading is taken up again."""
        if unreadable and all(found[:2] != (CHANGELOG.name, number) for found in self._verdict.violations):
            first, more = unreadable[0], len(unreadable) - 1
            detail = f"{first.detail}{f'; so are {more:,} more here' if more else ''}; berth recover puts it right"
            self._verdict.violations.append(Found(CHANGELOG.name, number, first._replace(detail=detail)))

    async def _partition(self, number: int, topic: str, heads: dict[str, Head], begin: Checkpoint | None) -> None:
        recheck = Recheck(_recomputer(begin)) if self._recompute else None
        verifier: Verifier | SiteVerifier
        if topic == DECISIONS.name:
            known = [stored.agent(id) for id, stored in begin.agents] if begin is not None else []
            verifier = Verifier(heads, self._agreement, recheck, known)
        else:
            known_sites = [stored.site(id) for id, stored in begin.sites] if begin is not None else []
            verifier = SiteVerifier(heads, self._agreement, recheck, known_sites)
        offset = begin.offset if begin is not None else None
        violation = None
        try:
            async for records in history(self._bootstrap, topic, number, offset):
                violation = _first_violation(verifier, records)
                if violation is not None:
                    break
                offset = records[-1].offset + 1
                self._read(len(records))
                if time.monotonic() > self._saved_at + SAVE_SECONDS:
                    self._put_down(number, topic, offset, verifier, recheck)
        except asyncio.CancelledError:
            if offset is not None:
                self._put_down(number, topic, offset, verifier, recheck)
            raise
        violation = violation or verifier.finish()
        if violation is not None:
            self._verdict.violations.append(Found(topic, number, violation))
        _count(self._verdict.counts, verifier, recheck)

    def _put_down(
        self, number: int, topic: str, offset: int, verifier: Verifier | SiteVerifier, recheck: Recheck | None
    ) -> None:
        if self._save is None:
            return
        counts = replace(self._verdict.counts)
        _count(counts, verifier, recheck)
        again = recheck.recomputer if recheck is not None else Recomputer()
        agents = verifier.agents() if isinstance(verifier, Verifier) else []
        sites = verifier.sites() if isinstance(verifier, SiteVerifier) else []
        self._save(
            Checkpoint(
                self._partitions,
                self._recompute,
                [(*place, end) for place, end in self._ends.items()],
                number,
                topic,
                offset,
                counts,
                [(found.topic, found.partition, found.violation) for found in self._verdict.violations],
                [(agent.agent_id, StoredAgent.of(agent)) for agent in agents],
                [(site.site_id, StoredSite.of(site)) for site in sites],
                [(id, StoredAgent.of(agent)) for id, agent in again.agents.items()],
                [(id, StoredSite.of(site)) for id, site in again.sites.items()],
                self._agreement.stored(),
            )
        )
        self._saved_at = time.monotonic()


def _recomputer(begin: Checkpoint | None) -> Recomputer:
    recomputer = Recomputer()
    if begin is not None:
        recomputer.agents = {id: stored.agent(id) for id, stored in begin.rechecked_agents}
        recomputer.sites = {id: stored.site(id) for id, stored in begin.rechecked_sites}
    return recomputer


def _count(counts: Counts, verifier: Verifier | SiteVerifier, recheck: Recheck | None) -> None:
    counts.decisions += verifier.decisions
    if isinstance(verifier, Verifier):
        counts.forced += verifier.forced
        counts.overtakings = counts.overtakings + verifier.overtakings
    else:
        counts.overtakings_at_sites = counts.overtakings_at_sites + verifier.overtakings
    if recheck is not None:
        counts.recomputed += recheck.decisions
        counts.unknown = counts.unknown + recheck.unknown


def _first_violation(verifier: Verifier | SiteVerifier, records: list[ConsumerRecord]) -> Violation | None:
    for record in records:
        violation = verifier.check(record.value or b"", record.offset)
        if violation is not None:
            return violation
    return None


class _StoredEnds(NamedTuple):
    """The ends of the agents' and sites' chains as a partition's rows have them; ``unreadable``: rows, by offset."""

    agents: dict[str, Head]
    sites: dict[str, Head]
    unreadable: list[Violation]


async def _stored_ends(bootstrap: str, number: int) -> _StoredEnds:
    """From the rows that are there; read before the logs, not to be ahead.

    Rows that were written over or removed don't count, whatever was wrong with them: the changelog keeps them until it
    is compacted.
    """
    newest: dict[bytes, tuple[int, bytes | None]] = {}
    async for records in history(bootstrap, CHANGELOG.name, number):
        newest |= {
            record.key: (record.offset, record.value)
            for record in records
            if not ((record.key or b"").startswith(_OTHER_ROWS) and record.key.endswith(b'"]'))
        }
    found = _StoredEnds({}, {}, [])
    for key, (offset, value) in sorted(newest.items(), key=lambda item: item[1][0]):
        if value is None:
            continue
        try:
            kind, id = codec.read_key(key)
            if kind not in ("agent", "site"):
                raise ValueError("a row of an unknown kind")
            row = codec.read_agent(value) if kind == "agent" else read_site(value)
            (found.agents if kind == "agent" else found.sites)[id] = Head(row.seq, row.prev)
        except (ValueError, TypeError, KeyError) as error:
            shown = key[:KEY_SHOWN_MAX].decode(errors="backslashreplace")
            why = codec.first_problem(error) if isinstance(error, ValidationError) else str(error)
            detail = f"the stored row with the key {shown} can't be read ({why})"
            found.unreadable.append(Violation(offset, _owner(key), 0, "row", detail))
    return found


_OTHERS: Final = ("trigger", "text", "conversation", "remembered", "watch", "gate", "deletion", "claim", "site_control")
_OTHER_ROWS: Final = (codec.write_key(codec.PARTITION_KEY), *(f'["{kind}","'.encode() for kind in _OTHERS))
"""Beginnings of the keys of rows that hold no end of a chain: there are many times more of them."""
KEY_SHOWN_MAX: Final = 200


def _owner(key: bytes) -> str:
    """Whose row it is, as far as its key can be read."""
    try:
        kind, *ids = codec.read_key(key)
    except (ValueError, TypeError):
        return ""
    return ids[0] if kind in ("agent", "site") and len(ids) == 1 else ""


async def _ends(bootstrap: str, partitions: int) -> dict[tuple[str, int], int]:
    """Where the logs end now; about how many decisions there are, since markers of transactions count as well."""
    async with reading(bootstrap, "read_committed") as consumer:
        topics = (DECISIONS.name, SITE_DECISIONS.name)
        numbers = [TopicPartition(topic, number) for topic in topics for number in range(partitions)]
        ends = await consumer.end_offsets(numbers)
        return {(number.topic, number.partition): int(end) for number, end in ends.items()}


def _print(verdict: Verdict) -> None:
    counts = verdict.counts
    summary = f"{_of(counts.decisions, 'decision')}, {_of(len(verdict.violations), 'violation')}"
    if counts.forced:
        summary += f" ({_of(counts.forced, 'forced dispatch', 'forced dispatches')}, counted apart)"
    typer.echo(summary)
    otherwise = sum(found.violation.kind == "recomputed" for found in verdict.violations)
    if counts.recomputed or otherwise:
        told = f"{_of(counts.recomputed, 'command')} decided again gave the same decision, byte for byte"
        typer.echo(told + (f"; {otherwise:,} did not: see below" if otherwise else ""))
    if any(found.topic in _TOPICS and found.violation.offset is not None for found in verdict.violations):
        typer.echo("what comes after a violation in its partition's log is not counted: it can't be checked")
    for policy, number in sorted(counts.unknown.items()):
        typer.echo(f"{_of(number, 'decision')} of policy {policy!r}, unknown here: folded, not decided again")
    overtaken = (("triggers overtaken", counts.overtakings), ("claims overtaken at sites", counts.overtakings_at_sites))
    for what, by_reason in overtaken:
        if by_reason:
            allowed = ", ".join(f"{number:,} {reason}" for reason, number in by_reason.most_common())
            typer.echo(f"older {what}, and what allowed it: {allowed}")
    for topic, number, violation in verdict.violations:
        where = "at its end" if violation.offset is None else f"offset {violation.offset}"
        whose = f", {violation.decider!r}" if violation.decider else ""
        whose += f", decision {violation.seq}" if violation.seq else ""
        typer.echo(f"{topic} partition {number}, {where}: {violation.kind}{whose}: {violation.detail}")


def _of(count: int, one: str, many: str = "") -> str:
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def _as_json(verdict: Verdict) -> dict[str, object]:
    """``positions``: everything before ``next_offset`` was found to be as it should be."""
    counts = verdict.counts
    stopped = {(found.topic, found.partition): found.violation.offset for found in verdict.violations}
    return {
        "sound": not verdict.violations,
        "recompute": verdict.recomputes,
        "decisions": counts.decisions,
        "forced": counts.forced,
        "recomputed": counts.recomputed,
        "unknown_policies": dict(counts.unknown),
        "overtakings": dict(counts.overtakings),
        "overtakings_at_sites": dict(counts.overtakings_at_sites),
        "violations": [
            {"topic": topic, "partition": number, **violation._asdict()}
            for topic, number, violation in verdict.violations
        ],
        "positions": [
            {
                "topic": topic,
                "partition": number,
                "next_offset": end if (at := stopped.get((topic, number))) is None else at,
            }
            for (topic, number), end in sorted(verdict.ends.items())
        ],
    }
