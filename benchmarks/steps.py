"""Steps of the executor's `Runner` on random weights, against what the machine's memory and arithmetic allow."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from benchmarks.rates import Rates
from benchmarks.shapes import Size, load_random, read_shape
from common.wire import Fault, Limits, NewSequence, Plan, SamplingParams
from executor_svc.kv_cache import block_bytes
from executor_svc.model import ModelConfig
from executor_svc.model.cpu_step import CpuStep
from executor_svc.service import make_runner
from executor_svc.settings import ExecutorSettings
from executor_svc.warm_up import warm_up, warm_up_graphs

BLOCK_SIZE = 16
GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Case:
    """decode: `batch` sequences, of which each has `context` tokens in the KV cache and computes one more. prefill:
    `batch` prompts of `context` tokens in one iteration."""

    kind: str
    batch: int
    context: int

    @property
    def tokens(self) -> int:
        """Of one iteration."""
        return self.batch * (self.context if self.kind == "prefill" else 1)

    def blocks_each(self, steps: int) -> int:
        return -(-(self.context + steps + 1) // BLOCK_SIZE)

    def blocks(self, steps: int) -> int:
        return self.batch * self.blocks_each(steps)


@dataclass(frozen=True, slots=True)
class Model:
    """What is measured."""

    shape: str = "smollm2-135m"
    dtype: str = "bfloat16"
    device: str = "cpu"
    cpu_step: CpuStep = "native"
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    cuda_graphs: bool = True


class Bench:
    """One model on one device, and a cache for the largest of the cases."""

    def __init__(self, model: Model, cases: list[Case], steps: int) -> None:
        longest = max(case.context for case in cases) + steps + 2
        device = torch.device(model.device)
        self.config = read_shape(model.shape, model.dtype, longest)
        self.steps = steps
        loaded, self.size = load_random(self.config, device, model.cpu_step, model.kv_cache_dtype)
        limits = Limits(
            block_size=BLOCK_SIZE,
            num_blocks=max(case.blocks(steps) for case in cases),
            num_host_blocks=0,
            max_num_seqs=max(case.batch for case in cases),
            max_num_batched_tokens=max(case.tokens for case in cases),
        )
        settings = ExecutorSettings(kv_cache_dtype=model.kv_cache_dtype, cuda_graphs=model.cuda_graphs)
        self.runner = make_runner(settings, loaded, limits, device)
        warm_up(self.runner)
        warm_up_graphs(self.runner)
        # What memory held before might be no number, and a decode reads all of its context.
        for layer in (*self.runner.cache.k, *self.runner.cache.v):
            layer.view(torch.uint8).random_(0, 60)  # in every format a number below 2
        self._random = np.random.default_rng(0)
        self._generation = 0

    def run(self, case: Case) -> list[float]:
        """Milliseconds of each step of one round: `steps` decodes after one that is not counted, or one prefill."""
        self.runner.reset()
        self._generation += 1
        new = self._sequences(case)
        slots = np.arange(case.batch, dtype=np.uint16)
        if case.kind == "prefill":
            lengths = np.full(case.batch, case.context, np.int32)
            return [self._step(Plan(0, 1, prefills=slots, prefill_lengths=lengths, new=new))]
        self._step(Plan(0, 1, decodes=slots, new=new))
        return [self._step(Plan(0, 2 + number, decodes=slots)) for number in range(self.steps)]

    def _sequences(self, case: Case) -> tuple[NewSequence, ...]:
        """A decode's context counts as computed; the first of its tokens to compute is the one behind."""
        blocks = case.blocks_each(self.steps)
        computed = case.context if case.kind == "decode" else 0
        length = computed + 1 if case.kind == "decode" else case.context
        return tuple(
            NewSequence(
                slot=slot,
                generation=self._generation,
                tokens=self._random.integers(0, self.config.vocab_size, length).astype(np.int32),
                prompt_length=length,
                computed=computed,
                blocks=np.arange(slot * blocks, (slot + 1) * blocks, dtype=np.int32),
                params=GREEDY,
            )
            for slot in range(case.batch)
        )

    def _step(self, plan: Plan) -> float:
        started = time.perf_counter()
        answer = self.runner.run(plan)
        took = time.perf_counter() - started
        if isinstance(answer, Fault):
            raise RuntimeError(f"the step failed: {answer.message}")
        return 1000 * took


@dataclass(frozen=True, slots=True)
class Work:
    """What a step cannot do without."""

    bytes: float
    """Weights read, keys and values read or, in a prefill, written."""
    flops: float

    def floor_ms(self, rates: Rates) -> tuple[float, float]:
        """(by memory, by arithmetic); the higher one is the floor."""
        return 1000 * self.bytes / rates.bandwidth, 1000 * self.flops / rates.flops


def work(config: ModelConfig, size: Size, case: Case, steps: int, kv_itemsize: int) -> Work:
    """Of one step: the mean of a round's. Behind the last layer's attention only the sampled rows are counted.

    kv_itemsize: bytes of a number in the KV cache.
    """
    heads, kv_row = config.num_heads, 2 * config.num_kv_heads * config.head_dim * kv_itemsize
    windows = [layer.window for layer in config.layers]
    if case.kind == "decode":
        length = case.context + 2 + (steps - 1) / 2
        pairs = sum(min(length, window or length) for window in windows)
        moved = pairs * kv_row
    else:
        pairs = sum(_causal_pairs(case.context, window or case.context) for window in windows)
        moved = case.context * len(windows) * kv_row
    products = (size.layer_elements - size.tail_elements) * case.tokens
    products += (size.tail_elements + size.head_elements) * case.batch
    attention = 4 * heads * config.head_dim * pairs * case.batch
    return Work(size.weight_bytes + moved * case.batch, 2 * products + attention)


def _causal_pairs(tokens: int, window: int) -> int:
    """Sum over `tokens` tokens of how many each attends to, itself included."""
    growing = min(tokens, window)
    return growing * (growing + 1) // 2 + (tokens - growing) * window


def measure(bench: Bench, cases: list[Case], rounds: int, between: Callable[[], object]) -> list[list[float]]:
    """Rounds of all cases in turn, `between` before each. Returns each case's milliseconds."""
    found: list[list[float]] = [[] for _ in cases]
    gc.collect()
    gc.freeze()
    for _ in range(rounds):
        for case, took in zip(cases, found, strict=True):
            between()
            took += bench.run(case)
    return found


def summary(bench: Bench, case: Case, took: list[float], rates: Rates) -> dict[str, object]:
    """One line of the report."""
    itemsize = bench.runner.cache.k[0].itemsize
    by_memory, by_arithmetic = work(bench.config, bench.size, case, bench.steps, itemsize).floor_ms(rates)
    floor = max(by_memory, by_arithmetic)
    return {
        "kind": case.kind,
        "batch": case.batch,
        "context": case.context,
        "dtype": bench.config.dtype_name,
        "ms_min": min(took),
        "ms_median": statistics.median(took),
        "floor_ms": floor,
        "memory_floor_ms": by_memory,
        "compute_floor_ms": by_arithmetic,
        "ratio": min(took) / floor,
        "bandwidth_gb_s": rates.bandwidth / 1e9,
        "matmul_gflop_s": rates.flops / 1e9,
        "steps": len(took),
    }


def kv_bytes(config: ModelConfig, case: Case, steps: int, dtype: torch.dtype) -> int:
    """Memory of the blocks that a case holds."""
    return case.blocks(steps) * block_bytes(config, BLOCK_SIZE, dtype)
