"""docs/projections.md names every table, exit code and command, and none that isn't there."""

import re
import shlex
from pathlib import Path

from projections import projector
from projections.schema import migrations
from tests.commands import explain

DOCUMENT = (Path(__file__).parents[2] / "docs" / "projections.md").read_text()
SQL = "\n".join(migration.statements for migration in migrations())


def test_every_table_and_view_is_described() -> None:
    tables = set(re.findall(r"^CREATE TABLE (\w+)", SQL, re.MULTILINE))
    assert set(re.findall(r"^\| `(\w+)` \|", DOCUMENT, re.MULTILINE)) == tables
    described = set(re.findall(r"`(\w+)`", DOCUMENT))
    views = set(re.findall(r"^CREATE VIEW (\w+)", SQL, re.MULTILINE))
    assert views - described <= {"slots_of_agents"}


def test_every_exit_code_of_its_own_is_explained() -> None:
    codes = {str(projector.EXIT_CANNOT_APPLY), str(projector.EXIT_SETUP)}
    assert set(re.findall(r"^\| (\d+) \|", DOCUMENT, re.MULTILINE)) == codes


def test_every_command_exists() -> None:
    commands = re.findall(r"^\$ (?:\.venv/bin/)?berth (.+)$", DOCUMENT, re.MULTILINE)
    commands += re.findall(r"`berth ([a-z ]+)`", DOCUMENT)
    assert len(commands) > 4
    assert [told for command in commands if (told := explain(shlex.split(command))) is not None] == []
