"""Calls of tools in a model's text: three formats, and the same result however the text is cut (C36)."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.frontend.parsing.choice import FORMATS, call_parser, tool_call_format
from scheduler_svc.frontend.parsing.message_reader import MessageReader, whole_message
from scheduler_svc.frontend.parsing.parts import Arguments, CallStart, Content, Part, merged

NAMES = frozenset({"f", "get_weather"})
PARIS = '{"city": "Paris {}\\" ]"}'

CASES: dict[str, tuple[str, str, str, list[tuple[str, str]]]] = {
    # format, text, content, calls
    "hermes: one": (
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>',
        "",
        [("get_weather", PARIS)],
    ),
    "hermes: text around two": (
        "hermes",
        'Let me see.\n<tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_call>{"arguments": '
        '{"a": [1, {"b": 2}]}, "name": "f", "id": 5}</tool_call>\nDone.',
        "Let me see.\n\nDone.",
        [("f", "{}"), ("f", '{"a": [1, {"b": 2}]}')],
    ),
    "hermes: no arguments": ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    "hermes: null arguments": ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    "hermes: arguments as text": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("f", '{"a": 1}')],
    ),
    "hermes: a bracket short": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> ok',
        " ok",
        [("f", '{"a": 1}')],
    ),
    "hermes: a bracket too many": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call>',
        "}",
        [("f", '{"a": 1}')],
    ),
    "hermes: the end is missing": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "f", "arguments": {}}',
        "",
        [("f", "{}"), ("f", "{}")],
    ),
    "hermes: the end is cut": ("hermes", '<tool_call>{"name": "f", "arguments": {}}\n</tool_', "", [("f", "{}")]),
    "hermes: cut in the arguments": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "x',
        "",
        [("f", '{"a": "x')],
    ),
    "hermes: cut in the name": ("hermes", 'Hi <tool_call>{"name": "ge', 'Hi <tool_call>{"name": "ge', []),
    "hermes: no JSON": ("hermes", "a <tool_call>f(1)</tool_call> b", "a <tool_call>f(1)</tool_call> b", []),
    "hermes: no name": (
        "hermes",
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        [],
    ),
    "hermes: a name of another type": ("hermes", '<tool_call>{"name": 5}', '<tool_call>{"name": 5}', []),
    "hermes: arguments of another type": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        [],
    ),
    "hermes: a call after what is none": (
        "hermes",
        '<tool_call> no <tool_call>{"name": "f", "arguments": {}}</tool_call>',
        "<tool_call> no ",
        [("f", "{}")],
    ),
    "hermes: half a marker is text": ("hermes", " \n<tool_ca and <", " \n<tool_ca and <", []),
    "hermes: white space alone": ("hermes", " \n ", " \n ", []),
    "hermes: a member without a value": ("hermes", '<tool_call>{"name": }', '<tool_call>{"name": }', []),
    "llama3: bare": ("llama3_json", f'{{"name": "f", "parameters": {PARIS}}}', "", [("f", PARIS)]),
    "llama3: with its type": ("llama3_json", '{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
    "llama3: two": (
        "llama3_json",
        '{"name": "f", "parameters": {}}; {"name": "get_weather", "arguments": {"a": 1}};',
        "",
        [("f", "{}"), ("get_weather", '{"a": 1}')],
    ),
    "llama3: after the tag": (
        "llama3_json",
        'Sure.<|python_tag|>{"name": "f", "parameters": {}};<|python_tag|>{"name": "g", "parameters": {}}',
        "Sure.",
        [("f", "{}"), ("g", "{}")],
    ),
    "llama3: JSON that is an answer": (
        "llama3_json",
        '{"name": "Bob", "parameters": {}}; {"name": "f", "parameters": {}}',
        '{"name": "Bob", "parameters": {}}; {"name": "f", "parameters": {}}',
        [],
    ),
    "llama3: a name is no call": ("llama3_json", '{"name": "f"}', '{"name": "f"}', []),
    "llama3: code": ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    "llama3: text after": ("llama3_json", '{"name": "f", "parameters": {}}; so', "; so", [("f", "{}")]),
    "mistral: an array": (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": [1]}}, {"name": "f", "arguments": {}}]',
        "",
        [("f", '{"a": [1]}'), ("f", "{}")],
    ),
    "mistral: text around": (
        "mistral",
        'One.[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abcdefghi"}] Two [3]',
        "One. Two [3]",
        [("f", "{}")],
    ),
    "mistral: newer": (
        "mistral",
        'Hm[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]get_weather[ARGS]{"b": {}}[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}',
        "Hm",
        [("f", '{"a": 1}'), ("get_weather", '{"b": {}}'), ("f", "{}")],
    ),
    "mistral: an array of others": ("mistral", "[TOOL_CALLS] [5]", "[TOOL_CALLS] [5]", []),
    "mistral: words": ("mistral", "[TOOL_CALLS] I think", "[TOOL_CALLS] I think", []),
    "mistral: too long a name": ("mistral", "[TOOL_CALLS]" + "f" * 300 + "{}", "[TOOL_CALLS]" + "f" * 300 + "{}", []),
    "mistral: the second is none": (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {}}, 5]',
        ", 5]",
        [("f", "{}")],
    ),
}


BARRED: dict[str, tuple[str, str, str, list[tuple[str, str]]]] = {
    # As above. Of the two functions only f may be called.
    "hermes: alone": ("hermes", CASES["hermes: one"][1], CASES["hermes: one"][1], []),
    "hermes: between": (
        "hermes",
        '<tool_call>{"name": "f"}</tool_call> <tool_call>{"name": "g", "arguments": {}}</tool_call>\n'
        '<tool_call>{"name": "f"}</tool_call>',
        ' <tool_call>{"name": "g", "arguments": {}}</tool_call>\n',
        [("f", "{}"), ("f", "{}")],
    ),
    "hermes: cut": ("hermes", CASES["hermes: one"][1][:-20], CASES["hermes: one"][1][:-20], []),
    "llama3: the first": (
        "llama3_json",
        '{"name": "get_weather", "parameters": {}}; {"name": "f", "parameters": {}}',
        '{"name": "get_weather", "parameters": {}}',
        [("f", "{}")],
    ),
    "mistral: in an array": (
        "mistral",
        '[TOOL_CALLS] [{"name": "g", "arguments": {}}, {"name": "f", "arguments": {}}, {"name": "g"}]',
        '[TOOL_CALLS] [{"name": "g", "arguments": {}}, {"name": "g"}]',
        [("f", "{}")],
    ),
    "mistral: newer": ("mistral", 'Hm[TOOL_CALLS]g{"a": 1}[TOOL_CALLS]f{}', 'Hm[TOOL_CALLS]g{"a": 1}', [("f", "{}")]),
}


def read(
    name: str, pieces: list[str], *, parallel: bool = True, allowed: frozenset[str] | None = None
) -> tuple[list[Part], MessageReader]:
    """The parts of a text that comes in these pieces."""
    reader = MessageReader(None, call_parser(name, NAMES, parallel=parallel, allowed=allowed))
    parts = [part for piece in pieces for part in reader.feed(piece)]
    parts += reader.feed("", final=True)
    text = "".join(pieces)
    for part in parts:
        if isinstance(part, Content):
            assert text[part.end - len(part.text) : part.end] == part.text
    return parts, reader


def told(parts: list[Part]) -> dict[str, Any]:
    """The message, without what is random in it."""
    message = whole_message(parts)
    for call in message.get("tool_calls", []):
        call.pop("id")
    return message


def said(parts: list[Part]) -> tuple[str, list[tuple[str, str]]]:
    message = whole_message(parts)
    functions = [call["function"] for call in message.get("tool_calls", [])]
    return message["content"] or "", [(function["name"], function["arguments"]) for function in functions]


@pytest.mark.parametrize("case", CASES)
def test_a_text_is_read_alike_however_it_is_cut(case: str) -> None:
    name, text, content, calls = CASES[case]
    whole, reader = read(name, [text])
    assert said(whole) == (content, calls)
    assert reader.finish_reason("stop") == ("tool_calls" if calls else "stop")
    assert reader.finish_reason("length") == "length"
    cuts = [[text[:i], text[i:]] for i in range(len(text) + 1)]
    for pieces in (list(text), *cuts):
        assert told(read(name, pieces)[0]) == told(whole), pieces


@pytest.mark.parametrize("case", BARRED)
def test_a_call_that_is_not_allowed_is_content(case: str) -> None:
    name, text, content, calls = BARRED[case]
    whole, reader = read(name, [text], allowed=frozenset("f"))
    assert said(whole) == (content, calls)
    assert reader.finish_reason("stop") == ("tool_calls" if calls else "stop")
    cuts = [[text[:i], text[i:]] for i in range(len(text) + 1)]
    for pieces in (list(text), *cuts):
        assert told(read(name, pieces, allowed=frozenset("f"))[0]) == told(whole), pieces


@pytest.mark.parametrize("case", CASES)
def test_parts_come_in_order_and_nothing_is_taken_back(case: str) -> None:
    """A call's name comes once and before its arguments; the calls are numbered in a row."""
    name, text, _, calls = CASES[case]
    parts, _ = read(name, list(text))
    starts = [part for part in parts if isinstance(part, CallStart)]
    assert [start.index for start in starts] == list(range(len(calls)))
    assert len({start.id for start in starts}) == len(starts)
    begun = -1
    for part in parts:
        if isinstance(part, CallStart):
            begun += 1
        elif isinstance(part, Arguments):
            assert part.index == begun
    if name == "mistral":
        assert all(len(start.id) == 9 and start.id.isalnum() for start in starts)


