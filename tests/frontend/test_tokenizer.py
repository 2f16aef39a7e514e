"""Encoding equals that of `transformers`, whatever the configuration says of special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers_for_tests import byte_fallback, byte_level
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from scheduler_svc.frontend.chat_template import ChatTemplate
from scheduler_svc.frontend.tokenizer import Tokenizer, TokenizerError

TEXTS = ["Hello world", "", " the  quick", "<s>Hello</s>", "a<|im_end|>b", "<|im_start|>user\nHi<|im_end|>", "世界"]


def both(folder: Path, made: tuple[Backend, dict[str, Any]], **config: Any) -> tuple[Tokenizer, Any]:
    """The same files, loaded by us and by transformers."""
    backend, own = made
    own = {**own, **config, "tokenizer_class": "PreTrainedTokenizerFast"}
    files = {"tokenizer.json": backend.to_str().encode(), "tokenizer_config.json": json.dumps(own).encode()}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return Tokenizer(files), PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize(
    "config",
    [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}],
    ids=str,
)
@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_ids_equal_those_of_transformers(tmp_path: Path, make: Any, config: dict[str, Any], add: bool) -> None:
    ours, theirs = both(tmp_path, make(), **config)
    for text in TEXTS:
        assert ours.encode(text, add) == theirs.encode(text, add_special_tokens=add), text


def test_split_special_tokens_is_honoured(tmp_path: Path) -> None:
    ours, theirs = both(tmp_path, byte_level(), split_special_tokens=True)
    assert ours.encode("a<|im_end|>b", False) == theirs.encode("a<|im_end|>b", add_special_tokens=False)
    assert len(ours.encode("<|im_end|>", False)) > 1


def test_truncation_and_padding_of_the_file_are_dropped() -> None:
    backend, _ = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    ours = Tokenizer({"tokenizer.json": backend.to_str().encode()})
    assert (
        ours.encode("The quick brown fox jumps over the lazy dog", True)
        == byte_level()[0].encode("The quick brown fox jumps over the lazy dog").ids
    )


def test_a_named_token_that_is_an_ordinary_entry_becomes_special() -> None:
    backend, _ = byte_fallback()
    document = json.loads(backend.to_str())
    document["added_tokens"] = [token for token in document["added_tokens"] if token["content"] != "</s>"]
    files = {
        "tokenizer.json": json.dumps(document).encode(),
        "special_tokens_map.json": b'{"eos_token": {"content": "</s>"}}',
    }
    ours = Tokenizer(files)
    assert ours.special_tokens == {"eos_token": "</s>"}
    end = backend.token_to_id("</s>")
    assert ours.encode("a</s>", False)[-1] == end
    assert ours.decode([*ours.encode("a", False), end], True) == "a"


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({}, "no tokenizer.json"),
        ({"tokenizer.json": b"{"}, "tokenizer.json cannot be read"),
        ({"tokenizer.json": b"{}", "tokenizer_config.json": b"[]"}, "tokenizer_config.json is not a JSON object"),
    ],
)
def test_bad_files_are_refused_by_name(files: dict[str, bytes], text: str) -> None:
    with pytest.raises(TokenizerError, match=text):
        Tokenizer(files)


def test_longest_token() -> None:
    backend, _ = byte_level()
    assert Tokenizer({"tokenizer.json": backend.to_str().encode()}).longest_token == max(map(len, backend.get_vocab()))


DEFAULT_MODEL = Path(__file__).parents[2] / "executor_svc" / "default_model"


@pytest.mark.skipif(not (DEFAULT_MODEL / "tokenizer.json").exists(), reason="the embedded model is not there")
def test_the_embedded_models_prompts_equal_those_of_transformers() -> None:
    theirs = AutoTokenizer.from_pretrained(DEFAULT_MODEL)
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
    files = {name: (DEFAULT_MODEL / name).read_bytes() for name in names if (DEFAULT_MODEL / name).exists()}
    ours = Tokenizer(files)
    for text in [*TEXTS, "Once upon a time, there was a <|end|> fox."]:
        for add in (True, False):
            assert ours.encode(text, add) == theirs.encode(text, add_special_tokens=add), text
    template = ChatTemplate((DEFAULT_MODEL / "chat_template.jinja").read_text(), ours.special_tokens)
    roles = ("user", "assistant", "user")
    turns = [{"role": role, "content": text} for role, text in zip(roles, ("Hello", " Hi ", "?"), strict=True)]
    for messages in (turns[:1], turns):
        wanted = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ours.encode(template.render(messages, True, {}), False) == wanted
