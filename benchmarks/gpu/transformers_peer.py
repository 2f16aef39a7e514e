"""Continuous batching of `transformers` on the same device, with a model of the same shape and random weights."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.context import Context, Row, SkippedError, shape

PROMPT, OUTPUT = 64, 128


def rows(context: Context) -> Iterator[Row]:
    if not context.on_gpu:
        raise SkippedError("its figures on a CPU say nothing of a GPU")
    try:
        from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise SkippedError(f"transformers is not installed: {error}") from error
    fields = {name: value for name, value in shape(context).items() if name not in ("rope_theta", "model_type")}
    config = LlamaConfig(**fields | {"max_position_embeddings": 4096, "torch_dtype": "bfloat16"})
    with torch.device(context.device):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
    settings = GenerationConfig(max_new_tokens=OUTPUT, do_sample=False, eos_token_id=-1, pad_token_id=0)
    for batch in (1, 8, 16, 32, 64):
        if context.must_end():
            raise RuntimeError("the time is up")
        prompts = [[(7 * row + place) % 1000 for place in range(PROMPT)] for row in range(batch)]
        seconds = _generate(model, prompts, settings)
        seconds = min(seconds, _generate(model, prompts, settings))
        # Prefill included: a bound on its decode step from above.
        yield {"what": "transformers", "batch": batch, "ms": round(seconds / OUTPUT * 1e3, 3)}


def _generate(model: Any, prompts: list[list[int]], settings: Any) -> float:
    if not hasattr(model, "generate_batch"):
        raise SkippedError("this transformers has no continuous batching")
    torch.cuda.synchronize()
    started = time.perf_counter()
    model.generate_batch(inputs=prompts, generation_config=settings)
    torch.cuda.synchronize()
    return time.perf_counter() - started
