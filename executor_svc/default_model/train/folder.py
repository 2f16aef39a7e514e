"""Write the Hugging Face folder of the embedded model: everything but its model card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from executor_svc.default_model.train.network import NetworkShape
from executor_svc.default_model.train.vocabulary import BEGIN, CHAT_TEMPLATE, END, END_OF_TEXT


def model_config(shape: NetworkShape, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return `config.json`: a `LlamaForCausalLM` in bfloat16 with tied embeddings."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": tokenizer.token_to_id(BEGIN),
        "eos_token_id": [tokenizer.token_to_id(END), tokenizer.token_to_id(END_OF_TEXT)],
    }


def tokenizer_config(shape: NetworkShape) -> dict[str, Any]:
    """Return `tokenizer_config.json`; the chat template has a file of its own beside it."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.max_position_embeddings,
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` as indented JSON with a last newline."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_folder(folder: Path, shape: NetworkShape, tokenizer: Tokenizer, weights: Mapping[str, Tensor]) -> None:
    """Write configuration, tokenizer, chat template and the weights rounded to bfloat16 into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model_config(shape, tokenizer)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {key: config[key] for key in ("bos_token_id", "eos_token_id")})
    write_json(folder / "tokenizer_config.json", tokenizer_config(shape))
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    rounded = {name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    weights_file = folder / "model.safetensors"
    save_file(rounded, weights_file, metadata={"format": "pt"})
    # safetensors makes files that their owner alone may read; a container may run as another user.
    weights_file.chmod(0o644)
