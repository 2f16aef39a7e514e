from __future__ import annotations

import pytest
import torch

from kernels import AttentionBatch, check_attention_shape, paged_attention, split_keys_for
from tests.kernels.attention_cases import build_case, exact_attention

GROUPS = [(28, 4), (14, 2), (12, 1), (6, 6), (9, 3)]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def mixed_rows(block_size: int) -> list[tuple[int, int]]:
    edges = [(context, 1) for context in (1, block_size - 1 or 1, block_size, block_size + 1, 100, 300)]
    return [*edges, (0, 1), (7, 7), (block_size + 1, block_size + 1), (131, 2), (290, 135)]


@pytest.mark.parametrize("heads, kv_heads", GROUPS)
@pytest.mark.parametrize("head_dim, block_size", [(64, 16), (80, 8), (96, 32), (128, 1), (256, 16)])
@pytest.mark.parametrize("window, softcap", [(0, 0.0), (37, 0.0), (128, 0.0), (0, 5.0)])
def test_agrees_with_float64(
    heads: int, kv_heads: int, head_dim: int, block_size: int, window: int, softcap: float
) -> None:
    case = build_case(mixed_rows(block_size), heads, kv_heads, head_dim, block_size)
    out = paged_attention(case.q, case.k_cache, case.v_cache, case.batch, 0.1, window=window, softcap=softcap)
    torch.testing.assert_close(out.double(), exact_attention(case, 0.1, window, softcap), rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block_size", [8, 32, 128, 256])
def test_dtypes_and_block_sizes(dtype: torch.dtype, block_size: int) -> None:
    case = build_case(mixed_rows(block_size), 9, 3, 64, block_size, dtype)
    out = paged_attention(case.q, case.k_cache, case.v_cache, case.batch, 0.125)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact_attention(case, 0.125), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("rows", [[(1, 1)], [(300, 1)] * 40, [(300, 300)], [(40, 3), (1, 1), (40, 2)]])
def test_batches_of_one_kind(rows: list[tuple[int, int]]) -> None:
    case = build_case(rows, 4, 2, 64, 16)
    out = paged_attention(case.q, case.k_cache, case.v_cache, case.batch, 0.125)
    torch.testing.assert_close(out.double(), exact_attention(case, 0.125), rtol=0, atol=2e-5)


def test_query_may_be_a_view_of_fused_qkv() -> None:
    case = build_case(mixed_rows(16), 9, 3, 64, 16)
    fused = torch.cat([case.q, torch.full((len(case.q), 6, 64), float("nan"))], dim=1).flatten(1)
    q = fused[:, : 9 * 64].unflatten(1, (9, 64))
    out = paged_attention(q, case.k_cache, case.v_cache, case.batch, 0.125)
    assert torch.equal(out, paged_attention(case.q, case.k_cache, case.v_cache, case.batch, 0.125))


def test_a_window_may_have_lost_its_older_blocks() -> None:
    """Blocks wholly before the window may be freed and given to others: only NaN is left of them here."""
    case = build_case([(300, 1), (290, 20)], 4, 2, 64, 16)
    expected = exact_attention(case, 0.125, window=50)
    for row, first_needed in ((0, 300 - 50), (1, 290 - 20 - 50 + 1)):
        for column in range(first_needed // 16):
            block = case.batch.block_tables[row, column]
            case.k_cache[block] = case.v_cache[block] = float("nan")
    out = paged_attention(case.q, case.k_cache, case.v_cache, case.batch, 0.125, window=50)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-5)


def test_one_batch_serves_layers_of_both_kinds() -> None:
    case = build_case(mixed_rows(16), 4, 2, 64, 16)
    for window in (0, 64, 0, 64):
        out = paged_attention(case.q, case.k_cache, case.v_cache, case.batch, 0.125, window=window)
        torch.testing.assert_close(out.double(), exact_attention(case, 0.125, window), rtol=0, atol=2e-5)


@pytest.mark.parametrize("window, softcap", [(0, 0.0), (37, 5.0)])
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(6, 6, 80), (14, 2, 64), (9, 3, 96)])
def test_sinks(heads: int, kv_heads: int, head_dim: int, window: int, softcap: float) -> None:
    """Sinks far above and far below every logit, and padding, which stays zero."""
    case = build_case(mixed_rows(16), heads, kv_heads, head_dim, 16)
    sinks = torch.linspace(-30, 30, heads)
    out = paged_attention(
        case.q, case.k_cache, case.v_cache, case.batch, 0.1, window=window, softcap=softcap, sinks=sinks
    )
    torch.testing.assert_close(out.double(), exact_attention(case, 0.1, window, softcap, sinks), rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cache_of_8_bits(dtype: torch.dtype) -> None:
    case = build_case(mixed_rows(16), 9, 3, 64, 16, dtype, kv_dtype=torch.float8_e4m3fn)
    out = paged_attention(case.q, case.k_cache, case.v_cache, case.batch, 0.125)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact_attention(case, 0.125), rtol=0, atol=TOLERANCE[dtype])


def test_padding_of_several_tokens_gives_zeros() -> None:
    case = build_case([(5, 1), (0, 4), (9, 3)], 4, 2, 64, 16)
    out = paged_attention(case.q, case.k_cache, case.v_cache, case.batch, 0.125)
    torch.testing.assert_close(out.double(), exact_attention(case, 0.125), rtol=0, atol=2e-5)
    assert not out[1:5].any()


SERVED = {"head_dim": 128, "heads": 28, "kv_heads": 4, "block_size": 16, "dtype": torch.bfloat16, "kv_dtype": None}


@pytest.mark.parametrize(
    "field, value",
    [
        ("head_dim", 264),
        ("head_dim", 100),
        ("head_dim", 0),
        ("heads", 30),
        ("heads", 4 * 65),
        ("heads", 0),
        ("kv_heads", 0),
        ("block_size", 0),
        ("dtype", torch.float64),
        ("kv_dtype", torch.float8_e5m2),
        ("kv_dtype", torch.float16),
    ],
)
def test_what_is_not_served_is_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{field} is "):
        check_attention_shape(**(SERVED | {field: value}))  # type: ignore[arg-type]


@pytest.mark.parametrize("heads, kv_heads", [(28, 4), (14, 2), (12, 1), (48, 2), (40, 2), (6, 6), (64, 1)])
def test_what_is_served(heads: int, kv_heads: int) -> None:
    for head_dim in (8, 64, 80, 96, 112, 128, 192, 256):
        for kv_dtype in (None, torch.bfloat16, torch.float8_e4m3fn):
            check_attention_shape(head_dim, heads, kv_heads, 16, torch.bfloat16, kv_dtype=kv_dtype)


def test_splits_grow_with_the_longest_context() -> None:
    assert [split_keys_for(length) for length in (1, 32768, 32769, 131072)] == [512, 512, 1024, 2048]


def test_padding_rows_give_zeros() -> None:
    case = build_case([(0, 1), (5, 1), (0, 1)], 4, 2, 64, 16)
    out = paged_attention(case.q, case.k_cache, case.v_cache, case.batch, 0.125)
    assert not out[[0, 2]].any() and out[1].abs().max() > 0


def test_batch_of_padding_alone() -> None:
    zeros = torch.zeros(2, dtype=torch.int32)
    batch = AttentionBatch(torch.arange(3, dtype=torch.int32), zeros, zeros[:, None] - 1, 1, 0, 2)
    cache = torch.full((1, 16, 2, 64), float("nan"))
    assert not paged_attention(torch.ones(2, 4, 64), cache, cache, batch, 0.125).any()
