"""One example of every form on a wire or in a row, with all its fields: it reads and writes back to the same bytes."""

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Final, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError

from streams.codec import PartitionRow
from streams.rules import commands, dispatches, events, messages, site_events, site_messages, verdicts
from streams.rules.agent import rows
from streams.rules.site import rows as site_rows
from tests.driving import Json

FORMS_FILE: Final = Path(__file__).parent / "forms.jsonl"


def members(union: Any) -> tuple[type[BaseModel], ...]:
    """The models of a discriminated union."""
    found: tuple[type[BaseModel], ...] = get_args(get_args(union)[0])
    return found


MODELS: Final[dict[str, type[BaseModel]]] = {
    f"{place}.{model.__name__}": model
    for place, models in (
        ("command", members(commands.AgentCommand)),
        ("event", members(events.Event)),
        ("decision", (events.Decision, verdicts.Refusal, verdicts.Ignored)),
        ("cause", get_args(verdicts.Cause)),
        ("site-command", members(site_events.SiteCommand)),
        ("site-event", members(site_events.SiteEvent)),
        ("site-decision", (site_events.SiteDecision,)),
        ("dispatches", members(dispatches.DispatchRecord)),
        ("texts", (events.TextRecord,)),
        ("site-controls", members(site_messages.SiteControlRecord)),
        ("claims", members(site_messages.ClaimRecord)),
        ("signals", members(site_messages.SignalRecord)),
    )
    for model in models
}
ROWS: Final[dict[str, Any]] = {
    "row.agent": rows.AgentRow,
    "row.trigger": rows.TriggerRow,
    "row.conversation": rows.ConversationRow,
    "row.remembered": rows.RememberedRow,
    "row.watch": rows.WatchRow,
    "row.site": site_rows.SiteRow,
    "row.gate": site_rows.GateRow,
    "row.deletion": site_rows.DeletionRow,
    "row.claim": site_rows.ClaimRow,
    "row.partition": PartitionRow,
}

INSTANT: Final = "2026-03-01T10:00:00.000001Z"
DIGEST: Final = {"sha256": "ab" * 32, "bytes": 12}
CANDIDATES: Final[tuple[Any, ...]] = (
    "text é",
    True,
    7,
    INSTANT,
    "cd" * 32,
    DIGEST,
    {"agent_id": "B", "trigger_id": "p"},
    {"available_at": INSTANT, "created_at": INSTANT, "id": "t"},
    {"decider": "d", "seq": 3, "index": 1},
    {"kind": "lease", "id": "t", "deadline": INSTANT},
    {"timer": {"kind": "lease", "id": "t", "deadline": INSTANT}},
    {"type": "continue"},
    {"code": "agent_archived"},
    {"reason": "unchanged"},
    {"positions": {"berth.triggers": 4}},
    {"berth.triggers": 4},
    {"n": 1, "state": "asking"},
    ["one", "two"],
    [1, 2],
    [["B", "c1"]],
    ["B", "p"],
    [{"agent_id": "B", "conversation_id": "c"}],
    [{"kind": "stop", "id": "s"}],
    [{"type": "agent_paused"}],
    [{"type": "site_paused"}],
    ["finished", None],
    *("running", "queue", "task", "lease", "stop", "finished", "waiting", "failed", "asking", "kafka", "message"),
    *("organization", "background", "execution", "standard", "pump", "duplicate", "agent_paused", "unlimited"),
)


def read(form: str, value: bytes) -> Any:
    if form in MODELS:
        return MODELS[form].model_validate_json(value, context=messages.LOGGED)
    return TypeAdapter(ROWS[form]).validate_json(value)


def write(form: str, value: Any) -> bytes:
    if form in MODELS:
        written: bytes = value.__pydantic_serializer__.to_json(value, exclude_unset=True, by_alias=True)
        return written
    return TypeAdapter(ROWS[form]).dump_json(value, exclude_defaults=True)


def all_forms() -> Iterator[bytes]:
    """A line for each form with all its fields, and one with those only that it must have."""
    for form in (*MODELS, *ROWS):
        for complete in (True, False):
            yield b'{"form":"%s","value":%s}' % (form.encode(), write(form, read(form, _example(form, complete))))


def _example(form: str, complete: bool) -> bytes:
    if form == "row.partition":
        return b'[1772359200000000,{"berth.triggers":4},9]'
    example: Json = {}
    for name, required in _fields(form):
        if required or complete:
            example[name] = _candidate(form, name, example)
    if form == "command.Stop":
        del example["conversation_id" if complete else "trigger_id"]
    return json.dumps(example).encode()


def _fields(form: str) -> list[tuple[str, bool]]:
    if form in MODELS:
        found = MODELS[form].model_fields.items()
        return [(field.alias or name, field.is_required() or (form, name) in _NEEDED) for name, field in found]
    assert is_dataclass(ROWS[form])
    return [(field.name, field.default is field.default_factory) for field in fields(ROWS[form])]


_NEEDED: Final = {
    ("command.Stop", "trigger_id"), ("command.Stop", "conversation_id"), ("command.Status", "execution_id"),
}  # fmt: skip


def _candidate(form: str, name: str, example: Json) -> Any:
    if name == "v":
        return 1
    if name == "type" and form in MODELS:
        return MODELS[form].model_fields["type"].default
    for candidate in CANDIDATES:
        if _fits(form, name, {**example, name: candidate}):
            return candidate
    raise AssertionError(f"no candidate for {form}.{name}")


def _fits(form: str, name: str, example: Json) -> bool:
    try:
        read(form, json.dumps(example).encode())
    except ValidationError as error:
        return not any(name in problem["loc"] for problem in error.errors())
    return True
