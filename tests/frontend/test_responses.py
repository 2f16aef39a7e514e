"""`/v1/responses`: what becomes of its input, its answers, plain and in events, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest
from fake_core import Answer
from frontend_service import error_of
from tooled import TOKENIZER, Tooled, rendered, says

from common.wire import EndReason
from scheduler_svc.frontend.parsing.parts import Content, Reasoning
from scheduler_svc.frontend.responses.output import Output, ReasoningTokens
from scheduler_svc.frontend.responses.scores import PlacedLogprobs

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "name": "get_weather", "description": "Now", "parameters": PARAMETERS, "strict": None}
PARIS = '{"city": "Paris"}'
CALL = f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}}}</tool_call>'
LOGPROBS = "message.output_text.logprobs"
THOUGHT = f"So it is.\n</think>\n\nWell.\n{CALL}\n{CALL}"


def told(service: Tooled, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream; what SSE says of each is what its data says, and they are numbered."""
    answer = service.post("/v1/responses", stream=True, **{"model": "hermes", "input": "Hello", **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *blocks, rest = answer.text.split("\n\n")
    lines = [block.split("\n") for block in blocks]
    found = [json.loads(data.removeprefix("data: ")) for _, data in lines]
    assert rest == "" and [name for name, _ in lines] == [f"event: {event['type']}" for event in found]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def gathered(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The response at the end of a stream, whose output must be what the events before it make."""
    first, second, *middle, last = events
    assert (first["type"], second["type"]) == ("response.created", "response.in_progress")
    assert (first["response"]["status"], first["response"]["output"]) == ("in_progress", [])
    items: list[dict[str, Any]] = []
    texts: list[str] = []
    scores: list[list[Any]] = []
    for event in middle:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(items) and event["item"]["status"] == "in_progress"
                items.append(event["item"])
                texts.append("")
                scores.append([])
                continue
            case "content_part.added":
                assert event["part"]["text"] == ""
            case "content_part.done":
                assert event["part"]["text"] == texts[-1]
                assert event["part"].get("logprobs", []) == scores[-1]
            case "output_item.done":
                assert event["item"]["id"] == items[-1]["id"]
                items[-1] = event["item"]
            case "output_text.delta" | "reasoning_text.delta" | "function_call_arguments.delta":
                texts[-1] += event["delta"]
                scores[-1] += event.get("logprobs", [])
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == texts[-1] and event.get("logprobs", []) == scores[-1]
            case "function_call_arguments.done":
                assert event["arguments"] == texts[-1]
        if "item_id" in event:
            assert (event["item_id"], event["output_index"]) == (items[-1]["id"], len(items) - 1)
    assert items == last["response"]["output"]
    assert last["type"] == f"response.{last['response']['status']}"
    return dict(last["response"])


def ask(service: Tooled, **body: Any) -> dict[str, Any]:
    """Plain and streamed: both say the same, but for what names and dates them."""
    answer = service.post("/v1/responses", **{"model": "hermes", "input": "Hello", "request_id": "r", **body})
    assert answer.status_code == 200, answer.text
    plain, streamed = answer.json(), gathered(told(service, request_id="r", **body))
    for one in (plain, streamed):
        del one["created_at"]
        for item in one["output"]:
            item.pop("call_id", None)
    assert plain == streamed
    return dict(plain)


def test_a_plain_answer(tooled: Tooled) -> None:
    tooled.core.answer(Answer(TOKENIZER.encode(" one two").ids, cached_tokens=2))
    response = ask(tooled, instructions="Be short.", temperature=0.5, max_output_tokens=20, metadata={"a": "b"})
    part = {"type": "output_text", "text": " one two", "annotations": [], "logprobs": []}
    message = {"id": "msg_r_0", "type": "message", "status": "completed", "role": "assistant", "content": [part]}
    assert (response["id"], response["status"], response["output"]) == ("resp_r", "completed", [message])
    usage = response["usage"]
    assert usage["input_tokens_details"] == {"cached_tokens": 2}
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    said = {"temperature": 0.5, "max_output_tokens": 20, "metadata": {"a": "b"}, "store": False, "tool_choice": "auto"}
    assert said.items() <= response.items() and response["instructions"] == "Be short."
    assert rendered(tooled).startswith("<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHello<|im_end|>")
    assert tooled.core.requests[-1].params.max_tokens == 20


def test_a_cut_answer_is_incomplete(tooled: Tooled) -> None:
    says(tooled, "one two three four five six")
    response = ask(tooled, max_output_tokens=2)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"


def test_reasoning_and_calls(tooled: Tooled) -> None:
    """Each item as it comes, in the order of the text."""
    says(tooled, THOUGHT)
    response = ask(tooled, model="thinks", tools=[TOOL])
    thought, message, *calls = response["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "So it is."}] and thought["summary"] == []
    assert message["content"][0]["text"] == "Well.\n"
    assert [(call["name"], call["arguments"], call["status"]) for call in calls] == [
        ("get_weather", PARIS, "completed")
    ] * 2
    ids = TOKENIZER.encode(THOUGHT, add_special_tokens=False).ids
    counted = ids.index(TOKENIZER.token_to_id("</think>")) + 1
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": counted}
    assert response["tools"] == [TOOL]
    says(tooled, "So it is", EndReason.LENGTH)
    response = ask(tooled, model="thinks")
    assert [item["type"] for item in response["output"]] == ["reasoning"]
    usage = response["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] == usage["output_tokens"]


def test_tokens_of_reasoning_whose_end_is_several_tokens() -> None:
    output, tokens = Output("r"), ReasoningTokens(None)
    tokens.add([1, 2, 3])
    for part in (Reasoning("x" * 30), Content("y" * 10)):
        output.add(part)
    assert tokens.count(output, 20) == 15


def scored(service: Tooled, text: str, top: int, *more: int) -> None:
    """The model writes this, and these tokens; each as likely as the one of the next id."""
    ids = [*TOKENIZER.encode(text, add_special_tokens=False).ids, *more]
    scores = [[(token, -0.5), *((token + i, -0.5 - i) for i in range(top))] for token in ids]
    service.core.answer(Answer(ids, scores=scores))


def test_logprobs_are_a_chats_without_the_token_that_ends_the_answer(tooled: Tooled) -> None:
    text, end = "x 👩‍👧 é世", TOKENIZER.token_to_id("<|im_end|>")
    for top in (0, 3):
        scored(tooled, text, top, end)
        asked = {"logprobs": True, "top_logprobs": top, "messages": [{"role": "user", "content": "Hello"}]}
        [choice] = tooled.post("/v1/chat/completions", model="hermes", **asked).json()["choices"]
        response = ask(tooled, include=[LOGPROBS], top_logprobs=top)
        [part] = response["output"][0]["content"]
        *entries, last = choice["logprobs"]["content"]
        assert (part["text"], part["logprobs"], last["bytes"]) == (text, entries, [])
        assert [len(entry["top_logprobs"]) for entry in entries] == [top] * len(entries)
        assert (tooled.core.requests[-1].params.logprobs, response["top_logprobs"]) == (top, top)
    cut = ask(tooled, include=[LOGPROBS], max_output_tokens=3)
    assert len(cut["output"][0]["content"][0]["logprobs"]) == 3 == cut["usage"]["output_tokens"]
    stopped = ask(tooled, include=[LOGPROBS], stop="é世")["output"][0]["content"][0]
    assert said(stopped["logprobs"]) == stopped["text"] == "x 👩‍👧 "
    assert ask(tooled)["output"][0]["content"][0]["logprobs"] == []


def said(logprobs: list[dict[str, Any]]) -> str:
    return b"".join(bytes(entry["bytes"]) for entry in logprobs).decode()


def test_each_text_has_the_logprobs_of_its_own_tokens(tooled: Tooled) -> None:
    """Reasoning, calls and what marks them have none."""
    scored(tooled, THOUGHT + " Done. " + CALL, 1)
    thought, *output = ask(tooled, model="thinks", tools=[TOOL], include=[LOGPROBS])["output"]
    texts = [item["content"][0] for item in output if item["type"] == "message"]
    assert [part["text"] for part in texts] == ["Well.\n", " Done. "] and len(output) == 5
    assert [said(part["logprobs"]) for part in texts] == [part["text"] for part in texts]
    assert "logprobs" not in thought["content"][0]


def test_a_token_belongs_to_the_text_of_which_it_has_a_character() -> None:
    logprobs = PlacedLogprobs()
    logprobs.add({"offsets": [0, 3, 3, 5, 8], "entries": [b"0", b"1", b"2", b"3", b"4"]})
    assert logprobs.take(Content("bc", 3)) == [b"0"]
    assert logprobs.take(Content("gh", 8)) == [b"3"], "1 and 2 are markup, 4 stands behind it"
    logprobs.add({"offsets": [9, 12, 13], "entries": [b"5", b"6", b"7"]})
    logprobs.pass_by("12345")
    assert logprobs.take(Content("n", 14)) == [b"7"]


def test_input_items_become_messages(tooled: Tooled) -> None:
    """A turn's reasoning, text and calls are one message, and outputs are a tool's."""
    turns: list[dict[str, Any]] = [
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "message", "role": "user", "content": "Weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "content": [{"type": "output_text", "text": "Well."}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "get_weather", "arguments": PARIS},
        {"type": "function_call", "call_id": "c2", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "43"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "lost"}]},
    ]
    response = ask(tooled, input=turns, tools=[TOOL], include=["reasoning.encrypted_content"])
    assert response["output"] == []
    function = {name: TOOL[name] for name in ("name", "description", "parameters")}
    call = '<tool_call>{"name": "get_weather", "arguments": %s}</tool_call>'
    assert rendered(tooled) == (
        f"<tools>{json.dumps({'type': 'function', 'function': function})}</tools><|im_start|>system\na\nb<|im_end|>\n"
        f"<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\nWell.{call % PARIS}{call % '{}'}<|im_end|>\n"
        "<|im_start|>tool\n42(c1)<|im_end|>\n<|im_start|>tool\n43(c2)<|im_end|>\n<|im_start|>assistant\n"
    )


def test_what_bounds_the_answer_goes_to_the_core(tooled: Tooled) -> None:
    says(tooled, f'[{{"name": "get_weather", "parameters": {PARIS}}}]')
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        response = ask(tooled, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
        assert [item["type"] for item in response["output"]] == ["function_call"]
        assert (response["tool_choice"], response["parallel_tool_calls"]) == (choice, False)
        assert "get_weather" in tooled.core.requests[-1].params.constraint.source
    says(tooled, f"Well. {CALL}")
    two = [TOOL, {**TOOL, "name": "f"}]
    for name, kinds in (("get_weather", ["message", "function_call"]), ("f", ["message"])):
        tools = [{"type": "function", "name": name}]
        response = ask(tooled, tools=two, tool_choice={**ALLOWED, "tools": tools})
        assert [item["type"] for item in response["output"]] == kinds
        assert response["tool_choice"] == {**ALLOWED, "tools": tools} and response["tools"] == two
    says(tooled, PARIS)
    told_format = {"type": "json_schema", "name": "n", "schema": PARAMETERS, "strict": True}
    response = ask(tooled, text={"format": told_format, "verbosity": "medium"}, reasoning={"effort": "low"})
    assert response["text"]["format"].items() >= told_format.items()
    assert json.loads(tooled.core.requests[-1].params.constraint.source) == PARAMETERS
    assert ask(tooled, text={"format": {"type": "json_object"}})["text"] == {"format": {"type": "json_object"}}


ALLOWED = {"type": "allowed_tools", "mode": "auto"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": ["x"]}, "input[0]"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "reasoning", "content": 5}]}, "input[0].content"),
    ({"input": "x" * 50_000}, "input"),
    ({"instructions": 5}, "instructions"),
    ({"store": True}, "store"),
    ({"background": True}, "background"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "c"}, "conversation"),
    ({"truncation": "auto"}, "truncation"),
    ({"include": ["message.input_image.image_url"]}, "include"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"include": [LOGPROBS], "top_logprobs": 21}, "top_logprobs"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 5000}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [TOOL, {"type": "function", "name": "a b"}]}, "tools[1].name"),
    ({"tools": [TOOL], "model": "no tools"}, "tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": [TOOL]}}, "tool_choice.mode"),
    ({"tools": [TOOL], "tool_choice": {**ALLOWED, "tools": "x"}}, "tool_choice.tools"),
    ({"tools": [TOOL], "tool_choice": {**ALLOWED, "tools": ["x"]}}, "tool_choice.tools[0]"),
    ({"tools": [TOOL], "tool_choice": {**ALLOWED, "tools": [{"type": "mcp"}]}}, "tool_choice.tools[0].type"),
    (
        {"tools": [TOOL], "tool_choice": {**ALLOWED, "tools": [TOOL, {**TOOL, "name": "g"}]}},
        "tool_choice.tools[1].name",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text.format.schema"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"reasoning": {"effort": 5}}, "reasoning.effort"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_mistakes_are_named(tooled: Tooled, stream: bool) -> None:
    for body, param in REFUSED:
        answer = tooled.post("/v1/responses", **{"model": "hermes", "input": "Hello", **body, "stream": stream})
        error = error_of(answer, 400)
        assert error["param"] == param, error
        assert "messages" not in error["message"] and "response_format" not in error["message"], error
    assert not tooled.core.requests


def test_what_goes_wrong_on_the_way(tooled: Tooled) -> None:
    """Before the first token it has its status; after it the stream ends with what there is, and says so."""
    tooled.core.answer(Answer((), EndReason.QUEUE_FULL, message="full", retry_after_s=3))
    answer = tooled.post("/v1/responses", model="hermes", input="Hello", stream=True)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
    tooled.core.interval_s = 0.02
    tooled.core.answer(Answer(TOKENIZER.encode("one two").ids, EndReason.FAILED, message="it broke"))
    last = told(tooled)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "it broke"}
    assert last["response"]["output"][0]["content"][0]["text"] == "one two"


class City(pydantic.BaseModel):
    city: str


def test_the_official_client(tooled: Tooled) -> None:
    """Its own accumulation of a stream's events is what it parses of a plain answer."""
    client = openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=tooled.client)
    says(tooled, THOUGHT)
    body: Any = {"model": "thinks", "input": [{"role": "user", "content": "Hello"}], "tools": [TOOL]}
    with client.responses.stream(**body) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_response()
    for response in (streamed, client.responses.create(**body)):
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
        assert response.output_text == "Well.\n" and response.status == "completed"
        assert response.output[2].arguments == PARIS
        assert response.usage.output_tokens_details.reasoning_tokens > 0
        assert (response.store, response.error, response.tools[0].name) == (False, None, "get_weather")
    assert {"response.reasoning_text.delta", "response.function_call_arguments.done", "response.completed"} <= kinds
    turns = [*body["input"], *(item.model_dump(exclude_none=True) for item in streamed.output)]
    turns += [
        {"type": "function_call_output", "call_id": item.call_id, "output": "5"}
        for item in streamed.output
        if item.type == "function_call"
    ]
    client.responses.create(model="thinks", input=turns, tools=[TOOL])
    assert rendered(tooled).count("<|im_start|>tool\n5(call_") == 2
    scored(tooled, "one two", 2)
    body = {"model": "hermes", "input": "Hello", "include": [LOGPROBS], "top_logprobs": 2}
    with client.responses.stream(**body) as stream:
        deltas = [one for event in stream if event.type == "response.output_text.delta" for one in event.logprobs]
        told = stream.get_final_response().output[0].content[0].logprobs
    assert [one.token for one in deltas] == [one.token for one in told] and told[0].top_logprobs[1].logprob == -1.5
    assert client.responses.create(**body).output[0].content[0].logprobs == told
    says(tooled, PARIS)
    parsed = client.responses.parse(model="hermes", input="Where?", text_format=City)
    assert parsed.output_parsed == City(city="Paris")
    with client.responses.stream(model="hermes", input="Where?", text_format=City) as stream:
        assert stream.get_final_response().output_parsed == City(city="Paris")
