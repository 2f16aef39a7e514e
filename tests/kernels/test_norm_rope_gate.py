"""The small operations of a layer, against `transformers` bit for bit where it has them."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from kernels import add_rms_norm, copy_blocks, gelu_tanh_mul, rms_norm, rope_and_cache, silu_mul

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (5, 640), (3, 100), (4, 7, 128), (0, 64)])
def test_rms_norm_is_that_of_llama(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    module = LlamaRMSNorm(shape[-1], 1e-5)
    module.weight.data = weight
    assert torch.equal(rms_norm(x, weight, 1e-5), module(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_unit_offset_is_that_of_gemma(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 4, 256).to(dtype), torch.randn(256).to(dtype)
    module = Gemma3RMSNorm(256, 1e-6)
    module.weight.data = weight
    assert torch.equal(rms_norm(x, weight, 1e-6, unit_offset=True), module(x))


@pytest.mark.parametrize("unit_offset", [False, True])
def test_add_rms_norm(unit_offset: bool) -> None:
    x, residual, weight = (torch.randn(3, 96).bfloat16() for _ in range(3))
    normed, total = add_rms_norm(x, residual, weight[0], 1e-6, unit_offset=unit_offset)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, weight[0], 1e-6, unit_offset=unit_offset))


def angles(positions: int, rotary: int) -> torch.Tensor:
    frequency = 10000.0 ** (-torch.arange(0, rotary, 2) / rotary)
    angle = torch.arange(positions)[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=1)


@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64])
def test_rope_is_that_of_transformers(position_dtype: torch.dtype) -> None:
    fused = torch.randn(6, 9 + 3 + 3, 64)
    q, k, v = fused.split([9, 3, 3], dim=1)
    before = q.clone(), k.clone(), v.clone()
    positions = torch.tensor([0, 5, 99, 7, 1, 50], dtype=position_dtype)
    slots = torch.tensor([3, 40, 0, 17, 31, 16])
    k_cache, v_cache = torch.zeros(3, 16, 3, 64), torch.zeros(3, 16, 3, 64)
    table = angles(100, 64)
    rope_and_cache(q, k, v, table, positions, slots, k_cache, v_cache)

    cos, sin = (part.repeat(1, 2)[positions.long()][None] for part in table.chunk(2, dim=1))
    q_rotated, k_rotated = apply_rotary_pos_emb(
        before[0].transpose(0, 1)[None], before[1].transpose(0, 1)[None], cos, sin
    )
    assert torch.equal(q, q_rotated[0].transpose(0, 1))
    assert torch.equal(k_cache.view(48, 3, 64)[slots], k_rotated[0].transpose(0, 1))
    assert torch.equal(v_cache.view(48, 3, 64)[slots], before[2])
    assert torch.equal(k, before[1]) and torch.equal(v, before[2])
    untouched = torch.ones(48, dtype=torch.bool)
    untouched[slots] = False
    assert not k_cache.view(48, 3, 64)[untouched].any() and not v_cache.view(48, 3, 64)[untouched].any()


def test_partial_rotation_and_tokens_that_write_nowhere() -> None:
    q, k, v = torch.randn(3, 4, 80), torch.randn(3, 2, 80), torch.randn(3, 2, 80)
    before = q.clone()
    k_cache, v_cache = torch.zeros(1, 8, 2, 80), torch.zeros(1, 8, 2, 80)
    table = angles(10, 32)
    rope_and_cache(q, k, v, table, torch.tensor([2, 3, 4]), torch.tensor([-1, 6, -1]), k_cache, v_cache)
    assert torch.equal(q[..., 32:], before[..., 32:])
    assert torch.equal(k_cache[0, 6, :, 32:], k[1, :, 32:])
    cos, sin = table[3].chunk(2)
    first, second = k[1, :, :16], k[1, :, 16:32]
    assert torch.equal(k_cache[0, 6, :, :16], first * cos - second * sin)
    assert torch.equal(k_cache[0, 6, :, 16:32], second * cos + first * sin)
    assert torch.equal(v_cache[0, 6], v[1])
    assert k_cache.count_nonzero() == 2 * 80 and v_cache.count_nonzero() == 2 * 80


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize(
    "function, activation",
    [
        (silu_mul, torch.nn.functional.silu),
        (gelu_tanh_mul, lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    ],
)
def test_gates(function, activation, dtype: torch.dtype, tolerance: float) -> None:  # type: ignore[no-untyped-def]
    gate_up = (torch.randn(5, 2 * 100) * 4).to(dtype)
    gate_up[0, :3] = torch.tensor([-200.0, 0.0, 200.0])
    gate, up = gate_up.double().chunk(2, dim=1)
    out = function(gate_up)
    assert out.dtype == dtype and out.shape == (5, 100)
    torch.testing.assert_close(out.double(), activation(gate) * up, rtol=tolerance, atol=tolerance)


def test_copy_blocks() -> None:
    k_cache, v_cache = torch.randn(6, 4, 2, 8), torch.randn(6, 4, 2, 8)
    k_before, v_before = k_cache.clone(), v_cache.clone()
    copy_blocks(k_cache, v_cache, torch.tensor([0, 0, 3]), torch.tensor([5, 2, 1]))
    order = [0, 3, 0, 3, 4, 0]
    assert torch.equal(k_cache, k_before[order]) and torch.equal(v_cache, v_before[order])
