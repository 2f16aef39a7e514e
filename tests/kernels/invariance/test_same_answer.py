from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from kernels import add_rms_norm, gelu_tanh_mul, paged_attention, rms_norm, silu_mul
from tests.kernels.attention_cases import build_case

CONTEXT = 300
SHAPES = [(28, 4, 128), (12, 1, 256), (6, 6, 80), (1, 1, 64)]
MORE_SHAPES = [(14, 2, 64), (9, 3, 96)]


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[*SHAPES, *(pytest.param(shape, marks=pytest.mark.nightly) for shape in MORE_SHAPES)], ids=str)
def run(request: pytest.FixtureRequest) -> Callable[..., list[torch.Tensor]]:
    """Attention of rows that are all prefixes of one sequence: returns each row's outputs."""
    heads, kv_heads, head_dim = request.param
    q = torch.randn(CONTEXT, heads, head_dim)
    keys, values = torch.randn(CONTEXT, kv_heads, head_dim), torch.randn(CONTEXT, kv_heads, head_dim)

    def attend(
        rows: list[tuple[int, int]], block_size: int = 16, window: int = 0, dtype: torch.dtype = torch.float32
    ) -> list[torch.Tensor]:
        contents = [(q[end - length : end], keys[:end], values[:end]) for end, length in rows]
        contents = [tuple(tensor.to(dtype) for tensor in row) for row in contents]  # type: ignore[misc]
        case = build_case(rows, heads, kv_heads, head_dim, block_size, dtype, contents=contents, seed=len(rows))
        out = paged_attention(case.q, case.k_cache, case.v_cache, case.batch, head_dim**-0.5, window=window)
        return list(out.split([length for _, length in rows]))

    return attend


@pytest.mark.parametrize(
    ("window", "dtype"),
    [
        (0, torch.float32),
        (50, torch.bfloat16),
        pytest.param(50, torch.float32, marks=pytest.mark.nightly),
        pytest.param(0, torch.bfloat16, marks=pytest.mark.nightly),
    ],
)
def test_attention(run: Callable[..., list[torch.Tensor]], window: int, dtype: torch.dtype) -> None:
    """The whole prompt at once is the yardstick for chunks, decodes, block sizes and mates."""
    whole = run([(CONTEXT, CONTEXT)], window=window, dtype=dtype)[0]
    for block_size in (1, 8, 32, 128):
        assert torch.equal(run([(CONTEXT, CONTEXT)], block_size, window, dtype)[0], whole)
    for length in (7, 100, 129):
        chunks = [(min(start + length, CONTEXT), min(length, CONTEXT - start)) for start in range(0, CONTEXT, length)]
        assert torch.equal(torch.cat([run([chunk], window=window, dtype=dtype)[0] for chunk in chunks]), whole)
    for size in (1, 2, 7, 33):
        ends = torch.randint(1, CONTEXT + 1, (size,)).tolist()
        out = torch.cat(run([(end, 1) for end in ends], window=window, dtype=dtype))
        assert torch.equal(out, whole[torch.tensor(ends) - 1])
    mixed = [(5, 1), (300, 1), (129, 29), (200, 200), (77, 2)]
    for (end, length), out in zip(mixed, run(mixed, window=window, dtype=dtype), strict=True):
        assert torch.equal(out, whole[end - length : end])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [100, 576, 2560])
def test_small_operations(width: int, dtype: torch.dtype) -> None:
    x, other, weight = (
        torch.randn(70, 2 * width).to(dtype),
        torch.randn(70, 2 * width).to(dtype),
        torch.randn(2 * width),
    )
    weight = weight.to(dtype)
    operations: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
        lambda x, other: rms_norm(x, weight, 1e-6),
        lambda x, other: rms_norm(x, weight, 1e-6, unit_offset=True),
        lambda x, other: add_rms_norm(x, other, weight, 1e-6)[0],
        lambda x, other: silu_mul(x),
        lambda x, other: gelu_tanh_mul(x),
    ]
    for operation in operations:
        together = operation(x, other)
        for start, stop in ((0, 1), (69, 70), (3, 8), (5, 38), (1, 70)):
            part = operation(x[start:stop].clone(), other[start:stop].clone())
            assert torch.equal(part, together[start:stop])
