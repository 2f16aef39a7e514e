"""What an exchange needs of the KV memory."""

from __future__ import annotations

from typing import Protocol


class BlockStore(Protocol):
    """KV blocks as bytes, `block_bytes` each. The exchange's thread calls it, while iterations run on other blocks."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def layout(self) -> bytes:
        """16 bytes; stores with the same ones understand each other's blocks."""

    def read(self, blocks: list[int]) -> bytes:
        """The content of these blocks, one after the other. They lie in range."""

    def write(self, blocks: list[int], data: bytes) -> None:
        """Replace the content of these blocks; when this returns, iterations see it."""
