"""Which fields of config.json ask for what the decoder does not do, and which change nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from executor_svc.model.families import AttentionBias, Family
from executor_svc.model.fields import Fields

MUST_BE_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
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
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "lm_head_bias": (False,),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
    "swiglu_alpha": (),
    "swiglu_limit": (),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "n_shared_experts": (0,),
    "shared_expert_intermediate_size": (0,),
    "shared_intermediate_size": (0,),
    "num_nextn_predict_layers": (0,),
    "vision_config": (),
    "audio_config": (),
}
"""Fields that ask, in some config, for something the decoder does not do, or does in some families only (`reads` of
`Family`); `null` and these values ask nothing."""

OF_NO_EFFECT = frozenset(
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
        "embd_pdrop",
        "eos_token_id",
        "finetuning_task",
        "gradient_checkpointing",
        "hidden_dropout",
        "id2label",
        "initial_context_length",
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
        "resid_pdrop",
        "return_dict",
        "rope_local_base_freq",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "sliding_window",
        "sliding_window_pattern",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
        "use_sliding_window",
    )
)
"""Fields that `transformers` writes and that change no number here, or that are read only in some families."""


def refuse(fields: Fields, family: Family) -> None:
    """Refuse what asks for something that is not done, for this family or at all. Raises `ModelError`."""
    for name, neutral in MUST_BE_NEUTRAL.items():
        if name in family.reads:
            continue
        value = fields.get(name)
        if value is not None and not any(value == n and type(value) is type(n) for n in neutral):
            raise fields.error(name, f"{short(value)} is not supported in {family.architecture}")
    for name in ("swiglu_alpha", "swiglu_limit"):
        if name in family.reads and fields.number(name) != family.defaults[name]:
            raise fields.error(name, f"only {family.defaults[name]} is supported")
    if fields.boolean("attention_bias") and family.attention_bias is AttentionBias.NEVER:
        raise fields.error("attention_bias", f"{family.architecture} has no attention bias")
    if family.attention_bias is AttentionBias.QKV and fields.raw.get("attention_bias") is False:
        raise fields.error("attention_bias", f"{family.architecture} always has a bias on queries, keys and values")
    if fields.boolean("mlp_bias") and not family.mlp_bias:
        raise fields.error("mlp_bias", f"{family.architecture} has no MLP bias")


def short(value: Any) -> str:
    """At most 60 characters of a value's text."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
