"""GGUF files: the model and the tokenizer of the safetensors twin, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer, pre_tokenizers
from transformers import PreTrainedModel

from executor_svc.model import ModelError, load_model
from tests.executor.paged_driver import prompt_logits
from tests.executor.tiny_models import VOCAB_SIZE, make_model, save_model

TOKENS = torch.randint(4, 260, (70,), generator=torch.Generator().manual_seed(9)).tolist()
Q8_0 = gguf.GGMLQuantizationType.Q8_0
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "smollm": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
}
CHANGES: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32, "head_dim": 32, "sliding_window_pattern": 6, "num_hidden_layers": 6},
    "phi3": {"sliding_window": None},
}
"""What a GGUF file cannot say otherwise."""


def write_gguf(
    path: Path,
    family: str,
    model: PreTrainedModel,
    fields: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> None:
    """As llama.cpp's converter lays a model out: its names, rotary rows of Llama by turns, norms of Gemma plus 1.

    fields, tensors: more of them, or others in place of what stands there (None: none). Two-dimensional weights of the
    MLP are stored as Q8_0 where `fields` has `general.file_type`.
    """
    fields, more = fields or {}, tensors or {}
    config, arch = model.config, ARCHITECTURES[family]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if family.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    write_byte_tokenizer(writer)
    for name, field in fields.items():
        writer.kv_data[0].pop(name, None)
        if field is not None:
            writer.add_key_value(name, field, gguf.GGUFValueType.get_type(field))
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        base, _, kind = name.rpartition(".")
        value = parameter.detach().numpy()
        if arch is gguf.MODEL_ARCH.LLAMA and base.endswith(("q_proj", "k_proj")):
            value = value.reshape(-1, 2, head_dim // 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        if family.startswith("gemma") and base.endswith("norm"):
            value = value + 1
        value = np.ascontiguousarray(value)
        if ".mlp." in name and "general.file_type" in fields:
            writer.add_tensor(f"{names.get_name(base)}.{kind}", quantize(value, Q8_0), raw_dtype=Q8_0)
        else:
            writer.add_tensor(f"{names.get_name(base)}.{kind}", value)
    for name, value in more.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_byte_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Four special tokens and the 256 bytes, padded to the vocabulary; one merge."""
    tokens = ["<pad>", "<s>", "</s>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he"]
    tokens += [f"[{index}]" for index in range(len(tokens), VOCAB_SIZE)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 4 + [1] * (VOCAB_SIZE - 4))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_logits_equal_those_of_the_safetensors_twin(family: str, tmp_path: Path) -> None:
    model = make_model(family, **CHANGES.get(family, {}))
    twin = load_model(str(save_model(model, tmp_path / "twin"))).decoder
    write_gguf(tmp_path / "model.gguf", family, model)
    loaded = load_model(str(tmp_path / "model.gguf"), dtype="float32").decoder
    assert loaded.config.layers == twin.config.layers
    with torch.inference_mode():
        reference = model(torch.tensor([TOKENS])).logits[0]
    for decoder in (twin, loaded):
        assert float((prompt_logits(decoder, TOKENS) - reference).abs().max()) < 1e-4


def assert_equals(path: Path, model: PreTrainedModel, **options: Any) -> None:
    with torch.inference_mode():
        reference = model(torch.tensor([TOKENS])).logits[0]
    logits = prompt_logits(load_model(str(path), dtype="float32", **options).decoder, TOKENS)
    assert float((logits - reference).abs().max()) < 1e-4


def test_rotary_factors_of_llama_3(tmp_path: Path) -> None:
    """They stand in a tensor, worked out when the file was written."""
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500.0}
    model = make_model("llama", rope_parameters={**rope, "original_max_position_embeddings": 32})
    plain = 1.0 / 500.0 ** (torch.arange(0, 16, 2) / 16)
    factors = (plain / model.model.rotary_emb.inv_freq).numpy()
    assert factors.max() > 2
    write_gguf(tmp_path / "model.gguf", "llama", model, tensors={"rope_freqs.weight": factors})
    assert_equals(tmp_path, model)


