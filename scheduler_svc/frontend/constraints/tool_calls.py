"""The grammar of an answer that has to be calls of tools."""

from __future__ import annotations

from typing import Any

import orjson

from common.wire import Language
from scheduler_svc.frontend.constraints.fields import MAX_CHARACTERS, Grammar
from scheduler_svc.frontend.constraints.json_schema import fault_of_schema
from scheduler_svc.frontend.tools import Tooling
from scheduler_svc.http.errors import invalid
from scheduler_svc.http.fields import show

MAX_DEPTH = 200
"""Levels of objects and arrays within a function's schema."""


def calls_grammar(tooling: Tooling) -> Grammar | None:
    """What a forced choice allows; None where the choice is free. Raises `ApiError` 400.

    What of a function's schema cannot be enforced is passed over, unless the function is `strict`. What the compiler
    only approximates is refused where all are.
    """
    if not tooling.forced:
        return None
    if len(orjson.dumps([_parameters(tool) for tool in tooling.callable_tools])) > MAX_CHARACTERS:
        raise invalid("tools", f"tools: their parameters are longer than {MAX_CHARACTERS} characters together")
    for tool in tooling.callable_tools:
        function, parameters = tool["function"], _parameters(tool)
        param = f"tools: the parameters of {function['name']}"
        if parameters["type"] != "object":
            raise invalid("tools", f"{param}: must be of type object, got {show(parameters['type'])}")
        if function.get("strict"):
            fault = fault_of_schema(parameters)
            if fault is not None:
                raise invalid("tools", f"{param}: {fault}", "unsupported_schema")
    schema = calls_schema(tooling)
    source = orjson.dumps(schema).decode()
    if len(source) > MAX_CHARACTERS:
        raise invalid("tools", f"tools: the schema of their calls is longer than {MAX_CHARACTERS} characters")
    strict = all(tool["function"].get("strict") for tool in tooling.callable_tools)
    return Grammar(Language.JSON_SCHEMA, source, "tools", lenient=not strict, schema=schema)


def calls_schema(tooling: Tooling) -> dict[str, Any]:
    """JSON Schema of the calls that a forced choice allows: an array of `{"name", "parameters"}`, one at least.

    A function's schema that refers to places within itself stands under `$defs`, and its references lead there.
    """
    calls, roots = [], {}
    for i, tool in enumerate(tooling.callable_tools):
        parameters = _parameters(tool)
        root = f"#/$defs/tool{i}"
        moved = _moved(parameters, root)
        if moved != parameters:
            roots[f"tool{i}"], moved = moved, {"$ref": root}
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool["function"]["name"]}, "parameters": moved},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    items = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": items}
    if tooling.choice == "function" or not tooling.parallel:
        schema["maxItems"] = 1
    return schema | ({"$defs": roots} if roots else {})


def _parameters(tool: dict[str, Any]) -> dict[str, Any]:
    """A function's own schema: that of an object, though it may not say so."""
    return {"type": "object", **(tool["function"].get("parameters") or {})}


def _moved(value: Any, root: str, depth: int = 1) -> Any:
    """The same schema where `#` does not mean itself any more, but is found at `root`."""
    if depth > MAX_DEPTH:
        raise invalid("tools", f"tools: a function's parameters lie within each other more than {MAX_DEPTH} deep")
    if isinstance(value, list):
        return [_moved(item, root, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    moved = {name: _moved(inner, root, depth + 1) for name, inner in value.items()}
    reference = value.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = root + reference[1:]
    return moved
