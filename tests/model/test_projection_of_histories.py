"""The rows for readers are the fold of the log (I8): of random histories, of clusters with faults, of recorded logs."""

import random

import pytest

from projections.store import LogRecord
from tests.golden.files import replayed
from tests.golden.scenarios import SCENARIOS
from tests.histories import SITES, History
from tests.projected import READERS, Shelf, as_dicts, check_agent_rows, check_site_rows
from tests.simulation.checker import Checker
from tests.simulation.test_simulation import live_with_faults, swarm

HISTORIES = 12
CLUSTERS = 30
STEPS = 250


@pytest.mark.parametrize("number", range(HISTORIES))
def test_rows_of_a_random_history_are_what_the_rules_hold_at_every_point(number: int, seed: int) -> None:
    chance = random.Random(f"{seed} {number}")
    history = History(seed * HISTORIES + number, partitions=chance.choice([1, 2, 3]))
    shelf = Shelf()
    records: list[LogRecord] = []
    for _ in range(10):
        new = history.live(STEPS // 10).records()
        records += new
        shelf.apply_in_batches(new, chance)
        for agent_id in history.agents:
            check_agent_rows(shelf.rows, history.agent(agent_id), agent_id)
        for site_id in SITES:
            check_site_rows(shelf.rows, history.site(site_id), site_id)
    anew = Shelf()
    anew.apply(record for record in records if record.topic in READERS)
    assert as_dicts(anew.rows) == as_dicts(shelf.rows), "built anew they are the same"


@pytest.mark.parametrize("number", range(CLUSTERS))
def test_rows_of_a_cluster_with_faults_are_what_its_next_owners_restore(number: int, seed: int) -> None:
    """Crashes, zombies and repeated input leave one log, and the rows are those of its fold."""
    cluster, commands = swarm(seed * CLUSTERS + number)
    live_with_faults(cluster, Checker(cluster), commands)
    shelf = Shelf()
    for (topic, partition), records in cluster.log.items():
        if topic in READERS:
            log = [LogRecord(topic, partition, one.offset, one.key, one.value, one.headers, 0) for one in records]
            shelf.apply_in_batches(log, cluster.random)
    for owned in range(cluster.partitions):
        restored = cluster.restored(owned, cluster.now)
        for agent_id, agent in restored.agents.items():
            check_agent_rows(shelf.rows, agent, agent_id)
        for site in restored._sites:
            check_site_rows(shelf.rows, site, site.site_id)


@pytest.mark.parametrize("name", [scenario.__name__ for scenario in SCENARIOS])
def test_rows_of_a_recorded_log_are_what_the_rules_hold(name: str) -> None:
    driven = replayed(name)
    shelf = Shelf()
    for offset, output in enumerate(driven.outputs):
        if output.topic in READERS:
            shelf.apply([LogRecord(output.topic, 0, offset, output.key, output.value, (), 0)])
    for agent_id, agent in driven.partition.agents.items():
        check_agent_rows(shelf.rows, agent, agent_id)
    for site in driven.partition._sites:
        check_site_rows(shelf.rows, site, site.site_id)
    assert len(shelf.rows.decisions) == len(driven.decisions)
    assert len(shelf.rows.site_decisions) == len(driven.site_decisions)
