"""CUDA graphs of whole iterations: of decodes by the number of rows, of mixed ones by the numbers of tokens and rows.

No launch of the model follows a length: attention lists its work on the device (`kernels.attention_plan`). So one graph
serves every mix that fits into its tokens and rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from executor_svc.batch import BatchState, Work
from executor_svc.device_columns import DeviceColumns
from executor_svc.graphs import Recorder, Step, decode_sizes, mixed_sizes
from executor_svc.inputs import Model
from executor_svc.kv_cache import KVCache
from executor_svc.stage import Arrays, Stage, empty_rows, first_rows, words_needed
from executor_svc.transfer import Transfer
from kernels import AttentionBatch, SamplingColumns
from kernels.batch_inputs import RowInputs, gather_rows

DRAWN = -1
"""In place of a token id: the sequence's last token on the device."""


@dataclass(frozen=True)
class StagedPlan:
    """An iteration that lies where its graph reads it."""

    step: Step
    """Returns fp32 [N, vocab]; the first rows are those of the rows that sample."""
    sample_slots: torch.Tensor
    """int64 [R]"""
    sampling: SamplingColumns
    """Of these rows, once the step has run."""


@dataclass(frozen=True)
class Ground:
    """What all graphs work on."""

    state: BatchState
    model: Model
    cache: KVCache
    columns: DeviceColumns
    transfer: Transfer
    words: torch.Tensor
    """Of the stage. A plan lies there until the next one, whatever graph runs it."""
    rows: RowInputs
    """Filled by every graph."""


class PlanGraphs(Protocol):
    """The graphs of one kind of iteration."""

    def record(self, recorder: Recorder) -> int:
        """The largest first. Returns how many there are."""

    def stage(self, work: Work, patches: NDArray[np.int32]) -> StagedPlan | None:
        """Bring a plan over; None when no graph holds it, and nothing was done."""


def make_graphs(
    state: BatchState, model: Model, cache: KVCache, columns: DeviceColumns
) -> tuple[DecodeGraphs, MixedGraphs]:
    """None is recorded yet."""
    device = columns.slots.words.device
    sizes, shapes = decode_sizes(state.limits), mixed_sizes(state.limits)
    paddings = DecodeGraphs.padding(sizes[-1], columns), MixedGraphs.padding(*shapes[-1], columns)
    size = max(map(words_needed, paddings)) + 2 * columns.max_patches
    words = torch.zeros(size, dtype=torch.int32, device=device)
    rows = empty_rows(max(sizes[-1], shapes[-1][1] + 1), state.max_blocks, device)
    ground = Ground(state, model, cache, columns, Transfer(device), words, rows)
    return DecodeGraphs(ground, sizes, paddings[0]), MixedGraphs(ground, shapes, paddings[1])


class DecodeGraphs:
    """Iterations that only decode."""

    def __init__(self, ground: Ground, sizes: list[int], padding: Arrays) -> None:
        self._ground, self._sizes = ground, sizes
        self._stage = Stage(ground.words, padding)
        device = ground.words.device
        self._counting = torch.arange(sizes[-1] + 1, dtype=torch.int32, device=device)
        self._every_row = torch.arange(sizes[-1], device=device)
        self._graphs: dict[int, Step] = {}

    @staticmethod
    def padding(rows: int, columns: DeviceColumns) -> Arrays:
        """Rows that read the slot of nobody and write nowhere."""
        return {
            "slots": np.full(rows, columns.padding_slot, np.int64),
            "positions": np.zeros(rows, np.int64),
            "kv_slots": np.full(rows, -1, np.int64),
            "context_lens": np.zeros(rows, np.int32),
        }

    def record(self, recorder: Recorder) -> int:
        self._stage.clear()
        self._graphs = {size: recorder.record(partial(self._step, size)) for size in reversed(self._sizes)}
        return len(self._graphs)

    def stage(self, work: Work, patches: NDArray[np.int32]) -> StagedPlan | None:
        rows = len(work.slots)
        size = min((size for size in self._graphs if size >= rows), default=None)
        if size is None:
            return None
        arrays: Arrays = {
            "slots": work.slots,
            "positions": work.positions,
            "kv_slots": work.kv_slots,
            "context_lens": work.context_lens,
        }
        self._stage.fill(self._ground.transfer, self._ground.columns.slots, patches, arrays)
        sampling = self._ground.rows.sampling.select(slice(rows))
        return StagedPlan(self._graphs[size], self._stage["slots"][:rows], sampling)

    def _step(self, size: int) -> torch.Tensor:
        """What a graph holds: its shapes and addresses depend on `size` alone. Returns fp32 [size, vocab]."""
        ground, stage = self._ground, self._stage
        stage.apply_patches(ground.columns.slots)
        rows, context_lens = first_rows(ground.rows, size), stage["context_lens"][:size]
        gather_rows(ground.columns.slots, stage["slots"][:size], context_lens, ground.state.block_size, rows)
        batch = AttentionBatch(
            query_start=self._counting[: size + 1],
            context_lens=context_lens,
            block_tables=rows.block_tables,
            max_query_len=1,
            max_context_len=ground.state.max_model_len,
            num_decodes=size,
        )
        tokens = rows.token_ids, stage["positions"][:size], stage["kv_slots"][:size]
        return ground.model.forward(*tokens, batch, ground.cache, self._every_row[:size])


