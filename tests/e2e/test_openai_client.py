"""The official client, unmodified, against the real services."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import jsonschema_rs
import openai
import pydantic
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


WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"City": {"enum": ["Oslo", "Quito"]}},
}
STOP: dict[str, Any] = {"type": "object", "properties": {"now": {"type": "boolean"}}, "required": ["now"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "halt", "parameters": STOP}},
]
SCHEMAS = {"weather": WEATHER, "halt": STOP}


def keeps(name: str, arguments: str) -> None:
    """They are what the function's schema asks for."""
    jsonschema_rs.validator_for(SCHEMAS[name]).validate(json.loads(arguments))


@pytest.mark.parametrize("name", [None, "halt"])
def test_forced_calls_keep_to_their_schemas(client: openai.OpenAI, model: str, name: str | None) -> None:
    """Whatever a tiny model would rather say; streamed and not. `name`: of the function that is asked for."""
    body: Any = {
        "model": model,
        "messages": MESSAGES,
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": name}} if name else "required",
        "parallel_tool_calls": False,
        "seed": 5,
        "max_tokens": 300,
    }
    plain = client.chat.completions.create(**body).choices[0]
    with client.chat.completions.stream(**body) as stream:
        streamed = stream.get_final_completion().choices[0]
    called = []
    for answer in (plain, streamed):
        (call,) = answer.message.tool_calls or []
        assert not answer.message.content and answer.finish_reason == ("stop" if name else "tool_calls")
        assert name in (None, call.function.name)
        keeps(call.function.name, call.function.arguments)
        called.append((call.function.name, call.function.arguments))
    assert called[0] == called[1]


class Day(pydantic.BaseModel):
    sky: Literal["clear", "cloudy"]
    degrees: Annotated[int, pydantic.Field(ge=-40, le=50)]


def test_responses(client: openai.OpenAI, model: str) -> None:
    body: Any = {"model": model, "input": "Tell me a story.", "max_output_tokens": 20, "temperature": 0}
    plain = client.responses.create(**body)
    chat = client.chat.completions.create(model=model, messages=MESSAGES, max_completion_tokens=20, temperature=0)
    assert plain.output_text == chat.choices[0].message.content
    with client.responses.stream(**body) as stream:
        events = list(stream)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == plain.output_text
    last: Any = events[-1]
    assert last.type == f"response.{plain.status}" and last.response.usage == plain.usage
    assert plain.status == ("incomplete" if chat.choices[0].finish_reason == "length" else "completed")
    parsed = client.responses.parse(model=model, input="The weather?", text_format=Day)
    assert parsed.output_parsed is not None and -40 <= parsed.output_parsed.degrees <= 50
    tools: Any = [{"type": "function", "name": tool["function"]["name"], **tool["function"]} for tool in TOOLS]
    called = client.responses.create(
        model=model, input="Go.", tools=tools, tool_choice="required", parallel_tool_calls=False, max_output_tokens=300
    )
    (call,) = called.output
    assert call.type == "function_call" and called.status == "completed"
    keeps(call.name, call.arguments)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=model, input="x", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"


def test_errors_have_the_clients_types(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError, match="model"):
        client.completions.create(model="no-such-model", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt="x", temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt="x", max_tokens=10**6)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "max_tokens")
