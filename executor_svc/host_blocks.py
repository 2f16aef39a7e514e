"""KV blocks in host memory: where swapped sequences wait."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from executor_svc.kv_cache import KVCache, gather_blocks, scatter_blocks, words_of_blocks
from executor_svc.transfer import Transfer

BLOCKS_AT_ONCE = 16
"""Blocks that wait on the device, on their way out or in: they bound its scratch memory."""

SLAB_BYTES = 1 << 30
"""Of one allocation: torch rounds page-locked memory up to a power of two, so a single one might take twice as much."""


class HostBlocks:
    """A host block holds all layers of a device block in one piece, so it moves in one copy.

    On a GPU the memory is page-locked, and the copies are queued on the current stream behind what was launched before:
    nobody waits for them. The device gathers and scatters a layer of many blocks at a time.
    """

    def __init__(self, cache: KVCache, num_blocks: int) -> None:
        self._layers = [words_of_blocks(layer) for layer in (*cache.k, *cache.v)]
        device, dtype = self._layers[0].device, self._layers[0].dtype
        self._shape = (len(self._layers), self._layers[0].shape[1])
        self._per_slab = max(1, SLAB_BYTES // (math.prod(self._shape) * dtype.itemsize))
        self._slabs = [
            torch.empty(
                (min(self._per_slab, num_blocks - first), *self._shape), dtype=dtype, pin_memory=device.type == "cuda"
            )
            for first in range(0, num_blocks, self._per_slab)
        ]
        self._transfer = Transfer(device)

    def take(self, pairs: NDArray[np.int32]) -> None:
        """Copy device blocks to the host. pairs: (device block, host block), flattened."""
        for part in _parts(pairs):
            source = self._transfer.send(part[:, 0].astype(np.int64))
            scratch = gather_blocks(self._layers, source)
            for place, block in enumerate(part[:, 1].tolist()):
                self._block(block).copy_(scratch[place], non_blocking=True)

    def give(self, pairs: NDArray[np.int32]) -> None:
        """Copy host blocks to the device. pairs: (host block, device block), flattened."""
        for part in _parts(pairs):
            target = self._transfer.send(part[:, 1].astype(np.int64))
            layer = self._layers[0]
            scratch = torch.empty((len(part), *self._shape), dtype=layer.dtype, device=layer.device)
            for place, block in enumerate(part[:, 0].tolist()):
                scratch[place].copy_(self._block(block), non_blocking=True)
            scatter_blocks(self._layers, target, scratch)

    def _block(self, number: int) -> torch.Tensor:
        slab, place = divmod(number, self._per_slab)
        return self._slabs[slab][place]


def _parts(pairs: NDArray[np.int32]) -> list[NDArray[np.int32]]:
    both = pairs.reshape(-1, 2)
    return [both[i : i + BLOCKS_AT_ONCE] for i in range(0, len(both), BLOCKS_AT_ONCE)]
