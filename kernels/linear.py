"""Matrix products on the CPU whose rows do not depend on how many rows go along."""

from __future__ import annotations

import os
from enum import Enum, auto

import torch
import torch.nn.functional as F

ROW_TILE = 32
FP32_ROW_TILE = 4
"""Of padded fp32 rows: without a strict mode a row costs about the same in tiles of 2 rows and of 32."""
_PROBE_ROWS = 80
_PROBE_ELEMENTS = 1 << 22
"""Of a larger weight only its first output rows are probed."""


class RowTiling(Enum):
    """How many rows of the input go into one matrix product."""

    WHOLE = auto()
    """All of them: fp32 where MKL runs in a strict mode (`MKL_CBWR`), and the GPU."""
    TILES = auto()
    """At most `ROW_TILE`: oneDNN has another bf16 kernel, and so another rounding, for more."""
    PADDED = auto()
    """Exactly `ROW_TILE` (fp32: `FP32_ROW_TILE`), filled up with zeros, so that one kernel runs. Seen to keep rows
    apart in fp16, and in fp32 in MKL's COMPATIBLE branch and with no branch set; not in AVX2 without STRICT."""


_settled: dict[tuple[torch.dtype, int, int, bool], RowTiling] = {}


def settled_tiling(weight: torch.Tensor, bias: torch.Tensor | None = None) -> RowTiling:
    """The tiling for this CPU and for products with weights of this dtype and shape; chosen once.

    weight: [N, K], contiguous, filled; bias: [N] or None.
    """
    if weight.device.type != "cpu":
        return RowTiling.WHOLE
    key = (weight.dtype, *weight.shape, bias is not None)
    if key not in _settled:
        _settled[key] = choose_tiling(weight, bias)
    return _settled[key]


def tiled_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tiling: RowTiling) -> torch.Tensor:
    """x: [M, K], weight: [N, K], bias: [N] or None. Returns [M, N]."""
    rows = x.shape[0]
    if tiling is RowTiling.WHOLE or (tiling is RowTiling.TILES and rows <= ROW_TILE):
        return F.linear(x, weight, bias)
    tile = FP32_ROW_TILE if tiling is RowTiling.PADDED and x.dtype == torch.float32 else ROW_TILE
    if tiling is RowTiling.PADDED and rows % tile:
        x = F.pad(x, (0, 0, 0, tile - rows % tile))
    if not rows:
        return x.new_empty(0, weight.shape[0])
    return torch.cat([F.linear(part, weight, bias) for part in torch.split(x, tile)])[:rows]


def choose_tiling(weight: torch.Tensor, bias: torch.Tensor | None) -> RowTiling:
    """The widest tiling that the library promises, or is known, to keep rows apart in; tried once, lest it does not."""
    if weight.dtype == torch.float32 and torch.backends.mkl.is_available() and strict_mode():  # type: ignore[no-untyped-call]
        if keeps_rows_apart(weight, bias, RowTiling.WHOLE):
            return RowTiling.WHOLE
    elif weight.dtype == torch.bfloat16 and keeps_rows_apart(weight, bias, RowTiling.TILES):
        return RowTiling.TILES
    return RowTiling.PADDED


def strict_mode() -> bool:
    """Whether MKL was asked for a strict mode of conditional numerical reproducibility."""
    return os.environ.get("MKL_CBWR", "").upper().endswith(",STRICT")


def keeps_rows_apart(weight: torch.Tensor, bias: torch.Tensor | None, tiling: RowTiling) -> bool:
    """Whether random rows have the same bits alone and in batches of several sizes, as far as a trial can tell."""
    outputs = max(1, min(weight.shape[0], _PROBE_ELEMENTS // weight.shape[1]))
    part, bias_part = weight[:outputs], None if bias is None else bias[:outputs]
    rows = torch.randn(_PROBE_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    alone = torch.cat([tiled_linear(row, part, bias_part, tiling) for row in torch.split(rows, 1)])
    counts = (2, 3, 7, 16, 31, 32, 33, 48, 64, _PROBE_ROWS)
    return all(_same_bits(tiled_linear(rows[-n:], part, bias_part, tiling), alone[-n:]) for n in counts)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.equal(a.view(torch.uint8), b.view(torch.uint8)))
