"""config.json, in the style of `transformers` 4 or 5, read and checked: one frozen record of what the decoder does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from executor_svc.model.config_checks import OF_NO_EFFECT, refuse
from executor_svc.model.errors import ModelError
from executor_svc.model.families import FAMILIES, AttentionBias, Experts, Family, QKNorm
from executor_svc.model.fields import Fields, read_json
from executor_svc.model.layer_config import FULL, LayerConfig, read_layers, read_ropes

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
"""Of the gate; `clamped_swiglu`: of gate and up, as `kernels.moe_mlp` says, in sparse layers only."""

Quantization = Literal["none", "int8", "fp8"]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True)
class ModelConfig:
    """Everything the decoder is built from."""

    model_type: str
    vocab_size: int
    """Rows of the embedding."""
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    """Tokens of prompt and output together."""
    dtype: torch.dtype
    layers: tuple[LayerConfig, ...]
    rms_norm_eps: float
    activation: Activation
    tie_word_embeddings: bool
    attention_scale: float
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normed before they are rotated."""
    wide_qk_norm: bool = False
    """That norm goes over all heads at once, not over each (OLMo 2)."""
    unit_offset_norms: bool = False
    """Norms multiply by 1 + weight."""
    pre_norms: bool = True
    """Norms before attention and MLP; without them both read the residual stream as it is (OLMo 2)."""
    post_norms: bool = False
    """Norms behind attention and MLP, before they join the residual stream."""
    embedding_scale: float = 1.0
    """Multiplies embeddings; where the family rounds it to the model's dtype (Gemma), it is rounded here."""
    residual_scale: float = 1.0
    """Multiplies the output of attention and of MLP before it joins the residual stream (Granite)."""
    logit_divisor: float = 1.0
    """Divides the logits (Granite)."""
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    num_experts: int = 0
    """Of each sparse layer; 0: there are none."""
    experts_per_token: int = 0
    expert_size: int = 0
    """Intermediate size of one expert."""
    renormalize_experts: bool = True
    """The weights of the chosen experts are divided by their sum."""
    moe_bias: bool = False
    """Router and experts carry biases (GPT-OSS)."""
    attention_sinks: bool = False
    """Each head has a key without a value, whose score is learned (GPT-OSS)."""
    quantization: Quantization = "none"
    """Of the decoder's linear layers (not of embedding, output layer, norms): eight bits, a scale each output row."""
    ignored_fields: tuple[str, ...] = ()
    """Fields of config.json that are not known here; `transformers` does not read them for this family either."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def dtype_name(self) -> str:
        return next(name for name, dtype in DTYPES.items() if dtype == self.dtype)

    @property
    def precision(self) -> str:
        """The dtype's name and, where weights are quantised, how."""
        return self.dtype_name if self.quantization == "none" else f"{self.dtype_name} {self.quantization}"


def read_config(
    folder: Path, *, dtype: str = "auto", max_model_len: int | None = None, quantization: Quantization = "none"
) -> ModelConfig:
    """Read `config.json` of a model folder.

    dtype: float32, float16, bfloat16, or auto: the config's, float32 where it names none.
    max_model_len: at most the model's own; None takes that.
    quantization: what the weights become as they are loaded.
    Raises `ModelError`, naming the field, on anything missing, malformed, or asking for what the decoder does not do.
    """
    path = folder / "config.json"
    return parse_config(read_json(path), str(path), dtype=dtype, max_model_len=max_model_len, quantization=quantization)


def parse_config(
    raw: Mapping[str, Any],
    where: str,
    *,
    dtype: str = "auto",
    max_model_len: int | None = None,
    quantization: Quantization = "none",
) -> ModelConfig:
    """The same of fields that are read already. where: what errors call their place."""
    family = _family(raw, where)
    fields = Fields(raw, where, family.defaults)
    refuse(fields, family)
    if quantization != "none" and family.experts is not Experts.NONE:
        raise ModelError(f"quantization: {quantization} is not supported for the experts of {family.architecture}")
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.optional_integer("num_key_value_heads") or heads
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"{heads} heads do not divide into {kv_heads}")
    hidden_size = fields.integer("hidden_size")
    head_dim = fields.optional_integer("head_dim") or hidden_size // heads
    if head_dim < 2 or head_dim % 2:
        raise fields.error("head_dim", f"must be even and positive, got {head_dim}")
    configured_bias = fields.boolean("attention_bias") and family.attention_bias is AttentionBias.CONFIGURED
    torch_dtype = _dtype(fields, dtype)
    return ModelConfig(
        model_type=family.model_type,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_model_len=_context_length(fields, family, head_dim, max_model_len),
        dtype=torch_dtype,
        layers=read_layers(fields, family, fields.integer("num_hidden_layers"), head_dim),
        rms_norm_eps=fields.number("rms_norm_eps", above=0),
        activation=_activation(fields, family),
        tie_word_embeddings=fields.boolean("tie_word_embeddings"),
        qkv_bias=configured_bias or family.attention_bias is AttentionBias.QKV,
        o_bias=configured_bias,
        mlp_bias=fields.boolean("mlp_bias"),
        qk_norm=family.qk_norm is not QKNorm.NONE,
        wide_qk_norm=family.qk_norm is QKNorm.WIDTH,
        unit_offset_norms=family.gemma,
        pre_norms=family.pre_norms,
        post_norms=family.post_norms,
        attention_sinks=family.sinks,
        attention_softcap=fields.optional_number("attn_logit_softcapping", above=0) or 0.0,
        logit_softcap=fields.optional_number("final_logit_softcapping", above=0) or 0.0,
        **_scales(fields, family, hidden_size, head_dim, torch_dtype),
        **_experts(fields, family),
        quantization=quantization,
        ignored_fields=tuple(sorted(set(raw) - fields.read - OF_NO_EFFECT)),
    )


