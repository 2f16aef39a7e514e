"""Expert layers on the CPU: the rule, and that a token's bits are its own."""

from __future__ import annotations

import pytest
import torch

from kernels import moe_mlp, route_topk
from tests.kernels.moe_cases import exact_moe, random_experts


def test_routing_takes_the_largest_and_ties_go_to_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0]])
    weights, ids = route_topk(logits, 3, renormalize=False)
    assert ids.tolist() == [[1, 2, 3], [0, 1, 2]] and ids.dtype == torch.int32
    torch.testing.assert_close(weights, torch.softmax(logits, -1).gather(1, ids.long()))
    weights, _ = route_topk(logits, 3, renormalize=True)
    torch.testing.assert_close(weights, torch.softmax(logits.gather(1, ids.long()), -1))


@pytest.mark.parametrize("activation, biased", [("silu", False), ("gelu_tanh", False), ("clamped_swiglu", True)])
def test_experts(activation, biased: bool) -> None:  # type: ignore[no-untyped-def]
    """Expert 2 is chosen by nobody; two ids name no expert, and their weights are not numbers."""
    experts = random_experts(5, width=24, inner=36, biased=biased)
    x = 3 * torch.randn(40, 24)
    ids = torch.tensor([[0, 4], [3, 1]] * 19 + [[1, -1], [5, 0]], dtype=torch.int32)
    weights = torch.rand(40, 2)
    weights[38, 1] = weights[39, 0] = torch.nan
    found = moe_mlp(x, *experts.weights, ids, weights, activation, **experts.biases)
    expected = exact_moe(x, experts, ids, weights, activation)
    assert float((found.double() - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_does_not_depend_on_its_mates(dtype: torch.dtype) -> None:
    experts = random_experts(4, width=64, inner=96, dtype=dtype)
    x = torch.randn(90, 64).to(dtype)
    weights, ids = route_topk(torch.randn(90, 4), 2, True)
    together = moe_mlp(x, *experts.weights, ids, weights)
    for part in (slice(0, 1), slice(89, 90), slice(20, 53)):
        assert torch.equal(moe_mlp(x[part], *experts.weights, ids[part], weights[part]), together[part])
