"""The planted faults: each can be planted in the rules as they are, and names the test that kills it."""

import re
from pathlib import Path

import pytest

from tests.mutants import KILLED_BY, MUTANTS, ROOT, killers, try_one
from tests.mutants_of_sites import Mutant

SAMPLE = ("limit off by one", "(c) a retried trigger goes to the end of its line", "the pool has one more")


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.fault for mutant in MUTANTS])
def test_it_can_be_planted_in_the_rules_as_they_are(mutant: Mutant) -> None:
    """A fault of lines that are gone tests nothing; the sources change, and the list with them."""
    for edit in mutant.edits:
        assert (ROOT / edit.file).read_text().count(edit.old) == 1, edit
        assert edit.old != edit.new


def test_each_names_the_test_that_kills_it() -> None:
    """``python -m tests.mutants --name-killers`` writes the names down."""
    named = killers()
    assert list(named) == [mutant.fault for mutant in MUTANTS], f"{KILLED_BY.name} is not of these mutants"
    for fault, test in named.items():
        file, _, function = test.partition("::")
        assert re.search(rf"def {function}\b", (ROOT / file).read_text()), (fault, test)


@pytest.mark.parametrize("fault", SAMPLE)
def test_some_are_killed_by_the_test_that_they_name(fault: str, tmp_path: Path) -> None:
    """All of them take minutes: ``make mutants``."""
    number = next(number for number, mutant in enumerate(MUTANTS) if mutant.fault == fault)
    named = killers()[fault]
    assert try_one(tmp_path, number, named).killer == named
