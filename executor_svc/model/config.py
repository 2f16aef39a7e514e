"""config.json, in the style of `transformers` 4 or 5, read and checked: one frozen record of what the decoder does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from executor_svc.model.errors import ModelError
from executor_svc.model.families import FAMILIES, AttentionBias, Family, Windows
from executor_svc.model.fields import Fields, read_json
from executor_svc.model.rope import RopeConfig, read_rope

Activation = Literal["silu", "gelu_tanh"]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_FULL, _SLIDING = "full_attention", "sliding_attention"

_MUST_BE_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "compression_config": (),
    "partial_rotary_factor": (1, 1.0),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "use_bidirectional_attention": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "position_embedding_type": ("rope",),
    "alibi": (False,),
    "clip_qkv": (),
    "qk_layernorm": (False,),
    "no_rope_layers": ([],),
    "attention_chunk_size": (),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "attention_multiplier": (),
    "logits_scaling": (1, 1.0),
    "logit_scale": (1, 1.0),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "vision_config": (),
    "audio_config": (),
}
"""Fields that ask, in some config, for something the decoder does not do; `null` and these values ask nothing."""

_OF_NO_EFFECT = frozenset(
    (
        "_attn_implementation_autoset",
        "_model_name_or_path",
        "_name_or_path",
        "_sliding_window_pattern",
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "finetuning_task",
        "gradient_checkpointing",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_llama_config",
        "label2id",
        "layer_types",
        "max_window_layers",
        "model_type",
        "name_or_path",
        "original_max_position_embeddings",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "rope_local_base_freq",
        "sliding_window",
        "sliding_window_pattern",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "unk_token_id",
        "use_cache",
        "use_sliding_window",
    )
)
"""Fields that `transformers` writes and that change no number here, or that are read only in some families."""


@dataclass(frozen=True)
class LayerConfig:
    """What differs from layer to layer."""

    window: int
    """A token at position p sees keys p - window + 1 … p; 0: all up to p."""
    rope: RopeConfig


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
    unit_offset_norms: bool = False
    """Norms multiply by 1 + weight."""
    post_norms: bool = False
    """Norms behind attention and MLP, before they join the residual stream."""
    embedding_scale: float = 1.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    ignored_fields: tuple[str, ...] = ()
    """Fields of config.json that are not known here; `transformers` does not read them for this family either."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def dtype_name(self) -> str:
        return next(name for name, dtype in DTYPES.items() if dtype == self.dtype)


def read_config(folder: Path, *, dtype: str = "auto", max_model_len: int | None = None) -> ModelConfig:
    """Read `config.json` of a model folder.

    dtype: float32, float16, bfloat16, or auto: the config's, float32 where it names none.
    max_model_len: at most the model's own; None takes that.
    Raises `ModelError`, naming the field, on anything missing, malformed, or asking for what the decoder does not do.
    """
    path = folder / "config.json"
    raw = read_json(path)
    family = _family(raw, str(path))
    fields = Fields(raw, str(path), family.defaults)
    _refuse(fields, family)
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.optional_integer("num_key_value_heads") or heads
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"{heads} heads do not divide into {kv_heads}")
    hidden_size = fields.integer("hidden_size")
    head_dim = fields.optional_integer("head_dim") or hidden_size // heads
    if head_dim < 2 or head_dim % 2:
        raise fields.error("head_dim", f"must be even and positive, got {head_dim}")
    configured_bias = fields.boolean("attention_bias") and family.attention_bias is AttentionBias.CONFIGURED
    score_size = fields.number("query_pre_attn_scalar", above=0) if family.gemma else head_dim
    config = ModelConfig(
        model_type=family.model_type,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_model_len=_context_length(fields, family, max_model_len),
        dtype=_dtype(fields, dtype),
        layers=_layers(fields, family, fields.integer("num_hidden_layers")),
        rms_norm_eps=fields.number("rms_norm_eps", above=0),
        activation=_activation(fields, family),
        tie_word_embeddings=fields.boolean("tie_word_embeddings"),
        attention_scale=score_size**-0.5,
        qkv_bias=configured_bias or family.attention_bias is AttentionBias.QKV,
        o_bias=configured_bias,
        mlp_bias=fields.boolean("mlp_bias"),
        qk_norm=family.qk_norm,
        unit_offset_norms=family.gemma,
        post_norms=family.gemma,
        embedding_scale=hidden_size**0.5 if family.gemma else 1.0,
        attention_softcap=fields.optional_number("attn_logit_softcapping", above=0) or 0.0,
        logit_softcap=fields.optional_number("final_logit_softcapping", above=0) or 0.0,
        ignored_fields=tuple(sorted(set(raw) - fields.read - _OF_NO_EFFECT)),
    )
    return config


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


