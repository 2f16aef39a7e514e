"""Sampling on a GPU. The host does not wait for the device, and all shapes are fixed: a graph can hold it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.compiler import ceil_div, power_of_two, tl, triton
from kernels.philox import _gumbel
from kernels.sampling_filters import Cuts, filter_triton, is_filtered, order_key

if TYPE_CHECKING:
    from kernels.sampling import SamplingColumns

SPLIT_TOKENS = 4096
"""Vocabulary entries one program looks at."""


@triton.jit
def _draw_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    floor_ptr,
    last_token_ptr,
    highest_ptr,
    best_ptr,
    best_token_ptr,
    row_stride,
    vocab_size,
    splits,
    FILTERS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row and SPLIT tokens of it: the largest score among them, and the lowest token that has it.

    The score is the logit where the temperature is 0, otherwise logit / temperature + Gumbel noise. FILTERS: rows that
    have any are divided already, and what their filters cut has no score.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row).to(tl.int32)
    filtered, min_p, floor, last_token, top = False, 0.0, 0, 0, 0.0
    if FILTERS:
        min_p = tl.load(min_p_ptr + row)
        filtered = is_filtered(temperature, tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), min_p, vocab_size)
        floor, last_token = tl.load(floor_ptr + row), tl.load(last_token_ptr + row)
        top = tl.load(highest_ptr + row)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_token = split * SPLIT + tl.arange(0, BLOCK)
    for start in range(0, SPLIT, BLOCK):
        token = split * SPLIT + start + tl.arange(0, BLOCK)
        score = tl.load(logits_ptr + row * row_stride + token, mask=token < vocab_size, other=float("-inf"))
        if filtered:
            key = order_key(score)
            kept = (key > floor) | ((key == floor) & (token <= last_token))
            kept = kept & (tl.exp(score - top) >= min_p) & (token < vocab_size)
            if tl.max(kept.to(tl.int32)) > 0:  # few blocks have any
                score = tl.where(kept, score + _gumbel(seed, token, position), float("-inf"))
            else:
                score = tl.full([BLOCK], float("-inf"), tl.float32)
        elif temperature > 0.0:
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
    """Same contract as `kernels.sample`. Unless it is told that no row is filtered, each row's program finds out."""
    cuts = None if filtered is False else filter_triton(logits, columns)
    return draw_triton(logits, columns, cuts)


def draw_triton(logits: torch.Tensor, columns: SamplingColumns, cuts: Cuts | None = None) -> torch.Tensor:
    """Launches `_draw_kernel` and `_pick_kernel`. cuts: what `filter_triton` gave. Returns int64 [B]."""
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
        columns.top_k,
        columns.top_p,
        columns.min_p,
        columns.seed,
        columns.position,
        best if cuts is None else cuts.floor,
        best if cuts is None else cuts.last_token,
        best if cuts is None else cuts.highest,
        best,
        best_token,
        logits.stride(0),
        vocab_size,
        splits,
        FILTERS=cuts is not None,
        SPLIT=SPLIT_TOKENS,
        BLOCK=1024,
        num_warps=4,
    )
    _pick_kernel[(rows,)](best, best_token, out, splits, SPLITS=power_of_two(splits), num_warps=1)
    return out
