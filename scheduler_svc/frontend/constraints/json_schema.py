"""What of JSON Schema the grammars cannot express. xgrammar passes it over in silence; here it is refused by name."""

from __future__ import annotations

from typing import Any

MAX_DEPTH = 64
"""Levels of schemas within each other."""
UNSUPPORTED = frozenset(
    {
        "multipleOf",
        "uniqueItems",
        "contains",
        "minContains",
        "maxContains",
        "not",
        "if",
        "then",
        "else",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "$dynamicRef",
        "$recursiveRef",
    }
)
_ONE = (
    "additionalItems",
    "additionalProperties",
    "items",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_MAPS = ("$defs", "definitions", "patternProperties", "properties")


def fault_of_schema(schema: Any) -> str | None:
    """Why a schema cannot be enforced as it stands, as far as its keywords tell; None: nothing found."""
    stack: list[tuple[Any, str, int]] = [(schema, "", 1)]
    while stack:
        value, path, depth = stack.pop()
        if type(value) is bool:
            continue
        if type(value) is not dict:
            return f"{path or 'the schema'}: expected an object or a boolean"
        if depth > MAX_DEPTH:
            return f"schemas lie within each other more than {MAX_DEPTH} deep"
        for name in value:
            if name in UNSUPPORTED and value[name] not in (False, None):
                return f"{_join(path, name)}: is not supported"
        reference = value.get("$ref")
        if isinstance(reference, str) and not (reference == "#" or reference.startswith("#/")):
            return f"{_join(path, '$ref')}: only references within the schema are supported"
        stack += [(inner, where, depth + 1) for inner, where in _inner(value, path)]
    return None


def _inner(value: dict[str, Any], path: str) -> list[tuple[Any, str]]:
    """The schemas right within a schema, with their places."""
    found = [(value[name], _join(path, name)) for name in _ONE if type(value.get(name)) in (dict, bool)]
    for name in _LISTS:
        if type(value.get(name)) is list:
            found += [(item, f"{_join(path, name)}[{i}]") for i, item in enumerate(value[name])]
    for name in _MAPS:
        if type(value.get(name)) is dict:
            found += [(item, _join(_join(path, name), key[:60])) for key, item in value[name].items()]
    return found


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
