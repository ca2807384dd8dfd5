"""What the recorded logs hold: short lives of agents, so that each command, event and row occurs at least once."""

from collections.abc import Callable
from typing import Final

from streams import CONTROLS, STATUSES, TRIGGERS
from tests.driving import Driven, Json, at_seconds

PERSON: Final[Json] = {"interactive": True, "on_busy": "queue", "kind": "chat"}


def one_life() -> Driven:
    """Created by a trigger, queued, finished, failed and retried to the end; repeats and conflicts."""
    driven = Driven(default_limit=1)
    driven.trigger("t1", message="Zdravo 👋", payload={"z": 1, "a": [True, None, 1.5]}, requested_by="user-1")
    driven.trigger("t2", conversation_id="c-t1", created_at=at_seconds(-1.000001), priority=3)
    driven.trigger("t3", max_attempts=2, execution_class="background", parent={"agent_id": "B", "trigger_id": "p"})
    driven.trigger("t3", max_attempts=2)
    driven.trigger("t3", max_attempts=2, execution_class="background", parent={"agent_id": "B", "trigger_id": "p"})
    driven.advance(1)
    driven.status("t1", "running")
    driven.finish("t1", result={"tokens": 12})
    driven.fail("t2", error="out of disk", phase="preparation")
    driven.fail("t3", error="again")
    driven.advance(3600)
    driven.finish("t1")
    driven.crash()
    return driven


def settings_and_gates() -> Driven:
    """Configured, limits up and down, paused, resumed, archived, revived, parked, unparked."""
    driven = Driven(default_limit="unlimited")
    driven.configure(parallelism_limit=2, owner="user-1", display_name="Écrivain", default_timeout_seconds=60)
    for number in range(5):
        driven.trigger(f"t{number}")
    driven.configure(parallelism_limit="unlimited", max_backlog_depth=3)
    driven.configure(parallelism_limit=1, owner=None)
    driven.configure(parallelism_limit=1)
    driven.control("pause")
    driven.trigger("w1")
    driven.control("pause")
    driven.finish("t0")
    driven.control("resume")
    driven.configure(parallelism_limit=True)
    driven.configure(serial=True)
    driven.control("archive")
    driven.trigger("late")
    driven.advance(61)
    driven.configure()
    driven.trigger("new")
    driven.trigger("full1")
    for number in range(4):
        driven.trigger(f"full{number}")
    return driven


def stops_and_replies() -> Driven:
    """Stops of every kind, pauses, replies, resumes, moves in time, expiry."""
    driven = Driven(default_limit=2)
    driven.trigger("t1", conversation_id="c", **PERSON)
    driven.status("t1", "paused", result="Which one?")
    driven.trigger("t2", conversation_id="c", **PERSON)
    driven.trigger("t3", conversation_id="c")
    driven.trigger("t4")
    driven.trigger("t5", expires_at=at_seconds(30))
    driven.trigger("t6", available_at=at_seconds(3600))
    driven.trigger("t10", available_at=at_seconds(500), expires_at=at_seconds(20))
    driven.stop("t2", requested_by="user-2")
    driven.stop("t2")
    driven.status("t2", "stopped")
    driven.status("t3", "paused")
    driven.control("resume_trigger", trigger_id="t3")
    driven.control("reschedule", trigger_id="t6", available_at=at_seconds(10))
    driven.advance(31)
    driven.stop(conversation_id="c")
    driven.advance(60)
    driven.stop("t1")
    driven.stop("nobody")
    driven.control("resume_trigger", trigger_id="t4")
    driven.trigger("t7", interactive=True)
    driven.trigger("t8", on_busy="later")
    driven.trigger("t9", decide_before=at_seconds(1))
    return driven


def leases_and_forgetting() -> Driven:
    """Signs of life, silence, absences, take-overs, and what is forgotten after days."""
    driven = Driven(default_limit=3)
    driven.trigger("quiet", heartbeat_seconds=10)
    driven.trigger("long", timeout_seconds=100, heartbeat_seconds=30)
    driven.trigger("lost", timeout_seconds=60, max_attempts=1)
    for _ in range(20):
        driven.advance(25)
        driven.status("long", "heartbeat")
    driven.crash()
    driven.advance(40)
    driven.advance(2 * 3600)
    driven.finish("long")
    driven.advance(91 * 86_400)
    return driven


def bad_records() -> Driven:
    """Everything that can't be read, with what becomes of it."""
    driven = Driven(partitions=8, number=2)
    trigger = {"type": "trigger", "v": 1, "id": "t", "agent_id": "ab", "conversation_id": "c"}
    for value in (None, b"", b"{", b"[]", b"\xff", {}, trigger | {"v": 2}, trigger | {"id": ""}, trigger | {"kind": 7}):
        driven.send(TRIGGERS.name, value, key=b"ab")
    driven.send(TRIGGERS.name, trigger | {"message": "lone \ud800 and nul \x00", "payload": "\udfff"})
    driven.send(TRIGGERS.name, trigger | {"agent_id": "elsewhere"})
    driven.send(TRIGGERS.name, trigger | {"id": "t2"}, key=None, headers=[("via", b"http")])
    driven.send(TRIGGERS.name, trigger | {"id": "t2"}, key=None, headers=[("origin", b"{}")])
    driven.send(STATUSES.name, {"type": "status", "v": 1, "agent_id": "ab"})
    driven.send(CONTROLS.name, {"type": "dance", "v": 1, "id": "k", "agent_id": "ab", "requested_by": "u"})
    driven.send("berth.claims", {})
    driven.send("berth.site-controls", None, key=b"default")
    return driven


def many_at_once() -> Driven:
    """More than one step may do: places, starts, stops, an archive with a crash in between."""
    driven = Driven(default_limit=1)
    for number in range(75):
        driven.trigger(f"t{number:03}", conversation_id=f"c{number % 65}")
    for number in range(52):
        driven.trigger(f"f{number:03}", conversation_id="later", available_at=at_seconds(5))
    driven.configure(parallelism_limit="unlimited")
    driven.advance(5)
    driven.crash()
    driven.stop(conversation_id="later")
    driven.control("archive")
    driven.advance(60)
    return driven


SCENARIOS: Final[tuple[Callable[[], Driven], ...]] = (
    one_life,
    settings_and_gates,
    stops_and_replies,
    leases_and_forgetting,
    bad_records,
    many_at_once,
)
