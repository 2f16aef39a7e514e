"""Paged attention of any mix of rows, decodes and prefill chunks, in one launch.

The query heads that share a KV head are rows of one matrix product, so a key is read once for all of them.
"""

from __future__ import annotations

from kernels.attention_merge import _fold, _output_of, _start
from kernels.attention_plan import _first_key
from kernels.attention_tile import _attend
from kernels.compiler import tl, triton


@triton.jit
def _range_of(part, length, context, tokens, SPLIT: tl.constexpr, WINDOW: tl.constexpr):
    """Of one item: its first query token, its keys begin .. end - 1, and whether these are all that its queries see.

    A row of one token is cut into splits, any other into tiles of `tokens` query tokens.
    """
    one = length == 1
    token = tl.where(one, 0, part * tokens)
    begin = _first_key(context - length + token, WINDOW)
    end = context - length + tl.minimum(token + tokens, length)
    split_begin = (begin // SPLIT + part) * SPLIT
    complete = (length > 1) | ((part == 0) & (split_begin + SPLIT >= end))
    begin = tl.where(complete, begin, tl.maximum(begin, split_begin))
    end = tl.where(complete, end, tl.minimum(end, split_begin + SPLIT))
    return token, begin, end, complete


@triton.jit
def _store(running, item, complete, q_row, heads, mine, tensors, shape, HEAD_DIM: tl.constexpr):
    """The output of an item that is complete, or else what `_merge_kernel` needs of it."""
    _, _, _, out_ptr, partial_ptr, partial_sum_ptr, _ = tensors
    _, kv_heads, head_dim, group, _ = shape
    log_sum, out = _output_of(running)
    column = tl.arange(0, HEAD_DIM)[None, :]
    in_tile = mine[:, None] & (column < head_dim)
    if complete:
        at = (q_row * (kv_heads * group) + heads) * head_dim
        tl.store(out_ptr + at[:, None] + column, out.to(out_ptr.dtype.element_ty), mask=in_tile)
    else:
        slot = tl.full([], 0, tl.int64) + item  # a loop's counter has no `to` under the interpreter
        at = slot * (kv_heads * group) + heads
        tl.store(partial_ptr + (at * head_dim)[:, None] + column, out, mask=in_tile)
        tl.store(partial_sum_ptr + at, log_sum, mask=mine)


@triton.jit
def _attend_item(
    item,
    tensors,
    batch,
    shape,
    logits,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    FOLD: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Attention of one item: ROWS // group query tokens times the `group` query heads of a KV head; the rest idles.

    With FOLD every split is finished by itself and folded in, as `_merge_kernel` does with splits of other programs.
    """
    q_ptr, k_cache_ptr, v_cache_ptr, _, _, _, sinks_ptr = tensors
    items_ptr, query_start_ptr, context_lens_ptr, block_tables_ptr, table_stride = batch
    kv_head, kv_heads, head_dim, group, q_token_stride = shape
    row = tl.load(items_ptr + item * 2)
    query_begin = tl.load(query_start_ptr + row)
    length = tl.load(query_start_ptr + row + 1) - query_begin
    context = tl.load(context_lens_ptr + row)
    table_ptr = block_tables_ptr + row.to(tl.int64) * table_stride
    cache = (k_cache_ptr, v_cache_ptr, table_ptr, kv_head, kv_heads, head_dim)
    tokens = ROWS // group
    token, begin, end, complete = _range_of(tl.load(items_ptr + item * 2 + 1), length, context, tokens, SPLIT, WINDOW)

    place = tl.arange(0, ROWS)
    column = tl.arange(0, HEAD_DIM)[None, :]
    query_token = token + place // group
    mine = query_token < tl.minimum(token + tokens, length)
    heads = kv_head * group + place % group
    q_row = (query_begin + query_token).to(tl.int64)
    q_at = q_row * q_token_stride + heads * head_dim
    query = tl.load(q_ptr + q_at[:, None] + column, mask=mine[:, None] & (column < head_dim), other=0.0)
    position = context - length + query_token

    running = _start(sinks_ptr, heads, mine & complete, HEAD_DIM, SINKS)
    if FOLD:
        for split in range(begin // SPLIT, (end + SPLIT - 1) // SPLIT):
            low, high = tl.maximum(begin, split * SPLIT), tl.minimum(end, split * SPLIT + SPLIT)
            own = _start(sinks_ptr, heads, mine, HEAD_DIM, False)
            own = _attend(own, query, position, low, high, cache, logits, WINDOW, SOFTCAP, BLOCK_SIZE, HEAD_DIM, KEYS)
            running = _fold(running, _output_of(own))
    else:
        running = _attend(
            running, query, position, begin, end, cache, logits, WINDOW, SOFTCAP, BLOCK_SIZE, HEAD_DIM, KEYS
        )
    _store(running, item, complete, q_row, heads, mine, tensors, shape, HEAD_DIM)


@triton.jit(do_not_specialize=["rows", "table_stride"])
def _attention_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    out_ptr,
    partial_ptr,
    partial_sum_ptr,
    sinks_ptr,
    items_ptr,
    first_item_ptr,
    query_start_ptr,
    context_lens_ptr,
    block_tables_ptr,
    rows,
    scale,
    softcap,
    q_token_stride,
    table_stride,
    kv_heads,
    head_dim,
    group,
    WALK: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    FOLD: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Program (p, KV head) does item p of `_plan_kernel`'s list and, with WALK, further ones in strides of the grid.

    HEAD_DIM is the power of two, at least 16, of head_dim.
    """
    tensors = (q_ptr, k_cache_ptr, v_cache_ptr, out_ptr, partial_ptr, partial_sum_ptr, sinks_ptr)
    batch = (items_ptr, query_start_ptr, context_lens_ptr, block_tables_ptr, table_stride)
    shape = (tl.program_id(1), kv_heads, head_dim, group, q_token_stride)
    logits = (scale, softcap)
    first = tl.program_id(0)
    count = tl.load(first_item_ptr + rows)
    if WALK:
        # What does not change from item to item would fill the registers.
        for item in tl.range(first, count, tl.num_programs(0), disable_licm=True):
            _attend_item(
                item,
                tensors,
                batch,
                shape,
                logits,
                ROWS,
                SPLIT,
                FOLD,
                WINDOW,
                SOFTCAP,
                SINKS,
                BLOCK_SIZE,
                HEAD_DIM,
                KEYS,
            )
    elif first < count:
        _attend_item(
            first, tensors, batch, shape, logits, ROWS, SPLIT, FOLD, WINDOW, SOFTCAP, SINKS, BLOCK_SIZE, HEAD_DIM, KEYS
        )
