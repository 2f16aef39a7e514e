"""How the splits of a row become its output: each one's own output, weighted by its sum of exponents.

The splits are folded one after the other in rising order, by one function wherever it happens: so the bits do not
depend on which programs worked on the splits.
"""

from __future__ import annotations

import torch

from kernels.attention_plan import WorkPlan
from kernels.compiler import power_of_two, tl, triton


@triton.jit
def _output_of(running):
    """A finished split: its output, and log2 of its sum of exponents. Zeros and -inf where no key was seen."""
    highest, total, product = running
    total = tl.where(total == 0.0, 1.0, total)
    return highest + tl.log2(total), product / total[:, None]


@triton.jit
def _fold(running, split):
    """running: the highest log sum so far, the sum of weights, the weighted outputs; split: its log sum and output.
    Returns the running values with the split in them.

    A split that saw no key (-inf) changes no bit.
    """
    highest, total, product = running
    log_sum, value = split
    new_highest = tl.maximum(highest, log_sum)
    reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    shrink, weight = tl.exp2(highest - reference), tl.exp2(log_sum - reference)
    # Explicit, or the compiler could contract another product in another kernel.
    product = tl.fma(product, tl.broadcast_to(shrink[:, None], product.shape), value * weight[:, None])
    return new_highest, tl.fma(total, shrink, weight), product


@triton.jit
def _start(sinks_ptr, heads, mask, HEAD_DIM: tl.constexpr, SINKS: tl.constexpr):
    """Running values before any key. With SINKS, where `mask`, the head's sink has been seen, a logit with no value."""
    highest = tl.full(heads.shape, float("-inf"), tl.float32)
    total = tl.zeros(heads.shape, tl.float32)
    if SINKS:
        sink = tl.load(sinks_ptr + heads, mask=mask, other=float("-inf")).to(tl.float32)
        highest = sink * 1.4426950408889634  # log2(e)
        total = tl.where(mask, 1.0, total)
    return highest, total, tl.zeros([heads.shape[0], HEAD_DIM], tl.float32)


@triton.jit
def _merge_kernel(
    partial_ptr,
    partial_sum_ptr,
    out_ptr,
    sinks_ptr,
    first_item_ptr,
    query_start_ptr,
    heads,
    head_dim,
    SINKS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """One program a (row, query head). Rows of one split, and those of several tokens, are finished already."""
    row = tl.program_id(0)
    token = tl.load(query_start_ptr + row).to(tl.int64)
    first = tl.load(first_item_ptr + row)
    behind = tl.load(first_item_ptr + row + 1)
    if behind - first <= 1 or tl.load(query_start_ptr + row + 1) - token != 1:
        return
    head = tl.program_id(1) + tl.arange(0, 1)
    column = tl.arange(0, HEAD_DIM)[None, :]
    in_head = column < head_dim
    running = _start(sinks_ptr, head, head < heads, HEAD_DIM, SINKS)
    for item in range(first, behind):
        slot = (tl.full([], 0, tl.int64) + item) * heads + head
        log_sum = tl.load(partial_sum_ptr + slot)
        value = tl.load(partial_ptr + slot[:, None] * head_dim + column, mask=in_head, other=0.0)
        running = _fold(running, (log_sum, value))
    _, out = _output_of(running)
    target = out_ptr + (token * heads + head)[:, None] * head_dim + column
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=in_head)


def merge_splits(
    partial: torch.Tensor,
    partial_sum: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
    plan: WorkPlan,
    query_start: torch.Tensor,
) -> None:
    """Writes the rows of `out`, [T, HQ, D], whose keys were split.

    partial: fp32 [capacity, HQ, D], the output of each item; partial_sum: fp32 [capacity, HQ], log2 of its sum of
    exponents; sinks: [HQ].
    """
    _, heads, head_dim = out.shape
    _merge_kernel[(len(query_start) - 1, heads)](
        partial,
        partial_sum,
        out,
        out if sinks is None else sinks,
        plan.first_item,
        query_start,
        heads,
        head_dim,
        SINKS=sinks is not None,
        HEAD_DIM=power_of_two(head_dim),
        num_warps=2,
    )
