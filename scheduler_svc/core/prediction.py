"""What is known of the lengths of answers: histograms by tenant, filled as sequences end."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

BOUNDS = np.unique(np.geomspace(1, 1 << 20, 81).round()).astype(np.int64)
"""Upper ends of the buckets, in tokens: each 19 % above the one before."""
MIN_SAMPLES = 16
"""Ended sequences before a histogram is believed."""
MAX_SAMPLES = 2000.0
"""A histogram that holds more is halved: what was long ago counts less."""
MAX_TENANTS = 1024
QUANTILE = 0.7
"""Of the answers seen that were longer, so many are no longer than the guess: above the median, since to preempt costs
more than to wait."""
UNKNOWN = 256
"""Tokens assumed of an answer while nothing is known."""


class OutputLengths:
    """One model's answers, in tokens generated."""

    def __init__(self) -> None:
        self._all = np.zeros(len(BOUNDS))
        self._by_tenant: OrderedDict[str, NDArray[np.float64]] = OrderedDict()
        """The tenant seen last comes last."""

    def observe(self, tenant: str, num_generated: int) -> None:
        """A sequence of this tenant ended by itself after so many tokens."""
        counts = self._by_tenant.setdefault(tenant, np.zeros(len(BOUNDS)))
        self._by_tenant.move_to_end(tenant)
        if len(self._by_tenant) > MAX_TENANTS:
            self._by_tenant.popitem(last=False)
        bucket = min(int(BOUNDS.searchsorted(num_generated)), len(BOUNDS) - 1)
        for histogram in (counts, self._all):
            histogram[bucket] += 1
            if histogram.sum() > MAX_SAMPLES:
                histogram *= 0.5

    def predict(self, tenant: str, num_generated: int, max_tokens: int) -> int:
        """Tokens that an answer will have in all, at most `max_tokens`, given that it has so many and goes on."""
        counts = self._by_tenant.get(tenant)
        if counts is None or counts.sum() < MIN_SAMPLES:
            counts = self._all
        if counts.sum() < MIN_SAMPLES:
            return min(max_tokens, max(UNKNOWN, 2 * num_generated))
        longer = (counts * (num_generated < BOUNDS)).cumsum()
        if longer[-1] == 0:
            return min(max_tokens, 2 * num_generated + 1)
        bucket = int(longer.searchsorted(QUANTILE * longer[-1]))
        return max(num_generated + 1, min(max_tokens, int(BOUNDS[bucket])))