@pytest.mark.parametrize("case", CASES)
def test_calls_one_at_a_time(case: str) -> None:
    name, text, content, calls = CASES[case]
    for pieces in ([text], list(text)):
        assert said(read(name, pieces, parallel=False)[0]) == (content, calls[:1])


def test_arguments_come_while_they_are_written() -> None:
    """Character by character, held back only until the call is certain."""
    text = '<tool_call>{"name": "f", "arguments": {"code": "print(1)"}}</tool_call>'
    reader = MessageReader(None, call_parser("hermes", NAMES, parallel=True))
    came = [reader.feed(character) for character in text]
    begins, ends = text.index('{"code"'), text.index("}}")
    assert not any(came[:begins]) and not any(came[ends + 1 :])
    assert [part.text for parts in came[begins : ends + 1] for part in parts if isinstance(part, Arguments)] == list(
        '{"code": "print(1)"}'
    )


PIECES = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<tool",
        "[TOOL_",
        " ",
        "\n",
    ),
    *(
        '{"name": "f", "arguments": {"a": "}"}}',
        '{"name": "f"',
        '"arguments": {',
        "{",
        "}",
        "[",
        "]",
        ",",
        ";",
        ":",
        '"',
    ),
    *("\\", "null", "f", "text", '"parameters"'),
]


