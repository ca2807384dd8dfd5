"""A cluster with faults whose rows are lost again and again, and rebuilt from the log: nothing of it shows."""

import os

import pytest

from streams import codec
from streams.audit.recover import POSITION_KEY
from tests.recoveries import LOGS, check_same, rebuilt_from, records_at
from tests.simulation.checker import Checker
from tests.simulation.cluster import Cluster
from tests.simulation.test_simulation import live_with_faults, live_without_faults, settle, swarm

SEEDS = int(os.environ.get("BERTH_SIMULATION_SEEDS", "0")) // 10 or 12


class Losing(Checker):
    """After every twelfth check of a partition its rows are gone: they are rebuilt, and a new owner takes over."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.recovered = 0
        self.differed = 0

    def check(self, number: int) -> None:
        super().check(number)
        if self.cluster.random.random() < 1 / 12:
            self.recover(number)

    def recover(self, number: int) -> None:
        cluster = self.cluster
        stored = cluster.rows[number]
        if POSITION_KEY not in stored or not any(cluster.log[topic, number] for topic in LOGS):
            return
        records = records_at(cluster, number)
        rebuilt = rebuilt_from(number, cluster.partitions, records)
        assert rebuilt.lost() == []
        self.differed += check_same(stored, rebuilt, records)
        self.recovered += 1
        cluster.rows[number] = rebuilt.rows()
        cluster.zombies.pop(number, None)
        cluster.owners[number] = None
        positions = codec.read_partition(cluster.rows[number][POSITION_KEY]).positions
        cluster.positions[number] = {topic: positions.get(topic, 0) for topic in cluster.positions[number]}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(SEEDS))
def test_rows_that_are_lost_at_any_moment_come_back_and_everything_ends(number: int, seed: int) -> None:
    cluster, commands = swarm(seed + number)
    checker = Losing(cluster)
    live_with_faults(cluster, checker, commands)
    for partition in range(cluster.partitions):
        checker.recover(partition)
    settle(cluster)
    left = live_without_faults(cluster, checker)
    assert not left, f"never ended: {left[:5]}"
    checker.check_end()
    assert checker.recovered > 0
