"""Positions in the log as ids, and the newest records: everything after a position, or nothing when a part is gone."""

import random

import pytest
from aiokafka import TopicPartition

from api.http import live_log
from api.http.live_log import LOGS, Entry, LogVector, Recent, Wanted
from streams import DECISIONS, SITE_DECISIONS

PARTITIONS = 3
PARTS = len(LOGS) * PARTITIONS


def test_an_id_gives_back_the_vector_that_it_was_made_of() -> None:
    read_to = {TopicPartition(DECISIONS.name, 1): 7, TopicPartition(SITE_DECISIONS.name, 2): 2**40}
    vector = LogVector.of(read_to, PARTITIONS)
    assert vector.offsets == [0, 7, 0, 0, 0, 2**40]
    assert LogVector.read(vector.token(), PARTITIONS).offsets == vector.offsets
    moved = vector.copy()
    moved.move(0, 255)
    assert LogVector.read(moved.token(), PARTITIONS).offsets == [255, *vector.offsets[1:]]
    assert (moved.covers(vector), vector.covers(moved)) == (True, False)


@pytest.mark.parametrize("offsets", [[0] * (PARTS - 1), [0] * (PARTS + 1), [-1] * PARTS])
def test_an_id_of_another_number_of_partitions_or_before_the_beginning_is_refused(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="of this deployment"):
        LogVector.read(LogVector(offsets).token(), PARTITIONS)


def test_what_is_no_id_is_refused(seed: int) -> None:
    chance = random.Random(seed)
    good = LogVector([chance.randrange(2**40) for _ in range(PARTS)]).token()
    for _ in range(2_000):
        place = chance.randrange(len(good))
        changed = good[:place] + chance.choice("+/=, A-_é\x00b") + good[place + 1 :]
        try:
            vector = LogVector.read(changed, PARTITIONS)
        except ValueError:
            continue
        assert vector.token() == changed and all(offset >= 0 for offset in vector.offsets)


def newest(log: list[Entry]) -> list[Entry]:
    found: list[Entry] = []
    for entry in reversed(log):
        if len(found) == 20 or sum(len(one.value) for one in (entry, *found)) > 150:
            break
        found.append(entry)
    return found


def test_the_newest_records_are_all_there_or_it_says_that_they_are_not(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_log, "RECENT_RECORDS_MAX", 20)
    monkeypatch.setattr(live_log, "RECENT_BYTES_MAX", 150)
    chance = random.Random(seed)
    begins = [chance.randrange(5) for _ in range(PARTS)]
    recent, log, ends = Recent(LogVector(begins)), list[Entry](), list(begins)
    kept = missing = 0
    for _ in range(300):
        part = chance.randrange(PARTS)
        ends[part] += chance.choice((0, 0, 1))  # markers of transactions take offsets too
        entry = Entry(part, ends[part], "a", "x" * chance.randrange(30))
        ends[part] += 1
        log.append(entry)
        recent.append(entry)
        back = chance.randint(1, 5)  # often nothing is missing, often something is, whatever the seed
        where = [max(begin, end - chance.randrange(back)) for begin, end in zip(begins, ends, strict=True)]
        after = [entry for entry in log if entry.offset >= where[entry.part]]
        found = recent.since(LogVector(where))
        in_memory = newest(log)
        assert found == (after if all(entry in in_memory for entry in after) else None)
        kept += found is not None
        missing += found is None
    assert kept > 10 and missing > 10
    assert recent.since(LogVector(ends)) == []


def test_who_wants_some_agents_gets_no_sites() -> None:
    of_agent, of_site = Entry(0, 0, "a", "{}"), Entry(3, 0, None, "{}")
    assert [Wanted(None).has(entry) for entry in (of_agent, of_site)] == [True, True]
    assert [Wanted(frozenset("a")).has(entry) for entry in (of_agent, of_site)] == [True, False]
    assert [Wanted(frozenset()).has(entry) for entry in (of_agent, of_site)] == [False, False]
