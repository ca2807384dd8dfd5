"""What the projector tells Prometheus."""

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

disable_created_metrics()  # type: ignore[no-untyped-call]
PROJECTOR_METRICS: Final = CollectorRegistry()
ProcessCollector(registry=PROJECTOR_METRICS)
CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

LAG_RECORDS = Gauge(
    "berth_projection_lag_records", "Records that are committed and not projected yet.", registry=PROJECTOR_METRICS
)
LAG_SECONDS = Histogram(
    "berth_projection_lag_seconds",
    "From a decision to its rows.",
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60, 600),
    registry=PROJECTOR_METRICS,
)
DECISIONS_APPLIED = Counter("berth_projection_decisions", "Decisions applied.", registry=PROJECTOR_METRICS)
BATCH_SECONDS = Histogram(
    "berth_projection_batch_seconds",
    "Time of one batch: its rows and its checkpoints in one transaction of PostgreSQL.",
    buckets=(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 15),
    registry=PROJECTOR_METRICS,
)
DRIFT_CHECKS = Counter(
    "berth_projection_drift_checks",
    "Agents and sites whose rows were compared with the fold of their decisions.",
    ["decider"],
    registry=PROJECTOR_METRICS,
)
DRIFTS = Counter(
    "berth_projection_drifts", "Those whose rows say something else.", ["decider"], registry=PROJECTOR_METRICS
)
HEAD_CHECKS = Counter(
    "berth_row_head_checks",
    "Stored rows of agents and sites whose newest decision was compared with the log.",
    ["decider"],
    registry=PROJECTOR_METRICS,
)
HEAD_DRIFTS = Counter(
    "berth_row_head_drifts",
    "Those whose newest decision is another in the log.",
    ["decider"],
    registry=PROJECTOR_METRICS,
)
for _metric in (DRIFT_CHECKS, DRIFTS, HEAD_CHECKS, HEAD_DRIFTS):
    for _decider in ("agents", "sites"):
        _metric.labels(decider=_decider)  # there from the start, so that a first one shows as an increase
READY = Gauge(
    "berth_projector_ready", "Whether the projector follows the log and nothing is wrong.", registry=PROJECTOR_METRICS
)


def as_text(is_ready: bool) -> bytes:
    """Everything, as Prometheus reads it."""
    READY.set(is_ready)
    return generate_latest(PROJECTOR_METRICS)
