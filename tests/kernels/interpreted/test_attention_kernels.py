from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from triton.runtime import interpreter

from kernels import attention_triton
from kernels.attention_triton import paged_attention_triton
from tests.kernels.attention_cases import AttentionCase, Row, build_case, exact_attention

TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3}
"""Greatest absolute error for values drawn from N(0, 1); fp16 rounds the weights and the result."""
SINKS = torch.tensor([-1.0, 0.5, 3.0, 9.0])


def check(
    case: AttentionCase, scale: float, window: int = 0, softcap: float = 0.0, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    arguments = case.q, case.k_cache, case.v_cache, case.batch, scale
    out = paged_attention_triton(*arguments, window=window, softcap=softcap, sinks=sinks)
    assert out.dtype == case.q.dtype
    expected = exact_attention(case, scale, window, softcap, sinks)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[case.q.dtype])
    return out


@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, block_size, dtype",
    [
        (28, 4, 128, 16, torch.float16),
        (14, 2, 64, 32, torch.float32),
        (12, 1, 256, 16, torch.float16),
        pytest.param(6, 6, 80, 8, torch.float16, marks=pytest.mark.nightly),
        (9, 3, 96, 1, torch.float32),
        pytest.param(48, 2, 112, 128, torch.float16, marks=pytest.mark.nightly),
        pytest.param(40, 2, 192, 64, torch.float32, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("chunks", [pytest.param([], marks=pytest.mark.nightly), [(7, 7), (98, 20)]])
def test_shapes(
    heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, chunks: list[Row]
) -> None:
    """Decodes at a block's edges and a padding row, by themselves and in one launch with prefill chunks."""
    rows = [(block_size, 1), (block_size + 1, 1), (0, 1), (100, 1), *chunks]
    check(build_case(rows, heads, kv_heads, head_dim, block_size, dtype), head_dim**-0.5)


@pytest.mark.parametrize(
    "window, softcap, sinks",
    [
        (1, 0.0, None),
        (0, 5.0, SINKS),
        (37, 5.0, SINKS),
        pytest.param(37, 0.0, None, marks=pytest.mark.nightly),
        pytest.param(64, 0.0, SINKS, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("invariant", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_window_softcap_and_sinks(window: int, softcap: float, sinks: torch.Tensor | None, invariant: bool) -> None:
    rows = [(30, 1), (300, 1), (0, 1), (290, 90)]
    case = build_case(rows, 4, 2, 64, 16, invariant=invariant, split_keys=128)
    check(case, 0.125, window, softcap, sinks)


@pytest.mark.parametrize("window, sinks", [(70, None), (0, SINKS), pytest.param(0, None, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("programs", [4, pytest.param(4096, marks=pytest.mark.nightly)])
def test_decode_is_split_over_the_keys(
    window: int, sinks: torch.Tensor | None, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one split to three, and a padding row; a program an item, or two programs a KV head for all of them."""
    monkeypatch.setattr(attention_triton, "DECODE_PROGRAMS", programs)
    rows = [(300, 1), (1, 1), (128, 1), (0, 1), (129, 1)]
    together = check(build_case(rows, 4, 2, 64, 16, split_keys=128), 0.125, window, sinks=sinks)
    assert not together[3].any()


@pytest.mark.parametrize("window, sinks", [(0, None), (37, SINKS)])
@pytest.mark.parametrize("invariant", [False, True])
def test_rows_of_any_kind_in_any_order(window: int, sinks: torch.Tensor | None, invariant: bool) -> None:
    """Single tokens behind the chunks, rows without tokens, and padding of more tokens than a split has keys."""
    rows = [(40, 3), (200, 1), (5, 0), (40, 2), (0, 133), (0, 0)]
    case = build_case(rows, 4, 2, 64, 16, invariant=invariant, split_keys=128)
    assert not check(case, 0.125, window, sinks=sinks)[-133:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_cache_of_8_bits(dtype: torch.dtype) -> None:
    """Unused slots are NaN here too."""
    case = build_case([(200, 1), (0, 1), (70, 30)], 4, 2, 64, 16, dtype, kv_dtype=torch.float8_e4m3fn)
    check(case, 0.125)


@pytest.mark.nightly
def test_a_launch_can_be_replayed_on_other_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CUDA graph does: the launches of one batch, repeated after its tensors hold another one. The host's idea
    of the lengths is wrong on purpose."""
    batches = [[(10, 1), (130, 1), (0, 1), (0, 0), (100, 60)], [(400, 1), (1, 1), (300, 1), (50, 30), (40, 30)]]
    captured = build_case([(400, 1), (0, 1), (400, 1), (390, 60), (0, 0)], 4, 2, 64, 16, split_keys=128)
    batch = dataclasses.replace(captured.batch, max_query_len=0, max_context_len=0)
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    run = interpreter.GridExecutor.__call__

    def record(self: Any, *arguments: Any, **options: Any) -> Any:
        launches.append((self, arguments, options))
        return run(self, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(interpreter.GridExecutor, "__call__", record)
        out = paged_attention_triton(captured.q, captured.k_cache, captured.v_cache, batch, 0.125)
    assert [launch[0].fn.__name__ for launch in launches] == ["_plan_kernel", "_attention_kernel", "_merge_kernel"]
    for rows in batches:
        case = build_case(rows, 4, 2, 64, 16, seed=1)
        for held, new in (
            (captured.q, case.q),
            (captured.k_cache, case.k_cache),
            (captured.v_cache, case.v_cache),
            (batch.query_start, case.batch.query_start),
            (batch.context_lens, case.batch.context_lens),
        ):
            held[: len(new)] = new
        batch.block_tables[:, : case.batch.block_tables.shape[1]] = case.batch.block_tables
        out.fill_(float("nan"))
        for kernel, arguments, options in launches:
            run(kernel, *arguments, **options)
        torch.testing.assert_close(out.double(), exact_attention(case, 0.125), rtol=0, atol=5e-6)


@pytest.mark.parametrize("window, sinks", [(0, None), pytest.param(150, SINKS, marks=pytest.mark.nightly)])
def test_the_invariant_form_gives_the_same_bits_in_any_company(window: int, sinks: torch.Tensor | None) -> None:
    """Decodes, chunks of any size and the whole prompt; alone, in twos and in sevens; in any blocks."""
    length = 330
    q, keys, values = torch.randn(length, 4, 64), torch.randn(length, 2, 64), torch.randn(length, 2, 64)

    def run(rows: list[Row], block_size: int = 16) -> list[torch.Tensor]:
        contents = [(q[end - count : end], keys[:end], values[:end]) for end, count in rows]
        case = build_case(rows, 4, 2, 64, block_size, contents=contents, invariant=True, split_keys=128)
        out = paged_attention_triton(case.q, case.k_cache, case.v_cache, case.batch, 0.125, window=window, sinks=sinks)
        return list(out.split([count for _, count in rows]))

    whole = run([(length, length)])[0]
    exact = build_case([(length, length)], 4, 2, 64, 16, contents=[(q, keys, values)])
    expected = exact_attention(exact, 0.125, window, sinks=sinks)
    torch.testing.assert_close(whole.double(), expected, rtol=0, atol=5e-6)
    seven: list[Row] = [(330, 1), (1, 1), (129, 1), (257, 1), (300, 7), (200, 130), (64, 64)]
    for rows, block_size in (([(330, 1)], 8), ([(128, 1), (329, 1)], 32), (seven, 16), ([(170, 1), (330, 160)], 64)):
        for (end, count), out in zip(rows, run(rows, block_size), strict=True):
            assert torch.equal(out, whole[end - count : end]), (end, count)


def test_a_row_does_not_depend_on_its_mates() -> None:
    """In the form that is not invariant, as long as the batch is of the same kind."""
    q, keys, values = torch.randn(300, 4, 64), torch.randn(300, 2, 64), torch.randn(300, 2, 64)

    def run(rows: list[Row], block_size: int) -> list[torch.Tensor]:
        contents = [(q[end - count : end], keys[:end], values[:end]) for end, count in rows]
        case = build_case(rows, 4, 2, 64, block_size, contents=contents, split_keys=128)
        out = paged_attention_triton(case.q, case.k_cache, case.v_cache, case.batch, 0.125)
        return list(out.split([count for _, count in rows]))

    alone = run([(260, 1)], 16)[0]
    assert torch.equal(run([(40, 1), (300, 1), (260, 1)], 32)[2], alone)
    chunk = run([(50, 50)], 16)[0]
    assert torch.equal(run([(40, 1), (260, 1), (50, 50)], 8)[2], chunk)
    assert torch.equal(run([(50, 9)], 16)[0], chunk[-9:])
