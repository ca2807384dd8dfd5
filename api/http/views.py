"""From rows of the projections to what clients read. Field names are a contract (docs/http-api.md)."""

import base64
import binascii
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Final

from api.http.problems import invalid
from api.http.waiting import Facts, Row, causes, site_of
from streams.audit.causes import Cause
from streams.rules import events
from streams.rules.order import format_instant

CURSOR_CHARACTERS_MAX: Final = 4_000

_AGENT_FIELDS: Final = (
    "agent_id",
    "display_name",
    "owner",
    "agent_type",
    "paused",
    "archived",
    "parked",
    "running",
    "forced",
    "waiting",
    "on_hold",
)
_SETTINGS_FIELDS: Final = (
    "max_backlog_depth",
    "default_timeout_seconds",
    "default_environment_id",
    "default_folder",
    "run_budget",
)
_TOTALS_FIELDS: Final = (
    "accepted",
    "attempts",
    "finished",
    "failed",
    "stopped",
    "expired",
    "refused",
    "ignored",
)
QUEUED_FIELDS: Final = (
    "trigger_id",
    "conversation_id",
    "kind",
    "interactive",
    "requested_by",
    "created_at",
    "available_at",
    "expires_at",
    "accepted_at",
    "execution_class",
    "priority",
    "attempt",
    "failures",
    "max_attempts",
)
_TRIGGER_FIELDS: Final = (
    "agent_id",
    "trigger_id",
    "conversation_id",
    "state",
    "state_since",
    "kind",
    "interactive",
    "on_busy",
    "requested_by",
    "created_at",
    "available_at",
    "expires_at",
    "accepted_at",
    "site",
    "worker",
    "environment_id",
    "folder",
    "organization_id",
    "department_id",
    "degraded",
    "approval_required",
    "approved_at",
    "approved_by",
    "execution_class",
    "restarts",
    "priority",
    "timeout_seconds",
    "heartbeat_seconds",
    "max_attempts",
    "attempt",
    "failures",
    "execution_id",
    "stop_requested_by",
    "stop_requested_at",
    "grace_until",
    "ended_at",
    "end_reason",
    "replied_by",
)
_ATTEMPT_FIELDS: Final = (
    "execution_id",
    "attempt",
    "slot_number",
    "forced",
    "dispatched_at",
    "lease_until",
    "ended_at",
    "outcome",
    "phase",
    "last_seen_at",
    "retry_at",
)


def plain(value: Any) -> Any:
    """A value of a row as JSON holds it."""
    return instant(value) if isinstance(value, datetime) else value


def instant(moment: datetime) -> str:
    """RFC 3339 in UTC with microseconds and Z."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def now() -> datetime:
    return datetime.now(UTC)


def picked(row: Row, names: Iterable[str]) -> dict[str, Any]:
    return {name: plain(row[name]) for name in names}


# Cursors


def cursor(*values: Any) -> str:
    """An opaque token for the row after which the next page begins."""
    return base64.urlsafe_b64encode(json.dumps([plain(value) for value in values]).encode()).decode().rstrip("=")


def read_cursor(token: str, length: int) -> list[str]:
    """The ``length`` strings of a cursor that this service gave. Raises Problem."""
    try:
        if len(token) > CURSOR_CHARACTERS_MAX:
            raise ValueError
        values = json.loads(base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True))
        if not (isinstance(values, list) and len(values) == length and all(isinstance(value, str) for value in values)):
            raise ValueError
        if any("\x00" in value for value in values):
            raise ValueError
        for value in values:
            value.encode()
    except (ValueError, binascii.Error, RecursionError):
        raise invalid("invalid_field", "cursor", "cursor must be a next_cursor that this service gave.") from None
    return values


def read_instant_of_cursor(text: str) -> datetime:
    """An instant in a cursor. Raises Problem."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise invalid("invalid_field", "cursor", "cursor must be a next_cursor that this service gave.") from None


# Agents


def agent_summary(row: Row) -> dict[str, Any]:
    """One line of the list of agents. ``limit`` is what holds; null: unlimited.

    ``drained``: it is paused, and nothing of it runs, is granted, or is being asked of a site.
    """
    under_way = row["running"] or row["asking"] or row["held"]
    return picked(row, _AGENT_FIELDS) | {
        "serial": row["is_serial"],
        "limit": row["max_parallel"],
        "drained": bool(row["paused"] or row["archived"]) and not under_way,
    }


