"""Turns the figures of a `Stats` message into Prometheus families."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from common.wire import Stats
from scheduler_svc.metrics import CATALOGUE, parse_key

log = structlog.get_logger()

_FAMILIES: dict[str, type[Any]] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}


class StatsCollector(Collector):
    """Collects one `Stats`. A series that is not in the catalogue, or not as it says there, is left out and logged."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        yield from self._families("gauge", self._stats.gauges)
        yield from self._families("counter", self._stats.counters)
        yield from self._families("histogram", self._stats.histograms)

    def _families(self, kind: str, series: Mapping[str, Any]) -> Iterator[Metric]:
        grouped: dict[tuple[str, tuple[str, ...]], list[tuple[dict[str, str], Any]]] = defaultdict(list)
        for key, value in series.items():
            try:
                name, labels = parse_key(key)
                metric = CATALOGUE[name]
                if metric.kind != kind or (kind == "histogram" and len(value) != len(metric.bounds) + 2):
                    raise ValueError(f"{name} is no {kind} of this shape")
            except (KeyError, ValueError) as error:
                log.debug("metric left out", key=key[:100], reason=str(error))
                continue
            grouped[name, tuple(labels)].append((labels, value))
        for (name, label_names), rows in grouped.items():
            family = _FAMILIES[kind](name, CATALOGUE[name].help, labels=label_names)
            for labels, value in rows:
                if kind == "histogram":
                    bounds = [*map(floatToGoString, CATALOGUE[name].bounds), "+Inf"]
                    family.add_metric(list(labels.values()), list(zip(bounds, value, strict=False)), value[-1])
                else:
                    family.add_metric(list(labels.values()), value)
            yield family


def registry_of(stats: Stats | None) -> CollectorRegistry:
    """A registry with one collector, or an empty one before the first beat."""
    registry = CollectorRegistry(auto_describe=False)
    if stats is not None:
        registry.register(StatsCollector(stats))
    return registry
