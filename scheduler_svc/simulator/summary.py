"""What a recording amounts to: the numbers of the comparison table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.simulator.cost_model import CostModel
from scheduler_svc.simulator.iteration import FEATURES
from scheduler_svc.simulator.recording import Recording

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Summary:
    """Numbers of one run. Latencies in seconds as a client sees them; nan where there was nothing to measure."""

    requests: int
    """That were answered in full."""
    refused: int
    makespan_s: float
    """From the first arrival to the end of the last iteration."""
    iterations: int
    tokens_per_s: float
    """Generated tokens over the makespan."""
    requests_per_s: float
    occupancy: float
    """Mean rows per seat over the time in which lanes were at work."""
    useful_rows: float
    """Mean number of rows, at any moment of the makespan, that the iterations under way give a token."""
    typical_iteration_s: float
    """What the cost model says of the mean iteration, weighted by time."""
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p90_s: float
    itl_p99_s: float
    e2e_p50_s: float
    e2e_p99_s: float
    preemptions: int
    recomputed_tokens: int
    swapped_blocks: int
    prefix_hit_share: float
    """Of the prompt tokens, those found in the prefix cache at the first admission."""
    fairness_gap: float
    """See `FairnessMeter.gap`, in weighted tokens; nan with one tenant."""
    kv_waste: float
    """Of the token positions in allocated blocks, those that hold nothing, over time."""
    deadline_misses: float
    """Share of the requests that ended after their deadline; nan where they have none."""


def summarise(recording: Recording, cost: CostModel) -> Summary:
    """Sum up a run that had this cost model."""
    request_s = cost.request_s
    iterations, workload = recording.iterations, recording.workload
    seconds = iterations.seconds
    done = recording.finished
    start = float(np.nanmin(recording.submitted_at)) if len(workload) else 0.0
    makespan = max(recording.end - start, 0.0)
    ttft = time_to_first_token(recording, request_s)
    e2e = (recording.last_token_at - recording.submitted_at)[done] + request_s
    seats_s = float(seconds.sum()) * recording.seats
    held = float((iterations.column("held_positions") * seconds).sum())
    hits = recording.cached >= 0
    return Summary(
        requests=int(done.sum()),
        refused=int(recording.refused.sum()),
        makespan_s=makespan,
        iterations=len(iterations),
        tokens_per_s=_ratio(float(recording.generated.sum()), makespan),
        requests_per_s=_ratio(float(done.sum()), makespan),
        occupancy=_ratio(float((iterations.column("rows") * seconds).sum()), seats_s),
        useful_rows=_ratio(float((iterations.column("useful") * seconds).sum()), makespan),
        typical_iteration_s=_typical_iteration(recording, cost),
        ttft_p50_s=_quantile(ttft, 0.5),
        ttft_p90_s=_quantile(ttft, 0.9),
        ttft_p99_s=_quantile(ttft, 0.99),
        itl_p50_s=recording.inter_token.quantile(0.5),
        itl_p90_s=recording.inter_token.quantile(0.9),
        itl_p99_s=recording.inter_token.quantile(0.99),
        e2e_p50_s=_quantile(e2e, 0.5),
        e2e_p99_s=_quantile(e2e, 0.99),
        preemptions=recording.preemptions,
        recomputed_tokens=recording.recomputed_tokens,
        swapped_blocks=int(iterations.column("swapped_blocks").sum()),
        prefix_hit_share=_ratio(float(recording.cached[hits].sum()), float(workload.prompt_lengths[hits].sum())),
        fairness_gap=recording.fairness.gap if workload.num_tenants > 1 else math.nan,
        kv_waste=_ratio(held - float((iterations.column("written_positions") * seconds).sum()), held),
        deadline_misses=_deadline_misses(recording, request_s),
    )


def _typical_iteration(recording: Recording, cost: CostModel) -> float:
    iterations = recording.iterations
    weights = iterations.seconds / max(float(iterations.seconds.sum()), 1e-12)
    work = [float((iterations.column(name) * weights).sum()) for name in FEATURES[1:]]
    return cost.seconds(*work) + cost.overhead_s


def time_to_first_token(recording: Recording, request_s: float) -> Floats:
    """Seconds for each request that got a token."""
    ttft: Floats = recording.first_token_at - recording.submitted_at
    return ttft[~np.isnan(ttft)] + request_s


def _deadline_misses(recording: Recording, request_s: float) -> float:
    deadlines = recording.workload.deadlines_ms
    if deadlines is None:
        return math.nan
    took = recording.last_token_at - recording.submitted_at + request_s
    return float(np.mean(~(recording.finished & (took <= deadlines / 1000))))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan


def _quantile(values: Floats, share: float) -> float:
    return float(np.quantile(values, share)) if len(values) else math.nan


class Gain(NamedTuple):
    """Throughput of one run over another's."""

    predicted: float
    """By occupancy: a useful row gets a token an iteration, so throughput is the mean number of useful rows over the
    time of a typical iteration. Where iterations cost the same, only the rows differ: the argument of Orca (OSDI'22)
    for changing the batch at every iteration."""
    measured: float


