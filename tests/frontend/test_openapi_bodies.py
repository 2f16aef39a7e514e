"""What the API's description says of bodies and headers is what the code reads, takes and refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from described_frontend import BODIES, MESSAGES, World, open_world

from scheduler_svc.http.fields import Fields

SEEN_WITH = {
    "CreateChatCompletion": "CreateCompletion",
    "CreateResponse": "CreateCompletion",
    "TokenizeMessages": "TokenizeText",
}
"""A body of whose fields only those are tried that differ from the other's: the same code reads the rest."""
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
BESIDE: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True, "include": ["message.output_text.logprobs"]},
    "stream_options": {"stream": True},
    "add_generation_prompt": {"continue_final_message": False},
    "continue_final_message": {"add_generation_prompt": False},
    "tool_choice": {"tools": [{"type": "function", "name": "f", "function": {"name": "f"}}]},
}
"""What a field needs beside it."""
OTHER_RULES = {("best_of", 128), ("min_tokens", 1 << 24), ("add_generation_prompt", True)}
"""Values in range that another rule refuses: they are to equal n, or not to exceed max_tokens."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with open_world(tmp_path_factory.mktemp("openapi")) as world:
        yield world


@pytest.fixture
def reading(world: World, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Paths of the fields that are read while the test runs."""
    seen: set[str] = set()
    raw = Fields.raw

    def noted(self: Fields, name: str) -> Any:
        seen.add(self.path(name))
        return raw(self, name)

    monkeypatch.setattr(Fields, "raw", noted)
    return seen


def properties(schema: dict[str, Any], path: str = "") -> set[str]:
    """Paths of an object's properties, those of objects within it too."""
    found: set[str] = set()
    for name, inner in schema.get("properties", {}).items():
        found.add(path + name)
        found |= properties(inner, f"{path}{name}.")
    return found


@pytest.mark.parametrize("name", BODIES)
def test_what_is_described_of_a_body_is_what_is_read_of_it(world: World, reading: set[str], name: str) -> None:
    path, body = BODIES[name]
    inner: dict[str, Any] = {"stream": True, "stream_options": {}} if path in GENERATING else {}
    if name == "CreateResponse":
        inner |= {"text": {}, "reasoning": {}}
    world.client.post(path, json={**body, **inner})
    described = properties(world.schemas[name])
    # A response's request is read as a chat's, too, made of it.
    others = properties(world.schemas["CreateChatCompletion"]) if name == "CreateResponse" else set()
    assert described <= reading <= described | others


# --- ranges ---


