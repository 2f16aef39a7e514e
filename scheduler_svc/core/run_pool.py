"""Contiguous KV, as in Orca (OSDI'22): a sequence holds one run of consecutive blocks, and nothing is shared."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

from common.wire import BlockState, Retention
from scheduler_svc.core.kv_pool import KvPool


class RunPool(KvPool):
    """Free blocks as sorted extents; first fit. There are at most as many extents as runs held, and one more."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._starts = [0] if num_blocks else []
        """Where each free extent begins, ascending. No two touch."""
        self._ends = [num_blocks] if num_blocks else []
        """One past the last block of each."""
        self._num_available = num_blocks

    @property
    def num_available(self) -> int:
        """Free blocks, which may be too scattered for a run."""
        return self._num_available

    @property
    def num_cached(self) -> int:
        """Always 0."""
        return 0

    @property
    def num_cached_only(self) -> int:
        """Always 0."""
        return 0

    @property
    def largest_run(self) -> int:
        """The most blocks that `allocate` can hand out at once."""
        return max((end - start for start, end in zip(self._starts, self._ends, strict=True)), default=0)

    def fits(self, count: int, released: Iterable[int] = ()) -> bool:
        """Whether there is a run of `count` blocks, if those of `released` were given back before."""
        if not count or any(end - start >= count for start, end in zip(self._starts, self._ends, strict=True)):
            return True
        extents = sorted([*zip(self._starts, self._ends, strict=True), *_runs(sorted(released))])
        first = last = -1
        for start, end in extents:
            first = first if start == last else start
            last = end
            if last - first >= count:
                return True
        return False

    def allocate(self, count: int) -> list[int]:
        """Hand out the first run of `count` consecutive blocks. Raises ValueError when there is none."""
        if not count:
            return []
        for place, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start > count:
                self._starts[place] = start + count
                break
            if end - start == count:
                del self._starts[place], self._ends[place]
                break
        else:
            raise ValueError(f"a run of {count} blocks wanted, the largest has {self.largest_run}")
        self._num_available -= count
        return list(range(start, start + count))

    def lookup(self, hashes: Iterable[bytes]) -> list[int]:
        """Finds nothing."""
        return []

    def num_evictable(self, blocks: Iterable[int]) -> int:
        """Always 0."""
        return 0

    def share(self, blocks: Sequence[int]) -> None:
        """Nothing can be shared. Raises ValueError for any block."""
        for block in blocks:
            raise ValueError(f"block {block} belongs to a run and cannot be shared")

    def release(self, blocks: Sequence[int], retention: Retention = Retention.NORMAL) -> None:
        """Give back blocks, whole runs or parts. Nothing outlives its table, whatever the retention."""
        for start, end in _runs(blocks):
            self._free_run(start, end)

    def _free_run(self, start: int, end: int) -> None:
        """Merge an extent into the free ones."""
        place = bisect_right(self._starts, start)
        if (place and self._ends[place - 1] > start) or (place < len(self._starts) and self._starts[place] < end):
            raise AssertionError(f"blocks {start} to {end - 1} released more often than held")
        joins_next = place < len(self._starts) and self._starts[place] == end
        if joins_next:
            self._starts[place] = start
        else:
            self._starts.insert(place, start)
            self._ends.insert(place, end)
        if place and self._ends[place - 1] == start:
            del self._starts[place], self._ends[place - 1]
        self._num_available += end - start

    def num_releasable(self, blocks: Iterable[int]) -> int:
        """All of them."""
        return sum(1 for _ in blocks)

    def publish_many(self, blocks: Collection[int], digests: Collection[bytes]) -> None:
        """Does nothing: runs are not shared."""

    def states(self, step: int = 1) -> list[BlockState]:
        """What every `step`-th block holds: free or held."""
        states = [BlockState.HELD] * -(-self.num_blocks // step)
        for start, end in zip(self._starts, self._ends, strict=True):
            first, last = -(-start // step), -(-end // step)
            states[first:last] = [BlockState.FREE] * (last - first)
        return states

    def check_invariants(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless each table is one run and every block is in one table or free."""
        held: list[int] = []
        for table in tables:
            assert len(_runs(table)) <= 1, "a table of more than one run"
            held.extend(table)
        extents = list(zip(self._starts, self._ends, strict=True))
        assert all(start < end for start, end in extents), "an empty extent"
        assert all(one[1] < two[0] for one, two in pairwise(extents)), "extents out of order"
        free = [block for start, end in extents for block in range(start, end)]
        assert sorted(held + free) == list(range(self.num_blocks)), "every block is in one table or free"
        assert len(free) == self._num_available


def _runs(blocks: Iterable[int]) -> list[tuple[int, int]]:
    """(first block, one past the last) of each run of consecutive blocks, in their order."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and runs[-1][1] == block:
            runs[-1] = (runs[-1][0], block + 1)
        else:
            runs.append((block, block + 1))
    return runs
