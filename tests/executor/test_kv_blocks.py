"""KV blocks as bytes, on their way to another executor."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from executor_svc.handover.kv_blocks import KvBlocks
from executor_svc.kv_cache import FP8, KVCache


@dataclass
class Shape:
    num_layers: int = 3
    num_kv_heads: int = 1
    head_dim: int = 6


@pytest.mark.parametrize(
    ("dtype", "block_size"), [(torch.float32, 4), (torch.bfloat16, 4), (torch.float16, 1), (FP8, 1)]
)
def test_the_blocks_of_a_cache(dtype: torch.dtype, block_size: int) -> None:
    """Bits, whatever they mean as numbers; blocks of a size in words and not."""
    one, other = (KVCache.allocate(Shape(), 9, block_size, dtype, torch.device("cpu")) for _ in range(2))

    def bits(cache: KVCache) -> torch.Tensor:
        return torch.stack([layer.view(torch.uint8).flatten(1) for layer in (*cache.k, *cache.v)], 1)

    for layer in (*one.k, *one.v, *other.k, *other.v):
        layer.view(torch.uint8).random_(0, 256)
    before = bits(other)
    source, target = KvBlocks(one), KvBlocks(other)
    assert source.num_blocks == 9 and source.block_bytes == bits(one)[0].numel() and source.layout == target.layout
    data = source.read([5, 2, 8])
    assert len(data) == 3 * source.block_bytes
    target.write([0, 7, 3], data)
    after = bits(other)
    assert torch.equal(after[[0, 7, 3]], bits(one)[[5, 2, 8]])
    rest = [1, 2, 4, 5, 6, 8]
    assert torch.equal(after[rest], before[rest])


def test_caches_that_differ_have_other_layouts() -> None:
    device = torch.device("cpu")
    made = [
        KVCache.allocate(shape, 2, size, dtype, device)
        for shape, size, dtype in (
            (Shape(), 4, torch.float32),
            (Shape(), 4, torch.bfloat16),
            (Shape(), 4, torch.float16),
            (Shape(), 8, torch.float32),
            (Shape(num_layers=2), 4, torch.float32),
            (Shape(num_kv_heads=2), 4, torch.float32),
            (Shape(num_kv_heads=2, head_dim=3), 4, torch.float32),
        )
    ]
    assert len({KvBlocks(cache).layout for cache in made}) == len(made)
