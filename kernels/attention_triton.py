"""Paged attention on a GPU: one launch for the decode rows, one for the prefill chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.attention_decode import attention_decode
from kernels.attention_prefill import attention_prefill

if TYPE_CHECKING:
    from kernels.attention import AttentionBatch


def paged_attention_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Same contract as `kernels.paged_attention`. No synchronisation with the host."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if batch.num_decodes:
        attention_decode(q, k_cache, v_cache, out, batch, scale, window, softcap)
    if batch.num_decodes < len(batch.context_lens):
        attention_prefill(q, k_cache, v_cache, out, batch, scale, window, softcap)
    return out
