"""Linear layers whose rows do not depend on how many rows go along."""

from __future__ import annotations

import torch

from kernels import invariant_linear, quantized_linear
from kernels.linear import RowTiling, keeps_rows_apart, settled_tiling, tiled_linear
from kernels.quantized_linear import REFERENCE_ELEMENTS


class Linear:
    """`x W^T + b`. weight: [N, K], contiguous; bias: [N] or None.

    With a scale (fp32 [N]) the weight is quantised, int8 or float8_e4m3fn, and row n of W is `scale[n] * weight[n]`.
    """

    __slots__ = ("batch_invariant", "bias", "scale", "tiling", "weight")

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, scale: torch.Tensor | None = None
    ) -> None:
        self.weight, self.bias, self.scale = weight, bias, scale
        self.tiling = RowTiling.WHOLE
        self.batch_invariant = False

    def settle(self, *, batch_invariant: bool = False) -> None:
        """Choose the tiling for this CPU, dtype and shape. Called once the weights are there.

        batch_invariant: on a GPU a row's bits must not depend on how many rows go along. On a CPU they never do.
        """
        self.batch_invariant = batch_invariant
        if self.scale is None:
            self.tiling = settled_tiling(self.weight, self.bias)

    def keeps_rows_apart(self) -> bool:
        """Whether on this CPU, as far as a trial can tell, a row's bits do not depend on the others."""
        if self.scale is None:
            return keeps_rows_apart(self.weight, self.bias, self.tiling)
        part = self.weight[
            : max(1, REFERENCE_ELEMENTS // self.weight.shape[1])
        ].float()  # the CPU multiplies by fp32 copies of a part at a time
        return keeps_rows_apart(part, None, settled_tiling(part))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [M, K]. Returns [M, N] of the same dtype."""
        if self.scale is not None:
            return quantized_linear(x, self.weight, self.scale, self.bias)
        if self.batch_invariant:
            return invariant_linear(x, self.weight, self.bias)
        return tiled_linear(x, self.weight, self.bias, self.tiling)
