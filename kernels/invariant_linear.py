"""Matrix products in which a row's bits do not depend on how many rows go along."""

from __future__ import annotations

import torch

from kernels.compiler import ceil_div, tl, triton, use_triton
from kernels.linear import settled_tiling, tiled_linear

ROWS, COLUMNS = 64, 64
"""Of a tile of the result. A tile of 64 rows costs a small batch no time: reading the weight takes longer."""
WIDE_OUTPUTS = 8192
"""Outputs from which tiles of twice as many columns still fill a large chip."""
GROUP_ROWS = 8
"""Tiles of rows that share what they read of the weight in the cache, one after the other."""


def invariant_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x W^T + b`, accumulated in fp32 and rounded once.

    x: [M, K], its rows contiguous. weight: [N, K] contiguous. bias: [N] or None. All of one dtype: fp32, bf16 or fp16.
    Returns a new tensor [M, N]. A row of it is a function of that row of x, the weight and the bias alone: M, the
    row's place and the other rows do not change a bit.
    """
    if use_triton(x):
        return invariant_linear_triton(x, weight, bias)
    return invariant_linear_reference(x, weight, bias)


def invariant_linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Plain torch version of `invariant_linear`."""
    return tiled_linear(x, weight, bias, settled_tiling(weight, bias))


@triton.jit
def tile_of(program, row_tiles, column_tiles, GROUP: tl.constexpr):
    """(row tile, column tile) of a program: down GROUP row tiles first, then to the next column tile."""
    per_group = GROUP * column_tiles
    first = (program // per_group) * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    inside = program % per_group
    return first + inside % height, inside // height


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    rows,
    outputs,
    inputs,
    BIAS: tl.constexpr,
    WHOLE_STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program a tile [ROWS, COLUMNS] of the result, summed over all inputs in steps of STEP, in order.

    Nothing of it but the grid depends on the number of rows. WHOLE_STEPS: inputs is a multiple of STEP.
    """
    row_tile, column_tile = tile_of(tl.program_id(0), tl.cdiv(rows, ROWS), tl.cdiv(outputs, COLUMNS), GROUP)
    row, column, step = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, STEP)
    first_row, first_column = (row_tile * ROWS).to(tl.int64), (column_tile * COLUMNS).to(tl.int64)
    x_ptr += first_row * x_stride
    weight_ptr += first_column * inputs
    x_at = row[:, None] * x_stride + step[None, :]
    weight_at = column[None, :] * inputs + step[:, None]
    rows_left, columns_left = rows - row_tile * ROWS, outputs - column_tile * COLUMNS
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, inputs, STEP):
        x_mask, weight_mask = row[:, None] < rows_left, column[None, :] < columns_left
        if not WHOLE_STEPS:
            inside_step = start + step < inputs
            x_mask, weight_mask = x_mask & inside_step[None, :], weight_mask & inside_step[:, None]
        x = tl.load(x_ptr + start + x_at, mask=x_mask, other=0.0)
        weight = tl.load(weight_ptr + start + weight_at, mask=weight_mask, other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
    if BIAS:
        bias = tl.load(bias_ptr + first_column + column, mask=column < columns_left, other=0.0)
        total += bias.to(tl.float32)[None, :]
    mask = (row[:, None] < rows_left) & (column[None, :] < columns_left)
    out_ptr += first_row * outputs + first_column
    tl.store(out_ptr + row[:, None] * outputs + column[None, :], total.to(out_ptr.dtype.element_ty), mask=mask)


def invariant_linear_triton(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Launches `_linear_kernel`. The tile follows from the weight's dtype and shape, never from the rows."""
    (rows, inputs), outputs = x.shape, weight.shape[0]
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    fp32 = x.dtype == torch.float32
    columns = 2 * COLUMNS if outputs >= WIDE_OUTPUTS else COLUMNS
    if fp32:
        columns = COLUMNS // 2  # what one program's registers hold
    step = 32 if fp32 or inputs % 64 else 64
    _linear_kernel[(ceil_div(rows, ROWS) * ceil_div(outputs, columns),)](
        x,
        weight,
        out if bias is None else bias,
        out,
        x.stride(0),
        rows,
        outputs,
        inputs,
        BIAS=bias is not None,
        WHOLE_STEPS=inputs % step == 0,
        ROWS=ROWS,
        COLUMNS=columns,
        STEP=step,
        GROUP=GROUP_ROWS,
        num_warps=4,
        num_stages=2 if fp32 else 3,
    )
    return out
