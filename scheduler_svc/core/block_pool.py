"""KV blocks of one lane: who holds them, which are free, and which hold a reusable prefix.

Paged KV with reference counts (PagedAttention, SOSP'23). A full block is found again by the chained hash of all tokens
up to its end; a pool belongs to one attachment of one executor, and its hashes with it.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from common.wire import BlockState, Retention
from scheduler_svc.core.config import Eviction
from scheduler_svc.core.eviction import EvictionOrder, RecencyOrder, WeightOrder
from scheduler_svc.core.kv_pool import KvPool

_LINK = blake2b(digest_size=16)


class BlockPool(KvPool):
    """`num_blocks` blocks, each free, evictable (unreferenced but cached), or referenced.

    Which evictable block goes first is the policy's choice, but the end of a chain always goes before its beginning,
    without which it could not be found:

    - `lru`: a table is released from its end, so the block released longest ago has nothing behind it.
    - `lfu`: a block weighs as often as it was shared; who shares it shares all before it.
    - `fifo`: a block weighs as late as it was published, or as the latest block that follows it in a released table:
      a beginning that many chains go on from stays as long as the newest of them.

    A second block with the content of a published one stays unpublished. Its table may reach on, though, so at its
    release the first one counts as released with it; if that one is gone, the second one takes its place.
    """

    def __init__(self, num_blocks: int, eviction: Eviction = Eviction.LRU) -> None:
        self.num_blocks = num_blocks
        self.eviction = eviction
        self._free: list[int] = []
        self._num_touched = 0
        """Blocks from here on were never handed out; they are free without being listed."""
        self._evictable = self._new_order()
        self._kept = self._new_order()
        """Evictable blocks that go after all of `_evictable`; at most half of the pool."""
        self._is_kept = bytearray(num_blocks)
        """By block: whether it goes to `_kept` when it becomes evictable."""
        self._references = [0] * num_blocks
        self._weights = [0] * num_blocks if eviction is not Eviction.LRU else []
        """By block, of published ones; `lru` needs none."""
        self._num_published = 0
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._copies: dict[int, bytes] = {}
        """Hashes of held blocks with the content of a block that was published before them."""

    def _new_order(self) -> EvictionOrder:
        return RecencyOrder() if self.eviction is Eviction.LRU else WeightOrder()

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return self._num_free + len(self._evictable) + len(self._kept)

    @property
    def _num_free(self) -> int:
        return len(self._free) + self.num_blocks - self._num_touched

    @property
    def num_cached(self) -> int:
        return len(self._block_of)

    @property
    def num_cached_only(self) -> int:
        """Those cached that nobody holds."""
        return len(self._evictable) + len(self._kept)

    def fits(self, count: int, released: Iterable[int] = ()) -> bool:
        """Whether `allocate(count)` would succeed, if one reference to each of `released` were given back before."""
        missing = count - self.num_available
        if missing <= 0:
            return True
        held = self._references
        return missing <= sum(times == held[block] for block, times in Counter(released).items())

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks with one reference each, evicting cached ones when no free ones are left.

        Raises ValueError when there are not enough.
        """
        if count > self.num_available:
            raise ValueError(f"{count} blocks wanted, {self.num_available} available")
        blocks = self._take_free(min(count, self._num_free))
        if len(blocks) < count:
            blocks += self._evict(count - len(blocks))
        references = self._references
        for block in blocks:
            references[block] = 1
        return blocks

    def _take_free(self, count: int) -> list[int]:
        """The last freed first, then those never touched."""
        listed = min(count, len(self._free))
        blocks = self._free[len(self._free) - listed :]
        del self._free[len(self._free) - listed :]
        blocks.reverse()
        touched = self._num_touched + count - listed
        blocks.extend(range(self._num_touched, touched))
        self._num_touched = touched
        return blocks

    def _evict(self, count: int) -> list[int]:
        """Kept blocks only when no others are left."""
        blocks = self._evictable.pop(min(count, len(self._evictable)))
        if len(blocks) < count:
            kept = self._kept.pop(count - len(blocks))
            self._unmark(kept)
            blocks += kept
        hash_of, block_of = self._hash_of, self._block_of
        for block in blocks:
            digest = hash_of[block]
            assert digest is not None
            del block_of[digest]
            hash_of[block] = None
        return blocks

    def lookup(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest cached prefix of this chain. Takes no reference."""
        found = []
        block_of = self._block_of.get
        for digest in hashes:
            block = block_of(digest)
            if block is None:
                break
            found.append(block)
        return found

    def num_evictable(self, blocks: Iterable[int]) -> int:
        """How many of these, which `lookup` found, would leave the available ones when shared."""
        references = self._references
        return sum(not references[block] for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """Take one more reference to each of these, which `lookup` found."""
        references = self._references
        idle = [block for block in blocks if not references[block]]
        if idle:
            self._take_from_orders(idle)
        for block in blocks:
            references[block] += 1
        if self.eviction is Eviction.LFU:
            for block in blocks:
                self._weights[block] += 1

    def _take_from_orders(self, blocks: Sequence[int]) -> None:
        """Evictable blocks are about to be held, or released anew."""
        if not len(self._kept):
            self._evictable.remove(blocks)
            return
        self._evictable.remove([block for block in blocks if not self._is_kept[block]])
        self._kept.remove([block for block in blocks if self._is_kept[block]])

    def release(self, blocks: Sequence[int], retention: Retention = Retention.NORMAL) -> None:
        """Give one reference back for each block of a table, which lists them in the order of their positions.

        Cached blocks that nobody holds any more become evictable. `KEEP` marks them, and whoever else releases them
        later: marked ones go after all others, until they are evicted or too many. `DROP` is for a table that was not
        published: its own blocks become free, and what it shares is released as by `NORMAL`.
        """
        references, hash_of, weights, is_kept = self._references, self._hash_of, self._weights, self._is_kept
        keep, weight = retention is Retention.KEEP, 0
        normal: list[int] = []
        kept: list[int] = []
        for block in reversed(blocks):
            left = references[block] - 1
            if left < 0:
                raise AssertionError(f"block {block} released more often than held")
            references[block] = left
            if hash_of[block] is None:
                if left:
                    continue
                block = self._free_or_publish(block)
                if block < 0:
                    continue
                left = references[block]
            if weights:
                weight = weights[block] = max(weight, weights[block])
            if keep or is_kept[block]:
                keep = True
                is_kept[block] = True
            if not left:
                (kept if keep else normal).append(block)
        self._evictable.put(normal, weights)
        if kept:
            self._kept.put(kept, weights)
            self._limit_kept()

    def _free_or_publish(self, block: int) -> int:
        """An unpublished block is held no more. Returns the cached block of its content, in no order now, or -1."""
        digest = self._copies.pop(block, None)
        if digest is None:
            self._free.append(block)
            return -1
        cached = self._block_of.get(digest)
        if cached is None:
            self._publish(block, digest)
            return block
        self._free.append(block)
        if not self._references[cached]:
            self._take_from_orders((cached,))
        return cached

    def _limit_kept(self) -> None:
        """Of too many kept blocks, the first in order become normal ones, as if released now."""
        excess = len(self._kept) - self.num_blocks // 2
        if excess > 0:
            blocks = self._kept.pop(excess)
            self._unmark(blocks)
            self._evictable.put(blocks, self._weights)

    def _unmark(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._is_kept[block] = False

    def num_releasable(self, blocks: Iterable[int]) -> int:
        """How many of these have one reference only, so that releasing makes them available."""
        references = self._references
        return sum(references[block] == 1 for block in blocks)

    def publish_many(self, blocks: Collection[int], digests: Collection[bytes]) -> None:
        """Let held blocks, whose KV is written and acknowledged, be found by their hashes; as many as blocks.

        The first block of a content is found; a published block keeps its hash.
        """
        hash_of, block_of = self._hash_of, self._block_of
        for block, digest in zip(blocks, digests, strict=True):
            if hash_of[block] is not None:
                continue
            if digest in block_of:
                self._copies[block] = digest
            else:
                self._publish(block, digest)

    def _publish(self, block: int, digest: bytes) -> None:
        self._block_of[digest] = block
        self._hash_of[block] = digest
        if self._copies:
            self._copies.pop(block, None)
        if self._weights:
            self._num_published += 1
            self._weights[block] = self._num_published if self.eviction is Eviction.FIFO else 0

    def states(self, step: int = 1) -> list[BlockState]:
        """What every `step`-th block holds."""
        free, cached, held, shared = BlockState
        return [
            shared if references > 1 else held if references else free if digest is None else cached
            for references, digest in zip(self._references[::step], self._hash_of[::step], strict=True)
        ]

    def check_invariants(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless references equal the occurrences in `tables` and every block is in one place."""
        n, listed = self.num_blocks, [self._free, list(self._evictable), list(self._kept)]
        counted = np.bincount(np.array([block for table in tables for block in table], np.int64), minlength=n)
        assert counted.tolist() == self._references, "references differ from the occurrences in block tables"
        free, evictable, kept = (np.bincount(np.array(blocks, np.int64), minlength=n) for blocks in listed)
        free[self._num_touched :] += 1
        referenced = counted > 0
        places = free + evictable + kept + referenced
        assert places.max(initial=1) == 1, "a block in two places, or twice in one"
        assert places.min(initial=1) == 1, "a block is lost"
        cached = np.array([digest is not None for digest in self._hash_of], np.bool_)
        assert not np.any((evictable + kept > 0) & ~cached) and not np.any((free > 0) & cached)
        assert np.count_nonzero(cached) == len(self._block_of)
        assert all(self._hash_of[block] == digest for digest, block in self._block_of.items())
        copies = list(self._copies)
        assert np.all(referenced[copies] & ~cached[copies]), "a copy that nobody holds, or that is found"
        marked = np.frombuffer(self._is_kept, np.bool_)
        assert not np.any(marked & ~cached) and np.array_equal(marked & (evictable + kept > 0), kept > 0)
        assert np.count_nonzero(kept) <= n // 2


def extend_hashes(
    hashes: list[bytes], tokens: NDArray[np.int32], block_size: int, key: bytes, count: int, root: bytes = b""
) -> None:
    """Extend a chain in place so that it covers the first `count` full blocks of `tokens`.

    Each link is a 128-bit BLAKE2b over (previous link, the block's tokens). The first follows a hash of `root` (any
    length: it keeps chains of equal tokens apart) keyed with `key` (at most 64 bytes), so that no chain can be made to
    begin where another one goes on.
    """
    if count <= len(hashes):
        return
    previous = hashes[-1] if hashes else blake2b(root, digest_size=16, key=key).digest()
    data = tokens[len(hashes) * block_size : count * block_size].astype("<i4", copy=False).tobytes()
    for (block,) in struct.iter_unpack(f"{4 * block_size}s", data):
        link = _LINK.copy()
        link.update(previous + block)
        previous = link.digest()
        hashes.append(previous)
