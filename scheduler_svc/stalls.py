"""How long the core's loop stood still: stopped, or without a processor, as its whole machine may have been."""

from __future__ import annotations

STALLED_S = 0.1
"""Shorter ones are not told."""


class Stalls:
    """Told of each turn of the loop. Clocks are passed in, in seconds: a monotonic one, and the thread's own.

    What the loop computes is no stall: what others have sent meanwhile is read before anybody judges their silence. If
    it were, a loop that is busy all the time would never find an executor that hangs.
    """

    def __init__(self) -> None:
        self._turned_at = self._computed_s = 0.0

    def begin(self, now: float, computed_s: float) -> None:
        """The loop begins to turn. `computed_s`: processor time of its thread."""
        self._turned_at, self._computed_s = now, computed_s

    def passed(self, now: float, computed_s: float, wait_s: float) -> float:
        """One more turn begins, behind a wait of at most `wait_s`: how long the last one stood still; 0: not at all."""
        stalled_s = (now - self._turned_at) - (computed_s - self._computed_s) - wait_s
        self.begin(now, computed_s)
        return stalled_s if stalled_s > STALLED_S else 0.0
