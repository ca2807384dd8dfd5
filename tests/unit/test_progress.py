"""The progress of a demo: counts from decisions, and freed -> next from two topics that come in any order."""

import itertools
from typing import Any

import pytest

from api.load.progress import Progress, in_words

Json = dict[str, Any]


def decision(*events: Json, offset: int | None = None, **fields: Any) -> Json:
    cause = {"topic": "berth.statuses", "partition": 3, "offset": offset} if offset is not None else {"timer": {}}
    return {"cause": cause, "events": list(events), **fields}


def event(kind: str, trigger_id: str, **fields: Any) -> Json:
    return {"type": kind, "trigger_id": trigger_id, **fields}


def counts(progress: Progress) -> dict[str, int]:
    found = progress.as_json()
    return {name: found[name] for name in ("started", "waiting", "running", "finished", "failed") if found[name]}


def test_a_trigger_is_counted_in_one_state_at_a_time() -> None:
    progress = Progress("run-", {})
    progress.produced = 1
    steps: list[tuple[Json, dict[str, int]]] = [
        (event("accepted", "run-1"), {"waiting": 1}),
        (event("dispatched", "run-1"), {"started": 1, "running": 1}),
        (event("attempt_failed", "run-1", retry_at="later"), {"started": 1, "waiting": 1}),
        (event("dispatched", "run-1"), {"started": 2, "running": 1}),
        (event("lease_expired", "run-1", retry_at="later"), {"started": 2, "waiting": 1}),
        (event("dispatched", "run-1"), {"started": 3, "running": 1}),
    ]
    for step, expected in steps:
        progress.decision(decision(step), 0.0)
        assert counts(progress) == expected
        assert not progress.is_settled
    progress.decision(decision(event("attempt_failed", "run-1", final=True)), 0.0)
    assert counts(progress) == {"started": 3, "failed": 1}
    assert progress.failures == 3
    assert progress.is_settled


def test_what_others_asked_for_is_not_counted_and_refusals_settle() -> None:
    progress = Progress("run-", {})
    progress.produced = 1
    progress.decision(decision(event("accepted", "other-1"), event("dispatched", "other-1")), 0.0)
    assert counts(progress) == {}
    assert not progress.is_settled
    progress.decision(decision(command_id="run-1", refusal={"code": "agent_backlog_full"}), 0.0)
    assert progress.refused == 1
    assert progress.is_settled


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_freed_to_next_is_paired_by_the_place_of_the_status_in_any_order(order: tuple[int, ...]) -> None:
    progress = Progress("run-", {3: 10})
    ended, begun = event("finished", "other-1"), event("dispatched", "other-2")
    arrivals = [
        lambda: progress.status(3, 10, "finished", 100.000),
        lambda: progress.status(3, 11, "failed", 100.500),
        lambda: progress.decision(decision(ended, begun, offset=10), 100.025),
        lambda: progress.decision(decision(event("attempt_failed", "other-3"), begun, offset=11), 100.900),
    ]
    for index in order:
        arrivals[index]()
    latency = progress.freed_to_next()
    assert latency is not None
    assert (latency.measured, round(latency.p50), round(latency.worst)) == (2, 400, 400)


def test_freed_to_next_leaves_out_places_for_which_nobody_waited_and_statuses_before_the_demo() -> None:
    progress = Progress("run-", {3: 10})
    progress.status(3, 10, "finished", 100.0)
    progress.decision(decision(event("finished", "other-1"), offset=10), 100.1)
    progress.status(3, 11, "running", 100.0)
    progress.decision(decision(event("finished", "other-1"), event("dispatched", "other-2"), offset=9), 100.1)
    assert progress.freed_to_next() is None
    assert "freed→next p50/p99 -" in in_words({"seconds": 1.0, **progress.as_json()})
