"""Answers that keep to a grammar, from real processes with the embedded model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from tests.e2e.conftest import Stack

SCHEMAS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("schemas.json").read_text("utf-8"))
EVERY = 54
"""Of the schemas, one in so many is tried by default."""
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 30},
        "degrees": {"type": "integer", "minimum": -90, "maximum": 60},
        "sky": {"enum": ["clear", "cloudy", "rain"]},
        "hours": {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 24}, "maxItems": 6},
    },
    "required": ["city", "degrees", "sky", "hours"],
}
TRIP = {
    "type": "object",
    "properties": {
        "to": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 99},
        "by": {"enum": ["ship", "train"]},
        "nights": {
            "type": "array",
            "items": {"type": "integer", "minimum": 10, "maximum": 99},
            "minItems": 3,
            "maxItems": 4,
        },
    },
    "required": ["to", "days", "by", "nights"],
    "additionalProperties": False,
}
GRAMMAR = 'root ::= verb " " noun ("," " " noun){1,3}\nverb ::= "take" | "leave"\nnoun ::= "bread" | "é" [0-9]'


@pytest.fixture(scope="module", autouse=True)
def alone(real_stack: Stack) -> Stack:
    return real_stack


def ask(stack: Stack, **body: Any) -> list[dict[str, Any]]:
    """The choices of a completion, each with its `text` and `finish_reason`."""
    answer = stack.client.post("/v1/completions", json=told(**body))
    assert answer.status_code == 200, answer.text
    choices: list[dict[str, Any]] = answer.json()["choices"]
    return choices


def told(**body: Any) -> dict[str, Any]:
    return {"prompt": "Write it down:", "temperature": 1, "seed": 11, "max_tokens": 700} | body


def streamed(events: Iterator[dict[str, Any]]) -> tuple[str, str]:
    """Text and finish reason of a stream of one choice."""
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice["text"] for choice in choices), str(choices[-1]["finish_reason"])


def keeps(schema: dict[str, Any], text: str) -> None:
    jsonschema_rs.validator_for(schema).validate(json.loads(text))


def keeps_each(stack: Stack, schemas: list[dict[str, Any]]) -> None:
    def one(schema: dict[str, Any]) -> None:
        body = {"seed": 11, "temperature": 1, "structured_outputs": {"json": schema}}
        (choice,) = ask(stack, **body)
        assert choice["finish_reason"] == "stop", schema
        keeps(schema, choice["text"])
        assert streamed(stack.stream("Write it down:", 700, **body)) == (choice["text"], "stop")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, schemas))


def test_some_schemas_are_kept_streamed_or_not(real_stack: Stack) -> None:
    keeps_each(real_stack, SCHEMAS[::EVERY])


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_all_schemas_are_kept_streamed_or_not(real_stack: Stack) -> None:
    assert len(SCHEMAS) >= 200
    keeps_each(real_stack, SCHEMAS)


def test_a_chat_with_a_response_format(real_stack: Stack) -> None:
    for response_format in (
        {"type": "json_schema", "json_schema": {"name": "weather", "strict": True, "schema": WEATHER}},
        {"type": "json_object"},
        {"type": "text"},
    ):
        body = {"messages": [{"role": "user", "content": "The weather?"}], "seed": 3, "max_tokens": 300}
        answer = real_stack.client.post("/v1/chat/completions", json=body | {"response_format": response_format})
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        if response_format["type"] == "json_schema":
            assert choice["finish_reason"] == "stop"
            keeps(WEATHER, choice["message"]["content"])
        elif response_format["type"] == "json_object":
            assert choice["message"]["content"].lstrip().startswith("{")


def test_regex_choice_and_grammar(real_stack: Stack) -> None:
    pattern = r"[a-c]{2,5}-\d{3}"
    for prefix, inside in (("guided_", False), ("", True)):
        for kind, source, right in (
            ("regex", pattern, pattern),
            ("choice", ["yes", 'no "or" \\', "mañana\n"], r'yes|no "or" \\|mañana\n'),
            ("grammar", GRAMMAR, r"(take|leave) (bread|é\d)(, (bread|é\d)){1,3}"),
        ):
            fields = {"structured_outputs": {kind: source}} if inside else {prefix + kind: source}
            for choice in ask(real_stack, n=3, **fields):
                assert re.fullmatch(right, choice["text"]), (kind, choice)
                assert choice["finish_reason"] == "stop"


def test_without_white_space_between(real_stack: Stack) -> None:
    (choice,) = ask(real_stack, structured_outputs={"json": WEATHER, "disable_any_whitespace": True})
    outside_strings = re.sub(r'"(\\.|[^"\\])*"', "", choice["text"])
    assert re.fullmatch(r"(, |: |[^\s])*", outside_strings)


def test_several_answers_differ_and_each_keeps_to_it(real_stack: Stack) -> None:
    choices = ask(real_stack, n=3, guided_json=WEATHER)
    assert len({choice["text"] for choice in choices}) > 1
    for choice in choices:
        keeps(WEATHER, choice["text"])


def test_limits_cut_as_ever(real_stack: Stack) -> None:
    (whole,) = ask(real_stack, guided_json=WEATHER)
    (cut,) = ask(real_stack, guided_json=WEATHER, max_tokens=5)
    assert cut["finish_reason"] == "length" and whole["text"].startswith(cut["text"])
    (stopped,) = ask(real_stack, guided_json=WEATHER, stop='"sky"')
    assert stopped["text"] == whole["text"][: whole["text"].index('"sky"')]
    # The grammar's end goes before min_tokens; where the text may go on, min_tokens holds.
    assert ask(real_stack, guided_choice=["yes"], min_tokens=20)[0]["text"] == "yes"
    assert len(ask(real_stack, guided_regex="(ab)*", min_tokens=12, max_tokens=24, logprobs=0)[0]["text"]) >= 12
    assert ask(real_stack, guided_choice=["yes"], ignore_eos=True)[0]["finish_reason"] == "stop"


def test_logprobs_are_numbers(real_stack: Stack) -> None:
    """C12: what the grammar excludes is in the raw distribution still, and everything can be written as JSON."""
    (choice,) = ask(real_stack, guided_json=WEATHER, logprobs=5, logit_bias={"7": 100, "8": -100})
    assert all(isinstance(value, float) for value in choice["logprobs"]["token_logprobs"])
    assert all(len(top) >= 5 for top in choice["logprobs"]["top_logprobs"])


def test_allowed_tokens_and_bad_words(real_stack: Stack) -> None:
    tokens = real_stack.client.post("/tokenize", json={"prompt": "abc", "add_special_tokens": False}).json()["tokens"]
    (choice,) = ask(real_stack, allowed_token_ids=tokens, max_tokens=20)
    assert choice["finish_reason"] == "length" and set(choice["text"]) <= set("abc")
    plain = ask(real_stack, temperature=0, max_tokens=40)[0]["text"]
    word = next(word for word in re.findall(r"[a-z]{2,}", plain))
    without = ask(real_stack, temperature=0, max_tokens=40, bad_words=[word])[0]["text"]
    assert without != plain and not re.search(rf"(^| ){word}\b", without)
    assert ask(real_stack, bad_words=["yes"], guided_choice=["yes"])[0]["text"] == "yes"


def test_batch_mates_are_as_alone(real_stack: Stack) -> None:
    bodies = [told(prompt=f"Story {i}", max_tokens=60, temperature=i % 2) for i in range(3)]
    bodies += [told(guided_json=WEATHER, seed=i) for i in range(3)]
    alone = [ask(real_stack, **body) for body in bodies]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda body: ask(real_stack, **body), bodies)) == alone


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {"type": "integer", "multipleOf": 3}}, "guided_json"),
        ({"guided_json": {"$ref": "#/$defs/none"}}, "guided_json"),
        ({"guided_json": {"type": "string", "pattern": "(?=a)b"}}, "guided_json"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"structured_outputs": {"regex": r"(a)\1"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice"),
        ({"allowed_token_ids": [1 << 30]}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(real_stack: Stack, fields: dict[str, Any], param: str) -> None:
    answer = real_stack.client.post("/v1/completions", json=told(**fields))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert param in answer.json()["error"]["message"]


def test_an_ambiguous_grammar_costs_nobody_else_anything(real_stack: Stack) -> None:
    """Each step of it costs more than the one before."""
    ambiguous = told(guided_grammar='root ::= ("a" | "aa" | root root)', max_tokens=60)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(real_stack.client.post, "/v1/completions", json=ambiguous)
        assert ask(real_stack, guided_regex="[xyz]{4}")[0]["finish_reason"] == "stop"
        assert answer.result(60).status_code == 200
    real_stack.until_idle()


def test_a_stream_survives_kill_9_with_the_same_tokens(start: Callable[..., Stack]) -> None:
    stack = start()
    first = stack.real("one", "--max-num-seqs", "4")
    stack.ready()
    fields = {"temperature": 1, "seed": 5, "guided_json": TRIP, "ignore_eos": False}
    undisturbed = stack.complete("Write it down:", 400, **fields).json()["choices"][0]
    events = stack.stream("Write it down:", 400, **fields)
    begun = [next(events) for _ in range(8)]
    first.kill()
    stack.services.processes.remove(first)
    stack.real("two", "--max-num-seqs", "4")
    assert streamed(iter([*begun, *events])) == (undisturbed["text"], "stop")
    keeps(TRIP, undisturbed["text"])
    assert stack.metric("gilir_executors_lost_total") == 1
