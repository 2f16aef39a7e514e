"""What answers that do not depend on the batch cost: whole iterations with the setting and without it, and of them the
matrix products, by fixed tiles and by the library.

The products are those of all layers of the shape, each with a weight of its own, so that none is read from a cache.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from benchmarks.gpu.context import (
    BLOCK_SIZE,
    Context,
    Row,
    make_runner,
    random_model,
    run,
    sequence,
    shape,
    slots,
    tokens_of,
)
from benchmarks.gpu.decode import measure
from common.wire import Limits, Plan
from executor_svc.runner import Runner
from executor_svc.warm_up import warm_up_graphs
from kernels import invariant_linear

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def rows(context: Context) -> Iterator[Row]:
    yield from iterations(context)
    yield from products(context)


def iterations(context: Context) -> Iterator[Row]:
    """Decodes through the runner and its graphs, and a prefill, with the setting on and off."""
    batches, length, steps, chunk = ((1, 3), 20, 6, 20) if context.tiny else ((1, 8, 32, 64), 1024, 32, 1024)
    layers = 2 if context.tiny else 16
    blocks_each = (length + 3 * steps) // BLOCK_SIZE + 1
    limits = Limits(BLOCK_SIZE, max(batches) * blocks_each, 0, max(batches), 2048)
    found: dict[bool, list[float]] = {}
    for on in (True, False):
        if context.must_end():
            raise RuntimeError("the time is up")
        model, card = random_model(context, 4096, batch_invariant=on, num_hidden_layers=layers)
        runner = make_runner(context, model, card, limits)
        warm_up_graphs(runner)
        found[on] = [measure(context, runner, batch, length, steps, blocks_each)["ms"] for batch in batches]
        found[on].append(prefill_milliseconds(context, runner, chunk, blocks_each))
        del runner, model
        gc.collect()
    for place, batch in enumerate((*batches, 1)):
        on_ms, off_ms = found[True][place], found[False][place]
        kind = "decode" if place < len(batches) else f"prefill {chunk}"
        ratio = round(on_ms / off_ms, 3)
        yield {"what": kind, "batch": batch, "off_ms": off_ms, "on_ms": on_ms, "times_off": ratio}


def prefill_milliseconds(context: Context, runner: Runner, length: int, blocks_each: int) -> float:
    """Median time of a prompt of `length` tokens."""

    def prefill() -> None:
        runner.reset()
        new = (sequence(0, length, range(blocks_each)),)
        run(runner, Plan(0, 1, prefills=slots(1), prefill_lengths=tokens_of(length), new=new))

    prefill()
    return round(statistics.median(context.seconds(prefill) for _ in range(5)) * 1e3, 3)


def products(context: Context) -> Iterator[Row]:
    fields = shape(context)
    hidden, inner, head_dim = fields["hidden_size"], fields["intermediate_size"], fields["head_dim"]
    heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    sizes = [
        ((heads + 2 * kv_heads) * head_dim, hidden),
        (hidden, heads * head_dim),
        (2 * inner, hidden),
        (hidden, inner),
    ]
    dtype = torch.bfloat16 if context.on_gpu else torch.float32
    layers = 2 if context.tiny else 8  # 3.5 GB of the large shape: more than any cache holds
    weights = [
        torch.randn(outputs, inputs, device=context.device, dtype=dtype)
        for _ in range(layers)
        for outputs, inputs in sizes
    ]
    for batch in (1, 3) if context.tiny else (1, 8, 16, 32, 64, 256, 2048):
        if context.must_end():
            raise RuntimeError("the time is up")
        inputs = {
            width: torch.randn(batch, width, device=context.device, dtype=dtype) for width in {k for _, k in sizes}
        }
        library, invariant = (
            milliseconds(context, linear, inputs, weights) / layers for linear in (F.linear, invariant_linear)
        )
        yield {
            "what": "products",
            "batch": batch,
            "library_ms_a_layer": round(library, 4),
            "invariant_ms_a_layer": round(invariant, 4),
            "times_library": round(invariant / library, 3),
        }


def milliseconds(
    context: Context, linear: Linear, inputs: dict[int, torch.Tensor], weights: list[torch.Tensor]
) -> float:
    """Median time of all products. inputs: by their width."""

    def all_products() -> None:
        for weight in weights:
            linear(inputs[weight.shape[1]], weight)

    all_products()
    return statistics.median(context.seconds(all_products) for _ in range(3 if context.tiny else 9)) * 1e3
