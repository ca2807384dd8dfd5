"""What the documents say can be done: each command, option, variable, link and example is looked up in the code."""

import ast
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
import yaml

from api.cli.main import app
from streams.settings import NOT_SETTINGS, Settings, variable_of
from tests.commands import explain

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELLS = ("console", "sh", "bash", "shell")
VARIABLES = {variable_of(field) for field in Settings.model_fields} | NOT_SETTINGS


@dataclass(frozen=True)
class Block:
    language: str
    text: str


def blocks(document: Path) -> list[Block]:
    return [Block(language, text) for language, text in FENCE.findall(document.read_text())]


def command_lines(document: Path) -> Iterator[str]:
    """Every line that a reader could type: in shell blocks after ``$ `` or as it stands, and in backticks."""
    for block in blocks(document):
        if block.language in SHELLS:
            lines = block.text.replace("\\\n", " ").splitlines()
            shown = [line[2:] for line in lines if line.startswith("$ ")]
            yield from shown or (line for line in lines if line and not line.startswith("#"))
    without_blocks = FENCE.sub("", document.read_text())
    for span in re.findall(r"`([^`\n]+)`", without_blocks):
        if re.match(r"(\S+=\S+ )*(\.venv/bin/)?(berth|make) ", span) and "…" not in span:
            yield span


def words_after_variables(line: str) -> list[str]:
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    return words


def alternatives(words: list[str]) -> list[list[str]]:
    """``topics create|check`` as two command lines."""
    for place, word in enumerate(words):
        if re.fullmatch(r"[a-z-]+(\|[a-z-]+)+", word):
            return [[*words[:place], one, *words[place + 1 :]] for one in word.split("|")]
    return [words]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_line_exists_with_its_options(document: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wrong = []
    for line in command_lines(document):
        for words in alternatives(words_after_variables(line)):
            if not words:
                continue
            program = words[0].rpartition("/")[2]
            if program == "berth" and (reason := explain(words[1:])):
                wrong.append(reason)
            if program == "make":
                wrong += [
                    f"no target {word} in {line!r}" for word in words[1:] if "=" not in word and word not in targets
                ]
    assert wrong == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_variable_is_a_setting(document: Path) -> None:
    named = set(re.findall(r"\b(?:BERTH_[A-Z_]*[A-Z]|WORKER_POOL_CAPACITY)\b(?!…)", document.read_text()))
    assert named - VARIABLES == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_example_parses(document: Path) -> None:
    for block in blocks(document):
        if block.language == "python":
            ast.parse(block.text)
        elif block.language == "json":
            json.loads(block.text)
        elif block.language in ("yaml", "yml"):
            yaml.safe_load(block.text)
        elif block.language in SHELLS:
            for line in command_lines(document):
                shlex.split(line, comments=True)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_inside_the_repository_leads_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text())
    inside = [target for target in targets if "://" not in target and not target.startswith("mailto:")]
    assert [target for target in inside if not (document.parent / target).exists()] == []


def slugs(document: Path) -> set[str]:
    """What a link into the document may name: its headings, as readers of Markdown make anchors of them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_into_a_document_leads_to_a_heading(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", document.read_text())
    wrong = [
        f"{target}#{anchor}"
        for target, anchor in links
        if anchor not in slugs(document.parent / target if target else document)
    ]
    assert wrong == []


def test_the_readme_leads_to_every_document() -> None:
    linked = set(re.findall(r"\]\((docs/[a-z-]+\.md)", (ROOT / "README.md").read_text()))
    assert linked == {f"docs/{document.name}" for document in (ROOT / "docs").glob("*.md")}


def test_the_readme_says_of_every_command_what_it_does() -> None:
    readme = (ROOT / "README.md").read_text()
    table = readme[readme.index("## What runs where") : readme.index("## Settings")]
    told = {
        word
        for row in re.findall(r"^\| (`berth [^|]+) \|", table, re.MULTILINE)
        for word in re.findall(r"[a-z-]+", row)
    }
    assert told - {"berth"} == set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_the_readme_lists_every_setting_with_its_default() -> None:
    readme = (ROOT / "README.md").read_text()
    rows = dict(re.findall(r"^\| `([A-Z_]+)` \| ([^|]+) \|", readme, re.MULTILINE))
    assert rows.keys() == {variable_of(name) for name in Settings.model_fields}
    for name, field in Settings.model_fields.items():
        shown, default = rows[variable_of(name)], field.default
        if default is None:
            continue
        text = f"{default:g}" if isinstance(default, float) else str(default)
        assert shown.strip("`").split(",")[0] == text, variable_of(name)


def test_the_readme_gives_a_reason_for_every_dependency() -> None:
    readme = (ROOT / "README.md").read_text()
    section = readme[readme.index("## Why each dependency") : readme.index("Exact versions")]
    explained = {name for row in re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE) for name in row.split(", ")}
    project = (ROOT / "pyproject.toml").read_text()
    block = project[project.index("dependencies = [") : project.index("[project.optional-dependencies]")]
    needed = set(re.findall(r'^    "([A-Za-z0-9_-]+)', block, re.MULTILINE))
    assert explained - {"package", "---"} == needed


def test_every_command_says_what_it_is_for() -> None:
    without = [
        command.name
        for command in app.registered_commands
        if not (command.help or (command.callback.__doc__ if command.callback else None))
    ]
    assert without == []


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"^  make ([a-z]+)", shown, re.MULTILINE)) == targets
