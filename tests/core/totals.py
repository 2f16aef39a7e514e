"""What the core has counted for all its models together."""

from __future__ import annotations

from typing import NamedTuple

from scheduler_svc.core import Scheduler


class Totals(NamedTuple):
    """Sums over the models, under the names of `ModelCounters`."""

    preemptions: int
    prompt_tokens: int
    generation_tokens: int
    prefix_queries: int
    prefix_hits: int


def totals(scheduler: Scheduler) -> Totals:
    """As of now."""
    each = [queue.counters for queue in scheduler.queues.values()]
    return Totals(*(sum(getattr(counters, name) for counters in each) for name in Totals._fields))
