"""What the API tells Prometheus. No label holds an id: addresses are those that are declared."""

from collections.abc import Mapping
from typing import Any, Final

from fastapi import Response
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
API_METRICS = CollectorRegistry()
ProcessCollector(registry=API_METRICS)

REQUESTS = Counter(
    "berth_http_requests",
    "Answered requests by address and status.",
    ["method", "route", "status"],
    registry=API_METRICS,
)
REQUEST_SECONDS = Histogram(
    "berth_http_request_seconds",
    "From a request to the end of its answer; not of /api/events, whose answers last as long as their clients.",
    ["method", "route"],
    buckets=(0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10),
    registry=API_METRICS,
)
LIVE_CLIENTS = Gauge("berth_live_clients", "Clients of /api/events that are connected.", registry=API_METRICS)
LIVE_EVENTS = Counter("berth_live_events", "Decisions that were put into a client's queue.", registry=API_METRICS)
LIVE_ENDS = Counter(
    "berth_live_ends", "Streams that the service ended itself, by reason.", ["code"], registry=API_METRICS
)
LIVE_SLICES = Counter(
    "berth_live_slices", "Parts of the log that were read from Kafka for clients that came back.", registry=API_METRICS
)

READY = Gauge("berth_ready", "Whether Berth as a whole does its work, as /readyz says.", registry=API_METRICS)
PARTITIONS_NOT_RUNNING = Gauge(
    "berth_partitions_not_running", "Partitions that no worker decides for now.", registry=API_METRICS
)
PROJECTION_BEHIND_SECONDS = Gauge(
    "berth_projection_behind_seconds",
    "For how long PostgreSQL has lacked something that is committed.",
    registry=API_METRICS,
)

LIVE_ROUTE: Final = "/api/events"
UNKNOWN_ROUTE: Final = "(none)"
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


def count_request(method: str, route: str | None, status: int, seconds: float) -> None:
    """An answered request; ``route`` None: no address that is declared, ``status`` 0: it was broken off."""
    method = method if method in _METHODS else "(other)"
    route = route or UNKNOWN_ROUTE
    REQUESTS.labels(method, route, status).inc()
    if route != LIVE_ROUTE:
        REQUEST_SECONDS.labels(method, route).observe(seconds)


def answer(readiness: Mapping[str, Any]) -> Response:
    """Numbers of this process, and of what ``/readyz`` reports, as Prometheus reads them."""
    READY.set(readiness["ready"])
    PARTITIONS_NOT_RUNNING.set(sum(said["state"] != "running" for said in readiness["partitions"].values()))
    PROJECTION_BEHIND_SECONDS.set(readiness["projection"]["lag_seconds"])
    return Response(generate_latest(API_METRICS), headers={"Content-Type": CONTENT_TYPE_LATEST})
