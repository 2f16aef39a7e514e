from __future__ import annotations

import math

import pytest
import torch

from kernels import gumbel_noise, philox4x32
from kernels.philox import gumbel_noise_at

KNOWN_ANSWERS = [  # kat_vectors of the Random123 library: counter, key, words
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize("counter, key, words", KNOWN_ANSWERS)
def test_known_answers(counter: list[int], key: list[int], words: list[int]) -> None:
    packed = torch.tensor([key[1] << 32 | key[0]], dtype=torch.uint64).view(torch.int64)
    found = philox4x32(packed, *(torch.tensor([word]) for word in counter))
    assert [int(word) for word in found] == words


def test_noise_is_gumbel() -> None:
    noise = gumbel_noise(torch.arange(8), torch.arange(8) * 1000, 50000).double()
    assert noise.isfinite().all() and noise.max() < 16.7
    assert abs(noise.mean() - 0.5772) < 0.01
    assert abs(noise.var() - math.pi**2 / 6) < 0.02
    correlation = torch.corrcoef(noise)
    assert (correlation - torch.eye(8)).abs().max() < 0.03


def test_noise_is_a_function_of_seed_position_and_token() -> None:
    seeds = torch.tensor([7, 7, -1, 7, 2**62])
    positions = torch.tensor([5, 6, 5, 5, 5])
    noise = gumbel_noise(seeds, positions, 40001)
    assert torch.equal(noise[0], noise[3])
    assert all((noise[0] != noise[row]).float().mean() > 0.99 for row in (1, 2, 4))
    assert torch.equal(gumbel_noise(seeds.view(torch.uint64), positions.int(), 40001), noise)
    assert torch.equal(gumbel_noise(seeds[2:3], positions[2:3], 137), noise[2:3, :137])
    tokens = torch.randint(0, 40001, (5, 300))
    assert torch.equal(gumbel_noise_at(seeds, positions, tokens), noise.gather(1, tokens))
