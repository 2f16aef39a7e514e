"""Cuts a batch into work items on the device: so no launch depends on a length, and a CUDA graph can hold it.

A row of one query token is cut over its keys, every `split_keys` positions (Flash-Decoding, Dao et al., 2023); any
other row over its query tokens, into tiles. Where a row is cut depends on the row alone, never on its batch mates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels.compiler import ceil_div, tl, triton

if TYPE_CHECKING:
    from kernels.attention import AttentionBatch


@dataclass(frozen=True)
class WorkPlan:
    """items: int32 [capacity, 2], the row and which of its splits or tiles; filled as far as first_item[B].
    first_item: int32 [B + 1], the items of row r are first_item[r] .. first_item[r + 1] - 1.
    splits: the most splits that a row can have, by the width of the block tables."""

    items: torch.Tensor
    first_item: torch.Tensor
    splits: int


@triton.jit
def _first_key(position, WINDOW: tl.constexpr):
    """The first position that the query at `position` sees."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    return first


@triton.jit
def _items_of(
    row, mask, query_start_ptr, context_lens_ptr, TOKENS: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr
):
    """How many items the rows have, int32; a padding row of one token has one, which writes its zeros."""
    begin = tl.load(query_start_ptr + row, mask=mask, other=0)
    length = tl.load(query_start_ptr + row + 1, mask=mask, other=0) - begin
    context = tl.load(context_lens_ptr + row, mask=mask, other=0)
    splits = (context + SPLIT - 1) // SPLIT - _first_key(context - 1, WINDOW) // SPLIT
    return tl.where(length == 1, tl.maximum(splits, 1), (length + TOKENS - 1) // TOKENS)


@triton.jit(do_not_specialize=["rows"])
def _plan_kernel(
    query_start_ptr,
    context_lens_ptr,
    items_ptr,
    first_item_ptr,
    rows,
    TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row: counts the items of the rows before it, and lists its own."""
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    first = row * 0
    for start in range(0, row, BLOCK):
        other = start + lane
        first += tl.sum(_items_of(other, other < row, query_start_ptr, context_lens_ptr, TOKENS, SPLIT, WINDOW))
    count = _items_of(row, True, query_start_ptr, context_lens_ptr, TOKENS, SPLIT, WINDOW)
    tl.store(first_item_ptr + row, first)
    if row == rows - 1:
        tl.store(first_item_ptr + rows, first + count)
    for start in range(0, count, BLOCK):
        part = start + lane
        item = items_ptr + (first + part) * 2
        tl.store(item, row + lane * 0, mask=part < count)
        tl.store(item + 1, part, mask=part < count)


def work_plan(batch: AttentionBatch, tokens: int, tile_tokens: int, block_size: int, window: int) -> WorkPlan:
    """The plan of a batch of `tokens` query tokens, made once a step for all layers that share it.

    tile_tokens: query tokens of one tile.
    """
    key = ("plan", tokens, tile_tokens, block_size, window)
    if key in batch.derived:
        plan: WorkPlan = batch.derived[key]
        return plan
    rows, split = len(batch.context_lens), batch.split_keys
    splits = max(1, ceil_div(batch.block_tables.shape[1] * block_size, split))
    if window > 0:
        splits = min(splits, ceil_div(window, split) + 1)
    capacity = rows * splits
    if batch.num_decodes < rows:
        capacity += ceil_div(tokens, tile_tokens) + rows
    items = torch.empty((capacity, 2), dtype=torch.int32, device=batch.context_lens.device)
    first_item = torch.empty(rows + 1, dtype=torch.int32, device=items.device)
    _plan_kernel[(rows,)](
        batch.query_start,
        batch.context_lens,
        items,
        first_item,
        rows,
        TOKENS=tile_tokens,
        SPLIT=split,
        WINDOW=window,
        BLOCK=256,
        num_warps=4,
    )
    batch.derived[key] = plan = WorkPlan(items, first_item, splits)
    return plan
