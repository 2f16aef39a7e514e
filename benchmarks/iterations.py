"""What a plan log tells of a run's iterations: how full they were, how long the executor stood idle between them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from scheduler_svc.plan_log import reader
from scheduler_svc.plan_log.reader import IterationSample


def between(log: Path, begin: float, end: float) -> list[IterationSample]:
    """The iterations planned in a stretch of the monotonic clock, in order."""
    return [sample for sample in reader.iterations(log) if begin <= sample.planned_at < end]


def bubbles(samples: Iterable[IterationSample]) -> list[tuple[float, float]]:
    """(idle, from plan to plan), in seconds, where the executor had work at once: idle is what of the time from one
    plan to the next it was not busy with the first.

    Only where the later one decodes: what decodes there was running already, so there was no wait for a request.
    """
    found = []
    latest: dict[tuple[str, int], IterationSample] = {}
    for sample in samples:
        before = latest.get((sample.lane, sample.epoch))
        latest[sample.lane, sample.epoch] = sample
        if before is not None and sample.iteration == before.iteration + 1 and sample.decodes:
            period = sample.planned_at - before.planned_at
            found.append((period - before.busy_us / 1e6, period))
    return found


def figures(samples: list[IterationSample], token_budget: int) -> dict[str, float]:
    """Shares are between 0 and 1, times in milliseconds."""
    if not samples:
        return {"iterations": 0}
    tokens = np.array([sample.decodes + sample.prefill_tokens for sample in samples])
    prefilling = np.array([sample.prefill_tokens > 0 for sample in samples])
    found: dict[str, float] = {
        "iterations": len(samples),
        "tokens_an_iteration": float(tokens.mean()),
        "decodes_an_iteration": float(np.mean([sample.decodes for sample in samples])),
        "budget_fill": float(tokens.mean()) / token_budget,
        "busy_p50_ms": float(np.percentile([sample.busy_us for sample in samples], 50)) / 1000,
        "device_share_of_busy": sum(s.device_us for s in samples) / max(1, sum(s.busy_us for s in samples)),
    }
    if prefilling.any():
        found["budget_fill_with_prefill"] = float(tokens[prefilling].mean()) / token_budget
    gaps = bubbles(samples)
    if gaps:
        idle = [gap for gap, _ in gaps]
        found |= {f"bubble_p{q}_ms": 1000 * float(np.percentile(idle, q)) for q in (50, 99)}
        found["bubble_share"] = sum(idle) / sum(period for _, period in gaps)
    return found
