"""Learns how long iterations take, and how much prefill may ride along within a time between tokens."""

from __future__ import annotations

import numpy as np

MEMORY = 0.98
"""Weight of what was known, at each new iteration."""
MIN_OBSERVED = 8
MIN_PREFILL = 32
"""Prefill tokens of an iteration from which something is learned of what a token costs."""
MIN_RIDE = 16
"""Prefill tokens that may always ride along: a prompt must get on."""


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
        self.prefill_token_s = 0.0
        """Smoothed seconds of a prefill token; 0 before the first iteration that is mostly prefill."""

    def observe(self, num_decodes: int, num_prefill_tokens: int, seconds: float, *, fit: bool) -> None:
        """An iteration took so long from plan to result. Without `fit` only the means are learned."""
        self.num_observed += 1
        self.mean_s += (seconds - self.mean_s) * (0.1 if self.num_observed > 1 else 1.0)
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
