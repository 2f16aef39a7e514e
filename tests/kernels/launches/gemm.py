"""Matrix products: batch-invariant, quantised, and of experts."""

from __future__ import annotations

import torch

from kernels.invariant_linear import invariant_linear_triton
from kernels.moe_triton import moe_mlp_triton, route_topk_triton
from kernels.quantized_linear import quantized_linear_triton
from tests.kernels.launches.launch import Launch, empty, ints


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


def experts(
    number: int, width: int, inner: int, k: int, activation: str = "silu", *, dtype: torch.dtype = torch.bfloat16
) -> Launch:
    tensors = empty(70, width, dtype=dtype), empty(number, 2 * inner, width, dtype=dtype)
    down = empty(number, width, inner, dtype=dtype)
    routing = ints(70, k, dtype=torch.int32), empty(70, k, dtype=torch.float32)
    biases = {}
    if activation == "clamped_swiglu":
        biases = {"gate_up_bias": empty(number, 2 * inner, dtype=dtype), "down_bias": empty(number, width, dtype=dtype)}
    matrix = frozenset() if dtype == torch.float32 else frozenset({"_expert_linear_kernel"})
    return Launch(lambda: moe_mlp_triton(*tensors, down, *routing, activation, **biases), matrix)


LAUNCHES = {
    "linear bf16 4096x4096": linear(4096, 4096),
    "linear bf16 49152x576": linear(49152, 576).on("sm_90"),
    "linear fp16 200x100 bias": linear(200, 100, dtype=torch.float16, bias=True).on("gfx942"),
    "linear fp32 4096x4096": linear(4096, 4096, dtype=torch.float32).on("sm_80"),
    "linear int8 bf16": quantized(torch.int8, 4096),
    "linear fp8 bf16": quantized(torch.float8_e4m3fn, 4096).on("sm_80", "gfx942"),
    "linear fp8 fp16 odd bias": quantized(torch.float8_e4m3fn, 100, dtype=torch.float16, bias=True).on("sm_90"),
    "experts bf16 8x4096x14336": experts(8, 4096, 14336, 2),
    "experts bf16 128x2048x768": experts(128, 2048, 768, 8, "gelu_tanh").on("sm_90"),
    "experts bf16 32x2880x2880 biases": experts(32, 2880, 2880, 4, "clamped_swiglu").on("sm_100"),
    "experts fp32 8x100x50": experts(8, 100, 50, 2, dtype=torch.float32).on("sm_80"),
    "route 128": Launch(lambda: route_topk_triton(empty(4, 128, dtype=torch.float32), 8, True)),
    "linear int8 fp32": quantized(torch.int8, 4096, dtype=torch.float32).on("sm_80"),
}
