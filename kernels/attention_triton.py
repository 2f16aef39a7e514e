"""Paged attention on a GPU: the work is listed on the device, done, and what was split is merged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.attention_merge import merge_splits
from kernels.attention_plan import WorkPlan, work_plan
from kernels.attention_tile import tile_shape
from kernels.attention_varlen import _attention_kernel
from kernels.compiler import power_of_two
from kernels.float8 import readable

if TYPE_CHECKING:
    from kernels.attention import AttentionBatch

DECODE_PROGRAMS = 4096
MIXED_PROGRAMS = 16384
"""Most programs of a launch; where there may be more items, a program does several. Idle programs are not quite free,
and those that do several keep more in registers."""


def paged_attention_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Same contract as `kernels.paged_attention`. No synchronisation with the host, and no launch that depends on a
    length: the grids follow from the sizes of the tensors alone."""
    (tokens, heads, head_dim), rows = q.shape, len(batch.context_lens)
    block_size, kv_heads = k_cache.shape[1:3]
    group = heads // kv_heads
    decodes_only = batch.num_decodes == rows
    tile = tile_shape(head_dim, group, q.dtype, decodes_only=decodes_only, invariant=batch.invariant)
    plan = work_plan(batch, tokens, tile.rows // group, block_size, window)
    capacity = len(plan.items)
    programs = max(1, (DECODE_PROGRAMS if decodes_only else MIXED_PROGRAMS) // kv_heads)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    partial, partial_sum = _partial_results(plan, heads, head_dim)
    _attention_kernel[(min(capacity, programs), kv_heads)](
        q,
        readable(k_cache),
        readable(v_cache),
        out,
        partial,
        partial_sum,
        out if sinks is None else sinks,
        plan.items,
        plan.first_item,
        batch.query_start,
        batch.context_lens,
        batch.block_tables,
        rows,
        scale,
        softcap,
        q.stride(0),
        batch.block_tables.stride(0),
        kv_heads,
        head_dim,
        group,
        WALK=batch.invariant or capacity > programs,
        ROWS=tile.rows,
        SPLIT=batch.split_keys,
        FOLD=batch.invariant,
        WINDOW=window,
        SOFTCAP=softcap > 0,
        SINKS=sinks is not None,
        BLOCK_SIZE=block_size,
        HEAD_DIM=max(16, power_of_two(head_dim)),
        KEYS=tile.keys,
        num_warps=tile.warps,
        num_stages=2,
    )
    if plan.splits > 1:
        merge_splits(partial, partial_sum, out, sinks, plan, batch.query_start)
    return out


def _partial_results(plan: WorkPlan, heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [items, heads, head_dim] and [items, heads]: room for what `merge_splits` joins.

    Where no row is split nothing is written there: the items stand in, as fp32, so that the kernel is the same.
    """
    if plan.splits == 1:
        unused = plan.items.view(torch.float32)
        return unused, unused
    shape, device = (len(plan.items), heads), plan.items.device
    partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=device)
    return partial, torch.empty(shape, dtype=torch.float32, device=device)
