"""A5, B1, B5: whether a trigger is taken."""

import json
from typing import Any

import pytest

from streams import CONTROLS, TRIGGERS
from streams.rules import events, limits, verdicts
from tests.driving import Driven, Json, at_seconds


def code(decision: events.Decision) -> str | None:
    return decision.refusal.code if decision.refusal else None


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_one_more_than_the_backlog_holds_is_refused(depth: int) -> None:
    """A5: max_backlog_depth bounds those that wait, not the running."""
    driven = Driven(default_limit=1)
    driven.configure(max_backlog_depth=depth)
    for number in range(1 + depth):
        assert code(driven.trigger(f"t{number}")) is None
    refused = driven.trigger("younger")
    assert code(refused) == "agent_backlog_full"
    assert refused.refusal is not None
    assert (refused.refusal.running, refused.refusal.limit, refused.refusal.waiting) == (1, 1, depth)
    assert refused.refusal.position_if_queued == depth + 1
    assert refused.refusal.holders == ("t0",)
    assert driven.final("younger") == "refused"
    driven.finish("t0")
    assert code(driven.trigger("later")) is None
    driven.check()


def test_a_smaller_backlog_drops_nobody_who_waits() -> None:
    """A5: it bounds what comes."""
    driven = Driven(default_limit=1)
    for number in range(5):
        driven.trigger(f"t{number}")
    driven.configure(max_backlog_depth=1)
    assert driven.waiting() == ["t1", "t2", "t3", "t4"]
    assert code(driven.trigger("more")) == "agent_backlog_full"


def test_the_default_backlog_is_a_thousand() -> None:
    """A5: also for the very trigger that creates the agent."""
    driven = Driven(verified=False)
    for number in range(1001):
        assert code(driven.trigger(f"t{number}")) is None
    assert code(driven.trigger("more")) == "agent_backlog_full"


@pytest.mark.parametrize("depth", [-1, 100_001, 1.0, True, "5"])
def test_an_odd_backlog_depth_is_refused(depth: object) -> None:
    """A5: 0..100000."""
    driven = Driven()
    assert code(driven.configure(max_backlog_depth=depth)) == "invalid_record"
    assert code(driven.configure(max_backlog_depth=100_000)) is None


def test_the_backlog_is_bounded_in_bytes_of_payloads() -> None:
    """A5: 64 MiB of payloads; what fits exactly is taken, a small one still fits behind a refused large one."""
    driven = Driven(verified=False)
    driven.trigger("running", payload="x")
    payload = "x" * limits.PAYLOAD_BYTES_MAX
    full = limits.BACKLOG_BYTES_MAX // limits.PAYLOAD_BYTES_MAX
    with driven.held():
        for number in range(full):
            driven.trigger(f"t{number}", payload=payload)
    assert len(driven.waiting()) == full
    refused = driven.trigger("more", payload="y")
    assert code(refused) == "agent_backlog_full"
    assert refused.refusal is not None
    assert refused.refusal.reason == "backlog_bytes_max"
    assert code(driven.trigger("without")) is None
    driven.stop("t3")
    assert code(driven.trigger("again", payload=payload)) is None
    driven.crash()
    assert driven.agent().payload_bytes == limits.BACKLOG_BYTES_MAX


def test_retries_and_resumes_are_never_one_more() -> None:
    """A5: they come back into a full backlog."""
    driven = Driven(default_limit=2)
    driven.configure(max_backlog_depth=1)
    driven.trigger("t1", interactive=True, on_busy="queue")
    driven.trigger("t2")
    driven.trigger("w1")
    driven.status("t1", "paused")
    driven.trigger("w2")
    assert driven.waiting() == ["w2"]
    assert code(driven.control("resume_trigger", trigger_id="t1")) is None
    driven.fail("t2")
    assert (driven.running(), sorted(driven.waiting())) == (["w1", "t1"], ["t2", "w2"])
    assert code(driven.trigger("more")) == "agent_backlog_full"
    driven.check()


