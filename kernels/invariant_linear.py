"""Matrix products in which a row's bits do not depend on how many rows go along."""

from __future__ import annotations

import torch

from kernels.linear import settled_tiling, tiled_linear


def invariant_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x W^T + b`, accumulated in fp32 and rounded once.

    x: [M, K], its rows contiguous. weight: [N, K] contiguous. bias: [N] or None. All of one dtype: fp32, bf16 or fp16.
    Returns a new tensor [M, N]. A row of it is a function of that row of x, the weight and the bias alone: M, the
    row's place and the other rows do not change a bit.
    """
    return invariant_linear_reference(x, weight, bias)


def invariant_linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Plain torch version of `invariant_linear`."""
    return tiled_linear(x, weight, bias, settled_tiling(weight, bias))
