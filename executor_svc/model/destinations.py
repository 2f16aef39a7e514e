"""Where in the decoder's weights each tensor of a Hugging Face checkpoint goes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from executor_svc.model.config import ModelConfig
from executor_svc.model.families import Experts, family_of
from executor_svc.model.linear import Linear
from executor_svc.model.weights import LayerWeights, MoEWeights, Weights
from kernels import quantize_weight
from kernels.quantized_linear import QUANTIZED_DTYPES

_ROWS_AT_A_TIME = 1024
"""Of a tensor that is quantised: the work needs room for them in fp32."""


@dataclass(frozen=True)
class Place:
    """Where a tensor of a checkpoint goes."""

    tensor: torch.Tensor
    """The tensor, or the part of a fused one, that it fills."""
    shape: tuple[int, ...]
    """Its shape in the checkpoint; `tensor` may have other dimensions of as many elements."""
    scale: torch.Tensor | None = None
    """Of a quantised weight: the scale of each row."""

    def fill(self, value: torch.Tensor) -> None:
        """value: of `shape`, any float dtype; quantised here where the place is."""
        if self.scale is None:
            self.tensor.copy_(value.view(self.tensor.shape))
            return
        kind = next(kind for kind, dtype in QUANTIZED_DTYPES.items() if dtype == self.tensor.dtype)
        for start in range(0, len(value), _ROWS_AT_A_TIME):
            rows = slice(start, start + _ROWS_AT_A_TIME)
            quantized, scale = quantize_weight(value[rows].to(self.tensor.device), kind)
            self.tensor[rows].copy_(quantized)
            self.scale[rows].copy_(scale)


def destinations(config: ModelConfig, weights: Weights) -> dict[str, Place]:
    """The place of each tensor name of a checkpoint."""
    found = {"model.embed_tokens.weight": _whole(weights.embedding), "model.norm.weight": _whole(weights.norm)}
    if weights.lm_head.weight is not weights.embedding:
        found["lm_head.weight"] = _whole(weights.lm_head.weight)
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}."
        places = {**_norms(config, layer), **_attention(config, layer), **_mlp(config, layer)}
        found.update({prefix + name: place for name, place in places.items()})
    return found


def _whole(tensor: torch.Tensor) -> Place:
    return Place(tensor, tuple(tensor.shape))


def _norms(config: ModelConfig, layer: LayerWeights) -> dict[str, Place]:
    # Beside post-norms the name that stands for the norm before the MLP elsewhere is that of the one behind attention.
    pre_mlp = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
    norms = {
        "input_layernorm": layer.input_norm,
        "self_attn.q_norm": layer.q_norm,
        "self_attn.k_norm": layer.k_norm,
        pre_mlp: layer.pre_mlp_norm,
    }
    if config.post_norms:
        norms["post_attention_layernorm"] = layer.post_attention_norm
        norms["post_feedforward_layernorm"] = layer.post_mlp_norm
    return {f"{name}.weight": _whole(norm) for name, norm in norms.items() if norm is not None}


def _attention(config: ModelConfig, layer: LayerWeights) -> dict[str, Place]:
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    if family_of(config.model_type).fused_checkpoint:
        qkv = {"self_attn.qkv_proj": q_width + 2 * kv_width}
    else:
        qkv = {"self_attn.q_proj": q_width, "self_attn.k_proj": kv_width, "self_attn.v_proj": kv_width}
    found = {**_parts(layer.qkv, qkv), **_parts(layer.o, {"self_attn.o_proj": config.hidden_size})}
    if layer.sinks is not None:
        found["self_attn.sinks"] = _whole(layer.sinks)
    return found


def _mlp(config: ModelConfig, layer: LayerWeights) -> dict[str, Place]:
    if layer.moe is not None:
        return _experts(family_of(config.model_type).experts, layer.moe)
    assert layer.gate_up is not None and layer.down is not None
    size = config.intermediate_size
    if family_of(config.model_type).fused_checkpoint:
        gate_up = {"mlp.gate_up_proj": 2 * size}
    else:
        gate_up = {"mlp.gate_proj": size, "mlp.up_proj": size}
    return {**_parts(layer.gate_up, gate_up), **_parts(layer.down, {"mlp.down_proj": config.hidden_size})}


def _experts(names: Experts, moe: MoEWeights) -> dict[str, Place]:
    if names is Experts.GPT_OSS:
        return _stacked_experts(moe)
    mixtral = names is Experts.MIXTRAL
    block = "block_sparse_moe" if mixtral else "mlp"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    found = _parts(moe.router, {f"{block}.gate": moe.router.weight.shape[0]})
    for expert, (gate_up, out) in enumerate(zip(moe.gate_up, moe.down, strict=True)):
        first, second = gate_up.chunk(2)
        parts = {gate: first, up: second, down: out}
        found.update({f"{block}.experts.{expert}.{name}.weight": _whole(part) for name, part in parts.items()})
    return found


def _stacked_experts(moe: MoEWeights) -> dict[str, Place]:
    """All experts in one tensor, inputs before outputs, the rows of gate and up by turns."""
    count, width, hidden = moe.gate_up.shape
    assert moe.gate_up_bias is not None and moe.down_bias is not None
    gate_up = moe.gate_up.view(count, 2, width // 2, hidden).permute(0, 3, 2, 1)
    bias = moe.gate_up_bias.view(count, 2, width // 2).transpose(1, 2)
    found = {
        "mlp.experts.gate_up_proj": Place(gate_up, (count, hidden, width)),
        "mlp.experts.gate_up_proj_bias": Place(bias, (count, width)),
        "mlp.experts.down_proj": _whole(moe.down.transpose(1, 2)),
        "mlp.experts.down_proj_bias": _whole(moe.down_bias),
    }
    return {**found, **_parts(moe.router, {"mlp.router": count})}


def _parts(linear: Linear, sizes: dict[str, int]) -> dict[str, Place]:
    """The output rows of a linear layer, by the names of its parts in the checkpoint."""
    found, start = {}, 0
    for name, size in sizes.items():
        rows = slice(start, start + size)
        weight, scale = linear.weight[rows], None if linear.scale is None else linear.scale[rows]
        found[f"{name}.weight"] = Place(weight, tuple(weight.shape), scale)
        if linear.bias is not None:
            found[f"{name}.bias"] = _whole(linear.bias[rows])
        start += size
    return found
