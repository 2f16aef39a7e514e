"""What answers that do not depend on the batch cost: a step's matrix products, by fixed tiles and by the library.

The products of all layers of the shape, each with a weight of its own, so that none is read from a cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from benchmarks.gpu.context import Context, Row, shape
from kernels import invariant_linear

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def rows(context: Context) -> Iterator[Row]:
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
        if context.must_end():
            raise RuntimeError("the time is up")


def milliseconds(
    context: Context, linear: Linear, inputs: dict[int, torch.Tensor], weights: list[torch.Tensor]
) -> float:
    """Median time of all products. inputs: by their width."""

    def all_products() -> None:
        for weight in weights:
            linear(inputs[weight.shape[1]], weight)

    all_products()
    return statistics.median(context.seconds(all_products) for _ in range(3 if context.tiny else 9)) * 1e3
