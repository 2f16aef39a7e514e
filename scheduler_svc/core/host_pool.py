"""Blocks of an executor's host memory, which hold the KV of sequences that were swapped out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class HostPool:
    """`num_blocks` host blocks, each free, held, or released since the last `settle`.

    An executor applies a plan's swap-outs before its swap-ins. A block that is read by a swap-in must therefore not be
    written by a swap-out of the same plan: it becomes free when that plan is sealed.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._released: list[int] = []
        self._is_held = bytearray(num_blocks)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Blocks that hold somebody's KV."""
        return self.num_blocks - len(self._free) - len(self._released)

    def allocate(self, count: int) -> list[int] | None:
        """Hand out `count` blocks, or None when there are not enough."""
        if count > len(self._free):
            return None
        place = len(self._free) - count
        blocks = self._free[place:]
        del self._free[place:]
        blocks.reverse()
        for block in blocks:
            self._is_held[block] = True
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Give back blocks: swapped in by the plan being made, or wanted no more."""
        for block in blocks:
            if not self._is_held[block]:
                raise AssertionError(f"host block {block} released but not held")
            self._is_held[block] = False
            self._released.append(block)

    def settle(self) -> None:
        """The plan is sealed: what was released may be handed out again by the next one."""
        self._free.extend(self._released)
        self._released.clear()

    def check_invariants(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless every block is in one table, free, or released."""
        held = [block for table in tables for block in table]
        assert sorted(held + self._free + self._released) == list(range(self.num_blocks)), (
            "a host block is lost or twice"
        )
        assert {block for block, is_held in enumerate(self._is_held) if is_held} == set(held)
