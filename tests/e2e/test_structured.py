"""Answers that keep to a grammar, from real processes with the embedded model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest

from tests.e2e.conftest import Stack

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    stack = Stack()
    try:
        stack.real("one")
        stack.ready()
        yield stack
    finally:
        stack.close()


def chat(stack: Stack, **body: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "Tell me of a cat."}], "temperature": 1, "seed": 7} | body
    answer = stack.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_schema_is_kept(stack: Stack) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    choice = chat(stack, response_format=schema, max_tokens=400)["choices"][0]
    print(choice)
    jsonschema_rs.validator_for(PERSON).validate(json.loads(choice["message"]["content"]))
    assert choice["finish_reason"] == "stop"
