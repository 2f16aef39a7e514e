"""Matrix products: batch-invariant and quantised."""

from __future__ import annotations

import torch

from kernels.invariant_linear import invariant_linear_triton
from kernels.quantized_linear import quantized_linear_triton
from tests.kernels.launches.launch import Launch, empty


def linear(
    outputs: int, inputs: int, *, dtype: torch.dtype = torch.bfloat16, bias: bool = False, rows: int = 70
) -> Launch:
    x, weight = empty(rows, inputs, dtype=dtype), empty(outputs, inputs, dtype=dtype)
    added = empty(outputs, dtype=dtype) if bias else None
    matrix = frozenset() if dtype == torch.float32 else frozenset({"_linear_kernel"})
    return Launch(lambda: invariant_linear_triton(x, weight, added), matrix)


def quantized(kind: torch.dtype, inputs: int, *, dtype: torch.dtype = torch.bfloat16, bias: bool = False) -> Launch:
    x, weight = empty(70, inputs, dtype=dtype), empty(4096, inputs, dtype=kind)
    scale, added = empty(4096, dtype=torch.float32), empty(4096, dtype=dtype) if bias else None
    matrix = frozenset() if dtype == torch.float32 else frozenset({"_quantized_linear_kernel"})
    return Launch(lambda: quantized_linear_triton(x, weight, scale, added), matrix)


LAUNCHES = {
    "linear bf16 4096x4096": linear(4096, 4096),
    "linear bf16 49152x576": linear(49152, 576),
    "linear fp16 200x100 bias": linear(200, 100, dtype=torch.float16, bias=True),
    "linear fp32 4096x4096": linear(4096, 4096, dtype=torch.float32),
    "linear int8 bf16": quantized(torch.int8, 4096),
    "linear fp8 bf16": quantized(torch.float8_e4m3fn, 4096),
    "linear fp8 fp16 odd bias": quantized(torch.float8_e4m3fn, 100, dtype=torch.float16, bias=True),
    "linear int8 fp32": quantized(torch.int8, 4096, dtype=torch.float32),
}
