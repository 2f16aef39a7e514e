"""Counter-based noise: Philox4x32-10 (Salmon et al., SC'11) and the Gumbel noise drawn from it.

The noise of a token is a pure function of (seed, position, token id), so a sequence that is replayed, moved to another
executor or batched differently draws the same numbers.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.compiler import ceil_div, tl, triton, use_triton
from kernels.native.noise import draw_uniforms

MULTIPLIER_0, MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
KEY_STEP_0, KEY_STEP_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
LOW_WORD, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
NOISE_CHUNK = 1 << 14
"""Numbers worked on at once, so that the ten rounds stay in a core's cache."""


def philox4x32(
    key: torch.Tensor,
    counter_0: torch.Tensor,
    counter_1: torch.Tensor,
    counter_2: torch.Tensor | int = 0,
    counter_3: torch.Tensor | int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ten rounds of Philox4x32; equals `tl.philox(key, c0, c1, c2, c3)` bit for bit.

    key: int64, the bit pattern of a uint64, low word first. counter_*: int64 in [0, 2**32). All broadcast, on the CPU.
    Returns four int64 tensors of 32-bit words.
    """
    counters = [torch.as_tensor(counter).numpy() for counter in (counter_0, counter_1, counter_2, counter_3)]
    keys, *words = np.broadcast_arrays(key.numpy().view(np.uint64), *counters)
    state = np.stack(words).astype(np.uint64)
    _ten_rounds(keys, state)
    first, second, third, fourth = torch.from_numpy(state.view(np.int64)).unbind(0)
    return first, second, third, fourth


def _ten_rounds(key: np.ndarray, state: np.ndarray) -> None:
    """key: uint64, broadcasts to [..]; state: uint64 [4, ..] of 32-bit words, changed in place.

    In numpy, because an operation of torch on a scalar costs as much as the arithmetic of a whole chunk.
    """
    key_0, key_1 = key & LOW_WORD, key >> HALF
    c0, c1, c2, c3 = state
    product_0, product_1 = np.empty((2, *c0.shape), np.uint64)
    for _ in range(10):
        np.multiply(c0, MULTIPLIER_0, out=product_0)
        np.multiply(c2, MULTIPLIER_1, out=product_1)
        np.right_shift(product_1, HALF, out=c0)
        np.right_shift(product_0, HALF, out=c2)
        c0 ^= c1
        c0 ^= key_0
        c2 ^= c3
        c2 ^= key_1
        np.bitwise_and(product_1, LOW_WORD, out=c1)
        np.bitwise_and(product_0, LOW_WORD, out=c3)
        key_0, key_1 = (key_0 + KEY_STEP_0) & LOW_WORD, (key_1 + KEY_STEP_1) & LOW_WORD


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise of every token of the vocabulary, fp32 [B, vocab_size].

    seeds: [B] uint64, or int64 with its bit pattern. positions: [B] int64 >= 0.
    Word 0 of philox(key = seed, counter = (token, position, 0, 0)) gives the uniform (word >> 9 + 1/2) / 2**23, which
    lies strictly inside (0, 1); the noise is -log(-log(uniform)), at most 16.7.
    """
    if use_triton(seeds):
        return gumbel_noise_triton(seeds, positions, vocab_size)
    return _noise(seeds, positions, None, vocab_size)


def gumbel_noise_at(seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The columns of `gumbel_noise` that `tokens`, int64 [B, N], names in each row. Returns fp32 [B, N]. CPU only."""
    return _noise(seeds, positions, tokens.numpy(), tokens.shape[1])


def _noise(seeds: torch.Tensor, positions: torch.Tensor, tokens: NDArray[np.int64] | None, width: int) -> torch.Tensor:
    """tokens: [B, width], or None: 0 … width - 1 in every row."""
    keys, at = seeds.view(torch.int64).numpy().view(np.uint64), positions.numpy()
    uniforms = draw_uniforms(keys, at, tokens, width)
    if uniforms is None:
        uniforms = uniforms_in_numpy(keys, at, tokens, width)
    return uniforms.log_().neg_().log_().neg_()


def uniforms_in_numpy(
    keys: NDArray[np.uint64], positions: NDArray[np.int64], tokens: NDArray[np.int64] | None, width: int
) -> torch.Tensor:
    """Reference of `kernels.native.noise.draw_uniforms`, which says what it takes and gives."""
    token = np.broadcast_to(np.arange(width), (len(keys), width)) if tokens is None else tokens
    out = torch.empty(token.shape, dtype=torch.float32)
    columns = max(1, min(width, NOISE_CHUNK))
    rows = NOISE_CHUNK // columns
    for row in range(0, len(keys), rows):
        for column in range(0, width, columns):
            part = slice(row, row + rows), slice(column, column + columns)
            state = np.zeros((4, *token[part].shape), np.uint64)
            state[0], state[1] = token[part], positions[part[0], None]
            _ten_rounds(keys[part[0], None], state)
            out[part] = torch.from_numpy(state[0].view(np.int64) >> 9).float().add_(0.5).mul_(2.0**-23)
    return out


@triton.jit
def _gumbel(seed, token, position):
    """The noise of `gumbel_noise` for int32 tokens at one position."""
    zero = token * 0
    word, _, _, _ = tl.philox(seed, token, zero + position, zero, zero)
    uniform = ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


@triton.jit
def _gumbel_kernel(seeds_ptr, positions_ptr, out_ptr, vocab_size, BLOCK: tl.constexpr):
    """One program a row and BLOCK tokens."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row).to(tl.int32)
    tl.store(out_ptr + row * vocab_size + token, _gumbel(seed, token, position), mask=token < vocab_size)


def gumbel_noise_triton(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Same contract as `kernels.gumbel_noise`, up to the rounding of the logarithms."""
    out = torch.empty((len(seeds), vocab_size), dtype=torch.float32, device=seeds.device)
    grid = (len(seeds), ceil_div(vocab_size, 1024))
    _gumbel_kernel[grid](seeds, positions, out, vocab_size, BLOCK=1024, num_warps=4)
    return out
