"""``berth runner``: does the work of dispatches, as long as each payload says.

The loop is ``api.load.runner``; this file only gives it work to do and words for the terminal. The work is waiting.
What it does with an attempt depends on ``--seed`` and the execution id alone, so an attempt that is delivered twice
would do the same twice.
"""

import asyncio
import fnmatch
import random
from typing import Annotated, Final

import typer
from rich.console import Console

from api.cli.command_failed import CommandFailed
from api.cli.service import log_to_terminal, run_service
from api.load.runner import Ended, Options, Runner, Work
from streams.ending import ENDS_SECONDS_MAX, EXIT_ASKED, Ending
from streams.rules.dispatches import Dispatch
from streams.settings import load_settings

WORK_SECONDS_DEFAULT: Final = 1.0
REPORT_SECONDS: Final = 10.0


def runner(  # noqa: PLR0913 - options of a command line
    *,
    agents: Annotated[
        str, typer.Option(help="Take only the dispatches of agents like this, as in 'demo-*'. See --group.")
    ] = "*",
    group: Annotated[
        str,
        typer.Option(
            help="Consumer group: the runners of one group share the dispatches. Runners for other agents need a "
            "group of their own, and each agent exactly one group."
        ),
    ] = "",
    capacity: Annotated[int, typer.Option(min=1, max=10_000, help="Attempts at once; more wait in Kafka.")] = 100,
    work_seconds: Annotated[
        float, typer.Option(min=0, help='How long to work when the payload doesn\'t say {"work_seconds": ...}.')
    ] = WORK_SECONDS_DEFAULT,
    heartbeat: Annotated[
        float, typer.Option(min=0.1, help="Seconds between signs of life; a dispatch may ask for more of them.")
    ] = 30.0,
    failures: Annotated[
        float, typer.Option(min=0, max=1, help="Share of attempts that fail, and are tried again, as in 0.05.")
    ] = 0.0,
    deaths: Annotated[
        float, typer.Option(min=0, max=1, help="Share of attempts that fall silent, as if the runner had died.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Which attempts fail or fall silent.")] = 0,
    end_seconds: Annotated[
        float, typer.Option(min=0, help="On Ctrl-C or SIGTERM: how long to go on with what is in work.")
    ] = 5.0,
) -> None:
    """Take dispatches, work as long as each payload says, and report, until Ctrl-C.

    The payload {"work_seconds": 2.5, "failure_rate": 0.1} works that long and fails that often; {"pauses": true} then
    waits for a person's reply. Start as many runners as you like: those of one group share the work. docs/runner.md
    says how to write one.
    """
    if failures + deaths > 1:
        raise CommandFailed(
            f"--failures {failures} and --deaths {deaths} are more than all attempts together.",
            kept="everything; nothing was started.",
            advice="choose shares whose sum is at most 1.",
        )
    bootstrap = load_settings().kafka_addresses()
    log_to_terminal()
    options = Options(
        group=group or ("berth-runner" if agents == "*" else f"berth-runner {agents}"),
        capacity=capacity,
        heartbeat_seconds=heartbeat,
        end_seconds=end_seconds,
        takes=lambda agent_id: fnmatch.fnmatchcase(agent_id, agents),
    )
    work = waiting_work(work_seconds, failures, deaths, seed)
    run_service(lambda ending: _run(bootstrap, work, options, ending), end_seconds + ENDS_SECONDS_MAX)


def waiting_work(work_seconds: float, failures: float, deaths: float, seed: int) -> Work:
    """Work that waits as long as the payload says, and then pauses if it says so.

    It fails or falls silent at the given rates.
    """

    async def work(dispatch: Dispatch) -> Ended:
        payload = dispatch.payload if isinstance(dispatch.payload, dict) else {}
        chance = random.Random(f"{seed} {dispatch.execution_id}")  # noqa: S311 - has to be the same each time
        fate, part = chance.random(), chance.random()
        seconds = _number(payload.get("work_seconds"), work_seconds)
        failure_rate = _number(payload.get("failure_rate"), failures)
        if fate < deaths:
            await asyncio.sleep(seconds * part)
            return Ended("failed", silently=True)
        if fate < deaths + failure_rate:
            await asyncio.sleep(seconds * part)
            return Ended("failed", error=f"failed by chance (attempt {dispatch.attempt})")
        await asyncio.sleep(seconds)
        if payload.get("pauses") is True:
            return Ended("paused")
        return Ended("finished", result={"worked_seconds": round(seconds, 3)})

    return work


def _number(value: object, default: float) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e6
    return float(value) if is_number and isinstance(value, int | float) else default


async def _run(bootstrap: str, work: Work, options: Options, ending: Ending) -> int:
    running = Runner(bootstrap, work, options)
    console = Console(stderr=True)
    console.print(
        f"takes dispatches from {bootstrap} as group {options.group!r}, up to {options.capacity} at once; "
        "Ctrl-C ends it",
        highlight=False,
        soft_wrap=True,
    )
    await running.start()
    asking = asyncio.create_task(ending.in_order().wait(), name="asked")
    asking.add_done_callback(lambda _: running.end())
    telling = asyncio.create_task(_tell(running, console))
    try:
        await running.run()
    finally:
        telling.cancel()
        console.print(in_words(running), highlight=False)
    return EXIT_ASKED


async def _tell(running: Runner, console: Console) -> None:
    before = ""
    while True:
        await asyncio.sleep(REPORT_SECONDS)
        words = in_words(running)
        if words != before:
            console.print(words, highlight=False)
        before = words


def in_words(running: Runner) -> str:
    """What the runner has done so far, in one line."""
    counts = running.counts
    silent = f", fallen silent {counts.silent}" if counts.silent else ""
    return (
        f"in work {running.held}, taken {counts.taken}, finished {counts.finished}, failed {counts.failed}, "
        f"stopped {counts.stopped}{silent}"
    )
