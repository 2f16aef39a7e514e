"""Tiny random models of each family, made with `transformers`, as Hugging Face folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

torch.set_num_threads(1)  # threads that wait for each other cost more than these sizes gain

VOCAB_SIZE = 512
EOS_ID = 2

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": EOS_ID,
    "pad_token_id": 0,
}

# Seeds whose greedy texts vary and never hang on a difference that rounding could turn.
SEEDS = {"llama": 0, "smollm": 1, "mistral": 2, "qwen2": 0, "qwen3": 1, "gemma3": 2, "gemma2": 0, "phi3": 0,
         "olmo2": 0, "granite": 0, "mixtral": 0, "qwen3_moe": 0, "gpt_oss": 0}  # fmt: skip

FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "smollm": (LlamaConfig, LlamaForCausalLM, {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48,
                                              "tie_word_embeddings": True, "rope_theta": 100_000.0}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 50, "head_dim": 24}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"num_key_value_heads": 1}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32, "rope_theta": 1_000_000.0}),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, {
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 40,
        "sliding_window_pattern": 2, "query_pre_attn_scalar": 192, "hidden_activation": "gelu_pytorch_tanh",
    }),
}  # fmt: skip
"""For each name: configuration class, model class, and what is not in `_SIZES`."""

MORE_FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "sliding_window": 40,
        "query_pre_attn_scalar": 24, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0,
    }),
    "phi3": (Phi3Config, Phi3ForCausalLM, {
        "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 50,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75},
    }),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, {"rope_theta": 500_000.0}),
    "granite": (GraniteConfig, GraniteForCausalLM, {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.2, "logits_scaling": 2.5,
    }),
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 5, "intermediate_size": 48}),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, {
        "head_dim": 32, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
        "num_hidden_layers": 3, "mlp_only_layers": [1],
    }),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM, {
        "head_dim": 16, "sliding_window": 40, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 48,
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                            "original_max_position_embeddings": 128, "rope_theta": 150_000.0},
    }),
}  # fmt: skip
"""The same, of families that share most of their code paths with those above; compared over fewer ways."""


def make_model(family: str, **changes: Any) -> PreTrainedModel:
    """A random fp32 model on the CPU whose greedy texts vary.

    Matrices are drawn with a spread of 1.5 / sqrt(inputs) and embeddings small, so that attention is not flat and the
    layers outweigh the last token's embedding; norms and biases are drawn as well, so that a forgotten one shows.
    """
    config_class, model_class, own = {**FAMILIES, **MORE_FAMILIES}[family]
    config = config_class(**{**_SIZES, **own, **changes})
    config._attn_implementation = "eager"
    torch.manual_seed(SEEDS[family])
    model = model_class(config).eval()
    model.generation_config.eos_token_id = None  # every text is as long as asked for
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name:
                parameter.normal_(0, 0.3)
            elif name.endswith("sinks"):
                parameter.normal_(0, 1.0)
            elif parameter.ndim == 1:
                mean = 1.0 if "q_norm" in name else 0.0  # sharper attention
                parameter.copy_(torch.randn_like(parameter) * 0.2 + mean + (0.0 if family.startswith("gemma") else 1.0))
            elif "embed_tokens" in name:
                parameter.normal_(0, 0.1 if not config.tie_word_embeddings else 0.03)
            else:
                parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
    return model


def save_model(model: PreTrainedModel, folder: Path, *, tokenizer: bool = True, **save: Any) -> Path:
    """Write a model and a byte-level tokenizer to `folder`; returns it. `save` goes to `save_pretrained`."""
    model.save_pretrained(folder, **save)
    if tokenizer:
        write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer without merges: ids 0-3 are special, then come the 256 bytes."""
    specials = ["<pad>", "<s>", "</s>", "<unk>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: index for index, piece in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def edit_json(path: Path, changes: Mapping[str, Any], remove: tuple[str, ...] = ()) -> None:
    """Change fields of a JSON file in place."""
    content = json.loads(path.read_text())
    for name in remove:
        content.pop(name, None)
    content.update(changes)
    path.write_text(json.dumps(content))
