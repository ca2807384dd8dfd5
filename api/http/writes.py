"""From a request to a record, and from the decision to what the client is told.

A request that carries an id, or an Idempotency-Key from which its id is made, may be repeated: the rules say that it
was answered before and by which decision, and the client gets that first answer again, also when it was a refusal,
together with the trigger's present state.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol
from urllib.parse import quote

import pydantic

from api.http.answers import Answer, AnyDecision, Outgoing, digest_of_fields
from api.http.auth import Caller
from api.http.decisions import DECIDE_SECONDS, Log
from api.http.positions import LogPosition
from api.http.problems import Problem, invalid, of_refusal, of_validation, unavailable
from api.http.requests import id_from_key, new_id, without
from api.http.rights import require_access
from api.http.tasks import outcome_of
from streams.rules import events, verdicts
from streams.rules.limits import SCHEMA_VERSION
from streams.rules.messages import NEVER_INTERACTIVE, Trigger
from streams.rules.order import SECOND, format_instant
from streams.rules.site_events import SiteDecision

KEY_CHARACTERS_MAX: Final = 200


class Decisions(Protocol):
    """Where earlier decisions can be read."""

    async def first_answer(self, command: Outgoing, seq: int, position: LogPosition) -> AnyDecision | None:
        """What a command was answered that decision ``seq`` settled or accepted; None if it can't be read now."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the client is told."""

    status: int
    content: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a request came (the event loop's time), who asks, and the key with which it may be repeated."""

    seconds: float
    caller: Caller
    idempotency_key: str | None

    @classmethod
    def now(cls, caller: Caller, idempotency_key: str | None = None) -> "Arrival":
        """Problem if the key can't be used."""
        key = idempotency_key
        if key is not None and not (0 < len(key) <= KEY_CHARACTERS_MAX and key.isprintable()):
            raise invalid(
                "invalid_field", "Idempotency-Key", f"Idempotency-Key must have 1 to {KEY_CHARACTERS_MAX} characters."
            )
        return cls(asyncio.get_running_loop().time(), caller, key)

    def decide_before(self) -> str:
        """Until when a command whose caller waits may take effect."""
        waited = asyncio.get_running_loop().time() - self.seconds
        return format_instant(time.time_ns() // 1000 + int((DECIDE_SECONDS - waited) * SECOND))


class Writes:
    """Every write of the API."""

    def __init__(self, log: Log, decisions: Decisions) -> None:
        self._log = log
        self._decisions = decisions

    async def trigger(self, agent_id: str, given: Mapping[str, Any], arrival: Arrival) -> Reply:
        """Request a turn. ``given``: the client's fields; 201 it runs, 202 it waits. Raises Problem, LogUnavailable."""
        if arrival.idempotency_key is not None and "id" in given:
            raise invalid("invalid_field", "id", "Give either an id or an Idempotency-Key, which makes one.")
        require_access(arrival.caller, (agent_id, *_named_agents(given)))
        trigger_id = given.get("id") or self._id(agent_id, arrival)
        conversation_id = given.get("conversation_id", trigger_id)
        fields = {
            "type": "trigger",
            "v": SCHEMA_VERSION,
            "id": trigger_id,
            "agent_id": agent_id,
            "conversation_id": conversation_id,
            **without(given, "id", "conversation_id"),
            "requested_by": arrival.caller.subject,
            "content_sha256": digest_of_fields(without(given, "id")),
        }
        if _waits(given):
            fields["decide_before"] = arrival.decide_before()
        command = _outgoing(fields)
        answer = await self._log.write(command, arrival.seconds)
        about = {"agent_id": agent_id, "trigger_id": trigger_id, "conversation_id": conversation_id}
        headers = {"Location": f"/api/agents/{quote(agent_id, safe='')}/triggers/{quote(trigger_id, safe='')}"}
        if answer is None:
            return Reply(202, {**about, **_ACCEPTED, "repeated": False, "log_position": None}, headers)
        first, repetition = await self._first(command, answer)
        about |= repetition
        if first is None:
            if command.decide_before is not None:
                raise _first_unavailable()
            return Reply(202, {**about, **_ACCEPTED}, headers)
        assert isinstance(first, events.Decision)
        about |= _decided(first)
        # Whoever follows it at once must not be told that there is no such trigger, only because tables come later.
        headers["Location"] += f"?min_position={quote(str(about['log_position']), safe='')}"
        refusal = _refusal(first, trigger_id)
        if refusal is not None:
            raise of_refusal(refusal, about)
        status, outcome = _outcome(first, trigger_id)
        if isinstance(first.command, Trigger):
            about["conversation_id"] = first.command.conversation_id
        return Reply(status, {**about, **outcome}, headers)

    async def stop_trigger(self, agent_id: str, trigger_id: str, arrival: Arrival) -> Reply:
        """Stop one trigger: 200 it has ended, 202 its runner was told."""
        decision, about = await self._agent_command(agent_id, {"type": "stop", "trigger_id": trigger_id}, arrival)
        about = {**about, "trigger_id": trigger_id}
        for event in decision.events:
            if isinstance(event, events.Stopped) and event.trigger_id == trigger_id:
                return Reply(200, {**about, "status": "stopped"})
            if isinstance(event, events.StopRequested) and event.trigger_id == trigger_id:
                until = format_instant(event.grace_until)
                return Reply(202, {**about, "status": "stop_requested", "grace_until": until})
        assert decision.ignored is not None
        if decision.ignored.reason == "already_stopping":
            return Reply(202, {**about, "status": "stop_requested"})
        return Reply(200, {**about, "status": decision.ignored.state})

    async def stop_conversation(self, agent_id: str, conversation_id: str, arrival: Arrival) -> Reply:
        """Stop what a conversation has running and waiting: 200 it has ended, 202 its runner was told."""
        given = {"type": "stop", "conversation_id": conversation_id}
        decision, about = await self._agent_command(agent_id, given, arrival)
        told = _stop_told(decision)
        told_before = decision.ignored is not None and decision.ignored.reason == "already_stopping"
        content = {
            **about,
            "conversation_id": conversation_id,
            "status": "stop_requested" if told or told_before else "stopped" if decision.events else "ended",
            "stopped": [event.trigger_id for event in decision.events if isinstance(event, events.Stopped)],
            "stop_requested": told,
            "more": any(isinstance(event, events.StopNoted) for event in decision.events),
        }
        return Reply(202 if told or told_before else 200, content)

    async def control(self, agent_id: str, kind: str, given: Mapping[str, Any], arrival: Arrival) -> Reply:
        """``kind``: the type of a control. 201 when it created the agent, else 200."""
        decision, about = await self._agent_command(agent_id, {"type": kind, **given}, arrival)
        created = any(isinstance(event, events.AgentCreated) for event in decision.events)
        if kind == "configure":
            about = {**about, "created": created, "changed": _changed(decision)}
        return Reply(201 if created else 200, about)

    async def control_trigger(
        self, agent_id: str, trigger_id: str, kind: str, given: Mapping[str, Any], arrival: Arrival
    ) -> Reply:
        """``kind``: approve, reschedule or resume_trigger. 200, also when it ended at once; 202 a resumed one waits."""
        given = {"type": kind, "trigger_id": trigger_id, **given}
        decision, about = await self._agent_command(agent_id, given, arrival)
        about["trigger_id"] = trigger_id
        if decision.ignored is not None:
            return Reply(200, {**about, "status": decision.ignored.state})
        outcome = _control_outcome(decision, trigger_id)
        still_waits = kind == "resume_trigger" and outcome["status"] == "queued"
        return Reply(202 if still_waits else 200, {**about, **outcome})

    async def site_control(
        self, site: str, kind: str, given: Mapping[str, Any], arrival: Arrival
    ) -> tuple[SiteDecision, dict[str, Any]]:
        """``kind``: the type of a control of a site. Its decision, and what every answer says of it."""
        decision, about = await self._command({"site": site}, {"type": kind, **given}, arrival)
        assert isinstance(decision, SiteDecision)
        return decision, about

    async def _agent_command(
        self, agent_id: str, given: Mapping[str, Any], arrival: Arrival
    ) -> tuple[events.Decision, dict[str, Any]]:
        decision, about = await self._command({"agent_id": agent_id}, given, arrival)
        assert isinstance(decision, events.Decision)
        return decision, {**about, "position": about["log_position"]}

    async def _command(
        self, decider: Mapping[str, str], given: Mapping[str, Any], arrival: Arrival
    ) -> tuple[AnyDecision, dict[str, Any]]:
        """Send a stop or control; its decision, and what every answer says of it. Raises Problem, LogUnavailable.

        ``decider``: {"agent_id": id} or {"site": id}.
        """
        fields = {
            "v": SCHEMA_VERSION,
            "id": self._id(next(iter(decider.values())), arrival),
            **decider,
            **given,
            "requested_by": arrival.caller.subject,
            "decide_before": arrival.decide_before(),
        }
        command = _outgoing(fields)
        answer = await self._log.write(command, arrival.seconds)
        assert answer is not None
        first, repetition = await self._first(command, answer)
        if first is None:
            raise _first_unavailable()
        about = {**decider, **repetition, **_decided(first)}
        if first.refusal is not None:
            unknown_site = first.refusal.code == "site_unknown"  # it is what the address names, not where one waits
            raise of_refusal(first.refusal, about, 404 if unknown_site else None)
        about["effect"] = bool(first.events)
        about["reason"] = None if first.ignored is None else first.ignored.reason
        return first, about

    async def _first(self, command: Outgoing, answer: Answer[AnyDecision]) -> tuple[AnyDecision | None, dict[str, Any]]:
        """The decision that answered the command first (None: it can't be read now), and what to say of repetition."""
        ignored = answer.decision.ignored
        repetition: dict[str, Any] = {"repeated": False, "log_position": str(answer.position)}
        if ignored is None or ignored.reason != "duplicate" or ignored.first_seq is None:
            return answer.decision, repetition
        repetition |= {"repeated": True, "state": ignored.state}
        known = self._log.given(command, ignored.first_seq)
        if known is not None:
            return known.decision, repetition
        first = await self._decisions.first_answer(command, ignored.first_seq, answer.position)
        if first is None and ignored.state == "refused":
            raise _first_unavailable()
        return first, repetition

    @staticmethod
    def _id(agent_id: str, arrival: Arrival) -> str:
        key = arrival.idempotency_key
        return new_id() if key is None else id_from_key(agent_id, key, arrival.caller.subject)


_ACCEPTED: Final[Mapping[str, Any]] = {"status": "accepted", "position": None, "reason": None}


def _named_agents(given: Mapping[str, Any]) -> list[str]:
    """Other agents that a trigger refers to: what it waits for tells of them."""
    parent = given.get("parent")
    return [reference["agent_id"] for reference in (*given.get("depends_on", ()), *((parent,) if parent else ()))]


def _outgoing(fields: Mapping[str, Any]) -> Outgoing:
    try:
        return Outgoing.of(fields)
    except pydantic.ValidationError as error:
        raise of_validation(error.errors(include_url=False)) from None


def _first_unavailable() -> Problem:
    return unavailable(
        "first_answer_unavailable",
        "This was decided before, and what was decided can't be read now. Nothing was changed. Try again soon.",
    )


def _waits(given: Mapping[str, Any]) -> bool:
    """Whether the sender of a trigger waits for what is decided (B1, B2, B5); a queued one has no deadline."""
    is_interactive = given.get("interactive") and given.get("kind") not in NEVER_INTERACTIVE
    return bool(is_interactive) and given.get("on_busy") != "queue"


def _refusal(decision: events.Decision, trigger_id: str) -> verdicts.Refusal | None:
    """Why the trigger was refused, at once or on its site's word."""
    for event in decision.events:
        if isinstance(event, events.RefusedLater) and event.trigger_id == trigger_id:
            return verdicts.Refusal(**{name: getattr(event, name) for name in _REFUSED_LATER_FIELDS})
    return decision.refusal


_REFUSED_LATER_FIELDS: Final = sorted(set(events.RefusedLater.model_fields) - {"type", "trigger_id"})


def _decided(decision: AnyDecision) -> dict[str, Any]:
    return {"seq": decision.seq, "decided_at": format_instant(decision.at)}


def _outcome(decision: events.Decision, trigger_id: str) -> tuple[int, dict[str, Any]]:
    """HTTP status, and what became of the trigger in the decision that accepted it."""
    accepted: events.Accepted | None = None
    for event in decision.events:
        match event:
            case events.Accepted() if event.trigger_id == trigger_id:
                accepted = event
            case events.Dispatched() if event.trigger_id == trigger_id:
                return 201, {"position": None, "reason": None, **_running(event)}
            case events.Expired() | events.Stopped() | events.PayloadLost() if event.trigger_id == trigger_id:
                return 202, {"status": outcome_of(event), "position": None, "reason": None}
            case _:
                pass
    assert accepted is not None
    return 202, {
        "status": "queued",
        "position": accepted.position,
        "reason": accepted.reason,
        "available_at": format_instant(accepted.available_at),
    }


def _control_outcome(decision: events.Decision, trigger_id: str) -> dict[str, Any]:
    """What became of a trigger in the decision on a control of it: it waits, runs, or has ended."""
    content: dict[str, Any] = {"status": "queued"}
    for event in decision.events:
        match event:
            case events.Rescheduled() | events.TriggerResumed() if event.trigger_id == trigger_id:
                content["available_at"] = format_instant(event.available_at)
            case events.Dispatched() if event.trigger_id == trigger_id:
                content |= _running(event)
            case events.Expired() | events.Stopped() | events.PayloadLost() if event.trigger_id == trigger_id:
                content["status"] = outcome_of(event)
            case _:
                pass
    return content


def _stop_told(decision: events.Decision) -> list[str]:
    """The trigger whose runner was told by a stop of its conversation, which does that before all else.

    Who is told later in the same decision is told for an interrupt of any conversation, which came meanwhile.
    """
    first = decision.events[0] if decision.events else None
    return [first.trigger_id] if isinstance(first, events.StopRequested) else []


def _running(event: events.Dispatched) -> dict[str, Any]:
    return {
        "status": "running",
        "execution_id": event.execution_id,
        "attempt": event.attempt,
        "slot_number": event.slot_number,
        "forced": event.forced,
        "lease_until": format_instant(event.lease_until),
    }


def _changed(decision: events.Decision) -> dict[str, Any]:
    """The settings that the decision changed, with what holds now."""
    changed: dict[str, Any] = {}
    for event in decision.events:
        if isinstance(event, events.AgentCreated | events.Configured):
            changed |= {
                name: getattr(event, name) for name in type(event).model_fields if name in event.model_fields_set
            }
    return without(changed, "type", "v")
