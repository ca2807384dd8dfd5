"""From runs to tables: medians, worst ones, and the targets that were met or not."""

import platform
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Literal

import psutil

from api.cli.kafka_jars import KAFKA_VERSION

Runs = dict[str, list[dict[str, Any]]]
"""Results of each repetition, by "system measure", as in "berth w1", and "berth drain"."""

BEGIN: Final = "<!-- measured: begin -->"
END: Final = "<!-- measured: end -->"


@dataclass(frozen=True, slots=True)
class Target:
    """``value`` of ``run`` must be ``at_least`` or ``at_most`` so much, or so many times ``other``'s."""

    what: str
    run: str
    value: str
    sense: Literal["at least", "at most"]
    bound: float
    unit: str
    other: tuple[str, str] | None = None


_FAUST: Final = ("berth drain", "faust_per_second")
_W1: Final = ("berth w1", "berth w1")
TARGETS: Final = (
    Target("W1, of the Kafka floor", "berth w1", "admitted_per_second", "at least", 0.3, "/s", ("floor w1",) * 2),
    Target("W1", "berth w1", "admitted_per_second", "at least", 2_500, "/s"),
    Target("W2 freed→next p50, of the floor", "berth w2", "p50_ms", "at most", 1.5, "ms", ("floor w2",) * 2),
    Target("W2 freed→next p99, of the floor", "berth w2", "p99_ms", "at most", 1.5, "ms", ("floor w2",) * 2),
    Target("W3 freed→next p50, of W3E", "berth w3", "p50_ms", "at most", 1.2, "ms", ("berth w3e",) * 2),
    Target("drain of triggers, of plain Faust", "berth drain", "triggers_per_second", "at least", 2, "/s", _FAUST),
    Target("drain of triggers", "berth drain", "triggers_per_second", "at least", 6_000, "/s"),
    Target("drain of finished", "berth drain", "finished_per_second", "at least", 6_000, "/s"),
    Target("freed→next with a worker of the pool, p99", "berth sites", "worker_p99_ms", "at most", 150, "ms"),
    Target("freed→next with a folder, p99", "berth sites", "folder_p99_ms", "at most", 150, "ms"),
    Target("restore, rows of 500 bytes or more", "berth restore", "restored_rows_per_second", "at least", 30_000, "/s"),
    Target("take-over after kill -9, session timeout 6 s", "berth takeover", "last_seconds", "at most", 7.0, "s"),
    Target("memory of a waiting trigger, no texts", "berth restore", "memory_bytes_per_waiting", "at most", 2_048, "B"),
    Target("W1 with a projector, of W1", "projected w1", "admitted_per_second", "at least", 0.8, "/s", _W1),
    Target("projector catching up", "berth projection", "caught_up_decisions_per_second", "at least", 5_000, "/s"),
    Target("projection lag p99 at 1,000 decisions/s", "berth projection", "lag_p99_ms", "at most", 500, "ms"),
    Target("first dispatch after `make run`", "berth start", "first_dispatch_seconds", "at most", 15, "s"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verdict:
    """One target with what was measured. ``median`` and ``worst`` are ratios when the target is one."""

    target: Target
    median: float
    worst: float
    absolute: float
    other: float | None

    @property
    def is_met(self) -> bool:
        if self.target.sense == "at least":
            return self.median >= self.target.bound
        return self.median <= self.target.bound


def verdicts(runs: Runs) -> list[Verdict]:
    """Those targets whose measures were run."""
    return [found for target in TARGETS if (found := _verdict(target, runs)) is not None]


def _verdict(target: Target, runs: Runs) -> Verdict | None:
    values = _values(runs, target.run, target.value)
    if not values:
        return None
    worst = min(values) if target.sense == "at least" else max(values)
    median = statistics.median(values)
    if target.other is None:
        return Verdict(target, median, worst, median, None)
    run, value = target.other
    others = _values(runs, run, target.value if value == run else value)
    if not others:
        return None
    other = statistics.median(others)
    return Verdict(target, median / other, worst / other, median, other)


def _values(runs: Runs, run: str, value: str) -> list[float]:
    return [float(found[value]) for found in runs.get(run, ()) if found.get(value) is not None]


def number(value: float | None) -> str:
    """Three digits that mean something, thousands with a comma."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def rows_of_targets(runs: Runs) -> list[tuple[str, ...]]:
    """what, target, median, worst, measured, compared with, met."""
    rows: list[tuple[str, ...]] = []
    for found in verdicts(runs):
        target = found.target
        factor = "×" if target.other else target.unit
        bound = f"{'≥' if target.sense == 'at least' else '≤'} {number(target.bound)} {factor}"
        measured = f"{number(found.absolute)} {target.unit}"
        compared = f"{number(found.other)} {target.unit}" if found.other is not None else ""
        met = "yes" if found.is_met else "**no**"
        rows.append(
            (
                target.what,
                bound,
                f"{number(found.median)} {factor}",
                f"{number(found.worst)} {factor}",
                measured,
                compared,
                met,
            )
        )
    return rows


HEADER_OF_TARGETS: Final = ("what", "target", "median", "worst run", "Berth", "compared with", "met")

_VALUES: Final = {
    "enqueued_per_second": "enqueued/s",
    "admitted_per_second": "admitted/s",
    "transactions": "transactions",
    "p50_ms": "p50 ms",
    "p95_ms": "p95 ms",
    "p99_ms": "p99 ms",
    "max_ms": "max ms",
    "running_max": "most at once",
}


def rows_of_workloads(runs: Runs) -> list[tuple[str, ...]]:
    """One row for each system and workload: median (lowest to highest)."""
    rows: list[tuple[str, ...]] = []
    for run, found in runs.items():
        if "running_max" in found[0]:
            cells = (_spread(_values(runs, run, value)) for value in _VALUES)
            limit = str(found[0]["limit"])
            *others, most = cells
            wrong = sum(entry["twice"] + entry["foreign"] for entry in found)
            missing = sum(0 if entry["capped"] else entry["missing"] for entry in found)
            rows.append((run, *others, f"{most} / {limit}", str(wrong), str(missing), _other_cpu(found)))
    return rows


HEADER_OF_WORKLOADS: Final = ("run", *_VALUES.values(), "twice", "missing", "other CPU")


def rows_of_others(runs: Runs) -> list[tuple[str, ...]]:
    """Every other number, one a row."""
    rows: list[tuple[str, ...]] = []
    for run, found in runs.items():
        if "running_max" not in found[0]:
            names = [name for name in found[0] if name not in ("other_cpu", "seconds")]
            rows += [
                (
                    run.removeprefix("berth "),
                    name.replace("_", " "),
                    _spread(_values(runs, run, name)),
                    _other_cpu(found),
                )
                for name in names
            ]
    return rows


HEADER_OF_OTHERS: Final = ("measure", "number", "median (lowest to highest)", "other CPU")


def _spread(values: list[float]) -> str:
    if not values:
        return ""
    median = statistics.median(values)
    if min(values) == max(values):
        return number(median)
    return f"{number(median)} ({number(min(values))} to {number(max(values))})"


def _other_cpu(found: list[dict[str, Any]]) -> str:
    return " / ".join(f"{entry['other_cpu']:.2f}" for entry in found)


def machine() -> dict[str, str]:
    """What it was measured on."""
    libraries = ("aiokafka", "faust-streaming", "pydantic")
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "processor": f"{psutil.cpu_count()} × {_processor()}",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "Kafka": f"{KAFKA_VERSION}, one broker, 512 MB heap, started by the benchmark",
        "libraries": ", ".join(f"{name} {version(name)}" for name in libraries),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def markdown(runs: Runs, about: dict[str, str]) -> str:
    """The measured part of docs/performance.md."""
    parts = [
        "\n".join(f"- {name}: {value}" for name, value in about.items()),
        "### Targets",
        _table(HEADER_OF_TARGETS, rows_of_targets(runs)),
        "### Workloads",
        _table(HEADER_OF_WORKLOADS, rows_of_workloads(runs)),
        "### Other measures",
        _table(HEADER_OF_OTHERS, rows_of_others(runs)),
    ]
    return "\n\n".join(parts)


def write_into(path: Path, text: str) -> None:
    """Replace what is between the marks in the file."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{path} has no marks {BEGIN} and {END}")
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
