"""What was decided once is decided again, byte for byte, whatever the process: hash seed, time zone, restart."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from streams.rules import events
from tests.golden.files import commands_file, commands_of, written_by, written_file
from tests.golden.forms import FORMS_FILE, MODELS, ROWS, all_forms, read, write
from tests.golden.replay import difference
from tests.golden.scenarios import SCENARIOS

NAMES = [scenario.__name__ for scenario in SCENARIOS]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_log_is_decided_again_byte_for_byte(name: str) -> None:
    """The log is kept for ever: a change of these files is a change of the policy's version, or a bug."""
    assert difference(name) is None


@pytest.mark.parametrize(
    ("hash_seed", "zone"), [("0", "UTC"), ("1", "Africa/Dar_es_Salaam"), ("4242", "America/New_York")]
)
def test_recorded_logs_are_the_same_in_processes_of_other_hash_seeds_and_time_zones(hash_seed: str, zone: str) -> None:
    """Must hold: the same decisions under three PYTHONHASHSEEDs; case 71: whatever the zone of the machine."""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "TZ": zone}
    done = subprocess.run(
        [sys.executable, "-m", "tests.golden.replay"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=NAMES)
def test_the_files_are_those_of_the_scenarios(scenario: object) -> None:
    """A scenario that is changed is recorded anew, on purpose."""
    driven = next(made() for made in SCENARIOS if made is scenario)
    name = scenario.__name__  # type: ignore[attr-defined]
    assert commands_file(name).read_bytes() == commands_of(driven)
    assert written_file(name).read_bytes() == written_by(driven)


def test_each_command_event_and_row_is_in_a_recorded_log() -> None:
    """So that no form changes unseen."""
    lines = [json.loads(line) for name in NAMES for line in written_file(name).read_bytes().splitlines()]
    topics = ("berth.decisions", "berth.site-decisions")
    decisions = [line["value"] for line in lines if line.get("topic") in topics]
    never_here = {"parked", "unparked", "payload_lost"}
    every = [form for form in MODELS if form.startswith(("event.", "site-event."))]
    written = {event["type"] for decision in decisions for event in decision.get("events", ())}
    names = {MODELS[form].model_fields["type"].default for form in every}
    assert len(every) == len(names)
    assert names - written == never_here
    commands = {decision["command"]["type"] for decision in decisions}
    forms = [form for form in MODELS if form.startswith(("command.", "site-command."))]
    assert {MODELS[form].model_fields["type"].default for form in forms} - commands == {"park", "lose_payload"}
    assert {line["row"][0] for line in lines if "row" in line} == {
        "agent", "trigger", "text", "conversation", "remembered", "partition", "watch", "site", "gate", "deletion",
        "claim", "site_control"}  # fmt: skip
    assert {line.get("topic") for line in lines} >= {
        "berth.decisions", "berth.dispatches", "berth.texts", "berth.dead-letters", "berth.triggers",
        "berth.site-decisions", "berth.claims", "berth.signals"}  # fmt: skip


FORMS = [json.loads(line)["form"] for line in FORMS_FILE.read_bytes().splitlines()]


@pytest.mark.parametrize("number", range(len(FORMS)), ids=FORMS)
def test_every_form_reads_and_writes_back_to_the_same_bytes(number: int) -> None:
    """The forms are kept for ever: complete, and with only what must be there."""
    line = FORMS_FILE.read_bytes().splitlines()[number]
    head = b'{"form":"%s","value":' % FORMS[number].encode()
    assert line.startswith(head)
    value = line[len(head) : -1]
    assert write(FORMS[number], read(FORMS[number], value)) == value


def test_every_form_has_its_examples_and_none_has_a_field_that_they_lack() -> None:
    """A new message, event or field is added to the file: python -m tests.golden.record."""
    assert set(FORMS) == {*MODELS, *ROWS}
    assert FORMS_FILE.read_bytes().splitlines() == list(all_forms())


def test_unknown_fields_in_a_stored_decision_are_ignored() -> None:
    """A log that a later version has written is read by this one as far as it knows it."""
    line = next(line for line in written_file("one_life").read_bytes().splitlines() if b'"berth.decisions"' in line)
    value = json.loads(line)["value"]
    value["new_field"] = 1
    value["events"][0]["new_field"] = {"a": 1}
    assert events.read_decision(json.dumps(value).encode()).seq == value["seq"]


@pytest.mark.parametrize("damage", [b'"message":{', b'"seq":', b'"type":"accepted"'])
def test_a_damaged_decision_is_refused_and_never_read_as_something_else(damage: bytes) -> None:
    """I8: the projector and verify stop there."""
    line = next(line for line in written_file("one_life").read_bytes().splitlines() if b'"berth.decisions"' in line)
    value = line.split(b'"value": ', 1)[1][:-1]
    assert damage in value
    with pytest.raises(ValueError, match="validation error"):
        events.read_decision(value.replace(damage, damage[:-1] + b'"x"' if damage.endswith(b":") else b'"was":[', 1))
