"""Log-probabilities that a client asked to see."""

from __future__ import annotations

import torch

from kernels.topk import ordered_topk


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Natural logs of the model's own distribution, before temperature and penalties.

    logits: fp32 [B, V]; tokens: int64 [B], the tokens drawn; k: how many of the likeliest to report, clipped to V.
    Returns (chosen fp32 [B], top_values fp32 [B, k] falling, top_ids int64 [B, k]); ties by lowest id. Plain torch on
    every device.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(-1, tokens[:, None]).squeeze(-1)
    k = min(k, logits.shape[-1])
    if k == 0:
        return chosen, logprobs.new_empty(len(logits), 0), tokens.new_empty(len(logits), 0)
    values, ids = ordered_topk(logprobs, k)
    return chosen, values, ids