def edges(schema: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Values of a property that are just right, and just wrong."""
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    right: list[Any] = list(schema.get("enum", [])) + ([None] if "null" in kinds else [])
    wrong: list[Any] = [] if "null" in kinds or None in right or not kinds else [None]
    if "integer" in kinds:
        right += [schema["minimum"], schema["maximum"]]
        wrong += [schema["minimum"] - 1, schema["maximum"] + 1, True, "1", 1.5]
    if "number" in kinds:
        low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema["maximum"]
        right += [high, low] if "minimum" in schema else [high, low + 1e-6]
        wrong += [low - 1e-6 if "minimum" in schema else low, high + 1e-6, False, "1"]
    if "boolean" in kinds:
        right, wrong = [*right, True, False], [*wrong, 0, "true"]
    if "string" in kinds and "enum" not in schema and "pattern" not in schema:
        right, wrong = [*right, "x" * min(schema["maxLength"], 5000)], [*wrong, 5, "x" * (schema["maxLength"] + 1)]
        wrong += [""] if schema.get("minLength") else []
    if "array" in kinds:
        wrong += ["x", {}]
        wrong += [[0] * (schema["maxItems"] + 1)] if schema.get("maxItems", 1 << 20) < 10_000 else []
    if "object" in kinds:
        wrong += ["x", []]
    if "enum" in schema:
        wrong.append("no such word")
    return right, wrong


@pytest.mark.parametrize("name", BODIES)
def test_values_in_range_are_taken_and_others_are_400(world: World, name: str) -> None:
    path, body = BODIES[name]
    validator, others = world.validator(world.schemas[name]), world.schemas[SEEN_WITH.get(name, name)]
    fields = {
        field: described
        for field, described in world.schemas[name]["properties"].items()
        if name not in SEEN_WITH or others["properties"].get(field) != described
    }
    tried = 0
    for field, described in fields.items():
        right, wrong = edges(described)
        for value in right:
            asked = {**body, **BESIDE.get(field, {}), field: value}
            assert validator.is_valid(asked), (field, value)
            answer = world.client.post(path, json=asked)
            # 404: there is no such model or file. With a code: it is right, but not for this model.
            refused = answer.status_code == 400 and answer.json()["error"]["code"] is None
            assert answer.status_code in (200, 400, 404) and (not refused or (field, value) in OTHER_RULES), (
                field, value, answer.text[:300]
            )  # fmt: skip
            tried += 1
        for value in wrong:
            asked = {**body, **BESIDE.get(field, {}), field: value}
            assert not validator.is_valid(asked), (field, value)
            answer = world.client.post(path, json=asked)
            assert answer.status_code == 400, (field, value, answer.text[:300])
            tried += 1
    assert tried >= 2 * len(fields) > 0


CALL = {"function": {"name": "f", "arguments": "{}"}}
NAMED = {"type": "function", "function": {"name": "f"}}
FUNCTION = {"type": "function", "name": "f"}


def tools_of(**function: Any) -> list[dict[str, Any]]:
    """One tool, of this function."""
    return [{"type": "function", "function": {"name": "f", **function}}]


PART = {"type": "input_text", "text": "x"}
ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
INNER: list[tuple[str, str, list[Any], list[Any]]] = [
    (
        "CreateCompletion",
        "prompt",
        ["x", ["x", "y"], [5], [[5], [6]]],
        [[], [[]], [True], [1.5], [-1], ["x", 5], {}, 5],
    ),
    ("CreateCompletion", "stop", ["x" * 4096, ["x"] * 64, []], ["", [""], "x" * 4097, ["x"] * 65, [5], 5, {}]),
    ("CreateCompletion", "stop_token_ids", [[], [0]], [[-1], ["5"], [1.5], [True], [0] * 4097]),
    (
        "CreateCompletion",
        "logit_bias",
        [{"0": -100, "12": 100}, {}],
        [{"5": 100.1}, {"5": -100.1}, {"5": None}, {"05": 1}, {"": 1}, {"x": 1}, {"5\n": 1}, {"-1": 1}],
    ),
    ("CreateCompletion", "stream_options", [{"include_usage": None}], [{"include_usage": 1}]),
    ("CreateCompletion", "stream_options", [{"continuous_usage_stats": True}], [{"continuous_usage_stats": "no"}]),
    ("CreateCompletion", "request_id", ["!", "~" * 200], ["", "a b", "é", "~" * 201, "a\n"]),
    ("CreateChatCompletion", "chat_template_kwargs", [{"a": [1]}, {}], [{"messages": []}, {"tools": 1}]),
    (
        "CreateChatCompletion",
        "messages",
        [
            [{"role": "user", "content": ["a", {"type": "text", "text": "b"}], "more": 5}],
            [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [CALL], "name": None}],
            [*MESSAGES, {"role": "assistant"}, {"role": "tool", "content": [], "tool_call_id": "1"}],
        ],
        [
            [],
            ["x"],
            [{"role": "user"}],
            [{"role": "nobody", "content": "x"}],
            [{"role": "user", "content": None}],
            [{"role": "user", "content": 5}],
            [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}],
            [{"role": "user", "content": [{"type": "text"}]}],
            [{"role": "user", "content": "x", "name": 5}],
            [{"role": "tool", "content": "x", "tool_call_id": 5}],
            [{"role": "assistant", "tool_calls": [5]}],
            [{"role": "assistant", "tool_calls": [{"function": {}}]}],
        ],
    ),
    (
        "CreateChatCompletion",
        "tools",
        [
            [],
            tools_of(description="x", parameters={}, strict=True),
            tools_of(name="a.b:c/d-E_9", description=None, parameters=None, strict=None),
            [{"type": None, **tools_of()[0], "more": 5}],
        ],
        [
            [5],
            [{}],
            [{"type": "retrieval", "function": {"name": "f"}}],
            [{"type": "function", "function": {}}],
            *(tools_of(name=name) for name in ("", "a b", "f\n", "f" * 129, 5, None)),
            tools_of(description="x" * 65_537),
            tools_of(parameters="{}"),
            tools_of(strict="yes"),
        ],
    ),
    (
        "CreateChatCompletion",
        "tool_choice",
        [
            "none",
            "auto",
            "required",
            NAMED,
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}},
        ],
        [
            *("any", 5, {}, {**NAMED, "type": "x"}, {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]}),
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
            {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [NAMED]}},
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "mcp"}]}},
        ],
    ),
    (
        "CreateResponse",
        "input",
        [
            "x",
            [{"role": "user", "content": "x", "more": 5}, {"role": "developer", "content": [], "type": "message"}],
            [
                {"role": "user", "content": [PART]},
                {"role": "assistant", "content": [{**PART, "type": "output_text"}]},
            ],
            [{"type": "reasoning"}, {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}]}],
            [ITEM, {"type": "function_call_output", "call_id": "c", "output": [PART]}],
        ],
        [
            5,
            [],
            ["x"],
            [{"role": "tool", "content": "x"}],
            [{"role": "user"}],
            [{"role": "user", "content": [{"type": "input_image", "text": "x"}]}],
            [{"role": "user", "content": [{"type": "input_text"}]}],
            [{"type": "reasoning", "summary": [{"type": "reasoning_text", "text": "x"}]}],
            [{**ITEM, "arguments": {}}],
            [{"type": "function_call_output", "call_id": "c"}],
            [{"type": "item_reference", "id": "x"}],
        ],
    ),
    (
        "CreateResponse",
        "text",
        [{}, {"format": {"type": "text"}}, {"format": {"type": "json_schema", "schema": {}, "strict": None}}],
        [{"format": {"type": "json_schema"}}, {"format": {}}, {"format": 5}, {"verbosity": "low"}],
    ),
    ("CreateResponse", "reasoning", [{"effort": "low", "summary": None}], [{"effort": 5}, {"summary": "x" * 33}]),
    (
        "CreateResponse",
        "include",
        [[], ["reasoning.encrypted_content"], ["message.output_text.logprobs"]],
        [["x"], [5]],
    ),
    (
        "CreateResponse",
        "tools",
        [[], [{"type": "function", "name": "f", "parameters": {}, "more": 5}]],
        [[5], [{"name": "f"}], [{"type": "function"}], [{"type": "web_search"}], [{"type": "function", "name": "a b"}]],
    ),
    (
        "CreateResponse",
        "tool_choice",
        ["none", "auto", "required", FUNCTION, {"type": "allowed_tools", "mode": "required", "tools": [FUNCTION]}],
        ["any", 5, {}, NAMED, {"type": "allowed_tools", "tools": [FUNCTION]}],
    ),
    ("TokenizeMessages", "tools", [tools_of()], [[{}]]),
    ("CreateChatCompletion", "truncate_prompt_tokens", [-1, 1, 5], [0, -2, 1.5]),
    ("Detokenize", "tokens", [[], [0]], [[-1], [1.5], ["x"], [True]]),
    ("CreateBatch", "completion_window", ["1m", "30d"], ["0m", "24", "h", "24h ", "1d\n"]),
    (
        "CreateBatch",
        "metadata",
        [{}, {"k" * 64: "v" * 512}, {str(i): "" for i in range(16)}],
        [{"k" * 65: ""}, {"k": "v" * 513}, {"k": 5}, {str(i): "" for i in range(17)}],
    ),
    (
        "CreateBatch",
        "output_expires_after",
        [{}, {"anchor": "created_at", "seconds": 3600}],
        [{"anchor": "created_at", "seconds": 3599}, {"anchor": "x"}, {"seconds": "3600"}],
    ),
]
"""Body, field, values that are right inside, and values that are not."""


@pytest.mark.parametrize(
    ("name", "field", "right", "wrong"), INNER, ids=lambda value: value if isinstance(value, str) else ""
)
def test_what_is_inside_a_field_is_described(
    world: World, name: str, field: str, right: list[Any], wrong: list[Any]
) -> None:
    path, body = BODIES[name]
    validator = world.validator(world.schemas[name])
    for value in (*right, *wrong):
        asked = {**body, **BESIDE.get(field, {}), field: value}
        answer = world.client.post(path, json=asked)
        assert validator.is_valid(asked) == (value in right), value
        assert (answer.status_code == 400) == (value in wrong), (value, answer.text)


def test_more_ids_than_may_be_detokenized(world: World) -> None:
    ids = world.schemas["Detokenize"]["properties"]["tokens"]["maxItems"] + 1
    answer = world.client.post("/detokenize", content=b'{"tokens":[' + b",".join([b"0"] * ids) + b"]}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens")


HEADERS = [
    ("X-Tenant", ["!", "t" * 256], ["", "a b", "t" * 257]),
    ("X-Request-Timeout", ["0.5", "1e6"], ["0", "-1", "1000001", "soon", "nan"]),
    ("X-Request-Id", ["mine", "", "a b", "x" * 300], []),
]


@pytest.mark.parametrize(("name", "right", "wrong"), HEADERS)
def test_headers_are_described(world: World, name: str, right: list[str], wrong: list[str]) -> None:
    described = next(one for one in world.document["components"]["parameters"].values() if one["name"] == name)
    is_number = described["schema"]["type"] == "number"
    for value in (*right, *wrong):
        answer = world.client.post("/v1/completions", json={"prompt": "Hello"}, headers={name: value})
        assert (answer.status_code == 400) == (value in wrong), (value, answer.text)
        if value not in ("soon", "nan"):  # no JSON values
            validator = world.validator(described["schema"])
            assert validator.is_valid(float(value) if is_number else value) == (value in right), value
