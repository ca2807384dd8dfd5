"""``berth audit``: one agent's history as a file that reproduces itself."""

import json
import re
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from api.cli.command_failed import CommandFailed
from api.cli.log_reading import KEPT, decisions_of
from streams.audit.slices import Difference, NewerForm, NoSlice, Replayed, replay, written
from streams.settings import load_settings

DIFFERENT_EXIT_CODE: Final = 1
_SHOWN_MAX: Final = 600

app = typer.Typer(
    help="What the log says afterwards: an agent's history as a file, what held work up, when waiting work will start.",
    no_args_is_help=True,
)


@app.command("export")
def export(
    agent: Annotated[str, typer.Argument(help="The agent's id.")],
    to: Annotated[
        Path | None, typer.Option("--to", help="The file; without it decisions-AGENT.jsonl in this directory.")
    ] = None,
) -> None:
    """Write everything that one agent was asked and what was decided, as a file that berth audit replay reproduces.

    It holds no texts of people (messages, payloads, errors, results): only their digests. Ids, names of people who
    asked, and settings are in it.
    """
    settings = load_settings()
    file = to or Path(f"decisions-{re.sub(r'[^A-Za-z0-9._-]', '_', agent)}.jsonl")
    if file.exists():
        raise CommandFailed(f"{file} is there already.", kept="that file, as it is.", advice="name another: --to FILE.")
    part = file.with_name(f"{file.name}.part")
    count = 0
    try:
        with decisions_of(settings, agent) as log, part.open("wb") as lines:
            for line in written(agent, log):
                lines.write(line)
                count += 1
        if count == 2:
            raise CommandFailed(
                f"Agent {agent!r} has no decision in the log.", kept=KEPT, advice="check its id: berth as-of --at now."
            )
        part.replace(file)
    except OSError as failed:
        raise CommandFailed(
            f"{part} can't be written: {failed.strerror}.", kept=KEPT, advice="make room, or name another: --to FILE."
        ) from failed
    finally:
        part.unlink(missing_ok=True)
    typer.echo(f"{count - 2:,} decisions of {agent} are in {file}")


@app.command("replay")
def replay_command(
    file: Annotated[Path, typer.Argument(help="A file that berth audit export wrote.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Decide every command in the file again and compare each byte; exit code 1 when one differs.

    Needs no Kafka and no database, and sends nothing. Decisions of rules that this version doesn't know are named and
    only folded: nobody can say here what those rules would have decided.
    """
    try:
        with file.open("rb") as lines:
            found = replay(lines)
    except OSError as failed:
        raise CommandFailed(
            f"{file} can't be read: {failed.strerror}.", kept="everything.", advice="name a file of berth audit export."
        ) from failed
    except NewerForm as failed:
        raise CommandFailed(
            f"{file} can't be replayed: {failed}.",
            kept="everything.",
            advice="a newer Berth wrote it: upgrade this one, then replay it again.",
        ) from failed
    except NoSlice as failed:
        raise CommandFailed(
            f"{file} can't be replayed: {failed}.", kept="everything.", advice="export it again: berth audit export."
        ) from failed
    if as_json:
        typer.echo(json.dumps(_as_json(found)))
    else:
        _print(found)
    if found.difference is not None:
        raise typer.Exit(DIFFERENT_EXIT_CODE)


def _print(found: Replayed) -> None:
    console = Console()
    for policy, first, last in found.unknown:
        console.print(
            f"decisions {first} to {last} are of policy {policy!r}, which is unknown here: folded, not decided again",
            style="yellow",
        )
    if found.difference is None:
        counts = f"{found.recomputed:,} of {found.decisions:,}"
        typer.echo(f"{counts} decisions of {found.agent_id} reproduced, byte for byte")
        return
    difference = found.difference
    typer.echo(f"line {difference.line}, decision {difference.seq} of {found.agent_id}: {difference.why}")
    if difference.recorded is not None:
        typer.echo(f"  in the file:  {_from_difference(difference.recorded, difference)}")
    if difference.again is not None:
        typer.echo(f"  by the rules: {_from_difference(difference.again, difference)}")


def _from_difference(value: bytes, difference: Difference) -> str:
    """The text from shortly before the first byte that differs."""
    pairs = zip(difference.recorded or b"", difference.again or b"", strict=False)
    same = next((at for at, (one, other) in enumerate(pairs) if one != other), 0)
    start = max(0, same - 60)
    return ("…" if start else "") + value[start : start + _SHOWN_MAX].decode(errors="replace")


def _as_json(found: Replayed) -> dict[str, object]:
    difference = found.difference
    return {
        "agent_id": found.agent_id,
        "decisions": found.decisions,
        "recomputed": found.recomputed,
        "unknown_policies": [
            {"policy": policy, "first_seq": first, "last_seq": last} for policy, first, last in found.unknown
        ],
        "difference": None
        if difference is None
        else {
            "line": difference.line,
            "seq": difference.seq,
            "why": difference.why,
            "recorded": None if difference.recorded is None else json.loads(difference.recorded),
            "again": None if difference.again is None else json.loads(difference.again),
        },
    }