def test_a_reply_is_one_more_and_when_refused_the_paused_trigger_stays_paused() -> None:
    """A5, F4."""
    driven = Driven(default_limit=1)
    driven.configure(max_backlog_depth=1)
    driven.trigger("t1", conversation_id="c", interactive=True, on_busy="queue")
    driven.status("t1", "paused")
    driven.trigger("running")
    driven.trigger("waiting")
    refused = driven.trigger("reply", conversation_id="c", interactive=True, on_busy="queue")
    assert code(refused) == "agent_backlog_full"
    assert driven.agent().triggers["t1"].state == "paused"
    driven.check()


def test_what_can_start_at_once_needs_no_room_in_the_backlog() -> None:
    """A5: it never waits."""
    driven = Driven(default_limit=1)
    driven.configure(max_backlog_depth=0)
    assert code(driven.trigger("t1")) is None
    assert driven.running() == ["t1"]
    assert code(driven.trigger("t2")) == "agent_backlog_full"
    assert code(driven.trigger("t3", available_at=at_seconds(60))) == "agent_backlog_full"


@pytest.mark.parametrize("kind", ["task_assigned", "comment_mention", "description_write", "schedule"])
@pytest.mark.parametrize("interactive", [None, False, True])
@pytest.mark.parametrize("on_busy", [None, "", "ask", "queue", "force", "interrupt"])
def test_kinds_nobody_waits_for_always_queue_whatever_on_busy_says(
    kind: str, interactive: bool | None, on_busy: str | None
) -> None:
    """B1: on_busy on them is validated, then ignored."""
    driven = Driven()
    driven.trigger("t1", kind=kind, interactive=interactive, on_busy=on_busy)
    driven.trigger("t2", kind=kind, interactive=interactive, on_busy=on_busy)
    assert (driven.running(), driven.waiting()) == (["t1"], ["t2"])
    assert code(driven.trigger("t3", kind=kind, interactive=interactive, on_busy="later")) == "agent_on_busy_invalid"


@pytest.mark.parametrize("kind", ["task", "chat", "public", "anything"])
def test_any_other_kind_queues_when_it_is_not_interactive(kind: str) -> None:
    """B1: interactive is false unless it is said."""
    driven = Driven()
    driven.trigger("t1", kind=kind)
    driven.trigger("t2", kind=kind, interactive=False, on_busy="ask")
    assert (driven.running(), driven.waiting()) == (["t1"], ["t2"])


@pytest.mark.parametrize("on_busy", ["later", "QUEUE", " queue", "queue ", "x" * 500_000, 5, True, [], {"a": 1}])
@pytest.mark.parametrize("interactive", [True, False])
def test_an_unknown_on_busy_is_refused_before_anything_else(on_busy: object, interactive: bool) -> None:
    """B2, case 114: it would also be late, for an archived agent, with an id in use."""
    driven = Driven(twice=True)
    driven.trigger("t1")
    driven.control("archive")
    decision = driven.trigger(
        "t1", message="other", interactive=interactive, on_busy=on_busy, decide_before=at_seconds(-5)
    )
    assert code(decision) == "agent_on_busy_invalid"
    assert len(driven.values[-1]) < 4096


@pytest.mark.parametrize(
    "fields", [{"worker": False}, {"depends_on": []}, {"approval_required": False}, {"site": "default"},
               {"priority": 5, "execution_class": "background", "restarts": "t0",
                "parent": {"agent_id": "B", "trigger_id": "p"}, "organization_id": "o", "department_id": "d"}]
)  # fmt: skip
def test_what_asks_for_nothing_of_a_site_runs(fields: Json) -> None:
    """E4: gates of a site bind only those that use it; C2: priority and class are stored only."""
    driven = Driven()
    assert code(driven.trigger("t1", **fields)) is None
    row = driven.agent().triggers["t1"]
    if "priority" in fields:
        assert (row.priority, row.execution_class, row.restarts, row.parent) == (5, "background", "t0", ("B", "p"))
        assert driven.dispatch("t1")["execution_class"] == "background"
    driven.check()


# B3: precedence, and what a refusal tells


