"""A stub model that reads and writes its KV through the block tables, and requests for it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from common.wire import Limits, ModelCard
from executor_svc.kv_cache import KVCache
from kernels import AttentionBatch
from tests.executor.plans import ids

VOCABULARY = 60
LIMITS = Limits(block_size=4, num_blocks=64, num_host_blocks=6, max_num_seqs=8, max_num_batched_tokens=128)
CARD = ModelCard(
    name="stub", fingerprint=bytes(16), vocab_size=VOCABULARY, max_model_len=48, eos_ids=(0,), dtype="float32"
)


@dataclass
class StubShape:
    num_layers: int = 2
    num_kv_heads: int = 1
    head_dim: int = 8


class StubModel:
    """Logits from the mean of all keys and values in the context: any wrong block, position or row changes them."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.config = StubShape()
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.embedding = torch.randn(VOCABULARY, 8, generator=generator)
        self.places = torch.randn(64, 8, generator=generator)
        self.head = torch.randn(16, VOCABULARY, generator=generator)
        self.broken_token: int | None = None
        self.error: Exception | None = None

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        batch: AttentionBatch,
        cache: KVCache,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        block_size = cache.k[0].shape[1]
        written = slots >= 0
        for layer in range(2):
            value = self.embedding[token_ids] * (layer + 1) + self.places[positions]
            cache.k[layer].view(-1, 8)[slots[written]] = value[written]
            cache.v[layer].view(-1, 8)[slots[written]] = value[written].square()
        out = torch.zeros(len(token_ids), VOCABULARY)
        bounds = batch.query_start.tolist()
        for row, (first, last) in enumerate(itertools.pairwise(bounds)):
            for token in range(first, last):
                count = int(positions[token]) + 1
                where = torch.arange(count)
                place = batch.block_tables[row].long()[where // block_size] * block_size + where % block_size
                keys, values = cache.k[0].view(-1, 8)[place], cache.v[1].view(-1, 8)[place]
                out[token] = torch.cos(40 * torch.cat((keys.mean(0), values.mean(0)))) @ self.head
                if self.broken_token is not None and int(token_ids[token]) == self.broken_token:
                    out[token, 3] = float("nan")
        return out[logit_rows]


REQUESTS: dict[str, dict[str, Any]] = {
    "A": {"tokens": [5, 6, 7], "temperature": 0.0, "ignore_eos": True, "max_tokens": 7},
    "B": {"tokens": [9, 8, 7, 6, 5], "temperature": 1.0, "seed": 5, "top_k": 50, "ignore_eos": True, "max_tokens": 12},
    "C": {"tokens": [11], "temperature": 0.0, "repetition_penalty": 2.0, "ignore_eos": True, "max_tokens": 12},
    "D": {
        "tokens": [1, 2, 3, 4, 5, 6, 7, 8, 9],
        "temperature": 0.0,
        "bias_ids": ids(9),
        "bias_values": np.array([100], np.float32),
        "min_tokens": 8,
        "max_tokens": 12,
    },
    "E": {"tokens": [30, 31], "temperature": 0.9, "seed": 77, "top_p": 0.9, "ignore_eos": True, "max_tokens": 12},
}
