"""Which tokens may be drawn, as one bit for each (Dong et al., 2024, XGrammar, keep their masks so)."""

from __future__ import annotations

import math

import numpy as np
import torch

from kernels.compiler import ceil_div, tl, triton, use_triton


def mask_tokens(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """Sets the logits of tokens that may not be drawn to -inf, in place, in the rows named; others are not touched.

    logits: fp32 [B, V]. rows: int64 [N], distinct. words: int32 [N, ceil(V / 32)]: bit i % 32 of word i // 32 says
    whether token i may be drawn.
    """
    run = mask_tokens_triton if use_triton(logits) else mask_tokens_reference
    run(logits, rows, words)


def mask_tokens_reference(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """Plain version of `mask_tokens`, for tensors on the CPU: numpy is several times as fast at it as torch."""
    allowed = np.unpackbits(words.numpy().view(np.uint8), axis=1, bitorder="little", count=logits.shape[1])
    values = logits.numpy()
    for row, bits in zip(rows.tolist(), allowed, strict=True):
        np.copyto(values[row], -math.inf, where=bits == 0)


@triton.jit
def _mask_kernel(logits_ptr, rows_ptr, words_ptr, row_stride, words_stride, vocab_size, BLOCK: tl.constexpr):
    """One program for BLOCK tokens of one row."""
    entry = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    row = tl.load(rows_ptr + entry)
    word = tl.load(words_ptr + entry.to(tl.int64) * words_stride + token // 32, mask=inside, other=-1)
    forbidden = ((word >> (token % 32)) & 1) == 0
    tl.store(logits_ptr + row.to(tl.int64) * row_stride + token, float("-inf"), mask=inside & forbidden)


def mask_tokens_triton(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """Launches `_mask_kernel`."""
    vocab_size = logits.shape[1]
    if len(rows):
        _mask_kernel[(len(rows), ceil_div(vocab_size, 1024))](
            logits, rows, words, logits.stride(0), words.stride(0), vocab_size, BLOCK=1024, num_warps=4
        )
