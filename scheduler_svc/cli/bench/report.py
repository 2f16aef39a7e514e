"""The table of a run, and its HTML report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from scheduler_svc.cli.bench.client import Answer
from scheduler_svc.cli.bench.figures import QUANTILES, Floats, Times, good_ones
from scheduler_svc.simulator.charts import Series, line_chart, picked, thinned
from scheduler_svc.simulator.page import html_table, page

LATENCIES = {
    "ttft": "time to first token",
    "itl": "inter-token latency",
    "tpot": "time per output token",
    "e2e": "end to end",
}


def latency_table(found: Mapping[str, Any]) -> list[list[str]]:
    """Milliseconds, below a heading."""
    lines = [["", "mean", *(f"p{q}" for q in QUANTILES)]]
    for name, title in LATENCIES.items():
        if values := found.get(f"{name}_ms"):
            lines.append([f"{title}, ms", *(f"{values[key]:,.1f}" for key in ("mean", *(f"p{q}" for q in QUANTILES)))])
    return lines


def totals(found: Mapping[str, Any]) -> list[list[str]]:
    """Names and values."""
    lines = [["requests answered", f"{found['requests']:,}"], ["requests failed", f"{found['failed']:,}"]]
    if found["requests"]:
        lines += [
            ["duration, s", f"{found['seconds']:,.2f}"],
            ["prompt tokens", f"{found['prompt_tokens']:,}"],
            ["output tokens", f"{found['output_tokens']:,}"],
            ["requests/s", f"{found['requests_per_s']:,.2f}"],
            ["output tokens/s", f"{found['output_tokens_per_s']:,.1f}"],
            ["total tokens/s", f"{found['total_tokens_per_s']:,.1f}"],
        ]
    return lines


def render(told: Mapping[str, str], found: Mapping[str, Any], answers: Sequence[Answer]) -> str:
    """The report's HTML. told: what was asked, in words."""
    errors = [[text, str(count)] for text, count in found["errors"].items()]
    failures = f"<h2>Errors</h2>{html_table(['', 'requests'], errors)}" if errors else ""
    charts = "".join(_charts(good_ones(answers)))
    return page(
        "Load on a server",
        f"""<p class="note">{escape(", ".join(f"{name} {value}" for name, value in told.items()))}.</p>
<h2>Figures</h2>
<div class="scroll">{html_table(["", ""], totals(found))}</div>
<h2>Latency</h2>
<div class="scroll">{html_table(*_split(latency_table(found)))}</div>
{failures}
<h2>Over the run</h2>
<div class="charts">{charts}</div>""",
    )


def _split(lines: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    return lines[0], lines[1:]


def _charts(good: Sequence[Answer]) -> list[str]:
    if not good:
        return ['<p class="note">No request was answered.</p>']
    times = Times.of(good)
    begin = min(answer.sent for answer in good)
    order = np.argsort([answer.sent for answer in good])
    sent = np.array([answer.sent - begin for answer in good])[order]
    named = (("TTFT", times.ttft), ("E2E", times.e2e))
    latencies = [Series(name, *thinned(sent, values[order])) for name, values in named]
    return [
        _distribution("Time to first token", times.ttft),
        _distribution("Inter-token latency", times.itl),
        _distribution("End to end", times.e2e),
        line_chart("Requests under way", "seconds", "requests", [Series("requests", *_under_way(good, begin))]),
        line_chart("Output", "seconds", "events with tokens a second", [Series("output", *_output(good, begin))]),
        line_chart("Latency by the time of the request", "seconds", "seconds", latencies),
    ]


def _distribution(title: str, values: Floats) -> str:
    values = np.maximum(np.sort(values), 1e-6)
    shares = np.arange(1, len(values) + 1) / max(len(values), 1)
    # On a logarithmic axis a narrow range would have no round values.
    is_wide = len(values) > 0 and bool(values[-1] > 4 * values[0])
    return line_chart(title, "seconds", "share", [Series(title, *picked(values, shares))], log_x=is_wide, share=True)


def _under_way(good: Sequence[Answer], begin: float) -> tuple[Floats, Floats]:
    """Steps at each request's begin and end."""
    at = np.array([answer.sent for answer in good] + [answer.ended for answer in good]) - begin
    change = np.repeat([1.0, -1.0], len(good))
    order = np.argsort(at, kind="stable")
    count = np.cumsum(change[order])
    # Two points each: before the step, and behind it.
    return picked(np.repeat(at[order], 2), np.column_stack([count - change[order], count]).ravel())


def _output(good: Sequence[Answer], begin: float) -> tuple[Floats, Floats]:
    """Events in each of a hundred spans, or in each tenth of a second where that is longer."""
    at = np.concatenate([answer.times for answer in good]) - begin
    span = max(0.1, float(at.max()) / 100)
    counts = np.bincount((at / span).astype(np.int64), minlength=math.ceil(float(at.max()) / span))
    return (np.arange(len(counts), dtype=np.float64) + 0.5) * span, counts.astype(np.float64) / span
