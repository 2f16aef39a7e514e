"""The model card: EOS union, sampling defaults, chat template, tokenizer files, fingerprint (C16, C22)."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import structlog
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from common.wire import Hello, Limits, ModelCard, decode, encode
from executor_svc.model import ModelError, card, fingerprint, load_model
from executor_svc.model.hub import model_folder
from tests.executor.tiny_models import EOS_ID, VOCAB_SIZE, edit_json, make_model, save_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("llama"), tmp_path_factory.mktemp("saved"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A folder of its own, of a model whose eos_token_id is 2 everywhere, without a generation_config.json."""
    copy = tmp_path / "some-model"
    shutil.copytree(saved, copy)
    (copy / "generation_config.json").unlink(missing_ok=True)
    return copy


def read_card(folder: Path, **options: Any) -> ModelCard:
    return load_model(str(folder), **options).card


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


class TestEos:
    @pytest.mark.parametrize(
        ("config", "generation", "tokenizer", "expected"),
        [
            (7, None, None, (7,)),
            ([7, 9], None, None, (7, 9)),
            (None, 8, None, (8,)),
            (None, [8, 7], None, (7, 8)),
            (None, None, "</s>", (2,)),
            (None, None, {"content": "</s>", "special": True}, (2,)),
            (7, [8, 9], "</s>", (2, 7, 8, 9)),
            (2, 2, "</s>", (2,)),
            (None, None, None, ()),
            (None, None, "A", (36,)),  # an ordinary piece of the vocabulary may end texts too
            (None, None, "not in the vocabulary", ()),
            ([7, VOCAB_SIZE, -1], None, None, (7,)),
        ],
    )
    def test_is_the_union(
        self, config: Any, generation: Any, tokenizer: Any, expected: tuple[int, ...], folder: Path
    ) -> None:
        edit_json(folder / "config.json", {"eos_token_id": config})
        if generation is not None:
            write(folder, "generation_config.json", {"eos_token_id": generation})
        edit_json(folder / "tokenizer_config.json", {"eos_token": tokenizer})
        assert read_card(folder).eos_ids == expected

    def test_special_tokens_map_stands_in(self, folder: Path) -> None:
        edit_json(folder / "config.json", {"eos_token_id": None})
        edit_json(folder / "tokenizer_config.json", {}, remove=("eos_token",))
        write(folder, "special_tokens_map.json", {"eos_token": "<unk>"})
        assert read_card(folder).eos_ids == (3,)

    @pytest.mark.parametrize("wrong", ["2", 2.5, [2, "3"], True])
    def test_a_malformed_id(self, wrong: Any, folder: Path) -> None:
        write(folder, "generation_config.json", {"eos_token_id": wrong})
        with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id"):
            read_card(folder)


class TestDefaultParams:
    @pytest.mark.parametrize(
        ("generation", "expected"),
        [
            ({}, {}),
            ({"temperature": 0.1, "top_k": 1}, {"temperature": 0.1, "top_k": 1}),
            ({"do_sample": True, "top_p": 0.9, "min_p": 0.05}, {"top_p": 0.9, "min_p": 0.05}),
            ({"do_sample": None, "temperature": 0}, {"temperature": 0}),
            ({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
            ({"temperature": None, "top_k": -1, "max_new_tokens": 5}, {"top_k": 0}),
        ],
    )
    def test_come_from_the_file(self, generation: dict[str, Any], expected: dict[str, float], folder: Path) -> None:
        write(folder, "generation_config.json", generation)
        assert read_card(folder).default_params == expected

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("temperature", -0.5),
            ("temperature", "hot"),
            ("top_p", 0),
            ("top_p", 1.5),
            ("top_k", -2),
            ("min_p", 2),
            ("repetition_penalty", 0),
            ("repetition_penalty", float("nan")),
            ("do_sample", "yes"),
        ],
    )
    def test_a_wrong_value_is_named(self, field: str, value: Any, folder: Path) -> None:
        write(folder, "generation_config.json", {field: value})
        with pytest.raises(ModelError, match=rf"generation_config\.json: {field}"):
            read_card(folder)

    def test_start_up_logs_them(self, folder: Path) -> None:
        write(folder, "generation_config.json", {"temperature": 0.1, "eos_token_id": 9})
        with structlog.testing.capture_logs() as logs:
            read_card(folder)
        (entry,) = [entry for entry in logs if entry["event"] == "model card"]
        assert entry["default_params_from_generation_config"] == {"temperature": 0.1}
        assert entry["eos_ids"] == (EOS_ID, 9)


