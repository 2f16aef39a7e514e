"""The KV blocks of a model on its device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from executor_svc.transfer import Transfer
from kernels import copy_blocks
from kernels.float8 import E4M3

FP8 = E4M3


class KVShape(Protocol):
    """What of a model's configuration the cache depends on."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


@dataclass
class KVCache:
    """k and v: one tensor a layer, each [num_blocks, block_size, kv_heads, head_dim]."""

    k: list[torch.Tensor]
    v: list[torch.Tensor]

    @classmethod
    def allocate(
        cls, shape: KVShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        """Blocks with nothing in them. On the CPU their memory is committed as they are used.

        dtype: the model's, or `FP8`.
        """
        size = (num_blocks, block_size, shape.num_kv_heads, shape.head_dim)

        def layers() -> list[torch.Tensor]:
            return [torch.empty(size, dtype=dtype, device=device) for _ in range(shape.num_layers)]

        return cls(k=layers(), v=layers())

    def clear(self) -> None:
        """Zeros in all blocks."""
        for layer in (*self.k, *self.v):
            words_of_blocks(layer).zero_()

    def copy(self, pairs: NDArray[np.int32]) -> None:
        """Copy blocks inside the cache. pairs: (from, to), flattened."""
        source, target = pairs.reshape(-1, 2).T.astype(np.int64)
        source_ids, target_ids = Transfer(self.k[0].device).send_together(source, target)
        for k, v in zip(self.k, self.v, strict=True):
            copy_blocks(words_of_blocks(k), words_of_blocks(v), source_ids, target_ids)


def words_of_blocks(layer: torch.Tensor) -> torch.Tensor:
    """A view, [num_blocks, words], for who moves whole blocks: few operations know 8-bit floats."""
    size = layer[0].numel() * layer.element_size()
    word = next(dtype for dtype in (torch.int64, torch.int32, torch.uint8) if size % dtype.itemsize == 0)
    return layer.view(len(layer), -1).view(word)


def gather_blocks(layers: list[torch.Tensor], blocks: torch.Tensor) -> torch.Tensor:
    """Whole blocks, [n, layers, words], of all layers ([num_blocks, words] each). blocks: int64 [n], on the device."""
    gathered = torch.empty((len(blocks), len(layers), layers[0].shape[1]), dtype=layers[0].dtype, device=blocks.device)
    for index, layer in enumerate(layers):
        gathered[:, index] = layer.index_select(0, blocks)
    return gathered


def scatter_blocks(layers: list[torch.Tensor], blocks: torch.Tensor, gathered: torch.Tensor) -> None:
    """Put gathered blocks ([n, layers, words]) to these places (int64 [n])."""
    for index, layer in enumerate(layers):
        layer.index_copy_(0, blocks, gathered[:, index])


def block_bytes(shape: KVShape, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers; dtype is the cache's."""
    return 2 * shape.num_layers * block_size * shape.num_kv_heads * shape.head_dim * dtype.itemsize
