"""The command line as it is written: what exists is accepted, what doesn't is explained."""

import pytest

from tests.commands import explain


@pytest.mark.parametrize(
    "line",
    ["up", "topics", "topics create", "topics check", "topics list", "topics acl --runner me", "doctor", "--help"],
)
def test_what_exists_is_accepted(line: str) -> None:
    assert explain(line.split()) is None


@pytest.mark.parametrize("line", ["down", "topics destroy", "topics create --force", "up --port nine", "doctor now"])
def test_what_does_not_exist_is_explained(line: str) -> None:
    reason = explain(line.split())
    assert reason is not None
    assert line in reason
