"""The shape and alignment of logprobs (C12, C21). Values are the core's, which are raw: before temperature."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import httpx
import pytest
from fake_core import Answer, Scores
from frontend_service import BYTE_FALLBACK, BYTE_LEVEL, Service, error_of, events

from common.wire import EndReason


def scored(ids: list[int], top: int, value: float = -0.5) -> list[Scores]:
    """The chosen token is the second most likely one."""
    return [
        [(token, value), (200, -0.25), (token, value), *((201 + i, -1.0 - i) for i in range(20))][: top + 1]
        for token in ids
    ]


def float32(value: float) -> float:
    return pytest.approx(value, rel=1e-6)


def play(service: Service, text: str, top: int, model: str = BYTE_LEVEL, **how: Any) -> list[int]:
    ids = service.ids(text, model)
    service.core.answer(Answer([*ids, service.eos(model)], scores=scored([*ids, service.eos(model)], top), **how))
    return ids


@pytest.mark.parametrize("model", [BYTE_LEVEL, BYTE_FALLBACK])
@pytest.mark.parametrize("top", [None, 0, 5, 20])
def test_chat(service: Service, model: str, top: int | None) -> None:
    text = "x 👩‍👧 é世"
    ids = play(service, text, top or 0, model)
    body = {"model": model, "logprobs": True, "top_logprobs": top}
    whole = service.chat(**body).json()
    content = whole["choices"][0]["logprobs"]["content"]
    assert len(content) == whole["usage"]["completion_tokens"] == len(ids) + 1
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == whole["choices"][0]["message"]["content"]
    for entry in content:
        assert entry["logprob"] == float32(-0.5)
        assert len(entry["top_logprobs"]) == (top or 0)
        values = [other["logprob"] for other in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        if (top or 0) >= 2:
            assert entry["top_logprobs"][1]["token"] == entry["token"]
            assert entry["top_logprobs"][1]["logprob"] == entry["logprob"]
    assert content[-1]["token"] in ("<|im_end|>", "</s>") and content[-1]["bytes"] == []
    assert service.core.requests[0].params.logprobs == (top or 0)

    streamed: list[Any] = []
    for chunk in events(service.chat(**body, stream=True)):
        streamed += (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    assert streamed == content


def test_tokens_that_are_parts_of_characters_are_named_by_their_bytes(service: Service) -> None:
    play(service, "👩", 0)
    content = service.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    for entry in content[:-1]:
        assert entry["token"] == "bytes:" + "".join(f"\\x{value:02x}" for value in entry["bytes"])


@pytest.mark.parametrize("top", [0, 1, 5])
def test_completions(service: Service, top: int) -> None:
    text = " one 世 two"
    ids = play(service, text, top)
    whole = service.complete(logprobs=top).json()
    logprobs = whole["choices"][0]["logprobs"]
    assert whole["choices"][0]["text"] == text
    count = whole["usage"]["completion_tokens"]
    assert {len(column) for column in logprobs.values()} == {count} and count == len(ids) + 1
    assert logprobs["token_logprobs"] == [float32(-0.5)] * count
    for token, top_map in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert len(top_map) == {0: 1, 1: 2, 5: 5}[top], "the chosen token is there in any case"
        assert top_map[token] == logprobs["token_logprobs"][0]
    assert logprobs["text_offset"][0] == 0
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    place = logprobs["tokens"].index(" two") if " two" in logprobs["tokens"] else None
    if place is not None:
        assert text[logprobs["text_offset"][place] :] == " two"

    streamed: dict[str, list[Any]] = {name: [] for name in logprobs}
    for chunk in events(service.complete(logprobs=top, stream=True)):
        for name, column in (chunk["choices"][0]["logprobs"] or {}).items():
            streamed[name] += column
    assert streamed == logprobs


def test_offsets_count_the_characters_before_a_token(service: Service) -> None:
    ids = play(service, "é世x", 0)
    logprobs = service.complete(logprobs=0).json()["choices"][0]["logprobs"]
    decode = service.tokenizers[BYTE_LEVEL].decode
    for place, offset in enumerate(logprobs["text_offset"][:-1]):
        assert offset == len(decode(ids[:place]).rstrip("\ufffd"))


def test_a_greedy_choice_has_the_same_float_in_both_places(service: Service) -> None:
    token = service.ids("x")[0]
    service.core.answer(Answer([token], EndReason.LENGTH, scores=[[(token, -0.1), (token, -0.1)]]))
    logprobs = service.complete(logprobs=1, max_tokens=1).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"x": logprobs["token_logprobs"][0]}]


@pytest.mark.parametrize("value", [-math.inf, math.nan, math.inf])
@pytest.mark.parametrize("stream", [True, False])
def test_values_that_json_cannot_carry(service: Service, value: float, stream: bool) -> None:
    token = service.ids("x")[0]
    service.core.answer(Answer([token], EndReason.LENGTH, scores=[[(token, value), (5, 0.0), (6, value)]]))
    for response in (
        service.chat(logprobs=True, top_logprobs=2, max_tokens=1, stream=stream),
        service.complete(logprobs=2, max_tokens=1, stream=stream),
    ):
        assert response.status_code == 200
        assert "-9999.0" in response.text and "null,0.0" not in response.text
        chunks = events(response) if stream else [response.json()]
        (logprobs,) = filter(None, [chunk["choices"][0]["logprobs"] for chunk in chunks])
        values = logprobs["token_logprobs"] if "tokens" in logprobs else [logprobs["content"][0]["logprob"]]
        assert values == [-9999.0]


def test_a_stop_string_leaves_one_entry_for_each_counted_token(service: Service) -> None:
    play(service, "alpha STOP and more", 0)
    for stream in (False, True):
        body = {"stop": "STOP", "logprobs": 0, "stream": stream}
        if not stream:
            whole = service.complete(**body, max_tokens=100).json()
            assert whole["choices"][0]["text"] == "alpha "
            assert len(whole["choices"][0]["logprobs"]["tokens"]) == whole["usage"]["completion_tokens"]
        else:
            options = {"include_usage": True}
            *chunks, usage = events(service.complete(**body, max_tokens=100, stream_options=options))
            entries = [chunk["choices"][0]["logprobs"] or {"tokens": []} for chunk in chunks]
            assert sum(len(entry["tokens"]) for entry in entries) == usage["usage"]["completion_tokens"]


def test_limits(service: Service) -> None:
    assert error_of(service.chat(logprobs=True, top_logprobs=21), 400)["param"] == "top_logprobs"
    assert error_of(service.chat(top_logprobs=3), 400)["param"] == "top_logprobs"
    assert error_of(service.chat(logprobs=3), 400)["param"] == "logprobs"
    assert error_of(service.complete(logprobs=21), 400)["param"] == "logprobs"
    assert service.chat(top_logprobs=0).status_code == 200


def test_without_logprobs_there_are_none(service: Service) -> None:
    service.core.answer(Answer([*service.ids("x"), service.eos()]))
    assert service.complete().json()["choices"][0]["logprobs"] is None
    assert service.chat(logprobs=False).json()["choices"][0]["logprobs"] is None
    assert service.core.requests[0].params.logprobs == -1


# --- echo ---


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_echo(service: Service, n: int, as_ids: bool, stream: bool) -> None:
    service.core.answer(Answer([*service.ids(" one"), service.eos()]))
    prompts = [service.ids(text) if as_ids else text for text in ("Hello world", "def add")]
    response = service.complete(prompt=prompts, echo=True, n=n, stream=stream)
    wanted = ["Hello world one"] * n + ["def add one"] * n
    if stream:
        texts = [""] * len(wanted)
        for chunk in events(response):
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert texts == wanted
    else:
        assert [choice["text"] for choice in response.json()["choices"]] == wanted


def test_echo_of_ids_that_end_within_a_character(service: Service) -> None:
    emoji = service.ids("🙂")
    service.core.answer(Answer(emoji[2:], EndReason.LENGTH))
    text = service.complete(prompt=emoji[:2], echo=True, max_tokens=len(emoji) - 2).json()["choices"][0]["text"]
    assert text == "🙂"
    text = service.complete(prompt=emoji[:2], max_tokens=len(emoji) - 2).json()["choices"][0]["text"]
    assert text == "🙂"


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_the_prompts_logprobs(service: Service, stream: bool) -> None:
    """As lm-eval asks: batches of ids, one new token, one alternative."""
    prompt = service.ids("Hello world. It was")
    new = service.ids(" the")[:1]
    prompt_scores = [[(token, -2.0), (token, -2.0)] for token in prompt[1:]]
    service.core.answer(Answer(new, EndReason.LENGTH, scores=scored(new, 1), prompt_scores=prompt_scores))
    response = service.complete(prompt=[prompt, prompt], echo=True, max_tokens=1, logprobs=1, seed=1234, stream=stream)
    assert all(r.params.prompt_logprobs == 1 for r in service.core.requests)
    if stream:
        found: list[dict[str, list[Any]]] = [{}, {}]
        texts = ["", ""]
        for chunk in events(response):
            choice = chunk["choices"][0]
            texts[choice["index"]] += choice["text"]
            for name, column in (choice["logprobs"] or {}).items():
                found[choice["index"]].setdefault(name, []).extend(column)
    else:
        found = [choice["logprobs"] for choice in response.json()["choices"]]
        texts = [choice["text"] for choice in response.json()["choices"]]
    decode = service.tokenizers[BYTE_LEVEL].decode
    assert texts == [decode(prompt + new)] * 2
    for logprobs in found:
        assert len(logprobs["token_logprobs"]) == len(prompt) + 1
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        assert logprobs["token_logprobs"][1:] == [-2.0] * (len(prompt) - 1) + [-0.5]
        assert logprobs["tokens"][:-1] == [decode([token]) for token in prompt]
        assert logprobs["top_logprobs"][1] == {logprobs["tokens"][1]: -2.0}
        assert logprobs["text_offset"] == [len(decode(prompt[:i])) for i in range(len(prompt) + 1)]


def test_long_answers_hold_up_nobody(service: Service) -> None:
    """Tens of thousands of entries take seconds to write."""
    ids = service.ids("lazy dog. ") * 40
    service.core.answer(Answer(ids, EndReason.LENGTH, scores=scored(ids, 20)))
    answers: list[Any] = []
    body = {"n": 48, "max_tokens": len(ids), "logprobs": True, "top_logprobs": 20}
    asking = threading.Thread(target=lambda: answers.append(service.chat(**body)))
    asking.start()
    longest = 0.0
    with httpx.Client(base_url=service.url, timeout=60) as client:
        while asking.is_alive():
            began = time.monotonic()
            assert client.get("/health").status_code == 200
            longest = max(longest, time.monotonic() - began)
    asking.join()
    assert longest < 2
    choices = answers[0].json()["choices"]
    assert [len(choice["logprobs"]["content"]) for choice in choices] == [len(ids)] * 48
    assert all(choice["logprobs"] == choices[0]["logprobs"] for choice in choices)
