"""Checkpoints: every config flag and every tensor counts (C30)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from executor_svc.model import Decoder, ModelError, load_model
from tests.executor.paged_driver import prompt_logits
from tests.executor.tiny_models import edit_json, make_model, save_model

TOKENS = torch.randint(4, 260, (30,), generator=torch.Generator().manual_seed(9)).tolist()
SHARDS = {"max_shard_size": "60KB"}


def assert_equals(folder: Path, model: PreTrainedModel) -> None:
    with torch.inference_mode():
        reference = model(torch.tensor([TOKENS])).logits[0]
    logits = prompt_logits(load_model(str(folder)).decoder, TOKENS)
    assert float((logits - reference).abs().max()) < 1e-4


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


LEGAL: dict[str, tuple[str, dict[str, Any]]] = {
    "head_dim apart from hidden_size": ("llama", {"head_dim": 24}),
    "attention_bias, output too": ("llama", {"attention_bias": True}),
    "mlp_bias": ("llama", {"mlp_bias": True}),
    "gelu_tanh": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "multi-head": ("llama", {"num_key_value_heads": 4}),
    "qk-norm and bias": ("qwen3", {"attention_bias": True}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "untied gemma": ("gemma3", {"tie_word_embeddings": False, "head_dim": 16}),
    "gemma bias": ("gemma3", {"attention_bias": True, "head_dim": 16}),
    "soft-capped logits": ("gemma3", {"final_logit_softcapping": 2.0, "head_dim": 16}),
    "granite biases": ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "olmo2 bias": ("olmo2", {"attention_bias": True}),
    "gemma2 without caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "phi3 whole head": ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "mixtral window": ("mixtral", {"sliding_window": 8, "head_dim": 24}),
    "qwen3_moe renormalized": ("qwen3_moe", {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 2}),
    "qwen3_moe window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8, "attention_bias": True}),
    "one layer": ("qwen2", {"num_hidden_layers": 1}),
}


@pytest.mark.parametrize("name", LEGAL)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    family, changes = LEGAL[name]
    model = make_model(family, **changes)
    assert_equals(save_model(model, tmp_path), model)


def test_soft_capped_scores(tmp_path: Path) -> None:
    model = make_model("gemma3", attn_logit_softcapping=0.8, head_dim=16)
    save_model(model, tmp_path)
    with torch.inference_mode():
        plain = model(torch.tensor([TOKENS])).logits[0]
        # transformers leaves the cap out for Gemma 3 unless it is handed to its attention function
        capped = model(torch.tensor([TOKENS]), softcap=0.8).logits[0]
    logits = prompt_logits(load_model(str(tmp_path)).decoder, TOKENS)
    assert float((plain - capped).abs().max()) > 0.01
    assert float((logits - capped).abs().max()) < 1e-4


class TestFiles:
    def test_shards(self, tmp_path: Path) -> None:
        model = make_model("llama")
        save_model(model, tmp_path, **SHARDS)
        assert len(list(tmp_path.glob("*.safetensors"))) >= 3
        assert_equals(tmp_path, model)

    def test_a_missing_shard(self, tmp_path: Path) -> None:
        save_model(make_model("llama"), tmp_path, **SHARDS)
        shard = sorted(tmp_path.glob("*.safetensors"))[1]
        shard.unlink()
        with pytest.raises(ModelError, match=f"{shard.name}.*missing"):
            load_model(str(tmp_path))

    def test_an_index_that_disagrees_with_its_shards(self, tmp_path: Path) -> None:
        save_model(make_model("llama"), tmp_path, **SHARDS)
        index = tmp_path / "model.safetensors.index.json"
        weight_map = json.loads(index.read_text())["weight_map"]
        edit_json(index, {"weight_map": {**weight_map, "model.extra": weight_map["model.norm.weight"]}})
        with pytest.raises(ModelError, match=r"model\.extra is not in"):
            load_model(str(tmp_path))

    @pytest.mark.parametrize("shard", ["../outside.safetensors", "/etc/passwd", "sub/model.safetensors", 7])
    def test_an_index_that_points_elsewhere(self, shard: Any, tmp_path: Path) -> None:
        save_model(make_model("llama"), tmp_path, **SHARDS)
        edit_json(tmp_path / "model.safetensors.index.json", {"weight_map": {"model.norm.weight": shard}})
        with pytest.raises(ModelError, match="weight_map"):
            load_model(str(tmp_path))

    def test_a_tensor_in_two_shards(self, tmp_path: Path) -> None:
        save_model(make_model("llama"), tmp_path, **SHARDS)
        index = tmp_path / "model.safetensors.index.json"
        weight_map = json.loads(index.read_text())["weight_map"]
        other = next(name for name in sorted(weight_map.values()) if name != weight_map["model.norm.weight"])
        tensors = load_file(tmp_path / other)
        save_file({**tensors, "model.norm.weight": torch.zeros(64)}, tmp_path / other)
        with pytest.raises(ModelError, match=r"model\.norm\.weight stands in"):
            load_model(str(tmp_path))

    def test_an_extra_consolidated_file_is_left_alone(self, tmp_path: Path) -> None:
        model = make_model("mistral")
        save_model(model, tmp_path)
        save_file({"layers.0.attention.wq.weight": torch.zeros(4, 4)}, tmp_path / "consolidated.safetensors")
        (tmp_path / "pytorch_model.bin").write_bytes(b"never opened")
        assert_equals(tmp_path, model)

    def test_only_a_consolidated_file(self, tmp_path: Path) -> None:
        save_model(make_model("mistral"), tmp_path)
        (tmp_path / "model.safetensors").rename(tmp_path / "consolidated.safetensors")
        with pytest.raises(ModelError, match=r"only consolidated\.safetensors"):
            load_model(str(tmp_path))

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
    def test_pickles_are_refused(self, name: str, tmp_path: Path) -> None:
        save_model(make_model("llama"), tmp_path)
        (tmp_path / "model.safetensors").rename(tmp_path / name)
        with pytest.raises(ModelError, match=f"{name}: pickled"):
            load_model(str(tmp_path))

    def test_no_weights(self, tmp_path: Path) -> None:
        save_model(make_model("llama"), tmp_path)
        (tmp_path / "model.safetensors").unlink()
        with pytest.raises(ModelError, match="no weights"):
            load_model(str(tmp_path))

    @pytest.mark.parametrize("keep", [0, 5, 1000])
    def test_a_truncated_file(self, keep: int, tmp_path: Path) -> None:
        save_model(make_model("llama"), tmp_path)
        path = tmp_path / "model.safetensors"
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(ModelError, match=r"model\.safetensors: not a safetensors file"):
            load_model(str(tmp_path))


class TestTensors:
    def test_a_wrong_shape(self, tmp_path: Path) -> None:
        save_model(make_model("llama"), tmp_path)
        name = "model.layers.1.mlp.up_proj.weight"
        edit_weights(tmp_path, lambda tensors: tensors.update({name: tensors[name][:, :-1].contiguous()}))
        with pytest.raises(ModelError, match=rf"{name}: shape \[96, 63\], but config.json asks for \[96, 64\]"):
            load_model(str(tmp_path))

    def test_an_unknown_tensor(self, tmp_path: Path) -> None:
        save_model(make_model("llama"), tmp_path)
        edit_weights(
            tmp_path, lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(96, 64)})
        )
        with pytest.raises(ModelError, match=r"model\.layers\.2\.mlp\.up_proj\.weight: unknown tensor"):
            load_model(str(tmp_path))

    @pytest.mark.parametrize("name", ["self_attn.q_proj.bias", "self_attn.q_norm.weight", "mlp.gate_proj.bias"])
    def test_a_tensor_that_the_config_does_not_ask_for(self, name: str, tmp_path: Path) -> None:
        save_model(make_model("llama"), tmp_path)
        full = f"model.layers.0.{name}"
        edit_weights(tmp_path, lambda tensors: tensors.update({full: torch.zeros(64)}))
        with pytest.raises(ModelError, match=f"{full}: unknown tensor"):
            load_model(str(tmp_path))

    @pytest.mark.parametrize("name", ["model.layers.0.self_attn.k_proj.weight", "model.norm.weight", "lm_head.weight"])
    def test_a_missing_tensor(self, name: str, tmp_path: Path) -> None:
        save_model(make_model("llama"), tmp_path)
        edit_weights(tmp_path, lambda tensors: tensors.pop(name))
        with pytest.raises(ModelError, match=f"weights lack {name}$"):
            load_model(str(tmp_path))

    def test_several_missing_tensors(self, tmp_path: Path) -> None:
        save_model(make_model("llama"), tmp_path)
        edit_json(tmp_path / "config.json", {"num_hidden_layers": 3})
        with pytest.raises(ModelError, match=r"weights lack model\.layers\.2\.\S+ and 8 more"):
            load_model(str(tmp_path))

    def test_quantized_values(self, tmp_path: Path) -> None:
        save_model(make_model("llama"), tmp_path)
        name = "model.layers.0.mlp.up_proj.weight"
        edit_weights(tmp_path, lambda tensors: tensors.update({name: torch.zeros(96, 64, dtype=torch.int8)}))
        with pytest.raises(ModelError, match=f"{name}: holds I8 values"):
            load_model(str(tmp_path))

    def test_derived_tensors_are_passed_over(self, tmp_path: Path) -> None:
        model = make_model("llama")
        save_model(model, tmp_path)
        derived = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
        edit_weights(tmp_path, lambda tensors: tensors.update(derived))
        assert_equals(tmp_path, model)

    def test_every_byte_of_every_parameter_matters(self, tmp_path: Path) -> None:
        """A change in any tensor of the file changes the logits: none is dropped on the way."""
        save_model(make_model("qwen2"), tmp_path)
        before = prompt_logits(load_model(str(tmp_path)).decoder, TOKENS)
        with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
            names = list(file.keys())
        assert len(names) == 3 + 2 * 12
        for name in names:
            original = (tmp_path / "model.safetensors").read_bytes()
            edit_weights(tmp_path, lambda tensors, name=name: tensors[name].mul_(-1.5))
            after = prompt_logits(load_model(str(tmp_path)).decoder, TOKENS)
            # A bias of all keys alike shifts every score of a query alike only without rotation.
            assert float((after - before).abs().max()) > 1e-4, name
            (tmp_path / "model.safetensors").write_bytes(original)


class TestTying:
    def test_a_copy_of_the_embedding_in_the_file(self, tmp_path: Path) -> None:
        model = make_model("llama", tie_word_embeddings=True)
        save_model(model, tmp_path)
        copy = "model.embed_tokens.weight"
        edit_weights(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors[copy].clone()}))
        decoder = load_model(str(tmp_path), cpu_step="torch").decoder
        assert isinstance(decoder, Decoder)
        assert decoder.weights.lm_head.weight is decoder.weights.embedding
        assert_equals(tmp_path, model)

    def test_only_the_output_layer_in_the_file(self, tmp_path: Path) -> None:
        model = make_model("llama", tie_word_embeddings=True)
        save_model(model, tmp_path)
        edit_weights(
            tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")})
        )
        assert_equals(tmp_path, model)

    def test_another_output_layer_in_the_file_is_not_tied(self, tmp_path: Path) -> None:
        save_model(make_model("llama", tie_word_embeddings=True), tmp_path)
        edit_weights(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.randn(512, 64)}))
        assert_equals(tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path))


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("named", ["torch_dtype", "dtype", None])
def test_dtype_auto_is_the_configs(stored: str, named: str | None, tmp_path: Path) -> None:
    model = make_model("llama").to(getattr(torch, stored))
    save_model(model, tmp_path)
    edit_json(tmp_path / "config.json", {named: stored} if named else {}, remove=("dtype", "torch_dtype"))
    loaded = load_model(str(tmp_path))
    expected = getattr(torch, stored) if named else torch.float32
    assert loaded.decoder.dtype == expected
    assert loaded.card.dtype == (stored if named else "float32")
    if not named:
        assert_equals(tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    assert prompt_logits(loaded.decoder, TOKENS).isfinite().all()
