"""The official `openai` client works as it is."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from fake_core import Answer
from frontend_service import BYTE_FALLBACK, BYTE_LEVEL, Service

from common.wire import EndReason, Retention


@pytest.fixture
def client(service: Service) -> Iterator[openai.OpenAI]:
    service.core.answer(Answer([*service.ids(" one two three"), service.eos()], cached_tokens=2))
    with openai.OpenAI(base_url=service.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


HELLO = [{"role": "user", "content": "Hello"}]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [BYTE_LEVEL, BYTE_FALLBACK]
    assert client.models.retrieve(BYTE_FALLBACK).id == BYTE_FALLBACK


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=BYTE_LEVEL, prompt="Hello", max_tokens=20, logprobs=0)
    assert answer.choices[0].text == " one two three"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs and len(answer.choices[0].logprobs.tokens or []) == answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


def test_streamed_completions(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model=BYTE_LEVEL, prompt="Hello", max_tokens=20, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == " one two three"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=BYTE_LEVEL, messages=HELLO, logprobs=True, top_logprobs=0, n=2)
    assert [choice.message.content for choice in answer.choices] == [" one two three"] * 2
    assert answer.choices[0].message.role == "assistant"
    assert len(answer.choices[0].logprobs.content) * 2 == answer.usage.completion_tokens


def test_streamed_chat_with_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=BYTE_LEVEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == " one two three"
    assert last.choices == [] and last.usage.completion_tokens > 0
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens


def test_the_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=BYTE_LEVEL, messages=HELLO) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == " one two three"


def test_errors(client: openai.OpenAI, service: Service) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=BYTE_LEVEL, messages=HELLO, temperature=5)
    assert bad.value.param == "temperature" and bad.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=HELLO)
    assert missing.value.code == "model_not_found"
    for reason, kind in (
        (EndReason.QUEUE_FULL, openai.RateLimitError),
        (EndReason.NO_EXECUTOR, openai.InternalServerError),
        (EndReason.FAILED, openai.InternalServerError),
    ):
        service.core.answer(Answer((), reason, message="why"))
        with pytest.raises(kind, match="why"):
            client.chat.completions.create(model=BYTE_LEVEL, messages=HELLO, stream=True)


def test_an_error_in_mid_stream(client: openai.OpenAI, service: Service) -> None:
    service.core.interval_s = 0.01
    service.core.answer(Answer(service.ids(" one two"), EndReason.FAILED, message="it broke"))
    stream = client.chat.completions.create(model=BYTE_LEVEL, messages=HELLO, stream=True)
    text = ""
    with pytest.raises(openai.APIError, match="it broke"):
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
    assert text == " one two"


def test_closing_a_stream_stops_the_work(client: openai.OpenAI, service: Service) -> None:
    service.core.interval_s = 0.002
    service.core.answer(Answer(service.ids("x"), endless=True))
    stream = client.chat.completions.create(model=BYTE_LEVEL, messages=HELLO, stream=True)
    next(stream)
    stream.close()
    assert service.core.wait_for(lambda: service.core.live == 0)


def test_scheduling_fields(client: openai.OpenAI, service: Service) -> None:
    """OpenAI's own by name, ours as `extra_body`, and the headers."""
    answer = client.chat.completions.with_raw_response.create(
        model=BYTE_LEVEL,
        messages=HELLO,
        user="someone",
        prompt_cache_key="key",
        prompt_cache_retention="24h",
        extra_body={"cache_salt": "secret", "deadline_ms": 1500, "priority": -1},
        extra_headers={"X-Tenant": "acme", "X-Request-Id": "mine"},
    )
    assert answer.request_id == "mine" and answer.parse().id == "chatcmpl-mine"
    (request,) = service.core.requests
    assert (request.tenant, request.priority, request.deadline_ms) == ("acme", -1, 1500)
    assert request.retention == Retention.KEEP and len(request.salt) == 16
