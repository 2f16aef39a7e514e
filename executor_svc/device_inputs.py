"""Inputs on a GPU: state by slot that stays there, one copy from the host a plan, and CUDA graphs of what is small."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from common.wire import Plan
from executor_svc.batch import BatchState, Work
from executor_svc.device_columns import DeviceColumns
from executor_svc.graphs import Recorder
from executor_svc.inputs import Int64s, Model
from executor_svc.kv_cache import KVCache
from executor_svc.plan_graphs import PlanGraphs, StagedPlan, make_graphs
from executor_svc.transfer import Transfer
from kernels import AttentionBatch, SamplingColumns
from kernels.batch_inputs import apply_patches


class DeviceInputs:
    """A plan that a graph holds is staged at fixed addresses, and the graph replayed; any other is run eagerly.

    The input token of a decode is the one that was drawn on the device, not the host's copy of it.
    """

    def __init__(self, state: BatchState, model: Model, cache: KVCache, recorder: Recorder) -> None:
        self._state, self._model, self._cache, self._recorder = state, model, cache, recorder
        self._transfer = Transfer(model.device)
        self._columns = DeviceColumns(state, model.device)
        self._decodes: PlanGraphs | None = None
        self._mixed: PlanGraphs | None = None
        self._staged: StagedPlan | None = None
        """Of a plan that a graph runs."""

    def prepare(self, plan: Plan, work: Work) -> None:
        self._work = work
        patches = self._columns.patches(plan)
        graphs = self._decodes if work.num_decodes == len(work.slots) else self._mixed
        self._staged = graphs.stage(work, patches) if graphs is not None and len(work.slots) else None
        if self._staged is None:
            self._send(work, patches)
        else:
            self._sample_slots, self._sampling = self._staged.sample_slots, self._staged.sampling

    def _send(self, work: Work, patches: NDArray[np.int32]) -> None:
        """Bring over an iteration of any shape."""
        state = self._state
        sent = self._transfer.send_together(
            work.token_ids,
            work.positions,
            work.kv_slots,
            work.slots,
            work.query_start,
            work.context_lens,
            work.logit_rows,
            work.sample_slots,
            state.length[work.sample_slots].astype(np.int64),
            np.array([len(patches)], np.int32),
            patches,
        )
        token_ids, positions, kv_slots, slots, query_start, context_lens, self._logit_rows = sent[:7]
        self._sample_slots, position, count, changes = sent[7:]
        columns = self._columns.slots
        if len(patches):
            apply_patches(columns.words, changes, count)
        token_ids[: work.num_decodes] = columns.last_token[slots[: work.num_decodes]]
        self._tokens = token_ids, positions, kv_slots
        self._batch = AttentionBatch(
            query_start=query_start,
            context_lens=context_lens,
            block_tables=columns.block_tables[:, : work.max_blocks].index_select(0, slots),
            max_query_len=work.max_query_len,
            max_context_len=work.max_context_len,
            num_decodes=work.num_decodes,
        )
        self._sampling = replace(columns.sampling.select(self._sample_slots), position=position)

    def logits(self, rows: Int64s) -> torch.Tensor:
        if self._staged is not None:
            return self._staged.step()[: len(rows)]
        logit_rows = self._logit_rows if np.array_equal(rows, self._work.logit_rows) else self._transfer.send(rows)
        return self._model.forward(*self._tokens, self._batch, self._cache, logit_rows)

    def columns(self) -> SamplingColumns:
        return self._sampling

    def keep(self, tokens: torch.Tensor) -> None:
        self._columns.slots.last_token.index_copy_(0, self._sample_slots, tokens.to(torch.int32))

    def capture(self) -> int:
        if not self._recorder.captures:
            return 0
        decodes, mixed = make_graphs(self._state, self._model, self._cache, self._columns)
        count = mixed.record(self._recorder) + decodes.record(self._recorder)
        self._decodes, self._mixed = decodes, mixed
        return count
