"""How fast the service gets done with what waits, and what a client that is turned away is told."""

from __future__ import annotations

import math
from dataclasses import dataclass

LONGEST_GAP_S = 60.0
LONGEST_RETRY_S = 120
SMOOTHING = 0.1


@dataclass(slots=True)
class DrainRate:
    """Smoothed seconds between two endings."""

    mean_gap_s: float = 1.0
    last_ended_at: float = 0.0

    def note(self, count: int, now: float, *, others_wait: bool) -> None:
        """So many sequences have ended. That counts only while others wait: an idle service drains nothing."""
        gap = (now - self.last_ended_at) / count
        self.last_ended_at = now
        if others_wait:
            self.mean_gap_s += SMOOTHING * (min(gap, LONGEST_GAP_S) - self.mean_gap_s)

    def retry_after_s(self, num_waiting: int) -> int:
        """Whole seconds until so many have had their turn, between 1 and `LONGEST_RETRY_S`."""
        return min(LONGEST_RETRY_S, max(1, math.ceil(num_waiting * self.mean_gap_s)))
