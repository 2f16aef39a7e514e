"""The official client, unmodified, against the real services."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

MESSAGES: list[Any] = [{"role": "user", "content": "Tell me a story."}]


@pytest.fixture(scope="module")
def client(real_stack: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{real_stack.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    (model,) = client.models.list().data
    return model.id


def test_completion(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt="In the beginning", max_tokens=12, temperature=0, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text == answer.choices[1].text and answer.choices[0].text
    assert answer.usage is not None and answer.usage.completion_tokens <= 24


def test_chat(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=MESSAGES, max_completion_tokens=20, temperature=0)
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length")


def test_streams_with_usage_equal_the_plain_answers(client: openai.OpenAI, model: str) -> None:
    plain = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=20, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=MESSAGES,
            max_tokens=20,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == plain.choices[0].message.content
    endings = [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason is not None]
    assert endings == [plain.choices[0].finish_reason]
    last, usage = chunks[-1], plain.usage
    assert last.choices == [] and last.usage is not None and usage is not None
    assert last.usage.completion_tokens == usage.completion_tokens
    assert last.usage.prompt_tokens == usage.prompt_tokens


def test_logprobs(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)


def test_errors_have_the_clients_types(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError, match="model"):
        client.completions.create(model="no-such-model", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt="x", temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt="x", max_tokens=10**6)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "max_tokens")
