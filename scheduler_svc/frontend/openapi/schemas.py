"""Pieces of JSON Schema (draft 2020-12, as OpenAPI 3.1 uses it)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from scheduler_svc.http.field_kinds import Boolean, Field, Integer, Number

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
BOOLEAN: Schema = {"type": "boolean"}
NUMBER: Schema = {"type": "number"}
SECONDS: Schema = {"type": "number", "minimum": 0}
UNIX_TIME: Schema = {"type": "integer", "description": "Unix time in seconds"}


def ref(name: str) -> Schema:
    """A schema of the components."""
    return {"$ref": f"#/components/schemas/{name}"}


def constant(value: Any) -> Schema:
    return {"const": value}


def choice(values: Iterable[Any]) -> Schema:
    return {"enum": list(values)}


def whole(pattern: str) -> str:
    """A regular expression that means the whole text, which JSON Schema's do not by themselves."""
    return f"^(?:{pattern})$"


def record(properties: dict[str, Schema], *, required: Iterable[str] | None = None, **more: Any) -> Schema:
    """An object; without `required` all its properties are always there."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties if required is None else required),
        **more,
    }


def array(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def nullable(schema: Schema) -> Schema:
    """The same or null."""
    if isinstance(schema.get("type"), str):
        return {**schema, "type": [schema["type"], "null"]}
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    return {"anyOf": [schema, {"type": "null"}]}


def field(kind: Field) -> Schema:
    """What a field of a body may be, null aside."""
    if isinstance(kind, Integer):
        schema: Schema = {"type": "integer", "minimum": kind.low, "maximum": kind.high}
    elif isinstance(kind, Number):
        schema = {"type": "number", "exclusiveMinimum" if kind.above else "minimum": kind.low, "maximum": kind.high}
    elif isinstance(kind, Boolean):
        schema = {"type": "boolean"}
    else:
        schema = {"type": "string", "maxLength": kind.max_length}
        if kind.pattern is not None:
            schema["pattern"] = whole(kind.pattern)
    return schema if kind.default is None else {**schema, "default": kind.default}


def body(properties: dict[str, Schema], required: Iterable[str], notes: dict[str, str], **more: Any) -> Schema:
    """A request's body. What is not required may be null. `notes`: descriptions by name."""
    needed = list(required)
    described = {
        name: {**(schema if name in needed else nullable(schema)), **_description(notes.get(name))}
        for name, schema in properties.items()
    }
    return record(described, required=needed, **more)


def _description(note: str | None) -> Schema:
    return {} if note is None else {"description": note}
