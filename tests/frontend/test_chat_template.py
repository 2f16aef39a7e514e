"""Templates render as `transformers` renders them; what goes wrong is the client's error, with the template's words."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers_for_tests import CHATML, LLAMA_CHAT, TOOL_CHAT
from transformers.utils.chat_template_utils import render_jinja_template

from scheduler_svc.frontend.chat_template import ChatTemplate
from scheduler_svc.frontend.messages import read_messages
from scheduler_svc.http.errors import ApiError
from scheduler_svc.http.fields import Fields

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TURNS = [
    {"role": "user", "content": "Hello <b> & 'you'"},
    {"role": "assistant", "content": " Hi! "},
    {"role": "user", "content": "  bye  "},
]
ODD = """
{%- set ns = namespace(n=0) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- continue %}
    {%- endif %}
    {%- set ns.n = ns.n + 1 %}
    {{- message | tojson }}
    {{- {'a': '<&>', 'b': 'é'} | tojson(indent=2) }}
    {%- if ns.n == 2 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{% if tools is none and documents is none %}no tools{% endif %}
{{ pad_token }}{{ bos_token }}
"""


def render(source: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    return ChatTemplate(source, SPECIAL).render(messages, variables.pop("add_generation_prompt", True), variables)


@pytest.mark.parametrize("source", [CHATML, LLAMA_CHAT, ODD])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_rendering_equals_that_of_transformers(source: str, add_generation_prompt: bool) -> None:
    theirs = render_jinja_template([TURNS], None, None, source, add_generation_prompt=add_generation_prompt, **SPECIAL)
    assert render(source, TURNS, add_generation_prompt=add_generation_prompt) == theirs[0][0]


def test_tools_are_rendered_as_transformers_renders_them() -> None:
    function = {"name": "f", "description": "<é>", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": [1, "é"]}}}
    turns = [
        TURNS[0],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    theirs = render_jinja_template([turns], tools, None, TOOL_CHAT, add_generation_prompt=True, **SPECIAL)
    template = ChatTemplate(TOOL_CHAT, SPECIAL)
    assert template.names_tools and not ChatTemplate(CHATML, SPECIAL).names_tools
    assert template.render(turns, True, {}, tools) == theirs[0][0]
    theirs = render_jinja_template([TURNS[:2]], tools, None, TOOL_CHAT, continue_final_message=True, **SPECIAL)
    assert template.render_open(TURNS[:2], {}, tools) == theirs[0][0]


@pytest.mark.parametrize("source", [CHATML, LLAMA_CHAT, "{% for m in messages %}{{ m.content | trim }}|{% endfor %}"])
@pytest.mark.parametrize("content", ["Once upon", " a time ", "a time \n"])
def test_continuing_the_final_message_equals_that_of_transformers(source: str, content: str) -> None:
    turns = [*TURNS[:1], {"role": "assistant", "content": content}]
    theirs = render_jinja_template([turns], None, None, source, continue_final_message=True, **SPECIAL)
    assert ChatTemplate(source, SPECIAL).render_open(turns, {}) == theirs[0][0]


def test_a_final_message_that_is_not_shown_cannot_be_continued() -> None:
    with pytest.raises(ApiError, match="does not show"):
        ChatTemplate("nothing", SPECIAL).render_open(TURNS, {})


def test_the_templates_own_error_is_told() -> None:
    with pytest.raises(ApiError, match="Conversation roles must alternate") as caught:
        render(LLAMA_CHAT, [TURNS[0], TURNS[0]])
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{{ messages + 1 }}",
        "{{ undefined_thing.attribute }}",
    ],
)
def test_the_sandbox_and_failing_templates_give_400(source: str) -> None:
    with pytest.raises(ApiError) as caught:
        render(source, TURNS)
    assert caught.value.status == 400


@pytest.mark.parametrize(("source", "text"), [("", "has no chat template"), ("{% if %}", "cannot be compiled")])
def test_no_usable_template(source: str, text: str) -> None:
    with pytest.raises(ApiError, match=text):
        render(source, TURNS)


def test_variables_reach_the_template() -> None:
    assert render("{{ enable_thinking }}", TURNS, enable_thinking=False) == "False"


def read(*messages: Any, developer_as_system: bool = False) -> list[dict[str, Any]]:
    return read_messages(Fields({"messages": list(messages)}), developer_as_system=developer_as_system)


def test_text_parts_are_joined_with_a_newline() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert read({"role": "user", "content": parts}) == [{"role": "user", "content": "one\ntwo"}]


def test_null_is_left_out_and_null_content_is_empty() -> None:
    assert read({"role": "assistant", "content": None, "name": None}) == [{"role": "assistant", "content": ""}]


def test_tool_calls_of_earlier_turns_get_their_arguments_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    message = read({"role": "assistant", "content": None, "tool_calls": [call]})[0]
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert message["content"] == ""


def test_developer_becomes_system_where_the_template_knows_no_developer() -> None:
    message = {"role": "developer", "content": "x"}
    assert read(message, developer_as_system=True)[0]["role"] == "system"
    assert read(message)[0]["role"] == "developer"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[0]"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "wizard", "content": "x"}, "messages[0].role"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [5]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": "x", "name": 5}, "messages[0].name"),
        ({"role": "assistant", "tool_calls": 5}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0].function"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_odd_messages_are_refused_by_name(message: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(message)
    assert (caught.value.status, caught.value.param) == (400, param)
