"""Whether the first request after the executor is ready waits for a compiler.

Of each kind of iteration the first time against the steady one, and the files that came into Triton's cache.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
from executor_svc.warm_up import warm_up, warm_up_graphs

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 3},
    "filtered": {"temperature": 0.7, "seed": 3, "top_p": 0.9, "top_k": 20},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.1},
    "logprobs": {"logprobs": 5},
    "prompt logprobs": {"prompt_logprobs": 2},
}


def rows(context: Context) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        # Empty at first, and nobody else's: so the warm-up compiles all, and what comes later shows.
        os.environ["TRITON_CACHE_DIR"] = folder
        yield from measure(context, Path(folder))


def measure(context: Context, cache: Path) -> Iterator[Row]:
    budget = 64 if context.tiny else 2048
    seats = 3 if context.tiny else 64
    model, card = random_model(context, 256 if context.tiny else 8192, num_hidden_layers=2)
    runner = make_runner(context, model, card, Limits(BLOCK_SIZE, 1024, 0, seats, budget))
    started = time.perf_counter()
    warm_up(runner)
    graphs = warm_up_graphs(runner)
    before = compiled(cache)
    yield {"what": "warm-up", "seconds": round(time.perf_counter() - started, 2), "graphs": graphs, "files": before}
    work = [(f"batch {count}", count, 16, {}) for count in ((1, 2, 3) if context.tiny else (1, 2, 7, 17, 33))]
    work += [(f"prompt {length}", 1, length, {}) for length in ((1, 15, 16, 65) if context.tiny else (1, 15, 16, 4097))]
    # Odd rows of odd lengths: an array behind them, sent in one copy with them, starts where they end.
    work += [(f"batch {count} of {length}", count, length, {}) for count, length in ((3, 5), (3, 7))]
    work += [
        (f"batch {count} of {length}", count, length, {})
        for count, length in (() if context.tiny else ((5, 33), (13, 21)))
    ]
    work += [(kind, 1, 20, params) for kind, params in KINDS.items()]
    for name, count, length, params in work:
        times = [generate(context, runner, count, length, params) for _ in range(2 if context.tiny else 6)]
        prefill, decode = ([pair[place] for pair in times] for place in (0, 1))
        yield {
            "what": name,
            "first_prefill_ms": round(prefill[0] * 1e3, 2),
            "steady_prefill_ms": round(statistics.median(prefill[1:]) * 1e3, 2),
            "first_decode_ms": round(decode[0] * 1e3, 2),
            "steady_decode_ms": round(statistics.median(decode[1:]) * 1e3, 2),
            "new_files": compiled(cache) - before,
        }
        before = compiled(cache)


def compiled(cache: Path) -> int:
    """Files in Triton's cache."""
    return sum(1 for path in cache.rglob("*") if path.is_file())


def generate(context: Context, runner: Runner, count: int, length: int, params: dict[str, Any]) -> tuple[float, float]:
    """Seconds of the prefill, in as many iterations as the token budget asks for, and of one decode."""
    runner.reset()
    blocks = length // BLOCK_SIZE + 1
    new = tuple(sequence(slot, length, range(slot * blocks, (slot + 1) * blocks), **params) for slot in range(count))
    chunk = min(length, runner.limits.max_num_batched_tokens // count)
    starts = list(range(0, length, chunk))
    plans = [
        Plan(
            0,
            start + 1,
            prefills=slots(count),
            prefill_lengths=tokens_of(*[min(chunk, length - start)] * count),
            new=new if start == 0 else (),
        )
        for start in starts
    ]
    prefill = sum(context.seconds(lambda plan=plan: run(runner, plan)) for plan in plans)  # type: ignore[misc]
    return prefill, context.seconds(lambda: run(runner, Plan(0, length + 1, decodes=slots(count))))
