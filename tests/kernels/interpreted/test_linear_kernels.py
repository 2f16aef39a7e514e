"""Batch-invariant and quantised products, against float64 and row by row."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.invariant_linear import invariant_linear_triton
from kernels.quantized_linear import quantize_weight, quantized_linear_triton

TOLERANCE = {torch.float32: 2e-6, torch.float16: 6e-4}
"""Of the sum of absolute products: rounding of the fp32 sum, and of an fp16 result."""


def check(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """weight: the exact one, in fp64."""
    assert found.dtype == x.dtype
    expected = x.double() @ weight.T
    scale = x.double().abs() @ weight.abs().T
    if bias is not None:
        expected, scale = expected + bias.double(), scale + bias.double().abs()
    assert bool(((found.double() - expected).abs() <= TOLERANCE[x.dtype] * scale).all())


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rows, outputs, inputs, biased", [(0, 5, 8, True), (1, 65, 100, True), (17, 200, 64, False)])
def test_invariant_linear(rows: int, outputs: int, inputs: int, biased: bool, dtype: torch.dtype) -> None:
    x = torch.randn(rows, 2 * inputs).to(dtype)[:, :inputs]
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype) if biased else None
    check(invariant_linear_triton(x, weight, bias), x, weight.double(), bias)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_rows_do_not_depend_on_how_many_go_along(dtype: torch.dtype) -> None:
    """Two tiles of rows; nor on a row that is not finite."""
    x, weight = torch.randn(70, 96).to(dtype), torch.randn(40, 96).to(dtype)
    together = invariant_linear_triton(x, weight)
    poisoned = x.clone()
    poisoned[[3, 68]] = torch.tensor([math.nan, math.inf], dtype=dtype)[:, None]
    found = invariant_linear_triton(poisoned, weight)
    kept = torch.ones(70, dtype=torch.bool).index_fill_(0, torch.tensor([3, 68]), False)
    assert torch.equal(found[kept], together[kept]) and not found[[3, 68]].isfinite().any()
    for first, last in ((0, 1), (63, 64), (69, 70), (2, 19)):
        assert torch.equal(invariant_linear_triton(x[first:last], weight), together[first:last])


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_quantized_linear(kind, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    for rows, outputs, inputs, biased in ((0, 3, 8, False), (1, 70, 100, True), (17, 64, 64, False)):
        x = torch.randn(rows, 2 * inputs).to(dtype)[:, :inputs]
        bias = torch.randn(outputs).to(dtype) if biased else None
        weight, scale = quantize_weight(torch.randn(outputs, inputs), kind)
        found = quantized_linear_triton(x, weight, scale, bias)
        check(found, x, weight.double() * scale.double()[:, None], bias)


def test_every_fp8_value_is_read_exactly() -> None:
    """One-hot rows read the 254 numbers of the format: subnormal ones, both zeros and both largest among them."""
    values = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = values[~values.isnan()].reshape(2, 127)
    weight = numbers.T.contiguous().to(torch.float8_e4m3fn)
    found = quantized_linear_triton(torch.eye(2), weight, torch.ones(127))
    assert torch.equal(found, numbers)
