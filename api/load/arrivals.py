"""When work arrives and how long it lasts: from a trace of real requests, or from a seeded generator with bursts.

Pure: the same file, or the same seed, gives the same arrivals. A trace is a CSV file with the columns TIMESTAMP,
ContextTokens and GeneratedTokens, as the public traces of language model services have them: timestamps without a
zone are UTC, with up to seven decimals of which six are kept, and the last line may end without a newline. Only the
distance between timestamps matters. How long an attempt works follows from the tokens that were generated.

The generator alternates calm times and bursts (a Poisson process of two rates, with exponentially distributed
lengths), because steady arrivals never show a queue. Its tokens follow the distribution of the conversation trace
"Azure LLM inference trace 2023": log-normal with a median of 129, cut at 1,000.
"""

import csv
import math
import random
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

SECONDS_PER_TOKEN_DEFAULT: Final = 0.01
TOKENS_MEDIAN: Final = 129
TOKENS_SIGMA: Final = 0.99
TOKENS_MAX: Final = 1_000
CALM_SECONDS: Final = 20.0
BURST_SECONDS: Final = 5.0
BURST_FACTOR: Final = 3.0
"""Arrivals per second in a burst, as a multiple of the mean over calm times and bursts."""
CALM_FACTOR: Final = (CALM_SECONDS + BURST_SECONDS - BURST_FACTOR * BURST_SECONDS) / CALM_SECONDS

assert CALM_FACTOR > 0, "bursts must leave something for the calm times"


class Arrival(NamedTuple):
    """One request for work: when it comes, in seconds after the first one, and how long an attempt at it works."""

    after_seconds: float
    work_seconds: float


class TraceRefused(ValueError):  # noqa: N818 - it reads as what it is
    """The file is no trace; the text says which line and why."""


def read_trace(path: Path, seconds_per_token: float = SECONDS_PER_TOKEN_DEFAULT) -> list[Arrival]:
    """The arrivals of a trace, in the order of their timestamps. Raises TraceRefused, or OSError."""
    with path.open(encoding="utf-8-sig", newline="") as lines:
        rows = csv.reader(lines)
        try:
            time_column, tokens_column = _columns(next(rows, []))
            instants = sorted(
                _instant_and_tokens(row, time_column, tokens_column, rows.line_num) for row in rows if row
            )
        except (UnicodeDecodeError, csv.Error) as error:
            raise TraceRefused(f"line {rows.line_num + 1}: not a CSV file in UTF-8 ({error})") from error
    if not instants:
        raise TraceRefused("it has no requests")
    first = instants[0][0]
    return [Arrival((at - first).total_seconds(), tokens * seconds_per_token) for at, tokens in instants]


def generate(rate: float, seed: int, seconds_per_token: float = SECONDS_PER_TOKEN_DEFAULT) -> Iterator[Arrival]:
    """Arrivals without end: ``rate`` per second on average, in bursts."""
    chance = random.Random(seed)  # noqa: S311 - chance that can be repeated is what is wanted
    now, is_burst, changes_at = 0.0, False, chance.expovariate(1 / CALM_SECONDS)
    while True:
        yield Arrival(now, _tokens(chance) * seconds_per_token)
        # The time to the next arrival, spent piece by piece at the rate of the time that it falls into.
        left = chance.expovariate(1.0)
        while (room := (changes_at - now) * rate * (BURST_FACTOR if is_burst else CALM_FACTOR)) < left:
            left -= room
            now, is_burst = changes_at, not is_burst
            changes_at = now + chance.expovariate(1 / (BURST_SECONDS if is_burst else CALM_SECONDS))
        now += left / (rate * (BURST_FACTOR if is_burst else CALM_FACTOR))


def sped_up(arrivals: Iterable[Arrival], speed: float) -> Iterator[Arrival]:
    """The same with time running ``speed`` times as fast: arrivals closer together, work shorter."""
    return (Arrival(arrival.after_seconds / speed, arrival.work_seconds / speed) for arrival in arrivals)


def _columns(header: list[str]) -> tuple[int, int]:
    names = [name.strip() for name in header]
    if "TIMESTAMP" not in names or "GeneratedTokens" not in names:
        raise TraceRefused("line 1: the columns TIMESTAMP and GeneratedTokens are needed")
    return names.index("TIMESTAMP"), names.index("GeneratedTokens")


def _instant_and_tokens(row: list[str], time_column: int, tokens_column: int, line: int) -> tuple[datetime, float]:
    try:
        at = datetime.fromisoformat(row[time_column].strip())
        tokens = float(row[tokens_column])
    except (IndexError, ValueError) as error:
        raise TraceRefused(f"line {line}: {','.join(row)!r} can't be read ({error})") from error
    if not (math.isfinite(tokens) and tokens >= 0):
        raise TraceRefused(f"line {line}: {row[tokens_column]!r} is no number of tokens")
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC), tokens


def _tokens(chance: random.Random) -> int:
    return max(1, min(TOKENS_MAX, round(chance.lognormvariate(math.log(TOKENS_MEDIAN), TOKENS_SIGMA))))
