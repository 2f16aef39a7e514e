"""Checks a plan against what the executor holds, before any memory is touched."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from common.wire import NewSequence, Plan, SamplingParams

if TYPE_CHECKING:
    from executor_svc.batch import BatchState


class PlanError(Exception):
    """A plan that cannot be run. Nothing has been changed by it."""

    def __init__(self, reason: str, slots: NDArray[Any] | list[int] | tuple[int, ...] = ()) -> None:
        super().__init__(reason)
        self.reason = reason
        self.slots = np.unique(np.asarray(slots, np.int64))
        """The guilty rows, as far as they are known."""


@dataclass(slots=True)
class NextColumns:
    """Columns that every plan may change. A plan with changes is checked on a copy, which then takes their place."""

    live: NDArray[np.bool_]
    finished: NDArray[np.bool_]
    """Ended on this executor; waits to be freed."""
    length: NDArray[np.int32]
    computed: NDArray[np.int32]
    num_blocks: NDArray[np.int32]
    generation: NDArray[np.int64]

    @classmethod
    def empty(cls, slots: int) -> NextColumns:
        return cls(
            live=np.zeros(slots, bool),
            finished=np.zeros(slots, bool),
            length=np.zeros(slots, np.int32),
            computed=np.zeros(slots, np.int32),
            num_blocks=np.zeros(slots, np.int32),
            generation=np.zeros(slots, np.int64),
        )

    def copy(self) -> NextColumns:
        return NextColumns(
            self.live.copy(),
            self.finished.copy(),
            self.length.copy(),
            self.computed.copy(),
            self.num_blocks.copy(),
            self.generation.copy(),
        )


def check_plan(state: BatchState, plan: Plan) -> NextColumns:
    """The columns as they will stand when the plan's work begins. Raises `PlanError`."""
    columns = state.columns
    limits = state.limits
    if len(plan.copies) or len(plan.swap_outs) or len(plan.swap_ins):
        _check_moves(plan, limits.num_blocks, limits.num_host_blocks)
    if len(plan.freed) or len(plan.new) or len(plan.appended_slots):
        columns = columns.copy()
        _free(columns, plan)
        for new in plan.new:
            _admit(state, columns, new)
        _append(state, columns, plan)
    slots = np.concatenate((plan.decodes, plan.prefills)).astype(np.int64)
    if len(slots):
        _check_work(state, columns, plan, slots)
        _check_writes(state, columns, plan, slots)
    return columns


def _in_range(ids: NDArray[np.integer], limit: int) -> bool:
    return not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < limit)


def _check_moves(plan: Plan, device: int, host: int) -> None:
    checks = (
        ("copies", plan.copies, device, device),
        ("swap_outs", plan.swap_outs, device, host),
        ("swap_ins", plan.swap_ins, host, device),
    )
    for name, pairs, sources, targets in checks:
        source, target = pairs[0::2], pairs[1::2]
        if len(source) != len(target):
            raise PlanError(f"{name}: expected pairs")
        if not _in_range(source, sources) or not _in_range(target, targets):
            raise PlanError(f"{name}: block out of range")
        if len(np.unique(target)) != len(target):
            raise PlanError(f"{name}: two blocks go to one place")
    if len(plan.copies) and np.isin(plan.copies[1::2], plan.copies[0::2]).any():
        raise PlanError("copies: a block is both copied and overwritten")


def _free(columns: NextColumns, plan: Plan) -> None:
    freed = plan.freed
    if not _in_range(freed, len(columns.live)):
        raise PlanError("freed: slot out of range")
    if len(np.unique(freed)) != len(freed) or not columns.live[freed].all():
        raise PlanError("freed: slot not in use", freed[~columns.live[freed]])
    columns.live[freed] = columns.finished[freed] = False


def _admit(state: BatchState, columns: NextColumns, new: NewSequence) -> None:
    slot, count = new.slot, len(new.tokens)

    def require(condition: bool, reason: str) -> None:
        if not condition:
            raise PlanError(f"new sequence: {reason}", [slot] if slot < len(columns.live) else [])

    require(0 <= slot < len(columns.live), "slot out of range")
    require(not columns.live[slot], "slot in use")
    require(new.generation > columns.generation[slot], "generation does not rise")
    require(1 <= count <= state.max_model_len, "number of tokens out of range")
    require(_in_range(new.tokens, state.vocab_size), "token outside the vocabulary")
    require(1 <= new.prompt_length <= count, "prompt_length beyond the tokens")
    require(0 <= new.computed < count, "computed beyond the tokens")
    require(len(new.blocks) <= state.max_blocks, "too many blocks")
    require(_in_range(new.blocks, state.limits.num_blocks), "block out of range")
    require(len(np.unique(new.blocks)) == len(new.blocks), "a block twice in one table")
    require(new.computed <= len(new.blocks) * state.block_size, "computed beyond the blocks")
    fault = _params_fault(new.params, state.vocab_size)
    require(not fault, fault)
    columns.live[slot], columns.finished[slot] = True, False
    columns.generation[slot] = new.generation
    columns.length[slot], columns.computed[slot] = count, new.computed
    columns.num_blocks[slot] = len(new.blocks)


