"""Expert layers, against float64 and token by token."""

from __future__ import annotations

import pytest
import torch

from kernels import moe_triton
from kernels.moe import moe_mlp_reference, route_topk_reference
from kernels.moe_triton import moe_mlp_triton, route_topk_triton
from tests.kernels.moe_cases import exact_moe, random_experts


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program costs the interpreter the same whatever its size: fewer tokens make two tiles."""
    monkeypatch.setattr(moe_triton, "ROWS", 16)


@pytest.mark.parametrize("experts, k, renormalize", [(8, 2, True), (5, 5, False), (3, 1, True)])
def test_routing(experts: int, k: int, renormalize: bool) -> None:
    """The first token's logits are all equal, the second's tie at the edge."""
    logits = torch.randn(4, 2 * experts)[:, :experts]
    logits[0] = 1.5
    logits[1, -2:] = logits[1].max()
    weights, ids = route_topk_triton(logits, k, renormalize)
    expected_weights, expected_ids = route_topk_reference(logits, k, renormalize)
    assert torch.equal(ids, expected_ids) and ids.dtype == torch.int32
    torch.testing.assert_close(weights, expected_weights, rtol=1e-6, atol=0)
    assert route_topk_triton(logits[:0], k, renormalize)[1].shape == (0, k)


@pytest.mark.parametrize(
    "activation, biased, dtype, tolerance",
    [
        ("silu", False, torch.float32, 1e-5),
        ("gelu_tanh", False, torch.float16, 4e-3),
        ("clamped_swiglu", True, torch.float32, 1e-5),
        ("clamped_swiglu", True, torch.float16, 4e-3),
    ],
)
def test_experts(activation, biased: bool, dtype: torch.dtype, tolerance: float) -> None:  # type: ignore[no-untyped-def]
    """Expert 0 has two tiles of tokens, expert 3 none, and two ids name no expert. Values reach past the clamp."""
    experts = random_experts(5, width=40, inner=36, dtype=dtype, biased=biased)
    x = torch.randn(19, 80).to(dtype)[:, :40]
    ids = torch.tensor([[0, 4, 2]] * 17 + [[1, -1, 0], [2, 0, 5]], dtype=torch.int32)
    weights = torch.rand(19, 3)
    found = moe_mlp_triton(x, *experts.weights, ids, weights, activation, **experts.biases)
    expected = exact_moe(x, experts, ids, weights, activation)
    assert found.dtype == dtype
    assert float((found.double() - expected).abs().max() / expected.abs().max()) < tolerance
    reference = moe_mlp_reference(x, *experts.weights, ids, weights, activation, **experts.biases)
    assert float((found.double() - reference.double()).abs().max() / expected.abs().max()) < tolerance


def test_a_token_does_not_depend_on_its_mates() -> None:
    experts = random_experts(4, width=32, inner=16)
    x = torch.randn(18, 32)
    weights, ids = route_topk_reference(torch.randn(18, 4), 2, True)
    together = moe_mlp_triton(x, *experts.weights, ids, weights)
    for first, last in ((0, 1), (17, 18), (5, 8)):
        part = slice(first, last)
        assert torch.equal(moe_mlp_triton(x[part], *experts.weights, ids[part], weights[part]), together[part])
    assert moe_mlp_triton(x[:0], *experts.weights, ids[:0], weights[:0]).shape == (0, 32)
