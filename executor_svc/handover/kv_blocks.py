"""The KV cache of a model as a store of blocks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from hashlib import blake2b

import numpy as np
import torch

from executor_svc.kv_cache import KVCache, gather_blocks, scatter_blocks, words_of_blocks


class KvBlocks:
    """A block is its keys of all layers, then its values, as they lie in memory.

    On a GPU the copies have a stream of their own: iterations neither wait for them nor hold them up. What is read was
    written by iterations that have ended, and nobody reads what is written before `write` has returned.
    """

    def __init__(self, cache: KVCache) -> None:
        self._layers = [words_of_blocks(layer) for layer in (*cache.k, *cache.v)]
        words, device = self._layers[0], self._layers[0].device
        self._shape = (len(self._layers), words.shape[1])
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.num_blocks = len(words)
        self.block_bytes = self._shape[0] * self._shape[1] * words.element_size()
        first = cache.k[0]
        text = f"1 {len(cache.k)} {first.dtype} {list(first.shape[1:])} {sys.byteorder}"
        self.layout = blake2b(text.encode(), digest_size=16).digest()

    @torch.inference_mode()
    def read(self, blocks: list[int]) -> bytes:
        """Raises RuntimeError where the device fails."""
        with self._on_stream():
            ids = torch.tensor(blocks, dtype=torch.int64).to(self._layers[0].device)
            data: bytes = gather_blocks(self._layers, ids).cpu().numpy().tobytes()
        return data

    @torch.inference_mode()
    def write(self, blocks: list[int], data: bytes) -> None:
        """Raises RuntimeError where the device fails."""
        layer = self._layers[0]
        content = torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(layer.dtype)
        with self._on_stream():
            ids = torch.tensor(blocks, dtype=torch.int64).to(layer.device)
            scatter_blocks(self._layers, ids, content.view(len(blocks), *self._shape).to(layer.device))
            if self._stream is not None:
                self._stream.synchronize()

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            yield
