"""Causal attention over a paged KV cache (Kwon et al., SOSP'23): the batch layout and the function models call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from kernels.attention_torch import paged_attention_torch
from kernels.attention_triton import paged_attention_triton
from kernels.compiler import use_triton

SPLIT_KEYS = 512
"""Keys of a split for contexts of ordinary length."""


def split_keys_for(max_model_len: int) -> int:
    """`AttentionBatch.split_keys` of a model: 512, doubled until no row has more than 64 splits.

    The room for what the splits leave, fp32 [rows * splits, HQ, D], follows the longest context a row may have.
    """
    split = SPLIT_KEYS
    while split * 64 < max_model_len:
        split *= 2
    return split


@dataclass(frozen=True)
class AttentionBatch:
    """Which query tokens and which cached keys belong to which row, for one iteration.

    query_start: int32 [B+1], row r owns query tokens query_start[r] .. query_start[r+1]-1.
    context_lens: int32 [B], tokens of the row in the cache, this iteration's included; its queries are the last ones.
    block_tables: int32 [B, MB], cache block of each run of block_size tokens; entries past the context are ignored.
    max_query_len, max_context_len: the largest over the rows, known on the host.
    num_decodes: the first num_decodes rows have exactly one query token; the rest are prefill chunks.
    split_keys: keys of one row that one program of a GPU works on, a multiple of 128; `split_keys_for` gives it. It is
        part of the answer's bits, so all batches of a model share one.
    invariant: every row is computed with the same tiles, the same splits and the same order of additions, whether its
        tokens come as a decode, in a chunk of any size or again after a preemption: so a token's output has the same
        bits in any company. Slower on a GPU for prefill chunks. The torch path always is (see there for the matrix
        product's part in it).

    The tensors must not change while the object is in use: what a path derives from them is kept in `derived`, so
    that every layer after the first finds it ready.
    """

    query_start: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    max_query_len: int
    max_context_len: int
    num_decodes: int
    split_keys: int = SPLIT_KEYS
    invariant: bool = False
    derived: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(softcap(scale * q k^T) + causal mask) v for every query token. Returns a new tensor [T, HQ, D].

    q: [T, HQ, D], its heads contiguous inside a token. HQ is a multiple of HK, and query head h reads KV head
    h // (HQ / HK). `check_attention_shape` says which sizes are served.
    k_cache, v_cache: [NB, BS, HK, D] contiguous, of q's dtype or float8_e4m3fn, which is read as it is, with no scale.
    window: when > 0, the query at position p sees keys p - window + 1 .. p (Mistral, Gemma 3).
    softcap: when > 0, logits become softcap * tanh(logits / softcap) before the mask (Gemma 2).
    sinks: [HQ], when given, one more logit of each head, neither scaled nor capped, that takes part in the softmax's
        sum and has no value (GPT-OSS).

    A row with context_lens 0 (padding) gives zeros. Tokens behind the last row's have undefined outputs. What lies in
    unused slots, NaN included, never reaches the result.
    """
    run = paged_attention_triton if use_triton(q) else paged_attention_torch
    return run(q, k_cache, v_cache, batch, scale, window=window, softcap=softcap, sinks=sinks)
