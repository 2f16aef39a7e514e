"""Iterations that prefill a whole new prompt beside decodes, one after the other, as under steady arrivals."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from benchmarks.gpu.clock import Clock
from benchmarks.gpu.context import BLOCK_SIZE, Context, Row, run, sequence, slots, tokens_of
from common.wire import Plan
from executor_svc.runner import Runner

MIXES = ((0, 32), (8, 24), (32, 32), (32, 96), (32, 224), (63, 193), (32, 480), (32, 992))
"""Decodes, and tokens of the prompt beside them: some that fill a graph and some that do not, the last beyond all."""


def rows_of(context: Context, runner: Runner, length: int, blocks_each: int, *, graphs: bool) -> Iterator[Row]:
    """The decodes have `length` tokens of context, and each slot `blocks_each` blocks."""
    for decodes, chunk in ((0, 5), (2, 9)) if context.tiny else MIXES:
        if context.must_end():
            raise RuntimeError("the time is up")
        found = measure(context, runner, decodes, chunk, length, blocks_each)
        yield {"what": "mixed", "decodes": decodes, "tokens": decodes + chunk, "graphs": graphs, **found}


def measure(context: Context, runner: Runner, decodes: int, chunk: int, length: int, blocks_each: int) -> Row:
    """Mean time of a step, and medians of its parts. The newcomer leaves after its first token."""
    steps = 3 if context.tiny else 24
    new = tuple(
        sequence(slot, length, range(slot * blocks_each, (slot + 1) * blocks_each), computed=length - 1)
        for slot in range(decodes)
    )
    if decodes:
        run(runner, Plan(0, 1, decodes=slots(decodes), new=new))
    blocks = range(decodes * blocks_each, decodes * blocks_each + chunk // BLOCK_SIZE + 1)
    newcomers = [sequence(decodes, chunk, blocks, generation=number + 1) for number in range(2 * steps)]
    slot = np.array([decodes], np.uint16)
    plans = [
        Plan(
            0,
            number + 2,
            decodes=slots(decodes),
            prefills=slot,
            prefill_lengths=tokens_of(chunk),
            new=(newcomer,),
            freed=slot if number else slots(0),
        )
        for number, newcomer in enumerate(newcomers)
    ]
    for plan in plans[:steps]:
        run(runner, plan)
    context.wait()
    clock = Clock(context, runner)
    started = time.perf_counter()
    for plan in plans[steps:]:
        run(runner, plan)
    each = (time.perf_counter() - started) / steps
    clock.remove()
    runner.reset()
    return {"ms": round(each * 1e3, 3), **clock.medians()}
