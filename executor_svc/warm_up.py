"""Runs every kind of iteration once before the executor attaches: no request waits for a compiler or an allocator."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import structlog

from common.wire import Fault, NewSequence, Plan, Result, SamplingParams
from executor_svc.faults import FatalError
from executor_svc.graphs import decode_sizes, mixed_sizes
from executor_svc.host_blocks import BLOCKS_AT_ONCE
from executor_svc.runner import Runner

log = structlog.get_logger()

PLAIN = SamplingParams(max_tokens=1 << 20, temperature=0.0, ignore_eos=True)
KINDS = (
    PLAIN,
    replace(PLAIN, temperature=1.0, seed=1),
    replace(PLAIN, temperature=0.8, top_p=0.9, top_k=40, min_p=0.05),
    replace(
        PLAIN,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        min_tokens=2,
        logprobs=2,
        prompt_logprobs=1,
        bias_ids=np.zeros(1, np.int32),
        bias_values=np.ones(1, np.float32),
    ),
)
"""Greedy, plain sampling, filtered sampling, and all that is rare."""
EDGES = (1, 15, 16)
"""Prompt lengths that compilers may tell apart: one, no multiple of 16, and one."""


class WarmUpError(Exception):
    """The model does not run on this machine."""


def warm_up(runner: Runner) -> None:
    """One sequence, then many, then the largest iteration. Leaves the runner empty. Raises `WarmUpError`."""
    limits, longest = runner.limits, runner.state.max_model_len - 2
    counts = sorted({1, 2, min(17, limits.max_num_seqs), limits.max_num_seqs})
    for count in counts:
        _prefill_and_decode(runner, count, length=2)
    for kind in KINDS[limits.max_num_seqs :]:  # no seat was left for it
        _prefill_and_decode(runner, 1, length=2, kinds=(kind,))
    if runner.compiles:
        for kind, count in product(KINDS, counts):
            _prefill_and_decode(runner, count, length=2, kinds=(kind,))
        for length in EDGES:
            _prefill_and_decode(runner, 1, length)
        _move_blocks(runner)
    if longest > 0:
        count = -(-limits.max_num_batched_tokens // longest)
        _prefill_and_decode(runner, count, length=limits.max_num_batched_tokens // count)
    if runner.compiles:
        _decode_beside_a_prefill(runner)
        _widest(runner)


def warm_up_graphs(runner: Runner) -> int:
    """Record the CUDA graphs, and run each once. Returns how many there are. Raises `WarmUpError`.

    Where they cannot be recorded there are none, which is logged. To be called after `warm_up`: what a graph holds must
    have been compiled.
    """
    try:
        count = runner.capture()
    except RuntimeError as error:  # a model whose steps ask the host, say
        log.warning("no CUDA graphs: all runs step by step", reason=str(error).partition("\n")[0])
        count = 0
        _prefill_and_decode(runner, 1, length=2)
    if count:
        for size in decode_sizes(runner.limits):
            _prefill_and_decode(runner, size, length=2)
        for tokens, rows in mixed_sizes(runner.limits):
            _prefill(runner, tokens, rows)
    return count


def _prefill_and_decode(runner: Runner, count: int, length: int, kinds: tuple[SamplingParams, ...] = KINDS) -> None:
    """`count` new sequences of `length` tokens or as many as fit, then one decode of all."""
    limits, state = runner.limits, runner.state
    length = min(length, limits.max_num_batched_tokens // count, state.max_model_len - 2)
    blocks_each = length // limits.block_size + 1
    count = min(count, limits.max_num_seqs, limits.num_blocks // blocks_each)
    if count < 1 or length < 1:
        return
    new = tuple(_new(slot, length, slot * blocks_each, blocks_each, kinds[slot % len(kinds)]) for slot in range(count))
    slots = np.arange(count, dtype=np.uint16)
    lengths = np.full(count, length, np.int32)
    _run(
        runner,
        Plan(0, 1, prefills=slots, prefill_lengths=lengths, new=new),
        Plan(0, 2, decodes=slots),
    )


def _prefill(runner: Runner, tokens: int, count: int) -> None:
    """`count` new sequences of `tokens` tokens together, where they fit."""
    limits = runner.limits
    lengths = tokens // count + (np.arange(count) < tokens % count)
    blocks = -(-lengths // limits.block_size)
    if lengths[0] > runner.state.max_model_len - 2 or blocks.sum() > limits.num_blocks:
        return
    firsts = np.cumsum(blocks) - blocks
    new = tuple(_new(slot, int(lengths[slot]), int(firsts[slot]), int(blocks[slot]), PLAIN) for slot in range(count))
    slots = np.arange(count, dtype=np.uint16)
    _run(runner, Plan(0, 1, prefills=slots, prefill_lengths=lengths.astype(np.int32), new=new))


def _decode_beside_a_prefill(runner: Runner) -> None:
    """The most decodes that leave half of the token budget, and a chunk for the rest of it."""
    limits = runner.limits
    decodes = min(limits.max_num_seqs - 1, limits.max_num_batched_tokens // 2, limits.num_blocks // 2)
    length = min(limits.max_num_batched_tokens - decodes, runner.state.max_model_len - 2)
    length = min(length, (limits.num_blocks - decodes) * limits.block_size)
    if decodes < 1 or length < 1 or limits.block_size < 2:
        return
    slots = np.arange(decodes, dtype=np.uint16)
    new = tuple(_new(slot, 1, slot, 1, KINDS[slot % len(KINDS)]) for slot in range(decodes))
    beside = _new(decodes, length, decodes, -(-length // limits.block_size), PLAIN)
    _run(
        runner,
        Plan(0, 1, prefills=slots, prefill_lengths=np.ones(decodes, np.int32), new=new),
        Plan(
            0,
            2,
            decodes=slots,
            prefills=np.array([decodes], np.uint16),
            prefill_lengths=np.array([length], np.int32),
            new=(beside,),
        ),
    )


def _widest(runner: Runner) -> None:
    """The longest context beside the most rows and tokens, then one decode of all.

    Attention takes its grid, its scratch memory and its variants from the bounds of these, whatever the rows hold.
    """
    limits, state = runner.limits, runner.state
    seats = min(limits.max_num_seqs, limits.max_num_batched_tokens, limits.num_blocks)
    if seats < 2 or limits.block_size < 2:
        return
    short = seats - 2  # of one token and one block
    room = (limits.num_blocks - short - 1) * limits.block_size - 1
    chunk = min(limits.max_num_batched_tokens - seats + 1, state.max_model_len - 2, room)
    if chunk < 1:
        return
    behind = short + chunk // limits.block_size + 1
    full = min(limits.num_blocks - behind - 1, (state.max_model_len - 3) // limits.block_size)
    runner.cache.clear()  # what was never written may be NaN
    new = [_new(slot, 1, slot, 1, PLAIN) for slot in range(short)]
    new.append(_new(short, chunk, short, behind - short, PLAIN))
    long = _new(short + 1, full * limits.block_size + 1, behind, full + 1, PLAIN)
    new.append(replace(long, computed=full * limits.block_size))
    slots = np.arange(seats, dtype=np.uint16)
    lengths = np.ones(seats, np.int32)
    lengths[short] = chunk
    _run(
        runner,
        Plan(0, 1, prefills=slots, prefill_lengths=lengths, new=tuple(new)),
        Plan(0, 2, decodes=slots),
    )


def _move_blocks(runner: Runner) -> None:
    """Copies of blocks, in the device and to the host and back."""
    limits = runner.limits
    if limits.num_blocks > 1:
        _run(runner, Plan(0, 1, copies=np.array([0, 1], np.int32)))
    if limits.num_host_blocks:
        count = min(limits.num_blocks, limits.num_host_blocks, BLOCKS_AT_ONCE)
        pairs = np.repeat(np.arange(count, dtype=np.int32), 2)
        _run(runner, Plan(0, 1, swap_outs=pairs, swap_ins=pairs))


def _new(slot: int, length: int, first_block: int, num_blocks: int, params: SamplingParams) -> NewSequence:
    return NewSequence(
        slot=slot,
        generation=1,
        tokens=np.zeros(length, np.int32),
        prompt_length=length,
        computed=0,
        blocks=np.arange(first_block, first_block + num_blocks, dtype=np.int32),
        params=params,
    )


def _run(runner: Runner, *plans: Plan) -> None:
    for plan in plans:
        try:
            answer: Result | Fault = runner.run(plan)
        except FatalError as error:
            answer = error.fault
        if isinstance(answer, Fault):
            raise WarmUpError(f"the model does not run here: {answer.message}")
    runner.reset()
