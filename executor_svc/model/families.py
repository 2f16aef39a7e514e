"""What sets the families apart: the defaults of their configs and the switches of the one decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any


class AttentionBias(Enum):
    """Which attention projections carry a bias."""

    NEVER = auto()
    QKV = auto()
    CONFIGURED = auto()
    """`attention_bias` says it, for the output projection too."""


class Windows(Enum):
    """Where a family keeps the choice of layers whose attention is windowed."""

    NEVER = auto()
    ALL_LAYERS = auto()
    """Every layer, where `sliding_window` is set."""
    UPPER_LAYERS = auto()
    """`use_sliding_window`; then `layer_types`, or every layer from `max_window_layers` up."""
    PATTERN = auto()
    """`layer_types`, or all but every `sliding_window_pattern`-th layer."""


@dataclass(frozen=True)
class Family:
    """One `model_type`. `defaults` are those of its configuration class in `transformers` 5."""

    model_type: str
    architecture: str
    attention_bias: AttentionBias
    windows: Windows
    defaults: Mapping[str, Any] = field(default_factory=dict)
    mlp_bias: bool = False
    """Whether `mlp_bias` is read."""
    qk_norm: bool = False
    gemma: bool = False
    """Norms multiply by 1 + weight and also stand behind attention and MLP, embeddings are scaled by sqrt(hidden_size),
    attention by query_pre_attn_scalar, logits and scores may be soft-capped, windowed layers have a rotary base of
    their own."""


_COMMON = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
_QWEN = {
    **_COMMON,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

FAMILIES = (
    Family(
        "llama",
        "LlamaForCausalLM",
        AttentionBias.CONFIGURED,
        Windows.NEVER,
        {**_COMMON, "max_position_embeddings": 2048},
        mlp_bias=True,
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        AttentionBias.NEVER,
        Windows.ALL_LAYERS,
        {**_COMMON, "num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
    ),
    Family("qwen2", "Qwen2ForCausalLM", AttentionBias.QKV, Windows.UPPER_LAYERS, _QWEN),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        AttentionBias.CONFIGURED,
        Windows.UPPER_LAYERS,
        {**_QWEN, "head_dim": 128},
        qk_norm=True,
    ),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        AttentionBias.CONFIGURED,
        Windows.PATTERN,
        {
            "rms_norm_eps": 1e-6,
            "hidden_activation": "gelu_pytorch_tanh",
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "tie_word_embeddings": True,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        qk_norm=True,
        gemma=True,
    ),
)
