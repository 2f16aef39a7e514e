"""Inputs on a GPU: state by slot that stays there, one copy from the host a plan, and CUDA graphs of the decodes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from common.wire import Plan
from executor_svc.batch import BatchState, Work
from executor_svc.device_columns import DeviceColumns
from executor_svc.graphs import Recorder, Step, graph_sizes
from executor_svc.inputs import Int64s, Model
from executor_svc.kv_cache import KVCache
from executor_svc.transfer import Transfer
from kernels import AttentionBatch, SamplingColumns
from kernels.batch_inputs import RowInputs, apply_patches, gather_rows

PATCHES_IN_GRAPH = 1024
"""More than decodes of a common batch ask for: of them, one row in `block_size` gets a block in each iteration."""


class DeviceInputs:
    """A plan that only decodes is staged at fixed addresses, and its graph replayed; any other is run eagerly.

    The input token of a decode is the one that was drawn on the device, not the host's copy of it.
    """

    def __init__(self, state: BatchState, model: Model, cache: KVCache, recorder: Recorder) -> None:
        self._state, self._model, self._cache, self._recorder = state, model, cache, recorder
        self._transfer = Transfer(model.device)
        self._columns = DeviceColumns(state, model.device)
        self._graphs: dict[int, Step] = {}
        self._size = 0
        """Of the graph that runs this plan; 0: none does."""
        if recorder.captures:
            self._stage = _DecodeStage(self._columns, graph_sizes(state.limits.max_num_seqs)[-1], state.max_blocks)

    def prepare(self, plan: Plan, work: Work) -> None:
        self._work = work
        patches = self._columns.patches(plan)
        rows = len(work.slots) if work.num_decodes == len(work.slots) else 0
        self._size = min((size for size in self._graphs if size >= rows), default=0) if rows else 0
        if self._size:
            self._stage.fill(self._transfer, work, patches)
            if len(patches) > PATCHES_IN_GRAPH:  # whole sequences come in; the graph will patch some words twice
                apply_patches(self._columns.slots.words, self._stage.patches, self._stage.count)
            self._sample_slots = self._stage.slots[:rows]
            self._sampling = self._stage.rows.sampling.select(slice(rows))
        else:
            self._send(work, patches)

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
        if self._size:
            return self._graphs[self._size]()[: len(self._work.slots)]
        logit_rows = self._logit_rows if np.array_equal(rows, self._work.logit_rows) else self._transfer.send(rows)
        return self._model.forward(*self._tokens, self._batch, self._cache, logit_rows)

    def columns(self) -> SamplingColumns:
        return self._sampling

    def keep(self, tokens: torch.Tensor) -> None:
        self._columns.slots.last_token.index_copy_(0, self._sample_slots, tokens.to(torch.int32))

    def capture(self) -> int:
        if not self._recorder.captures:
            return 0
        self._stage.clear()
        sizes = graph_sizes(self._state.limits.max_num_seqs)
        self._graphs = {size: self._recorder.record(partial(self._decode, size)) for size in reversed(sizes)}
        return len(sizes)

    def _decode(self, size: int) -> torch.Tensor:
        """The step that a graph holds: its shapes and addresses depend on `size` alone. Returns fp32 [size, vocab]."""
        stage, columns = self._stage, self._columns.slots
        apply_patches(columns.words, stage.patches[:PATCHES_IN_GRAPH], stage.count)
        context_lens = stage.context_lens[:size]
        kept = stage.rows
        rows = RowInputs(kept.token_ids[:size], kept.block_tables[:size], kept.sampling.select(slice(size)))
        gather_rows(columns, stage.slots[:size], context_lens, self._state.block_size, rows)
        batch = AttentionBatch(
            query_start=stage.counting[: size + 1],
            context_lens=context_lens,
            block_tables=rows.block_tables,
            max_query_len=1,
            max_context_len=self._state.max_model_len,
            num_decodes=size,
        )
        tokens = rows.token_ids, stage.positions[:size], stage.kv_slots[:size]
        return self._model.forward(*tokens, batch, self._cache, stage.every_row[:size])


class _DecodeStage:
    """Where a plan of decodes lies on the device while its graph runs, up to `capacity` rows."""

    def __init__(self, columns: DeviceColumns, capacity: int, width: int) -> None:
        self._capacity, self._padding_slot = capacity, columns.padding_slot
        device = columns.slots.words.device
        # Slots, positions and KV slots of 8 bytes, context lengths of 4, the number of patches, the patches.
        self._head = 7 * capacity + 2
        self._words = torch.zeros(self._head + 2 * columns.max_patches, dtype=torch.int32, device=device)
        self.slots, self.positions, self.kv_slots = self._words[: 6 * capacity].view(torch.int64).view(3, capacity)
        self.context_lens = self._words[6 * capacity : 7 * capacity]
        self.count = self._words[7 * capacity : 7 * capacity + 1]
        self.patches = self._words[self._head :].view(-1, 2)
        self.counting = torch.arange(capacity + 1, dtype=torch.int32, device=device)
        self.every_row = torch.arange(capacity, device=device)

        def out(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(capacity, dtype=dtype, device=device)

        sampling = SamplingColumns(
            temperature=out(torch.float32),
            top_k=out(torch.int32),
            top_p=out(torch.float32),
            min_p=out(torch.float32),
            seed=out(torch.int64),
            position=out(torch.int64),
        )
        tables = torch.zeros((capacity, width), dtype=torch.int32, device=device)
        self.rows = RowInputs(out(torch.int64), tables, sampling)
        self.clear()

    def clear(self) -> None:
        """Nothing but padding rows."""
        self._words[: self._head].copy_(torch.from_numpy(self._packed(0)))

    def fill(self, transfer: Transfer, work: Work, patches: NDArray[np.int32]) -> None:
        """Bring over decodes, and the patches that go before them."""
        rows, capacity = len(work.slots), self._capacity
        packed = self._packed(len(patches))
        wide = packed[: 6 * capacity].view(np.int64).reshape(3, capacity)
        wide[0, :rows], wide[1, :rows], wide[2, :rows] = work.slots, work.positions, work.kv_slots
        packed[6 * capacity : 6 * capacity + rows] = work.context_lens
        packed[self._head :] = patches.ravel()
        transfer.fill(self._words, packed)

    def _packed(self, num_patches: int) -> NDArray[np.int32]:
        """The words of padding rows, with room for patches: they read the slot of nobody, and write nowhere."""
        packed = np.zeros(self._head + 2 * num_patches, np.int32)
        wide = packed[: 6 * self._capacity].view(np.int64).reshape(3, self._capacity)
        wide[0], wide[2] = self._padding_slot, -1
        packed[7 * self._capacity] = num_patches
        return packed
