"""Tools over HTTP: what the chat template is told, calls in answers, plain and streamed, and mistakes (C36)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from fake_core import Answer
from frontend_service import error_of, events
from tooled import TEMPLATES, TOKENIZER, Tooled, opened, rendered, says

from common.wire import EndReason, Language
from scheduler_svc.frontend.constraints.tool_calls import MAX_DEPTH, calls_schema
from scheduler_svc.frontend.tools import Tooling

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Now", "parameters": PARAMETERS}},
    {"function": {"name": "f", "description": None}},
]
USER = {"role": "user", "content": "Hello"}


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream's deltas make, and its finish reason, as openai-python gathers them."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    [reason] = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]]
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        message["content"] += delta.get("content", "")
        message["reasoning_content"] += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"]) and call["function"]["arguments"] == ""
                message["tool_calls"].append((call["function"]["name"], ""))
            else:
                name, arguments = message["tool_calls"][call["index"]]
                message["tool_calls"][call["index"]] = (name, arguments + call["function"]["arguments"])
    return message | {"finish_reason": reason}


def ask(service: Tooled, model: str, **body: Any) -> dict[str, Any]:
    """Plain and streamed: both say the same, which is told as `joined` does."""
    body = {"model": model, "messages": [USER], "tools": TOOLS, **body}
    answer = service.post("/v1/chat/completions", **body)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    message = choice["message"]
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]
    assert (message["content"] is None) == (bool(calls) and not message["content"])
    plain = {"content": message["content"] or "", "reasoning_content": message.get("reasoning_content", "")}
    assert message.get("reasoning") == message.get("reasoning_content")
    plain |= {"tool_calls": calls, "finish_reason": choice["finish_reason"]}
    options = {"include_usage": True}
    *chunks, last = events(service.post("/v1/chat/completions", **body, stream=True, stream_options=options))
    assert last["usage"] == answer.json()["usage"]
    assert joined(chunks) == plain
    return plain


PARIS = '{"city": "Paris"}'
CALLS = {
    "hermes": f'Well.\n<tool_call>{{"name": "get_weather", "arguments": {PARIS}}}</tool_call>\n'
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
    "llama3": f'Well.\n<|python_tag|>{{"name": "get_weather", "parameters": {PARIS}}}; '
    '{"name": "f", "parameters": {}}',
    "mistral": f'Well.\n[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}, '
    '{"name": "f", "arguments": {}}]',
}


@pytest.mark.parametrize("model", CALLS)
def test_calls_in_answers(tooled: Tooled, model: str) -> None:
    """Two calls, the second without arguments; special tokens that mark them are seen, though they are not shown."""
    says(tooled, CALLS[model])
    told = ask(tooled, model)
    wanted = [("get_weather", PARIS), ("f", "{}")]
    assert told == {
        "content": "Well.\n", "reasoning_content": "", "tool_calls": wanted, "finish_reason": "tool_calls"
    }  # fmt: skip
    assert ask(tooled, model, parallel_tool_calls=False)["tool_calls"] == wanted[:1]


@pytest.mark.parametrize("model", CALLS)
def test_what_is_no_call_is_content(tooled: Tooled, model: str) -> None:
    text = CALLS[model].replace('"name"', '"nome"')
    says(tooled, text)
    told = ask(tooled, model)
    assert (told["content"], told["tool_calls"], told["finish_reason"]) == (text, [], "stop")


def test_without_tools_nothing_is_read(tooled: Tooled) -> None:
    """Nor when none may be called: the template is not told of them then."""
    says(tooled, CALLS["hermes"])
    for body in ({"tools": None}, {"tool_choice": "none"}, {"tools": [], "tool_choice": "none"}):
        told = ask(tooled, "hermes", **body)
        assert (told["content"], told["finish_reason"]) == (CALLS["hermes"], "stop")
        assert "<tools>" not in rendered(tooled)


def test_a_call_that_max_tokens_cuts(tooled: Tooled) -> None:
    says(tooled, CALLS["hermes"])
    for cut in (" Paris", '"get_w'):
        tokens = TOKENIZER.encode(CALLS["hermes"].split(cut.strip())[0], add_special_tokens=False).ids
        told = ask(tooled, "hermes", max_tokens=len(tokens))
        assert told["finish_reason"] == "length"
        if told["tool_calls"]:
            assert told["tool_calls"][0][0] == "get_weather" and PARIS.startswith(told["tool_calls"][0][1])
        else:
            assert CALLS["hermes"].startswith(told["content"]) and "<tool_call>" in told["content"]


def test_openai_python_gathers_the_calls(tooled: Tooled) -> None:
    """Its own accumulation of a stream's deltas is what it parses of a plain answer."""
    says(tooled, CALLS["hermes"])
    client = openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=tooled.client)
    body: Any = {"model": "hermes", "messages": [USER], "tools": [TOOLS[0], {"type": "function", **TOOLS[1]}]}
    body["tool_choice"] = allowed("auto", "f", "get_weather")
    with client.chat.completions.stream(**body) as stream:
        streamed = stream.get_final_completion().choices[0]
    plain = client.chat.completions.create(**body).choices[0]
    for choice in (streamed, plain):
        calls = choice.message.tool_calls or []
        assert [(c.type, c.function.name, c.function.arguments) for c in calls] == [
            ("function", "get_weather", PARIS), ("function", "f", "{}")
        ]  # fmt: skip
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Well.\n")