def gain(summary: Summary, base: Summary) -> Gain:
    """How a run compares with the base."""
    predicted = _ratio(summary.useful_rows, base.useful_rows)
    predicted *= _ratio(base.typical_iteration_s, summary.typical_iteration_s)
    return Gain(predicted, _ratio(summary.tokens_per_s, base.tokens_per_s))


class Metric(NamedTuple):
    """A line of the table."""

    title: str
    show: Callable[[Summary, Summary], str]
    """Of (this run, the base)."""


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.1f} %"


def _seconds(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{1000 * value:,.1f} ms" if value < 1 else f"{value:,.2f} s"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"


def _field(name: str, form: Callable[[float], str]) -> Callable[[Summary, Summary], str]:
    return lambda summary, _: form(getattr(summary, name))


METRICS = (
    Metric("requests answered", _field("requests", _count)),
    Metric("requests refused", _field("refused", _count)),
    Metric("makespan", _field("makespan_s", _seconds)),
    Metric("iterations", _field("iterations", _count)),
    Metric("tokens/s", _field("tokens_per_s", _number)),
    Metric("requests/s", _field("requests_per_s", _number)),
    Metric("batch occupancy", _field("occupancy", _share)),
    Metric("useful rows", _field("useful_rows", _number)),
    Metric("typical iteration", _field("typical_iteration_s", _seconds)),
    Metric("gain by occupancy", lambda summary, base: f"{gain(summary, base).predicted:.3f} x"),
    Metric("gain measured", lambda summary, base: f"{gain(summary, base).measured:.3f} x"),
    Metric("TTFT p50", _field("ttft_p50_s", _seconds)),
    Metric("TTFT p90", _field("ttft_p90_s", _seconds)),
    Metric("TTFT p99", _field("ttft_p99_s", _seconds)),
    Metric("ITL p50", _field("itl_p50_s", _seconds)),
    Metric("ITL p90", _field("itl_p90_s", _seconds)),
    Metric("ITL p99", _field("itl_p99_s", _seconds)),
    Metric("end to end p50", _field("e2e_p50_s", _seconds)),
    Metric("end to end p99", _field("e2e_p99_s", _seconds)),
    Metric("preemptions", _field("preemptions", _count)),
    Metric("recomputed tokens", _field("recomputed_tokens", _count)),
    Metric("swapped blocks", _field("swapped_blocks", _count)),
    Metric("prefix hits", _field("prefix_hit_share", _share)),
    Metric("fairness gap", _field("fairness_gap", _number)),
    Metric("KV waste", _field("kv_waste", _share)),
    Metric("deadline misses", _field("deadline_misses", _share)),
)


def table(names: Sequence[str], summaries: Sequence[Summary]) -> list[list[str]]:
    """The comparison, with a heading: one line a metric, one column a run; the first run is the base."""
    lines = [["", *names]]
    lines += [[metric.title, *(metric.show(one, summaries[0]) for one in summaries)] for metric in METRICS]
    return lines


def as_text(lines: list[list[str]]) -> str:
    """The table with aligned columns."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = []
    for line in lines:
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        text.append("  ".join(cells).rstrip())
    return "\n".join(text) + "\n"


def as_object(name: str, settings: dict[str, Any], summary: Summary, base: Summary) -> dict[str, Any]:
    """A run as a JSON object; what could not be measured is null."""
    values = {name: getattr(summary, name) for name in summary.__slots__}
    compared = gain(summary, base)
    values["occupancy_ratio"] = _ratio(summary.useful_rows, base.useful_rows)
    values |= {"predicted_gain": compared.predicted, "measured_gain": compared.measured}
    clean = {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in values.items()}
    return {"name": name, **clean, "settings": settings}
