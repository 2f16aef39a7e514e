"""Line charts as inline SVG, drawn without a library. Colours are CSS classes `s0` … `s7`, defined by the report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 10, 40
MAX_POINTS = 600
NUM_COLOURS = 8


class Series(NamedTuple):
    """A curve; `x` rises."""

    name: str
    x: Floats
    y: Floats


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values from `low` … `high` to places from `start` … `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def place(self, values: Floats) -> Floats:
        low, high = self.low, self.high
        if self.log:
            values, low, high = np.log(np.maximum(values, low)), math.log(low), math.log(high)
        result: Floats = self.start + (values - low) / (high - low) * (self.end - self.start)
        return result

    def ticks(self) -> Floats:
        """Round values within the axis: powers of ten and their double and fivefold, or about five even steps."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if len(decades) <= 3 else (1,)
            values = np.array([step * 10.0**decade for decade in decades for step in steps])
            inside: Floats = values[(values >= self.low * 0.999) & (values <= self.high * 1.001)]
            return inside
        raw = (self.high - self.low) / 5
        unit = 10.0 ** math.floor(math.log10(raw))
        step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= raw * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        ticks: Floats = np.arange(first, last + 1, dtype=np.float64) * step
        return ticks


def line_chart(
    title: str, x_label: str, y_label: str, series: Sequence[Series], *, log_x: bool = False, share: bool = False
) -> str:
    """A figure with its legend. `share`: y runs from 0 to 1 and is told in per cent."""
    drawn = [(i, one) for i, one in enumerate(series) if len(one.x)]
    heading = f"<figure><figcaption>{escape(title)}</figcaption>{_legend([one.name for one in series])}"
    if not drawn:
        return heading + '<p class="note">Nothing to draw.</p></figure>'
    low, high = _range([one.x for _, one in drawn], log_x)
    x_axis = Axis(low, high, LEFT, WIDTH - RIGHT, log_x)
    top = 1.0 if share else 1.05 * max(float(one.y.max()) for _, one in drawn)
    y_axis = Axis(0.0, top if top > 0 else 1.0, HEIGHT - BOTTOM, TOP)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    parts += _grid(x_axis, y_axis, share)
    for i, one in drawn:
        places = zip(x_axis.place(one.x).tolist(), y_axis.place(one.y).tolist(), strict=True)
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline class="{_style(i)}" points="{points}"><title>{escape(one.name)}</title></polyline>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="middle" x="{middle:.0f}" y="{HEIGHT - 6}">{escape(x_label)}</text>')
    turned = f"translate(14 {(HEIGHT - BOTTOM + TOP) / 2:.0f}) rotate(-90)"
    parts.append(f'<text class="middle" transform="{turned}">{escape(y_label)}</text>')
    return heading + "".join(parts) + "</svg></figure>"


def _grid(x_axis: Axis, y_axis: Axis, share: bool) -> list[str]:
    parts = []
    ticks = y_axis.ticks()
    for value, y in zip(ticks.tolist(), y_axis.place(ticks).tolist(), strict=True):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        text = f"{value:.0%}" if share else f"{value:,.6g}"
        parts.append(f'<text class="end" x="{LEFT - 6}" y="{y + 4:.1f}">{text}</text>')
    ticks = x_axis.ticks()
    for value, x in zip(ticks.tolist(), x_axis.place(ticks).tolist(), strict=True):
        parts.append(f'<text class="middle" x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}">{value:,.6g}</text>')
    return parts


def thinned(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """At most `MAX_POINTS` points: the means of runs of neighbours."""
    if len(x) <= MAX_POINTS:
        return x, y
    edges = np.linspace(0, len(x), MAX_POINTS + 1).astype(np.int64)[:-1]
    counts = np.diff(np.append(edges, len(x)))
    return np.add.reduceat(x, edges) / counts, np.add.reduceat(y, edges) / counts


def picked(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """At most `MAX_POINTS` of the points, the first and the last among them: for curves that only rise."""
    if len(x) <= MAX_POINTS:
        return x, y
    chosen = np.linspace(0, len(x) - 1, MAX_POINTS).astype(np.int64)
    return x[chosen], y[chosen]


def _legend(names: Sequence[str]) -> str:
    entries = "".join(
        f'<span><svg class="swatch" viewBox="0 0 24 8"><line class="{_style(i)}" x1="0" x2="24" y1="4" y2="4"/></svg>'
        f"{escape(name)}</span>"
        for i, name in enumerate(names)
    )
    return f'<div class="legend">{entries}</div>'


def _style(index: int) -> str:
    """Colours repeat with dashes."""
    return f"curve s{index % NUM_COLOURS}" + (" dashed" if index // NUM_COLOURS % 2 else "")


def _range(columns: list[Floats], log: bool) -> tuple[float, float]:
    low, high = min(float(one.min()) for one in columns), max(float(one.max()) for one in columns)
    if log:
        low = max(low, 1e-9)
        return (low, high) if high > low * 1.001 else (low / 2, low * 2)
    return (low, high) if high > low else (low, low + 1.0)
