"""Penalties, noise and the draw."""

from __future__ import annotations

import torch

from kernels.penalties import apply_penalties_triton
from kernels.philox import gumbel_noise_triton
from kernels.sampling import SamplingColumns
from kernels.sampling_triton import sample_triton
from kernels.token_mask import mask_tokens_triton
from tests.kernels.launches.launch import Launch, empty, ints


def draw(filtered: bool) -> Launch:
    real = empty(4, dtype=torch.float32)
    columns = SamplingColumns(real, ints(4, dtype=torch.int32), real, real, ints(4), ints(4))
    return Launch(lambda: sample_triton(empty(4, 49152, dtype=torch.float32), columns, filtered))


def penalties() -> Launch:
    real, entries = empty(4, dtype=torch.float32), ints(99)
    counts, in_prompt = ints(99, dtype=torch.int32), ints(99, dtype=torch.bool)
    logits = empty(4, 49152, dtype=torch.float32)
    return Launch(lambda: apply_penalties_triton(logits, entries, entries, counts, in_prompt, real, real, real))


def token_masks() -> Launch:
    logits = empty(4, 49152, dtype=torch.float32)
    return Launch(lambda: mask_tokens_triton(logits, ints(4), ints(4, 1536, dtype=torch.int32)))


LAUNCHES = {
    "gumbel_noise": Launch(lambda: gumbel_noise_triton(ints(4), ints(4), 49152)),
    "draw": draw(filtered=False).on("sm_90"),
    "draw filtered": draw(filtered=True),
    "penalties": penalties(),
    "token masks": token_masks(),
}
