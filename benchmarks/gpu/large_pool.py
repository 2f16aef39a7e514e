"""A KV pool of more than 2**31 elements a layer: its last blocks give what its first ones give.

An index computed in 32 bits wraps around there, and reads or writes another sequence's KV.
"""

from __future__ import annotations

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

LENGTH, STEPS = 100, 6


def rows(context: Context) -> Iterator[Row]:
    model, card = random_model(context, 512, num_hidden_layers=1)
    width = BLOCK_SIZE * model.config.num_kv_heads * model.config.head_dim
    num_blocks = 64 if context.tiny else (1 << 31) // width + 64
    runner = make_runner(context, model, card, Limits(BLOCK_SIZE, num_blocks, 16, 4, 512))
    warm_up_graphs(runner)
    blocks = -(-(LENGTH + STEPS) // BLOCK_SIZE)
    first = generate(runner, range(blocks))
    last = generate(runner, range(num_blocks - blocks, num_blocks))
    moved = generate(runner, range(num_blocks - blocks, num_blocks), move=True)
    yield {
        "what": "pool",
        "elements": num_blocks * width,
        "beyond_int32": num_blocks * width > 1 << 31,
        "last_blocks_equal": all(np.array_equal(a, b) for a, b in zip(first, last, strict=True)),
        "moved_blocks_equal": all(np.array_equal(a, b) for a, b in zip(first, moved, strict=True)),
    }


def generate(runner: Runner, blocks: range, *, move: bool = False) -> list[np.ndarray]:
    """Tokens and logprobs of one sequence. move: half way it goes to the host, and comes back to the same blocks by
    way of other ones."""
    runner.reset()
    new = sequence(0, LENGTH, blocks, logprobs=4)
    results = [run(runner, Plan(0, 1, prefills=slots(1), prefill_lengths=tokens_of(LENGTH), new=(new,)))]
    for step in range(STEPS):
        plan = Plan(0, step + 2, decodes=slots(1))
        if move and step == STEPS // 2:
            count = len(blocks)
            here, host, between = np.array(blocks), np.arange(count), np.arange(count) + 8
            plan = Plan(
                0,
                step + 2,
                decodes=slots(1),
                swap_outs=_pairs(here, host),
                swap_ins=_pairs(host, between),
                copies=_pairs(between, here),
            )
        results.append(run(runner, plan))
    return [item for result in results for item in (result.tokens, result.logprobs.token_ids, result.logprobs.values)]


def _pairs(sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
    return np.stack((sources, targets), 1).astype(np.int32).ravel()