def test_longrope_of_phi_3(tmp_path: Path) -> None:
    short, long = [1.0 + 0.1 * n for n in range(12)], [1.5 + 0.5 * n for n in range(12)]
    rope = {"rope_type": "longrope", "rope_theta": 500.0, "partial_rotary_factor": 0.75}
    lengths = {"max_position_embeddings": 128, "original_max_position_embeddings": 32}
    factors = {"short_factor": short, "long_factor": long}
    model = make_model("phi3", rope_parameters={**rope, **factors}, sliding_window=None, **lengths)
    fields = {"phi3.rope.scaling.original_context_length": 32}
    tensors = {f"rope_factors_{name.removesuffix('_factor')}.weight": np.float32(f) for name, f in factors.items()}
    write_gguf(tmp_path / "model.gguf", "phi3", model, fields, tensors)
    assert_equals(tmp_path, model)


def test_as_many_kv_heads_as_heads_where_the_file_says_nothing(tmp_path: Path) -> None:
    model = make_model("llama", num_key_value_heads=4)
    assert model.config.num_attention_heads == 4
    write_gguf(tmp_path / "model.gguf", "llama", model, {"llama.attention.head_count_kv": None})
    assert_equals(tmp_path, model)


def test_two_tensors_of_one_name(tmp_path: Path) -> None:
    extra = {"blk.0.post_attention_norm.weight": np.ones(64, np.float32)}
    write_gguf(tmp_path / "model.gguf", "llama", make_model("llama"), tensors=extra)
    with pytest.raises(ModelError, match=r"ffn_norm.*post_attention_norm.*both stand for .*post_attention_layernorm"):
        load_model(str(tmp_path))