def _params_fault(params: SamplingParams, vocab_size: int) -> str:
    """What is wrong with the sampling parameters; empty: nothing."""
    numbers = (
        params.temperature,
        params.top_p,
        params.min_p,
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty,
    )
    checks = (
        (all(math.isfinite(number) for number in numbers), "a parameter that is not finite"),
        (params.max_tokens >= 1, "max_tokens below 1"),
        (params.temperature >= 0, "temperature below 0"),
        (0 < params.top_p <= 1, "top_p outside (0, 1]"),
        (0 <= params.min_p <= 1, "min_p outside [0, 1]"),
        (params.top_k >= 0, "top_k below 0"),
        (params.repetition_penalty > 0, "repetition_penalty not above 0"),
        (_in_range(params.stop_token_ids, vocab_size), "stop token outside the vocabulary"),
        (_in_range(params.bias_ids, vocab_size), "biased token outside the vocabulary"),
        (bool(np.isfinite(params.bias_values).all()), "a bias that is not finite"),
        (len(params.bias_ids) == len(params.bias_values), "bias columns of different lengths"),
        (_in_range(params.constraint.allowed_ids, vocab_size), "allowed token outside the vocabulary"),
        (_in_range(params.constraint.bad_ids, vocab_size), "bad word outside the vocabulary"),
        (params.constraint.reasoning_start < vocab_size, "start of reasoning outside the vocabulary"),
        (params.constraint.reasoning_end < vocab_size, "end of reasoning outside the vocabulary"),
    )
    return next((reason for holds, reason in checks if not holds), "")


def _append(state: BatchState, columns: NextColumns, plan: Plan) -> None:
    slots = plan.appended_slots
    if not len(slots):
        return
    if not _in_range(slots, len(columns.live)):
        raise PlanError("appended: slot out of range")
    if not columns.live[slots].all():
        raise PlanError("appended: slot not in use", slots[~columns.live[slots]])
    if not _in_range(plan.appended_blocks, state.limits.num_blocks):
        raise PlanError("appended: block out of range")
    np.add.at(columns.num_blocks, slots, 1)
    if int(columns.num_blocks[slots].max()) > state.max_blocks:
        raise PlanError("appended: block table over its end", slots[columns.num_blocks[slots] > state.max_blocks])


def _check_work(state: BatchState, columns: NextColumns, plan: Plan, slots: NDArray[np.int64]) -> None:
    if len(plan.prefills) != len(plan.prefill_lengths):
        raise PlanError("prefills: columns of different lengths")
    if not _in_range(slots, len(columns.live)):
        raise PlanError("work: slot out of range")
    _reject(~columns.live[slots], slots, "slot not in use")
    _reject(columns.finished[slots], slots, "sequence has ended")
    _reject(np.bincount(slots)[slots] > 1, slots, "slot twice in one iteration")
    computed, length = columns.computed[slots].astype(np.int64), columns.length[slots].astype(np.int64)
    left = length - computed
    decodes = len(plan.decodes)
    queries = np.ones(len(slots), np.int64)
    queries[decodes:] = plan.prefill_lengths
    _reject(left[:decodes] != 1, slots[:decodes], "a decode needs exactly one token without KV")
    _reject(queries < 1, slots, "empty chunk")
    _reject(queries > left, slots, "chunk beyond the known tokens")
    _reject(computed + queries > columns.num_blocks[slots] * np.int64(state.block_size), slots, "too few blocks")
    if int(queries.sum()) > state.limits.max_num_batched_tokens:
        raise PlanError("work: more tokens than max_num_batched_tokens")


def _reject(guilty: NDArray[np.bool_], slots: NDArray[np.int64], reason: str) -> None:
    if guilty.any():
        raise PlanError(f"work: {reason}", slots[guilty])


def _check_writes(state: BatchState, columns: NextColumns, plan: Plan, slots: NDArray[np.int64]) -> None:
    """No block may be written by two sequences in one iteration."""
    decodes = slots[: len(plan.decodes)]
    block_size = state.block_size
    changed = _changed_tables(state, plan)
    last = state.block_tables[decodes, columns.computed[decodes] // block_size]
    if changed:
        for row in np.flatnonzero(np.isin(decodes, list(changed))).tolist():
            slot = int(decodes[row])
            last[row] = changed[slot][columns.computed[slot] // block_size]
    written = [last]
    for slot, chunk in zip(plan.prefills.tolist(), plan.prefill_lengths.tolist(), strict=True):
        table = changed.get(slot)
        first = int(columns.computed[slot])
        if table is None:
            table = state.block_tables[slot]
        written.append(table[first // block_size : -(-(first + chunk) // block_size)])
    blocks = np.sort(np.concatenate(written))
    if (blocks[1:] == blocks[:-1]).any():
        raise PlanError("work: a block written by two sequences")


def _changed_tables(state: BatchState, plan: Plan) -> dict[int, NDArray[np.int32]]:
    """Block tables as they will be, of the slots whose table this plan changes."""
    tables = {new.slot: new.blocks for new in plan.new}
    for slot in dict.fromkeys(plan.appended_slots.tolist()):
        before = tables.get(slot)
        if before is None:
            before = state.block_tables[slot, : state.columns.num_blocks[slot]]
        tables[slot] = np.concatenate((before, plan.appended_blocks[plan.appended_slots == slot]))
    return tables
