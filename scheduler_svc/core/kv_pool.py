"""What a lane asks of the KV blocks of its executor, however they are laid out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence

from common.wire import BlockState, Retention


class KvPool(ABC):
    """`num_blocks` blocks, numbered from 0. All counts are in blocks."""

    num_blocks: int

    @property
    @abstractmethod
    def num_available(self) -> int:
        """Blocks that nobody holds."""

    @property
    @abstractmethod
    def num_cached(self) -> int:
        """Blocks that `lookup` can find, held or not."""

    @property
    @abstractmethod
    def num_cached_only(self) -> int:
        """Of the available blocks, those that `lookup` can find."""

    @property
    def num_referenced(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.num_available

    @abstractmethod
    def fits(self, count: int, released: Iterable[int] = ()) -> bool:
        """Whether `allocate(count)` would succeed, if one reference to each of `released` were given back before."""

    @abstractmethod
    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks with one reference each. Raises ValueError where `fits` is false."""

    @abstractmethod
    def lookup(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest cached prefix of this chain. Takes no reference."""

    @abstractmethod
    def num_evictable(self, blocks: Iterable[int]) -> int:
        """How many of these, which `lookup` found, would leave the available ones when shared."""

    @abstractmethod
    def share(self, blocks: Sequence[int]) -> None:
        """Take one more reference to each of these, which `lookup` found."""

    @abstractmethod
    def release(self, blocks: Sequence[int], retention: Retention = Retention.NORMAL) -> None:
        """Give one reference back for each block of a table, which lists them in the order of their positions."""

    @abstractmethod
    def num_releasable(self, blocks: Iterable[int]) -> int:
        """How many of these have one reference only, so that releasing makes them available."""

    @abstractmethod
    def publish_many(self, blocks: Collection[int], digests: Collection[bytes]) -> None:
        """Let held blocks, whose KV is written and acknowledged, be found by their hashes; as many as blocks.

        A lane passes what has become full since its last call: publishing twice is harmless, but costs time.
        """

    @abstractmethod
    def states(self, step: int = 1) -> list[BlockState]:
        """What every `step`-th block holds, from block 0 on. Costs as much as that list is long."""

    @abstractmethod
    def check_invariants(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless references equal the occurrences in `tables` and every block is in one place."""
