"""What the API's /readyz says of the projection: how far it is in the logs of agents and of sites."""

import pytest
from aiokafka import TopicPartition

from api.http.database import Database
from api.http.readiness import Bounds, Readiness
from streams import DECISIONS, SITE_DECISIONS


@pytest.mark.parametrize("topic", [DECISIONS.name, SITE_DECISIONS.name])
async def test_a_projection_that_is_behind_in_either_log_is_told_with_what_comes_next(topic: str) -> None:
    database = Database("postgresql://nobody@127.0.0.1:1/nothing")
    database.next_offsets = {0: 9, 1: 9}
    database.site_next_offsets = {0: 9, 1: 9}
    readiness = Readiness("127.0.0.1:1", 2, database, Bounds(projection_lag_seconds_max=-1))
    logs = [TopicPartition(name, number) for name in (DECISIONS.name, SITE_DECISIONS.name) for number in (0, 1)]
    readiness._ends = dict.fromkeys(logs, 10)  # behind the last record is the marker of its transaction
    readiness._compare()
    assert readiness.report()["projection"] == {
        "lag_records": 0,
        "lag_seconds": 0.0,
        "next_offsets": {"0": 9, "1": 9},
        "site_next_offsets": {"0": 9, "1": 9},
    }
    readiness._ends[TopicPartition(topic, 1)] = 15
    readiness._compare()
    report = readiness.report()
    assert report["projection"]["lag_records"] == 5
    (told,) = [reason for reason in report["reasons"] if "projection" in reason]
    assert f"it would apply {topic} partition 1 offset 9 next" in told
    offsets = database.next_offsets if topic == DECISIONS.name else database.site_next_offsets
    offsets[1] = 14
    readiness._compare()
    assert not [reason for reason in readiness.report()["reasons"] if "projection" in reason]
