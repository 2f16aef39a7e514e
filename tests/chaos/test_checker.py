"""The checker finds what is wrong in doctored records, and nothing in right ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.chaos.checker import Excuse, Fault, check, of_plain, text_fault
from tests.chaos.client import Answer, End, take_event
from tests.chaos.schedule import Ask

PIECES = ("In the ", "beginning ", "was the ", "word, and the ", "end.")
USAGE = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
STREAMED = Ask(0, "/v1/completions", {"stream": True}, 0.0)
PLAIN = Ask(1, "/v1/completions", {}, 0.0)
POISONED = Ask(2, "/v1/completions", {}, 0.0, poisoned=True)

Events = list[dict[str, Any]]


def choice(text: str, finish: str | None = None, index: int = 0) -> dict[str, Any]:
    logprobs = {"tokens": [text]}
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish, "stop_reason": None}


def right_events() -> Events:
    *others, last = PIECES
    events: Events = [{"choices": [choice(piece)]} for piece in others]
    return [*events, {"choices": [choice(last, "length")]}, {"choices": [], "usage": USAGE}]


def plain_body(text: str = "".join(PIECES)) -> dict[str, Any]:
    whole = choice(text, "length") | {"logprobs": {"tokens": list(PIECES)}}
    return {"choices": [whole], "usage": USAGE}


EXPECTED = of_plain(plain_body())


def streamed(events: Events, *ends: str, end: End = End.WHOLE, done: int = 1) -> Answer:
    answer = Answer(status=200, end=end)
    for number, event in enumerate(events):
        take_event(answer, b"data: " + json.dumps(event).encode(), float(number))
    for _ in range(done):
        take_event(answer, b"data: [DONE]", 9.0)
    return answer


def answered(status: int, body: Any) -> Answer:
    return Answer(status=status, body=json.dumps(body).encode(), end=End.WHOLE)


def error(kind: str, code: str) -> dict[str, Any]:
    return {"error": {"message": "it failed", "type": kind, "param": None, "code": code}}


def faults(ask: Ask, answer: Answer, *excuses: Excuse) -> list[Fault]:
    expected = None if ask.poisoned else EXPECTED
    return [finding.fault for finding in check(ask, answer, expected, set(excuses))]


def without(place: int) -> Events:
    events = right_events()
    return events[:place] + events[place + 1 :]


def twice(place: int) -> Events:
    events = right_events()
    return events[: place + 1] + events[place:]


def with_piece(place: int, piece: dict[str, Any]) -> Events:
    events = right_events()
    events[place] = {"choices": [piece]}
    return events


def test_right_answers_pass() -> None:
    assert faults(STREAMED, streamed(right_events())) == []
    assert faults(PLAIN, answered(200, plain_body())) == []
    assert faults(STREAMED, streamed(right_events()[:2], end=End.LEFT, done=0)) == []
    assert faults(STREAMED, streamed(right_events()[:2], end=End.BROKEN, done=0), Excuse.FRONTEND) == []


LOST: dict[str, tuple[Ask, Answer]] = {
    "no end": (STREAMED, streamed(right_events()[:3], end=End.STUCK, done=0)),
    "broken connection": (STREAMED, streamed(right_events()[:3], end=End.BROKEN, done=0)),
    "no last event": (STREAMED, streamed(right_events(), done=0)),
    "not finished": (STREAMED, streamed(right_events()[:4])),
    "a piece is missing": (STREAMED, streamed(without(2))),
    "refused": (STREAMED, Answer(end=End.REFUSED)),
    "never answered": (PLAIN, Answer(end=End.STUCK)),
    "a piece is missing in a plain answer": (PLAIN, answered(200, plain_body("In the was the word, and the end."))),
    "an error": (PLAIN, answered(503, error("service_unavailable", "no_executor"))),
    "an error in mid-stream": (STREAMED, streamed([*right_events()[:2], error("server_error", "failed")])),
    "an error without a body": (PLAIN, answered(500, {})),
}


@pytest.mark.parametrize("name", LOST)
def test_a_lost_answer_is_found(name: str) -> None:
    assert Fault.LOST in faults(*LOST[name])


CHANGED: dict[str, Callable[[], tuple[Ask, Answer]]] = {
    "another word": lambda: (STREAMED, streamed(with_piece(2, choice("is the ")))),
    "another word before leaving": lambda: (
        STREAMED,
        streamed(with_piece(1, choice("end "))[:2], end=End.LEFT, done=0),
    ),
    "another end": lambda: (STREAMED, streamed(with_piece(4, choice("end.", "stop")))),
    "other logprobs": lambda: (
        STREAMED,
        streamed(with_piece(1, choice("beginning ") | {"logprobs": {"tokens": ["x"]}})),
    ),
    "a choice too many": lambda: (STREAMED, streamed(with_piece(1, choice("beginning ", index=1)))),
    "another plain answer": lambda: (PLAIN, answered(200, plain_body("In the ending."))),
    "another usage": lambda: (PLAIN, answered(200, plain_body() | {"usage": USAGE | {"completion_tokens": 6}})),
    "another shape": lambda: (PLAIN, answered(200, {"choices": None})),
    "an answer to poison": lambda: (POISONED, answered(200, plain_body())),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_answer_is_found(name: str) -> None:
    found = faults(*CHANGED[name]())
    assert Fault.CHANGED in found


DOUBLED: dict[str, Answer] = {
    "a piece": streamed(twice(2)),
    "all pieces so far": streamed(right_events()[:3] + right_events()),
    "a piece before leaving": streamed(twice(1)[:3], end=End.LEFT, done=0),
    "the finish": streamed([*right_events()[:5], {"choices": [choice("", "length")]}]),
    "the end": streamed(right_events(), done=2),
}


@pytest.mark.parametrize("name", DOUBLED)
def test_a_doubled_answer_is_found(name: str) -> None:
    assert Fault.DUPLICATED in faults(STREAMED, DOUBLED[name])


def test_something_after_the_end_of_a_stream_is_found() -> None:
    answer = streamed(right_events())
    take_event(answer, b'data: {"choices": []}', 10.0)
    assert faults(STREAMED, answer) == [Fault.DUPLICATED]


@pytest.mark.parametrize(
    ("excuse", "status", "kind", "code"),
    [
        (Excuse.HOLD, 503, "service_unavailable", "no_executor"),
        (Excuse.SHUTDOWN, 503, "service_unavailable", "shutting_down"),
        (Excuse.POISON, 500, "server_error", "failed"),
    ],
)
def test_an_excuse_allows_its_own_error_alone(excuse: Excuse, status: int, kind: str, code: str) -> None:
    ask = POISONED if excuse is Excuse.POISON else PLAIN
    assert faults(ask, answered(status, error(kind, code)), excuse) == []
    assert faults(ask, answered(status, error(kind, code))) == [Fault.LOST]
    assert faults(ask, answered(status, error(kind, "other")), excuse) == [Fault.LOST]
    assert faults(ask, answered(500 if status == 503 else 503, error(kind, code)), excuse) == [Fault.LOST]
    assert faults(ask, Answer(end=End.BROKEN, status=200), excuse) == [Fault.LOST]


def test_what_came_before_an_allowed_error_is_compared_too() -> None:
    last = error("service_unavailable", "no_executor")
    assert faults(STREAMED, streamed([*right_events()[:2], last]), Excuse.HOLD) == []
    assert faults(STREAMED, streamed([*with_piece(1, choice("end "))[:2], last]), Excuse.HOLD) == [Fault.CHANGED]


@pytest.mark.parametrize(
    ("text", "fault"),
    [("abcdef", None), ("abcabcdef", Fault.DUPLICATED), ("abcdefef", Fault.DUPLICATED), ("abcdecdef", Fault.DUPLICATED),
     ("abef", Fault.LOST), ("abcd", Fault.LOST), ("", Fault.LOST), ("abcxef", Fault.CHANGED),
     ("abcdefg", Fault.CHANGED)],
)  # fmt: skip
def test_texts_are_told_apart(text: str, fault: Fault | None) -> None:
    assert text_fault(text, "abcdef", is_prefix=False) is fault
