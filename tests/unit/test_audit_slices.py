"""One agent's decisions as a file that reproduces itself, and what else can be in such a file."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from api.cli.command_failed import CommandFailed
from api.cli.main import app
from streams.audit.slices import NoSlice, replay, written
from tests.audits import log_of, of_agent
from tests.driving import Driven
from tests.golden.scenarios import SCENARIOS

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "tests" / "golden").glob("*.slice.jsonl"))


def slice_of(driven: Driven, agent_id: str = "A") -> list[bytes]:
    return list(written(agent_id, of_agent(driven, agent_id)))


def lively() -> Driven:
    driven = Driven(default_limit=2)
    for number in range(6):
        driven.trigger(f"t{number}", message="hidden words", payload={"secret": "hidden words"}, worker=number % 2 == 0)
    driven.fail("t0", error="hidden words")
    driven.finish("t1", result="hidden words")
    driven.configure(parallelism_limit=3, owner="ann")
    driven.advance(60)
    return driven


@pytest.mark.parametrize("scenario", SCENARIOS, ids=[scenario.__name__ for scenario in SCENARIOS])
def test_every_agent_of_every_recorded_life_reproduces_itself(scenario: Callable[[], Driven]) -> None:
    driven = scenario()
    agents = {logged.decider.id for logged in log_of(driven) if logged.decider.kind == "agent"}
    for agent_id in agents:
        replayed = replay(slice_of(driven, agent_id))
        assert replayed.difference is None
        assert replayed.recomputed == replayed.decisions == len(of_agent(driven, agent_id))


def test_there_are_no_texts_of_people_in_it() -> None:
    lines = b"".join(slice_of(lively()))
    assert b"hidden words" not in lines
    assert b'"sha256"' in lines


@pytest.mark.parametrize("line", [2, 5, 9])
def test_a_decision_that_comes_out_otherwise_is_shown_at_its_line(line: int) -> None:
    lines = slice_of(lively())
    changed = lines[line - 1].replace(b'"agent_id":"A","seq"', b'"agent_id":"A","seq" ')
    assert changed != lines[line - 1]
    replayed = replay([*lines[: line - 1], changed, *lines[line:]])
    assert replayed.difference is not None
    assert (replayed.difference.line, replayed.difference.seq) == (line, line - 1)


def test_a_changed_event_is_found() -> None:
    lines = slice_of(lively())
    place = next(number for number, line in enumerate(lines) if b'"slot_number":2' in line)
    lines[place] = lines[place].replace(b'"slot_number":2', b'"slot_number":3')
    replayed = replay(lines)
    assert replayed.difference is not None
    assert replayed.difference.line == place + 1


def test_unknown_policies_are_named_and_not_guessed() -> None:
    lines = slice_of(lively())
    for place in (3, 4):
        lines[place] = lines[place].replace(b'"policy":"1"', b'"policy":"0.9"')
    replayed = replay(lines)
    assert replayed.unknown == (("0.9", 3, 4),)
    # The chain goes on from the bytes of decision 3 and 4 as they are: the next one's prev shows that they were edited.
    assert replayed.difference is not None
    assert replayed.difference.seq == 5


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda lines: lines[:-1], "it was cut"),
        (lambda lines: [*lines[:-2], lines[-1]], "cut or changed"),
        (lambda lines: lines[1:], "doesn't begin"),
        (lambda lines: [], "it is empty"),
        (lambda lines: [b"garbage\n", *lines[1:]], "line 1 is no JSON"),
        (lambda lines: [b"[]\n", *lines[1:]], "line 1 is no JSON object"),
        (
            lambda lines: [*lines[:-1], lines[-1].replace(b'"last_seq":', b'"last_seq":1')],
            "tells of .* decisions up to 1",
        ),
        (
            lambda lines: [*lines[:3], lines[3].replace(b'"partition":0,', b'"partition":1,'), *lines[4:]],
            "line 4 .*after",
        ),
        (
            lambda lines: [*lines[:3], re.sub(rb'"offset":[0-9]+', b'"offset":1', lines[3]), *lines[4:]],
            "line 4 .*after",
        ),
        (
            lambda lines: [*lines[:3], re.sub(rb'"offset":[0-9]+', b'"offset":99', lines[3]), *lines[4:]],
            "line 5 .*after",
        ),
        (lambda lines: [*lines[:3], lines[3].replace(b'"offset":', b'"offset":-'), *lines[4:]], "line 4 doesn't begin"),
        (lambda lines: [lines[0].replace(b'"v":1', b'"v":2'), *lines[1:]], "of form 2"),
        (lambda lines: [lines[0].replace(b'"A"', b'"B"'), *lines[1:]], "of agent 'A'"),
        (lambda lines: [*lines, lines[-1]], "goes on after its end"),
        (lambda lines: [lines[0], lines[1].replace(b'"seq":', b'"sex":'), *lines[2:]], "no decision of a known form"),
    ],
)
def test_a_file_that_is_none_is_refused_with_the_reason(
    damage: Callable[[list[bytes]], list[bytes]], said: str
) -> None:
    with pytest.raises(NoSlice, match=said):
        replay(damage(slice_of(lively())))


@pytest.mark.parametrize("seq", [1, 2, 5])
def test_a_decision_that_was_taken_out_is_missing(seq: int, tmp_path: Path) -> None:
    lines = slice_of(lively())
    left = [*lines[:seq], *lines[seq + 1 :]]
    replayed = replay(left)
    assert replayed.difference is not None
    assert (replayed.difference.line, replayed.difference.seq) == (seq + 1, seq)
    assert replayed.difference.why == f"it is missing: decision {seq + 1} stands in its place"
    file = tmp_path / "slice.jsonl"
    file.write_bytes(b"".join(left))
    done = CliRunner().invoke(app, ["audit", "replay", str(file)])
    assert (done.exit_code, f"decision {seq} of A: it is missing" in done.stdout) == (1, True)
    assert json.loads(CliRunner().invoke(app, ["audit", "replay", str(file), "--json"]).stdout)["difference"] == {
        "line": seq + 1, "seq": seq, "why": replayed.difference.why, "recorded": None, "again": None,
    }  # fmt: skip


def test_what_differs_says_which_is_the_file_and_which_the_rules(tmp_path: Path) -> None:
    file = tmp_path / "slice.jsonl"
    file.write_bytes(b"".join(slice_of(lively())).replace(b'"slot_number":2', b'"slot_number":3', 1))
    done = CliRunner().invoke(app, ["audit", "replay", str(file)])
    assert done.exit_code == 1
    told, recorded, again = done.stdout.splitlines()
    assert "it is decided otherwise" in told
    assert (recorded.split(":")[0].strip(), '"slot_number":3' in recorded) == ("in the file", True)
    assert (again.split(":")[0].strip(), '"slot_number":2' in again) == ("by the rules", True)


@pytest.mark.parametrize(
    ("form", "advice"), [(b"2", "upgrade"), (b"0", "export it again"), (b'"x"', "export it again")]
)
def test_a_file_of_a_newer_form_needs_a_newer_berth(form: bytes, advice: str, tmp_path: Path) -> None:
    file = tmp_path / "slice.jsonl"
    lines = slice_of(lively())
    file.write_bytes(b"".join([lines[0].replace(b'"v":1', b'"v":' + form), *lines[1:]]))
    done = CliRunner().invoke(app, ["audit", "replay", str(file)], env={"COLUMNS": "200"})
    assert done.exit_code == 1
    assert isinstance(done.exception, CommandFailed)
    assert advice in done.exception.advice


@pytest.mark.parametrize("file", FILES, ids=[file.name for file in FILES])
def test_a_recorded_file_reproduces_itself_for_ever(file: Path) -> None:
    """A file that doesn't is a change of the policy's version, or a bug."""
    with file.open("rb") as lines:
        replayed = replay(lines)
    assert replayed.difference is None
    assert replayed.recomputed == replayed.decisions > 10


def test_recorded_files_are_there() -> None:
    assert len(FILES) >= 3


IN_ANOTHER_YEAR = """
import sys, time
shift, *files = sys.argv[1:]
now, now_ns = time.time, time.time_ns
time.time, time.time_ns = lambda: now() + int(shift), lambda: now_ns() + int(shift) * 10**9
from pathlib import Path
from api.cli.audit import replay_command
for file in files:
    replay_command(Path(file), as_json=True)
"""


@pytest.mark.parametrize(
    ("hash_seed", "zone", "years"), [("0", "UTC", 0), ("1", "Asia/Kathmandu", 13), ("99", "America/St_Johns", -20)]
)
def test_files_reproduce_themselves_under_any_hash_seed_time_zone_and_year(
    hash_seed: str, zone: str, years: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_YEAR, str(years * 31_557_600), *map(str, FILES)],
        cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": hash_seed, "TZ": zone},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    here = [CliRunner().invoke(app, ["audit", "replay", str(file), "--json"]).stdout for file in FILES]
    assert (done.stdout, done.stderr, done.returncode) == ("".join(here), "", 0)
    assert "reproduced" in CliRunner().invoke(app, ["audit", "replay", str(FILES[0])]).stdout