class TestChatTemplate:
    def test_absent(self, folder: Path) -> None:
        assert read_card(folder).chat_template == ""

    @pytest.mark.parametrize(
        ("value", "expected", "with_tools"),
        [
            ("{{ a }}", "{{ a }}", ""),
            ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d", "t"),
            ([{"name": "tool_use", "template": "t"}], "", "t"),
            ([{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}], "d", ""),
        ],
    )
    def test_in_tokenizer_config(self, value: Any, expected: str, with_tools: str, folder: Path) -> None:
        edit_json(folder / "tokenizer_config.json", {"chat_template": value})
        card = read_card(folder)
        assert (card.chat_template, card.tool_chat_template) == (expected, with_tools)

    def test_the_file_goes_first(self, folder: Path) -> None:
        old = [{"name": "tool_use", "template": "old"}, {"name": "default", "template": "old"}]
        edit_json(folder / "tokenizer_config.json", {"chat_template": old})
        write(folder, "chat_template.jinja", "{{ bos_token }}é\n")
        card = read_card(folder)
        assert (card.chat_template, card.tool_chat_template) == ("{{ bos_token }}é\n", "")
        (folder / "additional_chat_templates").mkdir()
        write(folder, "additional_chat_templates/tool_use.jinja", "{{ tools }}")
        assert read_card(folder).tool_chat_template == "{{ tools }}"

    def test_malformed_or_too_long(self, folder: Path) -> None:
        edit_json(folder / "tokenizer_config.json", {"chat_template": 7})
        with pytest.raises(ModelError, match=r"tokenizer_config\.json: chat_template"):
            read_card(folder)
        write(folder, "chat_template.jinja", "x" * ((1 << 20) + 1))
        with pytest.raises(ModelError, match=r"chat_template\.jinja"):
            read_card(folder)


class TestTokenizerFiles:
    def test_are_carried_unchanged(self, folder: Path) -> None:
        write(folder, "special_tokens_map.json", {"eos_token": "</s>"})
        files = read_card(folder).tokenizer_files
        assert set(files) == {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
        assert all(data == (folder / name).read_bytes() for name, data in files.items())

    def test_none(self, folder: Path) -> None:
        (folder / "tokenizer.json").unlink()
        with pytest.raises(ModelError, match="no tokenizer"):
            read_card(folder)

    @pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
    def test_malformed(self, name: str, folder: Path) -> None:
        for content in ("{", "[1]"):
            write(folder, name, content)
            with pytest.raises(ModelError, match=name):
                read_card(folder)

    def test_malformed_inside(self, folder: Path) -> None:
        edit_json(folder / "tokenizer.json", {"added_tokens": [1]})
        with pytest.raises(ModelError, match=r"tokenizer\.json: malformed added_tokens"):
            read_card(folder)

    def test_a_unigram_vocabulary(self, folder: Path) -> None:
        edit_json(folder / "config.json", {"eos_token_id": None})
        unigram = {"type": "Unigram", "vocab": [["<unk>", 0.0], ["a", -1.0], ["</s>", 0.0]]}
        edit_json(folder / "tokenizer.json", {"added_tokens": [], "model": unigram})
        assert read_card(folder).eos_ids == (2,)

    def test_sentencepiece_is_converted(self, folder: Path, tmp_path: Path) -> None:
        model = self._only_sentencepiece(folder, tmp_path)
        tokenizer = Tokenizer.from_str(read_card(folder).tokenizer_files["tokenizer.json"].decode())
        text = "the river turns, and the wheel turns with it"
        assert tokenizer.encode(text, add_special_tokens=False).ids == model.encode(text)

    def test_sentencepiece_without_transformers(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self._only_sentencepiece(folder, tmp_path)
        monkeypatch.setitem(sys.modules, "transformers", None)
        with pytest.raises(ModelError, match=r"tokenizer\.model: only a sentencepiece tokenizer.*pip install"):
            read_card(folder)

    def test_a_broken_sentencepiece_model(self, folder: Path) -> None:
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer.model").write_bytes(b"not a model")
        with pytest.raises(ModelError, match=r"tokenizer\.model: cannot be converted") as caught:
            read_card(folder)
        assert "\n" not in str(caught.value)

    @staticmethod
    def _only_sentencepiece(folder: Path, tmp_path: Path) -> sentencepiece.SentencePieceProcessor:
        corpus = tmp_path / "corpus.txt"
        corpus.write_text("the river turns and turns the wheel, and it turns with the water\n" * 40)
        sentencepiece.SentencePieceTrainer.train(
            input=str(corpus),
            model_prefix=str(folder / "tokenizer"),
            vocab_size=300,
            model_type="bpe",
            byte_fallback=True,
            hard_vocab_limit=False,
            minloglevel=2,
        )
        (folder / "tokenizer.json").unlink()
        write(folder, "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"})
        return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


class TestFingerprint:
    def test_same_files_same_fingerprint(self, folder: Path, saved: Path) -> None:
        assert read_card(folder).fingerprint == read_card(saved).fingerprint
        assert len(read_card(folder).fingerprint) == 16

    def test_config_dtype_and_each_weight_count(self, folder: Path) -> None:
        first = read_card(folder).fingerprint
        seen = {first, read_card(folder, dtype="bfloat16").fingerprint}
        assert len(seen) == 2
        path = folder / "model.safetensors"
        tensors = load_file(path)
        for name in tensors:
            changed = {key: value.clone() for key, value in tensors.items()}
            changed[name].view(-1)[-1] += 1e-3
            save_file(changed, path, metadata={"format": "pt"})
            seen.add(read_card(folder).fingerprint)
        assert len(seen) == 2 + len(tensors)
        save_file({k: v.clone() for k, v in tensors.items()}, path, metadata={"format": "pt"})
        edit_json(folder / "config.json", {"rms_norm_eps": 1e-5})
        assert read_card(folder).fingerprint not in seen

    def test_any_byte_of_a_file_of_many_pieces_counts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fingerprint, "_PIECE_BYTES", 300)
        monkeypatch.setattr(fingerprint, "_READ_BYTES", 128)
        config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
        config.write_bytes(b"{}")
        content = bytes(torch.randint(256, (1000,), generator=torch.Generator().manual_seed(0)).tolist())
        seen = set()
        for at in [None, 0, 127, 128, 299, 300, 599, 999]:
            changed = bytearray(content)
            if at is not None:
                changed[at] ^= 1
            weights.write_bytes(changed)
            seen.add(fingerprint.model_fingerprint(config, [weights], "float32"))
        weights.write_bytes(content + b"\0")
        seen.add(fingerprint.model_fingerprint(config, [weights], "float32"))
        assert len(seen) == 9


