"""A grammar behind reasoning, whichever executor runs the sequence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import MODEL, Stack

END = "<|system|>"
"""A token of the embedded model that is made to end reasoning."""
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 30}, "sky": {"enum": ["clear", "cloudy", "rain"]}},
    "required": ["city", "sky"],
}


@pytest.fixture
def thinking_model(tmp_path: Path) -> Path:
    """The embedded model, one of whose tokens is `</think>` and whose prompts end with `<think>`."""
    folder = tmp_path / "thinking"
    shutil.copytree(MODEL, folder)
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text("utf-8").replace(END, "</think>"), "utf-8")
    template = folder / "chat_template.jinja"
    text = template.read_text("utf-8").replace("<|assistant|>' -}}\n{%- endif", "<|assistant|><think>' -}}\n{%- endif")
    template.write_text(text + "{# </think> #}", "utf-8")
    return folder


def deltas(stack: Stack, **body: Any) -> Iterator[dict[str, Any]]:
    """Of a streamed chat."""
    with stack.client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))["choices"][0]


def joined(choices: list[dict[str, Any]]) -> tuple[str, str, str]:
    """Reasoning, content, finish reason."""
    reasoning = "".join(choice["delta"].get("reasoning_content", "") for choice in choices)
    content = "".join(choice["delta"].get("content", "") for choice in choices)
    return reasoning, content, str(choices[-1]["finish_reason"])


@pytest.mark.nightly
@pytest.mark.parametrize("within", [True, False], ids=["within the reasoning", "behind it"])
def test_a_bounded_answer_survives_kill_9(start: Callable[..., Stack], thinking_model: Path, within: bool) -> None:
    stack = start()
    flags = ("--model", str(thinking_model), "--dtype", "float32", "--threads", "1", "--max-num-seqs", "4")
    first = stack.services.start_executor(*flags, name="one")
    stack.ready()
    end = json.loads((thinking_model / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]["</think>"]
    body = {
        "messages": [{"role": "user", "content": "The weather?"}], "temperature": 1, "seed": 5, "max_tokens": 400,
        "logit_bias": {str(end): 9}, "response_format": {"type": "json_schema", "json_schema": {"schema": WEATHER}},
    }  # fmt: skip
    undisturbed = joined(list(deltas(stack, **body)))
    reasoning, content, reason = undisturbed
    assert len(reasoning) > 20 and json.loads(content)["sky"] in ("clear", "cloudy", "rain") and reason == "stop"
    events = deltas(stack, **body)
    begun = [next(events), next(events)]
    while not within and not begun[-1]["delta"].get("content"):
        begun.append(next(events))
    assert ("content" in begun[-1]["delta"]) is not within
    first.kill()
    stack.services.processes.remove(first)
    stack.services.start_executor(*flags, name="two")
    assert joined(begun + list(events)) == undisturbed
    stack.until_idle()
    assert stack.metric("gilir_executors_lost_total") == 1
