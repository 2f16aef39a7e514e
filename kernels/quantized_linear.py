"""Linear layers whose weights are stored in eight bits, one scale an output channel; activations are not quantised."""

from __future__ import annotations

from typing import Literal

import torch

from kernels.compiler import ceil_div, tl, triton, use_triton
from kernels.float8 import E4M3, E4M3_MAX, _e4m3_value, as_bytes
from kernels.invariant_linear import GROUP_ROWS, tile_of
from kernels.linear import settled_tiling, tiled_linear

WeightKind = Literal["int8", "fp8"]
QUANTIZED_DTYPES: dict[WeightKind, torch.dtype] = {"int8": torch.int8, "fp8": E4M3}
LARGEST: dict[WeightKind, float] = {"int8": 127.0, "fp8": E4M3_MAX}
"""What a channel's largest absolute weight becomes."""
REFERENCE_ELEMENTS = 1 << 20
"""Weights that the reference holds in fp32 at a time."""
ROWS, CHANNELS = 64, 64
"""Of a tile of the result."""


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
    if use_triton(x):
        return quantized_linear_triton(x, weight, scale, bias)
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


@triton.jit(do_not_specialize=["rows"])
def _quantized_linear_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    rows,
    outputs,
    inputs,
    FP8: tl.constexpr,
    BIAS: tl.constexpr,
    WHOLE_STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program a tile [CHANNELS, ROWS] of the transposed result.

    The weight is the left factor because sm_90 multiplies by a left factor that is still in registers, where the
    conversion leaves it.
    """
    row_tile, channel_tile = tile_of(tl.program_id(0), tl.cdiv(rows, ROWS), tl.cdiv(outputs, CHANNELS), GROUP)
    row, channel, step = tl.arange(0, ROWS), tl.arange(0, CHANNELS), tl.arange(0, STEP)
    first_row, first_channel = (row_tile * ROWS).to(tl.int64), (channel_tile * CHANNELS).to(tl.int64)
    x_ptr += first_row * x_stride
    weight_ptr += first_channel * inputs
    x_at = row[None, :] * x_stride + step[:, None]
    weight_at = channel[:, None] * inputs + step[None, :]
    rows_left, channels_left = rows - row_tile * ROWS, outputs - channel_tile * CHANNELS
    dtype = x_ptr.dtype.element_ty
    total = tl.zeros([CHANNELS, ROWS], tl.float32)
    for start in range(0, inputs, STEP):
        x_mask, weight_mask = row[None, :] < rows_left, channel[:, None] < channels_left
        if not WHOLE_STEPS:
            inside_step = start + step < inputs
            x_mask, weight_mask = x_mask & inside_step[:, None], weight_mask & inside_step[None, :]
        x = tl.load(x_ptr + start + x_at, mask=x_mask, other=0.0)
        weight = tl.load(weight_ptr + start + weight_at, mask=weight_mask, other=0)
        weight = _e4m3_value(weight.to(tl.uint16)) if FP8 else weight.to(tl.float32)
        total = tl.dot(weight.to(dtype), x, total, input_precision="ieee")
    inside = channel < channels_left
    out = tl.trans(total) * tl.load(scale_ptr + first_channel + channel, mask=inside, other=0.0)[None, :]
    if BIAS:
        out += tl.load(bias_ptr + first_channel + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    mask = (row[:, None] < rows_left) & inside[None, :]
    out_ptr += first_row * outputs + first_channel
    tl.store(out_ptr + row[:, None] * outputs + channel[None, :], out.to(dtype), mask=mask)


def quantized_linear_triton(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Launches `_quantized_linear_kernel`. The tile does not depend on the number of rows."""
    (rows, inputs), outputs = x.shape, weight.shape[0]
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    fp32 = x.dtype == torch.float32
    step = 32 if fp32 or inputs % 64 else 64
    _quantized_linear_kernel[(ceil_div(rows, ROWS) * ceil_div(outputs, CHANNELS),)](
        x,
        as_bytes(weight),
        scale,
        out if bias is None else bias,
        out,
        x.stride(0),
        rows,
        outputs,
        inputs,
        FP8=weight.dtype == E4M3,
        BIAS=bias is not None,
        WHOLE_STEPS=inputs % step == 0,
        ROWS=ROWS,
        CHANNELS=CHANNELS,
        STEP=step,
        GROUP=GROUP_ROWS,
        num_warps=8 if fp32 else 4,
        num_stages=2 if fp32 else 4,
    )
    return out
