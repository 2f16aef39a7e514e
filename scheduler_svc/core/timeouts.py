"""Which live sequences must be over by when, whatever they are doing then."""

from __future__ import annotations

import heapq
import math

from scheduler_svc.core.sequence import Sequence, State


class Timeouts:
    """A heap by time; entries of sequences that have ended before stay until they come up or are too many."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._num_watched = 0
        """Live sequences with a timeout."""

    def __len__(self) -> int:
        return self._num_watched

    def watch(self, sequence: Sequence) -> None:
        """A sequence came to life."""
        if sequence.ends_at == math.inf:
            return
        self._num_watched += 1
        heapq.heappush(self._heap, (sequence.ends_at, sequence.number, sequence))

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        if sequence.ends_at == math.inf:
            return
        self._num_watched -= 1
        if len(self._heap) > 64 and len(self._heap) > 4 * self._num_watched:
            self._heap = [entry for entry in self._heap if not _is_over(entry[2])]
            heapq.heapify(self._heap)

    def take_due(self, now: float) -> Sequence | None:
        """The next live sequence whose time is over, or None."""
        while self._heap and (self._heap[0][0] <= now or _is_over(self._heap[0][2])):
            sequence = heapq.heappop(self._heap)[2]
            if not _is_over(sequence):
                return sequence
        return None

    def next_at(self) -> float | None:
        """When the first of those that are left must be over; after `take_due` has returned None."""
        return self._heap[0][0] if self._heap else None


def _is_over(sequence: Sequence) -> bool:
    return sequence.aborted or sequence.state is State.FINISHED
