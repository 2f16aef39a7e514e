"""Counter-based noise: Philox4x32-10 (Salmon et al., SC'11) and the Gumbel noise drawn from it.

The noise of a token is a pure function of (seed, position, token id), so a sequence that is replayed, moved to another
executor or batched differently draws the same numbers.
"""

from __future__ import annotations

import torch

from kernels.compiler import ceil_div, tl, triton, use_triton

MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
KEY_STEP_0, KEY_STEP_1 = 0x9E3779B9, 0xBB67AE85
LOW_WORD = 0xFFFFFFFF
NOISE_CHUNK = 1 << 15
"""Elements worked on at once, so that the ten rounds stay in a core's cache."""


def philox4x32(
    key: torch.Tensor,
    counter_0: torch.Tensor,
    counter_1: torch.Tensor,
    counter_2: torch.Tensor | int = 0,
    counter_3: torch.Tensor | int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ten rounds of Philox4x32; equals `tl.philox(key, c0, c1, c2, c3)` bit for bit.

    key: int64, the bit pattern of a uint64, low word first. counter_*: int64 in [0, 2**32). All broadcast.
    Returns four int64 tensors of 32-bit words.
    """
    key_0, key_1 = key & LOW_WORD, (key >> 32) & LOW_WORD
    zero = torch.zeros((), dtype=torch.int64, device=key.device)
    c0, c1, c2, c3 = counter_0, counter_1, zero + counter_2, zero + counter_3
    for _ in range(10):
        product_0, product_1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1  # wrap modulo 2**64, which keeps every bit
        c0 = (product_1 >> 32).bitwise_and(LOW_WORD) ^ (c1 ^ key_0)
        c2 = (product_0 >> 32).bitwise_and(LOW_WORD) ^ (c3 ^ key_1)
        c1, c3 = product_1 & LOW_WORD, product_0 & LOW_WORD
        key_0, key_1 = (key_0 + KEY_STEP_0) & LOW_WORD, (key_1 + KEY_STEP_1) & LOW_WORD
    return c0, c1, c2, c3


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise of every token of the vocabulary, fp32 [B, vocab_size].

    seeds: [B] uint64, or int64 with its bit pattern. positions: [B] int64 >= 0.
    Word 0 of philox(key = seed, counter = (token, position, 0, 0)) gives the uniform (word >> 9 + 1/2) / 2**23, which
    lies strictly inside (0, 1); the noise is -log(-log(uniform)), at most 16.7.
    """
    if use_triton(seeds):
        return gumbel_noise_triton(seeds, positions, vocab_size)
    return gumbel_noise_at(seeds, positions, torch.arange(vocab_size, device=seeds.device).expand(len(seeds), -1))


def gumbel_noise_at(seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The columns of `gumbel_noise` that `tokens`, int64 [B, N], names in each row. Returns fp32 [B, N]."""
    key, position = seeds.view(torch.int64)[:, None], positions.long()[:, None]
    out = torch.empty(tokens.shape, dtype=torch.float32, device=tokens.device)
    rows, columns = _noise_chunk(*tokens.shape)
    for row in range(0, tokens.shape[0], rows):
        for column in range(0, tokens.shape[1], columns):
            part = slice(row, row + rows), slice(column, column + columns)
            word = philox4x32(key[part[0]], tokens[part], position[part[0]])[0]
            uniform = (word >> 9).float().add_(0.5).mul_(2.0**-23)
            out[part] = uniform.log_().neg_().log_().neg_()
    return out


def _noise_chunk(rows: int, columns: int) -> tuple[int, int]:
    columns = max(1, min(columns, NOISE_CHUNK))
    return max(1, NOISE_CHUNK // columns), columns


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
