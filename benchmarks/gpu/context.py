"""What the parts of the GPU benchmark share: a model with random weights, plans, clocks."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.wire import Limits, ModelCard, NewSequence, Plan, Result, SamplingParams
from executor_svc.graphs import CudaGraphs, Eager
from executor_svc.model.config import read_config
from executor_svc.model.decoder import Decoder
from executor_svc.model.weights import allocate
from executor_svc.runner import Runner

LLAMA_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 500_000.0,
}
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
    fields = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, **shape(context)}
    fields |= {"max_position_embeddings": max_model_len, "torch_dtype": dtype, **changes}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        config = read_config(Path(folder), dtype=dtype)
    weights = allocate(config, context.device, tied=False)
    torch.manual_seed(0)
    for tensor in tensors(weights):
        if tensor.ndim == 1:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0, tensor.shape[-1] ** -0.5)
    card = ModelCard("random", bytes(16), config.vocab_size, config.max_model_len, (), dtype)
    return Decoder(config, weights, batch_invariant=batch_invariant), card


def tensors(holder: object) -> Iterator[torch.Tensor]:
    """All tensors that an object of the model holds."""
    if isinstance(holder, torch.Tensor):
        yield holder
    elif isinstance(holder, list | tuple):
        for item in holder:
            yield from tensors(item)
    elif type(holder).__module__.startswith("executor_svc."):
        names = [*getattr(holder, "__dict__", ()), *getattr(type(holder), "__slots__", ())]
        for name in names:
            yield from tensors(getattr(holder, name))


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
