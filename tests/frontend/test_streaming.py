"""Streamed answers: the contract of their chunks, and that they say what the whole answer says (C08, C14)."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest
from fake_core import Answer
from frontend_service import BYTE_FALLBACK, BYTE_LEVEL, Service, error_of, events

from common.wire import EndReason

HARD_TEXT = "A 世界 👩‍👩‍👧 é\n  x"
PATHS = {"completions": "complete", "chat": "chat"}


def text_of(choice: dict[str, Any]) -> str:
    """The text of a chunk's choice, or of a whole one, in either API."""
    if "text" in choice:
        return choice["text"]
    return choice.get("delta", choice.get("message")).get("content", "")


def ask(service: Service, kind: str, **body: Any) -> tuple[dict[str, Any], list[Any]]:
    """The same request, whole and streamed."""
    whole = getattr(service, PATHS[kind])(**body)
    assert whole.status_code == 200, whole.text
    return whole.json(), events(getattr(service, PATHS[kind])(**body, stream=True))


ENDINGS = {
    "eos": {"words": " one two three", "reason": EndReason.EOS, "finish": "stop"},
    "max_tokens": {"words": " one two three", "reason": EndReason.LENGTH, "finish": "length"},
    "stop token": {"words": " one two three", "reason": EndReason.STOP_TOKEN, "finish": "stop"},
    "stop string": {"words": " one two three", "reason": EndReason.EOS, "finish": "stop", "stop": ["tw", "zzz"]},
    "one token": {"words": "x", "reason": EndReason.LENGTH, "finish": "length"},
    "eos at once": {"words": "", "reason": EndReason.EOS, "finish": "stop"},
}


def answer_for(service: Service, words: str, reason: EndReason) -> Answer:
    ids = service.ids(words)
    if reason == EndReason.EOS:
        ids = [*ids, service.eos()]
    if reason == EndReason.STOP_TOKEN:
        ids = [*ids, service.ids("Q")[0]]
    return Answer(ids, reason, cached_tokens=1)