class MixedGraphs:
    """Iterations with prefill: rows of any lengths, and behind them one row more, without context, to which the padding
    tokens belong. Rows that are missing have no token."""

    def __init__(self, ground: Ground, sizes: list[tuple[int, int]], padding: Arrays) -> None:
        self._ground, self._sizes = ground, sizes
        self._stage = Stage(ground.words, padding)
        self._graphs: dict[tuple[int, int], Step] = {}

    @staticmethod
    def padding(tokens: int, rows: int, columns: DeviceColumns) -> Arrays:
        """Tokens that write nowhere, in a row that nobody reads."""
        return {
            "token_ids": np.zeros(tokens, np.int64),
            "positions": np.zeros(tokens, np.int64),
            "kv_slots": np.full(tokens, -1, np.int64),
            "slots": np.full(rows + 1, columns.padding_slot, np.int64),
            "logit_rows": np.zeros(rows, np.int64),
            "sample_slots": np.full(rows, columns.padding_slot, np.int64),
            "sample_positions": np.zeros(rows, np.int64),
            "query_start": np.zeros(rows + 2, np.int32),
            "context_lens": np.zeros(rows + 1, np.int32),
        }

    def record(self, recorder: Recorder) -> int:
        found = {}
        for size in reversed(self._sizes):
            self._stage.clear()
            self._stage["query_start"][1:] = size[0]  # all tokens are padding: what belongs to no row is undefined
            found[size] = recorder.record(partial(self._step, size))
        self._graphs = found
        return len(found)

    def stage(self, work: Work, patches: NDArray[np.int32]) -> StagedPlan | None:
        tokens, rows, ground = len(work.token_ids), len(work.slots), self._ground
        size = min((size for size in self._graphs if size[0] >= tokens and size[1] >= rows), default=None)
        if size is None or len(work.prompt_rows):  # a prompt's logprobs take the logits of more rows
            return None
        token_ids = work.token_ids.copy()
        token_ids[: work.num_decodes] = DRAWN
        query_start = np.full(size[1] + 2, size[0], np.int32)
        query_start[: rows + 1] = work.query_start
        arrays: Arrays = {
            "token_ids": token_ids,
            "positions": work.positions,
            "kv_slots": work.kv_slots,
            "slots": work.slots,
            "logit_rows": work.logit_rows,
            "sample_slots": work.sample_slots,
            "sample_positions": ground.state.length[work.sample_slots].astype(np.int64),
            "query_start": query_start,
            "context_lens": work.context_lens,
        }
        self._stage.fill(ground.transfer, ground.columns.slots, patches, arrays)
        sampled = slice(len(work.sample_slots))
        sampling = replace(ground.rows.sampling.select(sampled), position=self._stage["sample_positions"][sampled])
        return StagedPlan(self._graphs[size], self._stage["sample_slots"][sampled], sampling)

    def _step(self, size: tuple[int, int]) -> torch.Tensor:
        """What a graph holds: its shapes and addresses depend on `size` alone. Returns fp32 [rows, vocab]."""
        (tokens, count), ground, stage = size, self._ground, self._stage
        columns = ground.columns.slots
        stage.apply_patches(columns)
        rows, context_lens = first_rows(ground.rows, count + 1), stage["context_lens"][: count + 1]
        gather_rows(columns, stage["slots"][: count + 1], context_lens, ground.state.block_size, rows)
        first = stage["token_ids"][:count]  # decodes come first, so there a token's row has its number
        torch.where(first == DRAWN, rows.token_ids[:count], first, out=first)
        batch = AttentionBatch(
            query_start=stage["query_start"][: count + 2],
            context_lens=context_lens,
            block_tables=rows.block_tables,
            max_query_len=tokens,
            max_context_len=ground.state.max_model_len,
            num_decodes=0,  # how many there are may differ from replay to replay: attention finds out on the device
        )
        inputs = stage["token_ids"][:tokens], stage["positions"][:tokens], stage["kv_slots"][:tokens]
        logits = ground.model.forward(*inputs, batch, ground.cache, stage["logit_rows"][:count])
        # In place of those of all rows: few kernels more, and no launch outside of the graph.
        for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
            kept = getattr(ground.rows.sampling, name)[:count]
            torch.index_select(getattr(columns.sampling, name), 0, stage["sample_slots"][:count], out=kept)
        return logits
