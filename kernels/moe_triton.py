"""Mixture-of-experts layers on a GPU: fixed launches whatever the routing, and the host never waits for it.

A token and one of its experts are a pair. Pairs are ordered by expert; each product is then one launch whose programs
take up to `ROWS` pairs of one expert. How many tiles that makes is known on the device alone, so the grid is as large
as it can get, and the programs left over end at once. Tiles are the same for every number of tokens, and what a pair
gives is stored under the pair's number and summed in the order of its token's list: a token does not feel its mates.
"""

from __future__ import annotations

import torch

from kernels.compiler import ceil_div, power_of_two, tl, triton
from kernels.gated_activation import _activate

ROWS, COLUMNS = 64, 64
"""Of a tile: pairs of one expert, and outputs."""
ACTIVATION_CODES = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2}
NO_ACTIVATION = -1


@triton.jit
def _route_kernel(
    logits_ptr,
    weights_ptr,
    ids_ptr,
    stride,
    experts,
    k,
    RENORMALIZE: tl.constexpr,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
):
    """One program a token. EXPERTS, K: the powers of two of experts and k."""
    token = tl.program_id(0).to(tl.int64)
    expert, place = tl.arange(0, EXPERTS), tl.arange(0, K)
    left = expert < experts
    logit = tl.load(logits_ptr + token * stride + expert, mask=left, other=float("-inf"))
    highest = tl.max(logit)
    mass = tl.sum(tl.exp(logit - highest))
    weights = tl.zeros([K], tl.float32)
    ids = tl.zeros([K], tl.int32)
    total = 0.0
    for step in range(k):
        best = tl.max(tl.where(left, logit, float("-inf")))
        winner = tl.min(tl.where(left & (logit == best), expert, EXPERTS))
        weight = tl.exp(best - highest) / mass
        total += weight
        left = left & (expert != winner)
        weights = tl.where(place == step, weight, weights)
        ids = tl.where(place == step, winner, ids)
    if RENORMALIZE:
        weights = weights / total
    tl.store(weights_ptr + token * k + place, weights, mask=place < k)
    tl.store(ids_ptr + token * k + place, ids, mask=place < k)


