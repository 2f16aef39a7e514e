"""The tools that a chat request offers to the model, and whether it may, or must, call them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import orjson

from scheduler_svc.http.errors import invalid
from scheduler_svc.http.field_kinds import Boolean, Text
from scheduler_svc.http.fields import Fields, show

MAX_TOOLS = 1024
MAX_TOOLS_BYTES = 1 << 20
"""Of all tools together, as JSON."""
NAME_PATTERN = r"[A-Za-z0-9_.:/-]{1,128}"
"""Of a function. Wider than OpenAI's, which knows no dots, colons and slashes: other tools' names have them."""
CHOICES = ("none", "auto", "required")
"""What `tool_choice` may say; or it names a function."""
PARALLEL_TOOL_CALLS = Boolean("parallel_tool_calls", True)
NAME = Text("name", None, 128, NAME_PATTERN)
DESCRIPTION = Text("description", None, 1 << 16)
STRICT = Boolean("strict", None)
_NAME = re.compile(NAME_PATTERN)


@dataclass(frozen=True, slots=True)
class Tooling:
    """`tools`: as the chat template is told of them; none where the model may call none."""

    tools: tuple[dict[str, Any], ...] = ()
    choice: str = "none"
    """`none`, `auto`, `required`, or `function`: the one of `tools` that must be called."""
    parallel: bool = True

    @property
    def forced(self) -> bool:
        """The answer has to be calls, and nothing else."""
        return self.choice in ("required", "function")

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool["function"]["name"] for tool in self.tools)


def read_tooling(fields: Fields) -> Tooling:
    """Read `tools`, `tool_choice` and `parallel_tool_calls`. Raises `ApiError` 400.

    With `none` the template is told of no tools: a model that does not know them does not write calls.
    """
    tools = _read_tools(fields)
    choice, name = _read_choice(fields, bool(tools))
    parallel = PARALLEL_TOOL_CALLS.read(fields)
    if choice == "none":
        return Tooling((), choice, parallel)
    if choice == "function":
        tools = [tool for tool in tools if tool["function"]["name"] == name]
        if not tools:
            path = "tool_choice.function.name"
            raise invalid(path, f"{path}: {show(name)} is none of the tools")
    return Tooling(tuple(tools), choice, parallel)


def _read_tools(fields: Fields) -> list[dict[str, Any]]:
    raw = fields.array("tools", [], MAX_TOOLS)
    tools = [_read_tool(f"tools[{i}]", item) for i, item in enumerate(raw)]
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        name = tool["function"]["name"]
        if name in seen:
            path = f"tools[{i}].function.name"
            raise invalid(path, f"{path}: there is another tool of the name {show(name)}")
        seen.add(name)
    if raw and len(orjson.dumps(raw)) > MAX_TOOLS_BYTES:
        raise invalid("tools", f"tools: more than {MAX_TOOLS_BYTES} bytes together")
    return tools


def _read_tool(path: str, item: Any) -> dict[str, Any]:
    if type(item) is not dict:
        raise invalid(path, f"{path}: expected an object, got {show(item)}")
    if item.get("type") not in (None, "function"):
        raise invalid(f"{path}.type", f"{path}.type: only function is supported, got {show(item['type'])}")
    function = item.get("function")
    if type(function) is not dict:
        raise invalid(f"{path}.function", f"{path}.function: expected an object, got {show(function)}")
    inner = Fields(function, f"{path}.function")
    name = NAME.read(inner)
    if name is None or not _NAME.fullmatch(name):
        where = inner.path("name")
        rule = "1 to 128 letters, digits and characters of _ . : / -"
        raise invalid(where, f"{where}: must be {rule}, got {show(name)}")
    DESCRIPTION.read(inner)
    STRICT.read(inner)
    inner.object("parameters", None)
    given = {key: value for key, value in function.items() if value is not None}
    return {**item, "type": "function", "function": given}


def _read_choice(fields: Fields, with_tools: bool) -> tuple[str, str]:
    """One of `CHOICES`, or `function` and its name."""
    value = fields.raw("tool_choice")
    if value is None:
        return "auto" if with_tools else "none", ""
    if type(value) is dict:
        inner = Fields(value, "tool_choice")
        if inner.raw("type") != "function":
            raise invalid("tool_choice.type", f"tool_choice.type: must be function, got {show(inner.raw('type'))}")
        function = Fields(inner.object("function", {}), "tool_choice.function")
        choice, name = "function", NAME.read(function)
        if name is None:
            raise invalid("tool_choice.function.name", "tool_choice.function.name: is required")
    elif value in CHOICES and type(value) is str:
        choice, name = value, ""
    else:
        rule = "must be none, auto, required, or name a function"
        raise invalid("tool_choice", f"tool_choice: {rule}, got {show(value)}")
    if choice != "none" and not with_tools:
        raise invalid("tool_choice", "tool_choice: is only allowed with tools")
    return choice, name
