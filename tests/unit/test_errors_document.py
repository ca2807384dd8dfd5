"""docs/errors.md has every code that anybody may be told, with its status, and none that isn't given."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from api.http import problems
from api.http.problems import REFUSAL_STATUS
from streams.rules.verdicts import REFUSAL_CODES, Ignored

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "errors.md").read_text()
SECTIONS = {
    title: text for title, _, text in (part.partition("\n") for part in re.split(r"^## ", DOCUMENT, flags=re.MULTILINE))
}
PLACE_OF_CODE = {"Problem": 1, "invalid": 0, "unavailable": 0, "Unauthenticated": 0}
"""Which argument of the calls that make a problem is its code."""
HANDED_ON = {"code", "error.code", "problem.code", "refusal.code", "self.code"}
"""Codes that were chosen somewhere else, where they are found; or those of the rules."""


def rows(section: str) -> dict[str, list[str]]:
    """The cells beside each code of a section's table; several codes may share a row."""
    found: dict[str, list[str]] = {}
    for line in SECTIONS[section].splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        for place, cell in enumerate(cells):
            if re.fullmatch(r"`\w+`(, `\w+`)*", cell):
                found |= {code: [*cells[:place], *cells[place + 1 :]] for code in re.findall(r"`(\w+)`", cell)}
                break
    return found


def codes_in(path: Path) -> Iterator[tuple[str, int | None]]:
    """Codes of problems that a file gives, with the status where it is said beside it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            defaults = dict(zip(reversed(node.args.args), reversed(node.args.defaults), strict=False))
            yield from (
                (code, None) for arg in defaults if arg.arg == "code" for code in constants(defaults[arg], path)
            )
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in PLACE_OF_CODE and len(node.args) > PLACE_OF_CODE[name]:
                status = node.args[0].value if name == "Problem" and isinstance(node.args[0], ast.Constant) else None
                assert status is None or isinstance(status, int)
                yield from ((code, status) for code in constants(node.args[PLACE_OF_CODE[name]], path))
            yield from (
                (code, None) for word in node.keywords if word.arg == "code" for code in constants(word.value, path)
            )


def constants(node: ast.expr, path: Path) -> list[str]:
    """Every value that an expression may have. Fails for one that is neither written here nor handed on."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.IfExp):
        return [*constants(node.body, path), *constants(node.orelse, path)]
    assert ast.unparse(node) in HANDED_ON, f"{path}: which codes can {ast.unparse(node)} be?"
    return []


def given() -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for path in sorted((ROOT / "api" / "http").rglob("*.py")):
        for code, status in codes_in(path):
            found.setdefault(code, set()).update(() if status is None else (status,))
    return found


# The codes of a framework's errors are looked up: those that the service knows itself.
LOOKED_UP = {"not_found", "method_not_allowed", "http_error"} | {code for code, _ in problems._TYPES.values()}
REASON = re.compile(r"""f?['"]((?:[a-z0-9]+_)+[a-z0-9]+|oversized)(?::|['"]$)""")
DEAD_LETTER_MAKERS = {"read", "_parse", "_reason", "_rekeyed", "_outgrows", "_read_odd_texts", "_read_oversized"}


def test_every_refusal_is_there_in_order_of_precedence_with_its_status() -> None:
    described = rows("Refusals")
    assert tuple(described) == REFUSAL_CODES
    for code, (status, *_) in described.items():
        assert int(status) == REFUSAL_STATUS.get(code, 409), code


def test_every_code_with_which_a_decider_refuses_is_a_known_one() -> None:
    rules = sorted((ROOT / "streams" / "rules").rglob("*.py"))
    given = {code for path in rules for code in re.findall(r'refuse\(\s*[\w.]+,\s*"(\w+)"', path.read_text())}
    assert "agent_archived" in given, "they are found"
    assert given <= set(REFUSAL_CODES)


def test_every_problem_of_the_api_is_there_and_no_other() -> None:
    codes = given()
    assert codes.keys() >= {"token_refused", "projection_behind", "internal_error", "too_many_clients"}, (
        "they are found"
    )
    source = (ROOT / "api" / "http" / "problems.py").read_text()
    assert all(f'"{code}"' in source for code in LOOKED_UP)
    assert rows("Problems").keys() == (codes.keys() | LOOKED_UP) - set(REFUSAL_CODES)


def test_every_problem_has_the_status_with_which_it_is_given() -> None:
    described = rows("Problems")
    for code, statuses in given().items():
        if code in described and statuses:
            assert {int(described[code][0])} == statuses, code


def test_every_reason_for_ignoring_is_there() -> None:
    assert set(rows("Ignored")) == set(get_args(Ignored.model_fields["reason"].annotation))


def test_every_reason_of_a_dead_letter_is_there() -> None:
    assert set(rows("Dead letters")) == {*dead_letter_reasons(), "skipped"}


def dead_letter_reasons() -> set[str]:
    """The first words of what the codec says of a record that it can't read."""
    found: set[str] = set()
    for function in ast.walk(ast.parse((ROOT / "streams" / "codec.py").read_text())):
        if not isinstance(function, ast.FunctionDef) or function.name not in DEAD_LETTER_MAKERS:
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Return | ast.Call | ast.Assign):
                texts = [ast.unparse(part) for part in ast.walk(node) if isinstance(part, ast.Constant | ast.JoinedStr)]
                found |= {match[1] for text in texts if (match := REASON.match(text))}
    return found


@pytest.mark.parametrize("section", ["Refusals", "Problems", "Ignored", "Dead letters"])
def test_every_row_says_what_it_means_and_what_to_do(section: str) -> None:
    for code, cells in rows(section).items():
        assert all(cells), code
        assert len(cells) >= 2, code
