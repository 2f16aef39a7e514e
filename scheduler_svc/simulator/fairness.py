"""How far apart tenants are served while both have something waiting (the measure of VTC, Sheng et al., OSDI'24)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class FairnessMeter:
    """Tracks, for every pair of tenants, how far their service drifts apart while both are backlogged."""

    def __init__(self, weights: NDArray[np.float64]) -> None:
        """`weights`: the share of each tenant."""
        count = len(weights)
        self._weights = weights
        self.service = np.zeros(count)
        """Weighted tokens that each tenant got, divided by its share."""
        self._both = np.zeros((count, count), bool)
        self._low = np.zeros((count, count))
        self._high = np.zeros((count, count))
        self.gap = 0.0
        """The greatest |service of one - service of the other| over any interval in which both were backlogged."""

    def observe(self, backlogged: NDArray[np.bool_], served: NDArray[np.float64]) -> None:
        """An iteration: who had something waiting while it was planned, and what each tenant got from it."""
        if len(self.service) < 2:
            return
        before = self.service[:, None] - self.service[None, :]
        both = backlogged[:, None] & backlogged[None, :]
        stayed = both & self._both
        low = np.where(stayed, self._low, before)
        high = np.where(stayed, self._high, before)
        self.service += served / self._weights
        after = self.service[:, None] - self.service[None, :]
        self._both, self._low, self._high = both, np.minimum(low, after), np.maximum(high, after)
        if both.any():
            self.gap = max(self.gap, float((self._high - self._low)[both].max()))
