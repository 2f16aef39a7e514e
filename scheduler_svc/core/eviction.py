"""Orders in which unreferenced cached blocks are given up."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence


class EvictionOrder(ABC):
    """Evictable blocks, the one to go first in front. Its verbs take many blocks, since tables are long."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[int]:
        """The blocks, in no particular order."""

    @abstractmethod
    def put(self, blocks: Sequence[int], weights: Sequence[int]) -> None:
        """Take in blocks that are no members, released one after the other; weights are by block, of the whole pool."""

    @abstractmethod
    def remove(self, blocks: Sequence[int]) -> None:
        """Take out members. Raises KeyError for one that is none."""

    @abstractmethod
    def pop(self, count: int) -> list[int]:
        """Take out the first `count` of the members, which are as many at least."""


class RecencyOrder(EvictionOrder):
    """The block released longest ago goes first, whatever its weight. O(1) a block."""

    def __init__(self) -> None:
        # A plain dict looks for its first key past all that were deleted before it.
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def put(self, blocks: Sequence[int], weights: Sequence[int]) -> None:
        members = self._blocks
        for block in blocks:
            members[block] = None

    def remove(self, blocks: Sequence[int]) -> None:
        members = self._blocks
        for block in blocks:
            del members[block]

    def pop(self, count: int) -> list[int]:
        pop = self._blocks.popitem
        return [pop(last=False)[0] for _ in range(count)]


class WeightOrder(EvictionOrder):
    """The lightest block goes first; among those, the one released longest ago. Amortised O(log n) a block."""

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

    def put(self, blocks: Sequence[int], weights: Sequence[int]) -> None:
        ticks, heap, push = self._ticks, self._heap, heapq.heappush
        for tick, block in enumerate(blocks, start=self._now):
            ticks[block] = tick
            push(heap, (weights[block], tick, block))
        self._now += len(blocks)
        if len(heap) > 2 * len(ticks) + 64:
            self._heap = [entry for entry in heap if ticks.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def remove(self, blocks: Sequence[int]) -> None:
        ticks = self._ticks
        for block in blocks:
            del ticks[block]

    def pop(self, count: int) -> list[int]:
        ticks, heap = self._ticks, self._heap
        blocks: list[int] = []
        while len(blocks) < count:
            _, tick, block = heapq.heappop(heap)
            if ticks.get(block) == tick:
                del ticks[block]
                blocks.append(block)
        return blocks
