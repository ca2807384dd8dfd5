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


def asks_and_forces() -> Driven:
    """People who don't wait: refused, forced, interrupting; a serial agent and a run budget."""
    driven = Driven(default_limit=1)
    ask: Json = {"interactive": True, "on_busy": "ask", "decide_before": at_seconds(100)}
    driven.trigger("a1", **ask)
    driven.trigger("a2", **ask)
    driven.trigger("f1", **(ask | {"on_busy": "force"}))
    driven.trigger("f2", **(ask | {"on_busy": "force"}))
    driven.trigger("q1", conversation_id="c-a1")
    driven.trigger("i1", conversation_id="c-a1", interactive=True, on_busy="interrupt")
    driven.status("a1", "stopped")
    driven.status("f1", "paused")
    driven.control("resume_trigger", trigger_id="f1", on_busy="force")
    driven.fail("i1")
    driven.configure("B", serial=True, run_budget=1)
    driven.configure("B", parallelism_limit=2)
    driven.trigger("b1", "B")
    driven.finish("b1", "B")
    driven.trigger("b2", "B")
    driven.configure("B", run_budget=None)
    driven.crash()
    return driven


def dependencies_and_approvals() -> Driven:
    """Who waits for other conversations, and for a person."""
    driven = Driven(default_limit=1)
    before = [{"agent_id": "B", "conversation_id": "c"}]
    driven.trigger("w1", depends_on=before)
    driven.trigger("b1", "B", conversation_id="c", max_attempts=1)
    driven.trigger("w2", "C", depends_on=[*before, {"agent_id": "A", "conversation_id": "c-a"}])
    driven.trigger("a", approval_required=True)
    driven.fail("b1", "B")
    driven.control("approve", trigger_id="w1")
    driven.control("approve", trigger_id="a")
    driven.trigger("b2", "B", conversation_id="c")
    driven.finish("b2", "B")
    driven.finish("w1")
    driven.trigger("a", approval_required=True)
    driven.trigger("w3", depends_on=[{"agent_id": "B", "conversation_id": "d"}])
    driven.stop("w3")
    driven.crash()
    return driven


def workers_and_folders() -> Driven:
    """Claims that wait, are denied, recalled, degraded, given back late; gates, budgets, a pause, a second site."""
    driven = Driven(default_limit=1, pool=2)
    pool: Json = {"worker": True, "organization_id": "o", "department_id": "d"}
    home: Json = {"environment_id": "e", "folder": "/a//b/"}
    driven.trigger("a1", **pool, **home)
    driven.trigger("b1", "B", **pool, **(home | {"folder": "/a"}))
    driven.trigger("c1", "C", interactive=True, on_busy="ask", **pool, **home)
    driven.trigger("x1", "X", worker=True, site="elsewhere")
    driven.site_control("gate", scope="organization", name="o", run_budget=1)
    driven.site_control("gate", scope="department", name="d", enabled=False)
    driven.site_control("gate", scope="department", name="d", enabled=False)
    driven.finish("a1")
    driven.site_control("gate", scope="department", name="d", enabled=True)
    driven.site_control("delete_folder", environment_id="e", path="/a")
    driven.trigger("c2", "C", **home)
    driven.site_control("pause_site")
    driven.site_control("delete_environment", environment_id="e")
    driven.site_control("resume_site")
    driven.site_control("configure_site", "elsewhere", capacity=1)
    driven.site_control("gate", "nowhere", scope="organization", name="o", run_budget=1)
    driven.finish("b1", "B")
    driven.configure("D", parallelism_limit=1)
    driven.delivers = False
    driven.trigger("d1", "D", worker=True)
    driven.deliver()
    driven.site_control("pause_site")
    driven.trigger("d2", "D")
    driven.deliver(len(driven.undelivered))
    driven.advance(31)
    driven.delivers = True
    driven.site_control("resume_site")
    driven.crash()
    return driven


SCENARIOS: Final[tuple[Callable[[], Driven], ...]] = (
    one_life,
    settings_and_gates,
    stops_and_replies,
    leases_and_forgetting,
    bad_records,
    many_at_once,
    asks_and_forces,
    dependencies_and_approvals,
    workers_and_folders,
)
SLICED: Final = (one_life, settings_and_gates, stops_and_replies, many_at_once)
"""Of these, agent A is recorded as a file of its own as well."""
