"""``berth recover``: make the stored rows anew from the log of decisions when the changelog is lost or damaged."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer
from aiokafka.errors import KafkaError, ProducerFenced
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from api.cli.command_failed import AWAY_EXIT_CODE, FAILED_EXIT_CODE, LOG_UNREADABLE_EXIT_CODE, CommandFailed
from api.cli.failures import in_words
from api.cli.recovering import Recovered, records_of_logs, recover_partition
from api.cli.topics import require_fit
from streams import CHANGELOG
from streams.audit.logged import Unreadable
from streams.audit.recover import LogDamaged
from streams.kafka.clients import is_outage
from streams.kafka.recovery import members
from streams.kafka.restore import TransactionLeftOpen
from streams.rules.order import format_instant
from streams.settings import Settings, load_settings

NOT_WRITTEN_EXIT_CODE: Final = 1
SHOWN_MAX: Final = 20
NOT_AGAIN: Final = (
    "can't be decided again as they were (another version's rules, or rows that were damaged then); folded from their "
    "events"
)
_AGAIN: Final = "run berth recover again: it goes on with what is not written yet."


def recover(
    partition: Annotated[
        list[int] | None,
        typer.Option("--partition", min=0, help="Only this one; give it again for more. All, if none."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Write. Without it, only say what would be written.")] = False,
    accept_cut_log: Annotated[
        bool,
        typer.Option("--accept-cut-log", help="Also where stored rows know of decisions that the log has no more."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Rebuild the state of agents and sites from the log of decisions. For when workers refuse their stored rows.

    Without --yes nothing is written: it says which rows of berth-state-changelog are missing, different or too many,
    and exits with 1 if there are any, else with 0. With --yes it puts them right, as the only writer of each partition;
    exit code 0 when all of it is written. 65: the log itself is damaged. 69: Kafka is away. No worker may run
    meanwhile; upstreams, API and projector may.

    Everything comes back as it was: slots, leases, queues, claims, gates, budgets, what is remembered. Messages and
    payloads of live triggers are found in the rows that are left, in berth.triggers, berth.dispatches or berth.texts.
    What waits or is paused and has lost its own ends as failed, by a decision in the log (payload_lost); what runs goes
    on, and is not tried again. A recovery that was broken off is run again.
    """
    settings = load_settings()
    numbers = sorted(set(partition)) if partition else list(range(settings.partitions))
    if numbers[-1] >= settings.partitions:
        raise typer.BadParameter(f"there are {settings.partitions} partitions, from 0 to {settings.partitions - 1}")
    require_fit(settings, settings.kafka_addresses())
    _require_no_workers(settings)
    found = _recovered(settings, numbers, yes, accept_cut_log)
    if as_json:
        typer.echo(json.dumps({"written": yes, "partitions": [_as_json(one) for one in found]}))
    else:
        _print(found, yes, accept_cut_log)
    if any(not (one.is_as_stored or one.is_written) for one in found):
        raise typer.Exit(NOT_WRITTEN_EXIT_CODE)


def _require_no_workers(settings: Settings) -> None:
    running = asyncio.run(members(settings.kafka_addresses()))
    if running:
        seconds = settings.session_timeout_seconds
        where = ", ".join(f"{count} at {host}" for host, count in sorted(Counter(running).items()))
        raise CommandFailed(
            f"Workers are running: {where}. They hold their state in memory, and rows can't be put in "
            "place behind their backs.",
            kept="everything; nothing was read or written.",
            advice="stop every berth worker (the topic berth.workers says which there are; one that was killed counts "
            f"for another {seconds:g} s), then try again.",
        )


def _recovered(settings: Settings, numbers: Sequence[int], write: bool, accept_cut_log: bool) -> list[Recovered]:
    found: list[Recovered] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("decisions", total=None)

        async def all_of_them() -> None:
            total = await records_of_logs(settings.kafka_addresses(), list(numbers))
            progress.update(task, total=total)
            for number in numbers:
                progress.update(task, description=f"decisions, now partition {number}")
                found.append(
                    await recover_partition(
                        settings, number, write, accept_cut_log, lambda count: progress.advance(task, count)
                    )
                )
            progress.update(task, completed=total)

        try:
            asyncio.run(all_of_them())
        except (Unreadable, LogDamaged, TransactionLeftOpen, KafkaError, TimeoutError) as error:
            raise _failure(error, found, numbers[len(found)], write) from error
    return found


def _failure(
    error: Unreadable | LogDamaged | TransactionLeftOpen | KafkaError | TimeoutError,
    found: list[Recovered],
    number: int,
    write: bool,
) -> CommandFailed:
    written = ", ".join(str(one.number) for one in found if one.is_written)
    kept = f"partitions {written} are written; " if written else ""
    half = f"{kept}the log; rows of partition {number} may be there in part, and then no worker starts on it."
    match error:
        case Unreadable() | LogDamaged():
            return CommandFailed(
                f"The log of decisions can't be built on: {error}.",
                kept=f"{kept}nothing of partition {number} was changed.",
                advice="berth verify says what was changed, removed or moved; restore that topic from a backup. The "
                "other partitions can be recovered meanwhile: --partition.",
                exit_code=LOG_UNREADABLE_EXIT_CODE,
            )
        case TransactionLeftOpen():
            return CommandFailed(
                error.happened, kept=f"{kept}nothing of partition {number} was changed.", advice=error.advice
            )
        case ProducerFenced():
            return CommandFailed(
                f"A worker has taken over partition {number} while it was written.",
                kept=half,
                advice=f"stop every berth worker, then {_AGAIN}",
            )
        case _:
            return CommandFailed(
                f"Kafka failed in partition {number}: {in_words(error)}.",
                kept=half if write else "everything; nothing was written.",
                advice=f"look at Kafka, then {_AGAIN}",
                exit_code=AWAY_EXIT_CODE if is_outage(error) else FAILED_EXIT_CODE,
            )


