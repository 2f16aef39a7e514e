"""Drawing the next token of every row: the parameters, the rule, and the function the executor calls."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.compiler import use_triton
from kernels.sampling_torch import sample_torch
from kernels.sampling_triton import sample_triton


@dataclass(frozen=True)
class SamplingColumns:
    """Sampling parameters of a batch, one row a sequence; every tensor is [B].

    temperature: fp32, 0 = greedy.
    top_k: int32, 0 = off. top_p: fp32 in (0, 1], 1 = off. min_p: fp32 in [0, 1], 0 = off.
    seed: int64, bit pattern of a uint64. position: int64, index of the token to be drawn in its sequence.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor

    def select(self, rows: torch.Tensor | slice) -> SamplingColumns:
        """The columns of the rows that `rows`, int64 [N], names; views of them, where it is a slice."""
        return SamplingColumns(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            seed=self.seed[rows],
            position=self.position[rows],
        )


def sample(logits: torch.Tensor, columns: SamplingColumns, *, filtered: bool | None = None) -> torch.Tensor:
    """Draws one token a row. logits: fp32 [B, V], may be overwritten. Returns int64 [B].

    Temperature 0 takes the largest logit, ties by lowest id. Otherwise, in this order: logits / temperature; top-k
    keeps the k largest (ties by lowest id, so that top_k = 1 is greedy); top-p keeps the smallest prefix of the rest,
    renormalised and in falling order, whose mass reaches top_p; min-p keeps what is at least min_p times as likely as
    the likeliest token. Then the largest of logit + Gumbel noise (`gumbel_noise`) among the kept tokens wins, which
    draws from their renormalised distribution. A logit of -inf is never drawn while the row has a finite one.

    A row's draw depends on its own logits, parameters, seed and position alone.

    filtered: whether any row has a top-k, top-p or min-p; None where the caller does not know.
    """
    return sample_triton(logits, columns, filtered) if use_triton(logits) else sample_torch(logits, columns)
