from __future__ import annotations

import pytest
import torch

from kernels import attention_decode
from kernels.attention_triton import paged_attention_triton
from tests.kernels.attention_cases import build_case, exact_attention

TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3}
"""Greatest absolute error for values drawn from N(0, 1); fp16 rounds the weights and the result."""


def check(case, scale: float, window: int = 0, softcap: float = 0.0) -> torch.Tensor:  # type: ignore[no-untyped-def]
    arguments = case.q, case.k_cache, case.v_cache, case.batch, scale
    out = paged_attention_triton(*arguments, window=window, softcap=softcap)
    assert out.dtype == case.q.dtype
    expected = exact_attention(case, scale, window, softcap)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[case.q.dtype])
    return out


@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, block_size, dtype",
    [
        (28, 4, 128, 16, torch.float16),
        (14, 2, 64, 32, torch.float32),
        (12, 1, 256, 16, torch.float16),
        (6, 6, 80, 8, torch.float16),
        (9, 3, 96, 1, torch.float32),
    ],
)
def test_decode_and_prefill_in_one_batch(
    heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    edges = [(context, 1) for context in (1, block_size - 1 or 1, block_size, block_size + 1, 100)]
    rows = [*edges, (0, 1), (7, 7), (98, 20)]
    check(build_case(rows, heads, kv_heads, head_dim, block_size, dtype), head_dim**-0.5)


@pytest.mark.parametrize("window, softcap", [(37, 0.0), (64, 0.0), (1, 0.0), (0, 5.0), (37, 5.0)])
def test_window_and_softcap(window: int, softcap: float) -> None:
    check(build_case([(30, 1), (130, 1), (130, 90)], 4, 2, 64, 16), 0.125, window, softcap)


@pytest.mark.parametrize("window", [0, 70])
def test_decode_is_split_over_the_keys(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of 64 keys: rows of one split to five, and a padding row."""
    monkeypatch.setattr(attention_decode, "SPLIT_KEYS", 64)
    rows = [(300, 1), (1, 1), (64, 1), (0, 1), (65, 1)]
    together = check(build_case(rows, 4, 2, 64, 16), 0.125, window)
    assert not together[3].any()


def test_a_row_does_not_depend_on_its_mates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_decode, "SPLIT_KEYS", 64)
    q, keys, values = torch.randn(150, 4, 64), torch.randn(150, 2, 64), torch.randn(150, 2, 64)

    def run(rows: list[tuple[int, int]], block_size: int) -> list[torch.Tensor]:
        contents = [(q[context - length : context], keys[:context], values[:context]) for context, length in rows]
        case = build_case(rows, 4, 2, 64, block_size, contents=contents)
        out = paged_attention_triton(case.q, case.k_cache, case.v_cache, case.batch, 0.125)
        return list(out.split([length for _, length in rows]))

    alone, short = run([(130, 1)], 16)[0], run([(40, 1)], 8)[0]
    mixed = run([(40, 1), (150, 1), (130, 1), (50, 50)], 32)
    assert torch.equal(mixed[2], alone) and torch.equal(mixed[0], short)
    chunk = run([(50, 50)], 16)[0]
    assert torch.equal(mixed[3], chunk)
    assert torch.equal(run([(50, 9)], 16)[0], chunk[-9:])
