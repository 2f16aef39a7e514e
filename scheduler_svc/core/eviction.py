"""Orders in which unreferenced cached blocks are given up."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator


class EvictionOrder(ABC):
    """Evictable blocks, the one to go first in front."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[int]:
        """The blocks, in no particular order."""

    @abstractmethod
    def put(self, block: int, weight: int) -> None:
        """Place a block as one that was released now, also where it is a member already."""

    @abstractmethod
    def remove(self, block: int) -> None:
        """Take out a member. Raises KeyError where it is none."""

    def discard(self, block: int) -> None:
        """Take out a block, if it is a member."""
        if block in self:
            self.remove(block)

    @abstractmethod
    def __contains__(self, block: object) -> bool: ...

    @abstractmethod
    def pop(self) -> int:
        """Take out the first. Raises KeyError or IndexError when empty."""


class RecencyOrder(EvictionOrder):
    """The block released longest ago goes first, whatever its weight. Every step is O(1)."""

    def __init__(self) -> None:
        # A plain dict looks for its first key past all that were deleted before it.
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def __contains__(self, block: object) -> bool:
        return block in self._blocks

    def put(self, block: int, weight: int) -> None:
        self._blocks[block] = None
        self._blocks.move_to_end(block)

    def remove(self, block: int) -> None:
        del self._blocks[block]

    def pop(self) -> int:
        return self._blocks.popitem(last=False)[0]


class WeightOrder(EvictionOrder):
    """The lightest block goes first; among those, the one released longest ago. Every step is amortised O(log n)."""

    def __init__(self) -> None:
        self._ticks: dict[int, int] = {}
        """Block -> when it was put. Heap entries of another time are stale and skipped."""
        self._heap: list[tuple[int, int, int]] = []
        """(weight, tick, block)."""
        self._now = 0

    def __len__(self) -> int:
        return len(self._ticks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ticks)

    def __contains__(self, block: object) -> bool:
        return block in self._ticks

    def put(self, block: int, weight: int) -> None:
        self._now += 1
        self._ticks[block] = self._now
        heapq.heappush(self._heap, (weight, self._now, block))
        if len(self._heap) > 2 * len(self._ticks) + 64:
            self._heap = [entry for entry in self._heap if self._ticks.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def remove(self, block: int) -> None:
        del self._ticks[block]

    def pop(self) -> int:
        while True:
            _, tick, block = heapq.heappop(self._heap)
            if self._ticks.get(block) == tick:
                del self._ticks[block]
                return block
