"""The decoder's tensors, and where in them each tensor of a Hugging Face checkpoint goes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from executor_svc.model.config import ModelConfig
from executor_svc.model.linear import Linear


@dataclass
class LayerWeights:
    """One decoder layer. Norms [hidden] or, of queries and keys, [head_dim]."""

    input_norm: torch.Tensor
    qkv: Linear
    """[(heads + 2 * kv_heads) * head_dim, hidden]: queries, keys, values."""
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    """[hidden, heads * head_dim]"""
    post_attention_norm: torch.Tensor | None
    pre_mlp_norm: torch.Tensor
    gate_up: Linear
    """[2 * intermediate, hidden]: gate, up."""
    down: Linear
    """[hidden, intermediate]"""
    post_mlp_norm: torch.Tensor | None


@dataclass
class Weights:
    """All tensors of a model, on one device, in one dtype."""

    embedding: torch.Tensor
    """[vocab, hidden]"""
    layers: list[LayerWeights]
    norm: torch.Tensor
    lm_head: Linear
    """[vocab, hidden]; where embeddings are tied, the embedding itself."""

    def settle(self) -> None:
        """To be called once all values are there."""
        for layer in self.layers:
            for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
                linear.settle()
        self.lm_head.settle()


def allocate(config: ModelConfig, device: torch.device, *, tied: bool) -> Weights:
    """Uninitialised weights. tied: the output layer is the embedding."""

    def tensor(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=config.dtype, device=device)

    def linear(outputs: int, inputs: int, bias: bool) -> Linear:
        return Linear(tensor(outputs, inputs), tensor(outputs) if bias else None)

    hidden, head_dim = config.hidden_size, config.head_dim
    heads = config.num_heads + 2 * config.num_kv_heads
    layers = [
        LayerWeights(
            input_norm=tensor(hidden),
            qkv=linear(heads * head_dim, hidden, config.qkv_bias),
            q_norm=tensor(head_dim) if config.qk_norm else None,
            k_norm=tensor(head_dim) if config.qk_norm else None,
            o=linear(hidden, config.num_heads * head_dim, config.o_bias),
            post_attention_norm=tensor(hidden) if config.post_norms else None,
            pre_mlp_norm=tensor(hidden),
            gate_up=linear(2 * config.intermediate_size, hidden, config.mlp_bias),
            down=linear(hidden, config.intermediate_size, config.mlp_bias),
            post_mlp_norm=tensor(hidden) if config.post_norms else None,
        )
        for _ in range(config.num_layers)
    ]
    embedding = tensor(config.vocab_size, hidden)
    lm_head = Linear(embedding) if tied else linear(config.vocab_size, hidden, False)
    return Weights(embedding, layers, tensor(hidden), lm_head)


def destinations(config: ModelConfig, weights: Weights) -> dict[str, torch.Tensor]:
    """For each tensor name of a checkpoint: the tensor, or the part of a fused one, that it fills."""
    found = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.norm}
    if weights.lm_head.weight is not weights.embedding:
        found["lm_head.weight"] = weights.lm_head.weight
    pre_mlp = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
    sizes = [n * config.head_dim for n in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}."
        norms = {
            "input_layernorm": layer.input_norm,
            "self_attn.q_norm": layer.q_norm,
            "self_attn.k_norm": layer.k_norm,
            pre_mlp: layer.pre_mlp_norm,
        }
        if config.post_norms:
            norms["post_attention_layernorm"] = layer.post_attention_norm
            norms["post_feedforward_layernorm"] = layer.post_mlp_norm
        found.update({f"{prefix}{name}.weight": norm for name, norm in norms.items() if norm is not None})
        attention = [f"{prefix}self_attn.{name}_proj" for name in "qkv"]
        found.update(_parts(layer.qkv, attention, sizes))
        found.update(_parts(layer.o, [f"{prefix}self_attn.o_proj"], [config.hidden_size]))
        gates = [f"{prefix}mlp.{name}_proj" for name in ("gate", "up")]
        found.update(_parts(layer.gate_up, gates, [config.intermediate_size] * 2))
        found.update(_parts(layer.down, [f"{prefix}mlp.down_proj"], [config.hidden_size]))
    return found


def _parts(linear: Linear, names: list[str], sizes: list[int]) -> dict[str, torch.Tensor]:
    parts = {f"{name}.weight": part for name, part in zip(names, torch.split(linear.weight, sizes), strict=True)}
    if linear.bias is not None:
        parts.update({f"{name}.bias": part for name, part in zip(names, torch.split(linear.bias, sizes), strict=True)})
    return parts
