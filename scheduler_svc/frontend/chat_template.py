"""Chat templates, rendered as `transformers` renders them: sandboxed Jinja with its few extra names."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from scheduler_svc.http.errors import invalid

CONTINUE_MARK = "GILIR_CONTINUE_HERE "
RESERVED = ("messages", "tools", "documents", "add_generation_prompt")


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}` marks text for training; here its body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled template with the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self._special_tokens = special_tokens
        self._template: jinja2.Template | None = None
        self._problem = "the model has no chat template; use /v1/completions"
        self.source = source
        self.names_developer = "developer" in source
        self.names_tools = re.search(r"\btools\b", source) is not None
        if source:
            try:
                self._template = _environment().from_string(source)
            except Exception as error:  # templates are not ours; whatever they hold, the model's other uses go on
                self._problem = f"the model's chat template cannot be compiled: {error}"

    def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        variables: dict[str, Any],
        tools: Sequence[dict[str, Any]] = (),
    ) -> str:
        """The prompt text. Raises `ApiError` 400 with the template's own message."""
        if self._template is None:
            raise invalid("messages", self._problem, "no_chat_template")
        try:
            return self._template.render(
                **{
                    **self._special_tokens,
                    **variables,
                    "messages": messages,
                    "tools": list(tools) or None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except Exception as error:  # whatever a template runs into, it was these messages that led there
            raise invalid("messages", f"chat template: {error}", "chat_template_error") from error

    def render_open(
        self, messages: list[dict[str, Any]], variables: dict[str, Any], tools: Sequence[dict[str, Any]] = ()
    ) -> str:
        """The prompt text up to the end of the last message's content, so that the model goes on with that message."""
        final = messages[-1]["content"]
        marked = [*messages[:-1], {**messages[-1], "content": final + CONTINUE_MARK}]
        text = self.render(marked, False, variables, tools)
        place = text.rfind(CONTINUE_MARK.strip())
        if place < 0:
            raise invalid("continue_final_message", "the chat template does not show the final message's content")
        if text[place : place + len(CONTINUE_MARK)] == CONTINUE_MARK:
            return text[:place]
        return text[:place].rstrip()
