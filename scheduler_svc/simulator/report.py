"""The HTML report of a comparison: one file that asks for nothing outside itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np

from scheduler_svc.simulator.charts import Series, line_chart, picked, thinned
from scheduler_svc.simulator.page import html_table, page
from scheduler_svc.simulator.recording import Floats, Recording
from scheduler_svc.simulator.rows import Row
from scheduler_svc.simulator.summary import Summary, table, time_to_first_token


def write_report(
    path: Path,
    workload: Mapping[str, str],
    rows: Sequence[Row],
    recordings: Sequence[Recording],
    summaries: Sequence[Summary],
) -> None:
    """Write the report of some runs, the first of which is the base. Raises OSError."""
    path.write_text(render(workload, rows, recordings, summaries), encoding="utf-8")


def render(
    workload: Mapping[str, str],
    rows: Sequence[Row],
    recordings: Sequence[Recording],
    summaries: Sequence[Summary],
) -> str:
    """The report's HTML."""
    heading, *lines = table([row.name for row in rows], summaries)
    told = ", ".join(f"{name} {value}" for name, value in workload.items())
    charts = "".join(chart(rows, recordings) for chart in CHARTS)
    return page(
        "Simulated scheduling",
        f"""<p class="note">Workload: {escape(told)}.</p>
<h2>Comparison</h2>
<div class="scroll">{html_table(heading, lines)}</div>
<p class="note">Gains are over {escape(rows[0].name)}; by occupancy: the ratio of useful rows per typical iteration.</p>
<h2>Over the run</h2>
<div class="charts">{charts}</div>
<h2>Settings</h2>
<div class="scroll">{_settings(rows)}</div>""",
    )


def _settings(rows: Sequence[Row]) -> str:
    """All settings of the base; of the others what differs."""
    base, *others = [row.settings() for row in rows]
    lines = []
    for key, value in base.items():
        changed = ["" if other[key] == value else str(other[key]) for other in others]
        lines.append([key, str(value), *changed])
    for key in ("overhead_s", "request_s"):
        first, *rest = [getattr(row.cost, key) for row in rows]
        lines.append([key, f"{first:g}", *("" if value == first else f"{value:g}" for value in rest)])
    for name in dict.fromkeys(row.cost.name for row in rows):
        cost = next(row.cost for row in rows if row.cost.name == name)
        lines += [[f"{name}: {key}", str(value), *([""] * len(others))] for key, value in cost.fit.items()]
    return html_table(["", *(row.name for row in rows)], lines, "settings")


def _occupancy(rows: Sequence[Row], recordings: Sequence[Recording]) -> str:
    series = []
    for row, recording in zip(rows, recordings, strict=True):
        values = recording.iterations.column("rows") / recording.seats
        series.append(Series(row.name, *thinned(np.arange(len(values), dtype=np.float64), values)))
    return line_chart("Batch occupancy", "iteration", "rows per seat", series, share=True)


def _over_time(
    title: str, y_label: str, values: Callable[[Row, Recording], Floats], *, share: bool = False
) -> Callable[[Sequence[Row], Sequence[Recording]], str]:
    def draw(rows: Sequence[Row], recordings: Sequence[Recording]) -> str:
        series = [
            Series(row.name, *thinned(recording.iterations.start, values(row, recording)))
            for row, recording in zip(rows, recordings, strict=True)
        ]
        return line_chart(title, "seconds", y_label, series, share=share)

    return draw


def _first_tokens(rows: Sequence[Row], recordings: Sequence[Recording]) -> str:
    series = []
    for row, recording in zip(rows, recordings, strict=True):
        seconds = np.sort(time_to_first_token(recording, row.cost.request_s))
        shares = np.arange(1, len(seconds) + 1) / max(len(seconds), 1)
        series.append(Series(row.name, *picked(np.maximum(seconds, 1e-6), shares)))
    return line_chart("Time to first token", "seconds", "share of requests", series, log_x=True, share=True)


def _inter_token(rows: Sequence[Row], recordings: Sequence[Recording]) -> str:
    """But for the last thousandth, which would squeeze the rest."""
    series = []
    for row, recording in zip(rows, recordings, strict=True):
        seconds, shares = recording.inter_token.curve()
        count = int(shares.searchsorted(0.999)) + 1
        series.append(Series(row.name, *picked(seconds[:count], shares[:count])))
    return line_chart("Inter-token latency", "seconds", "share of tokens", series, log_x=True, share=True)


CHARTS = (
    _occupancy,
    _over_time("Queue", "waiting requests", lambda _, one: one.iterations.column("waiting").astype(np.float64)),
    _over_time(
        "KV blocks in use",
        "share of the pool",
        lambda row, one: one.iterations.column("used_blocks") / row.setup.blocks,
        share=True,
    ),
    _first_tokens,
    _inter_token,
)
