"""Repetition (Keskar et al., 2019), presence and frequency penalties."""

from __future__ import annotations

import torch

from kernels.compiler import ceil_div, tl, triton, use_triton


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
    run = apply_penalties_triton if use_triton(logits) else apply_penalties_reference
    run(logits, rows, tokens, counts, in_prompt, repetition, presence, frequency)


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


@triton.jit(do_not_specialize=["entries"])
def _penalties_kernel(
    logits_ptr,
    rows_ptr,
    tokens_ptr,
    counts_ptr,
    in_prompt_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    row_stride,
    entries,
    BLOCK: tl.constexpr,
):
    """One program for BLOCK entries of the list; no two entries name the same logit."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < entries
    row = tl.load(rows_ptr + entry, mask=mask, other=0)
    token = tl.load(tokens_ptr + entry, mask=mask, other=0)
    count = tl.load(counts_ptr + entry, mask=mask, other=0)
    in_prompt = tl.load(in_prompt_ptr + entry, mask=mask, other=0) != 0
    logit_ptr = logits_ptr + row.to(tl.int64) * row_stride + token
    logit = tl.load(logit_ptr, mask=mask, other=0.0)
    in_output = count > 0
    factor = tl.where(in_prompt | in_output, tl.load(repetition_ptr + row, mask=mask, other=1.0), 1.0)
    logit = tl.where(logit > 0, logit / factor, logit * factor)
    logit -= count.to(tl.float32) * tl.load(frequency_ptr + row, mask=mask, other=0.0)
    logit -= tl.where(in_output, tl.load(presence_ptr + row, mask=mask, other=0.0), 0.0)
    tl.store(logit_ptr, logit, mask=mask)


def apply_penalties_triton(
    logits: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    in_prompt: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """Launches `_penalties_kernel`."""
    if len(rows) == 0:
        return
    _penalties_kernel[(ceil_div(len(rows), 256),)](
        logits,
        rows,
        tokens,
        counts,
        in_prompt,
        repetition,
        presence,
        frequency,
        logits.stride(0),
        len(rows),
        BLOCK=256,
        num_warps=4,
    )
