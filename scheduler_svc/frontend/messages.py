"""Chat messages, checked and brought into the form that chat templates read."""

from __future__ import annotations

from typing import Any

import orjson

from scheduler_svc.http.errors import invalid
from scheduler_svc.http.fields import Fields, show

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_MESSAGES = 100_000


def read_messages(fields: Fields, *, developer_as_system: bool) -> list[dict[str, Any]]:
    """The request's messages. Text parts are joined with a newline; keys that are null are left out.

    A null content, which only an assistant's message may have, becomes the empty string. `developer_as_system`: for
    templates that do not know the role `developer`.
    """
    raw = fields.array("messages", None, MAX_MESSAGES)
    if raw is None:
        raise invalid("messages", "messages: is required")
    if not raw:
        raise invalid("messages", "messages: must not be empty")
    messages = []
    for i, item in enumerate(raw):
        message = _read_message(f"messages[{i}]", item)
        if developer_as_system and message["role"] == "developer":
            message["role"] = "system"
        messages.append(message)
    return messages


def last_content(fields: Fields) -> str:
    """That of the last message, as `read_messages` gives it. These are known to be right."""
    messages: list[Any] = fields.array("messages", [], MAX_MESSAGES)
    return _read_content("messages", messages[-1].get("content"), optional=True)


def _read_message(path: str, item: Any) -> dict[str, Any]:
    if type(item) is not dict:
        raise invalid(path, f"{path}: expected an object, got {show(item)}")
    role = item.get("role")
    if role not in ROLES:
        raise invalid(f"{path}.role", f"{path}.role: must be one of {', '.join(ROLES)}, got {show(role)}")
    message = {key: value for key, value in item.items() if value is not None}
    message["content"] = _read_content(f"{path}.content", item.get("content"), optional=role == "assistant")
    if "name" in message and type(message["name"]) is not str:
        raise invalid(f"{path}.name", f"{path}.name: expected a string, got {show(message['name'])}")
    if "tool_call_id" in message and type(message["tool_call_id"]) is not str:
        text = f"{path}.tool_call_id: expected a string, got {show(message['tool_call_id'])}"
        raise invalid(f"{path}.tool_call_id", text)
    if "tool_calls" in message:
        message["tool_calls"] = _read_tool_calls(f"{path}.tool_calls", message["tool_calls"])
    return message


def _read_content(path: str, content: Any, *, optional: bool) -> str:
    if type(content) is str:
        return content
    if content is None:
        if optional:
            return ""
        raise invalid(path, f"{path}: is required")
    if type(content) is not list:
        raise invalid(path, f"{path}: expected a string or an array of parts, got {show(content)}")
    return "\n".join([_read_part(f"{path}[{i}]", part) for i, part in enumerate(content)])


def _read_part(path: str, part: Any) -> str:
    if type(part) is str:
        return part
    if type(part) is not dict:
        raise invalid(path, f"{path}: expected an object, got {show(part)}")
    if part.get("type") != "text":
        raise invalid(f"{path}.type", f"{path}.type: only text parts are supported, got {show(part.get('type'))}")
    if type(part.get("text")) is not str:
        raise invalid(f"{path}.text", f"{path}.text: expected a string, got {show(part.get('text'))}")
    return part["text"]  # type: ignore[no-any-return]


def _read_tool_calls(path: str, calls: Any) -> list[dict[str, Any]]:
    """Calls of earlier turns; templates want the arguments as an object, clients send them as JSON text."""
    if type(calls) is not list or not all(type(call) is dict for call in calls):
        raise invalid(path, f"{path}: expected an array of objects, got {show(calls)}")
    read = []
    for i, call in enumerate(calls):
        function = call.get("function")
        if type(function) is not dict or type(function.get("name")) is not str:
            raise invalid(f"{path}[{i}].function", f"{path}[{i}].function: expected an object with a name")
        arguments = function.get("arguments")
        if type(arguments) is str:
            try:
                arguments = orjson.loads(arguments) if arguments else {}
            except orjson.JSONDecodeError:
                where = f"{path}[{i}].function.arguments"
                raise invalid(where, f"{where}: is not valid JSON") from None
        read.append({**call, "function": {**function, "arguments": arguments}})
    return read
