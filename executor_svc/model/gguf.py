"""GGUF files (llama.cpp): metadata into the fields of a config.json, tensors dequantised under Hugging Face names."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from executor_svc.model.config import ModelConfig, Quantization, parse_config
from executor_svc.model.errors import ModelError
from executor_svc.model.rope import RopeConfig

_ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
}
"""`general.architecture` and the `model_type` it is read as. Mistral's files are of architecture llama."""
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FAMILY_NAMES = {
    "gemma2": {"ffn_norm": "pre_feedforward_layernorm"},
    "gemma3": {"ffn_norm": "pre_feedforward_layernorm"},
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
}
_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, whose attention is scaled by hidden_size / heads instead of the head's width: no field of
the file says so."""
_FACTORS, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that a path means: the file itself, or the only one of a folder without config.json; else None."""
    if path.is_file():
        return path
    found = sorted(path.glob("*.gguf"))
    if not found or (path / "config.json").is_file():
        return None
    if len(found) > 1:
        raise ModelError(f"{path}: {len(found)} GGUF files; name the one that is meant")
    return found[0]


class GGUFModel:
    """An open GGUF file, with its tensors as a checkpoint that `load_weights` reads."""

    def __init__(self, path: Path) -> None:
        """Raises `ModelError` for a file that cannot be read, or of an architecture that is not supported."""
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise ModelError(f"{path}: a GGUF file needs the package gguf") from error
        try:
            reader = GGUFReader(path)
            self._fields = {name: field.contents() for name, field in reader.fields.items()}
            self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        except (OSError, ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
            raise ModelError(f"{path}: not a GGUF file that can be read: {error}") from error
        self.path = path
        self.architecture = str(self._fields.get("general.architecture"))
        if self.architecture not in _ARCHITECTURES:
            raise ModelError(
                f"{path}: general.architecture: {self.architecture!r} is not supported "
                f"(supported: {', '.join(_ARCHITECTURES)})"
            )
        if self.field("split.count", 1) > 1:
            raise ModelError(f"{path}: split.count: one of several parts; join them with llama-gguf-split --merge")
        self._files: dict[str, str] = {}
        for stored in self._tensors:
            if stored in (_FACTORS, _LONG, _SHORT):
                continue
            other = self._files.setdefault(self._name(stored), stored)
            if other != stored:
                raise ModelError(f"{path}: {other} and {stored}: both stand for {self._name(stored)}")

    def field(self, name: str, default: Any = None) -> Any:
        """A metadata field; `{arch}.` in its name stands for the architecture."""
        return self._fields.get(name.replace("{arch}", self.architecture), default)

    def config(
        self, *, dtype: str = "auto", max_model_len: int | None = None, quantization: Quantization = "none"
    ) -> ModelConfig:
        """dtype auto: bfloat16. Raises `ModelError` naming the field, as `read_config` does."""
        config = parse_config(
            self._config_fields(),
            str(self.path),
            dtype="bfloat16" if dtype == "auto" else dtype,
            max_model_len=max_model_len,
            quantization=quantization,
        )
        if _FACTORS not in self._tensors:
            return config
        # Llama 3.1's scaling, worked out when the file was written: what each frequency is divided by.
        factors = self._factors(_FACTORS)
        theta = config.layers[0].rope.theta
        rope = RopeConfig(theta, "longrope", short_factors=factors, long_factors=factors)
        return replace(config, layers=tuple(replace(layer, rope=rope) for layer in config.layers))

    def _config_fields(self) -> dict[str, Any]:
        """What config.json would say."""
        heads, hidden = self._integer("attention.head_count"), self._integer("embedding_length")
        head_dim = self.field("{arch}.attention.key_length") or hidden // heads
        if self.field("{arch}.attention.value_length", head_dim) != head_dim:
            raise ModelError(f"{self.path}: {self.architecture}.attention.value_length: is not that of the keys")
        if self.field("{arch}.expert_count"):
            raise ModelError(f"{self.path}: {self.architecture}.expert_count: experts are not supported in GGUF files")
        raw = {
            "model_type": _ARCHITECTURES[self.architecture],
            "vocab_size": int(self._tensor("token_embd.weight").shape[1]),
            "hidden_size": hidden,
            "intermediate_size": self._integer("feed_forward_length"),
            "num_hidden_layers": self._integer("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._kv_heads(),
            "head_dim": head_dim,
            "max_position_embeddings": self._integer("context_length"),
            "rms_norm_eps": self.field("{arch}.attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            **self._rope_fields(head_dim),
        }
        if self.architecture == "llama":
            raw["attention_bias"] = "blk.0.attn_q.bias" in self._tensors
        window = self.field("{arch}.attention.sliding_window")
        if self.architecture.startswith("gemma"):
            largest = raw["num_hidden_layers"] == _LARGEST_GEMMA[self.architecture]
            raw["query_pre_attn_scalar"] = hidden // heads if largest else head_dim
            raw["attn_logit_softcapping"] = self.field("{arch}.attn_logit_softcapping")
            raw["final_logit_softcapping"] = self.field("{arch}.final_logit_softcapping")
            raw["sliding_window"] = window or None
        elif window and self.architecture != "llama":
            raw["sliding_window"] = window if window < raw["max_position_embeddings"] else None
        elif window:
            raw["sliding_window"] = window
        return raw

    def _rope_fields(self, head_dim: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if (base := self.field("{arch}.rope.freq_base")) is not None:
            found["rope_theta"] = base
        rotary = self.field("{arch}.rope.dimension_count", head_dim)
        if rotary != head_dim:
            found["partial_rotary_factor"] = rotary / head_dim
        original = self.field("{arch}.rope.scaling.original_context_length")
        if _LONG in self._tensors:
            found["original_max_position_embeddings"] = original
            found["rope_scaling"] = {
                "type": "longrope",
                "short_factor": list(self._factors(_SHORT)),
                "long_factor": list(self._factors(_LONG)),
                "attention_factor": self.field("{arch}.rope.scaling.attn_factor"),
            }
            return found
        kind = self.field("{arch}.rope.scaling.type", "none")
        if kind == "none":
            return found
        scaling = {"type": kind, "factor": self.field("{arch}.rope.scaling.factor")}
        if kind == "yarn" and original:
            scaling["original_max_position_embeddings"] = original
        return {**found, "rope_scaling": scaling}

    # What `load_weights` asks of a checkpoint.

    @property
    def names(self) -> list[str]:
        return list(self._files)

    def where(self, name: str) -> str:
        return f"{self.path}: {self._files[name]}"

    def read(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """fp32, as `transformers` would hold it. shape: what is expected. Raises `ModelError`."""
        stored = self._files[name]
        value = self._dequantized(stored)
        if shape is not None and value.shape != shape:
            raise ModelError(f"{self.path}: {stored}: shape {list(value.shape)}, but its fields ask for {list(shape)}")
        if self.architecture == "llama" and ".attn_q." in stored:
            value = _unpermuted(value, self._integer("attention.head_count"))
        elif self.architecture == "llama" and ".attn_k." in stored:
            value = _unpermuted(value, self._kv_heads())
        elif self.architecture.startswith("gemma") and stored.endswith("norm.weight"):
            value = value - 1.0  # stored as 1 + weight
        return torch.from_numpy(np.ascontiguousarray(value))

    def _dequantized(self, stored: str) -> NDArray[np.float32]:
        from gguf.quants import dequantize

        tensor = self._tensor(stored)
        try:
            value: NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise ModelError(f"{self.path}: {stored}: values of type {kind} cannot be dequantised") from error
        # Values that need no work are a view of the file, which torch must not be given: it is read-only.
        value = value if value.flags.writeable else value.copy()
        return value.reshape(tuple(int(n) for n in reversed(tensor.shape)))

    def _factors(self, stored: str) -> tuple[float, ...]:
        return tuple(float(v) for v in self._dequantized(stored))

    def _tensor(self, stored: str) -> Any:
        if stored not in self._tensors:
            raise ModelError(f"{self.path}: weights lack {stored}")
        return self._tensors[stored]

    def _integer(self, name: str) -> int:
        value = self.field(f"{{arch}}.{name}")
        if type(value) is not int:
            raise ModelError(f"{self.path}: {self.architecture}.{name}: expected an integer, got {value!r}")
        return value

    def _kv_heads(self) -> int:
        """As many as heads, where the file does not say."""
        name = "attention.head_count_kv"
        return self._integer(name if self.field(f"{{arch}}.{name}") is not None else "attention.head_count")

    def _name(self, stored: str) -> str:
        """The Hugging Face name of a tensor, or its own where it has none: then it is refused as unknown."""
        base, _, kind = stored.rpartition(".")
        if base in _NAMES:
            return f"{_NAMES[base]}.{kind}"
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)", base)
        names = {**_LAYER_NAMES, **_FAMILY_NAMES.get(self.architecture, {})}
        if match is None or match[2] not in names:
            return stored
        return f"model.layers.{match[1]}.{names[match[2]]}.{kind}"


def _unpermuted(value: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of each head from turns of the two halves, llama.cpp's rotary layout, back to one half after the other."""
    pairs = value.reshape(heads, value.shape[0] // heads // 2, 2, *value.shape[1:])
    return pairs.swapaxes(1, 2).reshape(value.shape)
