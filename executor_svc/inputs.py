"""From the work of an iteration to the tensors that the model and the sampler read."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from common.wire import Plan
from executor_svc.batch import BatchState, Work
from executor_svc.kv_cache import KVCache, KVShape
from executor_svc.transfer import Transfer
from kernels import AttentionBatch, SamplingColumns

Int64s = NDArray[np.int64]


class Model(Protocol):
    """The forward pass; see `executor_svc.model`."""

    @property
    def config(self) -> KVShape: ...

    device: torch.device
    dtype: torch.dtype

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        batch: AttentionBatch,
        cache: KVCache,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor: ...


class Inputs(Protocol):
    """One iteration after the other: prepare, logits (once or more), columns, keep."""

    def prepare(self, plan: Plan, work: Work) -> None:
        """Take over a plan that the batch state has applied. A plan without work may come too."""

    def logits(self, rows: Int64s) -> torch.Tensor:
        """Run the model. Returns fp32 [len(rows), vocab], of the token rows named; the caller may overwrite it."""

    def columns(self) -> SamplingColumns:
        """The sampling parameters of the work's sampled rows."""

    def keep(self, tokens: torch.Tensor) -> None:
        """The tokens drawn for the sampled rows, int64 [R], are the inputs of the next decodes."""

    def capture(self) -> int:
        """Record graphs of what can be replayed, over the free KV cache. Returns how many there are."""


class HostInputs:
    """Builds every iteration anew from the host's batch state: what a CPU does, where nothing has to be moved."""

    def __init__(self, state: BatchState, model: Model, cache: KVCache) -> None:
        self._state, self._model, self._cache = state, model, cache
        self._transfer = Transfer(model.device)

    def prepare(self, plan: Plan, work: Work) -> None:
        self._work = work

    def logits(self, rows: Int64s) -> torch.Tensor:
        work, send = self._work, self._transfer.send
        batch = AttentionBatch(
            query_start=send(work.query_start),
            context_lens=send(work.context_lens),
            block_tables=send(self._state.tables_of(work)),
            max_query_len=work.max_query_len,
            max_context_len=work.max_context_len,
            num_decodes=work.num_decodes,
        )
        tokens = send(work.token_ids), send(work.positions), send(work.kv_slots)
        return self._model.forward(*tokens, batch, self._cache, send(rows))

    def columns(self) -> SamplingColumns:
        return host_columns(self._state, self._work, self._transfer)

    def keep(self, tokens: torch.Tensor) -> None:
        """The batch state will have them."""

    def capture(self) -> int:
        return 0


def host_columns(state: BatchState, work: Work, transfer: Transfer) -> SamplingColumns:
    """The sampling parameters of the work's sampled rows, from the host's columns."""
    slots, send = work.sample_slots, transfer.send
    return SamplingColumns(
        temperature=send(state.temperature[slots]),
        top_k=send(state.top_k[slots]),
        top_p=send(state.top_p[slots]),
        min_p=send(state.min_p[slots]),
        seed=send(state.seed[slots]),
        position=send(state.length[slots].astype(np.int64)),
    )