def test_quantized_values(tmp_path: Path) -> None:
    """What the package makes of them, no more and no less."""
    model = make_model("llama")
    write_gguf(tmp_path / "model.gguf", "llama", model, {"general.file_type": 7})
    with pytest.raises(AssertionError):
        assert_equals(tmp_path, model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".mlp." in name:
                parameter.copy_(torch.tensor(dequantize(quantize(parameter.numpy(), Q8_0), Q8_0)))
    assert_equals(tmp_path, model)


class TestFile:
    def test_bfloat16_unless_told_otherwise_and_the_only_file_of_a_folder(self, tmp_path: Path) -> None:
        write_gguf(tmp_path / "tiny.gguf", "llama", make_model("llama"))
        loaded = load_model(str(tmp_path))
        assert (loaded.card.name, loaded.card.dtype) == ("tiny", "bfloat16")
        wide = load_model(str(tmp_path / "tiny.gguf"), dtype="float32")
        assert (wide.card.name, wide.card.dtype) == ("tiny", "float32")
        assert loaded.card.fingerprint != wide.card.fingerprint
        (tmp_path / "second.gguf").write_bytes(b"")
        with pytest.raises(ModelError, match="2 GGUF files"):
            load_model(str(tmp_path))

    @pytest.mark.parametrize("keep", [0, 3, 200, 5000, 30_000])
    def test_a_truncated_file(self, keep: int, tmp_path: Path) -> None:
        path = tmp_path / "tiny.gguf"
        write_gguf(path, "llama", make_model("llama"))
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(ModelError, match=r"tiny\.gguf: not a GGUF file that can be read"):
            load_model(str(path))

    @pytest.mark.parametrize(
        ("fields", "named"),
        [
            ({"llama.expert_count": 8}, "expert_count"),
            ({"llama.block_count": None}, "block_count"),
            ({"llama.block_count": 3}, "weights lack model.layers.2"),
            ({"llama.block_count": 1}, "blk.1.*unknown tensor"),
            ({"llama.feed_forward_length": 95}, "blk.0.*shape"),
            ({"split.count": 2}, "split.count"),
            ({"llama.attention.value_length": 8}, "value_length"),
            ({"llama.attention.layer_norm_rms_epsilon": None}, "rms_norm_eps"),
            ({"llama.rope.scaling.type": "magic"}, "rope_scaling: rope_type: 'magic'"),
            ({"llama.rope.dimension_count": 8}, "partial_rotary_factor"),
            ({"llama.attention.sliding_window": 64}, "sliding_window"),
            ({"tokenizer.ggml.pre": "no-such"}, "tokenizer.ggml.pre: 'no-such'"),
            ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model: 't5'"),
            ({"tokenizer.ggml.tokens": None}, "no tokenizer"),
        ],
    )
    def test_refused_by_name(self, fields: dict[str, Any], named: str, tmp_path: Path) -> None:
        write_gguf(tmp_path / "tiny.gguf", "llama", make_model("llama"), fields)
        with pytest.raises(ModelError, match=rf"{tmp_path.name}.*: .*{named}"):
            load_model(str(tmp_path / "tiny.gguf"))

    def test_an_unknown_architecture(self, tmp_path: Path) -> None:
        write_gguf(tmp_path / "tiny.gguf", "llama", make_model("llama"), {"general.architecture": "mamba"})
        with pytest.raises(ModelError, match=r"general\.architecture: 'mamba'"):
            load_model(str(tmp_path / "tiny.gguf"))


class TestTokenizer:
    def test_byte_level(self, tmp_path: Path) -> None:
        write_gguf(tmp_path / "tiny.gguf", "llama", make_model("llama"))
        card = load_model(str(tmp_path)).card
        assert card.eos_ids == (2, 3)  # a token that ends turns of a chat counts too
        assert card.chat_template == "{{ messages }}"
        special = json.loads(card.tokenizer_files["tokenizer_config.json"])
        assert (special["bos_token"], special["eos_token"]) == ("<s>", "</s>")
        tokenizer = Tokenizer.from_str(card.tokenizer_files["tokenizer.json"].decode())
        text = "he hé's 42\n  </s>x"
        encoding = tokenizer.encode(text)
        assert encoding.tokens[:2] == ["he", "Ġ"] and encoding.ids[-2] == 2
        assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == text
        assert tokenizer.get_vocab_size() == VOCAB_SIZE

    @pytest.mark.parametrize(("prefix", "tokens"), [(True, ["▁hel", "lo"]), (False, ["hel", "lo"])])
    def test_sentencepiece(self, prefix: bool, tokens: list[str], tmp_path: Path) -> None:
        """Merges go by the order of the pieces; spaces have a character of their own; what is unknown goes by bytes."""
        byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
        pieces = ["el", "lo", "hel", "ell", "▁h", "▁hel", "  ", "▁", "e", "h", "l", "o", "\n\n"]
        vocabulary = ["<unk>", "<s>", "</s>", *byte_tokens, *pieces]
        types = [2, 3, 3] + [6] * 256 + [1] * (len(pieces) - 1) + [4]
        rest = VOCAB_SIZE - len(vocabulary)
        fields = {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": vocabulary + [f"[{index}]" for index in range(rest)],
            "tokenizer.ggml.token_type": types + [5] * rest,
            "tokenizer.ggml.merges": None,
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.add_space_prefix": prefix,
        }
        write_gguf(tmp_path / "tiny.gguf", "llama", make_model("llama"), fields)
        files = load_model(str(tmp_path)).card.tokenizer_files
        tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
        encoding = tokenizer.encode("hello   hé\n\n</s>")
        assert encoding.tokens == ["<s>", *tokens, "▁▁", "▁h", "<0xC3>", "<0xA9>", "\n\n", "</s>"]
        assert tokenizer.decode(encoding.ids) == "hello   hé\n\n"
