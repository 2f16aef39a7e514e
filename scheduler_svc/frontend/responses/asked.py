"""The body of a response's request, as the body of a chat."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from scheduler_svc.frontend.chat import TOP_LOGPROBS
from scheduler_svc.frontend.parameters import IGNORED, STREAM, max_tokens_field
from scheduler_svc.frontend.responses.items import read_input
from scheduler_svc.frontend.tools import CHOICES, MAX_TOOLS
from scheduler_svc.frontend.unsupported import refuse_unsupported
from scheduler_svc.http.errors import ApiError, invalid
from scheduler_svc.http.field_kinds import Boolean, Text
from scheduler_svc.http.fields import Fields, show

MAX_OUTPUT_TOKENS = max_tokens_field("max_output_tokens")
EFFORT = Text("effort", None, 32)
SUMMARY = Text("summary", None, 32)
OBFUSCATION = Boolean("include_obfuscation", None)
LOGPROBS = "message.output_text.logprobs"
INCLUDES = (LOGPROBS, "reasoning.encrypted_content")
"""What may be asked for. The second changes nothing: reasoning is told as it is."""
FORMATS = ("text", "json_object", "json_schema")
PASSED = (
    *("model", "stream", "temperature", "top_p", "parallel_tool_calls", "user", "prompt_cache_retention"),
    *("top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("stop", "stop_token_ids", "min_tokens", "ignore_eos", "skip_special_tokens"),
    *("structured_outputs", "allowed_token_ids", "bad_words"),
    *("priority", "deadline_ms", "cache_salt", "truncate_prompt_tokens"),
    *IGNORED,
)
"""Fields that a chat has under the same name, OpenAI's and others."""
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "store": (False,),
    "truncation": ("disabled",),
    "max_tool_calls": (),
    "context_management": ([],),
}
"""Responses are not kept, and no tools are run here. Each stands with the values that ask for nothing."""
_RENAMED = (
    (re.compile(r"^messages\b"), "input"),
    (re.compile(r"^max_completion_tokens\b"), "max_output_tokens"),
    (re.compile(r"^response_format(\.json_schema)?"), "text.format"),
    (re.compile(r"^tool_choice\.allowed_tools\.(tools\[\d+\])\.function\b"), r"tool_choice.\1"),
    (re.compile(r"^tool_choice\.(allowed_tools|function)\b"), "tool_choice"),
    (re.compile(r"^(tools\[\d+\])\.function\b"), r"\1"),
)


@dataclass(frozen=True, slots=True)
class Asked:
    """`chat`: the body for a chat. `told`: members that the response repeats. `top`: alternatives for each logprob."""

    chat: dict[str, Any]
    told: dict[str, Any]
    top: int


def read_asked(fields: Fields) -> Asked:
    """Translate a request. Raises `ApiError` 400. What a chat has alike is left for it to check."""
    refuse_unsupported(fields, UNSUPPORTED)
    with_logprobs, top = _read_logprobs(fields)
    OBFUSCATION.read(Fields(fields.object("stream_options", {}), "stream_options"))
    tools, tool_choice = _read_tools(fields), _read_choice(fields)
    text_format, response_format = _read_text(fields)
    reasoning = Fields(fields.object("reasoning", {}), "reasoning")
    effort, summary = EFFORT.read(reasoning), SUMMARY.read(reasoning)
    chat: dict[str, Any] = {name: fields.raw(name) for name in PASSED}
    chat["chat_template_kwargs"] = {**_of_effort(effort), **fields.object("chat_template_kwargs", {})}
    chat["max_completion_tokens"] = MAX_OUTPUT_TOKENS.read(fields)
    chat["response_format"] = response_format
    chat |= {"messages": read_input(fields), "logprobs": with_logprobs, "top_logprobs": top}
    if STREAM.read(fields):
        chat["stream_options"] = {"include_usage": True}
    if tools or tool_choice not in (None, "none", "auto"):
        chat |= {"tools": tools, "tool_choice": tool_choice}
    told = {
        "instructions": fields.raw("instructions"),
        "max_output_tokens": fields.raw("max_output_tokens"),
        "metadata": fields.object("metadata", {}),
        "parallel_tool_calls": fields.raw("parallel_tool_calls") is not False,
        "reasoning": {"effort": effort, "summary": summary},
        "text": {"format": text_format},
        "tool_choice": fields.raw("tool_choice") or "auto",
        "tools": fields.raw("tools") or [],
        "top_logprobs": top,
        "user": fields.raw("user"),
    }
    return Asked(chat, told, top)