def test_several_choices_are_read_apart(tooled: Tooled) -> None:
    tokens = [TOKENIZER.encode(text, add_special_tokens=False).ids for text in (CALLS["hermes"], "Hello world")]
    tooled.core.answer(*(Answer(ids) for ids in tokens))
    body = {"model": "hermes", "messages": [USER], "tools": TOOLS, "n": 2}
    first, second = tooled.post("/v1/chat/completions", **body).json()["choices"]
    assert (len(first["message"]["tool_calls"]), second["message"]["content"]) == (2, "Hello world")
    assert [first["finish_reason"], second["finish_reason"]] == ["tool_calls", "stop"]
    ids = [call["id"] for call in first["message"]["tool_calls"]]
    assert len(set(ids)) == 2 and all(name.startswith("call_") for name in ids)
    chunks = events(tooled.post("/v1/chat/completions", **body, stream=True))
    apart = [joined([c for c in chunks if c["choices"][0]["index"] == i]) for i in range(2)]
    assert [message["finish_reason"] for message in apart] == ["tool_calls", "stop"]


def test_the_template_is_told_of_tools_and_calls(tooled: Tooled) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "é"]}'}}
    turns = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    ask(tooled, "hermes", messages=turns)
    text = rendered(tooled)
    told = [TOOLS[0], {"function": {"name": "f"}, "type": "function"}]
    assert text.startswith("<tools>" + "".join(json.dumps(tool) for tool in told) + "</tools>")
    assert '<tool_call>{"name": "f", "arguments": {"a": [1, "é"]}}</tool_call>' in text
    assert "<|im_start|>tool\n42(c1)<|im_end|>" in text
    body = {"model": "hermes", "messages": turns, "tools": TOOLS}
    assert tooled.post("/tokenize", **body).json()["tokens"] == tooled.core.requests[-1].prompt.tolist()


def test_a_template_for_tools_goes_before_the_other(tooled: Tooled) -> None:
    says(tooled, CALLS["hermes"])
    assert ask(tooled, "two templates")["tool_calls"]
    assert rendered(tooled).startswith("<tools>")
    assert ask(tooled, "two templates", tools=None)["content"] == CALLS["hermes"]
    assert "<tools>" not in rendered(tooled)


THOUGHT = "So it is.\n</think>\n\n" + CALLS["hermes"]


def test_reasoning(tooled: Tooled) -> None:
    """This template's prompt ends with `<think>`; the tags are seen nowhere, the tokens are all counted."""
    says(tooled, THOUGHT)
    told = ask(tooled, "thinks")
    assert (told["reasoning_content"], told["content"]) == ("So it is.", "Well.\n")
    assert [name for name, _ in told["tool_calls"]] == ["get_weather", "f"]
    silent = ask(tooled, "thinks", include_reasoning=False)
    assert silent == told | {"reasoning_content": ""}
    tokens = len(TOKENIZER.encode(THOUGHT, add_special_tokens=False).ids)
    body = {"model": "thinks", "messages": [USER], "include_reasoning": False}
    assert tooled.post("/v1/chat/completions", **body).json()["usage"]["completion_tokens"] == tokens
    says(tooled, "so</think>x")
    turns = [USER, {"role": "assistant", "content": "<think>I am"}]
    told = ask(tooled, "thinks", messages=turns, continue_final_message=True)
    assert (told["reasoning_content"], told["content"]) == ("so", "x")


