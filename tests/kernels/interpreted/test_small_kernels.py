from __future__ import annotations

import pytest
import torch

from kernels.block_copy import copy_blocks_reference, copy_blocks_triton
from kernels.gated_activation import gelu_tanh_mul_triton, silu_mul_triton
from kernels.penalties import apply_penalties_reference, apply_penalties_triton
from kernels.rms_norm import add_rms_norm_reference, add_rms_norm_triton, rms_norm_reference, rms_norm_triton
from kernels.rope import rope_and_cache_reference, rope_and_cache_triton
from kernels.token_mask import mask_tokens_reference, mask_tokens_triton

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Relative error; the interpreter rounds to bf16 by truncation, so that two roundings may cost two last places."""
DTYPES = list(TOLERANCE)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unit_offset", [False, True])
def test_rms_norm(dtype: torch.dtype, unit_offset: bool) -> None:
    for x in (torch.randn(3, 100), torch.randn(2, 3, 9, 16)[:, 1, 2:5], torch.randn(576), torch.randn(0, 64)):
        x, weight = x.to(dtype), torch.randn(x.shape[-1]).to(dtype)
        expected = rms_norm_reference(x, weight, 1e-5, unit_offset=unit_offset)
        close(rms_norm_triton(x, weight, 1e-5, unit_offset=unit_offset), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(3, 200).to(dtype)[:, :96], torch.randn(3, 96).to(dtype), torch.randn(96).to(dtype)
    for unit_offset in (False, True):
        found = add_rms_norm_triton(x, residual, weight, 1e-5, unit_offset=unit_offset)
        expected = add_rms_norm_reference(x, residual, weight, 1e-5, unit_offset=unit_offset)
        close(found[0], expected[0])
        close(found[1], expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, kv_heads, head_dim, rotary", [(9, 3, 64, 64), (20, 2, 80, 32), (4, 4, 96, 96)])
def test_rope_and_cache(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, rotary: int) -> None:
    fused = torch.randn(4, heads + 2 * kv_heads, head_dim).to(dtype)
    table = torch.randn(50, rotary)
    positions, slots = torch.tensor([0, 49, 7, 7], dtype=torch.int32), torch.tensor([20, -1, 3, 0])
    results = []
    for run in (rope_and_cache_triton, rope_and_cache_reference):
        qkv = fused.clone()
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
        caches = torch.zeros(2, 3, 8, kv_heads, head_dim, dtype=dtype)
        run(q, k, v, table, positions, slots, caches[0], caches[1])
        results.append((qkv, caches))
    close(results[0][0], results[1][0])
    close(results[0][1], results[1][1])
    assert torch.equal(results[0][0][:, heads:], fused[:, heads:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates(dtype: torch.dtype) -> None:
    gate_up = (torch.randn(2, 2 * 1100) * 4).to(dtype)
    gate_up[0, :3] = torch.tensor([-80.0, 0.0, 80.0])
    gate, up = gate_up.float().chunk(2, dim=1)
    close(silu_mul_triton(gate_up), (torch.nn.functional.silu(gate) * up).to(dtype))
    close(gelu_tanh_mul_triton(gate_up), (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_blocks(dtype: torch.dtype) -> None:
    caches = torch.randn(2, 5, 16, 3, 96).to(dtype)
    expected = caches.clone()
    src, dst = torch.tensor([0, 4]), torch.tensor([3, 1])
    copy_blocks_triton(caches[0], caches[1], src, dst)
    copy_blocks_reference(expected[0], expected[1], src, dst)
    assert torch.equal(caches, expected)


def test_penalties() -> None:
    logits = torch.randn(5, 1000)
    entries = torch.randperm(5000)[:300]
    rows, tokens = entries // 1000, entries % 1000
    counts = torch.randint(0, 4, (300,), dtype=torch.int32)
    in_prompt = torch.rand(300) < 0.5
    factors = 0.5 + torch.rand(3, 5)
    expected = logits.clone()
    apply_penalties_triton(logits, rows, tokens, counts, in_prompt, *factors)
    apply_penalties_reference(expected, rows, tokens, counts, in_prompt, *factors)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("vocab_size", [5, 64, 1060, 2049])
def test_token_masks(vocab_size: int) -> None:
    logits = torch.randn(4, vocab_size + 3)[:, :vocab_size]
    rows = torch.tensor([3, 0])
    words = torch.randint(-(1 << 31), 1 << 31, (2, -(-vocab_size // 32)), dtype=torch.int32)
    results = []
    for run in (mask_tokens_triton, mask_tokens_reference):
        results.append(logits.clone())
        run(results[-1], rows, words)
        run(results[-1], rows[:0], words[:0])
    assert torch.equal(results[0], results[1])
    for row, bits in zip(rows.tolist(), words.tolist(), strict=True):
        for token in (0, 1, vocab_size // 2, vocab_size - 1):
            allowed = bits[token // 32] >> token % 32 & 1
            assert results[0][row, token] == (logits[row, token] if allowed else -float("inf"))
    assert torch.equal(results[0][1:3], logits[1:3])
