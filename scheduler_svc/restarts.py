"""When a process that ends is started again."""

from __future__ import annotations


class Restarts:
    """Of one process: told of its starts and ends, it answers when the next start is due. It has no clock of its own.

    The rule is exponential backoff with a cap: at once, then after a first delay that doubles up to the longest. So one
    that dies now and then is back at once, and one that cannot live does not take the machine from the others. One that
    has lived long enough begins anew. There is no jitter: these are a few processes of one machine. The numbers
    are the owner's: a frontend starts within seconds and clients wait for it, an executor loads a model.
    """

    def __init__(self, *, first_delay_s: float, longest_delay_s: float, stable_s: float) -> None:
        """`stable_s`: having lived longer, it is started at once when it ends."""
        self._first_delay_s, self._longest_delay_s, self._stable_s = first_delay_s, longest_delay_s, stable_s
        self._started_at = 0.0
        self._num_ends = 0  # in a row
        self.due_at = 0.0
        """When the next start is due, once it has ended."""

    def started(self, now: float) -> None:
        """Call it before the attempt: one that fails has lived no time."""
        self._started_at = now

    def ended(self, now: float) -> float:
        """It has ended, or could not be started. Returns seconds until the next start."""
        self._num_ends = 1 if now - self._started_at > self._stable_s else self._num_ends + 1
        doublings = min(self._num_ends - 2, 64)  # beyond it, a float would overflow in the end
        delay = 0.0 if self._num_ends == 1 else min(self._longest_delay_s, self._first_delay_s * 2.0**doublings)
        self.due_at = now + delay
        return delay
