"""Blocks that other executors may read."""

from __future__ import annotations

from common.wire import BlocksRead, Lend, ReadBlocks, WireError, decode, encode
from common.wire.handover import SECRET_BYTES
from executor_svc.handover.store import BlockStore
from executor_svc.handover.transfer_socket import CHUNK_BYTES

MAX_TICKETS = 65_535
"""No lane has more seats."""


class Lending:
    """Who knows the secret of a ticket may read its blocks, and no others. Not for two threads at once."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._blocks: dict[bytes, list[int]] = {}
        """By secret."""
        self._secrets: dict[int, bytes] = {}
        """By ticket."""
        self._most = max(1, CHUNK_BYTES // store.block_bytes)

    def __len__(self) -> int:
        return len(self._blocks)

    def lend(self, order: Lend) -> str:
        """Let a ticket be read from now on. Returns why not, or nothing."""
        blocks = order.blocks.tolist()
        if len(order.secret) != SECRET_BYTES or order.ticket in self._secrets or order.secret in self._blocks:
            return "a ticket without a secret, or twice"
        if len(self._blocks) >= MAX_TICKETS:
            return "too many tickets"
        if not blocks or min(blocks) < 0 or max(blocks) >= self._store.num_blocks:
            return "blocks out of range"
        self._blocks[order.secret] = blocks
        self._secrets[order.ticket] = order.secret
        return ""

    def recall(self, ticket: int) -> bool:
        """A ticket is over. Returns whether there was one."""
        secret = self._secrets.pop(ticket, None)
        if secret is None:
            return False
        del self._blocks[secret]
        return True

    def clear(self) -> None:
        self._blocks.clear()
        self._secrets.clear()

    def find(self, request: bytes) -> tuple[ReadBlocks, list[int]] | None:
        """The blocks that a request is for; None when there are none. Raises `WireError` on junk."""
        wanted = decode(request)
        if not isinstance(wanted, ReadBlocks):
            raise WireError(f"unexpected {type(wanted).__name__}")
        if wanted.count > self._most:
            raise WireError(f"{wanted.count} blocks at once")
        blocks = self._blocks.get(wanted.secret, [])[wanted.first : wanted.first + wanted.count]
        return (wanted, blocks) if len(blocks) == wanted.count else None


def answer(wanted: ReadBlocks, data: bytes) -> bytes:
    return encode(BlocksRead(wanted.secret, wanted.first, data))
