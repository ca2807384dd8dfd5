"""docs/operate.md lists every metric that a program has, with its labels, and no label can grow without end."""

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, ProcessCollector

from api.http.metrics import API_METRICS, count_request
from api.http.rights import RIGHTS
from projections.metrics import PROJECTOR_METRICS
from streams.kafka.metrics import WORKER_METRICS

DOCUMENT = (Path(__file__).parents[2] / "docs" / "operate.md").read_text()
BOUNDED = {"partition", "reason", "code", "decider", "state", "forced", "method", "route", "status"}
REGISTRIES = {"worker": WORKER_METRICS, "projector": PROJECTOR_METRICS, "API": API_METRICS}


def described(program: str) -> dict[str, set[str]]:
    """Labels by metric, as the table has them."""
    table = DOCUMENT.partition(f"| **{program}** | | |\n")[2]
    found = {}
    for line in table.splitlines():
        match = re.fullmatch(r"\| `(berth_\w+)` \| ([\w, ]*) ?\| .* \|", line)
        if match is None:
            break
        found[match[1]] = {label.strip() for label in match[2].split(",") if label.strip()}
    return found


def registered(registry: CollectorRegistry) -> dict[str, set[str]]:
    """Labels by metric, as Prometheus will see the name."""
    found = {}
    for collector in list(registry._collector_to_names):
        if isinstance(collector, ProcessCollector):
            continue
        labels = getattr(collector, "_labelnames", None)
        for metric in collector.describe():  # type: ignore[attr-defined]  # all of ours have it
            name = f"{metric.name}_total" if metric.type == "counter" else metric.name
            found[name] = set(labels if labels is not None else metric._labelnames)
    return found


@pytest.mark.parametrize("program", REGISTRIES)
def test_every_metric_is_described_with_its_labels(program: str) -> None:
    assert described(program) == registered(REGISTRIES[program])


def test_labels_come_from_closed_lists() -> None:
    for registry in REGISTRIES.values():
        for name, labels in registered(registry).items():
            assert labels <= BOUNDED, name


def test_whatever_is_asked_the_series_of_requests_are_bounded() -> None:
    for number in range(50):
        count_request(f"METHOD{number}", None, 404, 0.01)
        for method, route in RIGHTS:
            count_request(method, route, 200, 0.01)
    labels = {
        tuple(sample.labels.values())
        for metric in API_METRICS.collect()
        if metric.name == "berth_http_requests"
        for sample in metric.samples
    }
    assert len([label for label in labels if "METHOD" in label[0]]) == 0
    assert ("(other)", "(none)", "404") in labels
    assert {route for _, route, _ in labels} <= {route for _, route in RIGHTS} | {"(none)"}
