"""The input of a response: its items, as messages of a chat."""

from __future__ import annotations

from typing import Any

import orjson

from scheduler_svc.frontend.messages import MAX_MESSAGES
from scheduler_svc.http.errors import invalid
from scheduler_svc.http.field_kinds import Text
from scheduler_svc.http.fields import Fields, show

ROLES = ("user", "assistant", "system", "developer")
TYPES = ("message", "reasoning", "function_call", "function_call_output")
TEXT_PARTS = ("input_text", "output_text", "text")
INSTRUCTIONS = Text("instructions", None, 1 << 20)

Message = dict[str, Any]


def read_input(fields: Fields) -> list[Message]:
    """The messages that `instructions` and `input` make. Raises `ApiError` 400.

    What one turn of the assistant consists of, its reasoning, its text and its calls, becomes one message.
    """
    messages: list[Message] = []
    instructions = INSTRUCTIONS.read(fields)
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    value = fields.raw("input")
    if value is None:
        raise invalid("input", "input: is required")
    if type(value) is str:
        return [*messages, {"role": "user", "content": value}]
    if type(value) is not list:
        raise invalid("input", f"input: expected a string or an array, got {show(value)}")
    if not value:
        raise invalid("input", "input: must not be empty")
    if len(value) > MAX_MESSAGES:
        raise invalid("input", f"input: more than {MAX_MESSAGES} items")
    for i, item in enumerate(value):
        _add_item(messages, f"input[{i}]", item)
    # A thought that led to nothing is left out, unless there is nothing else.
    return [message for message in messages if not _is_bare_thought(message)] or messages


def _add_item(messages: list[Message], path: str, item: Any) -> None:
    if type(item) is not dict:
        raise invalid(path, f"{path}: expected an object, got {show(item)}")
    kind = item.get("type")
    match "message" if kind is None else kind:
        case "message":
            _add_message(messages, path, item)
        case "reasoning":
            messages.append({"role": "assistant", "content": "", "reasoning_content": _thought(path, item)})
        case "function_call":
            _turn(messages).setdefault("tool_calls", []).append(_call(path, item))
        case "function_call_output":
            call_id, output = _text(path, item, "call_id"), _content(f"{path}.output", item.get("output"))
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        case _:
            raise invalid(f"{path}.type", f"{path}.type: must be one of {', '.join(TYPES)}, got {show(kind)}")


def _add_message(messages: list[Message], path: str, item: dict[str, Any]) -> None:
    role = item.get("role")
    if role not in ROLES:
        raise invalid(f"{path}.role", f"{path}.role: must be one of {', '.join(ROLES)}, got {show(role)}")
    content = _content(f"{path}.content", item.get("content"))
    if role == "assistant" and messages and _is_bare_thought(messages[-1]):
        messages[-1]["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _turn(messages: list[Message]) -> Message:
    """The assistant's message that a call belongs to."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _is_bare_thought(message: Message) -> bool:
    """A message that has nothing but reasoning, so far."""
    return "reasoning_content" in message and not message["content"] and "tool_calls" not in message


def _thought(path: str, item: dict[str, Any]) -> str:
    """The text of a reasoning item; its summary where it has no text."""
    for name, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        parts = item.get(name)
        if parts:
            where = f"{path}.{name}"
            if type(parts) is not list:
                raise invalid(where, f"{where}: expected an array, got {show(parts)}")
            return "\n".join([_part_text(f"{where}[{i}]", part, (kind,)) for i, part in enumerate(parts)])
    return ""


def _call(path: str, item: dict[str, Any]) -> dict[str, Any]:
    function = {"name": _text(path, item, "name"), "arguments": _text(path, item, "arguments")}
    try:
        orjson.loads(function["arguments"] or "{}")
    except orjson.JSONDecodeError:
        raise invalid(f"{path}.arguments", f"{path}.arguments: is not valid JSON") from None
    return {"id": _text(path, item, "call_id"), "type": "function", "function": function}


def _content(path: str, content: Any) -> Any:
    """As a chat has it: a string, or parts of text."""
    if type(content) is str:
        return content
    if type(content) is not list:
        raise invalid(path, f"{path}: expected a string or an array of parts, got {show(content)}")
    texts = [_part_text(f"{path}[{i}]", part, TEXT_PARTS) for i, part in enumerate(content)]
    return [{"type": "text", "text": text} for text in texts]


def _part_text(path: str, part: Any, kinds: tuple[str, ...]) -> str:
    if type(part) is not dict:
        raise invalid(path, f"{path}: expected an object, got {show(part)}")
    if part.get("type") not in kinds:
        kind = show(part.get("type"))
        raise invalid(f"{path}.type", f"{path}.type: only {', '.join(kinds)} are supported, got {kind}")
    return _text(path, part, "text")


def _text(path: str, item: dict[str, Any], name: str) -> str:
    value = item.get(name)
    if type(value) is not str:
        raise invalid(f"{path}.{name}", f"{path}.{name}: expected a string, got {show(value)}")
    return value