@pytest.mark.parametrize("stream", [False, True])
def test_mistakes_are_named(tooled: Tooled, stream: bool) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    named = {"type": "function", "function": {"name": "g"}}
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"tools": [tool, {"type": "function", "function": {"name": 5}}]}, "tools[1].function.name"),
        ({"tools": [tool, tool]}, "tools[1].function.name"),
        ({"tools": [{"type": "x"}]}, "tools[0].type"),
        ({"tools": [tool] * 1025}, "tools"),
        ({"tools": [{"function": {"name": "f", "parameters": {"x": "y" * (1 << 20)}}}]}, "tools"),
        ({"tools": [tool], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [tool], "tool_choice": named}, "tool_choice.function.name"),
        ({"tools": [tool], "tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        ({"tools": [tool], "tool_choice": {"type": "x"}}, "tool_choice.type"),
        ({"tools": [tool], "tool_choice": allowed("auto", "f", "g")}, f"{ALLOWED}.tools[1].function.name"),
        ({"tools": [tool], "tool_choice": allowed("auto")}, f"{ALLOWED}.tools"),
        ({"tools": [tool], "tool_choice": allowed("none", "f")}, f"{ALLOWED}.mode"),
        ({"tool_choice": allowed("auto", "f")}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 5}]}, "messages[0].tool_call_id"),
    ]
    for body, param in mistakes:
        asked = {"model": "hermes", "messages": [USER], **body, "stream": stream}
        error = error_of(tooled.post("/v1/chat/completions", **asked), 400)
        assert error["param"] == param and error["message"].startswith(param.split("[")[0]), error
    assert not tooled.core.requests


def test_what_cannot_be_done_is_refused(tooled: Tooled) -> None:
    for model in ("no tools", "untold"):
        asked = {"model": model, "messages": [USER], "tools": TOOLS}
        error = error_of(tooled.post("/v1/chat/completions", **asked), 400)
        assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")


ALLOWED = "tool_choice.allowed_tools"
NAMED = {"type": "function", "function": {"name": "get_weather"}}
FORCED = f'[{{"name": "get_weather", "parameters": {PARIS}}},\n{{"name": "f", "parameters": {{}}}} ]'


def test_required_calls(tooled: Tooled) -> None:
    """The grammar goes with the sequence, and its text is read whatever the template knows."""
    for model in TEMPLATES:
        says(tooled, "</think>" * (model == "thinks") + FORCED)
        told = ask(tooled, model, tool_choice="required", ignore_eos=True)
        assert told == {
            "content": "",
            "reasoning_content": "",
            "tool_calls": [("get_weather", PARIS), ("f", "{}")],
            "finish_reason": "tool_calls",
        }
        params = tooled.core.requests[-1].params
        schema = json.loads(params.constraint.source)
        assert (params.constraint.language, params.ignore_eos) == (Language.JSON_SCHEMA, False)
        assert [call["properties"]["name"]["const"] for call in schema["items"]["anyOf"]] == ["get_weather", "f"]
        assert "maxItems" not in schema
    ask(tooled, "hermes", tool_choice="required", parallel_tool_calls=False)
    assert json.loads(tooled.core.requests[-1].params.constraint.source)["maxItems"] == 1
    call = tooled.post("/v1/chat/completions", model="mistral", messages=[USER], tools=TOOLS, tool_choice="required")
    assert len(call.json()["choices"][0]["message"]["tool_calls"][0]["id"]) == 9


def test_a_named_call(tooled: Tooled) -> None:
    """It ends with `stop`, as OpenAI's and vLLM's do. A response format has nothing to bound then."""
    says(tooled, FORCED.split(",\n")[0] + "]")
    for more in ({}, {"response_format": {"type": "json_object"}}):
        told = ask(tooled, "hermes", tool_choice=NAMED, **more)
        assert (told["tool_calls"], told["content"], told["finish_reason"]) == ([("get_weather", PARIS)], "", "stop")
        items = json.loads(tooled.core.requests[-1].params.constraint.source)["items"]
        assert items["properties"] == {"name": {"const": "get_weather"}, "parameters": PARAMETERS}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("model", CALLS)
def test_of_allowed_functions_the_template_is_told_beside_all_others(tooled: Tooled, model: str) -> None:
    """What is not allowed is no call, but content as it stands; a grammar of forced calls does not know it."""
    says(tooled, CALLS[model])
    free = ask(tooled, model)
    prompt = tooled.core.requests[-1].prompt.tolist()
    for names, count in ((("f",), 1), (("f", "get_weather"), 2)):
        told = ask(tooled, model, tool_choice=allowed("auto", *names))
        assert tooled.core.requests[-1].prompt.tolist() == prompt
        assert told["tool_calls"] == free["tool_calls"][-count:] and told["finish_reason"] == "tool_calls"
        assert ("get_weather" in told["content"]) == (count == 1)
    says(tooled, CALLS[model].replace('"f"', '"g"'))
    told = ask(tooled, model, tool_choice=allowed("auto", "f"))
    assert (told["content"], told["tool_calls"], told["finish_reason"]) == (
        CALLS[model].replace('"f"', '"g"'),
        [],
        "stop",
    )
    says(tooled, FORCED.split(",\n")[1].join("[ "))
    told = ask(tooled, model, tool_choice=allowed("required", "f"))
    assert (told["tool_calls"], told["finish_reason"]) == ([("f", "{}")], "tool_calls")
    request = tooled.core.requests[-1]
    assert request.prompt.tolist() == prompt
    assert json.loads(request.params.constraint.source)["items"]["properties"]["name"] == {"const": "f"}


