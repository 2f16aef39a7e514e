"""The guard itself: a kernel that strays is caught."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tests.kernels.memory_guard import Violation

CAUGHT = (InterpreterError, Violation)  # the interpreter wraps what a program raises


@triton.jit
def _shift_kernel(x_ptr, out_ptr, shift, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * stride + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at + shift))


def test_a_clean_kernel_passes() -> None:
    x, out = torch.arange(32.0), torch.empty(32)
    _shift_kernel[(2,)](x, out, 0, 16, BLOCK=16)
    assert torch.equal(out, x)


@pytest.mark.parametrize(
    "shift, stride, message", [(1, 16, "load outside"), (-1, 16, "load outside"), (0, 8, "stored")]
)
def test_strays_and_races_are_caught(shift: int, stride: int, message: str) -> None:
    with pytest.raises(CAUGHT, match=message):
        _shift_kernel[(2,)](torch.arange(32.0), torch.empty(32), shift, stride, BLOCK=16)


def test_stores_outside_are_caught() -> None:
    with pytest.raises(CAUGHT, match="store outside"):
        _shift_kernel[(2,)](torch.arange(64.0), torch.empty(40)[:31], 0, 16, BLOCK=16)
