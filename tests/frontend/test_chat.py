"""Chat requests over HTTP: prompts equal those of `transformers`, mistakes are 400 (C22, C23, C36)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from frontend_service import BYTE_FALLBACK, BYTE_LEVEL, Service, error_of, run_service
from tokenizers_for_tests import CHATML, LLAMA_CHAT, byte_fallback, byte_level, card
from transformers import PreTrainedTokenizerFast

CONVERSATIONS = [
    [{"role": "user", "content": "Hello"}],
    [
        {"role": "user", "content": " Hi  there "},
        {"role": "assistant", "content": "I am fine"},
        {"role": "user", "content": "one <s> two <|im_end|> three </s>"},
    ],
]


def as_transformers(folder: Path, model: str) -> Any:
    """The same tokenizer and template, in transformers' hands."""
    backend, config = byte_level() if model == BYTE_LEVEL else byte_fallback()
    template = CHATML if model == BYTE_LEVEL else LLAMA_CHAT
    (folder / "tokenizer.json").write_text(backend.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("model", [BYTE_LEVEL, BYTE_FALLBACK])
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["short", "with special tokens in the user's text"])
def test_prompt_ids_equal_those_of_transformers(
    service: Service, tmp_path: Path, model: str, messages: list[dict[str, str]]
) -> None:
    """Special tokens in a user's text are read as special tokens, as transformers does; there is exactly one BOS."""
    theirs = as_transformers(tmp_path, model)
    wanted = theirs.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    usage = service.chat(model=model, messages=messages).json()["usage"]
    sent = service.core.requests[0].prompt.tolist()
    assert sent == wanted and usage["prompt_tokens"] == len(wanted)
    if model == BYTE_FALLBACK:
        assert sent[:2].count(theirs.bos_token_id) == 1
    else:
        ends = 1 + ("<|im_end|>" in messages[-1]["content"])
        assert sent.count(theirs.convert_tokens_to_ids("<|im_end|>")) == len(messages) - 1 + ends
    tokenized = service.post("/tokenize", model=model, messages=messages).json()
    assert tokenized["tokens"] == wanted


def test_add_special_tokens_on_demand(service: Service) -> None:
    body = {"model": BYTE_FALLBACK, "messages": CONVERSATIONS[0]}
    service.chat(**body)
    service.chat(**body, add_special_tokens=True)
    plain, more = [request.prompt.tolist() for request in service.core.requests]
    assert more == [1, *plain]


def test_the_generation_prompt_and_open_final_messages(service: Service) -> None:
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "I am"}]
    service.chat(messages=turns, add_generation_prompt=False)
    service.chat(messages=turns, continue_final_message=True)
    decode = service.tokenizers[BYTE_LEVEL].decode
    texts = [decode(request.prompt.tolist(), skip_special_tokens=False) for request in service.core.requests]
    head = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nI am"
    assert texts == [head + "<|im_end|>\n", head]
    error = error_of(service.chat(messages=turns, continue_final_message=True, add_generation_prompt=True), 400)
    assert error["param"] == "continue_final_message"


def test_template_variables(service: Service) -> None:
    assert service.chat(chat_template_kwargs={"enable_thinking": False}).status_code == 200
    for bad in ({"messages": []}, {"a b": 1}, 5):
        assert error_of(service.chat(chat_template_kwargs=bad), 400)["param"] == "chat_template_kwargs"


