"""Runs every kind of iteration once before the executor attaches: no request waits for a compiler or an allocator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from common.wire import Fault, NewSequence, Plan, SamplingParams
from executor_svc.runner import Runner

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


class WarmUpError(Exception):
    """The model does not run on this machine."""


def warm_up(runner: Runner) -> None:
    """One sequence, then many, then the largest iteration. Leaves the runner empty. Raises `WarmUpError`."""
    limits, longest = runner.limits, runner.state.max_model_len - 2
    for count in sorted({1, 2, min(17, limits.max_num_seqs), limits.max_num_seqs}):
        _prefill_and_decode(runner, count, length=2)
    if longest > 0:
        count = -(-limits.max_num_batched_tokens // longest)
        _prefill_and_decode(runner, count, length=limits.max_num_batched_tokens // count)


def _prefill_and_decode(runner: Runner, count: int, length: int) -> None:
    """`count` new sequences of `length` tokens or as many as fit, then one decode of all."""
    limits, state = runner.limits, runner.state
    length = min(length, limits.max_num_batched_tokens // count, state.max_model_len - 2)
    blocks_each = length // limits.block_size + 1
    count = min(count, limits.max_num_seqs, limits.num_blocks // blocks_each)
    if count < 1 or length < 1:
        return
    new = tuple(
        NewSequence(
            slot=slot,
            generation=1,
            tokens=np.zeros(length, np.int32),
            prompt_length=length,
            computed=0,
            blocks=np.arange(slot * blocks_each, (slot + 1) * blocks_each, dtype=np.int32),
            params=KINDS[slot % len(KINDS)],
        )
        for slot in range(count)
    )
    slots = np.arange(count, dtype=np.uint16)
    lengths = np.full(count, length, np.int32)
    for plan in (
        Plan(0, 1, prefills=slots, prefill_lengths=lengths, new=new),
        Plan(0, 2, decodes=slots),
    ):
        answer = runner.run(plan)
        if isinstance(answer, Fault):
            raise WarmUpError(f"the model does not run here: {answer.message}")
    runner.reset()
