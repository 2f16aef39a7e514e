"""KV blocks of one lane: who holds them, which are free, and which hold a reusable prefix.

Paged KV with reference counts (PagedAttention, SOSP'23). A full block is found again by the chained hash of all tokens
up to its end, keyed with the model; a pool belongs to one attachment of one executor, and its hashes with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray


class BlockPool:
    """`num_blocks` blocks, each free, evictable (unreferenced but cached), or referenced."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: list[int] = []
        self._num_touched = 0
        """Blocks from here on were never handed out; they are free without being listed."""
        self._evictable: dict[int, None] = {}
        """Least recently released first."""
        self._references = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._free) + self.num_blocks - self._num_touched + len(self._evictable)

    @property
    def num_cached(self) -> int:
        return len(self._hash_of)

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - self.num_available

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks with one reference each, evicting cached ones when no free ones are left.

        Raises ValueError when there are not enough.
        """
        if count > self.num_available:
            raise ValueError(f"{count} blocks wanted, {self.num_available} available")
        blocks = []
        for _ in range(count):
            block = self._take_free() if self._free or self._num_touched < self.num_blocks else self._evict()
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def _take_free(self) -> int:
        if self._free:
            return self._free.pop()
        self._num_touched += 1
        return self._num_touched - 1

    def _evict(self) -> int:
        block = next(iter(self._evictable))
        del self._evictable[block]
        del self._block_of[self._hash_of.pop(block)]
        return block

    def lookup(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest cached prefix of this chain. Takes no reference."""
        found = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def num_evictable(self, blocks: Iterable[int]) -> int:
        """How many of these would leave the available ones when shared."""
        return sum(block in self._evictable for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Take one more reference to each."""
        for block in blocks:
            self._evictable.pop(block, None)
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give one reference back for each. Ends of chains become evictable before their beginnings."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._hash_of:
                    self._evictable[block] = None
                else:
                    self._free.append(block)
            elif self._references[block] < 0:
                raise AssertionError(f"block {block} released more often than held")

    def num_releasable(self, blocks: Iterable[int]) -> int:
        """How many of these have one reference only, so that releasing makes them available."""
        return sum(self._references[block] == 1 for block in blocks)

    def publish(self, block: int, digest: bytes) -> None:
        """Let a referenced block, whose KV is written and acknowledged, be found by its hash.

        A second block with the same content stays unpublished, and so does no harm when either is freed.
        """
        if digest not in self._block_of and block not in self._hash_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest

    def check_invariants(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless references equal the occurrences in `tables` and every block is in one place."""
        counted = [0] * self.num_blocks
        for table in tables:
            for block in table:
                counted[block] += 1
        assert counted == self._references, "references differ from the occurrences in block tables"
        untouched = range(self._num_touched, self.num_blocks)
        free, evictable = {*self._free, *untouched}, set(self._evictable)
        assert len(free) == len(self._free) + len(untouched), "a block is free twice"
        referenced = {block for block, count in enumerate(counted) if count}
        assert not free & evictable and not free & referenced and not evictable & referenced, "a block in two places"
        assert len(free) + len(evictable) + len(referenced) == self.num_blocks, "a block is lost"
        assert evictable <= self._hash_of.keys() and not free & self._hash_of.keys()
        assert {h: b for b, h in self._hash_of.items()} == self._block_of, "prefix index out of step"


def extend_hashes(hashes: list[bytes], tokens: NDArray[np.int32], block_size: int, key: bytes, count: int) -> None:
    """Extend a chain in place so that it covers the first `count` full blocks of `tokens`.

    Each link is a 128-bit BLAKE2b over (previous link, the block's tokens), keyed with `key` (at most 64 bytes).
    """
    if count <= len(hashes):
        return
    previous = hashes[-1] if hashes else b""
    data = tokens[len(hashes) * block_size : count * block_size].astype("<i4", copy=False).tobytes()
    width = 4 * block_size
    for start in range(0, len(data), width):
        digest = blake2b(previous, digest_size=16, key=key)
        digest.update(data[start : start + width])
        previous = digest.digest()
        hashes.append(previous)
