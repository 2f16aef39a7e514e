"""What a request may say: every bad value is a 400 that names its parameter, before the core hears of it (C10, C11)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_core import Answer
from frontend_service import BYTE_FALLBACK, Service, error_of

VOCAB = 408
"""The byte-level model's card says 8 rows more than its tokenizer has."""
BAD_NUMBERS = {
    "temperature": [-1, 2.1, True, "nan", "1", [], {}],
    "top_p": [0, -0.1, 1.1, True, "1"],
    "min_p": [-0.1, 1.1, "0"],
    "presence_penalty": [-2.1, 2.1, "1", False],
    "frequency_penalty": [-2.1, 2.1],
    "repetition_penalty": [0, -1, 10.5, "1"],
    "top_k": [-2, 1.5, True, "5"],
    "max_tokens": [0, -1, 1.5, "5", True, 10**30, 5.0],
    "min_tokens": [-1, 1.5, 17],
    "n": [0, -1, 129, 10**6, 1.0, "1", True],
    "seed": [-(2**63) - 1, 2**64, 1.5, "1", True],
    "logprobs": [-1, 21, True, 1.5],
    "priority": [2**31, 0.5],
    "best_of": [2, 0],
    "stream": [1, "true"],
    "echo": [0],
    "ignore_eos": ["no"],
    "skip_special_tokens": [1],
    "include_stop_str_in_output": [1],
    "add_special_tokens": [1],
    "user": [5, "x" * 257],
    "cache_salt": ["", 5, ["x"], "x" * 4097],
    "prompt_cache_retention": ["", "1h", "NONE", 24, True],
    "deadline_ms": [0, -1, 2**31, 1.5, "5", True],
    "model": [5, ["a"]],
    "request_id": ["with space", "", 5, "é"],
    "stop": [5, [5], [""], "", ["x"] * 65, "x" * 5000, {"a": 1}],
    "stop_token_ids": [[VOCAB], [-1], [1.5], ["1"], [True], 5],
    "logit_bias": [
        {str(VOCAB): 1},
        {"-1": 1},
        {"AI": -100},
        {"5": 1e9},
        {"5": 100.5},
        {"5": "1"},
        {"5": None},
        {"05": 1},
        {" 5": 1},
        {"٥": 1},
        {"9" * 400: 1},
        [5],
    ],
}
CASES = [(name, value) for name, values in BAD_NUMBERS.items() for value in values]


@pytest.mark.parametrize(("name", "value"), CASES, ids=lambda value: str(value)[:20])
def test_bad_values_name_their_parameter(service: Service, name: str, value: Any) -> None:
    error = error_of(service.complete(**{name: value}), 400)
    assert error["param"] == name
    assert error["type"] == "invalid_request_error"
    assert not service.core.requests


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e400"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty", "seed"])
def test_numbers_that_json_does_not_have(service: Service, name: str, number: str) -> None:
    body = f'{{"model": "byte-level", "prompt": "x", "{name}": {number}}}'
    error = error_of(service.raw("/v1/completions", body.encode()), 400)
    assert error["param"] == name


def test_nested_numbers_that_json_does_not_have(service: Service) -> None:
    for body in (b'{"prompt": "x", "logit_bias": {"5": NaN}}', b'{"logit_bias": {"7": -1e999}, "prompt": "NaN"}'):
        error = error_of(service.raw("/v1/completions", body), 400)
        assert error["param"] == "logit_bias"


def test_a_number_that_json_does_not_have_under_half_a_character(service: Service) -> None:
    assert error_of(service.raw("/v1/completions", b'{"\\ud800": NaN}'), 400)["param"] == "?"


def test_null_is_absent_everywhere(service: Service) -> None:
    service.core.answer(Answer(service.ids(" world")))
    nulls = dict.fromkeys([*BAD_NUMBERS, "stream_options", "tools", "response_format", "suffix", "chat_template"])
    assert service.complete(**{**nulls, "model": "byte-level"}).status_code == 200
    assert service.chat(**{**nulls, "model": "byte-level"}).status_code == 200
    plain = service.core.requests[0].params
    assert (plain.temperature, plain.top_p, plain.top_k, plain.max_tokens) == (1.0, 1.0, 0, 16)


