"""Sampling on a GPU: the filters in torch, the draw in Triton."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from kernels.compiler import ceil_div, power_of_two, tl, triton
from kernels.philox import _gumbel
from kernels.sampling_torch import filtered_rows, kept_prefix

if TYPE_CHECKING:
    from kernels.sampling import SamplingColumns

SPLIT_TOKENS = 4096
"""Vocabulary entries one program looks at."""


@triton.jit
def _draw_kernel(
    logits_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    best_ptr,
    best_token_ptr,
    row_stride,
    vocab_size,
    splits,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row and SPLIT tokens of it: the largest score among them, and the lowest token that has it.

    The score is the logit where the temperature is 0, otherwise logit / temperature + Gumbel noise.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row).to(tl.int32)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_token = split * SPLIT + tl.arange(0, BLOCK)
    for start in range(0, SPLIT, BLOCK):
        token = split * SPLIT + start + tl.arange(0, BLOCK)
        score = tl.load(logits_ptr + row * row_stride + token, mask=token < vocab_size, other=float("-inf"))
        if temperature > 0.0:
            score = tl.div_rn(score, tl.zeros([BLOCK], tl.float32) + temperature) + _gumbel(seed, token, position)
        better = score > best
        best = tl.where(better, score, best)
        best_token = tl.where(better, token, best_token)
    highest = tl.max(best)
    lowest_token = tl.min(tl.where(best == highest, best_token, 2147483647))
    tl.store(best_ptr + row * splits + split, highest)
    tl.store(best_token_ptr + row * splits + split, lowest_token)


@triton.jit
def _pick_kernel(best_ptr, best_token_ptr, out_ptr, splits, SPLITS: tl.constexpr):
    """One program a row: the winner among its splits. SPLITS is the power of two of splits."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    mask = split < splits
    best = tl.load(best_ptr + row * splits + split, mask=mask, other=float("-inf"))
    token = tl.load(best_token_ptr + row * splits + split, mask=mask, other=2147483647)
    winner = tl.min(tl.where(best == tl.max(best), token, 2147483647))
    tl.store(out_ptr + row, winner.to(tl.int64))


def sample_triton(logits: torch.Tensor, columns: SamplingColumns, filtered: bool | None = None) -> torch.Tensor:
    """Same contract as `kernels.sample`.

    A first version: where any row has a top-k, top-p or min-p, every row is sorted by torch. To find that out the host
    waits for the device, unless it is told.
    """
    if bool(filtered_rows(columns, logits.shape[1]).any()) if filtered is None else filtered:
        logits = filter_logits(logits, columns)
    return draw_triton(logits, columns)


def filter_logits(logits: torch.Tensor, columns: SamplingColumns) -> torch.Tensor:
    """A copy of the logits, -inf where top-k, top-p or min-p cut the token. fp32 [B, V], on any device."""
    drawn = (columns.temperature > 0)[:, None]
    scaled = logits / torch.where(drawn, columns.temperature[:, None], 1.0)
    values, tokens = scaled.sort(dim=-1, descending=True, stable=True)
    mass = (values - values[:, :1]).exp().double().sum(-1, keepdim=True)
    keep, _ = kept_prefix(values, mass, columns, logits.shape[1])
    cut = torch.empty_like(keep).scatter_(1, tokens, ~keep)
    return logits.masked_fill(cut & drawn, -math.inf)


def draw_triton(logits: torch.Tensor, columns: SamplingColumns) -> torch.Tensor:
    """Launches `_draw_kernel` and `_pick_kernel`: the draw without filters. Returns int64 [B]."""
    rows, vocab_size = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    splits = ceil_div(vocab_size, SPLIT_TOKENS)
    best = torch.empty((rows, splits), dtype=torch.float32, device=logits.device)
    best_token = torch.empty((rows, splits), dtype=torch.int32, device=logits.device)
    _draw_kernel[(rows, splits)](
        logits,
        columns.temperature,
        columns.seed,
        columns.position,
        best,
        best_token,
        logits.stride(0),
        vocab_size,
        splits,
        SPLIT=SPLIT_TOKENS,
        BLOCK=1024,
        num_warps=4,
    )
    _pick_kernel[(rows,)](best, best_token, out, splits, SPLITS=power_of_two(splits), num_warps=1)
    return out