# Telling


def _print(found: Sequence[Recovered], write: bool, accept_cut_log: bool) -> None:
    for one in found:
        typer.echo(_line(one))
        for note in one.notes if not one.is_as_stored else ():
            typer.echo(f"  note: {note}")
        if one.looked_at_anew and not one.is_as_stored:
            typer.echo(f"  {NOT_AGAIN}: {_some(one.looked_at_anew)}")
        for ahead in one.ahead[:SHOWN_MAX]:
            typer.echo(
                f"  {ahead.decider.kind} {ahead.decider.id!r}: its stored row is of decision {ahead.stored_seq}, the "
                f"log ends at {ahead.log_seq}"
            )
        for lost in one.lost[:SHOWN_MAX]:
            typer.echo(
                f"  payload lost: agent {lost.agent_id!r}, trigger {lost.trigger_id!r}, {lost.state}, accepted "
                f"{format_instant(lost.accepted_at)}: {_fate(lost.state, one.is_written)}"
            )
        if len(one.lost) > SHOWN_MAX:
            typer.echo(f"  and {len(one.lost) - SHOWN_MAX:,} more that have lost their payload: --json lists all")
    typer.echo(_summary(found, write, accept_cut_log))


def _line(one: Recovered) -> str:
    head = f"partition {one.number}: {one.decisions:,} decisions, {one.agents:,} agents, {one.sites:,} sites"
    if one.is_as_stored:
        return f"{head}; all {one.rows:,} rows are as the log says"
    counts = (("missing", one.missing), ("different", one.different), ("too many", one.needless))
    what = "; ".join(f"{count.total():,} {name} ({_kinds(count)})" for name, count in counts if count)
    what = what or "rows are as the log says"
    return f"{head}, {one.rows:,} rows; {what}{'; written' if one.is_written else ''}"


def _kinds(counts: Counter[str]) -> str:
    return ", ".join(f"{number:,} {kind}" for kind, number in sorted(counts.items()))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN_MAX:,} more" if len(names) > SHOWN_MAX else ""
    return ", ".join(names[:SHOWN_MAX]) + more


def _fate(state: str, is_written: bool) -> str:
    if state == "running":
        return "it goes on, and is not tried again"
    return "ended as failed" if is_written else "would end as failed"


def _summary(found: Sequence[Recovered], write: bool, accept_cut_log: bool) -> str:
    """What to do now. A partition whose log was cut is named with the one way that is not refused."""
    wrong = [one for one in found if not one.is_as_stored]
    if not wrong:
        return "Nothing to do: the stored rows are as the log says."
    lost = sum(len(one.lost) for one in wrong)
    lines = []
    if lost:
        lines.append(f"{lost:,} triggers have lost what a runner would be sent: send them again, with new ids.")
    if any(one.looked_at_anew for one in wrong):
        lines.append("berth verify says which decisions can't be decided again, and whether the log is whole.")
    refused = [one.number for one in wrong if one.ahead and not (one.is_written or accept_cut_log)]
    if refused:
        only = " ".join(f"--partition {number}" for number in refused)
        lines.append(
            f"{_numbers(refused)}: the log has lost its end. Restore it from a backup; or, if what is there is all "
            f"there is, and nothing else of what was decided still runs: berth recover --yes --accept-cut-log {only}"
        )
    if written := [one.number for one in wrong if one.is_written]:
        lines.append(f"Written: {_numbers(written).lower()}. Start the workers; berth verify proves the log.")
    if not write:
        can_be_written = [one for one in wrong if one.number not in refused]
        words = "berth recover --yes" + (" --accept-cut-log" if any(one.ahead for one in can_be_written) else "")
        where = f"{CHANGELOG.name}{' in the other partitions' if refused else ''}"
        lines.append("Nothing was written." + (f" To put rows of {where} right: {words}" if can_be_written else ""))
    return "\n".join(lines)


def _numbers(numbers: Sequence[int]) -> str:
    return f"Partition{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _as_json(one: Recovered) -> dict[str, Any]:
    return {
        "partition": one.number,
        "state": "as_stored" if one.is_as_stored else "written" if one.is_written else "not_written",
        "decisions": one.decisions,
        "agents": one.agents,
        "sites": one.sites,
        "rows": one.rows,
        "missing": dict(sorted(one.missing.items())),
        "different": dict(sorted(one.different.items())),
        "needless": dict(sorted(one.needless.items())),
        "payload_lost": [
            {
                "agent_id": lost.agent_id,
                "trigger_id": lost.trigger_id,
                "conversation_id": lost.conversation_id,
                "state": lost.state,
                "accepted_at": format_instant(lost.accepted_at),
            }
            for lost in one.lost
        ],
        "ahead_of_the_log": [
            {"kind": ahead.decider.kind, "id": ahead.decider.id, "stored": ahead.stored_seq, "log": ahead.log_seq}
            for ahead in one.ahead
        ],
        "looked_at_anew": one.looked_at_anew,
        "notes": one.notes,
    }
