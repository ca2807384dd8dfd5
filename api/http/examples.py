"""What addresses answer, by example: the success of each, and one problem for each status. Nothing in it is real."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Example:
    """An answer, and those of its fields that not every answer with this status has."""

    content: Mapping[str, Any]
    optional: tuple[str, ...] = ()
    words: str = ""


Answers = Mapping[int, Example]

_AT: Final = "2026-03-01T10:00:00.000000Z"
_LATER: Final = "2026-03-01T10:35:00.000000Z"
_POSITION: Final = "ZDM6MTc"
_DECIDED: Final = {"seq": 7, "decided_at": _AT, "repeated": False, "log_position": _POSITION}
_TRIGGER: Final = {"agent_id": "writer", "trigger_id": "t-1", "conversation_id": "c-1"}
_ATTEMPT: Final = {
    "execution_id": "x4jhm6yp-7-2",
    "attempt": 1,
    "slot_number": 1,
    "forced": False,
    "lease_until": _LATER,
}

RUNNING: Final = Example(
    {**_TRIGGER, **_DECIDED, "status": "running", "position": None, "reason": None, **_ATTEMPT}, words="it runs"
)
QUEUED: Final = Example(
    {
        **_TRIGGER,
        **_DECIDED,
        "status": "queued",
        "position": 1,
        "reason": "agent_parallelism_limit_reached",
        "available_at": _AT,
    },
    optional=("available_at", "seq", "decided_at"),
    words="it waits",
)
_ASKED: Final[Answers] = {201: RUNNING, 202: QUEUED}

_CONTROL: Final = {"agent_id": "writer", **_DECIDED, "position": _POSITION, "effect": True, "reason": None}
_CONTROLLED: Final[Answers] = {200: Example(_CONTROL)}
_OF_TRIGGER: Final = {**_CONTROL, "trigger_id": "t-1"}
_STOPPED: Final[Answers] = {
    200: Example({**_OF_TRIGGER, "status": "stopped"}, words="it has ended"),
    202: Example(
        {**_OF_TRIGGER, "status": "stop_requested", "grace_until": _LATER},
        optional=("grace_until",),
        words="its runner was told",
    ),
}
_CONVERSATION_STOPPED: Final = {
    **_CONTROL,
    "conversation_id": "c-1",
    "status": "stopped",
    "stopped": ["t-1"],
    "stop_requested": [],
    "more": False,
}
_CONFIGURED: Final = {**_CONTROL, "created": True, "changed": {"parallelism_limit": 2}}

_TASK_ENDED: Final = Example(
    {
        **_TRIGGER,
        **_DECIDED,
        "status": "finished",
        **_ATTEMPT,
        "result": {"pages": 3},
        "error": None,
        "result_available": True,
    },
    optional=(*_ATTEMPT, "seq", "decided_at"),
    words="it has ended",
)
_TASK: Final[Answers] = {200: _TASK_ENDED, 202: Example({**QUEUED.content}, QUEUED.optional, "it runs, or waits")}

_SITE_CONTROL: Final = {"site": "default", **_DECIDED, "effect": True, "reason": None}
_GATE: Final = {
    "site": "default",
    "scope": "organization",
    "name": "o-1",
    "enabled": False,
    "disabled_at": _AT,
    "run_budget": None,
    "run_budget_at": None,
    "granted": 0,
    "drained": True,
}
_GATE_SET: Final[Answers] = {
    200: Example(
        {**_SITE_CONTROL, "scope": "organization", "name": "o-1", "enabled": False, "run_budget": None},
        optional=("enabled", "run_budget"),
    )
}
_SITE: Final = {
    "site": "default",
    "capacity": 4,
    "created": True,
    "paused": False,
    "paused_at": None,
    "running": 1,
    "granted": 1,
    "waiting": 0,
    "drained": False,
    "seq": 9,
    "decided_at": _AT,
}
_HELD: Final = {
    "agent_id": "writer",
    "trigger_id": "t-1",
    "conversation_id": "c-1",
    "execution_id": "x4jhm6yp-7-2",
    "worker": True,
    "environment_id": "e-1",
    "path": "/src",
    "organization_id": None,
    "department_id": None,
    "granted_at": _AT,
}
_DISPATCH: Final = {
    "type": "dispatch",
    "v": 1,
    **_TRIGGER,
    **_ATTEMPT,
    "max_attempts": 3,
    "kind": "chat",
    "message": "Please fix the typo",
    "timeout_seconds": 1800,
    "dispatched_at": _AT,
}
_LISTED: Final = {
    **_TRIGGER,
    "state": "running",
    "state_since": _AT,
    "kind": "chat",
    "interactive": True,
    "requested_by": "ann",
    "created_at": _AT,
    "available_at": _AT,
    "accepted_at": _AT,
    "organization_id": None,
    "department_id": None,
    "attempt": 1,
    "failures": 0,
    "execution_id": "x4jhm6yp-7-2",
    "ended_at": None,
    "end_reason": None,
}
_CAPACITY: Final = {
    "agent_name": "writer",
    "max_parallel_tasks": 2,
    "active_slots": 1,
    "available_slots": 1,
    "slots": [
        {
            "slot_number": 1,
            "execution_id": "x4jhm6yp-7-2",
            "trigger_id": "t-1",
            "conversation_id": "c-1",
            "attempt": 1,
            "forced": False,
            "started_at": _AT,
            "duration_seconds": 45.0,
            "message_preview": "Please fix the typo",
        }
    ],
    "forced": 0,
    "waiting": 0,
    "paused": False,
    "serial": False,
}
_READ_TRIGGER: Final = {
    **_TRIGGER,
    "state": "waiting",
    "state_since": _AT,
    "position": 1,
    "reason": "agent_parallelism_limit_reached",
    "waits_for": [
        {
            "reason": "agent_parallelism_limit_reached",
            "released_by": "the end of a running attempt, or a higher limit",
            "since": _AT,
            "until": None,
            "holders": [{"trigger_id": "t-0", "execution_id": "x4jhm6yp-6-2", "since": _AT}],
            "holders_count": 1,
        }
    ],
    "attempts": [],
    "timeline": [{"seq": 7, "at": _AT, "command": "trigger", "event": "accepted", "position": 1}],
}
_DEAD_LETTER: Final = {
    "partition": 3,
    "offset": 17,
    "written_at": _AT,
    "reason": "not_json: Expecting value: line 1 column 1 (char 0)",
    "topic": "berth.triggers",
    "source_partition": 3,
    "source_offset": 1042,
    "value_bytes": 5,
    "replayable": True,
}
_AGENT: Final = {
    "agent_id": "writer",
    "display_name": "Writer",
    "owner": "ann",
    "agent_type": None,
    "serial": False,
    "paused": False,
    "archived": False,
    "parked": None,
    "running": 1,
    "forced": 0,
    "waiting": 1,
    "on_hold": 0,
    "limit": 2,
    "drained": False,
}

_AS_OF: Final = {"as_of": {"seq": 12, "at": _AT}}
"""Of an answer about the past; optional, since there is none about the present."""
_DECISION: Final = {
    "type": "decision",
    "v": 1,
    "agent_id": "writer",
    "seq": 7,
    "at": _AT,
    "via": "kafka",
    "cause": {"topic": "berth.controls", "partition": 3, "offset": 1042},
    "command": {"type": "pause", "v": 1, "id": "k-2", "agent_id": "writer", "requested_by": "ann"},
    "command_id": "k-2",
    "settles": ["k-2"],
    "events": [{"type": "paused"}],
    "policy": "1",
    "prev": "6914a394ccefde3a8947f95569c519046c8d2fab0e2fedaa967f087df1bf1bba",
}
_VERIFICATION: Final = {
    "verified_at": _AT,
    "sound": False,
    "recompute": True,
    "decisions": 1042,
    "forced": 3,
    "recomputed": 1040,
    "unknown_policies": {"0": 2},
    "overtakings": {"conversation_busy": 5},
    "overtakings_at_sites": {"agent_environment_folder_busy": 2},
    "violations": [
        {
            "topic": "berth.decisions",
            "partition": 3,
            "offset": 16,
            "decider": "writer",
            "seq": 7,
            "kind": "chain",
            "detail": "it was changed",
        }
    ],
    "positions": [{"topic": "berth.decisions", "partition": 3, "next_offset": 16}],
}
_WAITING_BEFORE: Final = {"triggers": 9, "not_started": 0, "mean": 4.1, "p50": 2.0, "p95": 12.5, "max": 14.0}
_WAITING_AFTER: Final = {"triggers": 9, "not_started": 0, "mean": 1.2, "p50": 0.0, "p95": 4.5, "max": 6.0}
_EFFECT: Final = {
    "name": "writer",
    "before": _WAITING_BEFORE,
    "after": _WAITING_AFTER,
    "gained": 6,
    "lost": 0,
    "only_before": 0,
    "only_after": 0,
    "utilisation_before": 0.9,
    "utilisation_after": 0.4,
}
_WHAT_IF: Final = {
    "since": _AT,
    "until": _LATER,
    "decisions": 84,
    "recorded": _WAITING_BEFORE,
    "as_replayed": {**_EFFECT, "name": "as replayed", "after": _WAITING_BEFORE},
    "total": {**_EFFECT, "name": "all"},
    "agents": [_EFFECT],
    "organizations": [],
    "sites": [],
    "without_effect": [],
    "unknown": [{"what": "attempts had not ended when the log did: they run on to the end", "count": 1}],
}

EXAMPLES: Final[Mapping[tuple[str, str], Answers]] = {
    ("GET", "/api/agents"): {200: Example({"agents": [_AGENT], "next_cursor": None})},
    ("GET", "/api/agents/slots"): {200: Example({"agents": {"writer": {"max": 2, "active": 1}}, "timestamp": _AT})},
    ("GET", "/api/agents/{agent_id}"): {
        200: Example({**_AGENT, "parallelism_limit": 2, "totals": {"accepted": 9}, "created_at": _AT, "seq": 17})
    },
    ("PUT", "/api/agents/{agent_id}"): {
        200: Example(_CONFIGURED, words="it was changed"),
        201: Example(_CONFIGURED, words="it was made"),
    },
    ("PATCH", "/api/agents/{agent_id}"): {200: Example(_CONFIGURED)},
    ("POST", "/api/agents/{agent_id}/pause"): _CONTROLLED,
    ("POST", "/api/agents/{agent_id}/resume"): _CONTROLLED,
    ("POST", "/api/agents/{agent_id}/archive"): _CONTROLLED,
    ("GET", "/api/agents/{agent_id}/capacity"): {200: Example({**_CAPACITY, **_AS_OF}, optional=("as_of",))},
    ("PUT", "/api/agents/{agent_id}/capacity"): {
        200: Example({"message": "Capacity updated", "agent_name": "writer", "max_parallel_tasks": 2, **_CONFIGURED})
    },
    ("GET", "/api/agents/{agent_id}/queue"): {
        200: Example(
            {
                "agent_id": "writer",
                "waiting": 1,
                "queue": [{"position": 1, **_TRIGGER, "reason": "agent_parallelism_limit_reached"}],
                "next_cursor": None,
                **_AS_OF,
            },
            optional=("as_of",),
        )
    },
    ("POST", "/api/agents/{agent_id}/task"): _TASK,
    ("POST", "/api/internal/execute-task"): _TASK,
    ("POST", "/api/agents/{agent_id}/triggers"): _ASKED,
    ("GET", "/api/agents/{agent_id}/triggers/{trigger_id}"): {200: Example(_READ_TRIGGER)},
    ("DELETE", "/api/agents/{agent_id}/triggers/{trigger_id}"): _STOPPED,
    ("POST", "/api/agents/{agent_id}/triggers/{trigger_id}/approve"): {
        200: Example({**_OF_TRIGGER, "status": "queued"})
    },
    ("POST", "/api/agents/{agent_id}/triggers/{trigger_id}/reschedule"): {
        200: Example({**_OF_TRIGGER, "status": "queued", "available_at": _LATER}, optional=("available_at",))
    },
    ("POST", "/api/agents/{agent_id}/triggers/{trigger_id}/resume"): {
        200: Example({**_OF_TRIGGER, "status": "running", **_ATTEMPT}, optional=tuple(_ATTEMPT), words="it runs"),
        202: Example({**_OF_TRIGGER, "status": "queued", "available_at": _AT}, words="it waits"),
    },
    ("POST", "/api/agents/{agent_id}/triggers/{trigger_id}/restart"): _ASKED,
    ("POST", "/api/agents/{agent_id}/conversations"): _ASKED,
    ("POST", "/api/agents/{agent_id}/conversations/{conversation_id}"): _ASKED,
    ("POST", "/api/agents/{agent_id}/conversations/{conversation_id}/messages"): _ASKED,
    ("GET", "/api/agents/{agent_id}/conversations/{conversation_id}"): {
        200: Example(
            {
                "agent_id": "writer",
                "conversation_id": "c-1",
                "state": "running",
                "live_trigger_id": "t-1",
                "triggers": [_LISTED],
                "next_cursor": None,
            }
        )
    },
    ("POST", "/api/agents/{agent_id}/conversations/{conversation_id}/stop"): {
        200: Example(_CONVERSATION_STOPPED, words="it has ended"),
        202: Example(
            {**_CONVERSATION_STOPPED, "status": "stop_requested", "stopped": [], "stop_requested": ["t-1"]},
            words="its runner was told",
        ),
    },
    ("GET", "/api/triggers"): {200: Example({"triggers": [_LISTED], "next_cursor": None})},
    ("POST", "/api/triggers:bulk"): {
        200: Example({"results": [{"agent_id": "writer", "http_status": 201, "answer": RUNNING.content}]})
    },
    ("POST", "/api/triggers:stop"): {
        200: Example(
            {
                "results": [
                    {
                        "agent_id": "writer",
                        "trigger_id": "t-1",
                        "http_status": 200,
                        "answer": {**_OF_TRIGGER, "status": "stopped"},
                    }
                ],
                "more": False,
            }
        )
    },
    ("GET", "/api/sites"): {200: Example({"sites": [_SITE], "next_cursor": None})},
    ("GET", "/api/sites/{site}"): {
        200: Example({**_SITE, "queue": [], "held": [_HELD], "gates": [_GATE], "next_cursor": None})
    },
    ("PUT", "/api/sites/{site}/capacity"): {200: Example({**_SITE_CONTROL, "capacity": 4})},
    ("POST", "/api/sites/{site}/pause"): {200: Example(_SITE_CONTROL)},
    ("POST", "/api/sites/{site}/resume"): {200: Example(_SITE_CONTROL)},
    ("GET", "/api/sites/{site}/organizations/{name}"): {200: Example(_GATE)},
    ("PUT", "/api/sites/{site}/organizations/{name}"): _GATE_SET,
    ("GET", "/api/sites/{site}/departments/{name}"): {200: Example({**_GATE, "scope": "department"})},
    ("PUT", "/api/sites/{site}/departments/{name}"): _GATE_SET,
    ("DELETE", "/api/sites/{site}/environments/{environment_id}"): {
        200: Example({**_SITE_CONTROL, "environment_id": "e-1"})
    },
    ("DELETE", "/api/sites/{site}/environments/{environment_id}/folders"): {
        200: Example({**_SITE_CONTROL, "environment_id": "e-1", "path": "/src"})
    },
    ("GET", "/api/dead-letters"): {
        200: Example(
            {
                "dead_letters": [{**_DEAD_LETTER, "key_preview": "writer", "value_preview": "hello"}],
                "next_cursor": None,
            }
        )
    },
    ("GET", "/api/dead-letters/{partition}/{offset}"): {
        200: Example(
            {
                **_DEAD_LETTER,
                "not_replayable_because": None,
                "key": "writer",
                "key_base64": None,
                "value": "hello",
                "value_base64": None,
            }
        )
    },
    ("POST", "/api/dead-letters/{partition}/{offset}/replay"): {
        202: Example(
            {
                "status": "accepted",
                "partition": 3,
                "offset": 17,
                "reason": "skipped",
                "topic": "berth.triggers",
                "source_partition": 3,
            },
            words="Kafka has it",
        )
    },
    ("GET", "/api/audit/decisions"): {
        200: Example(
            {
                "agent_id": "writer",
                "trigger_id": None,
                "next_cursor": None,
                "decisions": [{"partition": 3, "offset": 16, "decision": _DECISION}],
            }
        )
    },
    ("GET", "/api/audit/verify"): {200: Example(_VERIFICATION)},
    ("POST", "/api/audit/what-if"): {200: Example(_WHAT_IF)},
    ("GET", "/api/runners/dispatches"): {200: Example({"dispatches": [_DISPATCH], "position": "cjM6MTc"})},
    ("POST", "/api/statuses"): {
        202: Example({"results": [{"status": "accepted"}]}, optional=("results",), words="Kafka has them")
    },
}

_BUSY: Final = {
    "running": 2,
    "limit": 2,
    "waiting": 0,
    "position_if_queued": 1,
    "force_allowed": True,
    "holders": ["t-0", "t-1"],
    "holders_count": 2,
}

PROBLEMS: Final[Mapping[int, tuple[str, str, Mapping[str, Any]]]] = {
    400: ("unknown_field", "on_buzy: is not a field of this request. Nothing was changed.", {"field": "on_buzy"}),
    401: ("token_required", "This needs a token: Authorization: Bearer ... . Nothing was changed.", {}),
    403: (
        "access_denied",
        "This token gives no access to agent 'writer'. Nothing was changed.",
        {"agent_id": "writer"},
    ),
    404: ("agent_not_found", "There is no agent 'writer'. Create it with PUT /api/agents/{agent_id}.", {}),
    409: (
        "agent_parallelism_limit_reached",
        "All slots of the agent are taken. Queue the trigger, or force it if allowed.",
        _BUSY,
    ),
    413: ("body_too_large", "A body has at most 1048576 bytes. Nothing was changed.", {}),
    415: ("unsupported_media_type", "Send the body as JSON, with Content-Type: application/json.", {}),
    421: ("host_not_served", "This service doesn't answer to this name.", {}),
    429: (
        "agent_parallelism_limit_reached",
        "Agent 'writer' is at capacity (2 parallel tasks). Try again later.",
        _BUSY,
    ),
    500: (
        "internal_error",
        "Something unexpected happened in the service. It is in its log under `incident`.",
        {"incident": "6f1d0c2a9b3e4f58"},
    ),
    501: ("public_links_off", "This service gives out no public links.", {}),
    503: (
        "log_unavailable",
        "Kafka has not acknowledged the request. Send it again with the same Idempotency-Key.",
        {},
    ),
    504: (
        "projection_behind",
        "The read side hasn't reached min_position. The write stands; read again.",
        {},
    ),
}
