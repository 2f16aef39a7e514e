"""Linear layers whose weights are stored in eight bits, one scale an output channel; activations are not quantised."""

from __future__ import annotations

from typing import Literal

import torch

from kernels.linear import settled_tiling, tiled_linear

WeightKind = Literal["int8", "fp8"]
QUANTIZED_DTYPES: dict[WeightKind, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST: dict[WeightKind, float] = {"int8": 127.0, "fp8": 448.0}
"""What a channel's largest absolute weight becomes."""
REFERENCE_ELEMENTS = 1 << 20
"""Weights that the reference holds in fp32 at a time."""


def quantize_weight(weight: torch.Tensor, kind: WeightKind) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric quantisation by the largest absolute value of each output channel, to nearest, ties to even.

    weight: [N, K] of any float dtype, finite. Returns (q [N, K] of int8 or float8_e4m3fn, scale fp32 [N]), so that
    q * scale is close to the weight. A channel of zeros has scale 1.
    """
    if kind not in QUANTIZED_DTYPES:
        raise ValueError(f"weights are quantised to 'int8' or 'fp8', not {kind!r}")
    wide = weight.float()
    scale = wide.abs().amax(dim=1) / LARGEST[kind]
    scale = torch.where(scale > 0, scale, 1.0)
    quotient = wide / scale[:, None]
    if kind == "int8":
        quotient = quotient.round_()
    return quotient.clamp_(-LARGEST[kind], LARGEST[kind]).to(QUANTIZED_DTYPES[kind]), scale


def quantized_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`(x q^T) * scale + b`, accumulated and scaled in fp32 and rounded once.

    x: [M, K] fp32, bf16 or fp16, its rows contiguous. weight: q of `quantize_weight`, [N, K] contiguous. scale: fp32
    [N]. bias: [N] of x's dtype or None. Returns a new tensor [M, N] of x's dtype; a row does not depend on the others.
    """
    return quantized_linear_reference(x, weight, scale, bias)


def quantized_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Plain torch version of `quantized_linear`. Works on blocks of output channels, lest it hold all of q in fp32."""
    outputs, inputs = weight.shape
    block = max(1, REFERENCE_ELEMENTS // max(inputs, 1))
    wide = x.float()
    out = torch.empty((x.shape[0], outputs), dtype=x.dtype, device=x.device)
    for start in range(0, outputs, block):
        channels = slice(start, start + block)
        part = weight[channels].float()
        product = tiled_linear(wide, part, None, settled_tiling(part)).mul_(scale[channels])
        out[:, channels] = product if bias is None else product.add_(bias[channels])
    return out
