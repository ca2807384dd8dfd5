"""One agent's decisions as a file that reproduces itself: what it was asked, and what was decided, byte for byte.

JSON lines. The first says what the file is, each following one holds a decision exactly as it lies in Kafka, with its
offset, and the last one counts them. A decision holds its command, without texts of people: those are digests. To
replay a file is to decide its commands again and to compare: nothing else goes in, no clock, no service, and nothing
goes out. Offsets are no part of a decision, so nothing proves them: they must grow, in one partition.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from pydantic import ValidationError
from pydantic_core import from_json, to_json

from streams import DECISIONS
from streams.audit.logged import Logged
from streams.audit.recompute import Recomputer
from streams.rules import events

FORM: Final = "berth_agent_decisions"
VERSION: Final = 1
_DECISION: Final = b',"decision":'
_PLACE: Final = re.compile(rb'\{"partition":(\d{1,10}),"offset":(\d{1,19}),"decision":')


class NoSlice(ValueError):  # noqa: N818 - it reads as what it is
    """The file is none that ``written`` gives, or was cut or changed."""


class NewerForm(NoSlice):
    """A newer Berth wrote it."""


class Difference(NamedTuple):
    """The first decision that comes out otherwise than it was recorded.

    ``recorded`` None: it is missing, another one stands in its line. ``again`` None: that, or the rules fail on it.
    """

    line: int
    seq: int
    recorded: bytes | None
    again: bytes | None
    why: str


class Replayed(NamedTuple):
    """``unknown``: (policy, first seq, last seq) of decisions that were folded only, since their rules are unknown."""

    agent_id: str
    decisions: int
    recomputed: int
    unknown: tuple[tuple[str, int, int], ...]
    difference: Difference | None


def written(agent_id: str, decisions: Iterable[Logged]) -> Iterator[bytes]:
    """The lines of a file with an agent's decisions from its first on."""
    yield _line({"type": FORM, "v": VERSION, "agent_id": agent_id, "topic": DECISIONS.name})
    count, prev = 0, None
    for logged in decisions:
        count += 1
        yield b'{"partition":%d,"offset":%d%s%s}\n' % (logged.partition, logged.offset, _DECISION, logged.value)
        prev = logged.decision.seq
    yield _line({"type": "end", "decisions": count, "last_seq": prev})


def replay(lines: Iterable[bytes]) -> Replayed:
    """Decide a file's commands again, and compare. Raises NoSlice."""
    rest = iter(lines)
    first = next(rest, None)
    if first is None:
        raise NoSlice("it is empty")
    head = _object(1, first)
    agent_id = head.get("agent_id")
    if head.get("type") != FORM or not isinstance(agent_id, str):
        raise NoSlice("it doesn't begin with the line of an agent's decisions")
    form = head.get("v")
    if form != VERSION:
        kind = NewerForm if isinstance(form, int) and form > VERSION else NoSlice
        raise kind(f"it is of form {form}, this version knows {VERSION}")
    recomputer = Recomputer()
    unknown: list[tuple[str, int, int]] = []
    count = recomputed = 0
    place: tuple[int, int] | None = None
    for number, line in enumerate(rest, start=2):
        if _DECISION not in line:
            _check_end(number, _object(number, line), count)
            if next(rest, None) is not None:
                raise NoSlice(f"it goes on after its end in line {number}: it was changed")
            return Replayed(agent_id, count, recomputed, tuple(unknown), None)
        place = _place(number, line, place)
        value, logged = _decision(number, line, agent_id)
        seq = logged.seq
        if seq != count + 1:
            why = f"it is missing: decision {seq} stands in its place"
            return Replayed(agent_id, count, recomputed, tuple(unknown), Difference(number, count + 1, None, None, why))
        try:
            again = recomputer.again(logged, value)
        except (AssertionError, KeyError, ValueError) as error:
            difference = Difference(number, seq, value, None, f"the rules fail on it: {error!r}")
            return Replayed(agent_id, count, recomputed, tuple(unknown), difference)
        if again is None:
            _note_unknown(unknown, logged)
        elif again != value:
            difference = Difference(number, seq, value, again, "it is decided otherwise")
            return Replayed(agent_id, count, recomputed, tuple(unknown), difference)
        else:
            recomputed += 1
        count += 1
    raise NoSlice(f"it ends after {count} decisions without its last line: it was cut")


def _note_unknown(unknown: list[tuple[str, int, int]], logged: events.Decision) -> None:
    if unknown and unknown[-1][0] == logged.policy and unknown[-1][2] == logged.seq - 1:
        unknown[-1] = (logged.policy, unknown[-1][1], logged.seq)
    else:
        unknown.append((logged.policy, logged.seq, logged.seq))


def _check_end(number: int, end: dict[str, object], count: int) -> None:
    if end.get("type") != "end":
        raise NoSlice(f"line {number} is neither a decision nor the end: it was cut or changed")
    if end.get("decisions") != count or end.get("last_seq") != (count or None):
        raise NoSlice(
            f"line {number}, its end, tells of {end.get('decisions')} decisions up to {end.get('last_seq')}, and "
            f"{count} are in it: it was cut or changed"
        )


def _place(number: int, line: bytes, before: tuple[int, int] | None) -> tuple[int, int]:
    """Partition and offset of a line, after those of the line before."""
    found = _PLACE.match(line)
    if found is None:
        raise NoSlice(f"line {number} doesn't begin with a partition and an offset: it was changed")
    partition, offset = int(found[1]), int(found[2])
    if before is not None and (partition != before[0] or offset <= before[1]):
        raise NoSlice(
            f"line {number} is of partition {partition}, offset {offset}, which isn't after partition {before[0]}, "
            f"offset {before[1]} of the line before: it was changed"
        )
    return partition, offset


def _decision(number: int, line: bytes, agent_id: str) -> tuple[bytes, events.Decision]:
    value = line[line.index(_DECISION) + len(_DECISION) :].rstrip(b"\n")[:-1]
    try:
        decision = events.read_decision(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise NoSlice(f"line {number} holds no decision of a known form: {first['loc']}: {first['msg']}") from None
    if decision.agent_id != agent_id:
        raise NoSlice(f"line {number} is a decision of agent {decision.agent_id!r}, the file is of {agent_id!r}")
    return value, decision


def _object(number: int, line: bytes) -> dict[str, object]:
    try:
        found = from_json(line)
    except ValueError:
        raise NoSlice(f"line {number} is no JSON") from None
    if not isinstance(found, dict):
        raise NoSlice(f"line {number} is no JSON object")
    return found


def _line(content: dict[str, object]) -> bytes:
    return to_json(content) + b"\n"
