"""What ``berth bench`` does: a broker of its own, each measure so many times, systems in turn, then the report."""

import asyncio
import logging
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from api.cli.embedded_kafka import EmbeddedKafka
from streams.kafka import topics
from tests.bench import measures, projection, site_latency, start
from tests.bench.processes import other_cpu
from tests.bench.report import Runs
from tests.bench.systems import run_beside_projector, run_on_berth, run_on_floor
from tests.bench.workloads import faults, workload

WORKLOADS: Final = ("w1", "w1c", "w2", "w3", "w3e")
MEASURES: Final[dict[str, Callable[[str], Awaitable[dict[str, Any]]]]] = {
    "drain": measures.drain,
    "latency": measures.latency,
    "sites": site_latency.sites,
    "restore": measures.restore_and_memory,
    "takeover": measures.takeover,
    "projection": projection.projection,
    "start": start.first_dispatch,
}
ALSO: Final = {"memory": "restore"}
"""Names of what another measure measures along."""
NAMES: Final = (*WORKLOADS, *MEASURES, *ALSO)


class Faulty(Exception):  # noqa: N818 - it reads as what it is
    """A run showed what must never be: something twice or missing, or the limit passed."""


async def measure(names: Sequence[str], repeat: int, console: Console) -> Runs:
    """Run everything; each repetition runs all, so that a noisy time doesn't fall on one measure alone."""
    chosen = [name for name in (*WORKLOADS, *MEASURES) if name in {ALSO.get(wanted, wanted) for wanted in names}]
    runs: Runs = {}
    with (
        tempfile.TemporaryDirectory(prefix="berth-bench-") as directory,
        console.status("starting Kafka") as status,
        EmbeddedKafka(Path(directory) / "kafka", port=None, report=status.update) as kafka,
    ):
        await topics.create(kafka.bootstrap, 8)
        for repetition in range(1, repeat + 1):
            for name in chosen:
                for run, function in _functions(name):
                    status.update(f"{run}, {repetition} of {repeat}")
                    found = await _measured(function, kafka.bootstrap)
                    runs.setdefault(run, []).append(found)
                    console.print(f"{run} {repetition}/{repeat}  {_brief(found)}", highlight=False, soft_wrap=True)
    return runs


def _functions(name: str) -> list[tuple[str, Callable[[str], Awaitable[dict[str, Any]]]]]:
    if name not in WORKLOADS:
        return [(f"berth {name}", MEASURES[name])]

    async def on_floor(bootstrap: str) -> dict[str, Any]:
        return await run_on_floor(bootstrap, workload(name))

    async def on_berth(bootstrap: str) -> dict[str, Any]:
        return await run_on_berth(bootstrap, workload(name))

    async def beside_projector(bootstrap: str) -> dict[str, Any]:
        return await run_beside_projector(bootstrap, workload(name))

    systems: list[tuple[str, Callable[[str], Awaitable[dict[str, Any]]]]]
    systems = [(f"floor {name}", on_floor), (f"berth {name}", on_berth)]
    return [*systems, (f"projected {name}", beside_projector)] if name == "w1" else systems


async def _measured(function: Callable[[str], Awaitable[dict[str, Any]]], bootstrap: str) -> dict[str, Any]:
    began = time.monotonic()
    with other_cpu() as others:
        found = await function(bootstrap)
    if "running_max" in found and (wrong := faults(found)):
        raise Faulty(", ".join(wrong))
    return {**found, "other_cpu": others.cores, "seconds": round(time.monotonic() - began, 1)}


def _brief(found: dict[str, Any]) -> str:
    of_workload = ("admitted_per_second", "p50_ms", "p99_ms", "max_ms", "behind_seconds")
    shown = of_workload if "running_max" in found else tuple(found)
    return "  ".join(
        f"{name} {found[name]}" for name in dict.fromkeys((*shown, "other_cpu")) if found.get(name) is not None
    )


def run(names: Sequence[str], repeat: int, console: Console) -> Runs:
    """Run everything, from a program without an event loop."""
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # new topics, and workers that are killed
    return asyncio.run(measure(names, repeat, console))
