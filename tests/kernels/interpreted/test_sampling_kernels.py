from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kernels import SamplingColumns, gumbel_noise, philox4x32, sample
from kernels.philox import gumbel_noise_triton
from kernels.sampling_triton import sample_triton

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


def test_draws_are_those_of_the_torch_path() -> None:
    """9000 tokens are three splits, the last one partly filled."""
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
    for row in (0, 3, 4):
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
