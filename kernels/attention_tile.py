"""What an attention kernel does with one tile of a paged cache.

The softmax is FlashAttention's (Dao et al., 2022): a running maximum, a running sum and a running product with V, all
in fp32. Exponents are taken to base 2, so scores carry a factor log2(e).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.compiler import power_of_two, tl, triton
from kernels.float8 import _from_cache

TILE_BYTES = 16384
"""Bytes of one K or V tile: two tensors in two pipeline stages then fit in 64 KiB of shared memory, which all have.
Of an fp32 tile half as many, because no matrix unit multiplies in full fp32 and the operands lie in registers."""


@dataclass(frozen=True)
class TileShape:
    """Rows and keys of the score matrix, and warps of a program."""

    rows: int
    keys: int
    warps: int


def key_tile(head_dim: int, dtype: torch.dtype) -> int:
    """Keys worked on at once: a power of two from 16 (the least a matrix product takes) to 128."""
    budget = TILE_BYTES // 2 if dtype == torch.float32 else TILE_BYTES
    return min(128, max(16, budget // (power_of_two(head_dim) * dtype.itemsize)))


def tile_shape(head_dim: int, group: int, dtype: torch.dtype, *, decodes_only: bool, invariant: bool) -> TileShape:
    """As large as spills no registers, or few, on any chip we compile for.

    The invariant form has one shape for every row, and keeps two products of it: that of a split, and that of all.
    """
    keys, warps = min(64, key_tile(head_dim, dtype)), 8
    one_token = max(16, power_of_two(group))
    if decodes_only and not invariant:
        return TileShape(one_token, key_tile(head_dim, dtype), 4 if one_token <= 32 else 8)
    rows = 128 if head_dim <= 128 else 64
    if dtype == torch.float32:
        rows = 32
    elif invariant:
        rows //= 2
        # Eight warps of 64 columns are held to 128 registers on sm_100; of more columns 64 keys are too many on sm_80.
        keys, warps = (keys, 4) if head_dim <= 64 else (min(32, keys), 8)
    return TileShape(max(rows, one_token), keys, warps)


@triton.jit
def _load_tile(cache_ptr, offset, visible, head_dim, HEAD_DIM: tl.constexpr, ELEMENT: tl.constexpr):
    """[KEYS, HEAD_DIM] as ELEMENT, of the keys that begin at offset, int64 [KEYS]; zeros where not `visible`."""
    column = tl.arange(0, HEAD_DIM)
    mask = visible[:, None] & (column < head_dim)[None, :]
    return _from_cache(tl.load(cache_ptr + offset[:, None] + column[None, :], mask=mask, other=0.0), ELEMENT)


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


@triton.jit
def _attend(
    running,
    query,
    position,
    begin,
    end,
    cache,
    logits,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Keys begin .. end - 1 for a tile of queries at `position`, int32 [ROWS]. Returns the new running values.

    running: the highest score, the sum and the product with V so far, fp32 [ROWS], [ROWS], [ROWS, HEAD_DIM].
    cache: K and V, the row's block table, the KV head and how many there are, head_dim. logits: their scale and cap.
    Tiles lie at multiples of KEYS wherever `begin` is, so that a query meets the same tiles in any company.
    """
    highest, total, product = running
    k_cache_ptr, v_cache_ptr, table_ptr, kv_head, kv_heads, head_dim = cache
    scale, softcap = logits
    for start in range(begin // KEYS * KEYS, end, KEYS):
        key_at = start + tl.arange(0, KEYS)
        visible = (key_at >= begin) & (key_at < end)
        block = tl.load(table_ptr + key_at // BLOCK_SIZE, mask=visible, other=0).to(tl.int64)
        offset = ((block * BLOCK_SIZE + key_at % BLOCK_SIZE) * kv_heads + kv_head) * head_dim
        key = _load_tile(k_cache_ptr, offset, visible, head_dim, HEAD_DIM, query.dtype)
        scores = _scores(query, key, scale, softcap, SOFTCAP)
        seen = visible[None, :] & (key_at[None, :] <= position[:, None])
        if WINDOW > 0:
            seen &= key_at[None, :] > position[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
        value = _load_tile(v_cache_ptr, offset, visible, head_dim, HEAD_DIM, query.dtype)
        highest, total, product = _accumulate(scores, value, highest, total, product)
    return highest, total, product
