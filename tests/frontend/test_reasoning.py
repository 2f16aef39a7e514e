"""Reasoning split from the answer, and from the calls after it, however the text is cut."""

from __future__ import annotations

import pytest

from scheduler_svc.frontend.parsing.choice import call_parser, opens_reasoning, splits_reasoning
from scheduler_svc.frontend.parsing.message_reader import MessageReader, whole_message
from scheduler_svc.frontend.parsing.parts import Content
from scheduler_svc.frontend.parsing.reasoning import ReasoningSplitter

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
CASES: dict[str, tuple[bool, str, str, str]] = {
    # the prompt opens it, text, reasoning, content
    "closed": (False, "<think>\nSo it is.\n</think>\n\nYes.", "So it is.", "Yes."),
    "after white space": (False, " \n<think>a  b</think> Yes. ", "a  b", "Yes. "),
    "empty": (False, "<think>\n\n</think>\n\nYes.", "", "Yes."),
    "none": (False, " Yes. <think>no</think>", "", " Yes. <think>no</think>"),
    "never closed": (False, "<think> So </thin k ", "So </thin k", ""),
    "cut in the end": (False, "<think> So \n</thi", "So \n</thi", ""),
    "cut in the beginning": (False, " <thi", "", " <thi"),
    "white space alone": (False, "\n ", "", "\n "),
    "opened by the prompt": (True, "\nSo it is.</think>Yes.", "So it is.", "Yes."),
    "opened twice": (True, "\n<think>\nSo.</think>Yes.", "So.", "Yes."),
    "opened and cut": (True, "So <", "So <", ""),
    "opened and cut at once": (True, "<thi", "<thi", ""),
    "a call within is a thought": (False, f"<think>{CALL}</think>Yes.", CALL, "Yes."),
}


def read(is_open: bool, pieces: list[str], *, calls: bool = False, include: bool = True) -> dict[str, object]:
    parser = call_parser("hermes", frozenset({"f"}), parallel=True) if calls else None
    reader = MessageReader(ReasoningSplitter(is_open=is_open), parser, include_reasoning=include)
    parts = [part for piece in pieces for part in reader.feed(piece)] + reader.feed("", final=True)
    text = "".join(pieces)
    for part in parts:
        if isinstance(part, Content):
            assert text[part.end - len(part.text) : part.end] == part.text
    message = whole_message(parts)
    for call in message.get("tool_calls", []):
        call.pop("id")
    return message


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("calls", [False, True])
def test_an_answer_is_split_alike_however_it_is_cut(case: str, calls: bool) -> None:
    is_open, text, reasoning, content = CASES[case]
    wanted: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
    silent = dict(wanted)
    if reasoning:
        wanted |= {"reasoning_content": reasoning, "reasoning": reasoning}
    for pieces in ([text], list(text), *([text[:i], text[i:]] for i in range(len(text)))):
        assert read(is_open, pieces, calls=calls) == wanted, pieces
        assert read(is_open, pieces, calls=calls, include=False) == silent


def test_a_call_after_the_reasoning() -> None:
    text = f"<think>Which?</think>\n\nThis.\n{CALL}"
    for pieces in ([text], list(text)):
        message = read(False, pieces, calls=True)
        assert (message["reasoning"], message["content"]) == ("Which?", "This.\n")
        assert message["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]


def test_where_there_may_be_reasoning() -> None:
    assert splits_reasoning("auto", "{{ content.split('</think>') }}") and not splits_reasoning("auto", "{{ x }}")
    assert splits_reasoning("think", "{{ x }}") and not splits_reasoning("none", "</think>")
    assert opens_reasoning("<|assistant|>\n<think>\n", None)
    assert not opens_reasoning("<|assistant|>\n<think>\n\n</think>\n\n", None)
    assert not opens_reasoning("What is <think>?<|assistant|>", None)


@pytest.mark.parametrize("before", ["", "</think><think>"])
@pytest.mark.parametrize(
    ("template", "own", "opens"),
    [
        ("{}", "<think>\nI am", True),
        ("{}", " <think>", True),
        ("{}", "<think>\nI am</think> so", False),
        ("{}", "I am", False),
        ("{}", "So <think> it is", False),  # an answer that does not begin with it has no reasoning
        ("{}", "", False),
        ("<think>\n{}", "I am", True),
        ("<think>\n{}", "", True),
        ("<think>\n\n</think>\n\n{}", "I am", False),
    ],
)
def test_a_prompt_that_ends_within_the_answer(before: str, template: str, own: str, opens: bool) -> None:
    """Whatever others have said `before`, who may write tags, too."""
    assert opens_reasoning(f"<|user|>{before}<|assistant|>" + template.format(own), own) is opens
    assert opens_reasoning(f"<|user|>{before}<|assistant|>" + template.format(own).rstrip(), own + " \n") is opens
