"""The KV blocks of a model, on the device and, for swapping, on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kernels import copy_blocks


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
        cls,
        shape: KVShape,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        pin: bool = False,
    ) -> KVCache:
        """Blocks with nothing in them. On the CPU their memory is committed as they are used."""
        size = (num_blocks, block_size, shape.num_kv_heads, shape.head_dim)

        def layers() -> list[torch.Tensor]:
            return [torch.empty(size, dtype=dtype, device=device, pin_memory=pin) for _ in range(shape.num_layers)]

        return cls(k=layers(), v=layers())

    def copy(self, pairs: NDArray[np.int32]) -> None:
        """Copy blocks inside the cache. pairs: (from, to), flattened."""
        source, target = _ends(pairs, self.k[0].device)
        for k, v in zip(self.k, self.v, strict=True):
            copy_blocks(k, v, source, target)

    def fetch(self, other: KVCache, pairs: NDArray[np.int32]) -> None:
        """Copy blocks of another cache into this one. pairs: (block of the other, block of this one), flattened."""
        source, _ = _ends(pairs, other.k[0].device)
        _, target = _ends(pairs, self.k[0].device)
        for mine, theirs in zip((*self.k, *self.v), (*other.k, *other.v), strict=True):
            mine.index_copy_(0, target, theirs.index_select(0, source).to(mine.device))


def _ends(pairs: NDArray[np.int32], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.from_numpy(pairs.astype(np.int64)).to(device)
    return both[0::2].contiguous(), both[1::2].contiguous()


def block_bytes(shape: KVShape, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return 2 * shape.num_layers * block_size * shape.num_kv_heads * shape.head_dim * dtype.itemsize