def agent(row: Row) -> dict[str, Any]:
    """One agent with settings and totals."""
    return {
        **agent_summary(row),
        "parallelism_limit": "unlimited" if row["parallelism_limit"] is None else row["parallelism_limit"],
        **picked(row, _SETTINGS_FIELDS),
        "totals": picked(row, _TOTALS_FIELDS),
        "created_at": plain(row["created_at"]),
        "seq": row["seq"],
        "decided_at": plain(row["decided_at"]),
    }


def capacity(row: Row, slots: Sequence[Row], at: datetime) -> dict[str, Any]:
    """The agent's slots."""
    limit = row["max_parallel"]
    return {
        "agent_name": row["agent_id"],
        "max_parallel_tasks": limit,
        "active_slots": row["running"],
        "available_slots": None if limit is None else max(0, limit - row["running"]),
        "slots": [
            {
                "slot_number": slot["slot_number"],
                "execution_id": slot["execution_id"],
                "trigger_id": slot["trigger_id"],
                "conversation_id": slot["conversation_id"],
                "attempt": slot["attempt"],
                "forced": slot["forced"],
                "started_at": instant(slot["dispatched_at"]),
                "duration_seconds": max(0.0, round((at - slot["dispatched_at"]).total_seconds(), 3)),
                "message_preview": slot["message_preview"],
            }
            for slot in slots
        ],
        "forced": row["forced"],
        "waiting": row["waiting"],
        "paused": row["paused"],
        "serial": row["is_serial"],
    }


def queued(facts: Facts, row: Row, position: int, at: datetime) -> dict[str, Any]:
    """One waiting trigger in a list: ``reason`` is the first of ``reasons``, null when it is about to start."""
    return queued_for([cause.reason for cause in causes(facts, row, at)], row, position)


def queued_for(reasons: Sequence[str], row: Row, position: int) -> dict[str, Any]:
    """The same, of which it is known already why it waits."""
    return {
        "position": position,
        **picked(row, QUEUED_FIELDS),
        "reason": reasons[0] if reasons else None,
        "reasons": list(reasons),
        "waits_behind": row["head_trigger_id"] if "conversation_busy" in reasons else None,
    }


# Triggers


def trigger(row: Row, attempts: Sequence[Row], texts: Sequence[Row], dependencies: Sequence[Row]) -> dict[str, Any]:
    """A trigger with its attempts, the texts that are kept, and while it lives its claim and what it depends on."""
    by_attempt: dict[str, dict[str, Any]] = {}
    for text in texts:
        by_attempt.setdefault(text["execution_id"], {})[text["kind"]] = text["content"]
    parent = None
    if row["parent_trigger_id"] is not None:
        parent = {"agent_id": row["parent_agent_id"], "trigger_id": row["parent_trigger_id"]}
    last = by_attempt.get(row["execution_id"] or "", {})
    return {
        **picked(row, _TRIGGER_FIELDS),
        "parent": parent,
        "claim": claim(row),
        "depends_on": [
            {
                "agent_id": one["dependency_agent_id"],
                "conversation_id": one["dependency_conversation_id"],
                "outcome": one["outcome"],
                "told_at": plain(one["told_at"]),
            }
            for one in dependencies
        ],
        "message": by_attempt.get("", {}).get("message"),
        "result": last.get("result"),
        "error": last.get("error"),
        "attempts": [
            {
                **picked(attempt, _ATTEMPT_FIELDS),
                "error": by_attempt.get(attempt["execution_id"], {}).get("error"),
                "result": by_attempt.get(attempt["execution_id"], {}).get("result"),
            }
            for attempt in attempts
        ],
    }


def claim(row: Row) -> dict[str, Any] | None:
    """What the trigger asked of its site, as its agent knows it; None: nothing, or it was given back."""
    if row["claim_state"] is None:
        return None
    return {
        "site": site_of(row),
        "n": row["claim_n"],
        "state": row["claim_state"],
        "since": plain(row["claim_since"]),
        "reason": row["claim_reason"],
    }


_RESTARTED_FIELDS: Final = (
    "conversation_id",
    "kind",
    "interactive",
    "site",
    "worker",
    "environment_id",
    "folder",
    "organization_id",
    "department_id",
    "execution_class",
    "priority",
    "timeout_seconds",
    "heartbeat_seconds",
    "max_attempts",
    "approval_required",
)


def to_restart(row: Row, texts: Sequence[Row]) -> dict[str, Any]:
    """The fields of a new trigger that asks for the same as one that has ended."""
    kept = {name: row[name] for name in _RESTARTED_FIELDS if row[name] not in (None, False)}
    if row["parent_trigger_id"] is not None:
        kept["parent"] = {"agent_id": row["parent_agent_id"], "trigger_id": row["parent_trigger_id"]}
    message = message_of(texts)
    if message is not None:
        kept["message"] = message
    return kept