def test_every_parameter_reaches_the_core(service: Service) -> None:
    service.core.answer(Answer(service.ids(" world")))
    response = service.complete(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=2**64 - 1,
        presence_penalty=-1,
        frequency_penalty=0.25,
        repetition_penalty=1.1,
        min_tokens=2,
        max_tokens=9,
        ignore_eos=True,
        stop_token_ids=[3, VOCAB - 1],
        logit_bias={"5": -100, str(VOCAB - 1): 1.5},
        logprobs=3,
        n=2,
        priority=-4,
        user="tenant-1",
        request_id="my-id",
    )
    assert response.status_code == 200
    (request,) = service.core.requests
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.seed, params.presence_penalty, params.frequency_penalty) == (2**64 - 1, -1.0, 0.25)
    assert (params.repetition_penalty, params.min_tokens, params.max_tokens) == (1.1, 2, 9)
    assert params.ignore_eos and params.stop_token_ids.tolist() == [3, VOCAB - 1]
    assert dict(zip(params.bias_ids.tolist(), params.bias_values.tolist(), strict=True)) == {5: -100, VOCAB - 1: 1.5}
    assert (params.logprobs, params.prompt_logprobs) == (3, -1)
    assert (request.n, request.priority, request.tenant, request.request_id) == (2, -4, "tenant-1", "my-id")
    assert response.json()["id"] == "cmpl-my-id"
    assert response.headers["x-request-id"] == "my-id"


@pytest.mark.parametrize(("given", "sent"), [(0, 0), (2**63, 2**63), (-2, 2**64 - 2), (-(2**63), 2**63)])
def test_seeds(service: Service, given: int, sent: int) -> None:
    service.complete(seed=given)
    assert service.core.requests[0].params.seed == sent


def test_no_seed_and_minus_one_are_random(service: Service) -> None:
    for seed in (None, None, -1, -1):
        service.complete(seed=seed)
    assert len({request.params.seed for request in service.core.requests}) == 4


def test_prompts_of_a_call_draw_apart_unless_a_seed_is_given(service: Service) -> None:
    service.complete(prompt=["Hello", "Hello", "Hello"])
    assert len({request.params.seed for request in service.core.requests}) == 3
    service.core.reset()
    service.complete(prompt=["Hello", "Hello"], seed=7)
    assert [request.params.seed for request in service.core.requests] == [7, 7]


@pytest.mark.parametrize("top_k", [-1, 0])
def test_top_k_off(service: Service, top_k: int) -> None:
    service.complete(top_k=top_k)
    assert service.core.requests[0].params.top_k == 0


def test_a_top_k_above_the_vocabulary_is_the_vocabulary(service: Service) -> None:
    service.complete(top_k=100_000)
    assert service.core.requests[0].params.top_k == VOCAB


def test_unknown_fields_are_passed_over(service: Service) -> None:
    service.core.answer(Answer(service.ids(" world")))
    response = service.complete(some_new_field={"a": [1]}, another=None, metadata={"a": "b"}, service_tier="auto")
    assert response.status_code == 200


# --- prompts ---


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([1, 2, VOCAB], "prompt"),
        ([-1], "prompt"),
        ([1.5], "prompt"),
        ([True], "prompt"),
        (["a", 1], "prompt[1]"),
        ([1, "a"], "prompt"),
        ([[1], [VOCAB]], "prompt[1]"),
        ([[1], "a"], "prompt[1]"),
        ([[1], []], "prompt"),
        (["a", ["b"]], "prompt[1]"),
        ([[["a"]]], "prompt[0]"),
        ([], "prompt"),
        ([[]], "prompt"),
        ("", "prompt"),
        (["", "a"], "prompt"),
        (5, "prompt"),
        (True, "prompt"),
        ({"text": "a"}, "prompt"),
        (None, "prompt"),
        ([None], "prompt"),
    ],
    ids=str,
)
def test_bad_prompts(service: Service, prompt: Any, param: str) -> None:
    assert error_of(service.complete(prompt=prompt), 400)["param"] == param
    assert not service.core.requests


def test_the_last_row_of_the_embedding_is_a_valid_prompt(service: Service) -> None:
    assert service.complete(prompt=[VOCAB - 1]).status_code == 200
    assert service.core.requests[0].prompt.tolist() == [VOCAB - 1]


def test_id_lists_are_sent_untouched_and_strings_get_their_special_tokens(service: Service) -> None:
    tokenizer = service.tokenizers[BYTE_FALLBACK]
    for prompt in ("Hello the", [5, 6], ["Hello", "the"], [[7], [8, 9]]):
        service.complete(model=BYTE_FALLBACK, prompt=prompt)
    service.complete(model=BYTE_FALLBACK, prompt="Hello", add_special_tokens=False)
    sent = [request.prompt.tolist() for request in service.core.requests]
    assert sent == [
        tokenizer.encode("Hello the").ids,
        [5, 6],
        tokenizer.encode("Hello").ids,
        tokenizer.encode("the").ids,
        [7],
        [8, 9],
        tokenizer.encode("Hello", add_special_tokens=False).ids,
    ]
    assert sent[0][0] == tokenizer.token_to_id("<s>") and tokenizer.token_to_id("<s>") not in sent[-1]


