"""A histogram with narrow logarithmic bins: quantiles of any number of values in constant memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class LogHistogram:
    """Seconds from 1 µs to 10⁶ s, in bins that are 1 % wide; a quantile is off by at most half of that."""

    LOW = 1e-6
    STEP = 1.01
    COUNT = int(np.ceil(np.log(1e12) / np.log(1.01))) + 1

    def __init__(self) -> None:
        self.counts = np.zeros(self.COUNT, np.int64)

    def add(self, values: Floats) -> None:
        if not len(values):
            return
        # Most often all rows of an iteration waited equally long.
        if values[0] == values.min() == values.max():
            self.counts[self._bins(values[:1])[0]] += len(values)
        else:
            self.counts += np.bincount(self._bins(values), minlength=self.COUNT)

    def _bins(self, values: Floats) -> NDArray[np.int64]:
        bins = (np.log(np.maximum(values, self.LOW) / self.LOW) / np.log(self.STEP)).astype(np.int64)
        within: NDArray[np.int64] = np.minimum(bins, self.COUNT - 1)
        return within

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    def quantile(self, share: float) -> float:
        """The value below which this share of all lies; nan when there are none."""
        total = self.total
        if not total:
            return float("nan")
        place = int(self.counts.cumsum().searchsorted(max(1.0, share * total)))
        return float(self._middle(place))

    def curve(self) -> tuple[Floats, Floats]:
        """(seconds, cumulative share) at the bins that are not empty."""
        filled = np.flatnonzero(self.counts)
        return self._middle(filled), self.counts.cumsum()[filled] / max(self.total, 1)

    def _middle(self, place: NDArray[np.int64] | int) -> Floats:
        result: Floats = self.LOW * self.STEP ** (np.asarray(place, np.float64) + 0.5)
        return result
