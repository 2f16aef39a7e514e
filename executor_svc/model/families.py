"""What sets the families apart: defaults of their configs, switches of the one decoder, names of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from executor_svc.model.rope import PLAIN_TYPES
from kernels.gated_activation import SWIGLU_ALPHA, SWIGLU_LIMIT


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
    SWITCHED = auto()
    """Every layer, where `use_sliding_window` is true."""
    UPPER_LAYERS = auto()
    """`use_sliding_window`; then `layer_types`, or every layer from `max_window_layers` up."""
    PATTERN = auto()
    """`layer_types`, or all but every `sliding_window_pattern`-th layer."""


class QKNorm(Enum):
    """Whether queries and keys are normed before they are rotated."""

    NONE = auto()
    HEADS = auto()
    """Each head by itself."""
    WIDTH = auto()
    """All heads of the queries together, and all of the keys."""


class Experts(Enum):
    """How a checkpoint names and lays out the experts of a sparse layer."""

    NONE = auto()
    MIXTRAL = auto()
    """`block_sparse_moe.experts.N.w1` (gate), `w3` (up) and `w2` (down)."""
    QWEN = auto()
    """`mlp.experts.N.gate_proj`, `up_proj` and `down_proj`."""
    GPT_OSS = auto()
    """All experts in one tensor, transposed, gate and up rows by turns; router and experts carry biases."""


@dataclass(frozen=True)
class Family:
    """One `model_type`. `defaults` are those of its configuration class in `transformers` 5."""

    model_type: str
    architecture: str
    attention_bias: AttentionBias
    windows: Windows
    defaults: Mapping[str, Any] = field(default_factory=dict)
    reads: frozenset[str] = frozenset()
    """Fields that this family honours and that are refused in the others."""
    mlp_bias: bool = False
    """Whether `mlp_bias` is read."""
    qk_norm: QKNorm = QKNorm.NONE
    pre_norms: bool = True
    post_norms: bool = False
    gemma: bool = False
    """Norms multiply by 1 + weight, embeddings are scaled by sqrt(hidden_size), attention by query_pre_attn_scalar, and
    `hidden_activation` goes before `hidden_act`."""
    local_rope: bool = False
    """Windowed layers have a rotary base of their own; max_position_embeddings counts the scaling in already."""
    rope_types: frozenset[str] = PLAIN_TYPES
    fused_checkpoint: bool = False
    """Files hold `qkv_proj` and `gate_up_proj`, not their parts."""
    sinks: bool = False
    """Attention has a learned sink for each head."""
    experts: Experts = Experts.NONE


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
_GEMMA = {
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GEMMA_READS = frozenset(("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"))

_DENSE = (
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
        qk_norm=QKNorm.HEADS,
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        AttentionBias.CONFIGURED,
        Windows.PATTERN,
        {
            **_GEMMA,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window_pattern": 2,
            "rope_theta": 10_000.0,
        },
        reads=_GEMMA_READS,
        post_norms=True,
        gemma=True,
    ),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        AttentionBias.CONFIGURED,
        Windows.PATTERN,
        {
            **_GEMMA,
            "max_position_embeddings": 131_072,
            "sliding_window_pattern": 6,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        reads=_GEMMA_READS,
        qk_norm=QKNorm.HEADS,
        post_norms=True,
        gemma=True,
        local_rope=True,
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        AttentionBias.NEVER,
        Windows.ALL_LAYERS,
        {
            **_COMMON,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
        },
        reads=frozenset(("partial_rotary_factor",)),
        rope_types=frozenset(("default", "longrope")),
        fused_checkpoint=True,
    ),
    Family(
        "olmo2",
        "Olmo2ForCausalLM",
        AttentionBias.CONFIGURED,
        Windows.NEVER,
        {**_COMMON, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
        qk_norm=QKNorm.WIDTH,
        pre_norms=False,
        post_norms=True,
    ),
    Family(
        "granite",
        "GraniteForCausalLM",
        AttentionBias.CONFIGURED,
        Windows.NEVER,
        {
            **_COMMON,
            "max_position_embeddings": 2048,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
        reads=frozenset(("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")),
        mlp_bias=True,
    ),
)
_SPARSE = (
    Family(
        "mixtral",
        "MixtralForCausalLM",
        AttentionBias.NEVER,
        Windows.ALL_LAYERS,
        {
            **_COMMON,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        reads=frozenset(("num_experts", "num_local_experts")),
        experts=Experts.MIXTRAL,
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        AttentionBias.CONFIGURED,
        Windows.SWITCHED,
        {
            **_COMMON,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "decoder_sparse_step": 1,
            "norm_topk_prob": False,
        },
        reads=frozenset(
            (
                "num_experts",
                "num_local_experts",
                "moe_intermediate_size",
                "decoder_sparse_step",
                "mlp_only_layers",
                "norm_topk_prob",
            )
        ),
        qk_norm=QKNorm.HEADS,
        experts=Experts.QWEN,
    ),
)

_GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    AttentionBias.CONFIGURED,
    Windows.PATTERN,
    {
        **_COMMON,
        "rms_norm_eps": 1e-5,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "rope_theta": 150_000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "swiglu_alpha": SWIGLU_ALPHA,
        "swiglu_limit": SWIGLU_LIMIT,
    },
    reads=frozenset(("num_experts", "num_local_experts", "swiglu_alpha", "swiglu_limit")),
    sinks=True,
    experts=Experts.GPT_OSS,
)

FAMILIES = (*_DENSE, *_SPARSE, _GPT_OSS)


def family_of(model_type: str) -> Family:
    """The family of that `model_type`. Raises `LookupError`."""
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    raise LookupError(model_type)
