"""A grammar that begins behind the reasoning: what goes to the core, and how the answer is read."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from fake_core import Answer
from test_responses import ask as ask_response
from test_tools import FORCED, NAMED, PARIS, USER, ask
from tooled import TOKENIZER, Tooled, opened, says

from common.wire import EndReason
from scheduler_svc.frontend.parsing.choice import reasoning_marks
from scheduler_svc.frontend.parsing.marked_reasoning import MarkedSplitter, Marks, ReasoningPlace
from scheduler_svc.frontend.parsing.parts import Content, Reasoning, merged

START, END = TOKENIZER.token_to_id("<think>"), TOKENIZER.token_to_id("</think>")
JSON: dict[str, Any] = {"tools": None, "response_format": {"type": "json_object"}}
SPELLED = [token for part in ("</thi", "nk>") for token in TOKENIZER.encode(part, add_special_tokens=False).ids]
"""What ends reasoning, without its token."""


def begins(tooled: Tooled) -> tuple[int, int]:
    """Of the constraint that has gone to the core last."""
    constraint = tooled.core.requests[-1].params.constraint
    return constraint.reasoning_start, constraint.reasoning_end


def encoded(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("model", "said", "marks"),
    [("thinks", "So it is.\n", (-1, END)), ("may think", "<think>\nSo it is.", (START, END))],
)
def test_an_answer_behind_reasoning(tooled: Tooled, model: str, said: str, marks: tuple[int, int]) -> None:
    says(tooled, f"{said}</think>{PARIS}")
    told = ask(tooled, model, **JSON)
    assert (told["reasoning_content"], told["content"], told["finish_reason"]) == ("So it is.", PARIS, "stop")
    assert begins(tooled) == marks
    assert ask(tooled, model, include_reasoning=False, **JSON)["content"] == PARIS
    says(tooled, f"{said}</think>{FORCED}")
    told = ask(tooled, model, tool_choice="required")
    assert (told["reasoning_content"], told["content"], told["finish_reason"]) == ("So it is.", "", "tool_calls")
    assert [name for name, _ in told["tool_calls"]] == ["get_weather", "f"] and begins(tooled) == marks
    assert ask(tooled, model, tool_choice=NAMED)["tool_calls"][0] == ("get_weather", PARIS)
    response = ask_response(tooled, model=model, text={"format": {"type": "json_object"}})
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"] and begins(tooled) == marks
    counted = len(encoded(f"{said}</think>"))
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": counted}


def test_reasoning_that_max_tokens_cuts(tooled: Tooled) -> None:
    says(tooled, "So it is", EndReason.LENGTH)
    for body in (JSON, {"tool_choice": "required"}):
        told = ask(tooled, "thinks", **body)
        assert told == {"content": "", "reasoning_content": "So it is", "tool_calls": [], "finish_reason": "length"}


def test_an_answer_without_reasoning(tooled: Tooled) -> None:
    """The model need not begin any; where the prompt has closed it, and where the answer goes on, it cannot."""
    says(tooled, PARIS)
    assert ask(tooled, "may think", **JSON)["content"] == PARIS and begins(tooled) == (START, END)
    closed = {"chat_template_kwargs": {"enable_thinking": False}}
    assert ask(tooled, "may think", **closed, **JSON)["content"] == PARIS and begins(tooled) == (-1, -1)
    turns = [USER, {"role": "assistant", "content": "I am"}]
    goes_on = {"messages": turns, "continue_final_message": True}
    assert ask(tooled, "thinks", **goes_on, **JSON)["content"] == PARIS and begins(tooled) == (-1, -1)
    turns[0] = {"role": "user", "content": "What is <think>?"}
    assert ask(tooled, "thinks", **goes_on, **JSON)["content"] == PARIS and begins(tooled) == (-1, -1)
    says(tooled, f"so</think>{PARIS}")
    turns[-1] = {"role": "assistant", "content": "<think>I am"}
    told = ask(tooled, "thinks", **goes_on, **JSON)
    assert (told["reasoning_content"], told["content"], begins(tooled)) == ("so", PARIS, (-1, END))
    ask(tooled, "thinks", tools=None)
    assert begins(tooled) == (-1, -1), "nothing is bounded"
    tooled.post("/v1/completions", model="thinks", prompt="Hello", guided_regex="a")
    assert begins(tooled) == (-1, -1), "a completion has no reasoning"


@pytest.mark.parametrize("stop", [None, "ZZ", "</x"])
def test_the_answer_begins_at_the_token(tooled: Tooled, stop: str | None) -> None:
    """Not where the thoughts spell the tag; white space is the grammar's; and a tag within the answer is its text."""
    answer = " </think> <think>x"
    tooled.core.answer(Answer([*encoded("So "), *SPELLED, *encoded(f" it is. </think>{answer}")]))
    told = ask(tooled, "thinks", tools=None, guided_regex=".*", stop=stop)
    assert (told["reasoning_content"], told["content"]) == ("So </think> it is.", answer)
    spelled = [*encoded("<thi"), *encoded("nk>x</think>y")]
    tooled.core.answer(Answer(spelled))
    told = ask(tooled, "may think", tools=None, guided_regex=".*", stop=stop)
    assert (told["reasoning_content"], told["content"]) == ("", "<think>x</think>y")


