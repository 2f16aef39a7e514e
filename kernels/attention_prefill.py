"""Paged attention of prefill chunks: several query tokens a row, causal, rows of any length in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.attention_tile import _accumulate, _load_tile, _scores, key_tile
from kernels.compiler import ceil_div, power_of_two, tl, triton

if TYPE_CHECKING:
    from kernels.attention import AttentionBatch


@triton.jit(do_not_specialize=["first_row", "table_stride"])
def _prefill_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    out_ptr,
    block_tables_ptr,
    query_start_ptr,
    context_lens_ptr,
    first_row,
    scale,
    softcap,
    q_token_stride,
    out_token_stride,
    table_stride,
    kv_heads,
    head_dim,
    group,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One program a (query tile, KV head, sequence).

    The ROWS rows of a tile are ROWS // group query tokens times the `group` query heads of the KV head; the remainder
    stays idle. HEAD_DIM is head_dim's power of two, at least 16.
    """
    tokens = ROWS // group
    kv_head = tl.program_id(1)
    sequence = first_row + tl.program_id(2)
    query_begin = tl.load(query_start_ptr + sequence)
    query_len = tl.load(query_start_ptr + sequence + 1) - query_begin
    token = tl.program_id(0) * tokens
    if token >= query_len:
        return
    last = tl.minimum(token + tokens, query_len)
    context = tl.load(context_lens_ptr + sequence)
    before = context - query_len

    place = tl.arange(0, ROWS)
    column = tl.arange(0, HEAD_DIM)
    row_token = token + place // group
    in_tile = (row_token < last)[:, None] & (column < head_dim)[None, :]
    at = (kv_head * group + place % group)[:, None] * head_dim + column[None, :]
    row = (query_begin + row_token).to(tl.int64)[:, None]
    query = tl.load(q_ptr + row * q_token_stride + at, mask=in_tile, other=0.0)
    row_position = before + row_token
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    product = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    first = context * 0
    if WINDOW > 0:
        first = tl.maximum(before + token - WINDOW + 1, 0)
    end = before + last
    table = block_tables_ptr + sequence.to(tl.int64) * table_stride
    for start in range(first // KEYS * KEYS, end, KEYS):
        position = start + tl.arange(0, KEYS)
        visible = (position >= first) & (position < end)
        key = _load_tile(k_cache_ptr, table, position, visible, kv_head, kv_heads, head_dim, BLOCK_SIZE, HEAD_DIM)
        scores = _scores(query, key, scale, softcap, SOFTCAP)
        seen = visible[None, :] & (position[None, :] <= row_position[:, None])
        if WINDOW > 0:
            seen &= position[None, :] > row_position[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
        value = _load_tile(v_cache_ptr, table, position, visible, kv_head, kv_heads, head_dim, BLOCK_SIZE, HEAD_DIM)
        highest, total, product = _accumulate(scores, value, highest, total, product)

    out = product / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptr + row * out_token_stride + at, out.to(out_ptr.dtype.element_ty), mask=in_tile)


def tile_shape(head_dim: int, group: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Rows and keys of a tile, and warps: as large as spills no registers on any chip we compile for."""
    keys = min(64, key_tile(head_dim, dtype))
    if dtype == torch.float32:
        rows = 32
    else:
        rows = 128 if head_dim <= 128 else 64
    return max(rows, power_of_two(group)), keys, 8


def attention_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int,
    softcap: float,
) -> None:
    """Writes the outputs of the rows after the decodes. Shapes as in `kernels.paged_attention`."""
    sequences, (_, heads, head_dim) = len(batch.context_lens) - batch.num_decodes, q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    group = heads // kv_heads
    rows, keys, warps = tile_shape(head_dim, group, k_cache.dtype)
    _prefill_kernel[(ceil_div(batch.max_query_len, rows // group), kv_heads, sequences)](
        q,
        k_cache,
        v_cache,
        out,
        batch.block_tables,
        batch.query_start,
        batch.context_lens,
        batch.num_decodes,
        scale,
        softcap,
        q.stride(0),
        out.stride(0),
        batch.block_tables.stride(0),
        kv_heads,
        head_dim,
        group,
        WINDOW=window,
        SOFTCAP=softcap > 0,
        BLOCK_SIZE=block_size,
        ROWS=rows,
        HEAD_DIM=max(16, power_of_two(head_dim)),
        KEYS=keys,
        num_warps=warps,
        num_stages=2,
    )
