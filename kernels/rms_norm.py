"""Root-mean-square layer norm (Zhang & Sennrich, 2019), alone or fused with the residual addition."""

from __future__ import annotations

import torch

from kernels.compiler import power_of_two, tl, triton, use_triton


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, unit_offset: bool = False) -> torch.Tensor:
    """`x / rms(x) * weight` over the last dimension, computed in fp32.

    x: [..., H] fp32, bf16 or fp16, e.g. hidden states [T, H], or heads [T, heads, D] for a norm of queries and keys.
    weight: [H] of x's dtype. unit_offset: multiply by `1 + weight` (Gemma).
    Returns a new tensor of x's shape and dtype.

    The rounding is that of `transformers`: Llama rounds the normed value to x's dtype before it multiplies by the
    weight, Gemma multiplies in fp32 and rounds once.
    """
    if use_triton(x):
        return rms_norm_triton(x, weight, eps, unit_offset=unit_offset)
    return rms_norm_reference(x, weight, eps, unit_offset=unit_offset)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, unit_offset: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds the residual stream, then norms it: returns (rms_norm(x + residual), x + residual), both new tensors.

    x, residual: [T, H] of one dtype; weight: [H]; the sum is rounded to that dtype before the norm.
    """
    if use_triton(x):
        return add_rms_norm_triton(x, residual, weight, eps, unit_offset=unit_offset)
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


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    x_token_stride,
    x_head_stride,
    heads,
    width,
    eps,
    ADD: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program a row of `width` values; WIDTH is its power of two. A token has `heads` rows."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    mask = column < width
    start = (row // heads) * x_token_stride + (row % heads) * x_head_stride
    x = tl.load(x_ptr + start + column, mask=mask, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    if ADD:
        x += tl.load(residual_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
        total = x.to(dtype)
        tl.store(total_ptr + row * width + column, total, mask=mask)
        x = total.to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x) / width + eps)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        out = normed * (1.0 + weight)
    else:
        out = normed.to(dtype).to(tl.float32) * weight
    tl.store(out_ptr + row * width + column, out.to(dtype), mask=mask)


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float, *, unit_offset: bool = False) -> torch.Tensor:
    """Launches `_rms_norm_kernel`. x may be a strided view, its last dimension contiguous."""
    rows = x if x.dim() == 3 else x.reshape(-1, 1, x.shape[-1])
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(rows, None, weight, out, None, eps, unit_offset)
    return out


def add_rms_norm_triton(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, unit_offset: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches `_rms_norm_kernel` with the addition."""
    out, total = torch.empty_like(residual), torch.empty_like(residual)
    _launch(x.unsqueeze(1), residual.contiguous(), weight, out, total, eps, unit_offset)
    return out, total


def _launch(
    rows: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor | None,
    eps: float,
    unit_offset: bool,
) -> None:
    """rows: [T, heads, H]."""
    tokens, heads, width = rows.shape
    if tokens == 0:
        return
    block = power_of_two(width)
    _rms_norm_kernel[(tokens * heads,)](
        rows,
        out if residual is None else residual,
        weight,
        out,
        out if total is None else total,
        rows.stride(0),
        rows.stride(1),
        heads,
        width,
        eps,
        ADD=residual is not None,
        UNIT_OFFSET=unit_offset,
        WIDTH=block,
        num_warps=min(max(block // 512, 1), 16),
    )
