"""Shapes of known models, with random weights: for measuring, where the answer does not matter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from common.wire import ModelCard
from executor_svc.fake_model import DEFAULT_MODEL
from executor_svc.model import LoadedModel, ModelConfig
from executor_svc.model.config import parse_config
from executor_svc.model.cpu_step import CpuStep, make_decoder
from executor_svc.model.weights import Weights, allocate

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_theta": 100_000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "gemma-3-270m": {
        "model_type": "gemma3_text",
        "vocab_size": 262_144,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 32_768,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "tie_word_embeddings": True,
    },
}
"""config.json of each. Rotary scaling is left out: it changes a table, not the work."""
NAMES = (*SHAPES, "embedded")


def read_shape(name: str, dtype: str, longest: int) -> ModelConfig:
    """The config of a shape, its context stretched to `longest` tokens where it is shorter."""
    raw = dict(SHAPES[name]) if name in SHAPES else json.loads((DEFAULT_MODEL / "config.json").read_text())
    raw["max_position_embeddings"] = max(longest, raw["max_position_embeddings"])
    return parse_config(raw, name, dtype=dtype, max_model_len=longest)


@dataclass(frozen=True)
class Size:
    """How much a forward pass reads and computes."""

    weight_bytes: int
    """All that is read at every step: not the embedding's rows, unless they are the output layer's too."""
    layer_elements: int
    """Of the layers' matrices."""
    tail_elements: int
    """Of those behind the last layer's attention, where only the rows that are sampled go on."""
    head_elements: int
    """Of the output layer."""


def random_weights(config: ModelConfig, device: torch.device, seed: int = 0) -> tuple[Weights, Size]:
    """Normal weights, of such a width that activations stay finite in every dtype."""
    weights = allocate(config, device, tied=config.tie_word_embeddings)
    generator = torch.Generator(device).manual_seed(seed)
    for tensor in _tensors(weights):
        if tensor.ndim == 1:
            tensor.fill_(0.0 if config.unit_offset_norms else 1.0)
        else:
            tensor.normal_(0.0, tensor.shape[1] ** -0.5, generator=generator)
    return weights, size_of(weights)


def load_random(
    config: ModelConfig, device: torch.device, cpu_step: CpuStep, kv_cache_dtype: str
) -> tuple[LoadedModel, Size]:
    """The decoder that the service would choose, with random weights."""
    weights, size = random_weights(config, device)
    card = ModelCard(
        name="random",
        fingerprint=bytes(16),
        vocab_size=config.vocab_size,
        max_model_len=config.max_model_len,
        eos_ids=(),
        dtype=config.dtype_name,
    )
    return LoadedModel(make_decoder(config, weights, cpu_step, kv_cache_dtype), card), size


def _tensors(weights: Weights) -> Iterator[torch.Tensor]:
    yield weights.embedding
    if weights.lm_head.weight is not weights.embedding:
        yield weights.lm_head.weight
    yield weights.norm
    for layer in weights.layers:
        norms = (layer.input_norm, layer.q_norm, layer.k_norm, layer.post_attention_norm, layer.pre_mlp_norm)
        yield from (norm for norm in (*norms, layer.post_mlp_norm) if norm is not None)
        for linear in layer.linears():
            yield linear.weight
            if linear.bias is not None:
                yield linear.bias


def size_of(weights: Weights) -> Size:
    """To be taken before a decoder packs them."""
    matrices = [[linear.weight for linear in layer.linears()] for layer in weights.layers]
    head = weights.lm_head.weight
    read = [tensor for tensor in _tensors(weights) if tensor is not weights.embedding or tensor is head]
    return Size(
        weight_bytes=sum(tensor.nbytes for tensor in read),
        layer_elements=sum(matrix.numel() for layer in matrices for matrix in layer),
        tail_elements=sum(matrix.numel() for matrix in matrices[-1][1:]),
        head_elements=head.numel(),
    )
