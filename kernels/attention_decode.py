"""Paged attention of rows with one query token: split over the keys, then merged (Flash-Decoding, Dao et al., 2023).

A split is SPLIT_KEYS keys at fixed positions, so how a row is cut depends on the row alone, never on its batch mates.
The query heads that share a KV head are the rows of one matrix product, so a key is read once for all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.attention_tile import _accumulate, _load_tile, _scores, key_tile
from kernels.compiler import ceil_div, power_of_two, tl, triton

if TYPE_CHECKING:
    from kernels.attention import AttentionBatch

SPLIT_KEYS = 512


@triton.jit
def _first_key(context, WINDOW: tl.constexpr):
    """The first position that the query at context - 1 sees."""
    first = context * 0
    if WINDOW > 0:
        first = tl.maximum(context - WINDOW, 0)
    return first


@triton.jit(do_not_specialize=["splits", "table_stride"])
def _decode_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    out_ptr,
    partial_ptr,
    partial_sum_ptr,
    block_tables_ptr,
    context_lens_ptr,
    scale,
    softcap,
    q_token_stride,
    table_stride,
    kv_heads,
    head_dim,
    group,
    splits,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    MERGE: tl.constexpr,
):
    """One program a (row, KV head, split). GROUP and HEAD_DIM are powers of two, at least 16, of group and head_dim.

    Without MERGE writes the row's output, otherwise the split's: partial fp32 [B, HQ, splits, head_dim], and the log2
    of its sum of exponents, fp32 [B, HQ, splits].
    """
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    context = tl.load(context_lens_ptr + row)
    first = _first_key(context, WINDOW)
    split_begin = (first // SPLIT + split) * SPLIT
    end = tl.minimum(split_begin + SPLIT, context)
    if split_begin >= end and split > 0:
        return

    member = tl.arange(0, GROUP)
    column = tl.arange(0, HEAD_DIM)
    heads = kv_head * group + member
    in_head = (member < group)[:, None] & (column < head_dim)[None, :]
    at = heads[:, None] * head_dim + column[None, :]
    query = tl.load(q_ptr + row * q_token_stride + at, mask=in_head, other=0.0)
    highest = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    product = tl.zeros([GROUP, HEAD_DIM], tl.float32)
    begin = tl.maximum(split_begin, first // KEYS * KEYS)
    table = block_tables_ptr + row * table_stride
    for start in range(begin, end, KEYS):
        position = start + tl.arange(0, KEYS)
        visible = (position >= first) & (position < end)
        key = _load_tile(k_cache_ptr, table, position, visible, kv_head, kv_heads, head_dim, BLOCK_SIZE, HEAD_DIM)
        scores = _scores(query, key, scale, softcap, SOFTCAP)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        value = _load_tile(v_cache_ptr, table, position, visible, kv_head, kv_heads, head_dim, BLOCK_SIZE, HEAD_DIM)
        highest, total, product = _accumulate(scores, value, highest, total, product)

    total = tl.where(total == 0.0, 1.0, total)  # a padding row has seen no key
    out = product / total[:, None]
    row_head = row * kv_heads * group + heads
    if MERGE:
        slot = row_head * splits + split
        tl.store(partial_ptr + slot[:, None] * head_dim + column[None, :], out, mask=in_head)
        tl.store(partial_sum_ptr + slot, highest + tl.log2(total), mask=member < group)
    else:
        target = out_ptr + row_head[:, None] * head_dim + column[None, :]
        tl.store(target, out.to(out_ptr.dtype.element_ty), mask=in_head)


@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(
    partial_ptr,
    partial_sum_ptr,
    out_ptr,
    context_lens_ptr,
    heads,
    head_dim,
    splits,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One program a (row, query head): the splits' outputs, weighted by their sums of exponents."""
    row = tl.program_id(0).to(tl.int64)
    row_head = row * heads + tl.program_id(1)
    context = tl.load(context_lens_ptr + row)
    used = (context + SPLIT - 1) // SPLIT - _first_key(context, WINDOW) // SPLIT
    column = tl.arange(0, HEAD_DIM)
    highest = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    product = tl.zeros([HEAD_DIM], tl.float32)
    for split in range(used):
        slot = row_head * splits + split
        log_sum = tl.load(partial_sum_ptr + slot)
        value = tl.load(partial_ptr + slot * head_dim + column, mask=column < head_dim, other=0.0)
        new_highest = tl.maximum(highest, log_sum)
        shrink, weight = tl.exp2(highest - new_highest), tl.exp2(log_sum - new_highest)
        product = product * shrink + value * weight
        total = total * shrink + weight
        highest = new_highest
    out = product / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row_head * head_dim + column, out.to(out_ptr.dtype.element_ty), mask=column < head_dim)


def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int,
    softcap: float,
) -> None:
    """Writes out[: num_decodes] for the rows with one query token. Shapes as in `kernels.paged_attention`."""
    rows, (_, heads, head_dim) = batch.num_decodes, q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    splits = max(1, ceil_div(batch.max_context_len, SPLIT_KEYS))
    if window > 0:
        splits = min(splits, ceil_div(window, SPLIT_KEYS) + 1)
    partial, partial_sum = out, out
    if splits > 1:
        partial = torch.empty((rows, heads, splits, head_dim), dtype=torch.float32, device=q.device)
        partial_sum = torch.empty((rows, heads, splits), dtype=torch.float32, device=q.device)
    _decode_kernel[(rows, kv_heads, splits)](
        q,
        k_cache,
        v_cache,
        out,
        partial,
        partial_sum,
        batch.block_tables,
        batch.context_lens,
        scale,
        softcap,
        q.stride(0),
        batch.block_tables.stride(0),
        kv_heads,
        head_dim,
        heads // kv_heads,
        splits,
        WINDOW=window,
        SOFTCAP=softcap > 0,
        BLOCK_SIZE=block_size,
        GROUP=max(16, power_of_two(heads // kv_heads)),
        HEAD_DIM=max(16, power_of_two(head_dim)),
        KEYS=key_tile(head_dim, k_cache.dtype),
        SPLIT=SPLIT_KEYS,
        MERGE=splits > 1,
        num_warps=4,
        num_stages=2,
    )
    if splits > 1:
        _merge_kernel[(rows, heads)](
            partial,
            partial_sum,
            out,
            batch.context_lens,
            heads,
            head_dim,
            splits,
            WINDOW=window,
            HEAD_DIM=power_of_two(head_dim),
            SPLIT=SPLIT_KEYS,
            num_warps=2,
        )
