"""Decode steps of the Llama-3.1-8B shape: time against the bandwidth floor, and the bubble between two steps. And steps
that prefill beside decodes. Both with CUDA graphs and without.

The floor: weights and KV bytes that a step must read, over the read bandwidth measured in the same run. The bubble: the
device's idle time between the end of a step's last kernel and the start of the next step's copy, with the executor
alone: there is no scheduler in between.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.gpu import mixed
from benchmarks.gpu.clock import Clock
from benchmarks.gpu.context import (
    BLOCK_SIZE,
    Context,
    Row,
    make_runner,
    random_model,
    run,
    sequence,
    slots,
)
from benchmarks.rates import Probe
from benchmarks.shapes import size_of
from common.wire import Limits, Plan
from executor_svc.kv_cache import block_bytes
from executor_svc.runner import Runner
from executor_svc.warm_up import warm_up_graphs


def rows(context: Context) -> Iterator[Row]:
    batches, length, steps = ((1, 3), 20, 6) if context.tiny else ((1, 8, 16, 32, 64), 1024, 64)
    bandwidth = Probe(context.device, torch.bfloat16).measure().bandwidth
    yield {"what": "read bandwidth", "gb_per_s": round(bandwidth / 1e9, 1)}
    model, card = random_model(context, max_model_len=4096)
    blocks_each = (length + 3 * steps) // BLOCK_SIZE + 1
    limits = Limits(BLOCK_SIZE, max(batches) * blocks_each, 0, max(batches), 2048)
    weight_bytes = size_of(model.weights).weight_bytes
    each = block_bytes(model.config, 1, model.dtype)
    for graphs in (True, False) if context.on_gpu else (False,):
        runner = make_runner(context, model, card, limits, graphs=graphs)
        started = time.perf_counter()
        count = warm_up_graphs(runner)
        if graphs:
            yield {"what": "capture", "graphs": count, "seconds": round(time.perf_counter() - started, 2)}
        for batch in batches:
            if context.must_end():
                raise RuntimeError("the time is up")
            found = measure(context, runner, batch, length, steps, blocks_each)
            floor_ms = (weight_bytes + batch * (length + 1.5 * steps) * each) / bandwidth * 1e3
            found |= {"floor_ms": round(floor_ms, 3), "times_floor": round(found["ms"] / floor_ms, 3)}
            yield {"what": "decode", "batch": batch, "context": length, "graphs": graphs, **found}
        yield from mixed.rows_of(context, runner, length, blocks_each, graphs=graphs)
        del runner


def measure(context: Context, runner: Runner, batch: int, length: int, steps: int, blocks_each: int) -> Row:
    """Sequences whose first `length` tokens hold KV already (of zeros: the time does not depend on it)."""
    new = tuple(
        sequence(slot, length, range(slot * blocks_each, (slot + 1) * blocks_each), computed=length - 1)
        for slot in range(batch)
    )
    decodes = slots(batch)
    run(runner, Plan(0, 1, decodes=decodes, new=new))
    iteration = 1

    def step() -> None:
        nonlocal iteration
        iteration += 1
        run(runner, Plan(0, iteration, decodes=decodes))

    for _ in range(steps):
        step()
    times = [context.seconds(step) for _ in range(steps // 2)]
    clock = Clock(context, runner)
    started = time.perf_counter()
    for _ in range(steps):
        step()
    each = (time.perf_counter() - started) / steps
    clock.remove()
    runner.reset()
    spread = float(np.percentile(times, 90)) * 1e3
    return {"ms": round(each * 1e3, 3), "p90_ms": round(spread, 3), **clock.medians()}