def test_an_empty_string_is_a_prompt_where_the_tokenizer_adds_a_bos(service: Service) -> None:
    assert service.complete(model=BYTE_FALLBACK, prompt="").status_code == 200
    assert service.core.requests[0].prompt.tolist() == [1]


def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(service: Service) -> None:
    words = [" one", " two", " three", " four"]
    answers = {(p, i): Answer([*service.ids(words[2 * p + i]), service.eos()]) for p in (0, 1) for i in (0, 1)}
    service.core.script = lambda request, i: answers[len(service.core.requests) - 1, i]
    response = service.complete(prompt=["Hello", "world"], n=2)
    assert [(choice["index"], choice["text"]) for choice in response.json()["choices"]] == list(enumerate(words))


def test_too_many_sequences(service: Service) -> None:
    error_of(service.complete(prompt=["a"] * 513), 400)
    assert error_of(service.complete(prompt=["a"] * 5, n=128), 400)["param"] == "n"
    assert not service.core.requests


# --- lengths ---


def test_the_context_bounds_prompt_and_answer(service: Service) -> None:
    assert service.complete(prompt=[5] * 500, max_tokens=12).status_code == 200
    for length, asked, param in (
        (500, 13, "max_tokens"),
        (3, 100_000, "max_tokens"),
        (512, None, "prompt"),
        (512, 1, "prompt"),
        (600, None, "prompt"),
    ):
        error = error_of(service.complete(prompt=[5] * length, max_tokens=asked), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", param), (length, asked)
    for asked_of_chat in (
        {"max_tokens": 600},
        {"max_completion_tokens": 600},
        {"max_completion_tokens": 600, "max_tokens": 5},
    ):
        error = error_of(service.chat(**asked_of_chat), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", next(iter(asked_of_chat)))


def test_absent_max_tokens(service: Service) -> None:
    """16 for completions, less where the context ends before; for chat all that is left."""
    service.complete(prompt=[5] * 3)
    service.complete(prompt=[5] * 510)
    service.chat()
    lengths = [(len(request.prompt), request.params.max_tokens) for request in service.core.requests]
    assert lengths[:2] == [(3, 16), (510, 2)]
    assert sum(lengths[2]) == 512


def test_max_completion_tokens_goes_before_max_tokens(service: Service) -> None:
    service.chat(max_tokens=5, max_completion_tokens=7)
    service.chat(max_completion_tokens=8)
    service.chat(max_tokens=9)
    assert [request.params.max_tokens for request in service.core.requests] == [7, 8, 9]


def test_min_tokens_above_max_tokens(service: Service) -> None:
    assert error_of(service.complete(min_tokens=6, max_tokens=5), 400)["param"] == "min_tokens"


def test_stream_options(service: Service) -> None:
    for body in (
        {"stream_options": {"include_usage": True}},
        {"stream": False, "stream_options": {}},
        {"stream": True, "stream_options": 5},
    ):
        assert error_of(service.complete(**body), 400)["param"] == "stream_options"
    error = error_of(service.complete(stream=True, stream_options={"include_usage": 1}), 400)
    assert error["param"] == "stream_options.include_usage"


# --- bodies ---


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"5", b'"x"', b"null", b"\xff\xfe", b'{"prompt": "\\ud800"}', b"{'a': 1}", b'{"a": 1} x'],
)
def test_bodies_that_are_no_json_object(service: Service, body: bytes) -> None:
    assert error_of(service.raw("/v1/completions", body), 400)["code"] == "invalid_json"
    assert error_of(service.raw("/v1/chat/completions", body), 400)["code"] == "invalid_json"
    assert error_of(service.raw("/tokenize", body), 400)["code"] == "invalid_json"


def test_nesting_bombs(service: Service) -> None:
    deep = b"[" * 200_000 + b"]" * 200_000
    for body in (deep, b'{"prompt": ' + deep + b"}", b'{"prompt": "x", "stop": ' + deep + b"}", b'{"a":' * 50_000):
        error_of(service.raw("/v1/completions", body), 400)


def test_the_content_type_does_not_matter(service: Service) -> None:
    body = json.dumps({"model": "byte-level", "prompt": "Hello"}).encode()
    assert service.raw("/v1/completions", body, **{"content-type": "text/plain"}).status_code == 200
