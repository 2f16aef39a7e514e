"""Learns how long iterations take: how much prefill may ride along within a time, and when an iteration is late."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

MEMORY = 0.98
"""Weight of what was known, at each new iteration."""
MIN_OBSERVED = 8
MIN_PREFILL = 32
"""Prefill tokens of an iteration from which something is learned of what a token costs."""
MIN_RIDE = 16
"""Prefill tokens that may always ride along: a prompt must get on."""
SLACK = 20.0
"""An iteration is late when it takes so many times as long as the slowest of its size took lately. A busy machine slows
iterations by a few times, and what it slows is learned; a hang has no end."""
FADING = 0.999
"""What the slowest iteration of a size took counts so much less with each newer one of that size."""
NUM_SIZES = 26
SOURCES = ("limit", "floor", "learned")
"""What a deadline can follow from: the limit that holds for all, the floor, or the times seen."""


class Deadline(NamedTuple):
    """How long an iteration may take."""

    seconds: float
    source: str
    """One of `SOURCES`."""


class Pace:
    """A least-squares fit of seconds = base + decode * rows + prefill * tokens on one lane.

    It forgets slowly; iterations with prefill are forgotten for newer ones with prefill only, and those without
    likewise: a long stretch of one kind does not wipe out what is known of the other.
    """

    def __init__(self) -> None:
        self._moments = np.zeros((2, 3, 3))
        """Sums over iterations without prefill, and with it."""
        self._projection = np.zeros((2, 3))
        self.num_with_prefill = 0
        self.num_observed = 0
        self.mean_s = 0.0
        """Smoothed seconds of an iteration; 0 before the first."""
        self._slowest = [0.0] * NUM_SIZES
        """At i: seconds that the slowest iteration of 2**(i-1) to 2**i - 1 tokens took lately; 0: none was seen."""
        self.prefill_token_s = 0.0
        """Smoothed seconds of a prefill token; 0 before the first iteration that is mostly prefill."""

    def observe(self, num_decodes: int, num_prefill_tokens: int, seconds: float, *, fit: bool) -> None:
        """An iteration took so long from plan to result. Without `fit` only the means are learned."""
        self.num_observed += 1
        self.mean_s += (seconds - self.mean_s) * (0.1 if self.num_observed > 1 else 1.0)
        size = _size(num_decodes + num_prefill_tokens)
        self._slowest[size] = max(seconds, FADING * self._slowest[size])
        if num_prefill_tokens >= MIN_PREFILL and num_prefill_tokens > num_decodes:
            each, known = seconds / num_prefill_tokens, self.prefill_token_s
            self.prefill_token_s += (each - known) * (0.2 if known else 1.0)
        if not fit:
            return
        kind = int(num_prefill_tokens > 0)
        self.num_with_prefill += kind
        row = np.array([1.0, num_decodes, num_prefill_tokens])
        self._moments[kind] = MEMORY * self._moments[kind] + np.outer(row, row)
        self._projection[kind] = MEMORY * self._projection[kind] + row * seconds

    def prefill_tokens(self, num_decodes: int, budget: int, target_s: float) -> int:
        """Prefill tokens, at most `budget`, with which an iteration stays within `target_s`; at least `MIN_RIDE`.

        A guess of a quarter of the budget while too little was seen of prefill.
        """
        guess = min(budget, max(MIN_RIDE, budget // 4))
        if self.num_with_prefill < MIN_OBSERVED:
            return guess
        moments = self._moments.sum(0)
        ridge = np.diag(1e-6 * np.diag(moments) + 1e-9)
        base, decode, prefill = np.linalg.solve(moments + ridge, self._projection.sum(0)).tolist()
        left = target_s - base - max(decode, 0.0) * num_decodes
        if prefill <= 0:
            return guess
        return int(min(budget, max(MIN_RIDE, left / prefill)))

    @property
    def slowest_s(self) -> float:
        """Seconds that the slowest iteration took lately; 0 before the first."""
        return max(self._slowest)

    def deadline(self, num_tokens: int, floor_s: float, limit_s: float) -> Deadline:
        """How long an iteration of so many tokens may take: `SLACK` times what is expected of it by the times seen, at
        least `floor_s`, and never more than `limit_s`, which holds alone while little was seen.

        Larger iterations than any seen are expected to take longer in proportion.
        """
        if self.num_observed < MIN_OBSERVED:
            return Deadline(limit_s, "limit")
        size = _size(num_tokens)
        expected = max(self._slowest[: size + 1])
        if not self._slowest[size]:
            largest = next((i for i in range(size - 1, -1, -1) if self._slowest[i]), 0)
            if not largest:
                return Deadline(limit_s, "limit")
            expected = max(expected, self._slowest[largest] * num_tokens / (1 << (largest - 1)))
        seconds = SLACK * expected
        if max(seconds, floor_s) >= limit_s:
            return Deadline(limit_s, "limit")
        return Deadline(seconds, "learned") if seconds > floor_s else Deadline(floor_s, "floor")


def _size(num_tokens: int) -> int:
    """The place of iterations of so many tokens among the sizes, which double."""
    return min(num_tokens.bit_length(), NUM_SIZES - 1)
