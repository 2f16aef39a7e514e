"""Fields that bound an answer: what goes to the core, what is refused, and what a hostile one costs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from frontend_service import BYTE_FALLBACK, BYTE_LEVEL, Service, run_service
from tokenizers_for_tests import byte_level, card

from common.wire import Language
from scheduler_svc.frontend.constraints.json_schema import MAX_DEPTH, UNSUPPORTED, fault_of_schema

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["x"]}}, "required": ["b"]}
COMPACT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"enum":["x"]}},"required":["b"]}'


def refused(response: Any, param: str, code: str | None = None) -> str:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and error["message"].startswith(param), error
    assert code is None or error["code"] == code, error
    return str(error["message"])


@pytest.mark.parametrize(
    ("fields", "language", "source"),
    [
        ({"response_format": {"type": "json_object"}}, Language.JSON_SCHEMA, '{"type":"object"}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            Language.JSON_SCHEMA,
            COMPACT,
        ),
        ({"guided_json": json.dumps(SCHEMA, indent=1)}, Language.JSON_SCHEMA, COMPACT),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True, "disable_fallback": True}},
            Language.JSON_SCHEMA_COMPACT,
            COMPACT,
        ),
        ({"structured_outputs": {"json_object": True}}, Language.JSON_SCHEMA, '{"type":"object"}'),
        ({"structured_outputs": {"regex": "a+é"}}, Language.REGEX, "a+é"),
        ({"guided_choice": ['"', "a\\b\n"]}, Language.EBNF, r'root ::= "\"" | "a\\b\n"'),
        ({"guided_grammar": 'root ::= "a"'}, Language.EBNF, 'root ::= "a"'),
        ({"structured_outputs": {}, "response_format": {"type": "text"}, "guided_json": None}, Language.NONE, ""),
    ],
)
@pytest.mark.parametrize("model", [BYTE_LEVEL, BYTE_FALLBACK])
def test_a_grammar_goes_to_the_core_as_text(
    service: Service, model: str, fields: dict[str, Any], language: Language, source: str
) -> None:
    for ask in (service.complete, service.chat):
        service.core.reset()
        assert ask(model=model, ignore_eos=True, n=2, **fields).status_code == 200
        params = service.core.requests[0].params
        assert (params.constraint.language, params.constraint.source) == (language, source)
        assert params.ignore_eos is (language is Language.NONE)


def test_allowed_tokens_and_bad_words_go_to_the_core(service: Service) -> None:
    assert service.complete(allowed_token_ids=[5, 3], bad_words=["lo", " lo"]).status_code == 200
    constraint = service.core.requests[0].params.constraint
    assert constraint.allowed_ids.tolist() == [5, 3]
    bare, behind = service.ids("lo"), service.ids(" lo")
    assert constraint.bad_widths.tolist() == [len(bare), len(behind)]
    assert constraint.bad_ids.tolist() == [*bare, *behind]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"response_format": "text"}, "response_format", None),
        ({"response_format": {}}, "response_format", None),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "unsupported_parameter"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"strict": 1, "schema": {}}}},
            "response_format.json_schema.strict",
            None,
        ),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json", None),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", None),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", None),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", None),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern", None),
        ({"guided_regex": "a" * 65_537}, "guided_regex", None),
        ({"guided_regex": "(?i)a"}, "guided_regex", "invalid_grammar"),
        ({"guided_grammar": 'root ::= ("a"'}, "guided_grammar", "invalid_grammar"),
        ({"guided_json": {"type": "integer", "minimum": 3, "maximum": 2}}, "guided_json", "invalid_grammar"),
        ({"guided_json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "guided_json", "invalid_grammar"),
        ({"guided_json": {"items": [{"properties": {"not": {"not": {}}}}]}}, "guided_json", "unsupported_schema"),
        ({"guided_choice": ["a", 1]}, "guided_choice", None),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids", None),
        ({"bad_words": [1]}, "bad_words", None),
        ({"bad_words": "a"}, "bad_words", None),
    ],
)
def test_bad_ones_are_refused_by_name(service: Service, fields: dict[str, Any], param: str, code: str | None) -> None:
    refused(service.complete(**fields), param, code)
    assert not service.core.requests


def test_forced_calls_that_cannot_be_bounded_are_refused(service: Service) -> None:
    for lead, status in (("#/$defs/b", 400), ("#/$defs/a", 200)):
        schema = {"properties": {"a": {"$ref": lead}}, "$defs": {"a": {"type": "integer", "multipleOf": 5}}}
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        answer = service.chat(tools=tools, tool_choice="required")
        assert answer.status_code == status, answer.text
        if status == 400:
            refused(answer, "tools", "invalid_grammar")


def test_what_is_not_strict_may_have_more_than_can_be_enforced(service: Service) -> None:
    schema = {"type": "integer", "multipleOf": 5}
    for strict, status in ((False, 200), (True, 400), (None, 400)):
        named = {"name": "n", "schema": schema, "strict": strict}
        answer = service.chat(response_format={"type": "json_schema", "json_schema": named})
        assert answer.status_code == status, answer.text


@pytest.mark.parametrize("keyword", sorted(UNSUPPORTED))
def test_schemas_that_cannot_be_enforced(keyword: str) -> None:
    assert fault_of_schema({"anyOf": [{"properties": {"x": {keyword: 2}}}]}) == (
        f"anyOf[0].properties.x.{keyword}: is not supported"
    )
    # As the name of a property, or among the values of an enum, it says nothing.
    assert fault_of_schema({"properties": {keyword: {"enum": [{keyword: 1}]}}}) is None


def test_schemas_that_are_none_or_too_deep() -> None:
    deep: dict[str, Any] = {}
    for _ in range(MAX_DEPTH):
        deep = {"items": deep}
    assert "deep" in str(fault_of_schema(deep)) and fault_of_schema(deep["items"]) is None
    assert fault_of_schema({"properties": {"a": 5}}) == "properties.a: expected an object or a boolean"
    assert fault_of_schema({"$ref": "https://example.org/x"}) == "$ref: only references within the schema are supported"
    assert fault_of_schema({"$ref": "#/$defs/a", "$defs": {"a": True}}) is None


def test_a_hostile_one_harms_itself_alone(tmp_path: Path) -> None:
    pattern = "^([a-z]{1,200}[0-9]{1,90}){1,50}$"
    hostile = {f"k{i}": {"type": "string", "pattern": pattern.replace("9", str(i % 9 + 1))} for i in range(500)}
    schema = {"type": "object", "properties": hostile}
    with run_service(tmp_path, "--grammar-cpu-s", "1") as service:
        assert service.complete(guided_regex="[0-9]").status_code == 200
        children = psutil.Process(service.process.pid).children()
        (worker,) = (child for child in children if "constraints.worker" in child.cmdline()[-1])
        began = time.monotonic()
        assert "takes more than 1 s" in refused(service.complete(guided_json=schema), "guided_json", "invalid_grammar")
        took, began = time.monotonic() - began, time.monotonic()
        refused(service.complete(guided_json=schema), "guided_json", "invalid_grammar")
        assert time.monotonic() - began < took / 2, "known by now"
        assert worker.is_running()
        worker.kill()
        assert service.complete(guided_regex="[1-9]{3}").status_code == 200


@pytest.fixture(scope="module")
def bare_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One model without a tokenizer, and one without an end of text."""
    models = [card("numbers", byte_level(), "", tokenizer_files={}), card("endless", byte_level(), "", eos_ids=())]
    with run_service(tmp_path_factory.mktemp("ipc"), models=models) as service:
        yield service


def test_a_model_without_tokenizer_or_end_of_text(bare_service: Service) -> None:
    for fields in ({"guided_regex": "a"}, {"bad_words": ["a"]}):
        answer = bare_service.complete(model="numbers", prompt=[5], **fields)
        refused(answer, next(iter(fields)), "no_tokenizer")
    assert bare_service.complete(model="numbers", prompt=[5], allowed_token_ids=[4]).status_code == 200
    assert "end-of-text" in refused(bare_service.complete(model="endless", guided_regex="a"), "guided_regex")
