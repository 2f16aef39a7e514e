"""Whether a sequence says the same alone, in batches and in chunks: a request's answer as the sampler reports it.

With `batch-invariant` to the bit. Without it the first token that differs must be one that was nearly chosen alone: a
gap between the two largest logits below `EPSILON`. More is no rounding but a wrong mask, block or row.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np

from benchmarks.gpu.context import (
    BLOCK_SIZE,
    Context,
    Row,
    make_runner,
    random_model,
    run,
    sequence,
    slots,
    tokens_of,
)
from common.wire import Limits, Plan
from executor_svc.runner import Runner
from executor_svc.warm_up import warm_up_graphs

EPSILON = 0.15
"""Of logits whose spread is about 1; a bf16 number of that size has steps of 1/128, and a step has many roundings."""
Answer = list[tuple[int, np.ndarray]]
"""Each token with its logprob and those of the two likeliest tokens, fp32 [3]."""


def rows(context: Context) -> Iterator[Row]:
    """Raises RuntimeError when the answers differ more than they may."""
    counts, steps = ((2, 3), 4) if context.tiny else ((2, 7, 32), 24)
    lengths = [1 + 53 * row % 300 for row in range(max(counts))]
    blocks_each = (max(lengths) + steps) // BLOCK_SIZE + 1
    limits = Limits(BLOCK_SIZE, max(counts) * blocks_each, 0, max(counts), max(2048, sum(lengths)))
    for batch_invariant in (True, False):
        layers = 2 if context.tiny else 8
        model, card = random_model(context, 1024, batch_invariant=batch_invariant, num_hidden_layers=layers)
        runner = make_runner(context, model, card, limits)
        warm_up_graphs(runner)
        alone = [answers(runner, [row], lengths, steps, blocks_each)[0] for row in range(max(counts))]
        for count in counts:
            for chunk in (None, 33):
                together = answers(runner, list(range(count)), lengths, steps, blocks_each, chunk)
                yield compare(batch_invariant, count, chunk, alone, together)
        del runner, model
        gc.collect()


def answers(
    runner: Runner, chosen: list[int], lengths: list[int], steps: int, blocks_each: int, chunk: int | None = None
) -> list[Answer]:
    """Greedy answers of the chosen sequences in one batch, prefilled whole or in chunks; the last slot has the first
    blocks."""
    runner.reset()
    places = [range(place * blocks_each, (place + 1) * blocks_each) for place in reversed(range(len(chosen)))]
    new = tuple(
        sequence(slot, lengths[row], blocks, logprobs=2, seed_of_tokens=row)
        for slot, (row, blocks) in enumerate(zip(chosen, places, strict=True))
    )
    left = {slot: lengths[row] for slot, row in enumerate(chosen)}
    found: list[Answer] = [[] for _ in chosen]
    iteration = 0
    while any(left.values()):
        iteration += 1
        due = [slot for slot, length in left.items() if length]
        sizes = [min(left[slot], chunk or left[slot]) for slot in due]
        for slot, size in zip(due, sizes, strict=True):
            left[slot] -= size
        plan = Plan(
            0,
            iteration,
            prefills=np.array(due, np.uint16),
            prefill_lengths=tokens_of(*sizes),
            new=new if iteration == 1 else (),
        )
        take(runner, plan, [slot for slot in due if not left[slot]], found)
    for step in range(1, steps):
        take(runner, Plan(0, iteration + step, decodes=slots(len(chosen))), list(range(len(chosen))), found)
    return found


def take(runner: Runner, plan: Plan, sampled: list[int], found: list[Answer]) -> None:
    result = run(runner, plan)
    values = result.logprobs.values.reshape(len(sampled), 3)
    for slot, token, row in zip(sampled, result.tokens.tolist(), values, strict=True):
        found[slot].append((token, row.copy()))


def compare(batch_invariant: bool, count: int, chunk: int | None, alone: list[Answer], together: list[Answer]) -> Row:
    """The largest gap at a first difference, and the largest difference of logprobs up to there."""
    differing, gap, apart, same_bits = 0, 0.0, 0.0, True
    for one, other in zip(alone, together, strict=False):
        for (token, values), (other_token, other_values) in zip(one, other, strict=True):
            same_bits &= token == other_token and np.array_equal(values, other_values)
            apart = max(apart, float(np.abs(values[1:] - other_values[1:]).max()))
            if token != other_token:
                differing, gap = differing + 1, max(gap, float(values[1] - values[2]))
                break
    if batch_invariant and not same_bits:
        raise RuntimeError(
            f"{count} sequences, chunks of {chunk}: bits differ, by up to {apart:.3g}, in spite of the mode"
        )
    if max(gap, apart) >= EPSILON:
        raise RuntimeError(f"{count} sequences, chunks of {chunk}: a gap of {gap:.3g}, logprobs {apart:.3g} apart")
    return {
        "what": "same answer",
        "batch_invariant": batch_invariant,
        "batch": count,
        "chunk": chunk or 0,
        "same_bits": same_bits,
        "differing": differing,
        "gap_at_difference": round(gap, 4),
        "logprobs_apart": round(apart, 5),
        "epsilon": EPSILON,
    }
