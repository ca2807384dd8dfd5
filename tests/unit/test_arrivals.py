"""Arrivals: what a trace says, and what the generator promises."""

from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.load.arrivals import BURST_FACTOR, Arrival, TraceRefused, generate, read_trace, sped_up

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def trace(directory: Path, text: str) -> Path:
    path = directory / "trace.csv"
    path.write_bytes(text.encode())
    return path


def test_a_trace_with_seven_decimals_and_a_last_line_without_newline(tmp_path: Path) -> None:
    path = trace(
        tmp_path,
        HEADER + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
        "2023-11-16 18:15:51.2224670,879,55",
    )
    assert read_trace(path, seconds_per_token=0.5) == [
        Arrival(0.0, 22.0),
        Arrival(4.314579, 54.5),
        Arrival(4.541877, 27.5),
    ]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_line_ends_a_byte_order_mark_and_empty_lines_make_no_difference(
    tmp_path: Path, newline: str, start: str
) -> None:
    text = f"{start}TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,2\n\n2023-11-16 18:15:47,1,3\n"
    path = trace(tmp_path, text.replace("\n", newline))
    assert read_trace(path, 1.0) == [Arrival(0.0, 2.0), Arrival(1.0, 3.0)]


def test_without_a_zone_it_is_utc_and_requests_are_put_in_order_of_time(tmp_path: Path) -> None:
    path = trace(
        tmp_path, HEADER + "2023-11-16 18:00:03,1,3\n2023-11-16 19:00:01+01:00,1,1\n2023-11-16T18:00:02Z,1,2\n"
    )
    assert read_trace(path, 1.0) == [Arrival(0.0, 1.0), Arrival(1.0, 2.0), Arrival(2.0, 3.0)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "line 1: the columns"),
        ("time,tokens\n1,2\n", "line 1: the columns"),
        (HEADER, "no requests"),
        (HEADER + "2023-11-16 18:15:46,1,2\nyesterday,1,2\n", "line 3"),
        (HEADER + "2023-11-16 18:15:46,1\n", "line 2"),
        (HEADER + "2023-11-16 18:15:46,1,many\n", "line 2"),
        (HEADER + "2023-11-16 18:15:46,1,-4\n", "line 2"),
        (HEADER + "2023-11-16 18:15:46,1,nan\n", "line 2"),
    ],
)
def test_what_is_no_trace_is_refused_with_the_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(TraceRefused, match=says):
        read_trace(trace(tmp_path, text))


def test_a_file_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(HEADER.encode() + b"2023-11-16 18:15:46,1,2\xff\n")
    with pytest.raises(TraceRefused, match="UTF-8"):
        read_trace(path)


@given(st.lists(st.tuples(st.integers(0, 10**13), st.integers(0, 10_000)), min_size=1, max_size=30))
def test_any_trace_written_is_read_back_to_the_microsecond(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int]]
) -> None:
    begin = datetime(2023, 1, 1, tzinfo=UTC)
    lines = [f"{begin + timedelta(microseconds=at):%Y-%m-%d %H:%M:%S.%f}0,1,{tokens}" for at, tokens in rows]
    path = trace(tmp_path_factory.mktemp("trace"), HEADER + "\n".join(lines))
    first = min(at for at, _ in rows)
    expected = [Arrival((at - first) / 1e6, float(tokens)) for at, tokens in sorted(rows)]
    assert read_trace(path, 1.0) == expected


def test_time_can_run_faster() -> None:
    assert list(sped_up([Arrival(0.0, 8.0), Arrival(10.0, 4.0)], 4.0)) == [Arrival(0.0, 2.0), Arrival(2.5, 1.0)]


def test_the_same_seed_gives_the_same_arrivals_and_another_seed_others(seed: int) -> None:
    assert list(islice(generate(10, seed), 200)) == list(islice(generate(10, seed), 200))
    assert list(islice(generate(10, seed), 200)) != list(islice(generate(10, seed + 1), 200))


def test_the_generator_keeps_its_mean_rate_has_bursts_and_calm_times_and_never_goes_back() -> None:
    count, rate = 200_000, 50.0
    arrivals = list(islice(generate(rate, seed=1), count))
    assert all(one.after_seconds <= other.after_seconds for one, other in pairwise(arrivals))
    assert arrivals[0].after_seconds == 0
    assert count / arrivals[-1].after_seconds == pytest.approx(rate, rel=0.15)
    per_second = [0] * (int(arrivals[-1].after_seconds) + 1)
    for arrival in arrivals:
        per_second[int(arrival.after_seconds)] += 1
    bursts = sum(count > (BURST_FACTOR - 1) * rate for count in per_second) / len(per_second)
    assert 0.1 < bursts < 0.3  # a fifth of the time
    works = sorted(arrival.work_seconds for arrival in arrivals)
    assert works[len(works) // 2] == pytest.approx(1.29, rel=0.05)
    assert works[0] > 0
    assert works[-1] <= 10
