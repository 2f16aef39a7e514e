"""The HTML report of a comparison: one file that asks for nothing outside itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np

from scheduler_svc.simulator.charts import Series, line_chart, picked, thinned
from scheduler_svc.simulator.recording import Floats, Recording
from scheduler_svc.simulator.rows import Row
from scheduler_svc.simulator.summary import Summary, table, time_to_first_token

STYLE = """
:root { color-scheme: light dark; --ink: #1d2129; --soft: #636b78; --line: #dfe3e9; --paper: #ffffff;
  --panel: #f6f7f9;
  --s0: #2463c4; --s1: #c2540a; --s2: #1d7f4e; --s3: #a32a86; --s4: #8a6d00; --s5: #0b7f8c;
  --s6: #b3261e; --s7: #5b5f97 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --soft: #9aa3b2; --line: #343a45; --paper: #14171c;
  --panel: #1c2027; --s0: #74a7f7; --s1: #f2994f; --s2: #5fc68f; --s3: #e58bd0; --s4: #d9be4f; --s5: #5cc8d3;
  --s6: #f28b82; --s7: #a9addf } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1360px;
  margin: 0 auto; padding: 24px }
h1 { font-size: 22px; margin: 0 0 4px } h2 { font-size: 17px; margin: 28px 0 10px }
.note { color: var(--soft); margin: 0 }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: 4px 14px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left } tbody th { font-weight: 400; color: var(--soft) }
.settings td { white-space: normal; text-align: left } .settings th { text-align: left }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr)); gap: 18px }
figure { margin: 0; padding: 14px; background: var(--panel); border-radius: 8px }
figcaption { font-weight: 600; margin-bottom: 4px }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 13px; color: var(--soft) }
.legend span { display: inline-flex; align-items: center; gap: 6px } .swatch { width: 24px; height: 8px }
figure > svg { width: 100%; height: auto; display: block } svg text { fill: var(--soft); font-size: 11px }
.end { text-anchor: end } .middle { text-anchor: middle }
.grid { stroke: var(--line) } .curve { fill: none; stroke-width: 1.8; stroke-linejoin: round }
.dashed { stroke-dasharray: 6 4 }
""" + "".join(f".s{i} {{ stroke: var(--s{i}) }}\n" for i in range(8))


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
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Gilir: simulated scheduling</title>
<style>{STYLE}</style>
</head>
<body>
<h1>Simulated scheduling</h1>
<p class="note">Workload: {escape(told)}.</p>
<h2>Comparison</h2>
<div class="scroll">{_table(heading, lines)}</div>
<p class="note">Gains are over {escape(rows[0].name)}; by occupancy: the ratio of useful rows per typical iteration.</p>
<h2>Over the run</h2>
<div class="charts">{charts}</div>
<h2>Settings</h2>
<div class="scroll">{_settings(rows)}</div>
</body>
</html>
"""


def _table(heading: Sequence[str], lines: Sequence[Sequence[str]], kind: str = "") -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in heading)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for first, *cells in lines
    )
    return f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


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
    return _table(["", *(row.name for row in rows)], lines, "settings")


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
