"""Sampling in plain torch: the CPU path, and the reference of the Triton kernels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from kernels.philox import gumbel_noise, gumbel_noise_at
from kernels.topk import ordered_topk

if TYPE_CHECKING:
    from kernels.sampling import SamplingColumns

CANDIDATES = 1024
"""Likeliest tokens that a row's filters are tried on first."""
GROWTH = 16
"""How many times more are taken where those do not suffice."""


def sample_torch(logits: torch.Tensor, columns: SamplingColumns) -> torch.Tensor:
    """Same contract as `kernels.sample`. Each row takes the cheapest way its own parameters allow."""
    out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    vocab_size = logits.shape[1]
    drawn = columns.temperature > 0
    filtered = filtered_rows(columns, vocab_size)
    for rows, choose in ((~drawn, _greedy), (drawn & ~filtered, _draw), (filtered, _draw_filtered)):
        places = rows.nonzero().squeeze(1)
        if len(places) == len(logits):
            return choose(logits, columns)
        if len(places):
            out[places] = choose(logits[places], columns.select(places))
    return out


def filtered_rows(columns: SamplingColumns, vocab_size: int) -> torch.Tensor:
    """bool [B]: the rows that are drawn from a part of the vocabulary."""
    top_k = (columns.top_k > 0) & (columns.top_k < vocab_size)
    return (columns.temperature > 0) & (top_k | (columns.top_p < 1.0) | (columns.min_p > 0.0))


def _greedy(logits: torch.Tensor, columns: SamplingColumns) -> torch.Tensor:
    return logits.argmax(-1)


def _draw(logits: torch.Tensor, columns: SamplingColumns) -> torch.Tensor:
    noise = gumbel_noise(columns.seed, columns.position, logits.shape[1])
    return noise.add_(logits / columns.temperature[:, None]).argmax(-1)


def _draw_filtered(logits: torch.Tensor, columns: SamplingColumns) -> torch.Tensor:
    """Filters as many of the likeliest tokens as it takes to know what is kept: a cut-off is seldom far down a row."""
    vocab_size = logits.shape[1]
    logits = logits / columns.temperature[:, None]
    mass = 1.0 / torch.softmax(logits, -1).amax(-1, keepdim=True).double()  # of the vocabulary; the likeliest has 1
    out = torch.empty(len(logits), dtype=torch.int64)
    rows, count = torch.arange(len(logits)), CANDIDATES
    while len(rows):
        values, tokens = ordered_topk(logits, min(count, vocab_size))
        keep, complete = kept_prefix(values, mass, columns, vocab_size)
        if complete.any():
            drawn = _draw_among(values[complete], tokens[complete], keep[complete], columns.select(complete))
            out[rows[complete]] = drawn
        rest = ~complete
        rows, logits, mass, columns = rows[rest], logits[rest], mass[rest], columns.select(rest)
        count *= GROWTH
    return out


def kept_prefix(
    values: torch.Tensor, mass: torch.Tensor, columns: SamplingColumns, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the N likeliest tokens survive top-k, top-p and min-p.

    values: fp32 [B, N], logits / temperature in falling order. mass: fp64 [B, 1], sum over the vocabulary of
    exp(value - largest value). Returns (keep bool [B, N], complete bool [B]: no token beyond the N could survive).
    """
    count = values.shape[1]
    top_k = torch.where(columns.top_k > 0, columns.top_k, vocab_size).clamp_max(vocab_size)[:, None].long()
    weights = (values - values[:, :1]).exp()
    cumulative = weights.double().cumsum(-1)
    inside = cumulative.gather(1, top_k.clamp_max(count) - 1)
    mass = torch.where(top_k == vocab_size, mass, inside)
    before = cumulative - weights
    top_p = columns.top_p[:, None].double()
    keep = torch.arange(count, device=values.device) < top_k
    keep &= (before < top_p * mass) | (top_p >= 1.0)
    keep &= weights >= columns.min_p[:, None]
    keep[:, 0] = True
    # With a top-k set larger than N, its mass and so its top-p prefix are not known yet.
    complete = (top_k <= count) | ((top_k == vocab_size) & ~keep[:, -1:])
    return keep, complete.squeeze(1)


def _draw_among(
    values: torch.Tensor, tokens: torch.Tensor, keep: torch.Tensor, columns: SamplingColumns
) -> torch.Tensor:
    width = int(keep.sum(-1).max())
    values, tokens, keep = values[:, :width], tokens[:, :width], keep[:, :width]
    scores = gumbel_noise_at(columns.seed, columns.position, tokens).add_(values).masked_fill_(~keep, -math.inf)
    return tokens.gather(1, scores.argmax(-1, keepdim=True)).squeeze(1)