def message_of(texts: Sequence[Row]) -> str | None:
    """A trigger's message among its texts."""
    messages = (text["content"] for text in texts if text["kind"] == "message" and text["execution_id"] == "")
    return next(messages, None)


def cause(found: Cause) -> dict[str, Any]:
    """``site``, ``scope`` and ``name`` are there only of causes that are a site's or a gate's."""
    content = asdict(found) | {"holders": [_with_instants(asdict(holder)) for holder in found.holders]}
    return {
        name: value for name, value in _with_instants(content).items() if value is not None or name not in _OF_SITES
    }


def _with_instants(content: dict[str, Any]) -> dict[str, Any]:
    instants = {name: format_instant(content[name]) for name in ("since", "until") if content.get(name) is not None}
    return content | instants


_OF_SITES: Final = frozenset(("site", "scope", "name"))


_OF_OTHERS: Final = frozenset(str(event.model_fields["type"].default) for event in events.OF_OTHERS)


def timeline(trigger_id: str, decisions: Iterable[Row]) -> list[dict[str, Any]]:
    """What the log says of a trigger, oldest first: one entry an event, a refusal, or a word that changed nothing.

    Another agent's trigger that waits for the end of a conversation here may have the same id: it is not this one.
    """
    entries: list[dict[str, Any]] = []
    for decision in decisions:
        about = {"seq": decision["seq"], "at": instant(decision["decided_at"]), "command": decision["command_type"]}
        record: Mapping[str, Any] = decision["record"]
        entries += [
            {**about, "event": event["type"], **_without(event, "type", "trigger_id")}
            for event in record.get("events", ())
            if event.get("trigger_id") == trigger_id and event["type"] not in _OF_OTHERS
        ]
        if decision["refusal_code"] is not None:
            entries.append({**about, "event": "refused", "code": decision["refusal_code"]})
        if decision["ignored_reason"] is not None:
            entries.append({**about, "event": "ignored", "reason": decision["ignored_reason"]})
    return entries


def _without(content: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in content.items() if name not in names}


# Conversations

_IN_CONVERSATION_FIELDS: Final = (
    "trigger_id",
    "state",
    "state_since",
    "kind",
    "interactive",
    "requested_by",
    "created_at",
    "available_at",
    "accepted_at",
    "attempt",
    "failures",
    "execution_id",
    "ended_at",
    "end_reason",
    "replied_by",
)


_LISTED_FIELDS: Final = (
    "agent_id",
    "conversation_id",
    "organization_id",
    "department_id",
    *(name for name in _IN_CONVERSATION_FIELDS if name != "replied_by"),
)


def listed(row: Row) -> dict[str, Any]:
    """One trigger in a list over agents."""
    return picked(row, _LISTED_FIELDS)


def conversation(row: Row, triggers: Sequence[Row]) -> dict[str, Any]:
    """A conversation with a page of its triggers, newest first."""
    return {
        **picked(
            row,
            (
                "agent_id",
                "conversation_id",
                "state",
                "live_trigger_id",
                "created_at",
                "last_outcome",
                "last_outcome_at",
            ),
        ),
        "triggers_count": row["triggers"],
        "live_count": row["live"],
        "triggers": [picked(one, _IN_CONVERSATION_FIELDS) for one in triggers],
    }


# Sites


def site(row: Row) -> dict[str, Any]:
    """One site. ``running``: workers of the pool that are taken; ``granted``: all that runs there or is about to."""
    return {
        **picked(row, ("site", "capacity", "created", "paused", "paused_at", "waiting", "granted", "drained")),
        "running": row["workers"],
        "seq": row["seq"],
        "decided_at": plain(row["decided_at"]),
    }


_CLAIM_FIELDS: Final = (
    "agent_id",
    "trigger_id",
    "worker",
    "environment_id",
    "path",
    "organization_id",
    "department_id",
)


def site_waiting(row: Row) -> dict[str, Any]:
    """A claim that waits at a site; ``passed``: how many younger ones were granted past it."""
    return picked(row, (*_CLAIM_FIELDS, "available_at", "created_at", "opened_at", "passed"))


def site_granted(row: Row) -> dict[str, Any]:
    """What is held at a site and by whom; ``execution_id`` is null before the attempt has started."""
    return picked(row, (*_CLAIM_FIELDS, "conversation_id", "execution_id", "granted_at"))


def gate(row: Row) -> dict[str, Any]:
    """An organization or department at a site. ``drained``: it is disabled and nothing of it is granted there."""
    return picked(row, ("scope", "name", "enabled", "disabled_at", "run_budget", "run_budget_at", "granted", "drained"))
