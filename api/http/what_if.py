"""Another policy tried on recorded traffic, for who asks over HTTP: ``berth what-if`` as a child process.

The API decides nothing and knows no decider; the command does, which reads the log alone. It runs as a process of its
own, one at a time since a replay takes a core as long as it lasts, with less priority than everybody else and a bound
on its time and memory. It ends with who asked and with this service: a process for which nobody waits any more is never
left behind, not even when this one is killed (``SupervisedProcess``).
"""

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Sequence
from tempfile import TemporaryFile
from typing import IO, Any, Final
from urllib.parse import quote

import structlog

from api.cli.command_failed import AWAY_EXIT_CODE, LOG_UNREADABLE_EXIT_CODE, NOTHING_RECORDED_EXIT_CODE
from api.cli.supervised import SupervisedProcess
from api.http.problems import Problem, unavailable
from api.http.requests import WhatIfRequest

SECONDS_MAX: Final = 60.0
MEMORY_KIB_MAX: Final = 4 * 1024 * 1024
ANSWER_BYTES_MAX: Final = 16 * 1024 * 1024
RETRY_AFTER_SECONDS: Final = 10
_LOOK_SECONDS: Final = 0.05
_ERROR_BYTES: Final = 4_000
BOUNDED: Final = ("/bin/sh", "-c", 'ulimit -v "$0"; exec nice -n 10 "$@"', str(MEMORY_KIB_MAX))
_NOT_ITS_AFFAIR: Final = frozenset(
    {"BERTH_DATABASE_URL", "BERTH_JWT_SECRET", "BERTH_JWT_PUBLIC_KEY_FILE", "BERTH_LINK_SECRET", "BERTH_TOKEN"}
)

log = structlog.get_logger()


class ClientLeft(Exception):  # noqa: N818 - it reads as what it is
    """Nobody waits for the answer any more."""


class WhatIfs:
    """The replays of this process, one at a time. ``seconds_max``: how long one may take."""

    def __init__(self, bootstrap: str, partitions: int, seconds_max: float = SECONDS_MAX) -> None:
        self._environment = {"BERTH_KAFKA": bootstrap, "BERTH_PARTITIONS": str(partitions)}
        self._seconds_max = seconds_max
        self._is_busy = False
        self._is_ending = False

    def end(self) -> None:
        """Let nobody wait any longer: the service is being stopped."""
        self._is_ending = True

    async def answer(self, request: WhatIfRequest, client_leaves: Coroutine[Any, Any, None]) -> bytes:
        """What the command prints, one JSON object. The process has ended by then, however this ends.

        Raises Problem, or ClientLeft when ``client_leaves`` has come to its end first.
        """
        leaving = asyncio.ensure_future(client_leaves)
        try:
            if self._is_busy:
                raise Problem(
                    429,
                    "what_if_busy",
                    "This instance replays something already, one at a time. Try again when that is done, ask another "
                    "instance, or use berth what-if.",
                    headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
                )
            self._is_busy = True
            try:
                return await self._run(words_of(request), leaving)
            finally:
                self._is_busy = False
        finally:
            leaving.cancel()

    async def _run(self, words: Sequence[str], leaving: "asyncio.Future[None]") -> bytes:
        inherited = {name: value for name, value in os.environ.items() if name not in _NOT_ITS_AFFAIR}
        process = SupervisedProcess("what-if", signal.SIGKILL)
        with TemporaryFile() as output, TemporaryFile() as errors:
            try:
                process.start(
                    [*BOUNDED, sys.executable, "-m", "api.cli", *words],
                    output=output,
                    error=errors,
                    environment=inherited | self._environment,
                )
                exit_code = await self._end_of(process, leaving)
            finally:
                process.kill()
            return answer_of(exit_code, output, errors)

    async def _end_of(self, process: SupervisedProcess, leaving: "asyncio.Future[None]") -> int:
        """Its exit code. Raises Problem or ClientLeft when it is to be ended before."""
        deadline = asyncio.get_running_loop().time() + self._seconds_max
        while (exit_code := process.exit_code) is None:
            if self._is_ending:
                raise unavailable("service_stopping", "This instance is being stopped. Ask another one.")
            if asyncio.get_running_loop().time() >= deadline:
                raise _too_much(f"It took longer than {self._seconds_max:g} s")
            await asyncio.wait({leaving}, timeout=_LOOK_SECONDS)
            if leaving.done():
                raise ClientLeft
        return exit_code


def words_of(request: WhatIfRequest) -> list[str]:
    """The command line that asks the same."""
    words = ["what-if", "--json"]
    words += [f"--limit={agent_id}={limit}" for agent_id, limit in request.limits.items()]
    words += [f"--capacity={site}={capacity}" for site, capacity in request.capacities.items()]
    for gate in request.gates:
        site, name = (quote(part, safe="") for part in (gate.site, gate.name))
        words.append(f"--gate={site}/{gate.scope}:{name}={'open' if gate.enabled else 'closed'}")
    if request.since is not None:
        words.append(f"--since={request.since}")
    if request.until is not None:
        words.append(f"--until={request.until}")
    return words


def answer_of(exit_code: int, output: IO[bytes], errors: IO[bytes]) -> bytes:
    """What a process that has ended gives to who asked, by its exit code and what it has written. Raises Problem."""
    if exit_code == 0:
        if output.seek(0, os.SEEK_END) > ANSWER_BYTES_MAX:
            raise _too_much(f"Its answer is larger than {ANSWER_BYTES_MAX // 2**20} MiB")
        output.seek(0)
        return output.read().rstrip()
    if exit_code == NOTHING_RECORDED_EXIT_CODE:
        raise Problem(404, "nothing_recorded", "Nothing was decided in that time. Choose another since and until.")
    if exit_code == LOG_UNREADABLE_EXIT_CODE:
        raise Problem(
            409,
            "log_unreadable",
            "The log can't be read to its end: it is damaged, or a newer Berth wrote it. berth verify says where.",
        )
    if exit_code == AWAY_EXIT_CODE:
        raise unavailable("log_unavailable", "Kafka can't be reached, so nothing could be replayed. Try again later.")
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - _ERROR_BYTES))
    said = errors.read().decode(errors="replace")
    if "MemoryError" in said:
        raise _too_much(f"It needed more than {MEMORY_KIB_MAX // 2**20} GiB of memory")
    log.error("what_if_failed", exit_code=exit_code, said=said)
    raise RuntimeError(f"berth what-if ended with exit code {exit_code}")


def _too_much(happened: str) -> Problem:
    return Problem(
        504,
        "what_if_too_much",
        f"{happened}, and was ended; it had changed nothing. Choose a shorter stretch with since and until, or run "
        "berth what-if, which has no bounds.",
    )
