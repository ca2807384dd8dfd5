"""Rows rebuilt in memory from everything that partitions wrote, as ``berth recover`` does it from Kafka."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from streams import CLAIMS, DEAD_LETTERS, DECISIONS, INPUT_TOPICS, SIGNALS, SITE_DECISIONS, STATUSES, TRIGGERS, codec
from streams.audit.logged import read
from streams.audit.recover import POSITION_KEY, Rebuilt, changes, stored_texts
from streams.codec import Record
from tests.driving import Driven
from tests.simulation.cluster import Cluster

Records = Mapping[str, Sequence[Record]]
LOGS = (DECISIONS.name, SITE_DECISIONS.name)


def rebuilt_from(
    number: int, partitions: int, records: Records, stored: Mapping[bytes, bytes] | None = None
) -> Rebuilt:
    """From the records of the partition by topic; ``stored``: rows that are left, whose texts may be used."""
    rebuilt = Rebuilt(number, partitions)
    log = [read(topic, number, record.offset, record.value) for topic in LOGS for record in records.get(topic, ())]
    for logged in log:
        rebuilt.take(logged)
    if rebuilt.is_incomplete:
        for logged in log:
            rebuilt.take_again(logged)
    messages = [topic for topic in (CLAIMS.name, SIGNALS.name) if rebuilt.seek_message(topic) is not None]
    takes = [*((topic, rebuilt.take_message) for topic in messages)]
    takes += [(DEAD_LETTERS.name, lambda record: rebuilt.take_dead_letter(dict(record.headers)))]
    takes += [(STATUSES.name, rebuilt.take_status), (TRIGGERS.name, rebuilt.offer_trigger)]
    for agent_id, trigger_id, texts in stored_texts(stored or {}):
        rebuilt.offer_value(agent_id, trigger_id, texts)
    for topic, take in takes:
        for record in records.get(topic, ()):
            take(record)
    return rebuilt


def records_of(driven: Driven) -> Records:
    """What a driven partition has read and written, by topic."""
    found: dict[str, list[Record]] = defaultdict(list)
    for action in driven.journal:
        if action.record is not None:
            found[action.record.topic].append(action.record._replace(timestamp_ms=action.now // 1000))
    for output in driven.outputs:
        if output.topic in (*LOGS, DEAD_LETTERS.name):
            records = found[output.topic]
            records.append(Record(output.topic, driven.number, len(records), output.key, output.value, output.headers))
    return found


def records_at(cluster: Cluster, number: int) -> Records:
    """The same of a partition of a cluster."""
    return {topic: records for (topic, at), records in cluster.log.items() if at == number}


def ends_of(records: Records, rebuilt: Rebuilt | None = None) -> dict[str, tuple[int, int]]:
    """Beginning and end of each input topic, or the first record that is known not to have been handled."""
    unhandled = {} if rebuilt is None else {topic: (0, offset) for topic, offset in rebuilt.unhandled.items()}
    return {topic.name: (0, len(records.get(topic.name, ()))) for topic in INPUT_TOPICS} | unhandled


def differing(stored: Mapping[bytes, bytes], rebuilt: Mapping[bytes, bytes]) -> set[codec.Key]:
    """The keys of the rows that are not the same bytes."""
    return {codec.read_key(key) for key in stored.keys() | rebuilt.keys() if stored.get(key) != rebuilt.get(key)}


def check_same(stored: Mapping[bytes, bytes], rebuilt: Rebuilt, records: Records) -> int:
    """The rebuilt rows are those that are stored, but for what the log doesn't tell; how many differ in that."""
    rows = rebuilt.rows()
    wrong = changes(stored, rows, ends_of(records, rebuilt))
    assert not wrong, {key: (stored.get(key), rows.get(key)) for key in wrong}
    different = differing(stored, rows)
    allowed = {("partition",)}
    for key in different - allowed:
        match key:
            case ("trigger", agent_id, trigger_id):
                row = rebuilt.agents[agent_id].triggers[trigger_id]
                assert row.state == "running", f"only signs of life are not in the log: {key}"
            case ("agent", _) | ("site", _):
                assert b'"todo' in (stored[codec.write_key(key)] + rows[codec.write_key(key)]), key
            case _:
                raise AssertionError((key, stored.get(codec.write_key(key)), rows.get(codec.write_key(key))))
    if ("partition",) in different:
        one, other = (codec.read_partition(some[POSITION_KEY]) for some in (stored, rows))
        assert one.at == other.at
    return len(different)
