"""What a file of this folder lists in its `LAUNCHES`: one entry a configuration that we ship."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

CHIPS = ("sm_80", "sm_90", "sm_100", "gfx942")


@dataclass(frozen=True)
class Launch:
    """A launcher bound to meta tensors, and what is asked of the kernels that it compiles.

    matrix: names of kernels that must use the chip's matrix unit.
    spills: bytes a thread (on AMD: registers) that may be spilled on a chip; 0 where none is named. Say why.
    chips: those it is compiled for; fewer than all only where another entry says the same of the rest.
    """

    run: Callable[[], Any]
    matrix: frozenset[str] = frozenset()
    spills: dict[str, int] = field(default_factory=dict)
    chips: tuple[str, ...] = CHIPS

    def on(self, *chips: str) -> Launch:
        """The same for these chips alone."""
        return replace(self, chips=chips)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return empty(*shape, dtype=dtype)
