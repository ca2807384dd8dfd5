"""Child processes of the benchmark: each prints one JSON object a line and hears single words on its input."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Self

import psutil

ROOT = Path(__file__).parents[2]
Json = dict[str, Any]


class Child:
    """``python -m module argument...`` in the root of the clone."""

    def __init__(self, process: asyncio.subprocess.Process, errors: asyncio.Task[bytes]) -> None:
        self.process = process
        self.started = time.monotonic()
        self.events: list[tuple[float, Json]] = []
        """What it has printed, with the (monotonic) second in which it came."""
        self._printed = asyncio.Condition()
        self._errors = errors
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, module: str, *arguments: str, **environment: str) -> Self:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            *arguments,
            cwd=ROOT,
            env=clean | environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=2**24,
        )
        assert process.stderr is not None
        return cls(process, asyncio.create_task(process.stderr.read()))

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            now = time.monotonic()
            async with self._printed:
                self.events.append((now, json.loads(line) if line.startswith(b"{") else {"event": line.decode()}))
                self._printed.notify_all()
        async with self._printed:
            self._printed.notify_all()

    async def event(self, name: str, count: int = 1, timeout_seconds: float = 60.0) -> tuple[float, Json]:
        """Wait until it has printed ``{"event": name}`` for the ``count``th time."""

        def found() -> list[tuple[float, Json]]:
            return [entry for entry in self.events if entry[1].get("event") == name]

        async with asyncio.timeout(timeout_seconds), self._printed:
            await self._printed.wait_for(lambda: len(found()) >= count or self._reading.done())
        if len(found()) < count:
            errors = (await self._errors).decode(errors="replace")[-3000:]
            raise RuntimeError(f"a child ended before it said {name!r} {count} times:\n{errors}")
        return found()[count - 1]

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word.encode() + b"\n")

    def memory_bytes(self) -> int:
        """Resident memory."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    async def end(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Send the signal and wait; after 20 s kill."""
        if self.process.returncode is None:
            self.process.send_signal(how)
            try:
                async with asyncio.timeout(20):
                    await self.process.wait()
            except TimeoutError:
                self.process.kill()
        await asyncio.gather(self.process.wait(), self._reading, self._errors)


@asynccontextmanager
async def child(module: str, *arguments: str, **environment: str) -> AsyncIterator[Child]:
    """A child that is ended with the block."""
    started = await Child.start(module, *arguments, **environment)
    try:
        yield started
    finally:
        await started.end()


def say(event: str, **facts: Any) -> None:
    """What a child prints."""
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()


async def words() -> AsyncIterator[str]:
    """What a child hears."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async for line in reader:
        yield line.decode().strip()


class OtherCpu:
    """Cores used meanwhile by programs that are neither this one nor its children; 0 is a quiet machine."""

    cores = 0.0


@contextmanager
def other_cpu() -> Iterator[OtherCpu]:
    """Measure it over the block."""
    measured, began, busy, own = OtherCpu(), time.monotonic(), _busy_seconds(), _own_seconds()
    yield measured
    seconds = time.monotonic() - began
    measured.cores = round(max(0.0, (_busy_seconds() - busy) - (_own_seconds() - own)) / seconds, 2)


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    return float(sum(times) - idle - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0))


def _own_seconds() -> float:
    total = 0.0
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        try:
            total += sum(process.cpu_times()[:4])  # with those of its children that have ended
        except psutil.NoSuchProcess:
            continue
    return total