def test_a_forced_call_that_max_tokens_cuts(tooled: Tooled) -> None:
    says(tooled, FORCED[:48], EndReason.LENGTH)
    told = ask(tooled, "hermes", tool_choice="required")
    assert told["finish_reason"] == "length" and PARIS.startswith(told["tool_calls"][0][1])
    says(tooled, FORCED[:12], EndReason.LENGTH)
    assert ask(tooled, "hermes", tool_choice="required")["content"] == FORCED[:12]


def test_what_cannot_be_forced_is_refused(tooled: Tooled) -> None:
    deep: dict[str, Any] = {}
    for _ in range(MAX_DEPTH):
        deep = {"items": deep}
    refused: list[tuple[dict[str, Any], dict[str, Any], str, str | None]] = [
        ({"parameters": {"type": "string"}}, {}, "tools", None),
        ({"parameters": {"items": deep}}, {}, "tools", None),
        ({"parameters": {"properties": {"a": {"multipleOf": 2}}}, "strict": True}, {}, "tools", "unsupported_schema"),
        ({"parameters": {"title": "x" * 65_536}}, {}, "tools", None),
        ({}, {"guided_regex": "a"}, "guided_regex", None),
    ]
    for function, body, param, code in refused:
        tools = [{"type": "function", "function": {"name": "get_weather", **function}}]
        for choice in ("required", NAMED):
            asked = {"model": "hermes", "messages": [USER], "tools": tools, "tool_choice": choice, **body}
            error = error_of(tooled.post("/v1/chat/completions", **asked), 400)
            assert (error["param"], error["code"]) == (param, code), error
    assert not tooled.core.requests


def test_only_strict_functions_have_to_be_enforced(tooled: Tooled) -> None:
    says(tooled, FORCED)
    loose = {"type": "object", "properties": {"a": {"multipleOf": 2}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": loose}}]
    tools += [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS, "strict": True}}]
    assert len(ask(tooled, "hermes", tools=tools, tool_choice="required")["tool_calls"]) == 2


def test_the_settings_go_before_the_templates(tmp_path: Path) -> None:
    with opened(tmp_path, ["untold", "thinks"], tool_call_parser="none", reasoning_parser="none") as service:
        says(service, THOUGHT)
        for name in ("untold", "thinks"):
            told = ask(service, name)
            assert (told["content"], told["finish_reason"]) == (THOUGHT, "stop")
    with opened(tmp_path, ["untold"], tool_call_parser="hermes", reasoning_parser="think") as service:
        says(service, "<think>" + THOUGHT)
        told = ask(service, "untold")
        assert (told["reasoning_content"], len(told["tool_calls"])) == ("So it is.", 2)


def test_the_schema_of_forced_calls() -> None:
    tooling = Tooling(({"function": {"name": "a", "parameters": PARAMETERS}}, {"function": {"name": "b"}}), "required")
    schema = calls_schema(tooling)
    assert (schema["type"], schema["minItems"], schema.get("maxItems")) == ("array", 1, None)
    first, second = schema["items"]["anyOf"]
    assert first["properties"] == {"name": {"const": "a"}, "parameters": PARAMETERS}
    assert second["properties"] == {"name": {"const": "b"}, "parameters": {"type": "object"}}
    assert calls_schema(replace(tooling, parallel=False))["maxItems"] == 1
    one = calls_schema(Tooling(tooling.tools[1:], "function"))
    assert (one["items"], one["maxItems"]) == (second, 1)


def test_references_within_the_parameters_lead_to_their_own_root() -> None:
    tree = {"$defs": {"T": {"properties": {"in": {"$ref": "#"}}}}, "properties": {"t": {"$ref": "#/$defs/T"}}}
    schema = calls_schema(Tooling(({"function": {"name": "a", "parameters": tree}},), "required"))
    assert schema["items"]["properties"]["parameters"] == {"$ref": "#/$defs/tool0"}
    moved = {"type": "object", "$defs": {"T": {"properties": {"in": {"$ref": "#/$defs/tool0"}}}}}
    assert schema["$defs"]["tool0"] == {**moved, "properties": {"t": {"$ref": "#/$defs/tool0/$defs/T"}}}
