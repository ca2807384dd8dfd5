"""What a worker tells Prometheus. No label holds an id of anybody: partitions, and reasons from closed lists.

Counters are raised when a transaction is committed, so that they tell what happened and not what was tried. What is
there now (running, waiting and why) is counted when somebody asks.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Final

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from streams import DEAD_LETTERS, DECISIONS, SITE_DECISIONS
from streams.census import CLAIMED, WAITING_FOR, census
from streams.codec import Output
from streams.kafka import edge
from streams.partition import Partition
from streams.tally import Tally

disable_created_metrics()  # type: ignore[no-untyped-call]
WORKER_METRICS: Final = CollectorRegistry()
ProcessCollector(registry=WORKER_METRICS)
CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

_MOMENTS: Final = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 15)

HANDLED = Counter(
    "berth_records_handled", "Input records whose decision was committed.", ["partition"], registry=WORKER_METRICS
)
TRANSACTIONS = Counter("berth_transactions", "Committed transactions.", ["partition"], registry=WORKER_METRICS)
COMMIT_SECONDS = Histogram(
    "berth_commit_seconds",
    "Time of one transaction, from its beginning to its end.",
    buckets=_MOMENTS,
    registry=WORKER_METRICS,
)
RESTORE_SECONDS = Histogram(
    "berth_restore_seconds",
    "Time to restore one partition.",
    buckets=(0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300),
    registry=WORKER_METRICS,
)
RULE_FAILURES = Counter(
    "berth_rule_failures", "Failures of the rules themselves: bugs.", ["partition"], registry=WORKER_METRICS
)
DECISIONS_MADE = Counter(
    "berth_decisions", "Committed decisions, of agents and of sites.", ["partition", "decider"], registry=WORKER_METRICS
)
REFUSALS = Counter(
    "berth_refusals", "Commands of agents that were refused, by code.", ["code"], registry=WORKER_METRICS
)
DEAD_LETTERS_WRITTEN = Counter(
    "berth_dead_letters", "Records that could not be read at all.", ["partition"], registry=WORKER_METRICS
)
IGNORED_STATUSES = Counter(
    "berth_ignored_statuses", "Statuses that changed nothing, by reason.", ["reason"], registry=WORKER_METRICS
)
FORGOTTEN = Counter(
    "berth_forgotten_ids",
    "Remembered ids that were forgotten: a repeat of one is a new command.",
    registry=WORKER_METRICS,
)
LAG = Gauge(
    "berth_lag_records",
    "Input records that are there and not handled yet.",
    ["partition"],
    registry=WORKER_METRICS,
)
READY = Gauge("berth_partition_ready", "Whether the partition decides.", ["partition"], registry=WORKER_METRICS)


class FreedToNext(Collector):
    """A histogram for many values at once: one of prometheus-client's takes a lock for each, at every decision."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_MOMENTS) + 1)
        self._sum_ms = 0
        self._bounds_ms = [1000 * bound for bound in _MOMENTS]

    def observe(self, freed_at_ms: Iterable[int], now_ms: int) -> None:
        """The slots that were freed then are in use again now."""
        for at_ms in freed_at_ms:
            passed_ms = max(0, now_ms - at_ms)  # the runner's clock may be ahead
            self._counts[bisect_left(self._bounds_ms, passed_ms)] += 1
            self._sum_ms += passed_ms

    def describe(self) -> Iterable[Metric]:
        return [self._family()]

    def collect(self) -> Iterable[Metric]:
        family = self._family()
        bounds = (*map(str, map(float, _MOMENTS)), "+Inf")
        family.add_metric([], list(zip(bounds, accumulate(self._counts), strict=True)), self._sum_ms / 1000)
        return [family]

    @staticmethod
    def _family() -> HistogramMetricFamily:
        return HistogramMetricFamily(
            "berth_freed_to_next_seconds",
            "From the status that freed a slot being written to Kafka until the dispatch that took it was committed.",
            labels=[],
        )