USER = {"role": "user", "content": "Hello"}
MISTAKES: dict[str, tuple[Any, str, str]] = {
    "two user turns": ([USER, USER], "messages", "roles must alternate"),
    "an image": ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "", "only text"),
    "an unknown role": ([{"role": "wizard", "content": "x"}], "messages[0].role", "must be one of"),
    "no content": ([{"role": "user"}], "messages[0].content", "is required"),
    "no messages": ([], "messages", "must not be empty"),
    "null messages": (None, "messages", "is required"),
    "messages of another type": ("Hello", "messages", "expected an array"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_400_in_json_even_for_streams(service: Service, mistake: str, stream: bool) -> None:
    messages, param, text = MISTAKES[mistake]
    error = error_of(service.chat(model=BYTE_FALLBACK, messages=messages, stream=stream), 400)
    assert text in error["message"] and (not param or error["param"] == param)
    assert not service.core.requests


def test_null_content_never_reads_none(service: Service) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    assert service.chat(messages=turns).status_code == 200
    text = service.tokenizers[BYTE_LEVEL].decode(service.core.requests[0].prompt.tolist(), skip_special_tokens=False)
    assert "None" not in text and "42" in text


# --- fields that are known but not supported ---

UNSUPPORTED_IN_CHAT: dict[str, list[Any]] = {
    "tools": [[{"type": "function", "function": {"name": "f"}}]],  # this template does not know them
    "functions": [[{"name": "f"}]],
    "function_call": ["auto"],
    "modalities": [["text", "audio"], ["audio"]],
    "audio": [{"voice": "x"}],
    "prediction": [{"type": "content"}],
    "chat_template": ["{{ messages }}"],
    "store": [True],
    "echo": [True],
    "web_search_options": [{}],
    "reasoning_effort": ["high"],
}
UNSUPPORTED_IN_COMPLETIONS: dict[str, list[Any]] = {
    "suffix": ["x"],
    "guided_whitespace_pattern": ["a"],
    "structural_tag": ["a"],
    "use_beam_search": [True],
    "prompt_embeds": ["x"],
}


@pytest.mark.parametrize("stream", [False, True])
def test_unsupported_fields_are_named(service: Service, stream: bool) -> None:
    for ask, table in ((service.chat, UNSUPPORTED_IN_CHAT), (service.complete, UNSUPPORTED_IN_COMPLETIONS)):
        for name, values in table.items():
            for value in values:
                error = error_of(ask(**{name: value}, stream=stream), 400)
                assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert not service.core.requests


def test_values_that_ask_for_nothing_are_let_pass(service: Service) -> None:
    body = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]}
    assert service.chat(**body, store=False, parallel_tool_calls=True, n=1).status_code == 200
    assert service.complete(suffix="", best_of=2, n=2, use_beam_search=False).status_code == 200


# --- what depends on the model and its executors ---

OWN_DEFAULTS = {"temperature": 0.25, "top_k": 7.0, "top_p": 0.5, "min_p": 0.125, "repetition_penalty": 1.5}


@pytest.fixture(scope="module")
def small_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A pool of 64 tokens; one model has no chat template, the other has sampling defaults of its own."""
    models = [card("bare", byte_level(), ""), card("own", byte_level(), CHATML, default_params=OWN_DEFAULTS)]
    with run_service(tmp_path_factory.mktemp("ipc"), models=models, kv_capacity=64) as service:
        yield service


@pytest.fixture
def small(small_service: Service) -> Service:
    small_service.core.reset()
    return small_service


def test_a_model_without_a_template(small: Service) -> None:
    for stream in (False, True):
        error = error_of(small.chat(model="bare", stream=stream), 400)
        assert (error["code"], error["param"]) == ("no_chat_template", "messages")
    assert small.complete(model="bare").status_code == 200


def test_the_models_own_defaults(small: Service) -> None:
    """They apply only to what a request leaves out; an explicit 0 stands, null is left out."""
    small.complete(model="own")
    small.complete(model="own", temperature=0, top_k=0, top_p=1, min_p=0, repetition_penalty=1)
    small.complete(model="own", temperature=None, top_k=None)
    seen = [
        (p.temperature, p.top_k, p.top_p, p.min_p, p.repetition_penalty)
        for p in (request.params for request in small.core.requests)
    ]
    assert seen == [(0.25, 7, 0.5, 0.125, 1.5), (0.0, 0, 1.0, 0.0, 1.0), (0.25, 7, 0.5, 0.125, 1.5)]


def test_what_the_pool_cannot_hold(small: Service) -> None:
    """KV is needed for all but the last token. Without max_tokens a chat takes what is left."""
    error = error_of(small.complete(model="own", prompt=[5] * 60, max_tokens=6), 400)
    assert (error["code"], error["param"]) == ("kv_capacity_exceeded", "max_tokens")
    error = error_of(small.complete(model="own", prompt=[5] * 65), 400)
    assert (error["code"], error["param"]) == ("kv_capacity_exceeded", "prompt")
    assert small.complete(model="own", prompt=[5] * 60, max_tokens=5).status_code == 200
    assert small.complete(model="own", prompt=[5] * 64, max_tokens=1).status_code == 200
    assert small.complete(model="own", prompt=[5] * 60).status_code == 200
    assert small.core.requests[-1].params.max_tokens == 5
    small.chat(model="own")
    assert len(small.core.requests[-1].prompt) + small.core.requests[-1].params.max_tokens == 65
