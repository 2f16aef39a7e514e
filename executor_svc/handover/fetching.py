"""One hand-over on its way in: asks for chunk after chunk, and writes what comes to where the core said."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import zmq

from common.wire import BlocksRead, Fetch, ReadBlocks, WireError, decode, encode
from common.wire.handover import MAX_CHUNK_BLOCKS
from executor_svc.handover.transfer_socket import CHUNK_BYTES, SILENCE_MS, TransferSocket

WINDOW = 3
"""Chunks asked for at a time."""
ASK_AGAIN_S = 0.05
"""The source may hear of a ticket later than the target: until something has come, all is asked for again after it."""
Write = Callable[[list[int], bytes], str]
"""(blocks, content) -> why they could not be written, or nothing."""


class Fetching:
    """`outcome`: None while it is under way, then why it failed; empty: all is there."""

    def __init__(
        self, order: Fetch, block_bytes: int, dialling: TransferSocket, context: zmq.Context[zmq.Socket[bytes]],
        now: float,
    ) -> None:  # fmt: skip
        """Raises zmq.ZMQError, ValueError where the address or key cannot be used."""
        self.order, self.begun = order, now
        self.outcome: str | None = None
        self._blocks: list[int] = order.blocks.tolist()
        self._block_bytes = block_bytes
        self._per_chunk = min(MAX_CHUNK_BLOCKS, max(1, CHUNK_BYTES // block_bytes))
        self._to_ask = list(range(0, len(self._blocks), self._per_chunk))[::-1]
        self._asked: list[int] = []
        """Firsts of the chunks that are awaited."""
        self._num_missing = len(self._to_ask)
        self._heard_at, self._asked_at = now, now
        self._has_begun = False
        self._deadline = now + order.timeout_ms / 1000
        max_bytes = self._per_chunk * block_bytes + 256
        self.socket = dialling.dial(context, order.address, order.key, max_bytes)

    def close(self) -> None:
        self.socket.close(linger=0)

    @property
    def due(self) -> float:
        """When to come back, if nothing is heard."""
        silent = self._heard_at + SILENCE_MS / 1000
        return min(self._deadline, silent, *([] if self._has_begun else [self._asked_at + ASK_AGAIN_S]))

    def advance(self, write: Write, now: float) -> None:
        """Take what has come, and ask for more."""
        self._receive(write, now)
        if self.outcome is not None:
            return
        if now >= self._deadline:
            self.outcome = "it took too long"
        elif now >= self._heard_at + SILENCE_MS / 1000:
            self.outcome = "the source is silent"
        else:
            self._ask(now)

    def _receive(self, write: Write, now: float) -> None:
        with contextlib.suppress(zmq.Again):
            while self.outcome is None:
                self._take(self.socket.recv_multipart(zmq.DONTWAIT), write, now)

    def _take(self, frames: list[bytes], write: Write, now: float) -> None:
        try:
            chunk = decode(frames[0])
        except WireError:
            return
        if len(frames) != 1 or not isinstance(chunk, BlocksRead) or chunk.secret != self.order.secret:
            return
        if chunk.first not in self._asked:
            return  # it came twice
        blocks = self._blocks[chunk.first : chunk.first + self._per_chunk]
        if len(chunk.data) != len(blocks) * self._block_bytes:
            self.outcome = "the source has blocks of another size"
            return
        self._asked.remove(chunk.first)
        self._heard_at, self._has_begun = now, True
        refusal = write(blocks, chunk.data)
        self._num_missing -= 1
        if refusal or not self._num_missing:
            self.outcome = refusal

    def _ask(self, now: float) -> None:
        if not self._has_begun and now >= self._asked_at + ASK_AGAIN_S:
            self._to_ask += self._asked[::-1]
            self._asked.clear()
        while self._to_ask and len(self._asked) < WINDOW:
            first = self._to_ask[-1]
            count = min(self._per_chunk, len(self._blocks) - first)
            try:
                self.socket.send(encode(ReadBlocks(self.order.secret, first, count)), zmq.DONTWAIT)
            except zmq.Again:
                break
            self._asked.append(self._to_ask.pop())
            self._asked_at = now