def route_topk_triton(router_logits: torch.Tensor, k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches `_route_kernel`."""
    tokens, experts = router_logits.shape
    weights = torch.empty((tokens, k), dtype=torch.float32, device=router_logits.device)
    ids = torch.empty((tokens, k), dtype=torch.int32, device=router_logits.device)
    if tokens:
        _route_kernel[(tokens,)](
            router_logits,
            weights,
            ids,
            router_logits.stride(0),
            experts,
            k,
            RENORMALIZE=renormalize,
            EXPERTS=power_of_two(experts),
            K=power_of_two(k),
            num_warps=1,
        )
    return weights, ids


@triton.jit(do_not_specialize=["pairs"])
def _order_kernel(ids_ptr, order_ptr, starts_ptr, pairs, experts, BLOCK: tl.constexpr):
    """One program an expert: its pairs, in rising order, stand in order[starts[expert] : starts[expert + 1]]."""
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    for first in range(0, pairs, BLOCK):
        chosen = tl.load(ids_ptr + first + lane, mask=first + lane < pairs, other=-1)
        before += ((chosen >= 0) & (chosen < expert)).to(tl.int32)
    start = tl.sum(before)
    tl.store(starts_ptr + expert, start)
    for first in range(0, pairs, BLOCK):
        chosen = tl.load(ids_ptr + first + lane, mask=first + lane < pairs, other=-1)
        own = (chosen == expert).to(tl.int32)
        tl.store(order_ptr + start + tl.cumsum(own) - own, first + lane, mask=own != 0)
        start += tl.sum(own)
    if expert == experts - 1:
        tl.store(starts_ptr + experts, start)


@triton.jit
def _expert_of_tile(starts_ptr, tile, experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """(expert, tile among the expert's). The expert is at least `experts` for a tile that has none."""
    expert = tl.arange(0, EXPERTS)
    start = tl.load(starts_ptr + expert, mask=expert < experts, other=0)
    end = tl.load(starts_ptr + expert + 1, mask=expert < experts, other=0)
    tiles = (end - start + ROWS - 1) // ROWS
    chosen = tl.sum((tl.cumsum(tiles) <= tile).to(tl.int32))
    return chosen, tile - tl.sum(tl.where(expert < chosen, tiles, 0))


@triton.jit
def _add_bias(total, bias_ptr, column, columns_left, dtype):
    """Adds a bias to fp32 sums and rounds them to the layer's dtype; returns fp32."""
    bias = tl.load(bias_ptr + column, mask=column < columns_left, other=0.0).to(tl.float32)
    return (total + bias[None, :]).to(dtype).to(tl.float32)


@triton.jit
def _expert_linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    order_ptr,
    starts_ptr,
    out_ptr,
    x_stride,
    experts,
    outputs,
    inputs,
    sharing,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    WHOLE_STEPS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """One program a tile of up to ROWS pairs of an expert and COLUMNS outputs.

    A pair's row of x is pair // sharing, its row of the result the pair's number. With an activation (>= 0), the weight
    has 2 * outputs rows an expert, and the result is the gated product of its two halves.
    """
    expert, tile = _expert_of_tile(starts_ptr, tl.program_id(0), experts, EXPERTS, ROWS)
    if expert >= experts:
        return
    GATED: tl.constexpr = ACTIVATION >= 0
    dtype = out_ptr.dtype.element_ty
    start, end = tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1)
    row, column, step = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, STEP)
    at = start + tile * ROWS + row
    pair = tl.load(order_ptr + at, mask=at < end, other=0).to(tl.int64)
    first_column = tl.program_id(1) * COLUMNS
    columns_left = outputs - first_column
    channel = expert.to(tl.int64) * outputs * (2 if GATED else 1) + first_column
    x_ptrs = x_ptr + (pair // sharing)[:, None] * x_stride + step[None, :]
    up_weight_ptr = weight_ptr + (channel + outputs) * inputs
    weight_ptr += channel * inputs
    weight_at = column[None, :] * inputs + step[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, inputs, STEP):
        x_mask, weight_mask = at[:, None] < end, column[None, :] < columns_left
        if not WHOLE_STEPS:
            inside = first + step < inputs
            x_mask, weight_mask = x_mask & inside[None, :], weight_mask & inside[:, None]
        x = tl.load(x_ptrs + first, mask=x_mask, other=0.0)
        weight = tl.load(weight_ptr + first + weight_at, mask=weight_mask, other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
        if GATED:
            weight = tl.load(up_weight_ptr + first + weight_at, mask=weight_mask, other=0.0)
            up = tl.dot(x, weight, up, input_precision="ieee")
    if BIAS:
        total = _add_bias(total, bias_ptr + channel, column, columns_left, dtype)
        if GATED:
            up = _add_bias(up, bias_ptr + channel + outputs, column, columns_left, dtype)
    if GATED:
        total = _activate(total.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), dtype, ACTIVATION)
    out_ptrs = out_ptr + pair[:, None] * outputs + first_column + column[None, :]
    tl.store(out_ptrs, total.to(dtype), mask=(at[:, None] < end) & (column[None, :] < columns_left))


@triton.jit
def _combine_kernel(pairs_ptr, ids_ptr, weights_ptr, out_ptr, experts, width, k, BLOCK: tl.constexpr):
    """One program a token and BLOCK columns: the weighted sum of its pairs, in their order."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for place in range(k):
        pair = token * k + place
        expert = tl.load(ids_ptr + pair)
        taken = (expert >= 0) & (expert < experts)
        value = tl.load(pairs_ptr + pair * width + column, mask=(column < width) & taken, other=0.0)
        total += tl.where(taken, tl.load(weights_ptr + pair), 0.0) * value.to(tl.float32)
    tl.store(out_ptr + token * width + column, total.to(out_ptr.dtype.element_ty), mask=column < width)


def moe_mlp_triton(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    activation: str = "silu",
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launches `_order_kernel`, `_expert_linear_kernel` twice, and `_combine_kernel`."""
    (tokens, width), (experts, _, inner), k = x.shape, down.shape, ids.shape[1]
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    pairs = tokens * k
    order = torch.empty(pairs, dtype=torch.int32, device=x.device)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=x.device)
    _order_kernel[(experts,)](ids, order, starts, pairs, experts, BLOCK=1024, num_warps=4)
    hidden = torch.empty((pairs, inner), dtype=x.dtype, device=x.device)
    by_pair = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
    _expert_linear(x, gate_up, gate_up_bias, order, starts, hidden, k, ACTIVATION_CODES[activation])
    _expert_linear(hidden, down, down_bias, order, starts, by_pair, 1, NO_ACTIVATION)
    _combine_kernel[(tokens, ceil_div(width, 1024))](
        by_pair, ids, weights, out, experts, width, k, BLOCK=1024, num_warps=4
    )
    return out


def _expert_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    order: torch.Tensor,
    starts: torch.Tensor,
    out: torch.Tensor,
    sharing: int,
    activation: int,
) -> None:
    experts, inputs, (pairs, outputs) = weight.shape[0], weight.shape[2], out.shape
    fp32 = x.dtype == torch.float32
    columns = COLUMNS // 2 if fp32 else COLUMNS
    step = 32 if fp32 else 64
    step = step // 2 if inputs % step else step
    tiles = (pairs + min(experts, pairs) * (ROWS - 1)) // ROWS  # every expert's last tile may hold one pair
    _expert_linear_kernel[(tiles, ceil_div(outputs, columns))](
        x,
        weight,
        out if bias is None else bias,
        order,
        starts,
        out,
        x.stride(0),
        experts,
        outputs,
        inputs,
        sharing,
        ACTIVATION=activation,
        BIAS=bias is not None,
        WHOLE_STEPS=inputs % step == 0,
        EXPERTS=power_of_two(experts),
        ROWS=ROWS,
        COLUMNS=columns,
        STEP=step,
        num_warps=4,
        num_stages=2 if fp32 else 3,
    )
