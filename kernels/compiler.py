"""The one place that imports Triton. Without it the package still imports and serves CPU tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

try:
    import triton
    import triton.language as tl

    TRITON_AVAILABLE = True
except ImportError:  # a CPU image carries no Triton
    TRITON_AVAILABLE = False

    class _TritonStandIn:
        """Lets kernels be defined; none can be launched."""

        @staticmethod
        def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
            return function if function is not None else lambda decorated: decorated

    triton: Any = _TritonStandIn()  # type: ignore[no-redef]
    tl: Any = None  # type: ignore[no-redef]

__all__ = ["TRITON_AVAILABLE", "ceil_div", "power_of_two", "tl", "triton", "use_triton"]


def use_triton(tensor: torch.Tensor) -> bool:
    """True when `tensor` lives on a GPU (CUDA or ROCm), so that the Triton kernel must serve it.

    Raises RuntimeError when it does and Triton is not installed.
    """
    if not tensor.is_cuda:
        return False
    if not TRITON_AVAILABLE:
        raise RuntimeError(
            f"a tensor on {tensor.device} needs the Triton kernels, but Triton is not installed: "
            "pip install 'gilir[gpu]'"
        )
    return True


def ceil_div(value: int, divisor: int) -> int:
    """`value / divisor`, rounded up."""
    return -(-value // divisor)


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value`: block shapes in Triton must be one."""
    return 1 << max(value - 1, 0).bit_length()
