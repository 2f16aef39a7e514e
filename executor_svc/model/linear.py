"""Linear layers whose rows do not depend on how many rows go along."""

from __future__ import annotations

import torch

from kernels.linear import ROW_TILE, RowTiling, settled_tiling, tiled_linear

__all__ = ["ROW_TILE", "Linear", "RowTiling", "tiled_linear"]


class Linear:
    """`x W^T + b`. weight: [N, K], contiguous; bias: [N] or None."""

    __slots__ = ("bias", "tiling", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.tiling = RowTiling.WHOLE

    def settle(self) -> None:
        """Choose the tiling for this CPU, dtype and shape. Called once the weights are there."""
        self.tiling = settled_tiling(self.weight, self.bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [M, K]. Returns [M, N] of the same dtype."""
        return tiled_linear(x, self.weight, self.bias, self.tiling)