def _of_effort(effort: str | None) -> dict[str, Any]:
    """Variables of chat templates."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {})}


def _read_logprobs(fields: Fields) -> tuple[bool, int]:
    """Whether they are wanted, and how many alternatives."""
    included = fields.array("include", [], 64)
    for value in included:
        if value not in INCLUDES:
            raise invalid("include", f"include: {show(value)} is not supported", "unsupported_parameter")
    top = TOP_LOGPROBS.read(fields) or 0
    if top and LOGPROBS not in included:
        raise invalid("top_logprobs", f"top_logprobs: is only allowed with {LOGPROBS} in include")
    return LOGPROBS in included, top


def _read_tools(fields: Fields) -> list[dict[str, Any]]:
    """A chat's tools have their members one level deeper."""
    tools = []
    for i, tool in enumerate(fields.array("tools", [], MAX_TOOLS)):
        path = f"tools[{i}]"
        if type(tool) is not dict:
            raise invalid(path, f"{path}: expected an object, got {show(tool)}")
        if tool.get("type") != "function":
            kind = show(tool.get("type"))
            text = f"{path}.type: only function is supported: no tools are run here; got {kind}"
            raise invalid(f"{path}.type", text, "unsupported_parameter")
        function = {name: tool.get(name) for name in ("name", "description", "parameters", "strict")}
        tools.append({"type": "function", "function": function})
    return tools


def _read_choice(fields: Fields) -> Any:
    value = fields.raw("tool_choice")
    if type(value) is not dict:
        if value is not None and (type(value) is not str or value not in CHOICES):
            rule = f"must be {', '.join(CHOICES)}, or name a function or those allowed"
            raise invalid("tool_choice", f"tool_choice: {rule}, got {show(value)}")
        return value
    match value.get("type"):
        case "function":
            return _named(value)
        case "allowed_tools" as kind:
            tools = value.get("tools")
            chosen = [_named(tool) if type(tool) is dict else tool for tool in tools] if type(tools) is list else tools
            return {"type": kind, kind: {"mode": value.get("mode"), "tools": chosen}}
        case kind:
            rule = "only function and allowed_tools are supported"
            raise invalid("tool_choice.type", f"tool_choice.type: {rule}, got {show(kind)}")


def _named(value: dict[str, Any]) -> dict[str, Any]:
    """Of a function's name, as a chat has it."""
    return {"type": value.get("type"), "function": {"name": value.get("name")}}


def _read_text(fields: Fields) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The format as the response tells it, and as a chat is asked for it."""
    text = Fields(fields.object("text", {}), "text")
    if text.raw("verbosity") not in (None, "medium"):
        raise invalid("text.verbosity", "text.verbosity: is not supported", "unsupported_parameter")
    value = text.object("format", None)
    if value is None:
        return {"type": "text"}, None
    kind = value.get("type")
    if type(kind) is not str or kind not in FORMATS:
        where = "text.format.type"
        raise invalid(where, f"{where}: must be {', '.join(FORMATS)}, got {show(kind)}")
    if kind != "json_schema":
        return {"type": kind}, {"type": kind}
    named = {name: value.get(name) for name in ("name", "description", "schema", "strict")}
    return {"type": kind, **named}, {"type": kind, "json_schema": named}


def in_our_words(error: ApiError) -> ApiError:
    """An error of the chat, which names the field that the client has given."""
    param = error.param or ""
    for pattern, name in _RENAMED:
        renamed, count = pattern.subn(name, param)
        if count:
            message = error.message
            if message.startswith(param):
                message = renamed + message[len(param) :]
            code = error.code
            return ApiError(error.status, message, kind=error.kind, param=renamed, code=code, headers=error.headers)
    return error
