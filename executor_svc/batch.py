"""The executor's mirror of its sequences, in numpy columns by slot, and what a plan makes of it.

A plan is checked whole before anything changes. The checks and the changes touch Python objects only for rows that were
admitted; a steady decode step is a handful of numpy calls whatever the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.wire import FinishCode, Limits, Plan, SamplingParams
from executor_svc.plan_check import NextColumns, PlanError, check_plan

__all__ = ["BatchState", "PlanError", "Work"]

MIN_TEMPERATURE = 1e-5
"""Below it a row is greedy: the logits divided by it would overflow (vLLM's bound)."""
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Work:
    """An iteration, flat: T token rows of B sequence rows (decodes, then prefills, in plan order), R of them sample."""

    slots: Int64s
    """[B] the slot of each sequence row."""
    token_ids: Int64s
    """[T]"""
    positions: Int64s
    """[T] position of each token in its sequence."""
    kv_slots: Int64s
    """[T] where its KV goes: block * block_size + offset."""
    query_start: Int32s
    """[B+1] prefix sums of the tokens of each sequence row."""
    context_lens: Int32s
    """[B] tokens that hold KV after this iteration."""
    max_blocks: int
    """Width of the block tables that the longest context needs."""
    num_decodes: int
    max_query_len: int
    max_context_len: int
    sample_rows: Int64s
    """[R] sequence rows that sample."""
    sample_slots: Int64s
    """[R] their slots."""
    prompt_rows: Int64s
    """Sequence rows whose chunk brings logprobs of prompt tokens."""

    @property
    def logit_rows(self) -> Int64s:
        """[R] the token rows whose logits are sampled from."""
        return self.query_start[self.sample_rows + 1].astype(np.int64) - 1


class BatchState:
    """Columns by slot. Holds no KV and no logits; the same for the real and the scripted executor."""

    def __init__(self, limits: Limits, max_model_len: int, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self.limits, self.max_model_len, self.vocab_size = limits, max_model_len, vocab_size
        self.block_size = limits.block_size
        self.max_blocks = -(-max_model_len // limits.block_size)
        self.eos_ids = np.array(sorted(e for e in set(eos_ids) if 0 <= e < vocab_size), np.int64)
        self.is_eos = np.zeros(vocab_size, bool)
        self.is_eos[self.eos_ids] = True
        self.clear()

    def clear(self) -> None:
        """Forget every sequence."""
        slots = self.limits.max_num_seqs
        # np.zeros commits memory as rows are touched, so long contexts cost nothing until they are used.
        self.tokens = np.zeros((slots, self.max_model_len + 1), np.int32)
        self.block_tables = np.zeros((slots, self.max_blocks), np.int32)
        self.columns = NextColumns.empty(slots)
        self.prompt_length = np.zeros(slots, np.int32)
        self.max_length = np.zeros(slots, np.int32)
        """Length at which the sequence ends."""
        self.min_length = np.zeros(slots, np.int32)
        """Length before which neither EOS nor a stop token may be sampled."""
        self.temperature = np.zeros(slots, np.float32)
        self.top_k = np.zeros(slots, np.int32)
        self.top_p = np.ones(slots, np.float32)
        self.min_p = np.zeros(slots, np.float32)
        self.seed = np.zeros(slots, np.int64)
        """The unsigned seed's 64 bits."""
        self.repetition = np.ones(slots, np.float32)
        self.presence = np.zeros(slots, np.float32)
        self.frequency = np.zeros(slots, np.float32)
        self.has_penalty = np.zeros(slots, bool)
        self.has_bias = np.zeros(slots, bool)
        self.has_filter = np.zeros(slots, bool)
        """Drawn from a part of the vocabulary; the rule of `kernels.sampling_torch.filtered_rows`."""
        self.ignore_eos = np.zeros(slots, bool)
        self.logprobs = np.full(slots, -1, np.int32)
        self.prompt_logprobs = np.full(slots, -1, np.int32)
        self.stop_keys = np.empty(0, np.int64)
        """Sorted `slot * vocab_size + token` of all stop token ids."""
        self.params: list[SamplingParams | None] = [None] * slots

    @property
    def length(self) -> Int32s:
        """[S] known tokens."""
        return self.columns.length

    @property
    def computed(self) -> Int32s:
        """[S] tokens whose KV is written."""
        return self.columns.computed

    def apply(self, plan: Plan) -> Work:
        """Take over a plan's changes and lay out its work. Raises `PlanError` before anything has changed."""
        columns = check_plan(self, plan)
        self.columns = columns
        self._free(plan)
        self._admit(plan)
        if len(plan.appended_slots):
            self._append_blocks(plan)
        return self._lay_out(plan)

    def _free(self, plan: Plan) -> None:
        if not len(plan.freed):
            return
        for slot in plan.freed.tolist():
            self.params[slot] = None
        freed = plan.freed.astype(np.int64)
        self.has_penalty[freed] = self.has_bias[freed] = False
        if len(self.stop_keys):
            self.stop_keys = self.stop_keys[~np.isin(self.stop_keys // self.vocab_size, freed)]

    def _admit(self, plan: Plan) -> None:
        stop_keys = [self.stop_keys]
        for new in plan.new:
            slot, params = new.slot, new.params
            self.tokens[slot, : len(new.tokens)] = new.tokens
            self.block_tables[slot, : len(new.blocks)] = new.blocks
            self.prompt_length[slot] = new.prompt_length
            self.max_length[slot] = min(new.prompt_length + params.max_tokens, self.max_model_len)
            self.min_length[slot] = min(new.prompt_length + params.min_tokens, self.max_model_len)
            self._set_params(slot, params)
            if len(params.stop_token_ids):
                stop_keys.append(np.unique(params.stop_token_ids).astype(np.int64) + slot * self.vocab_size)
        if len(stop_keys) > 1:
            self.stop_keys = np.sort(np.concatenate(stop_keys))

    def _set_params(self, slot: int, params: SamplingParams) -> None:
        self.params[slot] = params
        self.temperature[slot] = params.temperature if params.temperature >= MIN_TEMPERATURE else 0.0
        self.top_k[slot] = min(params.top_k, self.vocab_size)
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.seed[slot] = np.uint64(params.seed).astype(np.int64)
        self.repetition[slot] = params.repetition_penalty
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.has_penalty[slot] = (
            params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )
        self.has_bias[slot] = len(params.bias_ids) > 0
        self.has_filter[slot] = self.temperature[slot] > 0 and (
            0 < self.top_k[slot] < self.vocab_size or self.top_p[slot] < 1.0 or self.min_p[slot] > 0.0
        )
        self.ignore_eos[slot] = params.ignore_eos
        self.logprobs[slot] = min(params.logprobs, self.vocab_size)
        self.prompt_logprobs[slot] = min(params.prompt_logprobs, self.vocab_size)

    def _append_blocks(self, plan: Plan) -> None:
        slots, places, blocks = self.appended_places(plan)
        self.block_tables[slots, places] = blocks

    def appended_places(self, plan: Plan) -> tuple[Int64s, Int64s, Int32s]:
        """Of an applied plan: slots, places in their tables, and the blocks appended there; a slot may come often."""
        slots = plan.appended_slots.astype(np.int64)
        order = np.argsort(slots, kind="stable")
        ordered = slots[order]
        # The end of each table now lies behind the appended blocks: count back from it.
        rank_from_end = np.searchsorted(ordered, ordered, side="right") - np.arange(len(ordered))
        return ordered, self.columns.num_blocks[ordered] - rank_from_end, plan.appended_blocks[order]

    def _lay_out(self, plan: Plan) -> Work:
        num_decodes = len(plan.decodes)
        slots = np.concatenate((plan.decodes, plan.prefills)).astype(np.int64)
        start = self.columns.computed[slots]
        queries = np.ones(len(slots), np.int32)
        queries[num_decodes:] = plan.prefill_lengths
        context_lens = start + queries
        query_start = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(queries, out=query_start[1:])
        if len(slots) > num_decodes:
            row = np.repeat(np.arange(len(slots)), queries)
            token_slots = slots[row]
            positions = (np.arange(query_start[-1], dtype=np.int32) + (start - query_start[:-1])[row]).astype(np.int64)
        else:
            token_slots, positions = slots, start.astype(np.int64)
        max_context_len = int(context_lens.max(initial=0))
        block = self.block_tables[token_slots, positions // self.block_size].astype(np.int64)
        samples = context_lens == self.columns.length[slots]
        scored = self.prompt_logprobs[slots] >= 0
        scored &= start < self.prompt_length[slots] - 1
        sample_rows = np.flatnonzero(samples)
        return Work(
            slots=slots,
            token_ids=self.tokens[token_slots, positions].astype(np.int64),
            positions=positions,
            kv_slots=block * self.block_size + positions % self.block_size,
            query_start=query_start,
            context_lens=context_lens,
            max_blocks=-(-max_context_len // self.block_size),
            num_decodes=num_decodes,
            max_query_len=int(queries.max(initial=0)),
            max_context_len=max_context_len,
            sample_rows=sample_rows,
            sample_slots=slots[sample_rows],
            prompt_rows=np.flatnonzero(scored),
        )

    def tables_of(self, work: Work) -> Int32s:
        """[B, MB] the block tables of the work's sequence rows, as wide as the longest context needs."""
        return self.block_tables[work.slots, : work.max_blocks]

    def advance(
        self, work: Work, sampled: NDArray[np.integer], undrawn: NDArray[np.uint8] | None = None
    ) -> NDArray[np.uint8]:
        """Append the sampled tokens ([R]) and move on. Returns a `FinishCode` for each.

        undrawn: [R] the code of a row that got no token, which keeps its last token to be computed; 0 for the others.
        EOS and stop tokens come before the length: an EOS that is the `max_tokens`-th token is an EOS.
        """
        slots, tokens = work.sample_slots, np.asarray(sampled, np.int64)
        columns = self.columns
        columns.computed[work.slots] = work.context_lens
        length = columns.length[slots]
        self.tokens[slots, length] = tokens
        columns.length[slots] = length + 1
        if undrawn is not None:
            without = slots[undrawn != 0]
            columns.length[without] -= 1
            columns.computed[without] -= 1
        finish = np.where(length + 1 >= self.max_length[slots], np.uint8(FinishCode.LENGTH), np.uint8(0))
        if len(self.stop_keys):
            keys = slots * self.vocab_size + tokens
            at = np.minimum(np.searchsorted(self.stop_keys, keys), len(self.stop_keys) - 1)
            finish[self.stop_keys[at] == keys] = FinishCode.STOP_TOKEN
        finish[self.is_eos[tokens] & ~self.ignore_eos[slots]] = FinishCode.EOS
        if undrawn is not None:
            finish = np.where(undrawn != 0, undrawn, finish)
        columns.finished[slots] = (finish != FinishCode.CONTINUE) & (finish != FinishCode.NOT_READY)
        return finish
