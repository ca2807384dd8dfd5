"""The benchmark's own judgement: what a run showed, what must never be, and whether a target was met."""

from pathlib import Path
from typing import Any

import pytest

from tests.bench.report import BEGIN, END, Runs, machine, markdown, verdicts, write_into
from tests.bench.workloads import Run, Workload, account, faults, item_id, item_of, lanes, workload

MILLISECOND = 1_000_000
TWO = Workload("two", [("agent-0", 0), ("agent-0", 1)], limit=1)


def run(number: int, started_ms: int, done_ms: int, agent: str = "agent-0") -> Run:
    return Run(agent, number, started_ms * MILLISECOND, done_ms * MILLISECOND)


def test_freed_to_next_is_from_one_completion_to_the_next_start_of_the_agent() -> None:
    found = account([run(0, 0, 50), run(1, 58, 100)], TWO, capped=False)
    assert (found["p50_ms"], found["max_ms"], found["running_max"], found["order_inversions"]) == (8.0, 8.0, 1, 0)
    assert faults(found) == []


@pytest.mark.parametrize(
    ("runs", "wrong"),
    [
        ([run(0, 0, 10), run(0, 20, 30), run(1, 40, 50)], ["twice 1"]),
        ([run(0, 0, 10)], ["missing 1"]),
        ([run(0, 0, 10), run(1, 20, 30), run(7, 40, 50)], ["foreign 1"]),
        ([run(0, 0, 10), run(1, 9, 30)], ["limit 1 passed: 2 at once"]),
    ],
)
def test_what_must_never_be_is_found(runs: list[Run], wrong: list[str]) -> None:
    assert faults(account(runs, TWO, capped=False)) == wrong


def test_a_start_in_the_moment_of_an_end_passes_no_limit_and_a_capped_run_may_miss_items() -> None:
    assert faults(account([run(0, 0, 10), run(1, 10, 20)], TWO, capped=False)) == []
    assert faults(account([run(0, 0, 10)], TWO, capped=True)) == []


def test_the_workloads_are_those_that_other_systems_were_measured_with() -> None:
    shapes = {
        name: (len(workload(name).items), len(workload(name).agents), workload(name).limit, len(workload(name).backlog))
        for name in ("w1", "w1c", "w2", "w3", "w3e")
    }
    assert shapes == {
        "w1": (20_000, 64, 2, 0),
        "w1c": (2_560, 64, 2, 0),
        "w2": (640, 16, 1, 0),
        "w3": (120, 101, 1, 100_100),
        "w3e": (120, 1, 1, 0),
    }


def test_an_agents_items_are_sent_by_one_client_in_order() -> None:
    items = workload("w1c").items
    divided = lanes(items)
    assert sorted(item for lane in divided for item in lane) == sorted(items)
    for lane in divided:
        for agent in {agent for agent, _ in lane}:
            numbers = [number for other, number in lane if other == agent]
            assert numbers == sorted(numbers)
    agents = [{agent for agent, _ in lane} for lane in divided]
    assert sum(map(len, agents)) == len(set().union(*agents))
    assert [item_of(item_id(item)) for item in items] == items


def results(**values: list[dict[str, Any]]) -> Runs:
    return {name.replace("_", " ", 1): found for name, found in values.items()}


def test_a_target_is_judged_by_the_median_and_shows_the_worst() -> None:
    runs = results(
        berth_w2=[{"p50_ms": 14.0, "p99_ms": 90.0}, {"p50_ms": 30.0, "p99_ms": 20.0}, {"p50_ms": 15.0, "p99_ms": 80.0}],
        floor_w2=[{"p50_ms": 10.0, "p99_ms": 50.0}, {"p50_ms": 11.0, "p99_ms": 40.0}, {"p50_ms": 10.0, "p99_ms": 50.0}],
    )
    p50, p99 = verdicts(runs)
    assert (p50.median, p50.worst, p50.is_met) == (1.5, 3.0, True)
    assert (p99.median, p99.worst, p99.is_met) == (1.6, 1.8, False)


def test_rates_must_reach_their_target_and_what_was_not_measured_is_not_judged() -> None:
    found = verdicts(results(berth_w1=[{"admitted_per_second": 2_400}, {"admitted_per_second": 2_600}]))
    assert [(verdict.target.what, verdict.median, verdict.worst, verdict.is_met) for verdict in found] == [
        ("W1", 2_500, 2_400, True)
    ]


def test_the_tables_replace_what_stands_between_the_marks_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    measured = {**account([run(0, 0, 50), run(1, 58, 100)], TWO, capped=False), "other_cpu": 0.02}
    runs: Runs = {"berth w2": [measured], "berth takeover": [{"last_seconds": 6.4, "other_cpu": 0.01}]}
    write_into(page, markdown(runs, machine()))
    written = page.read_text()
    assert written.startswith(f"before\n{BEGIN}\n")
    assert written.endswith(f"{END}\nafter\n")
    assert "old" not in written
    assert "| berth w2 |" in written
    assert "| take-over after kill -9, session timeout 6 s | ≤ 7 s | 6.4 s |" in written
    page.write_text("nothing to replace")
    with pytest.raises(ValueError, match="no marks"):
        write_into(page, "new")
