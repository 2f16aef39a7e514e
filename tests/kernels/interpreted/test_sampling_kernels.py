from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from kernels import SamplingColumns, gumbel_noise, philox4x32, sample, sampling_filters
from kernels.philox import gumbel_noise_triton
from kernels.sampling_filters import filter_triton
from kernels.sampling_triton import sample_triton
from tests.kernels.sampling_cases import MIXED, Parameters, columns, kept_tokens

SEEDS = torch.tensor([0, 1, -1, 2**40 + 17, -(2**63), 2**63 - 1, 0x299F31D0A4093822])


@triton.jit
def _philox_kernel(seeds_ptr, out_ptr, position, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    token = tl.arange(0, COUNT)
    zero = token * 0
    words = tl.philox(tl.load(seeds_ptr + row), token, zero + position, zero, zero)
    for word in tl.static_range(4):
        tl.store(out_ptr + (row * 4 + word) * COUNT + token, words[word].to(tl.int64))


def test_philox_equals_that_of_triton_bit_for_bit() -> None:
    out = torch.empty(len(SEEDS), 4, 512, dtype=torch.int64)
    _philox_kernel[(len(SEEDS),)](SEEDS, out, 123457, COUNT=512)
    expected = philox4x32(SEEDS[:, None], torch.arange(512)[None], torch.tensor(123457))
    for word in range(4):
        assert torch.equal(out[:, word], expected[word].expand(len(SEEDS), -1))


def test_gumbel_noise() -> None:
    positions = torch.arange(len(SEEDS)) * 100003
    found = gumbel_noise_triton(SEEDS, positions, 3000)
    torch.testing.assert_close(found, gumbel_noise(SEEDS, positions, 3000), rtol=2e-6, atol=2e-6)


def test_draws_are_those_of_the_torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """9000 tokens are three splits, the last one partly filled."""
    monkeypatch.setattr(sampling_filters, "BLOCK", 16384)  # one step costs the interpreter as much as a small one
    rows = 10
    logits = torch.randn(rows, 9000) * 2
    logits[:, 100:200] = -math.inf
    columns = SamplingColumns(
        temperature=torch.tensor([0.0, 1.0, 0.5, 2.0, 1.0, 1.0, 0.7, 0.0, 1.0, 3.0]),
        top_k=torch.tensor([0, 0, 0, 0, 50, 0, 3, 9, 0, 0], dtype=torch.int32),
        top_p=torch.tensor([1.0, 1.0, 1.0, 1.0, 0.9, 0.5, 1.0, 0.1, 1.0, 0.999]),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.01, 0.0, 0.0, 0.2, 0.0]),
        seed=torch.randint(-(2**63), 2**63 - 1, (rows,)),
        position=torch.arange(rows) * 77,
    )
    expected = sample(logits.clone(), columns)
    assert torch.equal(sample_triton(logits.clone(), columns), expected)
    for row in (0, 4):
        place = torch.tensor([row])
        assert torch.equal(sample_triton(logits[place], columns.select(place)), expected[place])


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(3, 9000)
    logits[0, [8999, 4100, 4099]] = 1.0
    logits[1] = -math.inf
    logits[1, 8500] = -3.0
    zeros = torch.zeros(3)
    columns = SamplingColumns(zeros, zeros.int(), zeros + 1, zeros, zeros.long(), zeros.long())
    assert sample_triton(logits, columns).tolist() == [4099, 8500, 0]


def kept_by_the_cuts(logits: torch.Tensor, rows: list[Parameters]) -> list[list[int]]:
    """What `filter_triton` leaves of each row, min-p included."""
    scaled = logits.clone()
    cuts = filter_triton(scaled, columns(rows))
    bits = (scaled + 0.0).view(torch.int32)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    tied = (keys == cuts.floor[:, None]) & (torch.arange(logits.shape[1]) <= cuts.last_token[:, None])
    likely = (scaled - cuts.highest[:, None]).exp() >= torch.tensor([row[3] for row in rows])[:, None]
    kept = ((keys > cuts.floor[:, None]) | tied) & likely
    return [row.nonzero().squeeze(1).tolist() for row in kept]


def test_filters_keep_what_the_rule_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks, the last one partly filled."""
    monkeypatch.setattr(sampling_filters, "BLOCK", 256)
    rows = [row for row in MIXED if row[0] > 0 and row[1:] != (0, 1.0, 0.0)]
    rows += [(0.5, 499, 1.0, 0.0), (1.0, 50, 0.3, 0.0), (3.0, 0, 0.9999, 0.0), (1e-2, 7, 0.7, 1.0)]
    logits = torch.randn(len(rows), 500) * 2
    logits[1, ::3] = -math.inf
    assert kept_by_the_cuts(logits, rows) == [sorted(kept_tokens(*row)) for row in zip(logits, rows, strict=True)]


def test_filters_cut_among_equal_tokens_by_id() -> None:
    """Coarse logits: nearly every cut falls among tokens of one value, both zeros among them."""
    rows: list[Parameters] = [
        *((1.0, top_k, 1.0, 0.0) for top_k in (1, 17, 299)),
        *((2.0, 0, top_p, 0.0) for top_p in (1e-6, 0.33, 0.8, 0.99)),
        *((1.0, top_k, 0.61, 0.0) for top_k in (3, 40, 250)),
        (1.0, 60, 0.999, 0.3),
    ]
    logits = torch.randint(-2, 3, (len(rows), 300)).float()
    logits[:, ::2] *= -1.0
    logits[3] = 1.0
    assert kept_by_the_cuts(logits, rows) == [sorted(kept_tokens(*row)) for row in zip(logits, rows, strict=True)]


def test_rows_that_are_not_numbers_do_no_harm() -> None:
    """Nothing is promised of what they draw, but the search ends, the ids are tokens, and their mates are safe."""
    logits = torch.randn(4, 100)
    logits[0], logits[1, 3], logits[2, 5] = -math.inf, math.nan, math.inf
    table = columns([(1.0, 5, 0.5, 0.1)] * 4)
    drawn = sample_triton(logits.clone(), table)
    assert bool(((drawn >= 0) & (drawn < 100)).all())
    assert drawn[3] == sample_triton(logits[3:].clone(), table.select(torch.tensor([3])))
