"""Sequences that wait, in the order of their keys."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Protocol

from scheduler_svc.core.sequence import Sequence, State


class Line(Protocol):
    """An ordered set of waiting sequences; every operation is at most O(log n), amortised."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Sequence]: ...
    def __contains__(self, sequence: Sequence) -> bool: ...

    def add(self, sequence: Sequence) -> None:
        """Take in a sequence at its key; a member whose key has changed is moved."""

    def remove(self, sequence: Sequence) -> None:
        """Take out a member, wherever it stands."""

    def head(self) -> Sequence | None:
        """The next sequence, or None."""


class WaitingQueue:
    """A heap by `Sequence.key`. Removal is lazy: an entry that is not its sequence's newest is passed over."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, int, int, Sequence]] = []
        self._entry_of: dict[int, int] = {}
        """Sequence number -> number of its valid entry."""
        self._num_entries = 0

    def __len__(self) -> int:
        return len(self._entry_of)

    def __iter__(self) -> Iterator[Sequence]:
        """All members, in no particular order."""
        return (entry[4] for entry in self._heap if self._is_valid(entry))

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.number in self._entry_of

    def _is_valid(self, entry: tuple[int, float, int, int, Sequence]) -> bool:
        return self._entry_of.get(entry[2]) == entry[3]

    def add(self, sequence: Sequence) -> None:
        assert sequence.state is State.WAITING
        self._num_entries += 1
        self._entry_of[sequence.number] = self._num_entries
        heapq.heappush(self._heap, (*sequence.key, self._num_entries, sequence))
        self._compact()

    def head(self) -> Sequence | None:
        while self._heap and not self._is_valid(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][4] if self._heap else None

    def remove(self, sequence: Sequence) -> None:
        del self._entry_of[sequence.number]
        if self._heap and self._heap[0][4] is sequence:
            heapq.heappop(self._heap)
        else:
            self._compact()

    def _compact(self) -> None:
        if len(self._heap) > 64 and len(self._heap) > 2 * len(self._entry_of):
            self._heap = [entry for entry in self._heap if self._is_valid(entry)]
            heapq.heapify(self._heap)
