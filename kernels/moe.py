"""Mixture-of-experts feed-forward layers (Shazeer et al., 2017; Fedus et al., 2022): routing and the experts' MLPs."""

from __future__ import annotations

from typing import Literal

import torch

from kernels.compiler import use_triton
from kernels.gated_activation import clamped_swiglu_mul_reference, gelu_tanh_mul_reference, silu_mul_reference
from kernels.linear import settled_tiling, tiled_linear
from kernels.moe_triton import moe_mlp_triton, route_topk_triton
from kernels.topk import ordered_topk

ExpertActivation = Literal["silu", "gelu_tanh", "clamped_swiglu"]


def route_topk(router_logits: torch.Tensor, k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The k experts with the largest logits, in falling order, ties by lowest id, and the softmax over all E at them.

    router_logits: fp32 [T, E], its rows contiguous; 0 < k <= E. renormalize: divide the k weights by their sum, which
    makes them the softmax over the k alone.
    Returns (weights fp32 [T, k], ids int32 [T, k]).
    """
    run = route_topk_triton if use_triton(router_logits) else route_topk_reference
    return run(router_logits, k, renormalize)


def moe_mlp(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    activation: ExpertActivation = "silu",
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum over a token's k experts of weight * (act(x G^T + b) D^T + c).

    x: [T, H] fp32, bf16 or fp16, its rows contiguous. gate_up: [E, 2I, H], down: [E, H, I], contiguous and of x's
    dtype, the gate in the first half. ids: int32 [T, k], contiguous, an expert at most once a token; an id outside
    0 .. E-1 adds nothing. weights: fp32 [T, k], contiguous. gate_up_bias: [E, 2I], down_bias: [E, H] of x's dtype.
    activation: "silu" or "gelu_tanh", as in `silu_mul` and `gelu_tanh_mul`; "clamped_swiglu" is that of GPT-OSS:
    gate clamped to at most 7, up to [-7, 7], then (up + 1) * gate * sigmoid(1.702 gate), in fp32, rounded once.

    Products accumulate in fp32; what each of the two products and the activation give is rounded to x's dtype. The
    weighted sum runs in fp32 in the order of k and is rounded once. A token's result is a function of its own row, ids
    and weights: the other tokens and their experts do not change a bit. Returns a new tensor [T, H].
    """
    run = moe_mlp_triton if use_triton(x) else moe_mlp_reference
    return run(x, gate_up, down, ids, weights, activation, gate_up_bias=gate_up_bias, down_bias=down_bias)


def route_topk_reference(router_logits: torch.Tensor, k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch version of `route_topk`."""
    _, ids = ordered_topk(router_logits, k)
    weights = torch.softmax(router_logits, dim=-1).gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids.int()


_ACTIVATIONS = {
    "silu": silu_mul_reference,
    "gelu_tanh": gelu_tanh_mul_reference,
    "clamped_swiglu": clamped_swiglu_mul_reference,
}


def moe_mlp_reference(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    activation: ExpertActivation = "silu",
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plain torch version of `moe_mlp`: one expert after the other, each with the rows that chose it.

    Which experts were chosen, and by how many rows, the host has to know: on a GPU it would wait for the device. There
    `moe_mlp` always takes the Triton kernels, and only a comparison calls this.
    """
    pairs = torch.zeros((*ids.shape, x.shape[1]), dtype=x.dtype, device=x.device)
    for expert in torch.unique(ids).tolist():
        if not 0 <= expert < len(gate_up):
            continue
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        hidden = _expert_linear(x[tokens], gate_up, gate_up_bias, expert)
        pairs[tokens, places] = _expert_linear(_ACTIVATIONS[activation](hidden), down, down_bias, expert)
    weights = torch.where((ids >= 0) & (ids < len(gate_up)), weights, 0.0)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for place in range(ids.shape[1]):
        total += weights[:, place, None] * pairs[:, place]
    return total.to(x.dtype)


def _expert_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, expert: int) -> torch.Tensor:
    chosen, chosen_bias = weight[expert], None if bias is None else bias[expert]
    return tiled_linear(x, chosen, chosen_bias, settled_tiling(chosen, chosen_bias))
