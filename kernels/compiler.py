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

    class _LanguageStandIn:
        """Lets annotations such as `tl.constexpr` be evaluated; nothing here can run."""

        constexpr = Any

    class _TritonStandIn:
        @staticmethod
        def jit(function: Callable[..., Any]) -> Callable[..., Any]:
            return function

    triton = _TritonStandIn()
    tl = _LanguageStandIn()


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
