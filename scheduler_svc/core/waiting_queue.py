"""Sequences that wait, in the order of their keys."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from scheduler_svc.core.sequence import Sequence, State, WaitReason

_Entry = tuple[int, int, Sequence]


class WaitingQueue:
    """A heap by `Sequence.key`; add and pop are O(log n), removal is lazy.

    A sequence that leaves by abort is skipped when its entry surfaces. Keys do not change while waiting.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._members: set[int] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        """All waiting sequences, in no particular order."""
        return (entry[2] for entry in self._heap if entry[1] in self._members)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.number in self._members

    def add(self, sequence: Sequence) -> None:
        assert sequence.state is State.WAITING and sequence.number not in self._members
        self._members.add(sequence.number)
        heapq.heappush(self._heap, (*sequence.key, sequence))

    def head(self) -> Sequence | None:
        """The next sequence, or None."""
        while self._heap and self._heap[0][1] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def remove(self, sequence: Sequence) -> None:
        """Take out a member, wherever it stands."""
        self._members.remove(sequence.number)
        if self._heap and self._heap[0][2] is sequence:
            heapq.heappop(self._heap)
        elif len(self._heap) > 64 and len(self._heap) > 2 * len(self._members):
            self._heap = [entry for entry in self._heap if entry[1] in self._members]
            heapq.heapify(self._heap)


class ModelQueue:
    """The waiting sequences of one model: long prompts apart, so that short ones can pass a long prefill."""

    def __init__(self) -> None:
        self.long_threshold = 0
        """Sequences that enter with more tokens are long."""
        self.short, self.long = WaitingQueue(), WaitingQueue()
        self.num_new = 0
        """Those among them that never ran."""
        self.last_ticket = 0
        self._blocked: Sequence | None = None
        self._blocked_by = WaitReason.NONE

    def __len__(self) -> int:
        return len(self.short) + len(self.long)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.short
        yield from self.long

    def add(self, sequence: Sequence) -> None:
        self.last_ticket += 1
        sequence.ticket = self.last_ticket
        sequence.is_long = len(sequence.tokens) > self.long_threshold
        self.put_back(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Return a sequence that was only set aside."""
        self.num_new += sequence.admitted < 0
        self._part(sequence).add(sequence)

    def remove(self, sequence: Sequence) -> None:
        self.num_new -= sequence.admitted < 0
        self._part(sequence).remove(sequence)

    def head(self, *, long_above: int | None = None) -> Sequence | None:
        """The next sequence by key; with `long_above`, of the long ones only one of a class above that."""
        short, long = self.short.head(), self.long.head()
        if long is not None and long_above is not None and long.priority >= long_above:
            long = None
        if short is None or long is None:
            return short or long
        return min(short, long, key=lambda sequence: sequence.key)

    def block(self, sequence: Sequence | None, reason: WaitReason) -> None:
        """Note what stopped the admission of a sequence; those behind it wait by policy."""
        self._blocked, self._blocked_by = sequence, reason

    def why(self, sequence: Sequence) -> WaitReason:
        """Why a member waits."""
        return self._blocked_by if sequence is self._blocked else WaitReason.POLICY

    def _part(self, sequence: Sequence) -> WaitingQueue:
        return self.long if sequence.is_long else self.short