def test_stop_strings_end_reasoning_as_ever(tooled: Tooled) -> None:
    says(tooled, f"So it is.</think>{PARIS}")
    for more in (JSON, {"tools": None}):
        told = ask(tooled, "thinks", stop="it", **more)
        assert (told["reasoning_content"], told["content"], told["finish_reason"]) == ("So", "", "stop")


def test_the_reasoning_is_that_of_the_setting(tmp_path: Path) -> None:
    with opened(tmp_path, ["thinks"], reasoning_parser="none") as service:
        says(service, PARIS)
        assert ask(service, "thinks", **JSON)["content"] == PARIS and begins(service) == (-1, -1)


def test_marks_of_a_prompt() -> None:
    def marks(prompt: str, own: str | None = None, **known: int) -> Marks | None:
        names = {"<think>": known.get("start"), "</think>": known.get("end")}
        return reasoning_marks(prompt, own, names.get)

    assert marks("<a>\n<think>\n", start=1, end=2) == marks("<a><think>", end=2) == Marks(None, 2)
    assert marks("<a>\n", start=1, end=2) == marks("<think></think>x<a>", start=1, end=2) == Marks(1, 2)
    assert marks("<a><think>\n\n</think>\n\n", start=1, end=2) is None
    assert marks("<a>I am", "I am", start=1, end=2) is None
    # Several tokens could spell the marker in many ways.
    assert marks("<a><think>", start=1) is marks("<a>", end=2) is None


@pytest.mark.parametrize("is_open", [False, True])
def test_an_answer_is_split_alike_however_it_is_cut(is_open: bool) -> None:
    pieces = ["<think>"] * (not is_open) + ["\n", " a </th", "ink> b", " ", "</think>", " c</think>"]
    tokens = [1] * (not is_open) + [5, 6, 7, 8, 2, 9]
    wanted = [Reasoning("a </think> b"), Content(" c</think>")]
    for cuts in itertools.product((False, True), repeat=len(pieces)):
        place = ReasoningPlace(Marks(None if is_open else 1, 2))
        splitter = MarkedSplitter(place, is_open=is_open)
        parts, text, length = [], "", 0
        for token, piece, cut in zip(tokens, pieces, cuts, strict=True):
            text, length = text + piece, length + len(piece)
            place.take(token, length)
            if cut:
                parts += splitter.feed(text)
                text = ""
        parts += splitter.feed(text)
        assert merged(parts + splitter.finish()) == wanted
    splitter = MarkedSplitter(place, is_open=is_open)
    parts = [part for character in "".join(pieces) for part in splitter.feed(character)]
    assert merged(parts + splitter.finish()) == wanted, "text that was held for a stop string comes after its tokens"
