"""Writes the figures of a `Stats` message in Prometheus' text format, version 0.0.4.

By hand: clients scrape several times a second, and a stream's next token waits while this is written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import structlog

from common.wire import Stats
from scheduler_svc.metrics import CATALOGUE, escape, parse_key

log = structlog.get_logger()

MAX_SERIES = 1 << 14
"""So many keys are remembered as they were read."""


def render(stats: Stats) -> bytes:
    """All families, each with its help and type. A series that is not as the catalogue says is left out and logged."""
    families: dict[str, list[str]] = defaultdict(list)
    for kind, series in (("gauge", stats.gauges), ("counter", stats.counters), ("histogram", stats.histograms)):
        _add(families, kind, series)
    lines = []
    for name, rows in families.items():
        metric = CATALOGUE[name]
        shown = f"{name}_total" if metric.kind == "counter" else name
        text = metric.help.replace("\\", "\\\\").replace("\n", "\\n")
        lines += [f"# HELP {shown} {text}", f"# TYPE {shown} {metric.kind}", *rows]
    return "".join(f"{line}\n" for line in lines).encode()


def _add(families: dict[str, list[str]], kind: str, series: Mapping[str, Any]) -> None:
    for key, value in series.items():
        try:
            name, labels = _read(key)
            metric = CATALOGUE[name]
            if metric.kind != kind or (kind == "histogram" and len(value) != len(metric.bounds) + 2):
                raise ValueError(f"{name} is no {kind} of this shape")
        except (KeyError, ValueError) as error:
            log.debug("metric left out", key=key[:100], reason=str(error))
            continue
        if kind == "histogram":
            families[name] += _histogram(name, labels, metric.bounds, value)
        else:
            families[name].append(f"{name}{'_total' * (kind == 'counter')}{_braced(labels)} {float(value)!r}")


def _histogram(name: str, labels: str, bounds: tuple[float, ...], value: tuple[float, ...]) -> list[str]:
    edges = [*(repr(bound) for bound in bounds), "+Inf"]
    before = f"{labels}," if labels else ""
    lines = [
        f'{name}_bucket{{{before}le="{edge}"}} {float(count)!r}' for edge, count in zip(edges, value[:-1], strict=True)
    ]
    counts = f"{name}_count{_braced(labels)} {float(value[-2])!r}"
    return [*lines, counts, f"{name}_sum{_braced(labels)} {float(value[-1])!r}"]


def _braced(labels: str) -> str:
    return f"{{{labels}}}" if labels else ""


@lru_cache(MAX_SERIES)
def _read(key: str) -> tuple[str, str]:
    """A key's name, and its labels as they are written between the braces, sorted. Raises ValueError on other text."""
    name, labels = parse_key(key)
    return name, ",".join(f'{label}="{escape(value)}"' for label, value in sorted(labels.items()))
