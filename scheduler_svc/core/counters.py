"""What the core counts. Names and meaning follow the metrics that they feed."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.sequence import Sequence, WaitReason


class Histogram:
    """Counts by bucket, filled with whole columns at a time."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds, self._bounds_array = bounds, np.array(bounds)
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._sum = 0.0
        self._told: tuple[float, ...] | None = None
        """What `cumulative` answered; None once that is not so any more."""

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times
        self._told = None

    def observe_all(self, values: NDArray[np.float64]) -> None:
        self._counts += np.bincount(self._bounds_array.searchsorted(values), minlength=len(self._counts))
        self._sum += float(values.sum())
        self._told = None

    def cumulative(self) -> tuple[float, ...]:
        """Cumulative bucket counts (the last is +Inf), then the sum. Made anew only where something was observed: it is
        asked at each beat, for every histogram of every model.
        """
        if self._told is None:
            self._told = (*self._counts.cumsum().astype(np.float64).tolist(), self._sum)
        return self._told


FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_GAP_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
ITERATION_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
REQUEST_TOKENS = (*(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5)), 1e6)
REQUEST_N = (1.0, 2.0, 5.0, 10.0, 20.0)
"""Upper edges of buckets: those of vLLM (v1/metrics/buckets.py), and finer ones below them in the times."""


@dataclass(slots=True)
class ModelCounters:
    """Of one model's sequences, running totals since it became known; they never fall."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in a prefix index."""
    prefix_hits: int = 0
    """Of those, found."""
    ended: Counter[str] = field(default_factory=Counter)
    """Accepted streams by `EndReason` name."""
    refused: Counter[str] = field(default_factory=Counter)
    """Streams that were not accepted, likewise."""
    failovers: int = 0
    """Sequences whose executor was lost while they ran."""
    budget_tokens: int = 0
    """Token budgets of all iterations together."""
    busy_s: float = 0.0
    """Seconds from plan to result, as the executors measured them."""
    bubble_s: float = 0.0
    """Seconds from a result to the next plan, transport included, where that goes on with running sequences."""
    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_S))
    inter_token_latency: Histogram = field(default_factory=lambda: Histogram(TOKEN_GAP_S))
    time_per_output_token: Histogram = field(default_factory=lambda: Histogram(TOKEN_GAP_S))
    e2e_latency: Histogram = field(default_factory=lambda: Histogram(REQUEST_S))
    queue_time: Histogram = field(default_factory=lambda: Histogram(REQUEST_S))
    prefill_time: Histogram = field(default_factory=lambda: Histogram(REQUEST_S))
    decode_time: Histogram = field(default_factory=lambda: Histogram(REQUEST_S))
    inference_time: Histogram = field(default_factory=lambda: Histogram(REQUEST_S))
    recovery_time: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_S))
    """From the loss of a sequence's executor to its next token."""
    iteration_tokens: Histogram = field(default_factory=lambda: Histogram(ITERATION_TOKENS))
    request_prompt_tokens: Histogram = field(default_factory=lambda: Histogram(REQUEST_TOKENS))
    request_generation_tokens: Histogram = field(default_factory=lambda: Histogram(REQUEST_TOKENS))
    request_longest_generation: Histogram = field(default_factory=lambda: Histogram(REQUEST_TOKENS))
    request_n: Histogram = field(default_factory=lambda: Histogram(REQUEST_N))
    request_max_tokens: Histogram = field(default_factory=lambda: Histogram(REQUEST_TOKENS))

    def observe_gaps(self, before: NDArray[np.float64], now: float) -> None:
        """Times between tokens. `before`: when each row had its last one, -1 where it had none; mostly all alike."""
        if len(before) and before[0] >= 0 and not np.count_nonzero(before != before[0]):
            self.inter_token_latency.observe(now - float(before[0]), len(before))
        else:
            self.inter_token_latency.observe_all(now - before[before >= 0])

    def observe_finished(self, sequence: Sequence, now: float) -> None:
        """A live sequence has its whole answer."""
        first, generated = sequence.first_token_at, sequence.num_generated
        self.e2e_latency.observe(now - sequence.arrived)
        self.inference_time.observe(now - sequence.admitted)
        self.prefill_time.observe(first - sequence.admitted)
        self.decode_time.observe(now - first)
        if generated > 1:
            self.time_per_output_token.observe((now - first) / (generated - 1))
        self.request_prompt_tokens.observe(sequence.prompt_length)
        self.request_generation_tokens.observe(generated)


@dataclass(slots=True)
class Counters:
    """Of all models together, running totals since the start of the service; they never fall."""

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
    lanes_lost: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    """Streams by `EndReason` name, refused ones too."""
