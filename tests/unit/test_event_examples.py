"""docs/events.md is the contract: each example in it is read as a worker, a runner or an auditor reads it."""

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import TypeAdapter

from streams import (
    CONTROLS,
    DECISIONS,
    DISPATCHES,
    SITE_CONTROLS,
    SITE_DECISIONS,
    STATUSES,
    TEXTS,
    TRIGGERS,
    WORKERS,
    codec,
)
from streams.rules import dispatches, events, messages, site_events, site_messages
from streams.rules.agent.step import execution_prefix

EVENTS = (Path(__file__).parents[2] / "docs" / "events.md").read_text()
EXAMPLES = re.findall(r"^```json (\S+)\n(.*?)^```", EVENTS, re.MULTILINE | re.DOTALL)
INPUTS = {TRIGGERS.name, STATUSES.name, CONTROLS.name, SITE_CONTROLS.name}
READERS: dict[str, TypeAdapter[Any]] = {
    DISPATCHES.name: TypeAdapter(dispatches.DispatchRecord),
    TEXTS.name: TypeAdapter(events.TextRecord),
}


@pytest.mark.parametrize(("topic", "text"), EXAMPLES, ids=[f"{topic}-{n}" for n, (topic, _) in enumerate(EXAMPLES)])
def test_an_example_in_the_reference_is_read_as_it_stands(topic: str, text: str) -> None:
    value = text.encode()
    if topic in INPUTS:
        fate = codec.read(codec.Record(topic, 0, 0, b"writer", value), 1)
        assert isinstance(fate, codec.Command | codec.SiteCommandRead), fate
        assert fate.command.type == json.loads(text)["type"]
    elif topic == DECISIONS.name:
        decision = events.read_decision(value)
        assert json.loads(events.write_decision(decision)) == json.loads(text)
    elif topic == SITE_DECISIONS.name:
        site_decision = site_events.read_site_decision(value)
        assert json.loads(site_events.write_site_decision(site_decision)) == json.loads(text)
    elif topic == WORKERS.name:
        assert set(json.loads(text)) == {"address", "at", "partitions"}
    else:
        assert READERS[topic].validate_json(value).type == json.loads(text)["type"]


def test_every_record_type_that_somebody_writes_or_reads_has_an_example() -> None:
    shown = {(topic, json.loads(text).get("type")) for topic, text in EXAMPLES}
    for topic, union in (
        (TRIGGERS.name, messages.TriggerRecord),
        (CONTROLS.name, messages.ControlRecord),
        (SITE_CONTROLS.name, site_messages.SiteControlRecord),
        (DISPATCHES.name, dispatches.DispatchRecord),
    ):
        for member in get_args(get_args(union)[0]):
            assert (topic, member.model_fields["type"].default) in shown


FILLED_IN = {"default_limit", "repeats"}
"""Inputs that the decider adds to commands; a client that sends them is not believed."""


def test_every_field_that_somebody_may_send_or_reads_is_named() -> None:
    members = [
        member
        for union in (
            messages.TriggerRecord,
            messages.ControlRecord,
            site_messages.SiteControlRecord,
            dispatches.DispatchRecord,
        )
        for member in get_args(get_args(union)[0])
    ]
    fields = {name for member in (*members, messages.Status) for name in member.model_fields} - FILLED_IN
    assert {name for name in fields if f"`{name}`" not in EVENTS and f'"{name}"' not in EVENTS} == set()


def test_every_event_is_in_the_table_of_events() -> None:
    for member in (*get_args(get_args(events.Event)[0]), *get_args(get_args(site_events.SiteEvent)[0])):
        name = member.model_fields["type"].default
        assert f"`{name}`" in EVENTS, f"{name} is missing in docs/events.md"


def test_the_execution_ids_of_the_examples_are_those_of_their_agent() -> None:
    for execution_id in re.findall(r'"execution_id": "(\w+)-\d+-\d+"', EVENTS):
        assert execution_id == execution_prefix("writer")
