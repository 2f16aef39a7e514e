"""Eight-bit weights, and the CPU's own products."""

from __future__ import annotations

import importlib

import pytest
import torch

from kernels import invariant_linear, quantize_weight, quantized_linear
from kernels.quantized_linear import LARGEST

quantized_module = importlib.import_module("kernels.quantized_linear")  # the package has a function of that name


@pytest.mark.parametrize("kind, step", [("int8", 0.5), ("fp8", 16.0)])
def test_quantised_weights_are_near(kind, step: float) -> None:  # type: ignore[no-untyped-def]
    """Half a step of the largest numbers; fp8 has steps of 32 at 448."""
    weight = torch.randn(40, 300).to(torch.bfloat16)
    weight[7] = 0.0
    weight[8] = weight[8] * 1e-30
    q, scale = quantize_weight(weight, kind)
    assert q.shape == weight.shape and scale.dtype == torch.float32 and scale[7] == 1.0
    error = (q.double() * scale.double()[:, None] - weight.double()).abs()
    assert bool((error <= step * scale.double()[:, None] * (1 + 1e-4)).all())
    assert torch.equal(q.float().abs().amax(1)[:7], torch.full((7,), LARGEST[kind]))
    assert not q[7].float().any()
    with pytest.raises(ValueError, match="int4"):
        quantize_weight(weight, "int4")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 5e-3)])
def test_quantized_linear_by_blocks(dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_module, "REFERENCE_ELEMENTS", 96 * 7)
    x, bias = torch.randn(9, 96).to(dtype), torch.randn(30).to(dtype)
    q, scale = quantize_weight(torch.randn(30, 96), "int8")
    exact = q.double() * scale.double()[:, None]
    found = quantized_linear(x, q, scale, bias)
    allowed = tolerance * (x.double().abs() @ exact.abs().T + bias.double().abs())
    assert found.dtype == dtype
    assert bool(((found.double() - x.double() @ exact.T - bias.double()).abs() <= allowed).all())
    assert torch.equal(quantized_linear(x[3:4], q, scale, bias), found[3:4])


def test_invariant_linear_on_the_cpu() -> None:
    x, weight, bias = torch.randn(50, 70), torch.randn(33, 70), torch.randn(33)
    found = invariant_linear(x, weight, bias)
    exact = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-4)
    for first, last in ((0, 1), (49, 50), (7, 24)):
        assert torch.equal(invariant_linear(x[first:last], weight, bias), found[first:last])
    assert invariant_linear(x[:0], weight, bias).shape == (0, 33)
