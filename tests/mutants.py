"""Planted faults: small mutants of the rules, each of which the pure tests must kill.

``make mutants`` copies the tree, plants one fault at a time, and runs the test that is named to kill it
(``mutants_killed_by.tsv``); if that doesn't, all pure tests, model and simulation until the first failure.
It lists the survivors, and fails if there are any: each is a missing test. ``python -m tests.mutants 3 17`` runs only
those; ``--name-killers`` writes down who killed what. The recorded logs are left out: they tell every change of a byte,
and would kill what no test understands.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Final, NamedTuple

from tests.mutants_of_agents import OF_AGENTS
from tests.mutants_of_sites import OF_SITES, Mutant

ROOT: Final = Path(__file__).parents[1]
KILLED_BY: Final = Path(__file__).with_name("mutants_killed_by.tsv")
"""A fault and the test that kills it, a line each."""
AT_ONCE: Final = 2
SECONDS_MAX: Final = 600
MUTANTS: Final = (*OF_AGENTS, *OF_SITES)
PYTEST: Final = (sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider")
SIMULATED_SEEDS: Final = "150"


class Verdict(NamedTuple):
    """``killer``: the test that failed first; None: the mutant lives."""

    number: int
    killer: str | None
    seconds: float


def killers() -> dict[str, str]:
    """The test function that is named for each fault."""
    lines = KILLED_BY.read_text().splitlines()
    return {fault: test for fault, _, test in (line.partition("\t") for line in lines)}


LIKELY: Final = {
    "streams/rules/site": ("rules_folders", "rules_sites", "rules_site_gates"),
    "streams/rules/folders.py": ("rules_folders",),
    "streams/rules/agent": ("rules_limits", "rules_order", "rules_attempts", "rules_asks", "rules_sites"),
    "streams/rules": ("rules_order", "rules_attempts", "rules_repeats", "rules_leases"),
    "streams": ("codec_routes", "codec_bad_records", "partition_steps", "rules_leases"),
}
"""Unit tests that are tried first, by the beginning of the changed file's path."""


def likely_tests(mutant: Mutant) -> list[str]:
    names = next(names for start, names in LIKELY.items() if mutant.file.startswith(start))
    return [f"tests/unit/test_{name}.py" for name in names]


def rest_of_tests() -> list[str]:
    """Every pure test of the rules."""
    unit = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/unit").glob("test_rules_*.py"))
    others = [f"tests/unit/test_{name}.py" for name in ("codec_routes", "codec_bad_records", "codec_rows")]
    pure = [*unit, *others, "tests/cases", "tests/unit/test_partition_steps.py", "tests/unit/test_site_walks.py"]
    return [*pure, "tests/model", "tests/simulation"]


def try_one(directory: Path, number: int, named: str | None) -> Verdict:
    """Plant the mutant in a copy of the tree below ``directory``, and run tests until one fails."""
    tree = directory / str(number)
    plant(tree, MUTANTS[number])
    begun = time.monotonic()
    killer = None
    for tests in ([named] if named else likely_tests(MUTANTS[number]), rest_of_tests()):
        killer = killer or _run(tree, tests)
    shutil.rmtree(tree)
    return Verdict(number, killer, time.monotonic() - begun)


def _run(tree: Path, tests: list[str]) -> str | None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",
        "BERTH_SIMULATION_SEEDS": SIMULATED_SEEDS,
    }
    command = (*PYTEST, *tests)
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=SECONDS_MAX, check=False
        )
    except subprocess.TimeoutExpired:
        return "it never ended"
    if done.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) ([^\s\[]+)", done.stdout, re.MULTILINE)
    if done.returncode == 1 and found:
        return found.group(1)
    raise SystemExit(f"pytest failed to run:\n{done.stdout[-1000:]}{done.stderr[-1000:]}")


def plant(tree: Path, mutant: Mutant) -> None:
    """Copy what the tests need, with the fault in it. SystemExit if the line to change isn't there exactly once."""
    tree.mkdir()
    for name in ("streams", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.jsonl"))
    for name in ("api", "projections", "docs", "pyproject.toml"):
        (tree / name).symlink_to(ROOT / name)
    for edit in mutant.edits:
        file = tree / edit.file
        text = file.read_text()
        if text.count(edit.old) != 1:
            raise SystemExit(f"{mutant.fault}: {edit.file} has the line to change {text.count(edit.old)} times")
        file.write_text(text.replace(edit.old, edit.new))


def main(chosen: list[int], names_killers: bool) -> int:
    numbers = chosen or list(range(len(MUTANTS)))
    named = killers()
    survivors = []
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(AT_ONCE) as pool:
        tries = [pool.submit(try_one, Path(directory), number, named.get(MUTANTS[number].fault)) for number in numbers]
        for done, finished in enumerate(as_completed(tries), 1):
            verdict = finished.result()
            fault = MUTANTS[verdict.number].fault
            word = "killed" if verdict.killer else "SURVIVED"
            _say(f"{done:3}/{len(numbers)} {word:8} {verdict.seconds:5.1f} s  {fault}: {verdict.killer or ''}")
            if verdict.killer is None:
                survivors.append(fault)
            else:
                named[fault] = verdict.killer
    if names_killers:
        lines = [f"{mutant.fault}\t{named[mutant.fault]}\n" for mutant in MUTANTS if mutant.fault in named]
        KILLED_BY.write_text("".join(lines))
    _say(f"{len(numbers) - len(survivors)} killed, {len(survivors)} survived" + "".join(f"\n  {s}" for s in survivors))
    return 1 if survivors else 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int, help="of mutants, from 0; all if there are none")
    parser.add_argument("--name-killers", action="store_true", help="write mutants_killed_by.tsv anew")
    arguments = parser.parse_args()
    sys.exit(main(arguments.numbers, arguments.name_killers))