def test_the_codes_of_refusals_are_given_in_their_order_of_precedence() -> None:
    """B3: a request that is wrong in several ways is told the first."""
    late: Json = {"decide_before": at_seconds(-1)}
    wrongs: list[tuple[str, Json]] = [
        ("agent_on_busy_invalid", {"on_busy": "later"}),
        ("request_expired", late),
        ("trigger_id_conflict", {"message": "other"}),
        ("agent_archived", {}),
    ]
    for first in range(len(wrongs)):
        driven = Driven()
        driven.trigger("t1", message="one")
        driven.control("archive")
        fields: Json = {"interactive": True, "approval_required": True, "message": "one"}
        id = "t1" if first <= 2 else "t2"
        for _, wrong in reversed(wrongs[first:]):
            fields |= wrong
        assert code(driven.trigger(id, **fields)) == wrongs[first][0]


def test_agent_not_found_comes_after_the_id_and_before_everything_else() -> None:
    """B3."""
    driven = Driven()
    value: Json = {"type": "trigger", "v": 1, "id": "t1", "agent_id": "A", "conversation_id": "c", "worker": True}
    http = [("via", b"http")]
    [decision] = driven.send(TRIGGERS.name, value, headers=http)
    assert code(decision) == "agent_not_found"
    [decision] = driven.send(TRIGGERS.name, {**value, "conversation_id": "other"}, headers=http)
    assert code(decision) == "trigger_id_conflict"
    [decision] = driven.send(TRIGGERS.name, value, headers=http)
    assert decision.ignored is not None
    assert (decision.ignored.reason, decision.ignored.state) == ("duplicate", "refused")


def test_every_code_that_a_decider_gives_is_listed() -> None:
    """B3: refusal codes are a closed list."""
    assert len(set(verdicts.REFUSAL_CODES)) == len(verdicts.REFUSAL_CODES)
    given = {"invalid_record", "agent_on_busy_invalid", "request_expired", "trigger_id_conflict", "agent_not_found"}
    given |= {"agent_archived", "agent_backlog_full", "trigger_unknown", "agent_parallelism_limit_unsupported"}
    assert given <= set(verdicts.REFUSAL_CODES)


@pytest.mark.parametrize("count", [1, 20, 21, 30])
def test_a_refusal_names_at_most_twenty_holders_the_oldest_first_and_their_number(count: int) -> None:
    """B3: also after a restart, whatever the order of the rows."""
    driven = Driven(default_limit="unlimited")
    for number in range(count, 0, -1):
        driven.trigger(f"t{number:02}")
    driven.configure(parallelism_limit=1, max_backlog_depth=0)
    oldest = tuple(f"t{number:02}" for number in range(count, 0, -1))[:20]
    for id in ("more", "again"):
        refusal = driven.trigger(id).refusal
        assert refusal is not None
        assert (refusal.holders, refusal.holders_count, refusal.running) == (oldest, count, count)
        driven.rows = dict(sorted(driven.rows.items()))
        driven.crash()


def test_a_refusal_leaves_no_conversation_no_entry_and_no_count() -> None:
    """B3, case 22."""
    driven = Driven()
    driven.configure(max_backlog_depth=0)
    driven.trigger("t1")
    before = driven.state()
    for number in range(5):
        assert code(driven.trigger(f"r{number}")) == "agent_backlog_full"
    assert driven.state() == before
    driven.finish("t1")
    assert driven.running() == []
    assert code(driven.trigger("t2")) is None


# B5


@pytest.mark.parametrize(
    ("topic", "value"),
    [
        (TRIGGERS.name, {"type": "trigger", "conversation_id": "c9"}),
        (TRIGGERS.name, {"type": "stop", "trigger_id": "t1"}),
        (TRIGGERS.name, {"type": "stop", "conversation_id": "c-t1"}),
        (CONTROLS.name, {"type": "pause"}),
        (CONTROLS.name, {"type": "configure", "parallelism_limit": 5}),
        (CONTROLS.name, {"type": "archive"}),
        (CONTROLS.name, {"type": "reschedule", "trigger_id": "t2", "available_at": at_seconds(100)}),
    ],
)
@pytest.mark.parametrize(("seconds", "in_time"), [(-60, False), (0, False), (0.000001, True), (4, True)])
def test_a_command_first_handled_at_or_after_its_deadline_has_no_effect(
    topic: str, value: Json, seconds: float, in_time: bool
) -> None:
    """B5: an answer that would come too late; the instant itself counts as late. Not remembered (F8)."""
    driven = Driven()
    driven.trigger("t1")
    driven.trigger("t2")
    before = driven.state()
    sent: Json = {"v": 1, "id": "x", "agent_id": "A", "requested_by": "u", **value}
    [decision, *_] = driven.send(topic, {**sent, "decide_before": at_seconds(seconds)})
    assert (code(decision) == "request_expired") is not in_time
    assert (driven.state() == before) is not in_time
    if not in_time:
        [decision, *_] = driven.send(topic, sent)
        assert decision.refusal is None
        assert decision.ignored is None


