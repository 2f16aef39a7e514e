"""Gated activations of feed-forward layers (Shazeer, 2020): SwiGLU and GeGLU without their matrices."""

from __future__ import annotations

import math

import torch


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`. gate_up: [T, 2I], the gate in the first half. Returns [T, I] of the same dtype.

    As in `transformers`, the activation is computed in fp32 and rounded to the dtype before the product.
    """
    return silu_mul_reference(gate_up)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gelu_tanh(gate) * up`, GELU in its tanh approximation. Shapes and rounding as in `silu_mul`."""
    return gelu_tanh_mul_reference(gate_up)


# NOTE: F.silu and F.gelu round differently in the vector and in the scalar part of their loops, so a row's result would
# depend on where the row lies. exp and tanh do not, and the other operations are exact to the last bit by IEEE 754.


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """Plain torch version of `silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.float()
    return (wide / torch.exp(-wide).add_(1.0)).to(gate.dtype).mul_(up)


def gelu_tanh_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """Plain torch version of `gelu_tanh_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.float()
    inner = (wide * wide * wide).mul_(0.044715).add_(wide).mul_(math.sqrt(2.0 / math.pi))
    return inner.tanh_().add_(1.0).mul_(wide).mul_(0.5).to(gate.dtype).mul_(up)