def test_the_rest_of_the_card(folder: Path) -> None:
    read = read_card(folder, max_model_len=100)
    assert (read.name, read.vocab_size, read.max_model_len, read.dtype) == ("some-model", VOCAB_SIZE, 100, "float32")
    assert read_card(folder, name="served").name == "served"
    hello = Hello(1, "e0", bytes(16), "cpu", Limits(16, 10, 0, 4, 64), read)
    assert decode(encode(hello)) == hello


def test_a_generation_config_that_is_no_object(folder: Path) -> None:
    write(folder, "generation_config.json", "[]")
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        read_card(folder)


class TestWhereModelsComeFrom:
    def test_a_folder(self, folder: Path) -> None:
        assert model_folder(str(folder)) == folder

    @pytest.mark.parametrize("name", ["no/such/folder", "/no/such", "name", "../up", "a b/c"])
    def test_neither_a_folder_nor_a_hub_id(self, name: str) -> None:
        with pytest.raises(ModelError, match="no such folder"):
            load_model(name)

    def test_a_file(self, folder: Path) -> None:
        with pytest.raises(ModelError, match="is a file"):
            load_model(str(folder / "config.json"))

    def test_a_hub_id_in_the_cache(self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        commit = "0" * 40
        repository = tmp_path / "hub" / "models--someone--tiny"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(commit)
        shutil.copytree(folder, repository / "snapshots" / commit)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert load_model("someone/tiny").card.name == "someone/tiny"

    def test_a_hub_that_cannot_be_reached(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(ModelError, match="someone/tiny: no such folder, and not to be had") as caught:
            load_model("someone/tiny")
        assert "\n" not in str(caught.value)


def test_an_unusable_device(folder: Path) -> None:
    for device in ("toaster", "meta:x", "cuda:99"):
        with pytest.raises(ModelError, match=f"device: '{device}'"):
            load_model(str(folder), device=device)


def test_bounds_cover_every_default() -> None:
    assert set(card._BOUNDS) == {*card._SAMPLING, "repetition_penalty"}
