"""Blocks on their way between device and host, against plain indexing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from executor_svc import host_blocks
from executor_svc.host_blocks import HostBlocks
from executor_svc.kv_cache import FP8, KVCache
from tests.executor.plans import ids


@dataclass
class Shape:
    num_layers: int = 3
    num_kv_heads: int = 1
    head_dim: int = 6


def bits(cache: KVCache) -> torch.Tensor:
    return torch.stack([layer.view(torch.uint8).flatten(1) for layer in (*cache.k, *cache.v)], 1)


@pytest.mark.parametrize(
    ("dtype", "block_size"), [(torch.float32, 4), (torch.bfloat16, 4), (torch.float16, 1), (FP8, 4), (FP8, 1)]
)
@pytest.mark.parametrize(("at_once", "slab_bytes"), [(2, 1 << 30), (16, 1 << 30), (16, 1), (2, 1500)])
def test_out_and_in(
    dtype: torch.dtype, block_size: int, at_once: int, slab_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits, whatever they mean as numbers; blocks of a size in words and not; more blocks than fit at once, and than
    fit in one allocation."""
    monkeypatch.setattr(host_blocks, "BLOCKS_AT_ONCE", at_once)
    monkeypatch.setattr(host_blocks, "SLAB_BYTES", slab_bytes)
    cache = KVCache.allocate(Shape(), 9, block_size, dtype, torch.device("cpu"))
    for layer in (*cache.k, *cache.v):
        layer.view(torch.uint8).random_(0, 256)
    before = bits(cache)
    host = HostBlocks(cache, 7)
    host.take(ids(5, 0, 2, 6, 8, 3))
    cache.copy(ids(0, 5, 1, 8))
    assert torch.equal(bits(cache), before[[0, 1, 2, 3, 4, 0, 6, 7, 1]])
    host.give(ids(6, 4, 3, 0, 0, 7))
    assert torch.equal(bits(cache), before[[8, 1, 2, 3, 2, 0, 6, 5, 1]])
    host.take(np.empty(0, np.int32))


def test_memory_is_allocated_in_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch's rounding can waste is less than a slab, and less than a block of each full one."""
    cache = KVCache.allocate(Shape(), 1, 4, torch.float32, torch.device("cpu"))
    each = sum(layer.nbytes for layer in (*cache.k, *cache.v))
    monkeypatch.setattr(host_blocks, "SLAB_BYTES", 4096)
    sizes = [slab.nbytes for slab in HostBlocks(cache, 17)._slabs]
    assert sum(sizes) == 17 * each and len(sizes) > 1
    assert all(4096 - each < size <= 4096 for size in sizes[:-1]) and sizes[-1] <= 4096
