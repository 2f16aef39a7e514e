"""config.json: both styles, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from executor_svc.model.config import ModelConfig, read_config
from executor_svc.model.errors import ModelError

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "vocab_size": 512,
    "max_position_embeddings": 1000,
}


def read(
    folder: Path, model_type: str, *, remove: str = "", max_model_len: int | None = None, **fields: Any
) -> ModelConfig:
    content = {**SIZES, "model_type": model_type, **fields}
    content.pop(remove, None)
    (folder / "config.json").write_text(json.dumps(content))
    return read_config(folder, max_model_len=max_model_len)


@pytest.mark.parametrize(
    ("model_type", "fields", "named"),
    [
        ("gpt2", {}, "model_type: 'gpt2'"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ("llama", {"architectures": ["LlamaModel"]}, "architectures"),
        ("llama", {"architectures": ["MistralForCausalLM"]}, "model_type"),
        ("gemma3", {"architectures": ["Gemma3ForConditionalGeneration"]}, "architectures"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ("gemma3_text", {"hidden_activation": "relu"}, "hidden_activation"),
        ("gemma3_text", {"hidden_act": "silu"}, "hidden_act: 'silu' contradicts"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ("mistral", {"attention_bias": True}, "attention_bias"),
        ("qwen2", {"attention_bias": False}, "attention_bias"),
        ("qwen2", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ("qwen3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("llama", {"query_pre_attn_scalar": 64}, "query_pre_attn_scalar"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved"),
        ("llama", {"rope_scaling": {"type": "longrope"}}, "rope_scaling: rope_type"),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 1.0}},
            "rope_scaling",
        ),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default", "rope_theta": 10.0}}, "rope_parameters"),
        ("llama", {"num_local_experts": 8}, "num_local_experts"),
        ("llama", {"embedding_multiplier": 12.0}, "embedding_multiplier"),
        ("llama", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ("qwen3", {"layer_types": ["linear_attention"] * 4}, "layer_types: 'linear_attention'"),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types"),
        ("gemma3_text", {"sliding_window": None}, "sliding_window"),
        ("gemma2", {"sliding_window_pattern": 6}, "sliding_window_pattern"),
        ("gemma2", {"embedding_multiplier": 2.0}, "embedding_multiplier"),
        ("phi3", {"attention_bias": True}, "attention_bias"),
        ("phi3", {"lm_head_bias": True}, "lm_head_bias"),
        ("phi3", {"partial_rotary_factor": 0.01}, "partial_rotary_factor"),
        ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ("phi3", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling: rope_type: 'yarn'"),
        (
            "phi3",
            {"rope_scaling": {"type": "su", "short_factor": [1.0, 2.0]}},
            "rope_scaling: short_factor: expected 1 ",
        ),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "rope_scaling: long_factor"),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_mscale": 1.1}}, "rope_scaling: short_mscale"),
        ("olmo2", {"sliding_window": 8}, "sliding_window"),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv"),
        ("granite", {"attention_multiplier": 0}, "attention_multiplier"),
        ("granite", {"logits_scaling": None}, "logits_scaling"),
        ("granite", {"shared_intermediate_size": 64}, "shared_intermediate_size"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ("mixtral", {"num_local_experts": 4, "num_experts": 8}, "num_experts: contradicts num_local_experts"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts"),
        ("qwen3_moe", {"mlp_only_layers": [0.5]}, "mlp_only_layers"),
        ("qwen3_moe", {"mlp_only_layers": [99]}, "mlp_only_layers"),
        ("qwen3_moe", {"mlp_only_layers": {}}, "mlp_only_layers"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("qwen3_moe", {"n_shared_experts": 1}, "n_shared_experts"),
        ("qwen3_moe", {"use_sliding_window": True, "max_window_layers": 2}, "max_window_layers"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit: only 7.0"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
        ("mixtral", {"swiglu_limit": 7.0}, "swiglu_limit"),
        ("llama", {"torch_dtype": "float64"}, "torch_dtype: 'float64'"),
        ("llama", {"dtype": "int8"}, "dtype: 'int8'"),
        ("llama", {"num_key_value_heads": 5}, "num_key_value_heads"),
        ("llama", {"head_dim": 15}, "head_dim"),
        ("llama", {"hidden_size": "64"}, "hidden_size"),
        ("llama", {"hidden_size": True}, "hidden_size"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers"),
        ("llama", {"rms_norm_eps": None}, "rms_norm_eps"),
        ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ("llama", {"rope_theta": float("inf")}, "rope_theta"),
    ],
)
def test_refused_by_name(model_type: str, fields: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: {named}") as caught:
        read(tmp_path, model_type, **fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field", [name for name in SIZES if name != "max_position_embeddings"])
def test_sizes_must_be_given(field: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"{field}: is missing"):
        read(tmp_path, "llama", remove=field)


def test_neutral_values_and_strangers_are_accepted(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        "llama",
        quantization_config=None,
        rope_interleaved=False,
        partial_rotary_factor=1.0,
        is_llama_config=True,
        auto_map={"AutoModelForCausalLM": "modeling_evil.Model"},
        mystery=3,
    )
    assert config.ignored_fields == ("mystery",)


def test_both_styles_say_the_same(tmp_path: Path) -> None:
    linear = {"factor": 2.0}
    old = read(tmp_path, "llama", rope_theta=5e5, rope_scaling={"type": "linear", **linear}, torch_dtype="bfloat16")
    new = read(
        tmp_path, "llama", rope_parameters={"rope_type": "linear", "rope_theta": 5e5, **linear}, dtype="bfloat16"
    )
    assert old == new
    assert new.dtype == torch.bfloat16
    assert new.layers[0].rope.theta == 5e5
    windows = ["sliding_attention", "full_attention"] * 2
    old = read(
        tmp_path, "gemma3_text", sliding_window=9, sliding_window_pattern=2, rope_theta=7e5, rope_local_base_freq=50.0
    )
    new = read(
        tmp_path,
        "gemma3_text",
        sliding_window=9,
        layer_types=windows,
        _sliding_window_pattern=2,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 7e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    )
    assert old == new
    assert [layer.window for layer in new.layers] == [9, 0, 9, 0]
    assert [layer.rope.theta for layer in new.layers] == [50.0, 7e5, 50.0, 7e5]


def test_absent_fields_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    assert [layer.window for layer in read(tmp_path, "mistral").layers] == [4096] * 4
    assert [layer.window for layer in read(tmp_path, "mistral", sliding_window=None).layers] == [0] * 4
    gemma = read(tmp_path, "gemma3_text")
    assert (gemma.head_dim, gemma.tie_word_embeddings, gemma.attention_scale) == (256, True, 1 / 16)
    assert {layer.rope.theta for layer in gemma.layers} == {10_000.0}  # fewer layers than the pattern is long
    assert read(tmp_path, "llama").num_kv_heads == 32
    assert read(tmp_path, "mistral").num_kv_heads == 8
    assert read(tmp_path, "qwen2").qkv_bias
    assert read(tmp_path, "qwen3").head_dim == 128
    assert read(tmp_path, "llama", remove="max_position_embeddings").max_model_len == 2048
    gemma = read(tmp_path, "gemma2")
    assert (gemma.attention_softcap, gemma.logit_softcap, gemma.attention_scale) == (50.0, 30.0, 1 / 16)
    assert [layer.window for layer in gemma.layers] == [4096, 0, 4096, 0]
    assert read(tmp_path, "granite").attention_scale == 1.0
    mixtral, qwen = read(tmp_path, "mixtral"), read(tmp_path, "qwen3_moe")
    assert (mixtral.num_experts, mixtral.experts_per_token, mixtral.renormalize_experts) == (8, 2, True)
    assert (qwen.num_experts, qwen.experts_per_token, qwen.renormalize_experts) == (128, 8, False)
    assert (mixtral.expert_size, qwen.expert_size) == (96, 768)
    assert {layer.window for layer in (*mixtral.layers, *qwen.layers)} == {0}


def test_sparse_layers(tmp_path: Path) -> None:
    def sparse(**fields: Any) -> list[bool]:
        return [layer.sparse for layer in read(tmp_path, "qwen3_moe", **fields).layers]

    assert sparse() == [True] * 4
    assert sparse(decoder_sparse_step=2) == [False, True, False, True]
    assert sparse(decoder_sparse_step=2, mlp_only_layers=[3]) == [False, True, False, False]


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        (None, 1000),
        ({"rope_type": "linear", "factor": 2.0}, 2000),
        ({"rope_type": "dynamic", "factor": 2.0}, 2000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 250}, 1000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 800}, 3200),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 125,
            },
            1000,
        ),
    ],
)
def test_context_length(rope: dict[str, Any] | None, length: int, tmp_path: Path) -> None:
    assert read(tmp_path, "llama", rope_scaling=rope).max_model_len == length
    assert read(tmp_path, "llama", rope_scaling=rope, max_model_len=77).max_model_len == 77
    for wrong in (0, length + 1):
        with pytest.raises(ModelError, match=f"max_model_len: {wrong} is not between 1 and {length}"):
            read(tmp_path, "llama", rope_scaling=rope, max_model_len=wrong)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: .*No such file"):
        read_config(tmp_path)
    for content in ("{", "[]", '"text"', "\x00"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ModelError, match=r"config\.json"):
            read_config(tmp_path)


def test_unknown_dtype(tmp_path: Path) -> None:
    read(tmp_path, "llama")
    with pytest.raises(ModelError, match="dtype: 'int4'"):
        read_config(tmp_path, dtype="int4")
