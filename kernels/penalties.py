"""Repetition (Keskar et al., 2019), presence and frequency penalties."""

from __future__ import annotations

import torch


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    in_prompt: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """Changes `logits` (fp32 [B, V]) in place for the tokens that have occurred.

    The occurrences are a sparse list with at most one entry per (row, token): rows int64 [N], tokens int64 [N],
    counts int32 [N] (occurrences in the output), in_prompt bool [N]. repetition, presence, frequency: fp32 [B].

    Repetition looks at prompt and output: a positive logit is divided by it, another multiplied. Then, for tokens of
    the output alone, count * frequency and presence are subtracted. This is what vLLM and the OpenAI API do.
    """
    apply_penalties_reference(logits, rows, tokens, counts, in_prompt, repetition, presence, frequency)


def apply_penalties_reference(
    logits: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    in_prompt: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """Plain torch version of `apply_penalties`."""
    value = logits[rows, tokens]
    factor = torch.where(in_prompt | (counts > 0), repetition[rows], 1.0)
    value = torch.where(value > 0, value / factor, value * factor)
    value = value - counts * frequency[rows] - (counts > 0) * presence[rows]
    logits[rows, tokens] = value