@pytest.mark.parametrize("usage", [None, "last", "continuous"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("kind", PATHS)
def test_the_chunk_contract(service: Service, kind: str, ending: str, n: int, usage: str | None) -> None:
    how = ENDINGS[ending]
    answer = answer_for(service, how["words"], how["reason"])
    service.core.answer(answer)
    body: dict[str, Any] = {"n": n, "max_tokens": max(1, len(answer.tokens)), "stop": how.get("stop")}
    body["stop_token_ids"] = service.ids("Q")
    whole = getattr(service, PATHS[kind])(**body).json()
    options = {None: None, "last": {"include_usage": True}}.get(
        usage, {"include_usage": True, "continuous_usage_stats": True}
    )
    chunks = events(getattr(service, PATHS[kind])(**body, stream=True, stream_options=options))

    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert chunks[0]["object"] == ("text_completion" if kind == "completions" else "chat.completion.chunk")
    if usage is None:
        assert all("usage" not in chunk for chunk in chunks)
    else:
        last = chunks.pop()
        assert last["choices"] == []
        assert without_cache(last["usage"]) == without_cache(whole["usage"])
        for chunk in chunks:
            assert (chunk["usage"] is None) == (usage == "last")
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    for index in range(n):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert all("finish_reason" in choice for choice in mine)
        assert [choice["finish_reason"] for choice in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == how["finish"] == whole["choices"][index]["finish_reason"]
        if kind == "chat":
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
            assert all("role" not in choice["delta"] for choice in mine[1:])
        assert "".join(map(text_of, mine)) == text_of(whole["choices"][index])
        assert mine[-1]["stop_reason"] == whole["choices"][index]["stop_reason"]


def without_cache(usage: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in usage.items() if key != "prompt_tokens_details"}


@pytest.mark.parametrize("ending", ENDINGS)
def test_what_is_shown_and_counted_at_each_ending(service: Service, ending: str) -> None:
    how = ENDINGS[ending]
    text = " one " if ending == "stop string" else how["words"]
    answer = answer_for(service, how["words"], how["reason"])
    service.core.answer(answer)
    body = {"max_tokens": max(1, len(answer.tokens)), "stop": how.get("stop"), "stop_token_ids": service.ids("Q")}
    whole = service.complete(**body).json()
    assert whole["choices"][0]["text"] == text
    counted = len(answer.tokens)
    if "stop" in how:
        decode = service.tokenizers[BYTE_LEVEL].decode
        counted = next(i for i in range(counted + 1) if "tw" in decode(answer.tokens[:i]))
    assert whole["usage"]["completion_tokens"] == counted
    assert whole["usage"]["prompt_tokens"] == 1
    assert whole["usage"]["total_tokens"] == counted + 1


def test_usage_counts_each_prompt_once_and_every_choice(service: Service) -> None:
    service.core.answer(Answer([*service.ids(" one"), service.eos()], cached_tokens=1))
    ids = len(service.ids(" one")) + 1
    usage = service.complete(prompt=[[5, 6, 7], [8, 9]], n=2).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 4 * ids, 5 + 4 * ids)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("model", [BYTE_LEVEL, BYTE_FALLBACK])
def test_hard_text_streams_as_it_is(service: Service, model: str, kind: str) -> None:
    service.core.answer(Answer([*service.ids(HARD_TEXT, model), service.eos(model)]))
    service.core.interval_s = 0.001
    whole, chunks = ask(service, kind, model=model, max_tokens=200)
    parts = [text_of(chunk["choices"][0]) for chunk in chunks]
    expected = HARD_TEXT if model == BYTE_LEVEL else " " + HARD_TEXT
    assert "".join(parts) == text_of(whole["choices"][0]) == expected
    assert not any("\ufffd" in part for part in parts)
    assert len(parts) > 5


@pytest.mark.parametrize("model", [BYTE_LEVEL, BYTE_FALLBACK])
def test_an_emoji_cut_by_max_tokens_is_one_replacement_character_in_both_modes(service: Service, model: str) -> None:
    ids = service.ids("x🙂", model)
    service.core.answer(Answer(ids))
    whole, chunks = ask(service, "completions", model=model, max_tokens=len(ids) - 1)
    assert text_of(whole["choices"][0]).lstrip() == "x\ufffd"
    assert "".join(text_of(chunk["choices"][0]) for chunk in chunks).lstrip() == "x\ufffd"
    assert whole["choices"][0]["finish_reason"] == "length"


def test_a_first_token_that_begins_with_a_space_keeps_it(service: Service) -> None:
    service.core.answer(Answer([*service.ids(" the"), service.eos()]))
    assert service.complete().json()["choices"][0]["text"] == " the"
    service.core.answer(Answer([*service.ids("the", BYTE_FALLBACK), service.eos(BYTE_FALLBACK)]))
    assert service.complete(model=BYTE_FALLBACK).json()["choices"][0]["text"] == " the"


def test_tokens_come_as_they_are_made(service: Service) -> None:
    """Each chunk arrives before the core goes on to the next token."""
    gate = threading.Semaphore(0)
    words = [" one", " two", " three"]
    service.core.answer(Answer([service.ids(word)[-1] for word in words], EndReason.LENGTH, gate=gate))
    body = {"model": BYTE_LEVEL, "prompt": "Hello", "stream": True, "max_tokens": 3}
    gate.release()
    texts = []
    with httpx.stream("POST", service.url + "/v1/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                texts.append(json.loads(line[6:])["choices"][0]["text"])
                gate.release()
    assert "".join(texts) == service.tokenizers[BYTE_LEVEL].decode([service.ids(word)[-1] for word in words])
    assert len(texts) >= 3


def test_no_head_is_sent_before_the_first_result(service: Service) -> None:
    """So an early error has its own status, and time to first token is what clients measure."""
    service.core.answer(Answer((), EndReason.REJECTED, message="it is too much"))
    error = error_of(service.chat(stream=True), 400)
    assert "too much" in error["message"]


# --- special tokens and stop conditions ---


def test_the_ending_tokens_text_is_not_shown(service: Service) -> None:
    service.core.answer(Answer([*service.ids(" one"), service.eos()]))
    whole, chunks = ask(service, "completions", skip_special_tokens=False)
    assert whole["choices"][0]["text"] == " one"
    assert "".join(text_of(chunk["choices"][0]) for chunk in chunks) == " one"


def test_the_ending_tokens_text_is_shown_on_demand(service: Service) -> None:
    service.core.answer(Answer([*service.ids(" one"), service.eos()]))
    whole, _ = ask(service, "completions", skip_special_tokens=False, include_stop_str_in_output=True)
    assert whole["choices"][0]["text"] == " one<|im_end|>"
    whole, _ = ask(service, "completions", include_stop_str_in_output=True)
    assert whole["choices"][0]["text"] == " one"


def test_an_eos_that_does_not_end_is_skipped_or_shown_as_any_special_token(service: Service) -> None:
    service.core.answer(Answer([*service.ids("a"), service.eos(), *service.ids("b"), service.eos()], EndReason.LENGTH))
    for ignore_eos in (True, False):
        body = {"ignore_eos": ignore_eos, "max_tokens": 4}
        whole, chunks = ask(service, "completions", **body)
        assert whole["choices"][0]["text"] == "ab"
        assert "".join(text_of(chunk["choices"][0]) for chunk in chunks) == "ab"
        whole, _ = ask(service, "completions", **body, skip_special_tokens=False)
        assert whole["choices"][0]["text"] == "a<|im_end|>b<|im_end|>"


def test_a_stop_token_of_the_request_is_named_and_hidden(service: Service) -> None:
    stop = service.ids("Q")[0]
    service.core.answer(Answer([*service.ids(" one"), stop], EndReason.STOP_TOKEN))
    choice = service.complete(stop_token_ids=[stop]).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (" one", "stop", stop)


@pytest.mark.parametrize("together", [True, False])
def test_stop_strings_across_tokens_are_cut_and_the_core_is_told(service: Service, together: bool) -> None:
    ids = service.ids("alpha beta STOP gamma") + service.ids(" delta") * 20
    service.core.answer(Answer(ids, endless=True))
    service.core.interval_s = 0.0 if together else 0.002
    cases: list[tuple[Any, bool, str, str]] = [
        ("STOP", False, "alpha beta ", "STOP"),
        (["nothing", "ta ST"], False, "alpha be", "ta ST"),
        (["STOP"], True, "alpha beta STOP", "STOP"),
    ]
    for stop, include, shown, found in cases:
        whole, chunks = ask(service, "completions", stop=stop, include_stop_str_in_output=include, max_tokens=400)
        assert whole["choices"][0]["text"] == "".join(text_of(chunk["choices"][0]) for chunk in chunks) == shown
        assert (whole["choices"][0]["finish_reason"], whole["choices"][0]["stop_reason"]) == ("stop", found)
    assert service.core.wait_for(lambda: service.core.live == 0)
    assert len(service.core.stopped) == 6 and not service.core.aborted


def test_held_back_text_comes_out_when_it_was_no_stop_string(service: Service) -> None:
    service.core.answer(Answer([*service.ids("alpha STO"), service.eos()]))
    whole, chunks = ask(service, "completions", stop="STOP")
    assert whole["choices"][0]["text"] == "alpha STO" == "".join(text_of(chunk["choices"][0]) for chunk in chunks)
    assert whole["choices"][0]["stop_reason"] is None


def test_completion_tokens_end_with_the_token_that_completed_the_stop_string(service: Service) -> None:
    ids = service.ids("alpha STOP") + service.ids(" rest of it")
    service.core.answer(Answer([*ids, service.eos()]))
    whole = service.complete(stop="STOP", max_tokens=100).json()
    assert whole["usage"]["completion_tokens"] == len(service.ids("alpha STOP"))


def test_a_stop_string_does_not_count_before_min_tokens(service: Service) -> None:
    """The token that completes it must be one after the first `min_tokens`."""
    x, stop = service.ids("x")[0], service.ids("Q")[0]
    service.core.answer(Answer([x, stop, x, x, stop, x, x, service.eos()]))
    for least, text in ((0, "x"), (1, "x"), (2, "xQxx"), (4, "xQxx"), (5, "xQxxQxx")):
        assert service.complete(stop="Q", min_tokens=least).json()["choices"][0]["text"] == text


def test_a_stop_string_of_byte_tokens_stops_at_once(service: Service) -> None:
    """Its characters are held back by the detokenizer, but count as soon as they are whole."""
    ids = service.ids("世", BYTE_FALLBACK)[1:]
    the = service.tokenizers[BYTE_FALLBACK].token_to_id("▁the")
    service.core.answer(Answer([the, *ids, the, the], EndReason.LENGTH))
    whole, _ = ask(service, "completions", model=BYTE_FALLBACK, stop="世", max_tokens=20)
    assert whole["choices"][0]["text"] == " the"
    assert whole["usage"]["completion_tokens"] == 1 + len(ids)


def test_a_stop_string_wins_over_the_length(service: Service) -> None:
    service.core.answer(Answer(service.ids("alpha STOP")))
    choice = service.complete(stop="STOP", max_tokens=len(service.ids("alpha STOP"))).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("alpha ", "stop")


# --- endings that are errors ---

FAILURES = [
    (EndReason.REJECTED, 400, "invalid_request_error"),
    (EndReason.QUEUE_FULL, 429, "rate_limit_error"),
    (EndReason.NO_EXECUTOR, 503, "service_unavailable"),
    (EndReason.SHUTDOWN, 503, "service_unavailable"),
    (EndReason.ABORTED, 503, "service_unavailable"),
    (EndReason.FAILED, 500, "server_error"),
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize(("reason", "status", "type_"), FAILURES)
def test_how_abnormal_endings_are_told(
    service: Service, kind: str, reason: EndReason, status: int, type_: str, stream: bool
) -> None:
    service.core.answer(Answer((), reason, message="this is why", retry_after_s=7))
    response = getattr(service, PATHS[kind])(stream=stream)
    error = error_of(response, status)
    assert (error["type"], error["message"]) == (type_, "this is why")
    assert response.headers.get("retry-after") == ("7" if status == 429 or reason == EndReason.NO_EXECUTOR else None)


@pytest.mark.parametrize("kind", PATHS)
def test_an_error_in_mid_stream(service: Service, kind: str) -> None:
    service.core.interval_s = 0.01
    service.core.answer(Answer(service.ids(" one two"), EndReason.FAILED, message="it broke"))
    *chunks, last = events(getattr(service, PATHS[kind])(stream=True, stream_options={"include_usage": True}))
    assert last["error"]["message"] == "it broke"
    assert "".join(text_of(chunk["choices"][0]) for chunk in chunks) == " one two"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)


def test_one_failed_choice_ends_the_others(service: Service) -> None:
    service.core.answer(Answer(service.ids("x"), endless=True), Answer((), EndReason.FAILED))
    error_of(service.complete(n=2, max_tokens=500), 500)
    assert service.core.wait_for(lambda: service.core.live == 0)