def test_a_repeat_that_comes_late_gets_the_answer_that_was_given_in_time() -> None:
    """B5, F8: only what is first handled late is refused."""
    driven = Driven()
    before = at_seconds(4)
    driven.trigger("t1", decide_before=before)
    stop = {"id": "s1", "trigger_id": "t1", "decide_before": before}
    driven.stop(**stop)
    driven.configure(id="k1", owner="u", decide_before=before)
    driven.skip(10)
    for decision in (
        driven.trigger("t1", decide_before=before),
        driven.stop(**stop),
        driven.configure(id="k1", owner="u", decide_before=before),
    ):
        assert decision.ignored is not None, decision.refusal
        assert decision.ignored.reason == "duplicate"


def test_a_late_conflict_is_late_first() -> None:
    """B3: request_expired before trigger_id_conflict."""
    driven = Driven()
    driven.trigger("t1")
    assert code(driven.trigger("t1", message="x", decide_before=at_seconds(-1))) == "request_expired"
    assert code(driven.trigger("t1", message="x", decide_before=at_seconds(1))) == "trigger_id_conflict"


def test_a_queued_trigger_without_a_deadline_is_accepted_however_late() -> None:
    """B5: once Kafka has it, it is accepted."""
    driven = Driven()
    driven.skip(86_400 * 5)
    decision = driven.trigger("t1", created_at=at_seconds(0))
    assert code(decision) is None
    accepted: Any = decision.events[1]
    assert json.loads(driven.values[0])["events"][1]["created_at"] == at_seconds(0)
    assert accepted.available_at == driven.now - 300 * 1_000_000


@pytest.mark.parametrize("need", [{"worker": True}, {"environment_id": "e"}])
def test_what_waits_for_a_site_is_bounded_too(need: Json) -> None:
    """A5: also while the agent has room for it; asks, which never wait, are not one more."""
    driven = Driven("unlimited", pool=0)
    driven.configure(max_backlog_depth=3)
    driven.trigger("holder", "H", environment_id="e")
    for number in range(3):
        assert code(driven.trigger(f"t{number}", **need)) is None
    assert code(driven.trigger("more", **need)) == "agent_backlog_full"
    assert len(driven.waiting()) == 3
    driven.trigger("ask", **need, interactive=True, on_busy="ask")
    assert "ask" in {event.trigger_id for event in driven.events_of(events.RefusedLater)}
    driven.check()


@pytest.mark.parametrize("named", [None, "standard", "background"])
@pytest.mark.parametrize("parent", ["live", "ended", "other agent", "unknown"])
def test_the_class_is_that_of_a_live_parent_of_the_agent_unless_it_is_named(named: str | None, parent: str) -> None:
    """C2: what the agent can't know is standard; the class goes on to grandchildren."""
    driven = Driven("unlimited")
    driven.trigger("p", execution_class="background")
    driven.trigger("p", "B", execution_class="background")
    if parent == "ended":
        driven.finish("p")
    of = {"agent_id": "B" if parent == "other agent" else "A", "trigger_id": "x" if parent == "unknown" else "p"}
    driven.trigger("child", parent=of, execution_class=named)
    driven.trigger("grandchild", parent={"agent_id": "A", "trigger_id": "child"})
    expected = named or ("background" if parent == "live" else "standard")
    assert driven.agent().triggers["child"].execution_class == expected
    assert driven.dispatch("child").get("execution_class", "standard") == expected
    assert driven.agent().triggers["grandchild"].execution_class == expected
    driven.crash()
    driven.check()
