"""The k largest values of each row in one total order: falling value, ties by lowest index."""

from __future__ import annotations

import torch

LOW_WORD = 0xFFFFFFFF


def ordered_topk(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """values: fp32 [B, V] without NaN; 0 < k <= V. Returns (fp32 [B, k], int64 ids [B, k]).

    Unlike `torch.topk`, whose choice among equal values is open, the answer is a function of the row alone.
    """
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers, ordered like the floats
    index = torch.arange(values.shape[-1], device=values.device)
    keys = (rising.long() << 32) | (LOW_WORD - index)
    ids = LOW_WORD - (keys.topk(k, dim=-1).values & LOW_WORD)
    return values.gather(-1, ids), ids