@pytest.mark.parametrize("name", FORMATS)
@given(
    text=st.lists(st.sampled_from(PIECES), max_size=14).map("".join),
    cuts=st.lists(st.integers(0, 200), max_size=6).map(sorted),
    allowed=st.sampled_from([None, frozenset("f"), frozenset("g")]),
)
@settings(max_examples=60, deadline=None)
def test_any_text_in_any_pieces(name: str, text: str, cuts: list[int], allowed: frozenset[str] | None) -> None:
    """The same message; and without a call the text itself."""
    pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(name, [text], allowed=allowed)[0]
    cut, single = (read(name, way, allowed=allowed)[0] for way in (pieces, list(text)))
    assert told(cut) == told(whole) == told(single)
    if not said(whole)[1]:
        assert said(whole)[0] == text


@given(
    st.recursive(
        st.none() | st.booleans() | st.text() | st.integers(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
    )
)
@settings(max_examples=25, deadline=None)
def test_any_arguments_come_through(value: Any) -> None:
    arguments = json.dumps({"a": value})
    texts = {
        "hermes": f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>',
        "llama3_json": f'{{"name": "f", "parameters": {arguments}}}',
        "mistral": f'[TOOL_CALLS] [{{"name": "f", "arguments": {arguments}}}]',
    }
    for name, text in texts.items():
        assert said(read(name, [text])[0]) == ("", [("f", arguments)])


HARD = {
    "failing calls": "<tool_call>{",
    "calls without an end": '<tool_call>{"name":"f","arguments":{}}',
    "brackets": "<tool_call>" + "[{" * 4,
    "white space": " \n",
    "a long argument": '<tool_call>{"name":"f","arguments":{"a":"\\n',
}


@pytest.mark.parametrize("text", HARD.values(), ids=HARD)
def test_the_cost_is_linear_in_the_text(text: str) -> None:
    """Four times the text takes nowhere near sixteen times as long."""

    def seconds(times: int) -> float:
        best = 1e9
        for _ in range(2):
            began = time.process_time()
            read("hermes", [text * times])
            read("hermes", list(text * (times // 16)))
            best = min(best, time.process_time() - began)
        return best

    assert seconds(1600) < 9 * seconds(400) + 0.01


def test_neighbours_are_joined() -> None:
    parts = [Arguments(0, "a"), Arguments(0, "b"), Arguments(1, "c")]
    assert merged(parts) == [Arguments(0, "ab"), Arguments(1, "c")]


TEMPLATES = {
    "<tool_call>\n{{ call | tojson }}\n</tool_call>": "hermes",
    "{{ '[TOOL_CALLS]' }}": "mistral",
    "{{ '<|python_tag|>' }}": "llama3_json",
    'Respond as {"name": function name, "parameters": dictionary of argument name and its value}': "llama3_json",
    "<tool_call>\n<function={{ name }}>": None,
    "{{ messages }}": None,
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_format_that_a_template_tells(template: str) -> None:
    assert tool_call_format("auto", template) == TEMPLATES[template]
    assert [tool_call_format(name, template) for name in ("mistral", "none")] == ["mistral", "none"]
