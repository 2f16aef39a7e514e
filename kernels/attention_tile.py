"""What the attention kernels share: reading one tile of a paged cache, and one step of the online softmax.

The softmax is FlashAttention's (Dao et al., 2022): a running maximum, a running sum and a running product with V, all
in fp32. Exponents are taken to base 2, so scores carry a factor log2(e).
"""

from __future__ import annotations

import torch

from kernels.compiler import power_of_two, tl, triton

TILE_BYTES = 16384
"""Bytes of one K or V tile: two tensors in two pipeline stages then fit in 64 KiB of shared memory, which all have.
Of an fp32 tile half as many, because no matrix unit multiplies in full fp32 and the operands lie in registers."""


def key_tile(head_dim: int, dtype: torch.dtype) -> int:
    """Keys worked on at once: a power of two from 16 (the least a matrix product takes) to 128."""
    budget = TILE_BYTES // 2 if dtype == torch.float32 else TILE_BYTES
    return min(128, max(16, budget // (power_of_two(head_dim) * dtype.itemsize)))


@triton.jit
def _load_tile(
    cache_ptr,
    table_ptr,
    position,
    visible,
    kv_head,
    kv_heads,
    head_dim,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """[KEYS, HEAD_DIM] of one KV head at `position`, int32 [KEYS]; zeros where not `visible` or past head_dim."""
    block = tl.load(table_ptr + position // BLOCK_SIZE, mask=visible, other=0).to(tl.int64)
    slot = block * BLOCK_SIZE + position % BLOCK_SIZE
    column = tl.arange(0, HEAD_DIM)
    offset = (slot * kv_heads + kv_head) * head_dim
    mask = visible[:, None] & (column < head_dim)[None, :]
    return tl.load(cache_ptr + offset[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def _scores(query, key, scale, softcap, SOFTCAP: tl.constexpr):
    """query: [ROWS, HEAD_DIM], key: [KEYS, HEAD_DIM]. Returns logits * log2(e), fp32 [ROWS, KEYS]."""
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if SOFTCAP:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)  # softcap * tanh(scores / softcap)
    return scores * 1.4426950408889634  # log2(e)


@triton.jit
def _accumulate(scores, value, highest, total, product):
    """One step of the online softmax over a tile; scores are -inf where masked. Returns the new running values.

    A row that has seen no key yet keeps its zeros: the difference of two infinities would be NaN.
    """
    new_highest = tl.maximum(highest, tl.max(scores, axis=1))
    reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp2(scores - reference[:, None])
    shrink = tl.exp2(highest - reference)
    total = total * shrink + tl.sum(weights, axis=1)
    product = product * shrink[:, None]
    product = tl.dot(weights.to(value.dtype), value, product, input_precision="ieee")
    return new_highest, total, product
