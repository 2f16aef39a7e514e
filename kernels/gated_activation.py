"""Gated activations of feed-forward layers (Shazeer, 2020): SwiGLU and GeGLU without their matrices."""

from __future__ import annotations

import math

import torch

from kernels.compiler import ceil_div, tl, triton, use_triton

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""Of the clamped SwiGLU, as GPT-OSS has it; the kernel repeats them."""


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`. gate_up: [T, 2I], the gate in the first half. Returns [T, I] of the same dtype.

    As in `transformers`, the activation is computed in fp32 and rounded to the dtype before the product.
    """
    return silu_mul_triton(gate_up) if use_triton(gate_up) else silu_mul_reference(gate_up)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gelu_tanh(gate) * up`, GELU in its tanh approximation. Shapes and rounding as in `silu_mul`."""
    return gelu_tanh_mul_triton(gate_up) if use_triton(gate_up) else gelu_tanh_mul_reference(gate_up)


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


def clamped_swiglu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """That of GPT-OSS, as `kernels.moe_mlp` says. gate_up: [T, 2I], the gate in the first half. Returns [T, I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return ((up + 1.0) * (gate / torch.exp(gate * -SWIGLU_ALPHA).add_(1.0))).to(gate_up.dtype)


@triton.jit
def _activate(gate, up, dtype, ACTIVATION: tl.constexpr):
    """What `silu_mul` (0), `gelu_tanh_mul` (1) and the clamped SwiGLU (2) give, in fp32; dtype is that of the layer."""
    if ACTIVATION == 2:
        gate, up = tl.minimum(gate, 7.0), tl.minimum(tl.maximum(up, -7.0), 7.0)
        return (up + 1.0) * gate * tl.sigmoid(1.702 * gate)
    if ACTIVATION == 1:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        activated = gate * tl.sigmoid(2.0 * inner)  # (1 + tanh(x)) / 2 = sigmoid(2x)
    else:
        activated = gate * tl.sigmoid(gate)
    return activated.to(dtype).to(tl.float32) * up


@triton.jit
def _gated_kernel(gate_up_ptr, out_ptr, row_stride, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """One program a row and BLOCK columns of it."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(gate_up_ptr + row * row_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * row_stride + width + column, mask=mask, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    out = _activate(gate, up, dtype, 1 if GELU else 0)
    tl.store(out_ptr + row * width + column, out.to(dtype), mask=mask)


def silu_mul_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """Launches `_gated_kernel` with SiLU."""
    return _launch(gate_up, gelu=False)


def gelu_tanh_mul_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """Launches `_gated_kernel` with GELU."""
    return _launch(gate_up, gelu=True)


def _launch(gate_up: torch.Tensor, gelu: bool) -> torch.Tensor:
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        grid = (tokens, ceil_div(width, 1024))
        _gated_kernel[grid](gate_up, out, gate_up.stride(0), width, GELU=gelu, BLOCK=1024, num_warps=4)
    return out