def _refuse(fields: Fields, family: Family) -> None:
    """Refuse what asks for something that is not done, for this family or at all."""
    for name, neutral in _MUST_BE_NEUTRAL.items():
        value = fields.get(name)
        if value is not None and not any(value == n and type(value) is type(n) for n in neutral):
            raise fields.error(name, f"{_short(value)} is not supported")
    if fields.boolean("attention_bias") and family.attention_bias is AttentionBias.NEVER:
        raise fields.error("attention_bias", f"{family.architecture} has no attention bias")
    if family.attention_bias is AttentionBias.QKV and fields.raw.get("attention_bias") is False:
        raise fields.error("attention_bias", f"{family.architecture} always has a bias on queries, keys and values")
    if fields.boolean("mlp_bias") and not family.mlp_bias:
        raise fields.error("mlp_bias", f"{family.architecture} has no MLP bias")
    if not family.gemma:
        for name in ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"):
            if fields.get(name) is not None:
                raise fields.error(name, f"{family.architecture} has none")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


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
    return _ACTIVATIONS[first]


def _context_length(fields: Fields, family: Family, wanted: int | None) -> int:
    """The config's length, stretched by the rope scaling where the config gives the length before it (as vLLM does)."""
    length = fields.integer("max_position_embeddings")
    rope = _read_ropes(fields, family)[_FULL]
    if rope.rope_type == "yarn" and not family.gemma:
        length = max(length, int(rope.original_length * rope.factor))
    elif rope.rope_type in ("linear", "dynamic") and not family.gemma:
        length = max(length, int(length * rope.factor))
    if wanted is None:
        return length
    if not 1 <= wanted <= length:
        raise ModelError(f"max_model_len: {wanted} is not between 1 and {length}, the length {fields.where} allows")
    return wanted


def _layers(fields: Fields, family: Family, count: int) -> tuple[LayerConfig, ...]:
    ropes = _read_ropes(fields, family)
    types = _layer_types(fields, family, count)
    window = fields.optional_integer("sliding_window") or 0
    if _SLIDING in types and not window:
        raise fields.error("sliding_window", "is missing, but there are layers of sliding attention")
    return tuple(LayerConfig(window if kind == _SLIDING else 0, ropes[kind]) for kind in types)


def _layer_types(fields: Fields, family: Family, count: int) -> list[str]:
    """`full_attention` or `sliding_attention` for each layer."""
    given = fields.get("layer_types")
    if given is not None:
        if not isinstance(given, list) or len(given) != count:
            raise fields.error("layer_types", f"expected a list of {count}, one for each layer")
        unknown = next((kind for kind in given if kind not in (_FULL, _SLIDING)), None)
        if unknown is not None:
            raise fields.error("layer_types", f"{unknown!r} is not supported (supported: {_FULL}, {_SLIDING})")
    window = fields.optional_integer("sliding_window")
    if family.windows is Windows.PATTERN:
        pattern = fields.integer("sliding_window_pattern")
        return given or [_SLIDING if (layer + 1) % pattern else _FULL for layer in range(count)]
    if family.windows is Windows.UPPER_LAYERS:
        if not fields.boolean("use_sliding_window"):
            window = None
        lowest = fields.integer("max_window_layers", minimum=0) if window else count
        if given and _SLIDING in given and not window:
            raise fields.error("layer_types", f"has {_SLIDING}, but use_sliding_window is false")
        return given or [_SLIDING if layer >= lowest else _FULL for layer in range(count)]
    if family.windows is Windows.NEVER and window and window < fields.integer("max_position_embeddings"):
        raise fields.error("sliding_window", f"{family.architecture} has no sliding window")
    kind = _SLIDING if family.windows is Windows.ALL_LAYERS and window else _FULL
    if given and any(other != kind for other in given):
        raise fields.error("layer_types", f"{family.architecture} would have {kind} in every layer")
    return [kind] * count


def _read_ropes(fields: Fields, family: Family) -> dict[str, RopeConfig]:
    """The rotary embedding of each type of layer."""
    length = fields.integer("max_position_embeddings")
    original = fields.optional_integer("original_max_position_embeddings")
    theta = fields.number("rope_theta", above=0)
    old, new = fields.optional_object("rope_scaling"), fields.optional_object("rope_parameters")
    if old and new:
        raise fields.error("rope_scaling", "stands beside rope_parameters; only one of them may")
    name = "rope_parameters" if new else "rope_scaling"
    where = f"{fields.where}: {name}"
    if not family.gemma:
        rope = read_rope(new or old or {}, where, theta, length, original)
        return {_FULL: rope, _SLIDING: rope}
    local_theta = fields.number("rope_local_base_freq", above=0)
    by_type = new or {_FULL: old or {}}
    for kind, value in by_type.items():
        if kind not in (_FULL, _SLIDING) or not isinstance(value, dict | None):
            raise fields.error(name, f"expected an object with {_FULL} and {_SLIDING}, got {_short(by_type)}")
    return {
        _FULL: read_rope(by_type.get(_FULL) or {}, f"{where}.{_FULL}", theta, length, original),
        _SLIDING: read_rope(by_type.get(_SLIDING) or {}, f"{where}.{_SLIDING}", local_theta, length, original),
    }