FREED_TO_NEXT: Final = FreedToNext()
WORKER_METRICS.register(FREED_TO_NEXT)


class OfPartition:
    """The counters of one partition, looked up once: a transaction may be the smallest one can make."""

    def __init__(self, number: int) -> None:
        self._handled = HANDLED.labels(number)
        self._transactions = TRANSACTIONS.labels(number)
        self._of_agents = DECISIONS_MADE.labels(number, "agent")
        self._of_sites = DECISIONS_MADE.labels(number, "site")
        self._dead_letters = DEAD_LETTERS_WRITTEN.labels(number)
        self.rule_failures = RULE_FAILURES.labels(number)

    def committed(self, outputs: Iterable[Output], handled_count: int, tally: Tally, seconds: float) -> int:
        """A transaction that took so long was just committed; how many dead letters were in it."""
        COMMIT_SECONDS.observe(seconds)
        self._transactions.inc()
        self._handled.inc(handled_count)
        topics = [output.topic for output in outputs]
        self._of_agents.inc(topics.count(DECISIONS.name))
        if sites_count := topics.count(SITE_DECISIONS.name):
            self._of_sites.inc(sites_count)
        if dead_count := topics.count(DEAD_LETTERS.name):
            self._dead_letters.inc(dead_count)
        _count_by(REFUSALS, tally.refusals)
        _count_by(IGNORED_STATUSES, tally.ignored_statuses)
        if tally.forgotten:
            FORGOTTEN.inc(tally.forgotten)
        if tally.freed_at_ms:
            FREED_TO_NEXT.observe(tally.freed_at_ms, edge.now_us() // 1000)
        return dead_count


def _count_by(counter: Counter, counts: Mapping[str, int]) -> None:
    for label, count in counts.items():
        counter.labels(label).inc(count)


class Present(Collector):
    """What runs and waits in the partitions that this worker decides for, counted when it is asked for."""

    def __init__(self) -> None:
        self._partitions: dict[int, Partition] = {}

    def begin(self, partition: Partition) -> None:
        self._partitions[partition.number] = partition

    def end(self, partition: Partition) -> None:
        """Nothing if another has taken its place already."""
        if self._partitions.get(partition.number) is partition:
            del self._partitions[partition.number]

    def describe(self) -> Iterable[Metric]:
        return self._families()

    def collect(self) -> Iterable[Metric]:
        waiting, running, paused, claims, remembered = families = self._families()
        now = edge.now_us()
        for number, partition in sorted(self._partitions.items()):
            label = str(number)
            counted = census(partition.agents.values(), partition.sites.values(), max(now, partition.at))
            for reason in WAITING_FOR:
                waiting.add_metric([label, reason], counted.waiting[reason])
            running.add_metric([label, "yes"], counted.forced)
            running.add_metric([label, "no"], counted.running - counted.forced)
            paused.add_metric([label], counted.paused)
            for state in CLAIMED:
                claims.add_metric([label, state], counted.claims[state])
            remembered.add_metric([label], counted.remembered)
        return families

    @staticmethod
    def _families() -> tuple[GaugeMetricFamily, ...]:
        return (
            GaugeMetricFamily("berth_waiting_triggers", "Triggers that wait, by why.", labels=["partition", "reason"]),
            GaugeMetricFamily("berth_running_attempts", "Attempts that have a slot.", labels=["partition", "forced"]),
            GaugeMetricFamily("berth_paused_triggers", "Triggers that wait for a reply.", labels=["partition"]),
            GaugeMetricFamily(
                "berth_site_claims", "Claims at sites, by how they stand.", labels=["partition", "state"]
            ),
            GaugeMetricFamily("berth_remembered_ids", "Ids whose answer is remembered.", labels=["partition"]),
        )


PRESENT: Final = Present()
WORKER_METRICS.register(PRESENT)


def as_text() -> bytes:
    """Everything, as Prometheus reads it."""
    return generate_latest(WORKER_METRICS)
