"""Root-mean-square layer norm (Zhang & Sennrich, 2019), alone or fused with the residual addition."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, unit_offset: bool = False) -> torch.Tensor:
    """`x / rms(x) * weight` over the last dimension, computed in fp32.

    x: [..., H] fp32, bf16 or fp16, e.g. hidden states [T, H], or heads [T, heads, D] for a norm of queries and keys.
    weight: [H]. unit_offset: multiply by `1 + weight` (Gemma). Returns a new tensor of x's shape and dtype.

    The rounding is that of `transformers`: Llama rounds the normed value to x's dtype before it multiplies by the
    weight, Gemma multiplies in fp32 and rounds once.
    """
    return rms_norm_reference(x, weight, eps, unit_offset=unit_offset)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, unit_offset: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds the residual stream, then norms it: returns (rms_norm(x + residual), x + residual), both new tensors.

    x, residual: [T, H] of one dtype; weight: [H]; the sum is rounded to that dtype before the norm.
    """
    return add_rms_norm_reference(x, residual, weight, eps, unit_offset=unit_offset)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float, *, unit_offset: bool = False) -> torch.Tensor:
    """Plain torch version of `rms_norm`."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (normed * (1.0 + weight.float())).to(x.dtype)
    return weight * normed.to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, unit_offset: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch version of `add_rms_norm`."""
    total = x + residual
    return rms_norm_reference(total, weight, eps, unit_offset=unit_offset), total
