"""What the parts of the GPU benchmark share: a model with random weights, plans, clocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.shapes import SHAPES, random_weights
from common.wire import Limits, ModelCard, NewSequence, Plan, Result, SamplingParams
from executor_svc.graphs import CudaGraphs, Eager
from executor_svc.model.config import parse_config
from executor_svc.model.decoder import Decoder
from executor_svc.runner import Runner

LLAMA_8B = SHAPES["llama-3.1-8b"]
TINY = LLAMA_8B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
BLOCK_SIZE = 16

Row = dict[str, Any]
"""One result: names and figures."""


class SkippedError(Exception):
    """Why a part has nothing to say here."""


@dataclass(frozen=True)
class Context:
    """Where a part runs, and until when it may."""

    device: torch.device
    tiny: bool
    deadline: float

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def must_end(self) -> bool:
        return time.monotonic() > self.deadline

    def wait(self) -> None:
        """Until the device has done what was asked of it."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object]) -> float:
        """Time of one call, the device's work included."""
        self.wait()
        started = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - started


def shape(context: Context) -> dict[str, Any]:
    return TINY if context.tiny else LLAMA_8B


def random_model(
    context: Context, max_model_len: int, *, batch_invariant: bool = False, **changes: Any
) -> tuple[Decoder, ModelCard]:
    """A Llama whose weights are drawn on the device: bf16 on a GPU, fp32 on a CPU. The same ones at every call."""
    dtype = "bfloat16" if context.on_gpu else "float32"
    fields = shape(context) | {"max_position_embeddings": max_model_len, **changes}
    config = parse_config(fields, "the benchmark's shape", dtype=dtype)
    weights, _ = random_weights(config, context.device)
    card = ModelCard("random", bytes(16), config.vocab_size, config.max_model_len, (), dtype)
    return Decoder(config, weights, batch_invariant=batch_invariant), card


def make_runner(context: Context, model: Decoder, card: ModelCard, limits: Limits, *, graphs: bool = True) -> Runner:
    """As the service makes one; on a CPU with the device's inputs, but nothing to record."""
    recorder = CudaGraphs(context.device) if context.on_gpu and graphs else Eager()
    runner = Runner(model, card, limits, recorder=recorder)
    for layer in (*runner.cache.k, *runner.cache.v):
        layer.zero_()
    return runner


def sequence(
    slot: int,
    length: int,
    blocks: range,
    *,
    computed: int = 0,
    generation: int = 1,
    seed_of_tokens: int | None = None,
    **params: Any,
) -> NewSequence:
    """A sequence of random tokens that does not end by itself. seed_of_tokens: of its tokens; None: the slot."""
    values = {"max_tokens": 1 << 20, "temperature": 0.0, "ignore_eos": True} | params
    tokens = (
        np.random.default_rng(slot if seed_of_tokens is None else seed_of_tokens)
        .integers(0, 500, length)
        .astype(np.int32)
    )
    numbers = np.arange(blocks.start, blocks.stop, dtype=np.int32)
    return NewSequence(slot, generation, tokens, length, computed, numbers, SamplingParams(**values))


def run(runner: Runner, plan: Plan) -> Result:
    answer = runner.run(plan)
    if not isinstance(answer, Result):
        raise RuntimeError(f"{answer.reason}: {answer.message}")
    return answer


def slots(count: int) -> np.ndarray[Any, Any]:
    return np.arange(count, dtype=np.uint16)


def tokens_of(*lengths: int) -> np.ndarray[Any, Any]:
    return np.array(lengths, np.int32)
