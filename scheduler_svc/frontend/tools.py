"""The tools that a chat request offers to the model, and whether it may, or must, call them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
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
"""What `tool_choice` may say; or it names a function, or those that are allowed."""
MODES = ("auto", "required")
"""What a choice of allowed functions may say beside them."""
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
    allowed: frozenset[str] | None = None
    """Names of those that may be called; None: all."""

    @property
    def callable_tools(self) -> tuple[dict[str, Any], ...]:
        return tuple(tool for tool in self.tools if self.allowed is None or tool["function"]["name"] in self.allowed)

    @property
    def forced(self) -> bool:
        """The answer has to be calls, and nothing else."""
        return self.choice in ("required", "function")

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool["function"]["name"] for tool in self.tools)


def read_tooling(fields: Fields) -> Tooling:
    """Read `tools`, `tool_choice` and `parallel_tool_calls`. Raises `ApiError` 400.

    With `none` the template is told of no tools: a model that does not know them does not write calls. Whichever
    are allowed, it is told of all: so the prompt stays the same, and its prefix cached.
    """
    tools = _read_tools(fields)
    choice, names = _read_choice(fields, frozenset(tool["function"]["name"] for tool in tools))
    tooling = Tooling(tuple(tools), choice, PARALLEL_TOOL_CALLS.read(fields), names)
    if choice == "none":
        return replace(tooling, tools=())
    return replace(tooling, tools=tooling.callable_tools) if choice == "function" else tooling


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


def _read_choice(fields: Fields, known: frozenset[str]) -> tuple[str, frozenset[str] | None]:
    """One of `CHOICES`, or `function`; and the names that it comes with. `known`: those of the tools."""
    value = fields.raw("tool_choice")
    if value is None:
        return "auto" if known else "none", None
    if type(value) is dict:
        inner = Fields(value, "tool_choice")
        kind = inner.raw("type")
        if not known:
            raise invalid("tool_choice", "tool_choice: is only allowed with tools")
        if kind == "function":
            return kind, frozenset([_read_named(inner, known)])
        if kind == "allowed_tools":
            return _read_allowed(Fields(inner.object("allowed_tools", {}), inner.path("allowed_tools")), known)
        rule = "must be function or allowed_tools"
        raise invalid("tool_choice.type", f"tool_choice.type: {rule}, got {show(kind)}")
    if type(value) is not str or value not in CHOICES:
        rule = "must be none, auto, required, or name a function or those allowed"
        raise invalid("tool_choice", f"tool_choice: {rule}, got {show(value)}")
    if value != "none" and not known:
        raise invalid("tool_choice", "tool_choice: is only allowed with tools")
    return value, None


def _read_allowed(fields: Fields, known: frozenset[str]) -> tuple[str, frozenset[str]]:
    """The mode and the names of a choice of allowed functions."""
    mode, path = fields.raw("mode"), fields.path("tools")
    if type(mode) is not str or mode not in MODES:
        where = fields.path("mode")
        raise invalid(where, f"{where}: must be {' or '.join(MODES)}, got {show(mode)}")
    allowed = fields.array("tools", [], MAX_TOOLS)
    if not allowed:
        raise invalid(path, f"{path}: at least one is required")
    names = []
    for i, tool in enumerate(allowed):
        where = f"{path}[{i}]"
        if type(tool) is not dict:
            raise invalid(where, f"{where}: expected an object, got {show(tool)}")
        if tool.get("type") != "function":
            raise invalid(f"{where}.type", f"{where}.type: only function is supported, got {show(tool.get('type'))}")
        names.append(_read_named(Fields(tool, where), known))
    return mode, frozenset(names)


def _read_named(fields: Fields, known: frozenset[str]) -> str:
    """The name of the function that an object is about: one of those known."""
    function = Fields(fields.object("function", {}), fields.path("function"))
    name, path = NAME.read(function), function.path("name")
    if name is None:
        raise invalid(path, f"{path}: is required")
    if name not in known:
        raise invalid(path, f"{path}: {show(name)} is none of the tools")
    return name
