"""Uniforms drawn natively have the bits of the numpy reference, whatever the rows, tokens and threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.native import build as build_module
from kernels.native import noise
from kernels.native.noise import draw_uniforms
from kernels.philox import gumbel_noise, gumbel_noise_at, uniforms_in_numpy

WIDTH = 9001  # of several pieces, and of no whole number of them
KEYS = np.array([0, 1, (1 << 64) - 1, 0x0123456789ABCDEF], np.uint64)
POSITIONS = np.array([0, 7, (1 << 31) - 1, 131072], np.int64)


@pytest.mark.parametrize("threads", (1, 2))
@pytest.mark.parametrize("named", (False, True))
def test_the_bits_of_the_reference(threads: int, named: bool) -> None:
    tokens = None
    if named:
        tokens = np.random.default_rng(0).integers(0, 1 << 18, (len(KEYS), WIDTH))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        drawn = draw_uniforms(KEYS, POSITIONS, tokens, WIDTH)
    finally:
        torch.set_num_threads(before)
    assert drawn is not None
    assert torch.equal(drawn, uniforms_in_numpy(KEYS, POSITIONS, tokens, WIDTH))


def test_no_rows() -> None:
    drawn = draw_uniforms(KEYS[:0], POSITIONS[:0], None, WIDTH)
    assert drawn is not None and drawn.shape == (0, WIDTH)


def test_without_a_compiler_the_noise_is_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seeds, positions = torch.from_numpy(KEYS.view(np.int64)), torch.from_numpy(POSITIONS)
    tokens = torch.tensor([[5, 0, 8999]]).expand(len(KEYS), -1)
    expected = gumbel_noise(seeds, positions, WIDTH)
    noise._library.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    try:
        with pytest.raises(build_module.BuildError):
            build_module.find_compiler()
        assert draw_uniforms(KEYS, POSITIONS, None, WIDTH) is None
        assert torch.equal(gumbel_noise(seeds, positions, WIDTH), expected)
        assert torch.equal(gumbel_noise_at(seeds, positions, tokens), expected.gather(1, tokens))
        (record,) = caplog.records
        assert "numpy draws the noise" in record.getMessage() and "no C++ compiler" in record.getMessage()
    finally:
        noise._library.cache_clear()
