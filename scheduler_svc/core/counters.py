"""What the core counts. Names and meaning follow the metrics that they feed."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.sequence import WaitReason


class Histogram:
    """Counts by bucket, filled with whole columns at a time."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds, self._bounds_array = bounds, np.array(bounds)
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def observe_all(self, values: NDArray[np.float64]) -> None:
        self._counts += np.bincount(self._bounds_array.searchsorted(values), minlength=len(self._counts))
        self._sum += float(values.sum())

    def cumulative(self) -> tuple[float, ...]:
        """Cumulative bucket counts (the last is +Inf), then the sum."""
        return (*(float(c) for c in self._counts.cumsum()), self._sum)


SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)


@dataclass(slots=True)
class Counters:
    """Running totals since the start of the service; they never fall."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    """Tokens whose KV was given up by preemption."""
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    handover_blocks: int = 0
    """Blocks that came straight from another lane."""
    handovers_done: int = 0
    handovers_failed: int = 0
    """Hand-overs that ended otherwise, also those of sequences that were wanted no more."""
    waited_s: dict[WaitReason, float] = field(default_factory=lambda: {r: 0.0 for r in WaitReason if r.value != "none"})
    """Seconds that all sequences together have waited."""
    iterations: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in a prefix index."""
    prefix_hits: int = 0
    """Of those, found."""
    lanes_lost: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    """Streams by `EndReason` name."""
    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    inter_token_latency: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    e2e_latency: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    queue_time: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    iteration_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))

    def observe_gaps(self, before: NDArray[np.float64], now: float) -> None:
        """Times between tokens. `before`: when each row had its last one, -1 where it had none; mostly all alike."""
        if len(before) and before[0] >= 0 and not np.count_nonzero(before != before[0]):
            self.inter_token_latency.observe(now - float(before[0]), len(before))
        else:
            self.inter_token_latency.observe_all(now - before[before >= 0])