def _family(raw: Mapping[str, Any], where: str) -> Family:
    architectures, model_type = raw.get("architectures"), raw.get("model_type")
    supported = ", ".join(f.architecture for f in FAMILIES)
    if architectures:
        if not isinstance(architectures, list) or len(architectures) != 1:
            raise ModelError(f"{where}: architectures: expected a list of one name, got {architectures!r}")
        found = [f for f in FAMILIES if f.architecture == architectures[0]]
        if not found:
            raise ModelError(f"{where}: architectures: {architectures[0]!r} is not supported (supported: {supported})")
        if model_type not in (None, found[0].model_type):
            raise ModelError(f"{where}: model_type: {model_type!r} does not go with {architectures[0]}")
        return found[0]
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    raise ModelError(f"{where}: model_type: {model_type!r} is not supported (supported: {supported})")


def _dtype(fields: Fields, wanted: str) -> torch.dtype:
    if wanted != "auto":
        if wanted not in DTYPES:
            raise ModelError(f"dtype: {wanted!r} is not one of auto, {', '.join(DTYPES)}")
        return DTYPES[wanted]
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    value = (fields.optional_text(name) or "float32").removeprefix("torch.")
    if value not in DTYPES:
        raise fields.error(name, f"{value!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[value]


def _scales(fields: Fields, family: Family, hidden_size: int, head_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """The constant factors of a family."""
    if family.gemma:
        return {
            "attention_scale": fields.number("query_pre_attn_scalar", above=0) ** -0.5,
            "embedding_scale": float(torch.tensor(hidden_size**0.5).to(dtype).item()),
        }
    if "attention_multiplier" not in family.reads:
        return {"attention_scale": head_dim**-0.5}
    return {
        "attention_scale": fields.number("attention_multiplier", above=0),
        "embedding_scale": fields.number("embedding_multiplier"),
        "residual_scale": fields.number("residual_multiplier"),
        "logit_divisor": fields.number("logits_scaling", above=0),
    }


def _experts(fields: Fields, family: Family) -> dict[str, Any]:
    """Number and size of the experts of sparse layers."""
    if family.experts is Experts.NONE:
        return {}
    given = [name for name in ("num_experts", "num_local_experts") if fields.given(name)]
    if len({fields.get(name) for name in given}) > 1:
        raise fields.error(given[0], f"contradicts {given[1]}")
    name = given[0] if given else next(n for n in ("num_experts", "num_local_experts") if fields.get(n) is not None)
    count, chosen = fields.integer(name), fields.integer("num_experts_per_tok")
    if chosen > count:
        raise fields.error("num_experts_per_tok", f"{chosen} of {count} experts cannot be chosen")
    qwen = family.experts is Experts.QWEN
    return {
        "num_experts": count,
        "experts_per_token": chosen,
        "expert_size": fields.integer("moe_intermediate_size" if qwen else "intermediate_size"),
        "renormalize_experts": fields.boolean("norm_topk_prob") if qwen else True,
        "moe_bias": family.experts is Experts.GPT_OSS,
    }


def _activation(fields: Fields, family: Family) -> Activation:
    names = ("hidden_activation", "hidden_act") if family.gemma else ("hidden_act", "hidden_activation")
    for name in names:
        value = fields.optional_text(name)
        if value is not None and value not in _ACTIVATIONS:
            raise fields.error(name, f"{value!r} is not supported (supported: {', '.join(_ACTIVATIONS)})")
    first, second = fields.optional_text(names[0]), fields.optional_text(names[1])
    if first is None:
        raise fields.error(names[0], "is missing")
    if second is not None and _ACTIVATIONS[second] != _ACTIVATIONS[first]:
        raise fields.error(names[1], f"{second!r} contradicts {names[0]} {first!r}")
    if family.experts is Experts.GPT_OSS:
        return "clamped_swiglu"  # built upon silu, which is what its config says
    return _ACTIVATIONS[first]


def _context_length(fields: Fields, family: Family, head_dim: int, wanted: int | None) -> int:
    """The config's length, stretched by the rope scaling where the config gives the length before it (as vLLM does)."""
    length = fields.integer("max_position_embeddings")
    rope = read_ropes(fields, family, head_dim)[FULL]
    if rope.rope_type == "yarn" and not family.local_rope:
        length = max(length, int(rope.original_length * rope.factor))
    elif rope.rope_type in ("linear", "dynamic") and not family.local_rope:
        length = max(length, int(length * rope.factor))
    if wanted is None:
        return length
    if not 1 <= wanted <= length:
        raise ModelError(f"max_model_len: {wanted} is not between 1 and {length}, the length {fields.where} allows")
    return wanted
