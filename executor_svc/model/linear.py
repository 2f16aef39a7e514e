"""Linear layers whose rows do not depend on how many rows go along."""

from __future__ import annotations

import torch

from kernels import quantized_linear
from kernels.linear import ROW_TILE, RowTiling, settled_tiling, tiled_linear

__all__ = ["ROW_TILE", "Linear", "RowTiling", "tiled_linear"]


class Linear:
    """`x W^T + b`. weight: [N, K], contiguous; bias: [N] or None.

    With a scale (fp32 [N]) the weight is quantised, int8 or float8_e4m3fn, and row n of W is `scale[n] * weight[n]`.
    """

    __slots__ = ("bias", "scale", "tiling", "weight")

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, scale: torch.Tensor | None = None
    ) -> None:
        self.weight, self.bias, self.scale = weight, bias, scale
        self.tiling = RowTiling.WHOLE

    def settle(self) -> None:
        """Choose the tiling for this CPU, dtype and shape. Called once the weights are there."""
        if self.scale is None:
            self.tiling = settled_tiling(self.weight, self.bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [M, K]. Returns [M, N] of the same dtype."""
        if self.scale is not None:
            return quantized_linear(x, self.weight, self.scale, self.bias)
        return tiled_linear(x, self.weight, self.bias, self.tiling)
