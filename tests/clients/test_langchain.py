"""LangChain's ChatOpenAI: invoke, stream, usage, tools, structured output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "langchain_client.py"
pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def read(url: str, installed: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("langchain")
    return json.loads(installed("langchain").run("python", str(SCRIPT), url, "default_model", folder=folder))


def test_a_plain_answer_and_its_stream_are_the_same(read: Any) -> None:
    plain = read["plain"]
    assert plain["content"] and plain["finish_reason"] in ("stop", "length")
    assert plain["usage"]["input_tokens"] > 0 and 0 < plain["usage"]["output_tokens"] <= 16
    for streamed in (read["streamed"], read["with_usage"]):
        assert streamed["content"] == plain["content"] and streamed["num_chunks"] > 2
        assert streamed["finish_reason"] == plain["finish_reason"]


def test_a_stream_tells_its_usage_when_asked(read: Any) -> None:
    usage = read["with_usage"]["usage"]
    assert usage is not None
    assert (usage["input_tokens"], usage["output_tokens"]) == tuple(
        read["plain"]["usage"][name] for name in ("input_tokens", "output_tokens")
    )
    assert read["streamed"]["usage"] is None


@pytest.mark.parametrize("name", ["called", "called_streamed"])
def test_a_tool_is_called(read: Any, name: str) -> None:
    (call,) = read[name]["tool_calls"]
    assert call["name"] == "get_weather" and call["args"]["city"] in ("Rome", "Paris") and call["id"]
    assert read[name]["finish_reason"] == "tool_calls"


def test_the_tools_result_is_answered(read: Any) -> None:
    assert read["after_the_call"]["content"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_has_the_class_that_was_asked_for(read: Any, method: str) -> None:
    assert set(read[method]) == {"name", "age"} and 0 <= read[method]["age"] <= 120
