"""Rows of texts of people and of dead letters, and what becomes of characters that PostgreSQL can't hold: pure."""

import json
import re
from collections.abc import Sequence
from typing import Any, Final

from projections.row_types import DeadLetterRow, TextRow
from streams.rules import events


def text_row(partition: int, offset: int, value: bytes, written_at: int) -> TextRow:
    """The row of a record of berth.texts. ValueError if it is none."""
    text = events.TextRecord.model_validate(json.loads(value))
    return TextRow(
        agent_id=text.agent_id,
        trigger_id=text.trigger_id,
        execution_id=text.execution_id or "",
        kind=text.kind,
        content=json.dumps(_clean(text.text), ensure_ascii=False),
        truncated=text.truncated,
        written_at=written_at,
        log_partition=partition,
        log_offset=offset,
    )


def dead_letter_row(
    partition: int,
    offset: int,
    key: bytes | None,
    value: bytes | None,
    headers: Sequence[tuple[str, bytes]],
    written_at: int,
) -> DeadLetterRow:
    """The row of a record of berth.dead-letters, whatever it holds."""
    about = {name: clean_text(content.decode(errors="replace")) for name, content in headers}
    return DeadLetterRow(
        log_partition=partition,
        log_offset=offset,
        written_at=written_at,
        reason=about.get("reason", "unknown"),
        source_topic=about.get("topic"),
        source_partition=_number(about.get("partition"), 9),
        source_offset=_number(about.get("offset"), 18),
        key=key,
        value=value,
    )


def _number(text: str | None, digits_max: int) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdecimal() and len(text) <= digits_max else None


# What PostgreSQL can't hold

_FOREIGN: Final = re.compile("[\x00\ud800-\udfff]")
_MAYBE_FOREIGN: Final = re.compile(rb"\\u(?:0000|[dD][89a-fA-F])")
REPLACEMENT: Final = "\ufffd"


def clean_text(text: str) -> str:
    """The text with U+FFFD for U+0000 and for each lone surrogate."""
    return _FOREIGN.sub(REPLACEMENT, text)


def clean_json(value: bytes) -> str:
    """The JSON text with U+FFFD for U+0000 and for each lone surrogate in its strings and keys."""
    if _MAYBE_FOREIGN.search(value) is None:
        return value.decode()
    return json.dumps(_clean(json.loads(value)), ensure_ascii=False, separators=(",", ":"))


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if isinstance(value, dict):
        return {clean_text(name): _clean(item) for name, item in value.items()}
    return value
